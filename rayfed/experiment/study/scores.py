"""Scores of the cells of a study: means over parts, and which direction is better."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rayfed.columns import better_values, is_larger_better
from rayfed.errors import ConfigError, unknown
from rayfed.experiment.study.coordinates import PART, SEED, Key, Value, row_names
from rayfed.record.recorded_run import Rule
from rayfed.report.protocols import harmonic_mean

if TYPE_CHECKING:
    import pandas as pd

VALIDATION: Rule = "validation"
"""Value of `Study.reported`: the round with the best validation score, as in leave_one_out."""


BY_PROTOCOL = {
    "leave_one_out": "held_out_{}",
    "cross_domain": "held_out_{}",
    "unseen_clients": "unseen_{}",
    "base_to_new": "{}_domain",
    "cross_dataset": "{}_domain",
}
"""The column that is compared under a protocol, with a gap for the name of the metric."""


def over_parts(scores: Sequence[float], protocol: str) -> float:
    """The score of a method and a seed under a protocol, from those of its parts, in their order.

    Their mean; of base_to_new the harmonic mean of base and new classes, and of cross_dataset the mean of the
    data sets without clients, which are all but the first one.

    >>> over_parts([0.75, 0.5], "base_to_new"), over_parts([0.9, 0.25, 0.75], "cross_dataset")
    (0.6, 0.5)
    """
    if protocol == "base_to_new":
        return harmonic_mean(*scores)
    return fmean(scores[1:] if protocol == "cross_dataset" else scores)


def larger_of(column: str, metric: str) -> bool:
    """Whether larger values of a column are better. Args: column: its name. metric: that of the runs."""
    better = better_values(column)
    return is_larger_better(metric) if better is None else better == "larger"


def check_column(results: pd.DataFrame, column: str, names: Sequence[str]) -> None:
    """Check that cells have a number in a column.

    Raises:
        ConfigError: None has.
    """
    numbers = [
        name for name in results.select_dtypes("number").columns if name not in names and name != "round"
    ]
    if column not in numbers:
        raise ConfigError(unknown("study: score", column, [str(name) for name in numbers]))


def by_seed(
    results: pd.DataFrame,
    column: str,
    names: Sequence[str],
    labels: Mapping[Key, str],
    every: Sequence[Value],
    protocol: str = "",
) -> pd.DataFrame:
    """The score of each row of the tables by seed, over the parts of that seed (`over_parts`).

    A row has no score for a seed of which one of its parts is not finished. Parts in which no row has this
    score, such as unseen clients where all train, do not count.

    Args:
        results: A row for each cell.
        column: The score.
        names: Names of the coordinates.
        labels: What each row is called.
        every: The parts of the study; empty: it has none.
        protocol: The protocol whose runs the parts are; empty: none.

    Returns:
        A row for each seed, a column for each label; NaN where there is none.
    """
    import pandas as pd

    own = list(row_names(names))
    scored = set(results[PART][results[column].notna()]) if PART in names else set()
    finished = set(results[PART]) if PART in names else set()
    parts = sum(part in scored or part not in finished for part in set(every)) if PART in names else 1
    seeds: list[Any] = list(dict.fromkeys(results[SEED])) if SEED in names else [0]
    table = {}
    for key, label in labels.items():
        mine = results
        for name, value in zip(own, key, strict=True):
            mine = mine[mine[name] == value] if value is not None else mine[mine[name].isna()]
        values = []
        for seed in seeds:
            cells = mine[mine[SEED] == seed] if SEED in names else mine
            scores = cells[column].dropna()
            values.append(over_parts(list(scores), protocol) if len(scores) == parts else float("nan"))
        table[label] = values
    return pd.DataFrame(table, index=pd.Index(seeds, name=SEED), dtype=float)
