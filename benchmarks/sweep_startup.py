"""Time before the first round of a trial, for the first trial of a sweep on a node and for later ones.

    python benchmarks/sweep_startup.py [overrides]

Trials run one at a time, so that none waits for a CPU. The first one starts a process, imports libraries and
builds the model; the others reuse these. Measured from the end of the trial before (for the first one: from
the start of Ray Tune) to the beginning of the first round, Ray's share included.
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
import tune.engine
from rayfed.terminal.console import say
from tune.progress import Progress

SPACE = {"train.lr": {"loguniform": [0.001, 0.1]}}
TRIALS = 6
ends: list[float] = []


class Clock(Progress):
    """Records the times at which trials end."""

    def on_trial_complete(self, *args: Any, **info: Any) -> None:
        ends.append(time.time())


def waits(path: Path, overrides: list[str]) -> list[float]:
    """Seconds before the first round of every trial of a sweep."""
    run_trials = tune.engine.run_trials

    def timed(tuner: Any) -> Any:
        ends[:] = [time.time()]
        return run_trials(tuner)

    tune.engine.Progress = Clock
    tune.engine.run_trials = timed
    options = {"trials": TRIALS, "max_concurrent": 1, "objective": "accuracy", "output": str(path)}
    study = tune.search(overrides, SPACE, **options)
    waited = []
    for number, trial in enumerate(study.searched.trials):
        [run] = study.folders(trial.values)
        seconds = json.loads((run / "rounds.jsonl").read_text().splitlines()[0])["seconds"]
        waited.append((run / "history" / "000001.json.gz").stat().st_mtime - seconds - ends[number])
    return waited


def main() -> None:
    overrides = ["algorithm=fedavg", "cluster=inline", "cluster.dashboard=false", "rounds=1", *sys.argv[1:]]
    with tempfile.TemporaryDirectory() as folder:
        shared = waits(Path(folder) / "shared", overrides)
    say("trial  " + "  ".join(f"{n:>7}" for n in range(TRIALS)))
    say("wait   " + "  ".join(f"{wait:>5.2f} s" for wait in shared))
    second = shared[1]
    later = statistics.median(shared[1:])
    say(f"first {shared[0]:.2f} s, second {second:.2f} s: {shared[0] / second:.1f} x faster")
    load = os.getloadavg()[0]
    say(f"median of the later ones {later:.2f} s: {shared[0] / later:.1f} x faster; load {load:.1f}")


if __name__ == "__main__":
    main()
