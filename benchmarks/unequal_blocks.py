"""Processor time of clients that hold different blocks: in groups, as a share of one by one.

    python -m benchmarks.unequal_blocks [--rounds 7] [--images 8] [--batch 2] [KEY=VALUE ...]

FedRA on ViT-Ti/16 at 224 x 224 pixels with random weights: six clients that hold 12, 10, 8, 6, 4 and 3
blocks, which the method draws anew in each round. Both sides are this engine in one process and have the same
examples, blocks and dropout. Rounds of both alternate, and the side that begins does, too. What counts is the
processor time of the process. The first round of each side is left out.
Overrides change the experiment, such as `algorithm=inclusivefl` or `tuning.dropout=0`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

CAPACITIES = (12, 10, 8, 6, 4, 3)
SIDES = {"one by one": 1, "in groups": len(CAPACITIES)}
"""Values of `train.group`."""


def prepared_setup(folder: Path, images: int, batch: int, overrides: list[str]) -> Any:
    """The experiment, prepared once for both sides."""
    from benchmarks.engine_overhead import SHAPES, data_of, write
    from rayfed.config.schema import load_config
    from rayfed.experiment.plan import prepared

    shape = SHAPES["vit_tiny_224"]
    write(folder, *shape.examples(len(CAPACITIES), images), shape)
    own = ("algorithm=fedra", "tuning=lora", f"capacity=[{','.join(map(str, CAPACITIES))}]", *overrides)
    kept = ("model.pretrained=false", f"data.cache={folder}", "data.val=0", "data.test=0")
    rest = (f"train.batch_size={batch}", f"train.group={len(CAPACITIES)}", "evaluation.every=0")
    return prepared(
        load_config([*shape.overrides, *data_of(folder, len(CAPACITIES), shape), *kept, *rest, *own])
    )


def rounds_of(setup: Any, group: int, number: int) -> Iterator[Any]:
    """The rounds of one side."""
    from rayfed.engine.loop import run_rounds
    from rayfed.executors.inline import InlineExecutor

    experiment = replace(setup.experiment, group=group, rounds=number, evaluate_every=0)
    return run_rounds(experiment, InlineExecutor(setup.context, setup.weights), setup.start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="measured rounds of each side")
    parser.add_argument("--images", type=int, default=8, help="images of a client")
    parser.add_argument("--batch", type=int, default=2, help="images of a training batch")
    parser.add_argument("overrides", nargs="*", help="of the experiment, KEY=VALUE")
    args = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    times: dict[str, list[float]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory() as folder:
        setup = prepared_setup(Path(folder), args.images, args.batch, args.overrides)
        runs = {side: rounds_of(setup, group, args.rounds + 1) for side, group in SIDES.items()}
        for number in range(args.rounds + 1):
            for side in [*SIDES][:: 1 if number % 2 else -1]:
                before = time.process_time()
                next(runs[side])
                times[side].append(time.process_time() - before)
    shares = [b / a for a, b in zip(*(own[1:] for own in times.values()), strict=True)]
    for side, own in times.items():
        print(f"{side}: {statistics.median(own[1:]):.2f} s of processor time a round (median)")
    print(f"share of each round: {', '.join(f'{share:.3f}' for share in shares)}")
    print(f"in groups, share of one by one: {statistics.median(shares):.3f} (median)")


if __name__ == "__main__":
    main()
