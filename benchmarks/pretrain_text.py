"""Pre-train the embedded text models on questions and answers: python -m benchmarks.pretrain_text --help.

`text_mini` is an encoder of BERT's architecture. Its embeddings start as singular vectors of the positive
pointwise mutual information of tokens that occur near each other (Levy and Goldberg, Neural Word Embedding
as Implicit Matrix Factorization, 2014, section 5). It learns to fill in masked tokens (Devlin et al., BERT,
2019, section 3.1), and its first token to tell which two damaged copies are of one sentence (the contrastive
loss of Gao et al., SimCSE, 2021, equation 1).
`lm_mini` is a decoder of Llama's architecture that learns to predict the next token.

No label of any data set is used, and no text of BANKING77. Of CLINC150, GSM8K and MedQuAD only what
`texts` reads is used; rayfed/models/weights/README.md names their licences (CC BY 3.0, MIT, CC BY 4.0).
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rayfed.seeds import derive, generator, seeded
from rayfed.terminal.console import say

VOCABULARY = 2048
LENGTH = 24
"""Tokens of a text of the encoder."""
ROWS = 40
"""Sentences of a batch of the encoder, each damaged twice."""
WINDOW = 96
"""Tokens of a text of the decoder."""
MASKED = 0.15
TEMPERATURE = 0.05
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
FEWEST_LETTERS = 12


def texts(root: Path) -> tuple[list[str], list[tuple[str, str]]]:
    """Sentences, and pairs of a question and its answer, of the training parts of three data sets.

    Args:
        root: Folder with clinc150/, gsm8k/ and medquad/.
    """
    clinc = json.loads((root / "clinc150" / "data_full.json").read_text("utf-8"))
    sentences = [text for text, _ in clinc["train"]] + [text for text, _ in clinc["oos_train"]]
    pairs = []
    for line in (root / "gsm8k" / "train.jsonl").read_text("utf-8").splitlines():
        row = json.loads(line)
        sentences += _sentences(row["question"])
        pairs.append((row["question"], re.sub(r"<<.*?>>|####", "", row["answer"])))
    for path in sorted((root / "medquad").glob("*/*.xml")):
        for pair in ElementTree.parse(path).getroot().iter("QAPair"):
            question, answer = (
                " ".join((pair.findtext(tag) or "").split()) for tag in ("Question", "Answer")
            )
            if question and answer:
                pairs.append((question, answer))
                sentences += [question, *_sentences(answer)]
    return sentences, pairs


def _sentences(text: str) -> list[str]:
    parts = re.split(r"(?<=[.?!])\s+", text)
    return [part for part in parts if len(part) >= FEWEST_LETTERS]


def word_pieces(sentences: Sequence[str]) -> Any:
    """A tokenizer of lower-case word pieces, with the class token first and the separator last."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    found = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    found.normalizer = normalizers.BertNormalizer(lowercase=True)
    found.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    found.decoder = decoders.WordPiece()
    found.train_from_iterator(
        sentences,
        trainers.WordPieceTrainer(vocab_size=VOCABULARY, special_tokens=list(SPECIAL), show_progress=False),
    )
    ends = [(name, found.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    found.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends
    )
    return found


def byte_pieces(sentences: Sequence[str]) -> Any:
    """A tokenizer of pieces of bytes, which can write every text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    found = Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|end|>", "<|pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    found.train_from_iterator(sentences, trainer)
    return found


class Encoder(nn.Module):
    """BERT with a head for masked tokens, whose weights are those of the embeddings."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import BertConfig, BertModel

        self.config = BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=96,
            num_hidden_layers=6,
            num_attention_heads=4,
            intermediate_size=384,
            max_position_embeddings=128,
            hidden_dropout_prob=0.1,
            attention_probs_dropout_prob=0.1,
            type_vocab_size=2,
        )
        self.bert = BertModel(self.config)
        self.bias = nn.Parameter(torch.zeros(VOCABULARY))

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states, shape (B, L, D), and the pooled first token, shape (B, D). Args: ids: 0 are pads."""
        out = self.bert(input_ids=ids, attention_mask=(ids != 0).long())
        return out.last_hidden_state, out.pooler_output


def masked_loss(model: Encoder, hidden: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy over the masked tokens; `targets` is -100 elsewhere."""
    chosen = targets != -100
    logits = F.linear(hidden[chosen], model.bert.embeddings.word_embeddings.weight, model.bias)
    return F.cross_entropy(logits, targets[chosen])


def contrast(first: Tensor, second: Tensor) -> Tensor:
    """Mean of -log softmax(cosine / temperature) of the right partners, both shape (B, D)."""
    scores = F.normalize(first, dim=-1) @ F.normalize(second, dim=-1).T / TEMPERATURE
    return F.cross_entropy(scores, torch.arange(len(scores)))


def padded(rows: Sequence[Sequence[int]], length: int, fill: int = 0) -> Tensor:
    """Rows of token ids, cut to a length and padded on the right."""
    longest = min(length, max(map(len, rows)))
    return torch.tensor([[*row[:longest], *[fill] * (longest - len(row))] for row in rows])


def masked(ids: Tensor, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Ids of which 15 % are changed (80 % masks, 10 % random, 10 % kept), and these as targets."""
    draw = torch.from_numpy(rng.random(tuple(ids.shape)))
    kind = torch.from_numpy(rng.random(tuple(ids.shape)))
    chosen = (draw < MASKED) & (ids >= len(SPECIAL))
    other = torch.from_numpy(rng.integers(len(SPECIAL), VOCABULARY, tuple(ids.shape)))
    changed = torch.where(
        kind < 0.8, torch.tensor(SPECIAL.index("[MASK]")), torch.where(kind < 0.9, other, ids)
    )
    return torch.where(chosen, changed, ids), torch.where(chosen, ids, -100)


def rate(step: int, steps: int, most: float) -> float:
    """Learning rate: rises over the first twentieth, then falls to zero as half a cosine."""
    warm = max(1, steps // 20)
    return most * min(1.0, (step + 1) / warm) * 0.5 * (1 + math.cos(math.pi * step / steps))


def batches(count: int, size: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Endless random batches of row numbers, each pass over all rows in a new order."""
    while True:
        order = rng.permutation(count)
        for start in range(0, count - size + 1, size):
            yield order[start : start + size]


NEAR = 4
"""Distance up to which tokens are near each other."""


def start_values(rows: Sequence[Sequence[int]], width: int) -> Tensor:
    """Embeddings from how often tokens are near each other, shape (VOCABULARY, width)."""
    counts = np.zeros((VOCABULARY, VOCABULARY))
    stream = np.concatenate(
        [np.array([*row, *[0] * NEAR]) for row in rows]
    )  # sentences are not near each other
    for distance in range(1, NEAR + 1):
        np.add.at(counts, (stream[:-distance], stream[distance:]), 1.0)
    counts += counts.T
    counts[: len(SPECIAL)] = counts[:, : len(SPECIAL)] = 0
    each = counts.sum(1) + 1.0
    smooth = each**0.75
    with np.errstate(divide="ignore"):
        mutual = np.log(counts * smooth.sum() / np.outer(each, smooth))
    mutual = torch.from_numpy(np.maximum(mutual, 0.0)).float()
    u, values, _ = torch.svd_lowrank(mutual, q=width, niter=4)
    found = u * values.sqrt()
    return found * (0.05 / found.std())


def train_encoder(root: Path, folder: Path, steps: int, seed: int) -> None:
    """Train text_mini and write config, weights in float16 and tokenizer into a folder."""
    from transformers import PreTrainedTokenizerFast

    sentences, pairs = texts(root)
    sentences += [question for question, _ in pairs]
    pieces = word_pieces(sentences)
    rows = [one.ids for one in pieces.encode_batch(sentences)]
    with seeded(derive(seed, "text_mini")):
        model = Encoder()
        with torch.no_grad():
            model.bert.embeddings.word_embeddings.weight.copy_(start_values(rows, model.config.hidden_size))
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.01, betas=(0.9, 0.98))
        rng = generator(seed, "text_mini", "batches")
        some = batches(len(rows), ROWS, rng)
        began = time.monotonic()
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = rate(step, steps, 1.5e-3)
            clean = padded([rows[i] for i in next(some)], LENGTH).repeat(2, 1)
            noisy, targets = masked(clean, rng)
            hidden, first = model(noisy)
            one, other = first.chunk(2)
            loss_masked = masked_loss(model, hidden, targets)
            loss = loss_masked + 0.5 * contrast(one, other)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if step % 50 == 0 or step + 1 == steps:
                losses = f"{loss_masked.item():.3f} {loss.item():.3f}"
                say(f"{step} {losses} {time.monotonic() - began:.0f} s")
    folder.mkdir(parents=True, exist_ok=True)
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(
        tokenizer_object=pieces, model_max_length=128, mask_token="[MASK]", **names
    ).save_pretrained(folder)
    model.bert.eval().half().save_pretrained(folder)


def train_decoder(root: Path, folder: Path, steps: int, seed: int) -> None:
    """Train lm_mini and write config, weights in float16 and tokenizer into a folder.

    It reads questions and answers one after the other, as `data.template` puts them together by default.
    """
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    _, pairs = texts(root)
    pieces = byte_pieces([text for pair in pairs for text in pair])
    end = pieces.token_to_id("<|end|>")
    joined = [f"{question}\n{answer}" for question, answer in pairs]
    rows = [[*one.ids, end] for one in pieces.encode_batch(joined)]
    stream = np.array([token for row in rows for token in row], dtype=np.int64)
    with seeded(derive(seed, "lm_mini")):
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCABULARY,
                hidden_size=96,
                num_hidden_layers=4,
                num_attention_heads=4,
                intermediate_size=256,
                max_position_embeddings=512,
                tie_word_embeddings=True,
                bos_token_id=None,
                eos_token_id=end,
                pad_token_id=pieces.token_to_id("<|pad|>"),
            )
        )
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.01, betas=(0.9, 0.98))
        rng = generator(seed, "lm_mini", "batches")
        began = time.monotonic()
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = rate(step, steps, 4e-3)
            first = rng.integers(0, len(stream) - WINDOW - 1, 16)
            ids = torch.from_numpy(stream[first[:, None] + np.arange(WINDOW)])
            loss = model(input_ids=ids, labels=ids).loss
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if step % 50 == 0 or step + 1 == steps:
                say(f"{step} {loss.item():.3f} {time.monotonic() - began:.0f} s")
    folder.mkdir(parents=True, exist_ok=True)
    names = {"eos_token": "<|end|>", "pad_token": "<|pad|>"}
    PreTrainedTokenizerFast(tokenizer_object=pieces, model_max_length=512, **names).save_pretrained(folder)
    model.eval().half().save_pretrained(folder)


def main(argv: Sequence[str] | None = None) -> int:
    """Train one of the models."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=("text_mini", "lm_mini"))
    parser.add_argument("output", type=Path, help="folder to write")
    parser.add_argument("--root", type=Path, required=True, help="folder with clinc150/, gsm8k/ and medquad/")
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    train = train_encoder if args.model == "text_mini" else train_decoder
    train(args.root, args.output, args.steps, args.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
