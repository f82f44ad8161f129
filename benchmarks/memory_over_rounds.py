"""Memory and speed over many rounds with failing clients: neither should change.

    python benchmarks/memory_over_rounds.py [--rounds 1000] [--clients 100] [--failing 0.05]

Every client keeps its own tensor and trains on one image. Some fail by raising;
`failures.on_client_error=drop` leaves them out of the round. Prints the private memory (USS) of the driver
actor and of both client actors over the rounds, and its slope in kB a round, fitted to the rounds after the
first fifth; likewise the bytes that glibc has given to the driver, without the holes between them, where
glibc tells (2.33 or later). Then the median seconds of a round in the second and in the last tenth of the
run, and the CPU seconds a round of these processes in each tenth.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil

import rayfed
from rayfed.federation.client import Client
from rayfed.federation.cohort import Cohort
from rayfed.federation.local import Local
from rayfed.federation.method_registry import Method
from rayfed.federation.server import Server
from rayfed.terminal import console
from rayfed.types import Broadcast, ServerState, Update

EVERY = 10  # rounds between two measurements of memory
WARM = 0.2
CLIENTS = ("ray::fit", "ray::report", "ray::rayfed:clients", "ray::ClientActor")
TITLES = {"driver": "driver", "clients": "clients", "in_use": "in use by the driver"}
SHOWN = (1, 2, 5, 10, 20, 50, 100, 200, 400, 600, 800, 1000)


@dataclass(frozen=True)
class Failing(Local):
    """Keeps its own tensor at every client, and fails now and then."""

    share: float = 0.05

    def train(self, client: Client, sent: Broadcast) -> Update:
        import torch

        if torch.rand(1, generator=client.rng) < self.share:
            raise RuntimeError("failed on purpose")
        client.store["own"] = client.params()
        return super().train(client, sent)


class MallocInfo(ctypes.Structure):
    """Result of glibc's mallinfo2 (`man mallinfo`)."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def in_use() -> float:
    """Kilobytes that this process has taken from glibc and not freed; 0 if it cannot tell."""
    ask = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if ask is None:
        return 0.0
    ask.restype = MallocInfo
    return float(ask().uordblks) / 1000


@dataclass(frozen=True)
class Measured(Server):
    """FedAvg; adds to each row the kilobytes that the driver has in use."""

    def aggregate(self, state: ServerState, cohort: Cohort, updates: Sequence[Update]) -> ServerState:
        cohort.measure(in_use=in_use())
        return super().aggregate(state, cohort, updates)


METHOD = Method(server=Measured, local=Failing)


class Usage(NamedTuple):
    """Private memory (USS) in kB of the driver actor and of all client actors, and CPU seconds of all.

    `in_use` is the part of the driver's that its code has taken and not freed, as the driver itself says.
    """

    driver: float = 0.0
    clients: float = 0.0
    cpu: float = 0.0
    in_use: float = 0.0


def usage(in_use: float) -> Usage:
    """Memory that the actors of the run use now."""
    found = Usage(in_use=in_use)
    for process in psutil.Process().children(recursive=True):
        try:
            name = " ".join(process.cmdline())
            # Ray titles a process by what it runs: the driver by its method, client actors by their exchange.
            driver = name.startswith("ray::DriverActor")
            if driver or name.startswith(CLIENTS):
                uss = process.memory_full_info().uss / 1000
                cpu = sum(process.cpu_times()[:2])
                parts = (uss, 0.0, cpu, 0.0) if driver else (0.0, uss, cpu, 0.0)
                found = Usage(*(a + b for a, b in zip(found, parts, strict=True)))
        except psutil.Error:
            continue
    return found


def overrides(rounds: int, clients: int, failing: float) -> list[str]:
    each = clients // 5
    return [
        *("algorithm=benchmarks.memory_over_rounds:METHOD", f"local.share={failing}", f"rounds={rounds}"),
        *(f"data.partition.clients_per_domain={each}", f"data.limit={each * 2}", "data.val=0"),
        *("data.test=0.5", "cluster.dashboard=false", "cluster.actors=2", "figures=false"),
        *("evaluation.every=50", "model.options={depth: 1}", "model.pretrained=false", "tuning.rank=2"),
        *("failures.on_client_error=drop", "checkpoint.every=5"),
    ]


def watch(rounds: int, clients: int, failing: float, folder: Path) -> None:
    """Run, and print what was measured."""
    used: dict[int, Usage] = {}
    seconds: list[float] = []

    def line(row: dict[str, Any], total: int) -> str:
        seconds.append(row["seconds"])
        if row["round"] % EVERY == 0 or row["round"] in SHOWN:
            used[row["round"]] = usage(row["in_use"])
        return f"round {row['round']}" if row["round"] % 100 == 0 else ""

    shown = console.line
    console.line = line
    try:
        out = folder / f"failing-{failing}"
        rayfed.simulate([*overrides(rounds, clients, failing), f"output={out}"], quiet=False)
    finally:
        console.line = shown
    report(used, seconds, f"failing {failing:.0%}")


def report(used: dict[int, Usage], seconds: list[float], title: str) -> None:
    rounds = len(seconds)
    late = [r for r in used if r >= WARM * rounds]
    for name in TITLES:
        slope = np.polyfit(late, [getattr(used[r], name) for r in late], 1)[0]
        some = ", ".join(f"{r}: {getattr(used[r], name) / 1000:.1f}" for r in SHOWN if r in used)
        print(f"{title}: {TITLES[name]}: MB after round {some}; ", end="")
        print(f"slope from round {late[0]} on {slope:.2f} kB a round")
    tenth = rounds // 10
    early, late_ones = seconds[tenth : 2 * tenth], seconds[-tenth:]
    ratio = statistics.median(late_ones) / statistics.median(early)
    medians = f"{statistics.median(early):.3f} and {statistics.median(late_ones):.3f}, ratio {ratio:.3f}"
    print(f"{title}: median seconds of rounds {tenth + 1} to {2 * tenth} and of the last {tenth}: {medians}")
    ends = [r for r in used if r % tenth == 0]
    cpu = [f"{(used[b].cpu - used[a].cpu) / (b - a):.3f}" for a, b in itertools.pairwise(ends)]
    print(f"{title}: CPU seconds a round after round {ends[0]}, in steps of {tenth}: {' '.join(cpu)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=1000, help="a multiple of 100")
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--failing", type=float, nargs="+", default=[0.05], help="shares of failing clients")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for share in args.failing:
            watch(args.rounds, args.clients, share, Path(folder))
