"""RayFed with two client actors, as its documentation advises.

python -m benchmarks.rivals.programs.with_rayfed FOLDER ROUNDS [--state FOLDER]
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import rayfed
from benchmarks.rivals.common_names import common_names  # measurement
from benchmarks.rivals.gate import Gate  # measurement
from benchmarks.rivals.programs.arguments import parse
from benchmarks.rivals.workloads import (
    FROZEN,
    IMAGES,
    LABELS,
    MODEL,
    START,
    TEXTS,
    WHOLE,
    Order,
    Work,
    load,
    names_of_clients,
    put,
    read,
)  # fmt: skip


def network(folder: Path) -> Any:
    """A network that is trained whole, with its first values."""
    net = WHOLE[read(folder).name]()
    put(net, load(folder / START))
    return net


def drawn(folder: Path, round: int, clients: Any, rng: Any) -> list[str]:
    """The clients of a round, which the comparison gives."""
    names = list(clients)
    return [names[k] for k in Order(folder).cohort(round)]


def images(folder: Path, work: Work) -> dict[str, Any]:
    """The images of each client, all for training."""
    x, y = np.load(folder / IMAGES, mmap_mode="r"), np.load(folder / LABELS)
    return {name: {"train": (x[k], y[k])} for k, name in enumerate(names_of_clients(work))}


def experiment(folder: Path, rounds: int, cache: Path) -> rayfed.Experiment:
    """The experiment of a folder of inputs."""
    work = read(folder)
    about: dict[str, Any] = {"model": partial(network, folder), "tuning": "full"}
    if work.name == "vit":
        about = {
            "model": "vit_tiny_patch16_224",
            "model.weights": str(folder / FROZEN),
            "model.size": work.size,
        }
        about |= {"tuning": rayfed.LoRA(rank=work.rank, dropout=0.0)}
    if work.is_text:
        about = {"model": f"hf/{folder / MODEL}", "model.size": work.size}
        about |= {"tuning": rayfed.LoRA(rank=work.rank, dropout=0.0, sites=("query_value",))}
        about |= {"data": "csv", "data.root": str(folder / TEXTS), "data.val": 0, "data.test": 0}
        about |= {"data.columns": {"text": "text", "label": "label", "client": "client"}}
        about |= {"data.partition.scheme": "natural", "data.partition.min_samples": 1}
    else:
        about["data"] = images(folder, work)
    about["train"] = {
        "optimizer": "sgd",
        "lr": work.lr,
        "momentum": work.momentum,
        "batch_size": work.batch,
        "epochs": work.epochs,
        "group": work.group,
    }
    if work.cohort < work.clients:
        about |= {"sampling": partial(drawn, folder), "clients_per_round": work.cohort}
    settings = {
        "data.cache": str(cache),
        "evaluation": {"every": 0},
        "cluster": {"actors": 2, "dashboard": False},
    }
    return rayfed.Experiment(method="fedavg", rounds=rounds, **settings, **about)


def main() -> None:
    args = parse(__doc__)
    gate = Gate()  # measurement
    names = list(load(args.folder / START))  # measurement
    state = args.state or Path(tempfile.mkdtemp(dir=args.folder))
    made = experiment(args.folder, args.rounds, state / "cache")
    if (state / "run").exists():
        run = made.resume(state / "run")
        last = run.history.iloc[-1]  # measurement
        gate.done(
            last.local_steps, last.local_examples, lambda: common_names(run.params, names)
        )  # measurement
        return
    for row in made.changed(output=str(state / "run")):
        values = partial(common_names, row, names)  # measurement
        if not gate.done(row.local_steps, row.local_examples, values):  # measurement
            break  # measurement


if __name__ == "__main__":
    main()
