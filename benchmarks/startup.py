"""Time from the start of an experiment to its first batch and its first round, next to torch's import.

python benchmarks/startup.py [inline ray command] [--rounds 5] [--base FOLDER]; --base is another checkout,
whose runs are interleaved with those of this one. Every number is a median, in multiples of the median of
`python -c "import torch"` in the same run, by the clock and in processor seconds of all processes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

PROGRAM = """
import os, sys, time
from pathlib import Path
import numpy as np
import torch
from torch import nn

cluster = "inline"
if sys.argv[1] == "ray":
    import ray

    ray.init(address="local", num_cpus=2, include_dashboard=False, logging_level="ERROR")
    time.sleep(5)
    cluster = {"actors": 2}
print("began", flush=True)
import rayfed


class First(rayfed.Local):
    def loss(self, client, sent, batch):
        Path(os.environ["FIRST_BATCH"]).touch()
        return super().loss(client, sent, batch)


rng = np.random.default_rng(0)
data = {f"c{i}": (rng.normal(size=(40, 16)).astype("float32"), rng.integers(0, 3, 40)) for i in range(4)}
net = lambda: nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))
given = {"method": First, "model": net, "data": data, "tuning": "lora", "cluster": cluster, "rounds": 1}
rayfed.Experiment(**given).run(quiet=True)
print("the round has ended", flush=True)
"""

WAYS = {
    "inline": ["-c", PROGRAM, "inline"],
    "ray": ["-c", PROGRAM, "ray"],
    "command": ["-m", "rayfed.run", "rounds=1"],
}
"""Arguments of Python: an experiment in one process, on a running Ray, and the default run."""

MARKS = {
    "first batch": "first batch",
    "the round has ended": "end of round 1",
    "loading the data": "imports",
    "starting Ray": "data and model",
    "client actor": "Ray started",
    "actors ready": "actors ready",
    "round 1/1": "end of round 1",
    "everything on one page": "figures and report",
}
"""Beginnings of lines that a program writes, and what has ended then."""


@dataclass
class Watch:
    """Clock and processor seconds of a process and of all that it has started.

    Attributes:
        root: The process.
        first: A file that is made at the first batch.
        marks: Seconds by the clock and of processors, by what had ended then.
    """

    root: psutil.Process
    first: Path
    marks: dict[str, tuple[float, float]] = field(default_factory=dict)
    _seen: dict[int, float] = field(default_factory=dict)
    _began: tuple[float, float] = (0.0, 0.0)

    def begin(self) -> None:
        self._began = (time.perf_counter(), self._processors())
        self.marks.clear()

    def mark(self, name: str) -> None:
        now = (time.perf_counter(), self._processors())
        self.marks.setdefault(name, (now[0] - self._began[0], now[1] - self._began[1]))

    def look(self) -> None:
        """Until the process ends, note what its children use, and the first batch."""
        while self.root.is_running() and self.root.status() != psutil.STATUS_ZOMBIE:
            if self.first.exists():
                self.mark("first batch")
            self._processors()
            time.sleep(0.02)

    def _processors(self) -> float:
        try:
            for process in (self.root, *self.root.children(recursive=True)):
                times = process.cpu_times()
                self._seen[process.pid] = times.user + times.system
        except psutil.NoSuchProcess:
            pass
        return sum(self._seen.values())


def measured(checkout: Path, arguments: list[str]) -> dict[str, tuple[float, float]]:
    """Seconds by the clock and of processors until each mark. Args: checkout: what the process imports."""
    with tempfile.TemporaryDirectory() as folder:
        first = Path(folder) / "first"
        env = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1", "FIRST_BATCH": str(first)}
        command = [sys.executable, *arguments]
        process = subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE, text=True)
        watch = Watch(psutil.Process(process.pid), first)
        watch.begin()
        looking = threading.Thread(target=watch.look, daemon=True)
        looking.start()
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("began"):
                watch.begin()
            for text, name in MARKS.items():
                if text in line[: len(text) + 8]:
                    watch.mark(name)
        process.wait()
        watch.mark("whole process")
        looking.join()
    return watch.marks


def main() -> None:
    """Print a table with a row for each mark, in multiples of torch's import."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ways", nargs="*", default=[*WAYS])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--base", type=Path)
    args = parser.parse_args()
    here = Path(__file__).resolve().parents[1]
    places = [here, *([args.base.resolve()] if args.base else [])]
    imports: list[tuple[float, float]] = []
    found: dict[tuple[str, str], list[list[tuple[float, float]]]] = {}
    for _ in range(args.rounds):
        for way in args.ways:
            imports.append(measured(here, ["-c", "import torch"])["whole process"])
            for number, place in enumerate(places):
                for name, seconds in measured(place, WAYS[way]).items():
                    found.setdefault((way, name), [[] for _ in places])[number].append(seconds)
    torch = [statistics.median(column) for column in zip(*imports, strict=True)]
    print(f"torch's import: {torch[0]:.2f} s, {torch[1]:.2f} processor seconds")
    titles = ["clock", "processors"] if not args.base else ["clock", "base", "processors", "base"]
    print(f"| what | until | {' | '.join(titles)} |\n|---|---|{'---:|' * len(titles)}")
    for (way, name), each in found.items():
        if name == "whole process":
            continue
        cells = [
            f"{statistics.median(seconds[kind] for seconds in place) / torch[kind]:.2f}"
            for kind in (0, 1)
            for place in each
        ]
        print(f"| {way} | {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
