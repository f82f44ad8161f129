"""Leave one domain out: every domain in turn is the one that no client owns.

Model selection as in Lu et al., FedCLIP, 2023: the first round with the highest accuracy of the global model
on the clients' validation images, mean over clients. No image of the held-out domain is trained on or
selected with, which is checked from the manifest of each run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rayfed.config import Config
from rayfed.errors import ConfigError
from rayfed.objective import METRICS, metric_of
from rayfed.report.table import Table, read_rows

COLUMNS = (
    "held out",
    "round",
    "generalization %",
    "clients %",
    "personal models %",
    "comprehensive %",
    "last round: generalization %",
    "clients %",
)


def folds(config: Config, domains: tuple[str, ...], path: Path) -> dict[str, Config]:
    """One experiment per domain, with that domain held out, in a folder of its name.

    Raises:
        ConfigError: A domain is held out already, there is only one, or there is nothing to select with.
    """
    if config.data.held_out:
        raise ConfigError(
            f"data.held_out: {config.data.held_out!r} is set, but protocol=leave_one_out holds out each"
        )
    if len(domains) < 2:
        raise ConfigError(f"protocol: leave_one_out needs two or more domains, there is {', '.join(domains)}")
    if not config.data.val:
        raise ConfigError(
            f"data.val: {config.data.val!r} leaves no images to choose a round with; set data.val=0.1"
        )
    looking = replace(config.evaluation, every=config.evaluation.every or 1, personal=True, validation=True)
    return {
        name: replace(
            config,
            protocol="single",
            data=replace(config.data, held_out=name),
            evaluation=looking,
            output=str(path / name),
            overwrite=True,
        )
        for name in domains
    }


def selected(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The round to report: the first with the highest validation score."""
    scored = [(row[f"val_{metric}"], row) for row in rows if (metric := metric_of(row, "val_"))]
    return max(scored, key=lambda pair: pair[0])[1]


def scores(folder: Path, round: int) -> dict[str, float]:
    """Scores (the task's metric) of a finished fold after a round.

    Returns:
        generalization: global model on the held-out domain; clients: the same model on the test images of
        the clients, mean over clients; personal: their own models there; comprehensive: plain mean of the
        global model's scores on all domains, the held-out one included.
    """
    import pyarrow.parquet as pq

    table = pq.read_table(folder / "clients.parquet").to_pylist()
    now = [row for row in table if row["round"] == round and row["metric"] in METRICS]

    def values(exchange: str, model: str) -> list[float]:
        return [r["value"] for r in now if r["exchange"] == exchange and r["model"] == model]

    held_out, own = values("report_held_out", "global"), values("report_clients", "global")
    found = {
        "generalization": float(np.mean(held_out)),
        "clients": float(np.mean(own)),
        "comprehensive": float(np.mean([*values("report_domains", "global"), *held_out])),
    }
    personal = values("report_clients", "personal")
    return found | ({"personal": float(np.mean(personal))} if personal else {})


def check_unseen(folder: Path, domain: str) -> None:
    """Make sure that the held-out domain was for testing only.

    Raises:
        RuntimeError: The manifest says otherwise.
    """
    import pyarrow.parquet as pq

    manifest = pq.read_table(folder / "partition.parquet", columns=["domain", "client", "split"]).to_pylist()
    mine = [row for row in manifest if row["domain"] == domain]
    if not mine or any(row["split"] != "held_out" or row["client"] for row in mine):
        raise RuntimeError(f"{folder}: images of the held-out domain {domain!r} have another use")


def table_of(config: Config, folders: Mapping[str, Path]) -> Table:
    """One row per held-out domain, and their mean."""
    rows, numbers, metric = [], [], METRICS[0]
    for name, folder in folders.items():
        check_unseen(folder, name)
        history = read_rows(folder)
        chosen, last = selected(history), selected(history[-1:])
        metric = metric_of(chosen, "val_") or metric
        best, final = scores(folder, chosen["round"]), scores(folder, last["round"])
        line = [best[k] for k in ("generalization", "clients")]
        line += [
            best.get("personal", np.nan),
            best["comprehensive"],
            final["generalization"],
            final["clients"],
        ]
        numbers.append(line)
        rows.append((name, str(chosen["round"]), *map(_percent, line)))
    rows.append(("mean", "", *map(_percent, np.mean(numbers, axis=0).tolist())))
    title = f"{config.algorithm} on {config.data.name}, {config.model.name}, {config.tuning['name']}, "
    title += f"seed {config.seed}, each domain held out in turn"
    notes = (
        f"every number is {metric} in percent",
        "clients: the shared model on the clients' test images; comprehensive: mean over all domains",
        "round: the first with the highest score on validation images of clients, never the held-out domain",
    )
    return Table(title, COLUMNS, tuple(rows), notes)


def _percent(value: float) -> str:
    return "" if np.isnan(value) else f"{100 * value:.2f}"
