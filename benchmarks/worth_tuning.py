"""Accuracy of vit_mini tuned by FedAvg with LoRA, compared with random weights and with head-only tuning.

    python benchmarks/worth_tuning.py [--seeds 3] [overrides]

The default experiment otherwise, inline; percent of the average over domains after the last round.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from statistics import mean, stdev

os.environ.setdefault("OMP_NUM_THREADS", "1")

ROWS = {
    "LoRA on vit_mini": [],
    "head only on vit_mini": ["tuning=head"],
    "LoRA on random weights": ["model.pretrained=false"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    args, more = parser.parse_known_args()

    from rayfed.experiment.simulate import simulate

    scores: dict[str, list[float]] = {}
    for name, overrides in ROWS.items():
        for seed in range(args.seeds):
            with tempfile.TemporaryDirectory() as folder:
                fixed = ["algorithm=fedavg", "data.partition.scheme=by_domain", f"seed={seed}"]
                where = ["cluster=inline", "evaluation.every=100", f"output={folder}/run"]
                result = simulate([*fixed, *where, *overrides, *more])
                scores.setdefault(name, []).append(100 * result.metrics["accuracy_domain"])
    print(f"| {args.seeds} seeds | average over domains |\n|---|---:|")
    for name, values in scores.items():
        each = ", ".join(f"{v:.1f}" for v in values)
        print(f"| {name} | {mean(values):.1f} ± {stdev(values):.1f} ({each}) |")


if __name__ == "__main__":
    main()
