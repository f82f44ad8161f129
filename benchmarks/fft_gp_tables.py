"""FedCLIP, PromptFL, FFT-GP and their baselines over seeds, and the variance of generalization gaps.

    python benchmarks/fft_gp_tables.py names [--rounds 4]      every method with its default options
    python benchmarks/fft_gp_tables.py adapter [--rounds 10]   all with the same frozen CLIP model and adapter
    python benchmarks/fft_gp_tables.py gaps [--rounds 12]      FedAvg, GA and FAA on the same updates

digits-five-mini, one client a domain, inline, percent of the global model after the last round; mean and
sample standard deviation over seeds. Further arguments are overrides.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from statistics import geometric_mean, mean, stdev
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

CLIP = ("zero_shot", "fedclip", "promptfl", "fft_gp_clip", "fft_gp_prompt")
PLAIN = ("fedavg", "fedprox", "ditto", "perfedavg", "ga", "grace", "bgp", "faa", "fft_gp")
ADAPTER = (
    *("model=clip_mini", "tuning=residual_adapter", "train.optimizer=adam", "train.lr=0.005"),
    *("train.betas=[0.9,0.98]", "train.eps=1.0e-6", "train.momentum=0"),
)
COLUMNS = {
    "global": "accuracy_domain",
    "worst domain": "worst_domain_accuracy",
    "sigma_type": "sigma_type",
    "personal": "personal accuracy_domain",
}


def run(name: str, seed: int, rounds: int, more: list[str]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The last row of a run, with the global model's columns under plain names, and all rows."""
    from rayfed.experiment.experiment import simulate
    from rayfed.record.readers import read_rows

    with tempfile.TemporaryDirectory() as folder:
        fixed = [f"algorithm={name}", f"seed={seed}", f"rounds={rounds}", "data.partition.scheme=by_domain"]
        looks = ["evaluation.personal=true", f"evaluation.every={rounds}", "compare=[]", "cluster=inline"]
        rows = read_rows(simulate([*fixed, *looks, f"output={folder}/run", *more]).path)
    last = dict(rows[-1])
    if "global_accuracy" in last:  # the method deploys personal models: they have the plain names
        last |= {"personal_accuracy_domain": last["accuracy_domain"]}
        last |= {key.removeprefix("global_"): v for key, v in last.items() if key.startswith("global_")}
    return last, rows


def cell(values: list[float]) -> str:
    return f"{mean(values):.1f} ± {stdev(values) if len(values) > 1 else 0:.1f}"


def table(methods: list[str], seeds: list[int], rounds: int, more: list[str]) -> None:
    print(f"| {rounds} rounds | {' | '.join(COLUMNS)} |\n|---|{'---:|' * len(COLUMNS)}", flush=True)
    for name in methods:
        rows = [run(name, seed, rounds, more)[0] for seed in seeds]
        cells = []
        for key in COLUMNS.values():
            values = [100 * row[k] for row in rows if (k := key.replace(" ", "_")) in row]
            cells.append(cell(values) if values else "-")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def gaps(seeds: list[int], rounds: int, more: list[str]) -> None:
    print(
        "| seed | FAA < FedAvg | FAA < GA | FAA / FedAvg | FAA / GA |\n|---:|---:|---:|---:|---:|", flush=True
    )
    for seed in seeds:
        rows = run("faa", seed, rounds, ["server.compare=true", *more])[1]
        faa, ga, fedavg = ([row[f"gap_{k}_variance"] for row in rows] for k in ("faa", "ga", "fedavg"))
        below = [sum(a < b for a, b in zip(faa, other, strict=True)) for other in (fedavg, ga)]
        ratio = [geometric_mean([a / b for a, b in zip(faa, o, strict=True)]) for o in (fedavg, ga)]
        counts = " | ".join(f"{n} of {rounds}" for n in below)
        print(f"| {seed} | {counts} | {ratio[0]:.2f} | {ratio[1]:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("names", "adapter", "gaps"))
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--methods", nargs="+", help="only these")
    args, more = parser.parse_known_args()
    if args.what == "gaps":
        gaps(args.seeds, args.rounds or 12, more)
    elif args.what == "names":
        table(args.methods or [*CLIP, *PLAIN], args.seeds, args.rounds or 4, more)
    else:
        table(args.methods or list(PLAIN), args.seeds, args.rounds or 10, [*ADAPTER, *more])


if __name__ == "__main__":
    main()
