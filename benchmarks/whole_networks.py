"""CPU time of training whole networks, client by client and in groups (`train.group`).

Networks and batches of the field's benchmarks: 50 images for each client of a round (40 train), in batches
of 10, one pass. Clients are run in this process; sizes of groups alternate, and the processor time of whole
rounds is measured, which other jobs of the machine change little. Prints the median milliseconds of a step of
a client, and the share of those of single clients.

    python -m benchmarks.whole_networks [--clients 32] [--groups 4 32] [--repeats 5] [--networks cifar mlp]
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from torch import nn

import rayfed
from rayfed.engine.loop import run_rounds
from rayfed.engine.setup import Setup
from rayfed.executors.client_actor import keep_freed_memory
from rayfed.executors.inline import InlineExecutor
from rayfed.experiment.plan import make_plan
from tests.whole_networks import ResNet, convolutions

IMAGES = 50
BATCH = 10


def cifar() -> nn.Module:
    """1.6 million parameters: two convolutions of 3 x 3, pooling, 128 hidden units, for CIFAR-10."""
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(64 * 14 * 14, 128), nn.ReLU(), nn.Linear(128, 10)),
    )


def emnist() -> nn.Module:
    """Two convolutions of 5 x 5 of images of one channel, and 128 hidden units."""
    return convolutions(1, (16, 32), 128, smooth=False)


def mlp() -> nn.Module:
    """The 2NN of McMahan et al. (2017): 200 units in each of two hidden layers, 199,210 parameters."""
    layers = (nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 10))
    return nn.Sequential(nn.Flatten(), *layers)


def narrow_cifar() -> nn.Module:
    """As `cifar` with half as many channels."""
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(32 * 14 * 14, 128), nn.ReLU(), nn.Linear(128, 10)),
    )


def wide_mlp() -> nn.Module:
    """Two hidden layers of 800 units, 1.3 million parameters."""
    layers = (nn.Linear(784, 800), nn.ReLU(), nn.Linear(800, 800), nn.ReLU(), nn.Linear(800, 10))
    return nn.Sequential(nn.Flatten(), *layers)


def tiny_mlp() -> nn.Module:
    """One hidden layer of 32 units, 2,410 parameters."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def resnet() -> nn.Module:
    """Three residual blocks with GroupNorm."""
    return ResNet((16, 32, 64), nn.ReLU)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "cifar": (cifar, (3, 32, 32)),
    "narrow_cifar": (narrow_cifar, (3, 32, 32)),
    "emnist": (emnist, (1, 32, 32)),
    "resnet": (resnet, (3, 32, 32)),
    "wide_mlp": (wide_mlp, (1, 28, 28)),
    "mlp": (mlp, (1, 28, 28)),
    "tiny_mlp": (tiny_mlp, (1, 8, 8)),
}
"""Networks, and the shape of an image."""


def prepared(name: str, clients: int) -> Setup:
    """An experiment with a network. Args: clients: clients of a round."""
    make, shape = NETWORKS[name]
    rng = np.random.default_rng(0)
    data = {
        f"c{k}": (rng.standard_normal((IMAGES, *shape), np.float32), rng.integers(0, 10, IMAGES))
        for k in range(clients)
    }
    train = {"batch_size": BATCH, "lr": 0.05, "optimizer": "sgd", "group": 2}
    network = rayfed.Model(make)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        experiment = rayfed.Experiment(method="fedavg", model=network, data=data, tuning="full", train=train)
        setup = make_plan(experiment.config(output=str(path)), path).setup
        assert setup is not None
        return setup


def round_ms(setup: Setup, executor: InlineExecutor, group: int) -> float:
    """Processor milliseconds of a step of a client in a round."""
    experiment = replace(setup.experiment, group=group, rounds=1, evaluate_every=0)
    began = time.process_time()
    list(run_rounds(experiment, executor, setup.start))
    spent = time.process_time() - began
    clients = setup.experiment.clients.values()
    return spent / sum(-(-client.num_examples // BATCH) for client in clients) * 1000


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--groups", type=int, nargs="+", default=[4, 32])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--networks", nargs="+", choices=list(NETWORKS), default=list(NETWORKS))
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # as client actors do
    columns = ["network", "parameters", "MFLOP of an image", "one by one, ms"]
    print(f"| {' | '.join([*columns, *(f'groups of {k}' for k in args.groups)])} |")
    print("|---|" + "---:|" * (3 + len(args.groups)), flush=True)
    for name in args.networks:
        setup = prepared(name, args.clients)
        executor = InlineExecutor(setup.context, setup.weights)
        sizes = (1, *args.groups)
        for group in sizes:
            round_ms(setup, executor, group)  # what is made once
        times: dict[int, list[float]] = {group: [] for group in sizes}
        for _ in range(args.repeats):
            for group in sizes:
                times[group].append(round_ms(setup, executor, group))
        alone = median(times[1])
        cost = setup.experiment.cost
        work = 0.0 if cost is None else cost.load(None).row / 1e6
        numbers = sum(value.numel() for value in setup.start.values())
        shares = " | ".join(f"{median(times[g]):.2f} ({median(times[g]) / alone:.2f})" for g in args.groups)
        print(f"| {name} | {numbers:,} | {work:.1f} | {alone:.2f} | {shares} |", flush=True)


if __name__ == "__main__":
    main()
