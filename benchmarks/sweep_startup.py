"""How long trials of a sweep wait before their first round: the first one on a node, and those after it.

    python benchmarks/sweep_startup.py [overrides]

One trial at a time, so that no trial waits for a processor. The first one pays for a process, imports and its
model; the others find all of that. The clock runs from the end of the trial before (for the first: from when
Ray Tune takes over) to the beginning of the first round, Ray's part included.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import tune
import tune.conduct
import tune.tuner
from rayfed.terminal.console import say
from tune.folder import trial_folder
from tune.progress import Progress

SPACE = {"train.lr": {"loguniform": [0.001, 0.1]}}
TRIALS = 6
ends: list[float] = []


class Clock(Progress):
    """Notes when trials end."""

    def on_trial_complete(self, *args: Any, **info: Any) -> None:
        ends.append(time.time())


def waits(path: Path, overrides: list[str]) -> list[float]:
    """Seconds before the first round of every trial of a sweep."""
    fit = tune.tuner.fit

    def timed(tuner: Any) -> Any:
        ends[:] = [time.time()]
        return fit(tuner)

    tune.tuner.Progress, tune.conduct.fit = Clock, timed
    options = {"trials": TRIALS, "max_concurrent": 1, "objective": "accuracy", "output": str(path)}
    tune.search(overrides, SPACE, **options)
    found = []
    for number in range(TRIALS):
        run = trial_folder(path, number) / "seed-0"
        seconds = json.loads((run / "result.json").read_text().splitlines()[0])["seconds"]
        found.append((run / "history" / "000001.json.gz").stat().st_mtime - seconds - ends[number])
    return found


def main() -> None:
    overrides = ["algorithm=fedavg", "cluster=inline", "cluster.dashboard=false", "rounds=1", *sys.argv[1:]]
    with tempfile.TemporaryDirectory() as folder:
        shared = waits(Path(folder) / "shared", overrides)
    say("trial  " + "  ".join(f"{n:>7}" for n in range(TRIALS)))
    say("wait   " + "  ".join(f"{wait:>5.2f} s" for wait in shared))
    second, later = shared[1], statistics.median(shared[1:])
    say(f"first {shared[0]:.2f} s, second {second:.2f} s: {shared[0] / second:.1f} x faster")
    load = os.getloadavg()[0]
    say(f"median of the later ones {later:.2f} s: {shared[0] / later:.1f} x faster; load {load:.1f}")


if __name__ == "__main__":
    main()
