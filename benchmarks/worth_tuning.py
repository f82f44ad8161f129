"""Gain of each tuning scheme, by scores without its tensors and without the head.

    python benchmarks/worth_tuning.py [--seeds 3] [--rows LoRA ...] [overrides]

FedAvg, one client per domain, inline; each row trains with the optimizer and the rate that its tuning brings.
Percent of the average over domains after the last round: of the final model, of the same with what the tuning
trains put back to its start values, and with the head put back. Other data and models: overrides such as
`data=pacs data.root=PACS`.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator
from statistics import mean, stdev

os.environ.setdefault("OMP_NUM_THREADS", "1")

ROWS = {
    "head only": ["tuning=head"],
    "LoRA": ["tuning=lora"],
    "adapters": ["tuning=adapter"],
    "(IA)3": ["tuning=ia3"],
    "visual prompts": ["tuning=visual_prompt"],
    "SSF": ["tuning=ssf"],
    "BitFit": ["tuning=bitfit"],
    "LoRA on random weights": ["tuning=lora", "model.pretrained=false"],
}
FIXED = (
    *("algorithm=fedavg", "data.partition.scheme=by_domain", "cluster=inline", "evaluation.every=1000"),
    *("evaluation.without_parts=true", "figures=false", "tensorboard=false"),
)


def scores(overrides: list[str]) -> Iterator[float | None]:
    """Percent of the final model, and without what the tuning trains and the head; None: there is none."""
    from rayfed.experiment.experiment import simulate

    with tempfile.TemporaryDirectory() as folder:
        result = simulate([*FIXED, f"output={folder}/run", *overrides])
        found = result.recorded.without_at(result.history.iloc[-1].to_dict()) or {}
        yield 100 * result.metrics["accuracy_domain"]
        for kind in ("adapters", "head"):
            yield 100 * found[kind]["domains"] if kind in found else None


def shown(values: list[float | None]) -> str:
    """Mean, deviation and each value; a dash where there is none."""
    there = [value for value in values if value is not None]
    if not there:
        return "-"
    deviation = f" ± {stdev(there):.1f} ({', '.join(f'{v:.1f}' for v in there)})" if len(there) > 1 else ""
    return f"{mean(there):.1f}{deviation}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=[*ROWS], metavar="ROW")
    args, more = parser.parse_known_args()
    print(
        "| tuning | final model | without what the tuning trains | without the head |\n|---|---:|---:|---:|"
    )
    for name in args.rows:
        each = [tuple(scores([f"seed={seed}", *ROWS[name], *more])) for seed in range(args.seeds)]
        print(
            f"| {name} | " + " | ".join(shown(list(column)) for column in zip(*each, strict=True)) + " |",
            flush=True,
        )


if __name__ == "__main__":
    main()
