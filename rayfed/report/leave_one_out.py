"""Tables of the protocol leave_one_out: one run per domain, in which no client has data of that domain.

Model selection as in Lu et al., FedCLIP, 2023: the first round with the highest accuracy of the global model
on the clients' validation images, mean over clients. No image of the held-out domain is used for
training or selection, which is checked in the manifest of each run. The runs of `compare` (for CLIP models:
zero-shot) get the same rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from rayfed.config.schema import Config
from rayfed.objective import METRICS, metric_of
from rayfed.record.layout import COMPARE
from rayfed.record.readers import read_rows
from rayfed.report.run_tables import RunTables, own_tensors
from rayfed.report.table import Table, drawn_clients, of_drawn

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
class Outcome:
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


def selected(rows: list[dict[str, Any]], ties: Ties = "first") -> dict[str, Any]:
    """Row of the selected round: the first or the last with the highest validation score."""
    scored = [(row[f"val_{metric}"], row) for row in rows if (metric := metric_of(row, "val_"))]
    fallback = scored[-1]
    if ties == "last":
        scored.reverse()
    return max((pair for pair in scored if pair[0] is not None), key=lambda pair: pair[0], default=fallback)[
        1
    ]


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


def outcome(folder: Path, algorithm: str, held_out: str, ties: Ties = "first") -> Outcome:
    """Scores of a finished run with a held-out domain, after checking its manifest (`check_unseen`).

    Args:
        folder: Folder of the run.
        algorithm: Name of the algorithm.
        held_out: The held-out domain.
        ties: Round that is selected of those with the highest validation score.
    """
    check_unseen(folder, held_out)
    history = read_rows(folder)
    chosen = selected(history, ties)
    last = selected(history[-1:])
    domains, best = scores(folder, chosen["round"])
    final = {f"last_{name}": value for name, value in scores(folder, last["round"])[1].items()}
    return Outcome(
        algorithm=algorithm,
        held_out=held_out,
        round=chosen["round"],
        domains=domains,
        metric=metric_of(chosen, "val_") or METRICS[0],
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


def leave_one_out_table(config: Config, folders: Mapping[str, Path]) -> Tables:
    """Two tables of all folds: targets in rows, clients in columns; and targets in columns.

    The first is the layout of FedCLIP's Table 2 with the averages of its other tables and of FFT-GP's, the
    second that of FedCLIP's Table 1.
    """
    found = [
        outcome(path, name, domain, config.evaluation.ties) for domain, name, path in runs_in(config, folders)
    ]
    title = title_of(config, "each domain held out in turn")
    table = by_target(found, title, config.evaluation.ties)
    table = replace(table, notes=table.notes + on_own_tensors(config, folders))
    return Tables((table, by_measure(found)))


def methods_in(config: Config, folder: Path) -> list[tuple[str, Path]]:
    """Name and folder of each method in a run of a protocol: the main one, then those of `compare`."""
    others = (config.compare,) if isinstance(config.compare, str) else config.compare
    found = [(name, folder / COMPARE / name) for name in others if name != config.algorithm]
    return [(config.algorithm, folder), *found]


def runs_in(config: Config, folders: Mapping[str, Path]) -> Iterator[tuple[str, str, Path]]:
    """Name of each run of a protocol, with the name and the folder of each method in it."""
    for part, folder in folders.items():
        for name, path in methods_in(config, folder):
            yield part, name, path


def on_own_tensors(config: Config, folders: Mapping[str, Path]) -> tuple[str, ...]:
    """A note on the methods of a protocol whose clients keep tensors; none where there is no such method.

    Args:
        config: The experiment of all runs.
        folders: Folders of its runs.
    """
    return own_tensors(RunTables(path).config for _, _, path in runs_in(config, folders))


def title_of(config: Config, how: str) -> str:
    """Title of the table of a protocol, with all methods in it; `how` says what its runs are."""
    names = ", ".join(name for name, _ in methods_in(config, Path()))
    return (
        f"{names} on {config.data.name}, {config.model.name}, {config.tuning['name']}, "
        f"seed {config.seed}, {how}"
    )


def by_target(found: Sequence[Outcome], title: str, ties: Ties = "first") -> Table:
    """One row per held-out domain and algorithm, and their means; the notes name the selected round."""
    targets = list(dict.fromkeys(o.held_out for o in found))
    shown = [m for m in MEASURES if not m.startswith("last") and any(m in o.measures for o in found)]
    rows = []
    for o in found:
        stars = {name: "*" if name == o.held_out else "" for name in targets}
        cells = [percent(o.domains.get(name)) + stars[name] for name in targets]
        rows.append(
            (o.held_out, o.algorithm, str(o.round), *cells, *(percent(o.measures.get(m)) for m in shown))
        )
    for name in dict.fromkeys(o.algorithm for o in found):
        mine = [o for o in found if o.algorithm == name]
        means = (percent(_mean_of(mine, m)) for m in shown)
        rows.append(("mean", name, "", *[""] * len(targets), *means))
    columns = ("held out", "method", "round", *targets, *(MEASURES[m] for m in shown))
    notes = (f"{found[0].metric} in {NOTES[0]}", *(note.format(ties=ties) for note in NOTES[1:]))
    return Table(title, columns, tuple(rows), notes)


def by_measure(found: Sequence[Outcome]) -> Table:
    """One row per measure and algorithm, one column per held-out domain, and the mean."""
    rows = []
    for measure, label in MEASURES.items():
        for name in dict.fromkeys(o.algorithm for o in found):
            mine = [o for o in found if o.algorithm == name]
            if any(measure in o.measures for o in mine):
                cells = (percent(o.measures.get(measure)) for o in mine)
                rows.append((label, name, *cells, percent(_mean_of(mine, measure))))
    targets = dict.fromkeys(o.held_out for o in found)
    return Table("by held-out domain", ("measure", "method", *targets, "AVG"), tuple(rows))


def _mean_of(outcomes: Sequence[Outcome], measure: str) -> float | None:
    values = [o.measures[measure] for o in outcomes if measure in o.measures]
    return _mean(values) if values else None


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))


def percent(value: float | None) -> str:
    """A fraction in percent with two digits after the point; empty for None."""
    return "" if value is None else f"{100 * value:.2f}"
