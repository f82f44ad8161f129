"""Processor seconds from the import of torch to the first batch of a small network in one process.

python benchmarks/startup.py [full lora ...] [--rounds 5] [--base FOLDER]; --base is another checkout, whose
runs are interleaved with those of this one.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys, time
import torch
began = time.process_time()
import numpy as np
from torch import nn
import rayfed


class First(rayfed.Local):
    def loss(self, client, sent, batch):
        print(time.process_time() - began, flush=True)
        raise SystemExit


rng = np.random.default_rng(0)
data = {f"c{i}": (rng.normal(size=(40, 16)).astype("float32"), rng.integers(0, 3, 40)) for i in range(4)}
net = lambda: nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))
rayfed.Experiment(method=First, model=net, data=data, tuning=sys.argv[1], cluster="inline").run(quiet=True)
"""


def seconds(checkout: Path, tuning: str) -> float:
    """Processor seconds of one process. Args: checkout: what it imports; tuning: name of a scheme."""
    env = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PROGRAM, tuning]
    found = subprocess.run(command, cwd=checkout, env=env, capture_output=True, text=True, check=False)
    return float(found.stdout.split()[0])


def main() -> None:
    """Print a table with a row for each tuning scheme, and the ratio to the base where there is one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tunings", nargs="*", default=["full", "lora"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--base", type=Path)
    args = parser.parse_args()
    here = Path(__file__).resolve().parents[1]
    places = [here, *([args.base.resolve()] if args.base else [])]
    columns = ["processor seconds", *(["base", "ratio"] if args.base else [])]
    print(f"| tuning | {' | '.join(columns)} |\n|---{'|---:' * len(columns)}|")
    for tuning in args.tunings:
        each = [[seconds(place, tuning) for place in places] for _ in range(args.rounds)]
        medians = [statistics.median(column) for column in zip(*each, strict=True)]
        ratio = [medians[0] / medians[1]] if len(medians) > 1 else []
        print(f"| {tuning} | {' | '.join(f'{value:.2f}' for value in (*medians, *ratio))} |", flush=True)


if __name__ == "__main__":
    main()
