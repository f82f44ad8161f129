"""Table of the protocol few_shot: one run for each number of training samples of a class and client."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rayfed.config.schema import Config
from rayfed.objective import METRICS, metric_of
from rayfed.record.readers import read_rows
from rayfed.report.leave_one_out import Tables, on_own_tensors, percent, runs_in, title_of
from rayfed.report.table import Table, last_evaluated

FEW_SHOT_COLUMNS = (
    "shots",
    "method",
    "training samples",
    "round",
    "clients",
    "domains",
    "worst domain",
    "sigma_client",
)


def few_shot_table(config: Config, folders: Mapping[str, Path]) -> Tables:
    """One row for each number of shots and algorithm, with the scores of the last round that has some.

    A run without scores (evaluation.every=0) has empty cells.

    Args:
        config: The experiment of all runs.
        folders: Folders of the finished runs by `shots-<number>`, in the order of the rows.
    """
    rows, metrics = [], []
    samples = {part: str(training_samples(folder)) for part, folder in folders.items()}
    for part, name, path in runs_in(config, folders):
        last = last_evaluated(read_rows(path))
        metric = metric_of(last) or METRICS[0]
        metrics.append(metric)
        keys = (metric, f"{metric}_domain", f"worst_domain_{metric}", "sigma_client")
        values = (percent(last.get(key)) for key in keys)
        rows.append((part.removeprefix("shots-"), name, samples[part], str(last.get("round", "")), *values))
    title = title_of(config, "few training samples of each class and client")
    notes = (
        f"{metrics[0]} in percent, of the shared model after the last round; clients and domains: unweighted "
        f"means; training samples: of all clients together",
        *on_own_tensors(config, folders),
    )
    return Tables((Table(title, FEW_SHOT_COLUMNS, tuple(rows), notes),))


def training_samples(folder: Path) -> int:
    """Number of training samples of all clients, in the manifest of a run."""
    import pyarrow.parquet as pq

    splits = pq.read_table(folder / "partition.parquet", columns=["split"])["split"].to_pylist()
    return splits.count("train")
