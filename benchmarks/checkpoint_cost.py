"""What a checkpoint every round costs: the default run with and without, interleaved.

    python benchmarks/checkpoint_cost.py [--repeats 3] [overrides ...]

Without: `checkpoint.every=0`, which writes one at the end. Timed from the first row to the digest.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from rayfed.config import load_config
from rayfed.launch import launch
from rayfed.setup import prepare


def seconds(overrides: list[str], every: int, folder: Path) -> float:
    """From the row of the first round to the digest; starting Ray and the actors is not counted."""
    config = load_config([*overrides, f"checkpoint.every={every}", "cluster.dashboard=false"])
    folder.mkdir()
    began = 0.0
    for row in launch(prepare(config), config, folder):
        if row.get("round") == 1:
            began = time.perf_counter()
    return time.perf_counter() - began


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    pairs = []
    with tempfile.TemporaryDirectory() as folder:
        for i in range(args.repeats):
            order = (1, 0) if i % 2 else (0, 1)
            took = {every: seconds(args.overrides, every, Path(folder) / f"{i}-{every}") for every in order}
            pairs.append(took[1] / took[0])
            print(f"with {took[1]:.2f} s, without {took[0]:.2f} s, ratio {pairs[-1]:.3f}", flush=True)
    print(f"median ratio {statistics.median(pairs):.3f} (bar 1.05)")
