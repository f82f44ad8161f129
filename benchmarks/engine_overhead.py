"""Time of the engine: rounds in 2 actors, compared with the same work in plain PyTorch in 2 processes.

By default 16 clients with 64 images each, LoRA of rank 4 on attn.proj and mlp.fc2 of a 12-block ViT of width
64 at 32 x 32 pixels, batch 32, one epoch of SGD. Plain: two processes, half of the clients each, one after
the other, parameters through pipes, a mean in the parent. The engine trains `--group` clients at once
(`train.group`), by default as many as have 256 rows together, and at most 32. Rounds of both kinds alternate;
while one side works, the processes of the other are stopped. Prints the CPU seconds a round of both sides,
which other jobs of the machine change little, and as its last line the ratio of the median times without the
first rounds.

`--shape` takes a network that users have, with random weights, and LoRA of rank 4: `vit_tiny_224` and
`deit_small` with images of 224 x 224 pixels, `roberta_base` with texts of 32 tokens and LoRA of queries and
values. Both sides get the same examples; the plain side trains in float32 with the kernels of torch.

    python benchmarks/engine_overhead.py [--shape toy] [--clients 16] [--images 64] [--batch 32] [--group 8]
                                         [--rounds 12]
"""

from __future__ import annotations

import argparse
import csv
import multiprocessing as mp
import os
import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

RANK = 4
WIDTH = 64
DEPTH = 12
LR = 0.01
WARM_UP = 2
TITLES = ("ray::DriverActor", "ray::rayfed:", "ray::ClientActor", "ray::fit")
"""Beginnings of the titles that Ray gives the processes of the driver and the client actors."""


@dataclass(frozen=True)
class Shape:
    """A network and its examples.

    Attributes:
        name: Value of `--shape`.
        model: Name of timm's model; empty: the toy, or RoBERTa.
        size: Side of an image in pixels, or tokens of a text.
        targets: Adapted layers, as a regular expression of PEFT.
        overrides: Settings of the engine.
    """

    name: str
    model: str
    size: int
    targets: str = r"blocks\.\d+\.(attn\.proj|mlp\.fc2)"
    overrides: tuple[str, ...] = ()

    @property
    def is_text(self) -> bool:
        return self.name == "roberta_base"

    def examples(self, clients: int, each: int) -> tuple[Any, Any]:
        """Inputs, shape (clients, each, ...), and labels of ten classes, shape (clients, each)."""
        import numpy as np

        rng = np.random.default_rng(0)
        labels = np.tile(np.arange(each) % 10, (clients, 1))
        if self.is_text:
            return rng.integers(4, VOCABULARY, (clients, each, self.size - 2)), labels
        return rng.integers(0, 256, (clients, each, self.size, self.size, 3), dtype=np.uint8), labels


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("toy", "", 32),
        Shape("vit_tiny_224", "vit_tiny_patch16_224", 224, overrides=("model=vit_tiny_patch16_224",)),
        Shape("deit_small", "deit_small_patch16_224", 224, overrides=("model=deit_small_patch16_224",)),
        Shape("roberta_base", "", 32, r".*attention\.self\.(query|value)", ("tuning.sites=[query_value]",)),
    )
}
VOCABULARY = 1000
"""Words of the made-up texts, one token each; the embedding has as many rows as RoBERTa's."""


def cpu_of(process: psutil.Process) -> float:
    """CPU seconds that a process has used."""
    return float(sum(process.cpu_times()[:2]))


def roberta() -> Any:
    """RoBERTa base with random weights and a classifier of ten classes."""
    from transformers import RobertaConfig, RobertaForSequenceClassification

    config = RobertaConfig(vocab_size=50265, max_position_embeddings=514, type_vocab_size=1, num_labels=10)
    config.pad_token_id, config.bos_token_id, config.eos_token_id = 1, 0, 2
    return RobertaForSequenceClassification(config)


def plain_model(shape: Shape = SHAPES["toy"]) -> Any:
    """The network of the benchmark, built with timm or transformers and peft alone."""
    import torch
    from peft import LoraConfig, inject_adapter_in_model
    from timm import create_model
    from timm.models.vision_transformer import VisionTransformer

    torch.set_num_threads(1)
    if shape.is_text:
        net: Any = roberta()
    elif shape.model:
        net = create_model(shape.model, pretrained=False, num_classes=10)
    else:
        net = VisionTransformer(
            img_size=32, patch_size=8, embed_dim=WIDTH, depth=DEPTH, num_heads=4, num_classes=10
        )
    net = inject_adapter_in_model(LoraConfig(r=RANK, lora_alpha=RANK, target_modules=shape.targets), net)
    (net.classifier if shape.is_text else net.head).requires_grad_(True)
    return net


def plain_process(pipe: Any, images: Any, labels: Any, batch: int, shape: Shape) -> None:
    """Train its share of the clients each time parameters arrive; answer with one dict per client."""
    import torch
    import torch.nn.functional as F

    net = plain_model(shape)
    mine = {n: p for n, p in net.named_parameters() if p.requires_grad}
    pipe.send({n: p.detach().clone().numpy() for n, p in mine.items()})
    while (sent := pipe.recv()) is not None:
        answers = []
        for x, y in zip(images, labels, strict=True):
            with torch.no_grad():
                for name, value in sent.items():
                    mine[name].copy_(torch.from_numpy(value))
            optimizer = torch.optim.SGD(mine.values(), lr=LR, momentum=0.9)
            net.train()
            for rows in torch.randperm(len(y)).split(batch):
                inputs = torch.from_numpy(x[rows.numpy()])
                if shape.is_text:
                    inputs = F.pad(F.pad(inputs, (1, 0), value=0), (0, 1), value=2)  # begin and end
                else:
                    inputs = (inputs.permute(0, 3, 1, 2).float().div_(255) - 0.5) / 0.5
                optimizer.zero_grad()
                output = net(inputs).logits if shape.is_text else net(inputs)
                F.cross_entropy(output, torch.from_numpy(y[rows.numpy()])).backward()
                optimizer.step()
            answers.append({n: p.detach().clone().numpy() for n, p in mine.items()})
        pipe.send(answers)


class Plain:
    """FedAvg by hand on two processes."""

    def __init__(self, images: Any, labels: Any, batch: int, shape: Shape) -> None:
        context = mp.get_context("spawn")
        self.pipes = []
        self.processes = []
        for half in range(2):
            rows = slice(half * len(images) // 2, (half + 1) * len(images) // 2)
            ours, theirs = context.Pipe()
            process = context.Process(
                target=plain_process, args=(theirs, images[rows], labels[rows], batch, shape), daemon=True
            )
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)
        self.params, _ = (pipe.recv() for pipe in self.pipes)

    def round(self) -> float:
        began = time.perf_counter()
        for pipe in self.pipes:
            pipe.send(self.params)
        answers = [answer for pipe in self.pipes for answer in pipe.recv()]
        self.params = {n: sum(a[n] for a in answers) / len(answers) for n in self.params}
        return time.perf_counter() - began

    def cpu(self) -> float:
        """CPU seconds that its processes have used."""
        return sum(cpu_of(psutil.Process(process.pid)) for process in self.processes)

    def close(self) -> None:
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            pipe.send(None)
            process.join(10)


class Engine:
    """FedAvg of the engine with two client actors, stepped one round at a time."""

    def __init__(self, cache: Path, rounds: int, clients: int, batch: int, group: str, shape: Shape) -> None:
        from rayfed.config.schema import load_config
        from rayfed.engine.session import launch
        from rayfed.experiment.plan import prepared

        config = load_config(
            [
                "algorithm=fedavg",
                *shape.overrides,
                *data_of(cache, clients, shape),
                "model.pretrained=false",
                f"tuning.rank={RANK}",
                "tuning.dropout=0",
                "train.optimizer=sgd",
                f"train.lr={LR}",
                f"train.batch_size={batch}",
                f"train.group={group}",
                f"data.cache={cache}",
                "data.val=0",
                "data.test=0",
                "evaluation.every=0",
                "cluster.actors=2",
                "cluster.dashboard=false",
                f"rounds={rounds}",
            ]
        )
        (cache / "run" / "model").mkdir(parents=True)
        self.held = ExitStack()
        self.rows = self.held.enter_context(launch(prepared(config), cache / "run"))
        self.processes: list[psutil.Process] = []

    def round(self) -> float:
        """Seconds of a round, until its processes are stopped: the driver begins the next one at once."""
        began = time.perf_counter()
        for process in self.processes:
            process.resume()
        next(self.rows)
        if not self.processes:  # Ray gives them their titles when they run
            children = psutil.Process().children(recursive=True)
            self.processes = [c for c in children if " ".join(c.cmdline()).startswith(TITLES)]
        for process in self.processes:
            process.suspend()
        return time.perf_counter() - began

    def cpu(self) -> float:
        """CPU seconds that the driver and the client actors have used."""
        return sum(map(cpu_of, self.processes))

    def close(self) -> None:
        for process in self.processes:
            process.resume()
        for _ in self.rows:
            pass
        self.held.close()


def data_of(folder: Path, clients: int, shape: Shape) -> list[str]:
    """Settings with which the engine reads what `write` wrote."""
    if shape.is_text:
        columns = "data.columns={text: text, label: label, client: client}"
        own = [f"model=hf/{folder / 'model'}", f"model.size={shape.size}", "data.partition.scheme=natural"]
        own.append("data.partition.min_samples=1")
        return ["data=csv", f"data.root={folder / 'texts.csv'}", columns, *own]
    of_all = f"data.partition.clients_per_domain={clients}"
    return ["data=image_folder", f"data.root={folder / 'images'}", "data.name=benchmark", of_all]


def write(folder: Path, inputs: Any, labels: Any, shape: Shape) -> None:
    """Write examples, and the model where it is a folder, as users have them."""
    if not shape.is_text:
        write_images(folder / "images", inputs, labels)
        return
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ["<s>", "<pad>", "</s>", "<unk>"]
    words = {word: i for i, word in enumerate([*special, *(f"w{i}" for i in range(4, VOCABULARY))])}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=made, **names).save_pretrained(folder / "model")
    roberta().save_pretrained(folder / "model")
    with (folder / "texts.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["text", "label", "client"])
        for k, (texts, own) in enumerate(zip(inputs, labels, strict=True)):
            for text, label in zip(texts, own, strict=True):
                rows.writerow([" ".join(f"w{token}" for token in text), f"label {label}", f"client {k}"])


def write_images(folder: Path, images: Any, labels: Any) -> None:
    from PIL import Image

    flat = images.reshape(-1, *images.shape[2:])
    for i, (image, label) in enumerate(zip(flat, labels.reshape(-1), strict=True)):
        target = folder / "all" / str(label)
        target.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(target / f"{i:05d}.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="toy", help="the network and its examples")
    parser.add_argument("--rounds", type=int, default=12, help="steady rounds of each side")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--images", type=int, default=64, help="images of a client")
    parser.add_argument("--batch", type=int, default=32, help="images of a training batch")
    parser.add_argument("--group", help="clients that are trained at once: a number or auto")
    args = parser.parse_args()
    rounds = args.rounds
    group = args.group or str(max(1, min(32, 256 // args.batch)))

    shape = SHAPES[args.shape]
    images, labels = shape.examples(args.clients, args.images)
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), images, labels, shape)
        plain = Plain(images, labels, args.batch, shape)
        engine = Engine(Path(folder), rounds + WARM_UP, args.clients, args.batch, group, shape)
        times: dict[str, list[float]] = {"plain": [], "engine": []}
        used = {"plain": 0.0, "engine": 0.0}
        sides: dict[str, Plain | Engine] = {"plain": plain, "engine": engine}
        for i in range(rounds + WARM_UP):
            for name, side in sides.items():
                before = side.cpu()
                seconds = side.round()
                if i >= WARM_UP:
                    times[name].append(seconds)
                    used[name] += (side.cpu() - before) / rounds
        plain.close()
        engine.close()
    median = {name: statistics.median(values) for name, values in times.items()}
    for name, values in times.items():
        spread = f"{min(values):.3f} to {max(values):.3f}"
        print(f"{name:6}  median {median[name]:.3f} s a round  ({spread}, {len(values)} rounds)")
    print(f"CPU seconds a round: plain {used['plain']:.3f}, engine {used['engine']:.3f}")
    print(f"ratio {median['engine'] / median['plain']:.3f}")


if __name__ == "__main__":
    main()
