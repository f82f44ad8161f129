"""Pre-train the embedded text models on questions and answers: python -m benchmarks.pretrain_text --help.

`text_mini` is an encoder of BERT's architecture. Its embeddings start as singular vectors of the positive
pointwise mutual information of tokens that occur near each other (Levy and Goldberg, Neural Word Embedding
as Implicit Matrix Factorization, 2014, section 5). Its pooled first token learns to tell the intent of a
question and which words a damaged sentence has. It also learns which two sentences are of one text (the
contrastive loss of Gao et al., SimCSE, 2021, equation 1). The other tokens learn to fill in masked ones
(Devlin et al., BERT, 2019, section 3.1).
`lm_mini` is a decoder of Llama's architecture that learns to predict the next token.

No text of BANKING77 is used. Of CLINC150 the intents of eight domains are used, and of banking and credit
cards the questions only. rayfed/models/weights/README.md names the licences of CLINC150, GSM8K and MedQuAD
(CC BY 3.0, MIT, CC BY 4.0).
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rayfed.seeds import derive, generator, use_seed
from rayfed.terminal.console import say

WORDS = 4096
"""Word pieces that the encoder knows."""
BYTES = 2048
"""Pieces of bytes that the decoder knows."""
LENGTH = 24
"""Tokens of a text of the encoder."""
ROWS = 64
"""Questions of a batch of the encoder."""
PAIRS = 32
"""Pairs of sentences of a batch of the encoder."""
LEFT_OUT = ("banking", "credit_cards")
"""Domains of CLINC150 whose intents text_mini does not learn, because they are near those of BANKING77."""
UNLABELLED = -100
WINDOW = 96
"""Tokens of a text of the decoder."""
MASKED = 0.15
TEMPERATURE = 0.05
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
FEWEST_LETTERS = 12


def intents(root: Path) -> tuple[list[tuple[str, str]], list[str]]:
    """Training questions of CLINC150: those with their intents, and those of `LEFT_OUT` without.

    Args:
        root: Folder with clinc150/.
    """
    folder = root / "clinc150"
    domains = json.loads((folder / "domains.json").read_text("utf-8"))
    unseen = {intent for domain in LEFT_OUT for intent in domains[domain]}
    found = json.loads((folder / "data_full.json").read_text("utf-8"))
    known = [(text, intent) for text, intent in found["train"] if intent not in unseen]
    return known, [text for text, intent in found["train"] if intent in unseen] + [
        text for text, _ in found["oos_train"]
    ]


def answered(root: Path) -> list[tuple[str, str]]:
    """Questions and their answers, of the training part of GSM8K and of MedQuAD.

    Args:
        root: Folder with gsm8k/ and medquad/.
    """
    pairs = []
    for line in (root / "gsm8k" / "train.jsonl").read_text("utf-8").splitlines():
        row = json.loads(line)
        pairs.append((row["question"], re.sub(r"<<.*?>>|####", "", row["answer"])))
    for path in sorted((root / "medquad").glob("*/*.xml")):
        for pair in ElementTree.parse(path).getroot().iter("QAPair"):
            question, answer = (
                " ".join((pair.findtext(tag) or "").split()) for tag in ("Question", "Answer")
            )
            if question and answer:
                pairs.append((question, answer))
    return pairs


def neighbours(root: Path) -> list[tuple[str, str]]:
    """Pairs of sentences of one text: of GSM8K two of a problem, of MedQuAD question and first sentence.

    Args:
        root: Folder with gsm8k/ and medquad/.
    """
    pairs = []
    for question, answer in answered(root):
        of_question, of_answer = _sentences(question), _sentences(answer)
        if len(of_question) > 1:
            pairs += zip(of_question[::2], of_question[1::2], strict=False)
        elif of_question and of_answer:
            pairs.append((question, of_answer[0]))
    return pairs


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
        trainers.WordPieceTrainer(vocab_size=WORDS, special_tokens=list(SPECIAL), show_progress=False),
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
        vocab_size=BYTES,
        special_tokens=["<|end|>", "<|pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    found.train_from_iterator(sentences, trainer)
    return found


class Encoder(nn.Module):
    """BERT with a head for masked tokens, whose weights are those of the embeddings."""

    def __init__(self, classes: int) -> None:
        """Make it with random values. Args: classes: number of intents."""
        super().__init__()
        from transformers import BertConfig, BertModel

        self.config = BertConfig(
            vocab_size=WORDS,
            hidden_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
            intermediate_size=512,
            max_position_embeddings=128,
            hidden_dropout_prob=0.1,
            attention_probs_dropout_prob=0.1,
            type_vocab_size=2,
            initializer_range=0.08,
        )
        self.bert = BertModel(self.config)
        self.bias = nn.Parameter(torch.zeros(WORDS))
        self.dropout = nn.Dropout(0.1)
        self.intents = nn.Linear(self.config.hidden_size, classes)
        self.words = nn.Linear(self.config.hidden_size, self.config.hidden_size)
        self.word_bias = nn.Parameter(torch.zeros(WORDS))

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states, shape (B, L, D), and the pooled first token, shape (B, D). Args: ids: 0 are pads."""
        out = self.bert(input_ids=ids, attention_mask=(ids != 0).long())
        return out.last_hidden_state, out.pooler_output


def masked_loss(model: Encoder, hidden: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy over the masked tokens; `targets` is -100 elsewhere."""
    chosen = targets != -100
    logits = F.linear(hidden[chosen], model.bert.embeddings.word_embeddings.weight, model.bias)
    return F.cross_entropy(logits, targets[chosen])


def words_loss(model: Encoder, pooled: Tensor, ids: Tensor) -> Tensor:
    """Mean of -log of the softmax over all word pieces of those that a sentence has.

    Args:
        model: The encoder, which predicts the pieces of a sentence from its pooled first token.
        pooled: Pooled first tokens, shape (B, D).
        ids: The sentences without damage, shape (B, L).
    """
    logits = F.linear(model.words(pooled), model.bert.embeddings.word_embeddings.weight, model.word_bias)
    real = (ids >= len(SPECIAL)).float()
    each = -(logits.log_softmax(-1).gather(1, ids) * real).sum(1) / real.sum(1).clamp(min=1)
    return each.mean()


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
    other = torch.from_numpy(rng.integers(len(SPECIAL), WORDS, tuple(ids.shape)))
    changed = torch.where(
        kind < 0.8, torch.tensor(SPECIAL.index("[MASK]")), torch.where(kind < 0.9, other, ids)
    )
    return torch.where(chosen, changed, ids), torch.where(chosen, ids, -100)


def rate(step: int, steps: int, most: float) -> float:
    """Learning rate: rises over the first twentieth, then falls to zero as half a cosine."""
    warm = max(1, steps // 20)
    return most * min(1.0, (step + 1) / warm) * 0.5 * (1 + math.cos(math.pi * step / steps))


def batches(lengths: np.ndarray, size: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Endless random batches of row numbers, each pass over all rows in a new order.

    Args:
        lengths: Tokens of each row; a batch has rows of similar lengths.
        size: Rows of a batch.
        rng: Draws the order.
    """
    while True:
        order = rng.permutation(len(lengths))
        near = np.concatenate(
            [
                part[np.argsort(lengths[part], kind="stable")]
                for part in np.split(order, range(ALIKE * size, len(order), ALIKE * size))
            ]
        )
        starts = rng.permutation(len(near) // size) * size
        for start in starts:
            yield near[start : start + size]


ALIKE = 24
"""Batches among whose rows those of similar lengths are put together."""

NEAR = 4
"""Distance up to which tokens are near each other."""


def start_values(rows: Sequence[Sequence[int]], width: int) -> Tensor:
    """Embeddings from how often tokens are near each other, shape (WORDS, width)."""
    counts = np.zeros((WORDS, WORDS))
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


@dataclass(frozen=True, kw_only=True)
class Sentences:
    """Questions, and pairs of sentences, as tokens.

    Attributes:
        rows: Token ids of each sentence: first the questions, then the two sentences of each pair in turn.
        labels: Intents of the questions, `UNLABELLED` where they are not used, int64, shape (N,).
        classes: Number of intents.
        pairs: Places of the first sentences of all pairs.
    """

    rows: Sequence[Sequence[int]]
    labels: Tensor
    classes: int
    pairs: np.ndarray

    def batches(self, rng: np.random.Generator) -> Iterator[tuple[np.ndarray, bool]]:
        """Places of the sentences of endless batches, and whether they are pairs (every fourth batch)."""
        lengths = np.array([len(row) for row in self.rows])
        questions = batches(lengths[: len(self.labels)], ROWS, rng)
        pairs = batches(lengths[self.pairs], PAIRS, rng)
        while True:
            for _ in range(3):
                yield next(questions), False
            first = self.pairs[next(pairs)]
            yield np.concatenate([first, first + 1]), True


def encoder_losses(model: Encoder, data: Sentences, step: tuple[np.ndarray, bool], rng: Any) -> list[Tensor]:
    """Losses of a batch: of intents or of pairs, of masked tokens, and of the words of a sentence.

    Args:
        model: The encoder.
        data: All sentences.
        step: An element of `Sentences.batches`.
        rng: Chooses the masked tokens.
    """
    places, is_pairs = step
    clean = padded([data.rows[i] for i in places], LENGTH)
    noisy, targets = masked(clean, rng)
    hidden, pooled = model(noisy)
    if is_pairs:
        own = contrast(*pooled.chunk(2))
    else:
        logits = model.intents(model.dropout(pooled))
        own = F.cross_entropy(logits, data.labels[places], ignore_index=UNLABELLED)
    filled = masked_loss(model, hidden, targets)
    return [own, filled, words_loss(model, pooled, clean)]


def train_encoder(
    root: Path, folder: Path, steps: int, seed: int, probe: Path | None = None, known: Path | None = None
) -> None:
    """Train text_mini and write config, weights in float16 and tokenizer into a folder.

    Args:
        root: Folder with clinc150/, gsm8k/ and medquad/.
        folder: Folder to write.
        steps: Optimization steps.
        seed: Seed of start values, batches and masks.
        probe: File for `probed`, which changes nothing of the training.
        known: Folder with a tokenizer to use; None: a new one. The library that makes one breaks ties by
            chance, so that two of them differ in a few pieces.
    """
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    (asked, plain), pairs = intents(root), neighbours(root)
    sentences = [*(text for text, _ in asked), *plain, *(text for pair in pairs for text in pair)]
    names = sorted({intent for _, intent in asked})
    pieces = Tokenizer.from_file(str(known / "tokenizer.json")) if known else word_pieces(sentences)
    data = Sentences(
        rows=[one.ids for one in pieces.encode_batch(sentences)],
        labels=torch.tensor([names.index(intent) for _, intent in asked] + [UNLABELLED] * len(plain)),
        classes=len(names),
        pairs=len(asked) + len(plain) + 2 * np.arange(len(pairs)),
    )
    with use_seed(derive(seed, "text_mini")):
        model = Encoder(data.classes)
        with torch.no_grad():
            start = start_values(data.rows, model.config.hidden_size)
            model.bert.embeddings.word_embeddings.weight.copy_(start)
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.01, betas=(0.9, 0.98))
        rng = generator(seed, "text_mini", "batches")
        began = time.monotonic()
        for step, places in zip(range(steps), data.batches(rng), strict=False):
            losses = encoder_losses(model, data, places, rng)
            descend(
                model,
                optimizer,
                rate(step, steps, 7e-4),
                sum(w * x for w, x in zip(SHARES, losses, strict=True)),
            )
            if step % 100 in (98, 99):
                shown = " ".join(f"{loss.item():.3f}" for loss in losses)
                say(f"{step} {shown} {time.monotonic() - began:.0f} s")
        if probe is not None:
            probed(model, pieces, probe)
    folder.mkdir(parents=True, exist_ok=True)
    tokens = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(
        tokenizer_object=pieces, model_max_length=128, mask_token="[MASK]", **tokens
    ).save_pretrained(folder)
    model.bert.eval().half().save_pretrained(folder)


SHARES = (1.0, 0.2, 1.0)
"""Weights of the losses of `encoder_losses`."""


def descend(model: nn.Module, optimizer: torch.optim.Optimizer, lr: float, loss: Any) -> None:
    """One step of an optimizer at a learning rate, with a gradient of norm 1 at most."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def probed(model: Encoder, pieces: Any, path: Path) -> None:
    """Print how often a linear classifier on the features is right on a fifth of a labelled file.

    Args:
        model: The encoder.
        pieces: Its tokenizer.
        path: CSV file with the columns text and category: the training part of BANKING77.
    """
    with path.open(newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    names = sorted({line["category"] for line in lines})
    y = torch.tensor([names.index(line["category"]) for line in lines])
    rows = [one.ids for one in pieces.encode_batch([line["text"] for line in lines])]
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    model.eval()
    x = torch.empty(len(rows), model.config.hidden_size)
    with torch.no_grad():
        for start in range(0, len(order), 256):
            some = order[start : start + 256]
            x[some] = model(padded([rows[i] for i in some], 128))[1]
    model.train()
    held = torch.arange(len(rows)) % 5 == 0
    x, y, x_held, y_held = x[~held], y[~held], x[held], y[held]
    with use_seed(0):
        head = nn.Linear(x.shape[1], len(names))
        nn.init.normal_(head.weight, std=0.02)
        optimizer = torch.optim.AdamW(head.parameters(), lr=0.001, weight_decay=0.0)
        for _ in range(10):
            for some in torch.randperm(len(x)).split(32):
                optimizer.zero_grad()
                F.cross_entropy(head(x[some]), y[some]).backward()
                optimizer.step()
    right = (head(x_held).argmax(1) == y_held).float().mean()
    say(f"linear classifier: {100 * right:.1f} %")


def train_decoder(root: Path, folder: Path, steps: int, seed: int) -> None:
    """Train lm_mini and write config, weights in float16 and tokenizer into a folder.

    It reads questions and answers one after the other, as `data.template` puts them together by default.
    """
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    pairs = answered(root)
    pieces = byte_pieces([text for pair in pairs for text in pair])
    end = pieces.token_to_id("<|end|>")
    joined = [f"{question}\n{answer}" for question, answer in pairs]
    rows = [[*one.ids, end] for one in pieces.encode_batch(joined)]
    stream = np.array([token for row in rows for token in row], dtype=np.int64)
    with use_seed(derive(seed, "lm_mini")):
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=BYTES,
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
            first = rng.integers(0, len(stream) - WINDOW - 1, 16)
            ids = torch.from_numpy(stream[first[:, None] + np.arange(WINDOW)])
            loss = model(input_ids=ids, labels=ids).loss
            descend(model, optimizer, rate(step, steps, 4e-3), loss)
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
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument(
        "--tokenizer", type=Path, help="folder with a tokenizer for text_mini; else a new one"
    )
    parser.add_argument("--probe", type=Path, help="training part of BANKING77, to score the features on")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    if args.model == "text_mini":
        train_encoder(args.root, args.output, args.steps, args.seed, args.probe, args.tokenizer)
    else:
        train_decoder(args.root, args.output, args.steps, args.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
