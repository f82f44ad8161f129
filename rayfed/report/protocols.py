"""The tables of all protocols.

Model selection of leave_one_out as in Lu et al., FedCLIP, 2023: the first round with the highest accuracy
of the global model on the clients' validation images, mean over clients. No image of the held-out domain is
used for training or selection, which is checked in the manifest of each run. Compared methods (for CLIP
models: zero-shot) get the same rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, TypeAlias

import numpy as np

from rayfed.columns import ACCURACY, is_larger_better, metric_of
from rayfed.config.variants import BASE, LOCAL_STEPS, NEW, differing_values
from rayfed.errors import count_of
from rayfed.objective import METRICS
from rayfed.record.readers import read_rows, read_yaml
from rayfed.report.final_table import (
    LAST_ROUND,
    RunTables,
    cut_notes,
    drawn_clients,
    head_notes,
    last_evaluated,
    of_drawn,
    own_tensors,
    scores_of,
)
from rayfed.report.method_runs import MethodRuns
from rayfed.terminal.table_formats import Table

MEASURES = {
    "clients": "personalization",
    "personal": "personal models",
    "generalization": "generalization",
    "comprehensive": "comprehensive",
    "last_clients": "last round: personalization",
    "last_generalization": "last round: generalization",
}
"""Measures reported for every run, with the titles of their columns."""

Ties: TypeAlias = Literal["first", "last"]

NOTES = (
    "percent; * the unseen domain, all of its images; personalization: the shared model on the clients' test",
    "images, mean over clients; personal models: the clients' own models there; comprehensive: mean over all",
    "domains; round: the {ties} with the highest validation accuracy of the shared model, mean over clients,",
    "for which no image of the unseen domain is used",
)


@dataclass(frozen=True)
class Tables:
    """Several tables, printed one below the other."""

    parts: tuple[Table, ...]

    def markdown(self) -> str:
        return "\n".join(part.markdown() for part in self.parts)

    def text(self, width: int | None = None) -> str:
        """The tables as text, no line longer than `width`; None: no limit."""
        return "\n\n".join(part.text(width) for part in self.parts)


@dataclass(frozen=True, kw_only=True)
class HeldOutScore:
    """Scores of one algorithm with one domain held out.

    Attributes:
        algorithm: Name of the algorithm.
        held_out: The held-out domain.
        round: Selected round, from 1.
        metric: Name of the metric.
        domains: Score of the shared model by domain, the unseen one included.
        measures: Scores by key of MEASURES; measures that do not exist are left out.
    """

    algorithm: str
    held_out: str
    round: int
    metric: str
    domains: Mapping[str, float]
    measures: Mapping[str, float]


def selected_row(rows: list[dict[str, Any]], ties: Ties = "first") -> dict[str, Any]:
    """Row of the selected round: the first or the last with the best validation score of the shared model.

    Where a method deploys the clients' own models, `val_...` is of these, and `global_val_...` of that one.
    """
    scored: list[tuple[float | None, dict[str, Any]]] = []
    for row in rows:
        prefix = "global_val_" if metric_of(row, "global_val_") else "val_"
        if metric := metric_of(row, prefix):
            value = row[prefix + metric]
            sign = 1.0 if is_larger_better(metric) else -1.0
            scored.append((None if value is None else sign * value, row))
    fallback = scored[-1][1]
    if ties == "last":
        scored.reverse()
    known = ((value, row) for value, row in scored if value is not None)
    return max(known, key=lambda pair: pair[0], default=(0.0, fallback))[1]


def scores(folder: Path, round: int) -> tuple[dict[str, float], dict[str, float]]:
    """Scores of a finished run with a held-out domain after a round.

    Returns:
        Scores of the shared model by domain, on the clients' test images and on the whole held-out domain;
        and means by name: generalization: the shared model on the held-out domain, if there is one; clients:
        the shared model on the clients' test images, mean over clients, if they have some; personal: the
        personal models on
        `evaluation.personal_split`, if scored; comprehensive: unweighted mean over all domains, the held-out
        one included, with `clients`.
    """
    import pyarrow.parquet as pq

    table = pq.read_table(folder / "clients.parquet").to_pylist()
    now = [row for row in table if row["round"] == round and row["metric"] in METRICS]

    def values(exchange: str, model: str) -> dict[str, float]:
        mine = [r for r in now if r["exchange"] == exchange and r["model"] == model]
        return {r["client"]: float("nan") if r["value"] is None else r["value"] for r in mine}

    held_out = values("report_held_out", "global")
    drawn = drawn_clients(folder)
    own = values("report_clients", "global") or of_drawn(values("report_domains", "global"), drawn)
    domains = {**values("report_domains", "global"), **held_out}
    means = {"generalization": _mean(held_out.values())} if held_out else {}
    if own:  # without test images of the clients there is no score of the shared model there
        means |= {"clients": _mean(own.values()), "comprehensive": _mean(domains.values())}
    personal = values("report_clients", "personal")
    return domains, means | ({"personal": _mean(personal.values())} if personal else {})


def outcome(folder: Path, algorithm: str, held_out: str, ties: Ties = "first") -> HeldOutScore:
    """Scores of a finished run with a held-out domain, after checking its manifest (`check_unseen`).

    Args:
        folder: Folder of the run.
        algorithm: Name of the algorithm.
        held_out: The held-out domain.
        ties: Round that is selected of those with the highest validation score.
    """
    check_unseen(folder, held_out)
    history = read_rows(folder)
    chosen = selected_row(history, ties)
    last = selected_row(history[-1:])
    domains, best = scores(folder, chosen["round"])
    final = {f"last_{name}": value for name, value in scores(folder, last["round"])[1].items()}
    return HeldOutScore(
        algorithm=algorithm,
        held_out=held_out,
        round=chosen["round"],
        domains=domains,
        metric=metric_of(chosen, "val_") or ACCURACY,
        measures={name: value for name, value in {**best, **final}.items() if name in MEASURES},
    )


def check_unseen(folder: Path, domain: str) -> None:
    """Check that the held-out domain was used for testing only.

    Raises:
        RuntimeError: The manifest assigns its images to a client or to another split.
    """
    import pyarrow.parquet as pq

    manifest = pq.read_table(folder / "partition.parquet", columns=["domain", "client", "split"]).to_pylist()
    of_domain = [row for row in manifest if row["domain"] == domain]
    if not of_domain or any(row["split"] != "held_out" or row["client"] for row in of_domain):
        raise RuntimeError(
            f"{folder}: images of the held-out domain {domain!r} are not used for testing only"
        )


def leave_one_out_table(runs: MethodRuns) -> Tables:
    """Two tables of all folds: targets in rows, clients in columns; and targets in columns.

    The first is the layout of FedCLIP's Table 2 with the averages of its other tables and of FFT-GP's, the
    second that of FedCLIP's Table 1.
    """
    ties: Ties = "last" if runs.config["evaluation"].get("ties") == "last" else "first"
    outcomes = [outcome(path, name, domain, ties) for domain, name, path in runs.each()]
    table = by_target(outcomes, title_of(runs, "each domain held out in turn"), ties)
    table = replace(table, notes=(*table.notes, *on_heads(runs, rule="")))
    return Tables((table, by_measure(outcomes)))


def on_heads(runs: MethodRuns, rule: str = LAST_ROUND) -> tuple[str, ...]:
    """Notes on the heads of a protocol, on the reported round, and on methods whose clients keep tensors.

    Args:
        runs: The runs of the protocol.
        rule: As of `head_notes`.
    """
    tables = [RunTables(path) for _, _, path in runs.each()]
    values = differing_values(
        {run.config["algorithm"]: run.config for run in tables if "algorithm" in run.config}
    )
    return (
        *cut_notes(tables),
        *head_notes(tables, rule),
        *own_tensors(run.config for run in tables),
        *([values] if values else []),
    )


def title_of(runs: MethodRuns, how: str) -> str:
    """Title of the table of a protocol, with all methods in it; `how` says what its runs are."""
    config = runs.config
    return (
        f"{', '.join(runs.methods)} on {config['data']['name']}, {config['model']['name']}, "
        f"{config['tuning']['name']}, seed {config['seed']}, {how}"
    )


def by_target(scores: Sequence[HeldOutScore], title: str, ties: Ties = "first") -> Table:
    """One row per held-out domain and algorithm, and their means; the notes name the selected round."""
    targets = list(dict.fromkeys(o.held_out for o in scores))
    shown = [m for m in MEASURES if not m.startswith("last") and any(m in o.measures for o in scores)]
    rows = []
    for o in scores:
        stars = {name: "*" if name == o.held_out else "" for name in targets}
        cells = [percent(o.domains.get(name)) + stars[name] for name in targets]
        rows.append(
            (o.held_out, o.algorithm, str(o.round), *cells, *(percent(o.measures.get(m)) for m in shown))
        )
    for name in dict.fromkeys(o.algorithm for o in scores):
        mine = [o for o in scores if o.algorithm == name]
        means = (percent(_mean_of(mine, m)) for m in shown)
        rows.append(("mean", name, "", *[""] * len(targets), *means))
    columns = ("held out", "method", "round", *targets, *(MEASURES[m] for m in shown))
    notes = (f"{scores[0].metric} in {NOTES[0]}", *(note.format(ties=ties) for note in NOTES[1:]))
    return Table(title, columns, tuple(rows), notes)


def by_measure(scores: Sequence[HeldOutScore]) -> Table:
    """One row per measure and algorithm, one column per held-out domain, and the mean."""
    rows = []
    for measure, label in MEASURES.items():
        for name in dict.fromkeys(o.algorithm for o in scores):
            mine = [o for o in scores if o.algorithm == name]
            if any(measure in o.measures for o in mine):
                cells = (percent(o.measures.get(measure)) for o in mine)
                rows.append((label, name, *cells, percent(_mean_of(mine, measure))))
    targets = dict.fromkeys(o.held_out for o in scores)
    return Table("by held-out domain", ("measure", "method", *targets, "AVG"), tuple(rows))


def _mean_of(outcomes: Sequence[HeldOutScore], measure: str) -> float | None:
    values = [o.measures[measure] for o in outcomes if measure in o.measures]
    return _mean(values) if values else None


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))


def percent(value: float | None) -> str:
    """A fraction in percent with two digits after the point; empty for None."""
    return "" if value is None else f"{100 * value:.2f}"


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


def few_shot_table(runs: MethodRuns) -> Tables:
    """One row for each number of shots and algorithm, with the scores of the last round that has some.

    A run without scores (evaluation.every=0) has empty cells.

    Args:
        runs: The finished runs by `shots-<number>`, in the order of the rows.
    """
    rows, metrics = [], []
    for part, name, path in runs.each():
        last = last_evaluated(read_rows(path))
        metric = metric_of(last) or ACCURACY
        metrics.append(metric)
        keys = (metric, f"{metric}_domain", f"worst_domain_{metric}", "sigma_client")
        values = (percent(last.get(key)) for key in keys)
        rows.append(
            (
                part.removeprefix("shots-"),
                name,
                str(training_samples(path)),
                str(last.get("round", "")),
                *values,
            )
        )
    title = title_of(runs, "few training samples of each class and client")
    notes = (
        f"{metrics[0]} in percent, of the shared model after the last round; clients and domains: unweighted "
        f"means; training samples: of all clients together",
        *on_heads(runs),
    )
    return Tables((Table(title, FEW_SHOT_COLUMNS, tuple(rows), notes),))


def training_samples(folder: Path) -> int:
    """Number of training samples of all clients, in the manifest of a run."""
    import pyarrow.parquet as pq

    splits = pq.read_table(folder / "partition.parquet", columns=["split"])["split"].to_pylist()
    return splits.count("train")


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
    return metric_of(row) or metric_of(row, "global_") or ACCURACY


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
    """The mean over clients of the scores of their personal models; None: these were not scored.

    Args:
        row: Row of a round. Where a method deploys personal models, their columns have no prefix.
    """
    key = metric_in(row)
    value = row.get(f"personal_{key}", row.get(key) if f"global_{key}" in row else None)
    return None if value is None else float(value)


def by_classes(runs: MethodRuns) -> Tables:
    """One row for each algorithm: its score on base classes, on new ones, and their harmonic mean.

    Args:
        runs: The finished runs, by `base` and `new`.
    """
    rows = []
    for name, base, new in _by_method(runs, (BASE, NEW)):
        first, second = of_global(base, "_domain"), of_global(new, "_domain")
        both = None if first is None or second is None else harmonic_mean(first, second)
        rows.append((name, round_of(base), *map(percent, (first, second, both))))
    notes = (
        "accuracy in percent of the global model on test images, mean over domains; base: the classes of the",
        "clients; new: classes of which no client has an example; both are told apart among themselves",
    )
    columns = ("method", "round", "base", "new", "harmonic mean")
    own = _own_on_new_classes(runs)
    return Tables((Table(title_of(runs, "base and new classes"), columns, tuple(rows), notes + own),))


def _own_on_new_classes(runs: MethodRuns) -> tuple[str, ...]:
    """Notes on the methods whose clients keep tensors: with which values of these the classes are scored."""
    tables = [(part, name, RunTables(path)) for part, name, path in runs.each()]
    kept = {name: run.own_tensors for part, name, run in tables if part == NEW}
    notes = []
    for name, (count, clients) in kept.items():
        if count:
            few = f"; {clients - count} of {clients} clients never trained and have initial values of these"
            what = "base and new classes are scored at each client, with the tensors that stay at it"
            notes.append(f"{name}: {what}{few if count < clients else ''}")
    others = [run.config for _, name, run in tables if not kept.get(name, (0, 0))[0]]
    return (*head_notes(run for *_, run in tables), *notes, *own_tensors(others))


def by_data_set(runs: MethodRuns) -> Tables:
    """One row for each algorithm: scores on the data set of the clients, on each other one, and their mean.

    Args:
        runs: The finished runs by data set, that of the clients first.
    """
    rows = []
    for name, source, *targets in _by_method(runs, runs.parts):
        scores = [of_global(row, "_domain") for row in targets]
        known = [score for score in scores if score is not None]
        mean = fmean(known) if known else None
        rows.append((name, round_of(source), *map(percent, (of_global(source, "_domain"), *scores, mean))))
    names = runs.parts
    notes = (
        f"accuracy in percent of the global model on test images, mean over domains; trained on {names[0]};",
        "the other data sets are scored with prompts of their own classes, and their mean is unweighted",
    )
    columns = ("method", "round", *names, "mean of the others")
    own = on_heads(runs)
    return Tables((Table(title_of(runs, "other data sets"), columns, tuple(rows), notes + own),))


def by_domain(runs: MethodRuns) -> Tables:
    """One row for each source and algorithm: scores on the domains of the clients, and on each other one.

    Args:
        runs: The finished runs, by `from-<the only domain of the clients>` or `from-<their number>-domains`.
    """
    parts = [
        (part.removeprefix("from-"), name, last, _targets(path, last))
        for part, name, path in runs.each()
        for last in [last_scored(read_rows(path))]
    ]
    domains = list(dict.fromkeys(domain for *_, targets in parts for domain in targets))
    rows = []
    for source, name, last, targets in parts:
        scores = [targets.get(domain) for domain in domains]
        mean = last.get(f"held_out_{metric_in(last)}")
        cells = map(percent, (of_global(last, "_domain"), *scores, mean))
        rows.append((source, name, round_of(last), *cells))
    notes = (
        f"{metric_in(parts[0][2])} in percent of the global model; own domains: mean over the domains of the",
        "clients, on their test samples; other domains: no client has an example of them, on all of their",
        "samples, with their unweighted mean",
    )
    columns = ("trained on", "method", "round", "own domains", *domains, "mean of the others")
    own = on_heads(runs)
    return Tables((Table(title_of(runs, "other domains"), columns, tuple(rows), notes + own),))


def _targets(path: Path, last: Row) -> dict[str, float | None]:
    """Scores of the global model by domain, on the domains without clients, in the round of a row."""
    return {
        score["client"]: score["value"]
        for score in (scores_of(path, last["round"]) if last else ())
        if (score["exchange"], score["model"], score["metric"])
        == ("report_held_out", "global", metric_in(last))
    }


def _by_method(runs: MethodRuns, parts: Sequence[str]) -> list[tuple[Any, ...]]:
    """Name of each method, and the last scored row of its run in each part; empty: it is not finished."""
    last = {(part, name): last_scored(read_rows(path)) for part, name, path in runs.each()}
    return [(name, *(last.get((part, name), {}) for part in parts)) for name in runs.methods]


UNSEEN_CLIENTS_COLUMNS = ("unseen", "method", "round", "clients that train")
PERSONAL = "clients that train, personal"
"""Column that only tables with a method that has personal models have."""
UNSEEN = ("unseen clients", "worst unseen", "unseen, adapted", "worst unseen, adapted")


def unseen_clients_table(runs: MethodRuns) -> Tables:
    """One row for each number of unseen clients and algorithm, with the scores of the last scored round.

    Args:
        runs: The finished runs by `unseen-<number>`, in the order of the rows.
    """
    scored = [(part, name, last_scored(read_rows(path))) for part, name, path in runs.each()]
    with_personal = any(of_personal(last) is not None for *_, last in scored)
    metric = metric_in(next((last for *_, last in scored if last), {}))
    rows = []
    for part, name, last in scored:
        scores = [of_global(last), *([of_personal(last)] if with_personal else [])]
        keys = (f"unseen_{metric}", f"unseen_worst_{metric}")
        scores += [last.get(prefix + key) for prefix in ("", "adapted_") for key in keys]
        rows.append((part.removeprefix("unseen-"), name, round_of(last), *map(percent, scores)))
    evaluations = [read_yaml(path / "config.yaml")["evaluation"] for *_, path in runs.each()]
    steps = count_of(max(each["local_steps"] for each in evaluations) or LOCAL_STEPS, "local step")
    notes = (
        f"{metric} in percent, unweighted means over clients; of the global model on the test samples of",
        "clients that train and of unseen clients, which never do; adapted: the models that these would",
        f"deploy after {steps} from the global model, which has had none of them; nothing of these is kept",
        *(("personal: the clients' own models, which have had local steps, too",) if with_personal else ()),
        *on_heads(runs),
    )
    columns = (*UNSEEN_CLIENTS_COLUMNS, *((PERSONAL,) if with_personal else ()), *UNSEEN)
    return Tables((Table(title_of(runs, "some clients never train"), columns, tuple(rows), notes),))


TABLES: Mapping[str, Callable[[MethodRuns], Tables]] = {
    "leave_one_out": leave_one_out_table,
    "few_shot": few_shot_table,
    "unseen_clients": unseen_clients_table,
    "cross_domain": by_domain,
    "base_to_new": by_classes,
    "cross_dataset": by_data_set,
}
"""By name of the protocol: its tables, from the finished runs."""
