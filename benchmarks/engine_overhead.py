"""Time of the engine: rounds in 2 actors, compared with the same work in plain PyTorch in 2 processes.

By default 16 clients with 64 images each, LoRA of rank 4 on attn.proj and mlp.fc2 of a 12-block ViT of width
64 at 32 x 32 pixels, batch 32, one epoch of SGD. Plain: two processes, half of the clients each, one after
the other, parameters through pipes, a mean in the parent. The engine trains `--group` clients at once
(`train.group`), by default as many as have 256 rows together, and at most 32. Rounds of both kinds alternate;
while one side works, the processes of the other are stopped. Prints the CPU seconds a round of both sides,
which other jobs of the machine change little, and as its last line the ratio of the median times without the
first rounds.

    python benchmarks/engine_overhead.py [--clients 16] [--images 64] [--batch 32] [--group 8] [--rounds 12]
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import statistics
import tempfile
import time
from contextlib import ExitStack
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


def cpu_of(process: psutil.Process) -> float:
    """CPU seconds that a process has used."""
    return float(sum(process.cpu_times()[:2]))


def plain_model() -> Any:
    """The network of the benchmark, built with timm and peft alone."""
    import torch
    from peft import LoraConfig, inject_adapter_in_model
    from timm.models.vision_transformer import VisionTransformer

    torch.set_num_threads(1)
    net = VisionTransformer(
        img_size=32, patch_size=8, embed_dim=WIDTH, depth=DEPTH, num_heads=4, num_classes=10
    )
    targets = r"blocks\.\d+\.(attn\.proj|mlp\.fc2)"
    net = inject_adapter_in_model(LoraConfig(r=RANK, lora_alpha=RANK, target_modules=targets), net)
    net.head.requires_grad_(True)
    return net


def plain_process(pipe: Any, images: Any, labels: Any, batch: int) -> None:
    """Train its share of the clients each time parameters arrive; answer with one dict per client."""
    import torch
    import torch.nn.functional as F

    net = plain_model()
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
                pixels = torch.from_numpy(x[rows.numpy()]).permute(0, 3, 1, 2).float().div_(255)
                pixels = (pixels - 0.5) / 0.5
                optimizer.zero_grad()
                F.cross_entropy(net(pixels), torch.from_numpy(y[rows.numpy()])).backward()
                optimizer.step()
            answers.append({n: p.detach().clone().numpy() for n, p in mine.items()})
        pipe.send(answers)


class Plain:
    """FedAvg by hand on two processes."""

    def __init__(self, images: Any, labels: Any, batch: int) -> None:
        context = mp.get_context("spawn")
        self.pipes = []
        self.processes = []
        for half in range(2):
            rows = slice(half * len(images) // 2, (half + 1) * len(images) // 2)
            ours, theirs = context.Pipe()
            process = context.Process(
                target=plain_process, args=(theirs, images[rows], labels[rows], batch), daemon=True
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

    def __init__(self, cache: Path, rounds: int, clients: int, batch: int, group: str) -> None:
        from rayfed.config.schema import load_config
        from rayfed.engine.session import launch
        from rayfed.engine.setup import prepare

        config = load_config(
            [
                "algorithm=fedavg",
                "model.pretrained=false",
                f"tuning.rank={RANK}",
                "tuning.dropout=0",
                f"train.lr={LR}",
                f"train.batch_size={batch}",
                f"train.group={group}",
                "data=image_folder",
                f"data.root={cache / 'images'}",
                f"data.cache={cache}",
                "data.name=benchmark",
                "data.val=0",
                "data.test=0",
                f"data.partition.clients_per_domain={clients}",
                "evaluation.every=0",
                "cluster.actors=2",
                "cluster.dashboard=false",
                f"rounds={rounds}",
            ]
        )
        (cache / "run" / "model").mkdir(parents=True)
        self.held = ExitStack()
        self.rows = self.held.enter_context(launch(prepare(config), config, cache / "run"))
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


def write_images(folder: Path, images: Any, labels: Any) -> None:
    from PIL import Image

    for i, (image, label) in enumerate(zip(images.reshape(-1, 32, 32, 3), labels.reshape(-1), strict=True)):
        target = folder / "all" / str(label)
        target.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(target / f"{i:05d}.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12, help="steady rounds of each side")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--images", type=int, default=64, help="images of a client")
    parser.add_argument("--batch", type=int, default=32, help="images of a training batch")
    parser.add_argument("--group", help="clients that are trained at once: a number or auto")
    args = parser.parse_args()
    rounds = args.rounds
    group = args.group or str(max(1, min(32, 256 // args.batch)))

    import numpy as np

    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (args.clients, args.images, 32, 32, 3), dtype=np.uint8)
    labels = np.tile(np.arange(args.images) % 10, (args.clients, 1))
    with tempfile.TemporaryDirectory() as folder:
        write_images(Path(folder) / "images", images, labels)
        plain = Plain(images, labels, args.batch)
        engine = Engine(Path(folder), rounds + WARM_UP, args.clients, args.batch, group)
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
