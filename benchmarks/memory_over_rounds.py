"""Memory of driver and actors over many rounds, with and without failing clients: it must not grow.

    python benchmarks/memory_over_rounds.py [--rounds 200] [--clients 100] [--failing 0.05]

Prints the slope of the private memory (USS) of the driver actor and of all client actors, in kB a round,
fitted to the rounds after the first fifth, when caches are full. Clients fail by raising;
`failures.on_client_error=drop` leaves them out of the round.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

import rayfed
from rayfed.federation.client import Client
from rayfed.federation.local import Local
from rayfed.federation.method import Method
from rayfed.terminal import console
from rayfed.types import Broadcast, Update

WARM = 0.2


@dataclass(frozen=True)
class Failing(Local):
    """Keeps a tensor of its own at every client, and fails now and then."""

    share: float = 0.05

    def train(self, client: Client, sent: Broadcast) -> Update:
        import torch

        if torch.rand(1, generator=client.rng) < self.share:
            raise RuntimeError("failed on purpose")
        client.store["own"] = client.params()
        return super().train(client, sent)


METHOD = Method(local=Failing)


def private_memory() -> tuple[float, float]:
    """USS of the driver actor and of all client actors, in kB."""
    driver = clients = 0.0
    for process in psutil.Process().children(recursive=True):
        try:
            name, uss = " ".join(process.cmdline()), process.memory_full_info().uss / 1000
        except psutil.Error:
            continue
        # Ray titles a process by what it runs: the driver by its method, client actors by their exchange.
        if name.startswith("ray::DriverActor"):
            driver += uss
        elif name.startswith(("ray::fit", "ray::report", "ray::rayfed:clients", "ray::ClientActor")):
            clients += uss
    return driver, clients


def watch(rounds: int, clients: int, failing: float, folder: Path) -> None:
    seen: list[tuple[float, float]] = []

    def line(row: dict[str, object], total: int) -> str:
        seen.append(private_memory())
        return ""

    shown, console.line = console.line, line
    try:
        rayfed.simulate(
            [
                "algorithm=benchmarks.memory_over_rounds:METHOD",
                f"local.share={failing}",
                f"rounds={rounds}",
                f"data.partition.clients_per_domain={clients // 5}",
                f"data.limit={clients // 5 * 6}",
                "data.val=0",
                "data.test=0.34",
                "evaluation.every=50",
                "model.options={depth: 2}",
                "model.pretrained=false",
                "tuning.rank=2",
                "failures.on_client_error=drop",
                "cluster.dashboard=false",
                f"output={folder / f'failing-{failing}'}",
            ],
            quiet=False,
        )
    finally:
        console.line = shown
    first = int(WARM * len(seen))
    x, values = np.arange(first, len(seen)), np.array(seen)[first:]
    for name, column in zip(("driver", "client actors"), values.T, strict=True):
        slope = np.polyfit(x, column, 1)[0]
        step = max(1, len(column) // 4)
        some = " ".join(f"{value / 1000:.1f}" for value in column[::step])
        print(
            f"failing {failing:.0%}: {name}: {some} MB in rounds {first + 1}, {first + 1 + step}, ..., "
            f"slope {slope:.1f} kB a round",
            flush=True,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--failing", type=float, default=0.05)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for share in (0.0, args.failing):
            watch(args.rounds, args.clients, share, Path(folder))
