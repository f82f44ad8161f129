"""Cost of a checkpoint: one run that saves one in every second round, so that both kinds of rounds alternate.

    python benchmarks/checkpoint_cost.py [--rounds 40] [overrides ...]

Prints the median seconds of rounds with and without a checkpoint, and the median ratio of consecutive rounds,
which should be at most 1.05.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from rayfed.config.schema import load_config
from rayfed.engine.session import launch
from rayfed.experiment.plan import prepared

WARM_UP = 2


def seconds(overrides: list[str], rounds: int, folder: Path) -> list[float]:
    """Between the ends of rounds, after the first ones; the first of these is without a checkpoint."""
    config = load_config([*overrides, f"rounds={rounds + WARM_UP + 1}", "checkpoint.every=2"])
    with launch(prepared(config), folder) as rows:
        ends = [time.perf_counter() for row in rows if "round" in row]
    return [b - a for a, b in zip(ends[WARM_UP - 1 :], ends[WARM_UP:], strict=False)][:rounds]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        took = seconds(args.overrides, args.rounds, Path(folder))
    without = took[::2]
    with_one = took[1::2]
    ratios = sorted(b / a for a, b in zip(without, with_one, strict=False))
    quarter = len(ratios) // 4
    print(
        f"with {statistics.median(with_one):.3f} s, without {statistics.median(without):.3f} s; "
        f"median ratio {statistics.median(ratios):.3f} (half of them {ratios[quarter]:.3f} to "
        f"{ratios[-1 - quarter]:.3f}, {len(ratios)} pairs; bar 1.05)"
    )
