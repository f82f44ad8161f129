"""Accuracies of methods for clients of different depth, mean and standard deviation over seeds.

    python benchmarks/fedra_ordering.py [--rounds 10] [--seeds 3] [overrides, e.g. train.lr=0.01]
    python benchmarks/fedra_ordering.py --why     AllLarge against FedRA, seed by seed

Two federations on digits-five-mini with vit_mini: domains whose clients hold 12, 10, 8, 6 and 3 of 12
blocks, and clients that all hold 6. Everything else is the default of `python -m rayfed.run`. About ten
minutes on one core.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean, stdev

from rayfed.config.schema import load_config
from rayfed.engine.loop import draw_cohort, run_rounds
from rayfed.executors.inline import InlineExecutor
from rayfed.experiment.experiment import simulate
from rayfed.experiment.plan import prepared
from rayfed.federation.client_tasks import evaluate
from rayfed.federation.cohort import Ledger

METHODS = ("alllarge", "fedra", "inclusivefl", "depthfl", "allsmall")
MIXED = "12, 10, 8, 6, 3"
CAPACITIES = {MIXED: "[12,10,8,6,3]", "6, 6, 6, 6, 6": "[6,6,6,6,6]"}


def accuracy(method: str, capacity: str, seed: int, rounds: int, more: list[str]) -> dict[str, float]:
    """Percent by domain and on average after the last round, and of both ways to predict with exits."""
    import pyarrow.parquet as pq

    with tempfile.TemporaryDirectory() as folder:
        fixed = [f"algorithm={method}", f"capacity={capacity}", f"seed={seed}", f"rounds={rounds}"]
        where = ["cluster=inline", f"evaluation.every={rounds}", f"output={folder}/run"]
        result = simulate([*fixed, *where, *more])
        rows = pq.read_table(Path(folder) / "run" / "clients.parquet").to_pylist()
        scores = {
            row["client"]: 100 * row["value"]
            for row in rows
            if row["exchange"] == "report_domains" and row["metric"] == "accuracy"
        }
        for name in ("accuracy_ensemble", "accuracy_last_exit"):
            if name in result.metrics:
                scores[name] = 100 * result.metrics[name]
        return {"average": 100 * result.metrics["accuracy_domain"], **scores}


def curve(method: str, seed: int, rounds: int, more: list[str]) -> dict[int, tuple[float, float]]:
    """Percent on test images, and on the clients' training images, of the global model, every fifth round."""
    overrides = [f"algorithm={method}", f"capacity={CAPACITIES[MIXED]}", f"seed={seed}", f"rounds={rounds}"]
    setup = prepared(load_config([*overrides, "cluster=inline", "evaluation.every=5", *more]))
    executor = InlineExecutor(setup.context, setup.weights)
    points = {}
    for done in run_rounds(setup.experiment, executor, setup.start):
        number = done.row["round"]
        if "accuracy" in done.row:
            cohort = replace(draw_cohort(setup.experiment, executor, done.state), ledger=Ledger())
            seen = cohort.everyone.run(partial(evaluate, split="train"), done.state.broadcast(), tag="seen")
            trained = 100 * mean(u.metrics["accuracy"] for u in seen)
            points[number] = (100 * done.row["accuracy"], trained)
    return points


def why(rounds: int, seeds: int, more: list[str]) -> None:
    print("| seed | round | alllarge test | fedra test | difference | alllarge train | fedra train |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for seed in range(seeds):
        large, random = (curve(method, seed, rounds, more) for method in ("alllarge", "fedra"))
        for number, (test, train) in large.items():
            other, seen = random[number]
            cells = f"{test:.1f} | {other:.1f} | {other - test:+.1f} | {train:.1f} | {seen:.1f}"
            print(f"| {seed} | {number} | {cells} |", flush=True)


def cell(values: list[float]) -> str:
    return f"{mean(values):.1f} ± {stdev(values) if len(values) > 1 else 0:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--why", action="store_true")
    args = parser.parse_args()
    if args.why:
        why(args.rounds, args.seeds, args.overrides)
        return
    for title, capacity in CAPACITIES.items():
        print(f"\nBlocks by domain: {title} of 12\n")
        header = False
        for method in METHODS:
            runs = [
                accuracy(method, capacity, seed, args.rounds, args.overrides) for seed in range(args.seeds)
            ]
            columns = [name for name in runs[0] if not name.startswith("accuracy_")]
            if not header:
                print("| method | " + " | ".join(columns) + " |\n|---|" + "---:|" * len(columns))
                header = True
            cells = [cell([run[name] for run in runs]) for name in columns]
            print(f"| {method} | " + " | ".join(cells) + " |", flush=True)
            extra = [n for n in runs[0] if n.startswith("accuracy_")]
            if extra:
                both = ", ".join(f"{n.removeprefix('accuracy_')} {cell([r[n] for r in runs])}" for n in extra)
                print(f"<!-- {method}: {both} -->", flush=True)


if __name__ == "__main__":
    main()
