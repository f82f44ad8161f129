"""Table of the protocol unseen_clients: clients that train beside clients that never do."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rayfed.config.generalization import LOCAL_STEPS
from rayfed.config.schema import Config
from rayfed.record.readers import read_rows
from rayfed.report.generalization import last_scored, metric_in, of_global, round_of
from rayfed.report.leave_one_out import Tables, on_own_tensors, percent, runs_in, title_of
from rayfed.report.table import Table

COLUMNS = (
    "unseen",
    "algorithm",
    "round",
    "clients that train",
    "unseen clients",
    "worst unseen",
    "unseen, adapted",
    "worst unseen, adapted",
)


def table_of(config: Config, folders: Mapping[str, Path]) -> Tables:
    """One row for each number of unseen clients and algorithm, with the scores of the last scored round.

    Args:
        config: The experiment of all runs.
        folders: Folders of the finished runs by `unseen-<number>`, in the order of the rows. Compared
            algorithms come before the main one.
    """
    rows, metrics = [], []
    for part, name, path in runs_in(config, folders):
        last = last_scored(read_rows(path))
        metrics.append(metric_in(last))
        keys = (f"unseen_{metrics[-1]}", f"unseen_worst_{metrics[-1]}")
        scores = [last.get(prefix + key) for prefix in ("", "adapted_") for key in keys]
        values = map(percent, (of_global(last), *scores))
        rows.append((part.removeprefix("unseen-"), name, round_of(last), *values))
    steps = config.evaluation.local_steps or LOCAL_STEPS
    notes = (
        f"{metrics[0]} in percent, unweighted means over clients; of the global model on the test samples of",
        "clients that train and of unseen clients, which never do; adapted: the models that these would",
        f"deploy after {steps} local steps from the global model, of which nothing is kept",
        *on_own_tensors(config, folders),
    )
    return Tables((Table(title_of(config, "some clients never train"), COLUMNS, tuple(rows), notes),))
