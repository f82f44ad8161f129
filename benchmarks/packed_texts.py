"""Processor seconds of texts without pads, compared with the same work in plain PyTorch with dynamic padding.

Everything runs in this process on one thread: rounds of the engine without Ray, with clients one by one and
in groups, both also with padded texts (`train.pack_texts=false`), and the same training with transformers and
peft alone, which pads each batch to its longest text. Rounds alternate, and the first one is left out. Both
sides get the same tokens, LoRA of rank 8 on queries and values, SGD, and no dropout.

`intents`: BANKING77 with a BERT such as MiniLM-L6, 16 clients with 32 texts each, and scoring of the 3,080
test texts. `answers`: MedQuAD, answers only, cut at 256 tokens, with a GPT-2 of 6 layers of width 384 and
random weights, 4 clients with 16 texts each.

    python -m benchmarks.packed_texts intents --data banking77 --model minilm_l6 [--batch 8] [--group 8]
    python -m benchmarks.packed_texts answers --data medquad [--batch 8] [--group 4]
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import torch.nn.functional as F

from rayfed.config.schema import load_config
from rayfed.data.text import Inputs
from rayfed.engine.loop import run_rounds
from rayfed.engine.setup import Setup
from rayfed.executors.inline import InlineExecutor
from rayfed.experiment.plan import prepared
from rayfed.objective import IGNORED

RANK = 8
LR = 0.01
CLIENTS = {"intents": (16, 32), "answers": (4, 16)}
"""Number of clients, and of texts of each."""

SIZE = {"intents": 128, "answers": 256}
SCORED = 256
"""Texts of a batch in scoring."""


def write_intents(source: Path, folder: Path) -> None:
    """Texts of BANKING77 as a file with a column for clients."""
    with (source / "train.csv").open(newline="") as file:
        rows = [*csv.reader(file)][1:]
    random.Random(0).shuffle(rows)
    clients, each = CLIENTS["intents"]
    first = {row[1]: row for row in rows}  # all intents, so that the head has its size
    chosen = [*first.values(), *(row for row in rows if first[row[1]] is not row)][: clients * each]
    random.Random(1).shuffle(chosen)
    with (folder / "texts.csv").open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["text", "label", "client"])
        out.writerows([text, label, f"client {i // each}"] for i, (text, label) in enumerate(chosen))


def write_answers(source: Path, folder: Path) -> None:
    """Questions and answers of MedQuAD, and a GPT-2 with random weights and the tokens of `lm_mini`."""
    from importlib.resources import files

    from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

    pairs = []
    for path in sorted(source.rglob("*.xml")):
        for pair in ElementTree.parse(path).iter("QAPair"):
            question, answer = pair.findtext("Question"), pair.findtext("Answer")
            if question and answer and answer.strip():
                pairs.append((question.strip(), answer.strip()))
    clients, each = CLIENTS["answers"]
    chosen = random.Random(0).sample(pairs, clients * each)
    with (folder / "texts.jsonl").open("w") as file:
        for i, (prompt, completion) in enumerate(chosen):
            row = {"prompt": prompt, "completion": completion, "client": f"client {i // each}"}
            file.write(json.dumps(row) + "\n")
    tokenizer = AutoTokenizer.from_pretrained(str(files("rayfed.models") / "weights" / "lm_mini"))
    settings = GPT2Config(
        vocab_size=len(tokenizer), n_positions=512, n_embd=384, n_layer=6, n_head=6, bos_token_id=0
    )
    torch.manual_seed(0)  # noqa: TID251  (a program of its own)
    GPT2LMHeadModel(settings).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")


def setup_of(kind: str, folder: Path, model: Path, batch: int) -> Setup:
    """The experiment, with clients one by one."""
    columns = "{text: text, label: label, client: client}"
    own = ["data=csv", f"data.root={folder / 'texts.csv'}"]
    if kind == "answers":
        columns = "{prompt: prompt, completion: completion, client: client}"
        own = ["data=jsonl", f"data.root={folder / 'texts.jsonl'}"]
    return prepared(
        load_config(
            [
                *("algorithm=fedavg", *own, f"data.columns={columns}", f"data.cache={folder / 'cache'}"),
                *(
                    "data.partition.scheme=natural",
                    "data.partition.min_samples=1",
                    "data.val=0",
                    "data.test=0",
                ),
                *(f"model=hf/{model}", f"model.size={SIZE[kind]}", "tuning=lora", f"tuning.rank={RANK}"),
                *("tuning.sites=[query_value]", "tuning.dropout=0", f"train.batch_size={batch}"),
                *("train.optimizer=sgd", f"train.lr={LR}", "train.momentum=0.9", "train.group=1"),
                *("evaluation.every=0", "cluster=inline", "rounds=100"),
            ]
        )
    )


def rounds_of(setup: Setup, group: int, packs: bool) -> Callable[[], object]:
    """Takes the next round of an experiment each time that it is called."""
    context = replace(setup.context, train=replace(setup.context.train, pack_texts=packs))
    experiment = replace(setup.experiment, group=group)
    rows = run_rounds(experiment, InlineExecutor(context, setup.weights), setup.start)
    return lambda: next(rows)


def plain_model(kind: str, model: Path, classes: int) -> Any:
    """The network with LoRA, by transformers and peft."""
    import transformers
    from peft import LoraConfig, get_peft_model

    if kind == "intents":
        made = transformers.AutoModelForSequenceClassification.from_pretrained(
            model, num_labels=classes, dtype=torch.float32
        )
        targets, saved = ["query", "value"], ["classifier"]
    else:
        made = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        targets, saved = ["c_attn"], None
    made.config.use_cache = False
    lora = LoraConfig(r=RANK, lora_alpha=RANK, target_modules=targets, modules_to_save=saved)
    return get_peft_model(made, lora).eval()  # without dropout, as the engine leaves it out of frozen layers


def padded(texts: Sequence[np.ndarray[Any, Any]], fill: int = 0) -> torch.Tensor:
    """Numbers of tokens as one batch, padded to the longest text."""
    longest = max(map(len, texts))
    return torch.tensor([[*text.tolist(), *[fill] * (longest - len(text))] for text in texts])


class Plain:
    """The same rounds by hand: each client trains a copy of the global values, which then become the mean."""

    def __init__(self, kind: str, setup: Setup, model: Path, batch: int) -> None:
        self.kind, self.batch = kind, batch
        self.net = plain_model(kind, model, setup.context.num_classes)
        self.live = {name: p for name, p in self.net.named_parameters() if p.requires_grad}
        self.values = {name: p.detach().clone() for name, p in self.live.items()}
        inputs: Any = setup.dataset.images
        self.texts = [inputs.tokens[a:b] for a, b in zip(inputs.starts, inputs.starts[1:], strict=False)]
        self.clients = [own.train for own in setup.partition.listed]
        self.targets = setup.dataset.targets

    def round(self) -> None:
        sums = {name: torch.zeros_like(value) for name, value in self.values.items()}
        for rows in self.clients:
            with torch.no_grad():
                for name, value in self.values.items():
                    self.live[name].copy_(value)
            optimizer = torch.optim.SGD(self.live.values(), lr=LR, momentum=0.9)
            for part in torch.randperm(len(rows)).split(self.batch):
                optimizer.zero_grad()
                self.loss(rows[part.numpy()]).backward()
                optimizer.step()
            for name, value in self.live.items():
                sums[name] += value.detach() / len(self.clients)
        self.values = sums

    def loss(self, rows: np.ndarray[Any, Any]) -> torch.Tensor:
        """The loss of a batch."""
        texts = [self.texts[row] for row in rows]
        logits = self.output(texts)
        if self.kind == "intents":
            return F.cross_entropy(logits, torch.from_numpy(np.asarray(self.targets[rows], np.int64)))
        y = torch.from_numpy(self.targets[rows])[:, : logits.shape[1]]
        return F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=IGNORED)

    def output(self, texts: Sequence[np.ndarray[Any, Any]]) -> torch.Tensor:
        """Logits of a padded batch."""
        mask = padded([np.ones_like(text) for text in texts])
        logits: torch.Tensor = self.net(input_ids=padded(texts), attention_mask=mask).logits
        return logits


def scorings(setup: Setup, plain: Plain, source: Path, model: Path) -> dict[str, Callable[[], object]]:
    """Outputs for the test texts of BANKING77, by the engine in both ways and by hand."""
    from transformers import AutoTokenizer

    with (source / "test.csv").open(newline="") as file:
        texts = [row[0] for row in csv.reader(file)][1:]
    made = AutoTokenizer.from_pretrained(str(model))(texts, truncation=True, max_length=SIZE["intents"])
    rows = [np.array(ids, np.int32) for ids in made["input_ids"]]
    inputs = Inputs(np.concatenate(rows), np.cumsum([0, *map(len, rows)]), SIZE["intents"])
    parts = [slice(i, i + SCORED) for i in range(0, len(rows), SCORED)]

    def by_engine(packs: bool) -> Callable[[], object]:
        context = replace(setup.context, train=replace(setup.context.train, pack_texts=packs))
        net = InlineExecutor(context, setup.weights).worker.model.eval()
        return torch.no_grad()(lambda: [net(torch.from_numpy(inputs[part]).long()) for part in parts])

    by_hand = torch.no_grad()(lambda: [plain.output(rows[part]) for part in parts])
    return {"plain": by_hand, "engine": by_engine(True), "engine, padded": by_engine(False)}


def measured(sides: dict[str, Callable[[], object]], rounds: int) -> Iterator[tuple[str, float, float]]:
    """Name, processor seconds of a call, and their ratio to the first side, whose calls alternate."""
    used = dict.fromkeys(sides, 0.0)
    for i in range(rounds + 1):
        for name, side in sides.items():
            began = time.process_time()
            side()
            used[name] += (time.process_time() - began) / rounds if i else 0.0
    first = next(iter(used.values()))
    for name, seconds in used.items():
        yield name, seconds, seconds / first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=CLIENTS)
    parser.add_argument("--data", type=Path, required=True, help="folder of BANKING77 or MedQuAD")
    parser.add_argument("--model", type=Path, help="folder of a BERT with its tokenizer, for intents")
    parser.add_argument("--batch", type=int, default=8, help="texts of a training batch")
    parser.add_argument("--group", type=int, default=8, help="clients that are trained at once")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        {"intents": write_intents, "answers": write_answers}[args.kind](args.data, folder)
        model = args.model.absolute() if args.kind == "intents" else folder / "model"
        setup = setup_of(args.kind, folder, model, args.batch)
        if setup.context.train.pack_texts is not True:
            raise SystemExit(" ".join(setup.notes))
        plain = Plain(args.kind, setup, model, args.batch)
        sides: dict[str, Callable[[], object]] = {"plain": plain.round}
        for group, packs in ((1, True), (1, False), (args.group, True), (args.group, False)):
            label = "one by one" if group == 1 else f"groups of {group}"
            sides[f"{label}{'' if packs else ', padded'}"] = rounds_of(setup, group, packs)
        for side, seconds, ratio in measured(sides, args.rounds):
            print(f"training, {side:24} {seconds:8.3f} s a round {ratio:7.3f}", flush=True)
        if args.kind == "intents":
            for side, seconds, ratio in measured(scorings(setup, plain, args.data, model), 1):
                print(f"scoring,  {side:24} {seconds:8.3f} s         {ratio:7.3f}", flush=True)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()
