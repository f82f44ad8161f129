"""Table of the protocol unseen_clients: clients that train beside clients that never do."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rayfed.config.generalization import LOCAL_STEPS
from rayfed.config.schema import Config
from rayfed.errors import count_of
from rayfed.record.readers import read_rows
from rayfed.report.generalization import last_scored, metric_in, of_global, of_personal, round_of
from rayfed.report.leave_one_out import Tables, on_own_tensors, percent, runs_in, title_of
from rayfed.report.table import Table

UNSEEN_CLIENTS_COLUMNS = ("unseen", "method", "round", "clients that train")
PERSONAL = "clients that train, personal"
"""Column that only tables with a method that has personal models have."""
UNSEEN = ("unseen clients", "worst unseen", "unseen, adapted", "worst unseen, adapted")


def unseen_clients_table(config: Config, folders: Mapping[str, Path]) -> Tables:
    """One row for each number of unseen clients and algorithm, with the scores of the last scored round.

    Args:
        config: The experiment of all runs.
        folders: Folders of the finished runs by `unseen-<number>`, in the order of the rows.
    """
    runs = [(part, name, last_scored(read_rows(path))) for part, name, path in runs_in(config, folders)]
    with_personal = any(of_personal(last) is not None for *_, last in runs)
    metric = metric_in(next((last for *_, last in runs if last), {}))
    rows = []
    for part, name, last in runs:
        scores = [of_global(last), *([of_personal(last)] if with_personal else [])]
        keys = (f"unseen_{metric}", f"unseen_worst_{metric}")
        scores += [last.get(prefix + key) for prefix in ("", "adapted_") for key in keys]
        rows.append((part.removeprefix("unseen-"), name, round_of(last), *map(percent, scores)))
    steps = count_of(config.evaluation.local_steps or LOCAL_STEPS, "local step")
    notes = (
        f"{metric} in percent, unweighted means over clients; of the global model on the test samples of",
        "clients that train and of unseen clients, which never do; adapted: the models that these would",
        f"deploy after {steps} from the global model, which has had none of them; nothing of these is kept",
        *(("personal: the clients' own models, which have had local steps, too",) if with_personal else ()),
        *on_own_tensors(config, folders),
    )
    columns = (*UNSEEN_CLIENTS_COLUMNS, *((PERSONAL,) if with_personal else ()), *UNSEEN)
    return Tables((Table(title_of(config, "some clients never train"), columns, tuple(rows), notes),))
