"""The tables of all protocols.

Model selection of leave_one_out as in Lu et al., FedCLIP, 2023: the first round with the highest accuracy
of the global model on the clients' validation images, mean over clients. No image of the held-out domain is
used for training or selection, which is checked in the manifest of each run. Compared methods (for CLIP
models: zero-shot) get the same rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from rayfed.columns import (
    ADAPTED,
    GLOBAL,
    HELD_OUT,
    MEAN,
    OVER_DOMAINS,
    PERSONAL,
    SIGMA_CLIENT,
    UNSEEN,
    WORST_DOMAIN,
    WORST_UNSEEN,
    metric_of_scores,
)
from rayfed.config.variants import BASE, LOCAL_STEPS, NEW, differing_values
from rayfed.errors import count_of
from rayfed.record.recorded_run import NO_CLIENT, RecordedRun, Ties
from rayfed.report.final_table import LAST_ROUND, cut_notes, head_notes, of_drawn, own_tensors
from rayfed.report.method_runs import MethodRuns
from rayfed.terminal.table_formats import Table
from rayfed.types import Row

MEASURES = {
    "clients": "personalization",
    "personal": "personal models",
    "generalization": "generalization",
    "comprehensive": "comprehensive",
    "last_clients": "last round: personalization",
    "last_generalization": "last round: generalization",
}
"""Measures reported for every run, with the titles of their columns."""

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


@dataclass(frozen=True)
class Fold:
    """A run with one domain held out, whose reported round validation selects.

    Attributes:
        algorithm: Name of its method.
        held_out: The held-out domain.
        run: The run.
    """

    algorithm: str
    held_out: str
    run: RecordedRun

    @cached_property
    def domains(self) -> Mapping[str, float]:
        """Score of the shared model by domain in the reported round, the unseen one included."""
        return scores(self.run, self.run.reported)[0]

    @cached_property
    def measures(self) -> Mapping[str, float]:
        """Scores by key of MEASURES; measures that do not exist are left out."""
        best, last = (scores(self.run, row)[1] for row in (self.run.reported, self.run.reported_by("last")))
        found = {**best, **{f"last_{name}": value for name, value in last.items()}}
        return {name: value for name, value in found.items() if name in MEASURES}


def scores(run: RecordedRun, row: Row) -> tuple[dict[str, float], dict[str, float]]:
    """Scores of a finished run with a held-out domain after the round of a row.

    Returns:
        Scores of the shared model by domain, on the clients' test images and on the whole held-out domain;
        and means by name: generalization: the shared model on the held-out domain, if there is one; clients:
        the shared model on the clients' test images, mean over clients, if they have some; personal: the
        personal models on
        `evaluation.personal_split`, if scored; comprehensive: unweighted mean over all domains, the held-out
        one included, with `clients`.
    """
    now = [score for score in run.scores_at(row["round"]) if score["metric"] == run.metric]

    def values(exchange: str, model: str) -> dict[str, float]:
        mine = [r for r in now if r["exchange"] == exchange and r["model"] == model]
        return {r["client"]: float("nan") if r["value"] is None else r["value"] for r in mine}

    held_out = values("report_held_out", "global")
    own = values("report_clients", "global")
    own = own or of_drawn(values("report_domains", "global"), run.drawn_clients)
    domains = {**values("report_domains", "global"), **held_out}
    means = {"generalization": _mean(held_out.values())} if held_out else {}
    if own:  # without test images of the clients there is no score of the shared model there
        means |= {"clients": _mean(own.values()), "comprehensive": _mean(domains.values())}
    personal = values("report_clients", "personal")
    return domains, means | ({"personal": _mean(personal.values())} if personal else {})


def fold_of(folder: Path, algorithm: str, held_out: str) -> Fold:
    """The finished run in a folder with a held-out domain, after a look at its partition (`check_unseen`)."""
    run = RecordedRun(folder, "validation")
    check_unseen(run, held_out)
    return Fold(algorithm, held_out, run)


def check_unseen(run: RecordedRun, domain: str) -> None:
    """Check that the held-out domain was used for testing only.

    Raises:
        RuntimeError: The manifest assigns its images to a client or to another split.
    """
    of_domain = [r for r in run.partition_rows("domain", "client", "split") if r["domain"] == domain]
    if not of_domain or any(row["split"] != NO_CLIENT or row["client"] for row in of_domain):
        raise RuntimeError(
            f"{run.path}: images of the held-out domain {domain!r} are not used for testing only"
        )


def leave_one_out_table(runs: MethodRuns) -> Tables:
    """Two tables of all folds: targets in rows, clients in columns; and targets in columns.

    The first is the layout of FedCLIP's Table 2 with the averages of its other tables and of FFT-GP's, the
    second that of FedCLIP's Table 1.
    """
    folds = [fold_of(path, name, domain) for domain, name, path in runs.each()]
    table = by_target(folds, title_of(runs, "each domain held out in turn"), folds[0].run.ties)
    table = replace(table, notes=(*table.notes, *on_heads(runs, rule="")))
    return Tables((table, by_measure(folds)))


def on_heads(runs: MethodRuns, rule: str = LAST_ROUND) -> tuple[str, ...]:
    """Notes on the heads of a protocol, on the reported round, and on methods whose clients keep tensors.

    Args:
        runs: The runs of the protocol.
        rule: As of `head_notes`.
    """
    recorded = [run for *_, run in runs.recorded()]
    values = differing_values(
        {run.config["algorithm"]: run.config for run in recorded if "algorithm" in run.config}
    )
    return (
        *cut_notes(recorded),
        *head_notes(recorded, rule),
        *own_tensors(run.config for run in recorded),
        *([values] if values else []),
    )


def title_of(runs: MethodRuns, how: str) -> str:
    """Title of the table of a protocol, with all methods in it; `how` says what its runs are."""
    config = runs.config
    return (
        f"{', '.join(runs.methods)} on {config['data']['name']}, {config['model']['name']}, "
        f"{config['tuning']['name']}, seed {config['seed']}, {how}"
    )


def by_target(folds: Sequence[Fold], title: str, ties: Ties = "first") -> Table:
    """One row per held-out domain and algorithm, and their means; the notes name the selected round."""
    targets = list(dict.fromkeys(fold.held_out for fold in folds))
    shown = [m for m in MEASURES if not m.startswith("last") and any(m in fold.measures for fold in folds)]
    rows = []
    for fold in folds:
        stars = {name: "*" if name == fold.held_out else "" for name in targets}
        cells = [percent(fold.domains.get(name)) + stars[name] for name in targets]
        cells += [percent(fold.measures.get(measure)) for measure in shown]
        rows.append((fold.held_out, fold.algorithm, str(fold.run.reported["round"]), *cells))
    for name in dict.fromkeys(fold.algorithm for fold in folds):
        mine = [fold for fold in folds if fold.algorithm == name]
        means = (percent(_mean_of(mine, m)) for m in shown)
        rows.append(("mean", name, "", *[""] * len(targets), *means))
    columns = ("held out", "method", "round", *targets, *(MEASURES[m] for m in shown))
    notes = (f"{folds[0].run.metric} in {NOTES[0]}", *(note.format(ties=ties) for note in NOTES[1:]))
    return Table(title, columns, tuple(rows), notes)


def by_measure(folds: Sequence[Fold]) -> Table:
    """One row per measure and algorithm, one column per held-out domain, and the mean."""
    rows = []
    for measure, label in MEASURES.items():
        for name in dict.fromkeys(fold.algorithm for fold in folds):
            mine = [fold for fold in folds if fold.algorithm == name]
            if any(measure in fold.measures for fold in mine):
                cells = (percent(fold.measures.get(measure)) for fold in mine)
                rows.append((label, name, *cells, percent(_mean_of(mine, measure))))
    targets = dict.fromkeys(fold.held_out for fold in folds)
    return Table("by held-out domain", ("measure", "method", *targets, "AVG"), tuple(rows))


def _mean_of(folds: Sequence[Fold], measure: str) -> float | None:
    values = [fold.measures[measure] for fold in folds if measure in fold.measures]
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
    WORST_DOMAIN.words,
    SIGMA_CLIENT.words,
)


def few_shot_table(runs: MethodRuns) -> Tables:
    """One row for each number of shots and algorithm, with the scores of the last round that has some.

    A run without scores (evaluation.every=0) has empty cells.

    Args:
        runs: The finished runs by `shots-<number>`, in the order of the rows.
    """
    rows, metrics = [], []
    for part, name, run in runs.recorded():
        last, metric, samples = run.reported, run.metric, str(training_samples(run))
        metrics.append(metric)
        statistics = (MEAN, OVER_DOMAINS, WORST_DOMAIN, SIGMA_CLIENT)
        values = (percent(last.get(column.name(metric))) for column in statistics)
        rows.append((part.removeprefix("shots-"), name, samples, str(last.get("round", "")), *values))
    title = title_of(runs, "few training samples of each class and client")
    notes = (
        f"{metrics[0]} in percent, of the shared model after the last round; clients and domains: unweighted "
        f"means; training samples: of all clients together",
        *on_heads(runs),
    )
    return Tables((Table(title, FEW_SHOT_COLUMNS, tuple(rows), notes),))


def training_samples(run: RecordedRun) -> int:
    """Number of training samples of all clients of a run."""
    return sum(row["split"] == "train" for row in run.partition_rows("split"))


def harmonic_mean(first: float, second: float) -> float:
    """2 a b / (a + b), by which tables of base and new classes rank methods; 0 where both are 0.

    >>> harmonic_mean(0.75, 0.5), harmonic_mean(0.0, 0.0)
    (0.6, 0.0)
    """
    return 2 * first * second / (first + second) if first + second else 0.0


def round_of(row: Row) -> str:
    """The round of a row as text; empty where there is no row."""
    return str(row.get("round", ""))


def of_global(row: Row, statistic: str = "") -> float | None:
    """A score of the global model, whichever model the method deploys; None: it was not scored.

    Args:
        row: Row of a round.
        statistic: What follows the metric in the name of the column, such as `_domain`.
    """
    key = metric_of_scores(row) + statistic
    value = row.get(GLOBAL + key, row.get(key))
    return None if value is None else float(value)


def of_personal(row: Row) -> float | None:
    """The mean over clients of the scores of their personal models; None: these were not scored.

    Args:
        row: Row of a round. Where a method deploys personal models, their columns have no prefix.
    """
    key = metric_of_scores(row)
    value = row.get(PERSONAL + key, row.get(key) if GLOBAL + key in row else None)
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
    recorded = list(runs.recorded())
    kept = {name: run.own_tensors for part, name, run in recorded if part == NEW}
    notes = []
    for name, (count, clients) in kept.items():
        if count:
            few = f"; {clients - count} of {clients} clients never trained and have initial values of these"
            what = "base and new classes are scored at each client, with the tensors that stay at it"
            notes.append(f"{name}: {what}{few if count < clients else ''}")
    others = [run.config for _, name, run in recorded if not kept.get(name, (0, 0))[0]]
    return (*head_notes(run for *_, run in recorded), *notes, *own_tensors(others))


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
        (part.removeprefix("from-"), name, run.reported, _targets(run)) for part, name, run in runs.recorded()
    ]
    domains = list(dict.fromkeys(domain for *_, targets in parts for domain in targets))
    rows = []
    for source, name, last, targets in parts:
        scores = [targets.get(domain) for domain in domains]
        mean = last.get(MEAN.name(metric_of_scores(last), HELD_OUT))
        cells = map(percent, (of_global(last, "_domain"), *scores, mean))
        rows.append((source, name, round_of(last), *cells))
    metric = metric_of_scores(parts[0][2])
    notes = (
        f"{metric} in percent of the global model; own domains: mean over the domains of the",
        "clients, on their test samples; other domains: no client has an example of them, on all of their",
        "samples, with their unweighted mean",
    )
    columns = ("trained on", "method", "round", "own domains", *domains, "mean of the others")
    own = on_heads(runs)
    return Tables((Table(title_of(runs, "other domains"), columns, tuple(rows), notes + own),))


def _targets(run: RecordedRun) -> dict[str, float | None]:
    """Scores of the global model by domain, on the domains without clients, in the reported round."""
    return {
        score["client"]: score["value"]
        for score in (run.scores_at(run.reported["round"]) if run.reported else ())
        if (score["exchange"], score["model"], score["metric"]) == ("report_held_out", "global", run.metric)
    }


def _by_method(runs: MethodRuns, parts: Sequence[str]) -> list[tuple[Any, ...]]:
    """Name of each method, and the reported row of its run in each part; empty: it is not finished."""
    last = {(part, name): run.reported for part, name, run in runs.recorded()}
    return [(name, *(last.get((part, name), {}) for part in parts)) for name in runs.methods]


UNSEEN_CLIENTS_COLUMNS = ("unseen", "method", "round", "clients that train")
OWN_MODELS = "clients that train, personal"
"""Column that only tables with a method that has personal models have."""
NEVER_TRAIN = ("unseen clients", "worst unseen", "unseen, adapted", "worst unseen, adapted")


def unseen_clients_table(runs: MethodRuns) -> Tables:
    """One row for each number of unseen clients and algorithm, with the scores of the last scored round.

    Args:
        runs: The finished runs by `unseen-<number>`, in the order of the rows.
    """
    recorded = list(runs.recorded())
    scored = [(part, name, run.reported) for part, name, run in recorded]
    with_personal = any(of_personal(last) is not None for *_, last in scored)
    metric = metric_of_scores(next((last for *_, last in scored if last), {}))
    rows = []
    for part, name, last in scored:
        scores = [of_global(last), *([of_personal(last)] if with_personal else [])]
        statistics = ((column, of) for of in (UNSEEN, ADAPTED) for column in (MEAN, WORST_UNSEEN))
        scores += [last.get(column.name(metric, of)) for column, of in statistics]
        rows.append((part.removeprefix("unseen-"), name, round_of(last), *map(percent, scores)))
    evaluations = [run.config["evaluation"] for *_, run in recorded]
    steps = count_of(max(each["local_steps"] for each in evaluations) or LOCAL_STEPS, "local step")
    notes = (
        f"{metric} in percent, unweighted means over clients; of the global model on the test samples of",
        "clients that train and of unseen clients, which never do; adapted: the models that these would",
        f"deploy after {steps} from the global model, which has had none of them; nothing of these is kept",
        *(("personal: the clients' own models, which have had local steps, too",) if with_personal else ()),
        *on_heads(runs),
    )
    columns = (*UNSEEN_CLIENTS_COLUMNS, *((OWN_MODELS,) if with_personal else ()), *NEVER_TRAIN)
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
