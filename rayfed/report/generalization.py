"""Tables of the protocols cross_domain, base_to_new and cross_dataset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rayfed.config.generalization import BASE, NEW
from rayfed.config.schema import Config
from rayfed.objective import METRICS, metric_of
from rayfed.record.readers import read_rows
from rayfed.report.leave_one_out import Tables, on_own_tensors, percent, runs_in, title_of
from rayfed.report.run_tables import RunTables, own_tensors
from rayfed.report.table import Table, scores_of

Row = Mapping[str, Any]


def harmonic_mean(first: float, second: float) -> float:
    """2 a b / (a + b), by which tables of base and new classes rank methods; 0 where both are 0.

    >>> harmonic_mean(0.75, 0.5), harmonic_mean(0.0, 0.0)
    (0.6, 0.0)
    """
    return 2 * first * second / (first + second) if first + second else 0.0


def last_scored(rows: Sequence[Row]) -> Row:
    """The last row with scores of the global model or of the deployed one; empty where there is none."""
    return next((row for row in reversed(rows) if metric_of(row) or metric_of(row, "global_")), {})


def metric_in(row: Row) -> str:
    """Name of the metric of a row."""
    return metric_of(row) or metric_of(row, "global_") or METRICS[0]


def round_of(row: Row) -> str:
    """The round of a row as text; empty where there is no row."""
    return str(row.get("round", ""))


def of_global(row: Row, statistic: str = "") -> float | None:
    """A score of the global model, whichever model the method deploys; None: it was not scored.

    Args:
        row: Row of a round.
        statistic: What follows the metric in the name of the column, such as `_domain`.
    """
    key = metric_in(row) + statistic
    value = row.get(f"global_{key}", row.get(key))
    return None if value is None else float(value)


def of_personal(row: Row) -> float | None:
    """The mean over clients of the scores of their own models; None: these were not scored.

    Args:
        row: Row of a round. Where a method deploys personal models, their columns have no prefix.
    """
    key = metric_in(row)
    value = row.get(f"personal_{key}", row.get(key) if f"global_{key}" in row else None)
    return None if value is None else float(value)


def by_classes(config: Config, folders: Mapping[str, Path]) -> Tables:
    """One row for each algorithm: its score on base classes, on new ones, and their harmonic mean.

    Args:
        config: The experiment of both runs.
        folders: Folders of the finished runs, by `base` and `new`.
    """
    rows = []
    for name, base, new in _by_method(config, folders, (BASE, NEW)):
        first, second = of_global(base, "_domain"), of_global(new, "_domain")
        both = None if first is None or second is None else harmonic_mean(first, second)
        rows.append((name, round_of(base), *map(percent, (first, second, both))))
    notes = (
        "accuracy in percent of the global model on test images, mean over domains; base: the classes of the",
        "clients; new: classes of which no client has an example; both are told apart among themselves",
    )
    columns = ("method", "round", "base", "new", "harmonic mean")
    own = _own_on_new_classes(config, folders)
    return Tables((Table(title_of(config, "base and new classes"), columns, tuple(rows), notes + own),))


def _own_on_new_classes(config: Config, folders: Mapping[str, Path]) -> tuple[str, ...]:
    """Notes on the methods whose clients keep tensors: with which values of these the classes are scored."""
    runs = [(part, name, RunTables(path)) for part, name, path in runs_in(config, folders)]
    kept = {name: run.own_tensors for part, name, run in runs if part == NEW}
    notes = []
    for name, (count, clients) in kept.items():
        if count:
            few = f"; {clients - count} of {clients} clients never trained and have initial values of these"
            what = "base and new classes are scored at each client, with the tensors that stay at it"
            notes.append(f"{name}: {what}{few if count < clients else ''}")
    return (*notes, *own_tensors(run.config for _, name, run in runs if not kept.get(name, (0, 0))[0]))


def by_data_set(config: Config, folders: Mapping[str, Path]) -> Tables:
    """One row for each algorithm: scores on the data set of the clients, on each other one, and their mean.

    Args:
        config: The experiment of all runs.
        folders: Folders of the finished runs by data set, that of the clients first.
    """
    rows = []
    for name, source, *targets in _by_method(config, folders, tuple(folders)):
        scores = [of_global(row, "_domain") for row in targets]
        known = [score for score in scores if score is not None]
        mean = fmean(known) if known else None
        rows.append((name, round_of(source), *map(percent, (of_global(source, "_domain"), *scores, mean))))
    names = tuple(folders)
    notes = (
        f"accuracy in percent of the global model on test images, mean over domains; trained on {names[0]};",
        "the other data sets are scored with prompts of their own classes, and their mean is unweighted",
    )
    columns = ("method", "round", *names, "mean of the others")
    own = on_own_tensors(config, folders)
    return Tables((Table(title_of(config, "other data sets"), columns, tuple(rows), notes + own),))


def by_domain(config: Config, folders: Mapping[str, Path]) -> Tables:
    """One row for each source and algorithm: scores on the domains of the clients, and on each other one.

    Args:
        config: The experiment of all runs.
        folders: Folders of the finished runs, by `from-<the only domain of the clients>` or
            `from-<their number>-domains`.
    """
    found = [
        (part.removeprefix("from-"), name, last, _targets(path, last))
        for part, name, path in runs_in(config, folders)
        for last in [last_scored(read_rows(path))]
    ]
    domains = list(dict.fromkeys(domain for *_, targets in found for domain in targets))
    rows = []
    for source, name, last, targets in found:
        scores = [targets.get(domain) for domain in domains]
        mean = last.get(f"held_out_{metric_in(last)}")
        cells = map(percent, (of_global(last, "_domain"), *scores, mean))
        rows.append((source, name, round_of(last), *cells))
    notes = (
        f"{metric_in(found[0][2])} in percent of the global model; own domains: mean over the domains of the",
        "clients, on their test samples; other domains: no client has an example of them, on all of their",
        "samples, with their unweighted mean",
    )
    columns = ("trained on", "method", "round", "own domains", *domains, "mean of the others")
    own = on_own_tensors(config, folders)
    return Tables((Table(title_of(config, "other domains"), columns, tuple(rows), notes + own),))


def _targets(path: Path, last: Row) -> dict[str, float | None]:
    """Scores of the global model by domain, on the domains without clients, in the round of a row."""
    return {
        score["client"]: score["value"]
        for score in (scores_of(path, last["round"]) if last else ())
        if (score["exchange"], score["model"], score["metric"])
        == ("report_held_out", "global", metric_in(last))
    }


def _by_method(config: Config, folders: Mapping[str, Path], parts: Sequence[str]) -> list[tuple[Any, ...]]:
    """Name of each method, and the last scored row of its run in each part; empty: it is not finished."""
    last = {(part, name): last_scored(read_rows(path)) for part, name, path in runs_in(config, folders)}
    names = dict.fromkeys(name for _, name in last)
    return [(name, *(last.get((part, name), {}) for part in parts)) for name in names]
