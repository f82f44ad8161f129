"""The ablation of FedGCR and the fairness methods on digits-five-mini, as a Markdown table.

python benchmarks/fedgcr_ablation.py --rounds 10 --seeds 0 1 2

All methods have the same images, backbone, optimizer, prompts and number of rounds, and are scored after the
last one. `none` and `FedGR` tune prompts and head; `FedGC` and `FedGCR` add GC-Net, as in the paper's Table
5. The rows `+ GC-Net` are the other methods with that network, which has most of the trained parameters.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

import rayfed

ROWS = {
    "none (FedAvg)": ("algorithm=fedavg", "tuning=visual_prompt"),
    "FedGR": ("algorithm=fedgr", "tuning=visual_prompt"),
    "FedGC": ("algorithm=fedgc", "tuning=gc_prompt"),
    "FedGCR": ("algorithm=fedgcr", "tuning=gc_prompt"),
    "q-FFL": ("algorithm=qffl", "tuning=visual_prompt"),
    "AFL": ("algorithm=afl", "tuning=visual_prompt"),
    "TERM": ("algorithm=term", "tuning=visual_prompt"),
    "FedAvg + GC-Net": ("algorithm=fedavg", "tuning=gc_prompt"),
    "FedGR + GC-Net": ("algorithm=fedgr", "tuning=gc_prompt"),
}
COLUMNS = ("accuracy_domain", "sigma_type", "accuracy", "sigma_client", "worst_domain_accuracy")


def main() -> None:
    """Run all rows and seeds and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--factor", type=int, default=10)
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--output", default="runs/fedgcr_ablation")
    parser.add_argument(
        "overrides", nargs="*", help="further overrides for every row, such as train.lr=0.001"
    )
    args = parser.parse_args()
    print(f"| row | {' | '.join(COLUMNS)} | seconds |\n|---|{'---:|' * (len(COLUMNS) + 1)}")
    for row in args.rows:
        began = time.perf_counter()
        scores = [score(row, seed, args) for seed in args.seeds]
        cells = [spread(values) for values in zip(*scores, strict=True)]
        print(f"| {row} | {' | '.join(cells)} | {time.perf_counter() - began:.0f} |", flush=True)


def spread(values: tuple[float, ...]) -> str:
    """Mean and, of several seeds, sample standard deviation."""
    deviation = f" ({np.std(values, ddof=1):.1f})" if len(values) > 1 else ""
    return f"{np.mean(values):.1f}{deviation}"


def score(row: str, seed: int, args: argparse.Namespace) -> list[float]:
    """Percentages of one run, in the order of COLUMNS."""
    output = Path(args.output) / f"{row.replace(' ', '_')}-{seed}"
    overrides = [
        *ROWS[row],
        "data.partition.scheme=imbalanced",
        f"data.partition.factor={args.factor}",
        "train.optimizer=adamw",
        "train.weight_decay=0.01",
        "train.batch_size=64",
        "cluster=inline",
        f"evaluation.every={args.rounds}",
        f"rounds={args.rounds}",
        f"seed={seed}",
        f"output={output}",
        "overwrite=true",
        *args.overrides,
    ]
    metrics = rayfed.simulate(overrides).metrics
    return [100 * float(metrics[name]) for name in COLUMNS]


if __name__ == "__main__":
    main()
