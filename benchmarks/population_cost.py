"""Cost of a virtual population: rounds, start, memory and files of 1,000 and of 100,000 clients.

FedAvg with LoRA on vit_mini and the embedded digits, 100 clients in a round, two client actors. Runs of both
sizes alternate. Prints for each run the seconds from the command to the first round, the median round, the
CPU seconds of driver and client actors for each round after the first, which other jobs hardly change, the
largest memory of a process (private, and resident with what it shares) and the bytes of the folder; then the
ratios of the CPU seconds and of the median rounds.

    python benchmarks/population_cost.py [--rounds 20] [--pairs 2] [--sizes 1000 100000] [--images 10]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

KINDS = {
    "driver": ("ray::DriverActor", "ray::rayfed:driver"),
    "client": ("ray::ClientActor", "ray::rayfed:clients", "ray::fit", "ray::report"),
}
"""Beginnings of the titles that Ray gives the processes which are measured: their actor, or what they run."""


@dataclass
class Measured:
    """Cost of one run: seconds, bytes; `cpu` is in CPU seconds a round."""

    first: float
    rounds: list[float]
    cpu: float
    private: dict[str, int]
    resident: dict[str, int]
    folder: int


def command(clients: int, rounds: int, images: float, output: Path) -> list[str]:
    """The command of a run."""
    return [
        *(sys.executable, "-m", "rayfed.run", "algorithm=fedavg", "tuning=lora"),
        *(f"data.population={{clients: {clients}, size: {images}}}", "clients_per_round=100"),
        *(f"rounds={rounds}", "cluster.actors=2", "cluster.dashboard=false", f"output={output}"),
    ]


def processes(root: psutil.Process) -> Iterator[tuple[str, psutil.Process]]:
    """The command, its driver and its client actors, by kind."""
    yield "command", root
    for child in root.children(recursive=True):
        title = " ".join(child.cmdline())
        for kind, titles in KINDS.items():
            if title.startswith(titles):
                yield kind, child


def measure(root: psutil.Process, private: dict[str, int], resident: dict[str, int]) -> None:
    """Raise the maxima of each kind of process."""
    for kind, process in processes(root):
        found = process.memory_full_info()
        private[kind] = max(private.get(kind, 0), found.uss)
        resident[kind] = max(resident.get(kind, 0), found.rss)


def cpu_seconds(root: psutil.Process) -> float:
    """CPU seconds that the driver and the client actors have used."""
    return sum(sum(p.cpu_times()[:2]) for kind, p in processes(root) if kind in KINDS)


def run(clients: int, rounds: int, images: float) -> Measured:
    """Run one experiment and measure it."""
    private: dict[str, int] = {}
    resident: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as name:
        output = Path(name) / "run"
        table = output / "rounds.jsonl"
        began = time.perf_counter()
        with (Path(name) / "screen").open("w") as screen:
            process = subprocess.Popen(
                command(clients, rounds, images, output), stdout=screen, stderr=subprocess.STDOUT
            )
        first = 0.0
        used: list[float] = []  # CPU seconds after each round
        while process.poll() is None:
            if not first and table.exists():
                first = time.perf_counter() - began
            with suppress(psutil.Error):  # a process that has just ended
                root = psutil.Process(process.pid)
                measure(root, private, resident)
                done = len(table.read_text().splitlines()) if first else 0
                if done > len(used):
                    used += [cpu_seconds(root)] * (done - len(used))
            time.sleep(0.25)
        if process.returncode:
            raise SystemExit((Path(name) / "screen").read_text())
        seconds = [json.loads(line)["seconds"] for line in table.read_text().splitlines()]
        folder = sum(file.stat().st_size for file in output.rglob("*") if file.is_file())
    cpu = (used[-1] - used[0]) / (len(used) - 1) if len(used) > 1 else math.nan
    return Measured(first, seconds[1:], cpu, private, resident, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--pairs", type=int, default=2, help="runs of each size, alternating")
    parser.add_argument("--sizes", type=int, nargs=2, default=[1_000, 100_000])
    parser.add_argument("--images", type=float, default=10, help="mean number of images of a client")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    every: dict[int, list[float]] = {size: [] for size in args.sizes}
    cpu: dict[int, list[float]] = {size: [] for size in args.sizes}
    for _ in range(args.pairs):
        for size in args.sizes:
            found = run(size, args.rounds, args.images)
            every[size] += found.rounds
            cpu[size].append(found.cpu)
            memory = ", ".join(
                f"{kind} {found.private[kind] / 1e6:.0f} ({found.resident[kind] / 1e6:.0f})"
                for kind in found.private
            )
            print(
                f"{size} clients: first round after {found.first:.1f} s, median round "
                f"{statistics.median(found.rounds):.2f} s ({found.cpu:.2f} CPU seconds), private (resident) "
                f"MB: {memory}, folder "
                f"{found.folder / 1e6:.1f} MB",
                flush=True,
            )
    little, much = (statistics.median(cpu[size]) for size in args.sizes)
    print(f"CPU seconds a round {little:.2f} and {much:.2f}, ratio {much / little:.3f}")
    few, many = (statistics.median(every[size]) for size in args.sizes)
    print(f"median round {few:.2f} s and {many:.2f} s")
    print(f"ratio {many / few:.3f}")


if __name__ == "__main__":
    main()
