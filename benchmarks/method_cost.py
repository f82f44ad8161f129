"""Writes docs/method_cost.csv: bytes that clients receive and send in a round, of each method and of FedAvg.

python -m benchmarks.method_cost [--all]     without --all only methods that the file does not have yet
"""

from __future__ import annotations

import csv
import sys
import tempfile
from pathlib import Path

import rayfed
from rayfed.config.schema import Config, load_config
from rayfed.federation.method_registry import METHODS

FILE = Path(__file__).resolve().parent.parent / "docs" / "method_cost.csv"
FIELDS = ("algorithm", "model", "tuning", "base", "bytes_up", "bytes_down")
SMALL = (
    *("rounds=2", "cluster=inline", "figures=false", "tensorboard=false", "model.pretrained=false"),
    *("data.partition.scheme=by_domain", "data.domains=[plain,fonts,street]", "data.limit=12", "data.val=2"),
    *("train.batch_size=4", "evaluation.every=0"),
)
"""Three clients with a dozen images each: the bytes depend on the model, the tuning and the method only."""


def measured(*overrides: str) -> dict[str, int]:
    """Bytes that all clients send and receive in the second round of a run with these overrides."""
    with tempfile.TemporaryDirectory() as folder:
        last = rayfed.simulate([*SMALL, f"output={folder}/run", *overrides]).history.iloc[-1]
    return {"bytes_up": int(last["bytes_up"]), "bytes_down": int(last["bytes_down"])}


def parts(config: Config) -> tuple[str, str]:
    """Model and tuning of a config."""
    return config.model.name, str(config.tuning["name"])


def row(name: str) -> dict[str, object]:
    """The row of a method, with the name of the row of FedAvg that it is compared with."""
    model, tuning = parts(load_config([*SMALL, f"algorithm={name}"]))
    base = f"fedavg model={model} tuning={tuning}"
    return {
        "algorithm": name,
        "model": model,
        "tuning": tuning,
        "base": base,
        **measured(f"algorithm={name}"),
    }


def base_row(model: str, tuning: str) -> dict[str, object]:
    """The row of FedAvg with a model and a tuning."""
    name = f"fedavg model={model} tuning={tuning}"
    found = measured("algorithm=fedavg", f"model={model}", f"tuning={tuning}")
    return {"algorithm": name, "model": model, "tuning": tuning, "base": name, **found}


def read() -> dict[str, dict[str, object]]:
    """The rows of the file, by algorithm; none if there is no file."""
    if not FILE.is_file():
        return {}
    with FILE.open(encoding="utf-8", newline="") as file:
        return {each["algorithm"]: dict(each) for each in csv.DictReader(file)}


def main(argv: list[str]) -> None:
    """Measure what is missing and write the file after each method."""
    rows = {} if "--all" in argv else read()
    for name in METHODS.names():
        if name in rows:
            continue
        found = row(name)
        if found["base"] not in rows:
            rows[str(found["base"])] = base_row(str(found["model"]), str(found["tuning"]))
        rows[name] = found
        with FILE.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows[key] for key in sorted(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
