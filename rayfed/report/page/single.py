"""The page about one run: summary, scores, fairness, data of the clients, cost, method and settings."""

from __future__ import annotations

import base64
import json
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from rayfed.columns import (
    BEST_TENTH,
    BYTES_DOWN,
    BYTES_UP,
    LOCAL_STEPS,
    MEAN,
    OVER_DOMAINS,
    SECONDS,
    SIGMA_CLIENT,
    SIGMA_TYPE,
    WORST_CLIENT,
    WORST_DOMAIN,
    WORST_NAME,
    WORST_TENTH,
    Kind,
    ResultColumn,
    level_words,
    share_of,
)
from rayfed.evaluation.metrics import spread
from rayfed.objective import METRICS
from rayfed.record.readers import read_bytes, reading
from rayfed.record.recorded_run import RecordedRun
from rayfed.report.answer_tables import on_page
from rayfed.report.comparison import frozen_notes
from rayfed.report.final_table import KINDS as WITHOUT_COLUMNS
from rayfed.report.final_table import (
    fault_notes,
    head_notes,
    level_in_words,
    own_tensors,
    privacy_notes,
    reporting_rule,
    selection_notes,
    total_cost,
    total_steps,
)
from rayfed.report.method_figures import LABELS, gap_variances, matched_groups
from rayfed.report.page.charts import (
    ROUND,
    Axis,
    Cells,
    Colours,
    Series,
    curves,
    heat_map,
    percent_axis,
    share_axis,
    thin,
)
from rayfed.report.page.parts import Figure, Page, Part, Section, Sentences, Tiles, in_time, shown_as
from rayfed.report.report_md import WORDS
from rayfed.terminal.table_formats import Cell, Column, Table, in_bytes
from rayfed.types import Row

HEADLINES = (MEAN, OVER_DOMAINS, WORST_DOMAIN, WORST_TENTH, SIGMA_TYPE, SIGMA_CLIENT)
"""Columns of a round that the summary shows."""


def summary(run: RecordedRun) -> Section:
    """The numbers that matter most, and notes on the run."""
    return Section("Summary", [Tiles(title="Result", pairs=[*_pairs(run)]), Sentences(sentences=_rules(run))])


def _unit(words: str, run: RecordedRun) -> str:
    """Words with the unit of the metric: none, where it is no share."""
    return words if share_of(run.metric) != 1 else words.removesuffix(", %").removesuffix(", points")


def _headline(column: ResultColumn, run: RecordedRun) -> str:
    """Words for a column of the reported round, with the name of the worst domain, and with its unit."""
    words = ", ".join(filter(None, (column.words, column.about)))
    if column is MEAN:
        words = level_in_words(run.reported, run.metric, run.prefix)
    elif column is WORST_DOMAIN:
        words += f": {run.reported.get(WORST_NAME.name(of=run.prefix))}"
    return _unit(f"{words}, {'points' if column.kind == 'points' else '%'}", run)


def _pairs(run: RecordedRun) -> Iterator[tuple[str, str]]:
    score = Column("", shown_as("percent", run.metric))
    for column in HEADLINES:
        if (value := run.number(column)) is not None:
            yield _headline(column, run), Column("", shown_as(column.kind, run.metric)).show(value)
    for words, value in run.unseen.items():
        yield _unit(f"{words}, %", run), score.show(value)
    if run.held_out_score is not None:
        name = ", ".join(run.held_out)
        yield _unit(f"held-out domain: {name}, %", run), score.show(run.held_out_score)
    for part, value in run.without.items():
        yield _unit(f"{WITHOUT_COLUMNS[part]}, mean over domains, %", run), score.show(value)
    yield "rounds", f"{len(run.rounds)} of {run.planned}"
    if run.clients:
        yield "clients", f"{len(run.clients):,}"
    for column in (BYTES_UP, BYTES_DOWN):
        yield column.words, in_bytes(column.total(run.rounds))
    yield from _training(run)
    yield SECONDS.words, in_time(SECONDS.total(run.rounds))


def _training(run: RecordedRun) -> Iterator[tuple[str, str]]:
    """Cost of training, if it was counted."""
    steps, rows = total_steps(run.rounds)
    if steps:
        yield LOCAL_STEPS.words, f"{steps:,}, on {rows:,} examples"
    gflops, trained = total_cost(run.rounds)
    if trained:
        yield "training of all clients, GFLOP", Column("", "number").show(gflops)
        yield "parameters that a client trains", Column("", "count").show(trained)


def _rules(run: RecordedRun) -> list[str]:
    """The reported round, and the events of the run."""
    if not run.reported:
        return ["No round was evaluated yet."]
    rule = reporting_rule(run)
    whose = "the clients' own models" if run.deployed == "personal" else "the global model"
    rules = [f"Reported is the {run.metric} of {whose} after round {run.reported['round']}, {rule}."]
    rules += [note[0].upper() + note[1:] + "." for note in head_notes([run], rule="")]
    rules += [f"{note}." for note in own_tensors([run.config])]
    others = () if run.by_validation or run.best else selection_notes(run.rounds)
    rules += [f"Other rules: {note.partition('; ')[2]}." for note in others]
    notes = (*privacy_notes(run.config, run.rounds), *fault_notes(run.rounds))
    rules += [note[0].upper() + note[1:] + "." for note in notes]
    if run.ended.reason:
        rules.append(f"The run ended after round {run.ended.round} of {run.planned}: {run.ended.reason}.")
    if not run.has_all_rounds:
        rules.append(f"The run is not finished: {len(run.rounds)} of {run.planned} rounds.")
    if run.digest:
        rules.append(f"SHA-256 digest of the final tensors: {run.digest}.")
    return rules


MOST_CURVES = 10
"""Largest number of domains that have a curve each."""
MOST_CLIENTS = 200
"""Largest number of clients that have a row each; of more, quantiles are shown."""
MOST_ROUNDS = 250
"""Largest number of columns of a heat map over rounds."""
QUANTILES = {
    "lowest": 0.0,
    "10 %": 0.1,
    "25 %": 0.25,
    "median": 0.5,
    "75 %": 0.75,
    "90 %": 0.9,
    "highest": 1.0,
}
"""Text in place of the clients if there are too many of them."""


def over_rounds(run: RecordedRun) -> Section:
    """Score and loss by domain over the rounds, for each kind of model."""
    parts: list[Part] = []
    for model in run.models:
        words = "" if len(run.models) == 1 else f" of the {model} model{'s' if model == 'personal' else ''}"
        for metric in (run.metric, "loss"):
            axis = Axis(name="loss") if metric == "loss" else share_axis(run.metric)
            if series := _by_domain(run, model, metric):
                caption = "One curve a domain; its band goes from the lowest to the highest of its clients."
                if any(one.dashed for one in series):
                    caption += " Dashed: a domain of which no client has an example."
                if len(series) == len(QUANTILES):
                    caption = "Quantiles over the domains, of which there are too many for a curve each."
                parts.append(curves(f"Test {metric} by domain{words}", series, ROUND, axis, caption))
    return Section("Curves", parts)


def _by_domain(run: RecordedRun, model: str, metric: str) -> list[Series]:
    rows = run.scores
    rows = rows[(rows["model"] == model) & (rows["metric"] == metric)]
    own = rows[rows["of"] == "client"].groupby(["domain", "round"])["value"].agg(["min", "max"])
    domains = rows[rows["of"] != "client"]
    names = run.order(list(domains["name"].unique()))
    if len(names) > MOST_CURVES:
        return quantile_curves(domains)
    series = []
    for place, name in enumerate(names):
        of = domains[domains["name"] == name].sort_values("round")
        edges = own.loc[name].reindex(of["round"]) if name in own.index.get_level_values(0) else None
        low, high = (None, None) if edges is None else (edges["min"].tolist(), edges["max"].tolist())
        held_out = bool((of["of"] == "held out").any())
        series.append(
            Series(
                label=name + (" (held out)" if held_out else ""),
                x=of["round"].tolist(),
                y=of["value"].tolist(),
                low=low,
                high=high,
                place=_place(run, name, place),
                dashed=held_out,
            )
        )
    return series


def _place(run: RecordedRun, domain: str, other: int) -> int:
    """The place of a domain in the data set, which decides its colour in all figures."""
    return run.domains.index(domain) if domain in run.domains else other


def quantile_curves(rows: pd.DataFrame) -> list[Series]:
    """Quantiles of the column `value` over the rounds."""
    quantiles = rows.groupby("round")["value"].quantile(np.asarray(list(QUANTILES.values()))).unstack()
    return [
        Series(label=name, x=quantiles.index.tolist(), y=quantiles[share].tolist())
        for name, share in QUANTILES.items()
    ]


def domains_and_clients(run: RecordedRun) -> Section:
    """Tables of the domains and of the clients, and the clients' scores at the end and over the rounds."""
    parts: list[Part] = [Table(title="Domains", columns=_domain_columns(run), rows=list(_domain_rows(run)))]
    own = run.now("client", run.deployed, run.metric)
    if own.empty:
        return Section("Domains and clients", parts)
    ordered = np.sort(own.to_numpy())
    parts.append(
        curves(
            "Score of each client, in ascending order",
            [
                Series(label="client", x=list(range(1, len(ordered) + 1)), y=ordered.tolist()),
                Series(
                    label="mean over clients",
                    x=[1, len(ordered)],
                    y=[float(ordered.mean())] * 2,
                    dashed=True,
                ),
            ],
            Axis(name="client, from the lowest", kind="count", whole=True),
            share_axis(run.metric),
            f"Round {run.reported['round']}.",
        )
    )
    parts.append(_clients_over_rounds(run))
    parts.append(_client_grid(run, own))
    return Section("Domains and clients", parts)


def _domain_columns(run: RecordedRun) -> list[Column]:
    what = run.environment.get("examples", "examples")
    counts = [Column("clients", "count"), Column(f"train {what}", "count"), Column(f"test {what}", "count")]
    scored = [Column(f"{model} {run.metric}", shown_as("percent", run.metric)) for model in run.models]
    return [
        Column("domain"),
        *counts,
        *scored,
        Column("lowest client", shown_as("percent", run.metric)),
        Column("highest client", shown_as("percent", run.metric)),
        Column("loss", "number"),
    ]


def _domain_rows(run: RecordedRun) -> Iterator[list[str | float | None]]:
    counts = split_counts(run)
    scored = {
        model: {**run.now("domain", model, run.metric), **run.now("held out", model, run.metric)}
        for model in run.models
    }
    loss = {**run.now("domain", run.deployed, "loss"), **run.now("held out", run.deployed, "loss")}
    own = run.now("client", run.deployed, run.metric)
    extremes = own.groupby(own.index.map(lambda cid: run.clients.get(str(cid), ""))).agg(["min", "max"])
    names = run.order([*run.domains, *(name for found in scored.values() for name in found)])
    for name in names:
        sizes = counts.get(name, {})
        ends = list(extremes.loc[name]) if name in extremes.index else [None, None]
        label = name + (" (held out)" if name in run.held_out else "")
        tested = sizes.get("test", 0) + sizes.get("held_out", 0)
        values = [scored[model].get(name) for model in run.models]
        yield [label, sizes.get("clients", 0), sizes.get("train", 0), tested, *values, *ends, loss.get(name)]


def split_counts(run: RecordedRun) -> dict[str, dict[str, int]]:
    """Numbers of clients and of examples of each split, by domain."""
    if run.partition is None:
        return {}
    manifest = run.partition.select(["domain", "split", "client"])
    pairs = manifest.group_by(["domain", "split"]).aggregate([([], "count_all")]).to_pylist()
    counts: dict[str, dict[str, int]] = {}
    for pair in pairs:
        counts.setdefault(pair["domain"], {})[pair["split"]] = pair["count_all"]
    for domain in run.clients.values():
        held = counts.setdefault(domain, {})
        held["clients"] = held.get("clients", 0) + 1
    return counts


def _clients_over_rounds(run: RecordedRun) -> Figure:
    """Scores of the clients over the rounds: a heat map, or quantiles of many clients."""
    rows = run.scores
    rows = rows[(rows["of"] == "client") & (rows["model"] == run.deployed) & (rows["metric"] == run.metric)]
    title = "Score of the clients over the rounds"
    if rows["name"].nunique() > MOST_CLIENTS:
        axis = share_axis(run.metric)
        return curves(title, quantile_curves(rows), ROUND, axis, "Quantiles over the clients.")
    value = Column(run.metric, shown_as("percent", run.metric))
    return by_client_and_round(run, title, rows.rename(columns={"name": "client"}), value)


def by_client_and_round(
    run: RecordedRun, title: str, rows: pd.DataFrame, value: Column, colours: Colours = "range"
) -> Figure:
    """A heat map of clients, domain by domain, and rounds.

    Args:
        title: What is shown.
        rows: Columns client, round and value.
        value: What the values are.
        colours: What the colours stand for.
    """
    table = rows.pivot_table(index="client", columns="round", values="value", observed=True, dropna=False)
    known = [cid for cid in run.clients if cid in table.index]
    table = table.reindex([*known, *(cid for cid in table.index if cid not in run.clients)])
    chosen = thin(len(table.columns), MOST_ROUNDS)
    table = table.iloc[:, chosen]
    cells = Cells(
        values=table.to_numpy(dtype=float),
        down=[str(cid) for cid in table.index],
        across=[str(number) for number in table.columns],
        row="client",
        column="round",
        value=value,
        colours=colours,
    )
    caption = "The clients are ordered by domain. An empty cell: the client took no part in the round."
    return heat_map(title, cells, caption)


def _client_grid(run: RecordedRun, own: pd.Series[float]) -> Table:
    """A row for each client, or the quantiles of each domain."""
    loss = run.now("client", run.deployed, "loss")
    if len(own) <= MOST_CLIENTS:
        numbers = Column(run.metric, shown_as("percent", run.metric)), Column("loss", "number")
        columns = [Column("client"), Column("domain"), *numbers]
        rows: list[list[Cell]] = [
            [str(cid), run.clients.get(str(cid), ""), float(own[cid]), float(loss.get(cid, np.nan))]
            for cid in [
                *(c for c in run.clients if c in own.index),
                *(c for c in own.index if c not in run.clients),
            ]
        ]
        return Table(title="Clients", columns=columns, rows=rows, filters={"domain": ""})
    domain = own.index.map(lambda cid: run.clients.get(str(cid), ""))
    spreads = own.groupby(domain).quantile(np.asarray(list(QUANTILES.values()))).unstack()
    counts = own.groupby(domain).size()
    columns = [
        Column("domain"),
        Column("clients", "count"),
        *(Column(q, shown_as("percent", run.metric)) for q in QUANTILES),
    ]
    quantiles: list[list[Cell]] = [
        [d, int(counts[d]), *spreads.loc[d]] for d in run.order(list(spreads.index))
    ]
    caption = f"Quantiles of the {run.metric} of {len(own):,} clients, which are too many for a row each."
    return Table(title="Clients, by domain", notes=(caption,), columns=columns, rows=quantiles)


LEVELS = (BEST_TENTH, MEAN, WORST_TENTH, WORST_DOMAIN, WORST_CLIENT)
"""Columns of a round about the level of the scores."""
DEVIATIONS = (SIGMA_TYPE, SIGMA_CLIENT)
MOST_STEPS = 200
"""Largest number of points of a cumulative curve."""


def fairness(run: RecordedRun) -> Section:
    """Deviations, the ends of the distribution, the cumulative curve of the clients' scores."""
    parts: list[Part] = []
    deviations = [
        of_rounds(run, column, f"{column.about.removeprefix('deviation ')} ({column.words})")
        for column in DEVIATIONS
    ]
    if any(one.x for one in deviations):
        axis = Axis(name="deviation", kind="points", low=0.0)
        caption = "Population standard deviations; 0: the model is equally good for all."
        shown = [one for one in deviations if one.x]
        parts.append(curves("Deviation of the scores", shown, ROUND, axis, caption))
    level = level_words(run.metric)
    levels = [of_rounds(run, column, level if column is MEAN else column.words) for column in LEVELS]
    if shown := [one for one in levels if one.x]:
        axis = share_axis(run.metric)
        caption = "A tenth: the mean over that many clients; shown from ten clients on."
        parts.append(curves("Best, mean and worst", shown, ROUND, axis, caption))
    scores = {f"{model} model": values for model in run.models if len(values := run.of_clients(model))}
    if scores:
        parts += [cumulative(scores, run.metric), spread_table(scores, run.metric, notes=test_sets([run]))]
    return Section("Fairness", parts)


def test_sets(runs: Sequence[RecordedRun]) -> tuple[str, ...]:
    """A sentence on clients that share a test set and a model, and so a score; none where none do."""
    counts: dict[tuple[int, int], None] = {}
    for run in runs:
        alike = run.scored_alike(run.deployed)
        if (distinct := len({*alike.values()})) < len(alike):
            counts[len(alike), distinct] = None
    texts = [f"{clients} clients share {distinct} test sets" for clients, distinct in counts]
    if not texts:
        return ()
    what = "clients with the same test set have the same score of the global model, and each counts"
    return (f"{'; '.join(texts)}: {what}.",)


def of_rounds(run: RecordedRun, column: ResultColumn, words: str) -> Series:
    """A column of the rounds as a curve; without points where no round has it."""
    full = column.name(run.metric, run.prefix)
    points = [(row["round"], row[full]) for row in run.rounds if isinstance(row.get(full), int | float)]
    return Series(label=words, x=[number for number, _ in points], y=[value for _, value in points])


def cumulative(scores: dict[str, npt.NDArray[np.float64]], metric: str, whose: str = "") -> Part:
    """Share of the clients whose score is at most this high, one curve a name; `whose`: which clients."""
    series = []
    for name, values in scores.items():
        places = steps(values)
        shares = [float((values <= place).mean()) for place in places]
        series.append(Series(label=name, x=places, y=shares, steps=True))
    return curves(
        "Share of the clients with at most this score",
        series,
        share_axis(metric),
        percent_axis("share of the clients"),
        f"The further to the right, the better; the steeper, the more equal the clients are. {whose}".strip(),
    )


def steps(values: Sequence[float] | npt.NDArray[np.float64]) -> list[float]:
    """Places at which a cumulative curve is drawn: all scores, or evenly spaced quantiles of many."""
    values_once = np.unique(values)
    if len(values_once) > MOST_STEPS:
        values_once = np.quantile(values, np.linspace(0, 1, MOST_STEPS))
    return [float(v) for v in values_once]


def spread_table(
    scores: dict[str, npt.NDArray[np.float64]],
    metric: str,
    what: str = "model",
    notes: tuple[str, ...] = (),
) -> Table:
    """Level and spread of the clients' scores, with the columns of q-FFL's tables."""
    kind = shown_as("percent", metric)
    columns = [
        Column(what),
        Column("clients", "count"),
        Column("mean", kind),
        Column("deviation", shown_as("points", metric)),
        Column("worst tenth", kind),
        Column("best tenth", kind),
        Column("worst client", kind),
        Column("variance, %²" if kind == "percent" else "variance", "number"),
    ]
    rows: list[list[Cell]] = []
    for name, values in scores.items():
        level = spread(values.tolist())
        rows.append(
            [
                *(name, len(values), level.average, float(values.std()), level.worst, level.best),
                *(float(values.min()), 1e4 * level.variance),
            ]
        )
    return Table(title=f"Distribution of the clients' {metric}", columns=columns, rows=rows, notes=notes)


MOST_CLASSES = 60
"""Largest number of classes that have a column each."""


def holdings(run: RecordedRun) -> Section:
    """Classes of the clients, or of the domains of many clients, and numbers of examples."""
    if run.partition is None:
        return Section("Who has what", [])
    what = run.environment.get("examples", "examples")
    names = ["client", "domain", "label", "split"]
    rows = run.partition.select(names).to_pandas(strings_to_categorical=True)
    own = rows[rows["client"].astype(str) != ""]
    parts: list[Part] = []
    if not run.segmentation and 1 < own["label"].nunique() <= MOST_CLASSES:
        parts.append(_classes(run, own, what))
    parts.append(_sizes(run, own, what))
    parts.append(_table(run, own, what))
    return Section("Who has what", parts)


def _classes(run: RecordedRun, own: pd.DataFrame, what: str) -> Figure:
    by_client = len(run.clients) <= MOST_CLIENTS
    key = "client" if by_client else "domain"
    counts = own.groupby([key, "label"], observed=True).size().unstack(fill_value=0)
    order = list(run.clients) if by_client else run.order([str(name) for name in counts.index])
    counts = counts.reindex([name for name in order if name in counts.index])
    cells = Cells(
        values=counts.to_numpy(dtype=float),
        down=[str(name) for name in counts.index],
        across=class_names(run, [int(label) for label in counts.columns]),
        row=key,
        column="class",
        value=Column(what, "count"),
        colours="zero",
    )
    caption = (
        f"All splits of the clients' own {what}. The clients are ordered by domain." if by_client else ""
    )
    return heat_map(f"Classes of each {key}", cells, caption)


def class_names(run: RecordedRun, labels: Sequence[int]) -> list[str]:
    """Names of these classes, from the manifest; their numbers where it has no names."""
    names = run.about_partition.get("classes", [])
    return [str(names[label]) if label < len(names) else str(label) for label in labels]


def _sizes(run: RecordedRun, own: pd.DataFrame, what: str) -> Figure:
    """Numbers of training examples of the clients, the largest first."""
    counts = own[own["split"] == "train"].groupby("client", observed=True).size().sort_values(ascending=False)
    every = np.zeros(max(len(run.clients), len(counts)), dtype=int)
    every[: len(counts)] = counts.to_numpy()
    return curves(
        f"Training {what} of each client, the largest first",
        [Series(label=f"training {what}", x=list(range(1, len(every) + 1)), y=every.tolist())],
        Axis(name="client, from the largest", kind="count", whole=True),
        Axis(name=what, kind="count", low=0.0),
    )


def _table(run: RecordedRun, own: pd.DataFrame, what: str) -> Table:
    """Numbers of examples by split: a row for each client, or quantiles for each domain."""
    counts = own.groupby(["client", "split"], observed=True).size().unstack(fill_value=0)
    splits = [name for name in ("train", "val", "test") if name in counts.columns]
    if len(run.clients) <= MOST_CLIENTS:
        classes = own.groupby("client", observed=True)["label"].nunique()
        columns = [Column("client"), Column("domain"), *(Column(f"{s} {what}", "count") for s in splits)]
        held = counts.to_dict("index")
        rows: list[list[Cell]] = [
            [cid, domain, *(int(held[cid][s]) for s in splits), int(classes[cid])]
            for cid, domain in run.clients.items()
            if cid in held
        ]
        columns.append(Column("classes", "count"))
        return Table(title="Examples of each client", columns=columns, rows=rows, filters={"domain": ""})
    total = counts.get("train", counts.sum(axis=1))
    domain = total.index.map(lambda cid: run.clients.get(str(cid), "")).astype(str)
    spreads = total.groupby(domain).quantile(np.asarray(list(QUANTILES.values()))).unstack()
    sizes = total.groupby(domain).size()
    columns = [Column("domain"), Column("clients", "count"), *(Column(q, "count") for q in QUANTILES)]
    quantiles: list[list[Cell]] = [
        [d, int(sizes[d]), *spreads.loc[d]] for d in run.order(list(spreads.index))
    ]
    caption = "Quantiles over the clients of each domain, which are too many for a row each."
    return Table(title=f"Training {what} of a client", notes=(caption,), columns=columns, rows=quantiles)


DIRECTIONS = {"down": "to the clients", "up": "to the server"}
SENT = Axis(name="sent in both directions", kind="bytes", low=0.0)
OPERATIONS = Axis(name="training of all clients, GFLOP", low=0.0)
MOST_EVENTS = 200
"""Largest number of failures that are listed one by one."""


def transfers(run: RecordedRun) -> Section:
    """Bytes over the rounds, by exchange, by domain and by client, and the score that they bought."""
    parts: list[Part] = []
    numbers = [row["round"] for row in run.rounds]
    if numbers:
        series = [
            Series(label=words, x=numbers, y=[float(row.get(f"bytes_{way}") or 0) for row in run.rounds])
            for way, words in DIRECTIONS.items()
        ]
        axis = Axis(name="sent", kind="bytes", low=0.0)
        parts.append(curves("Bytes sent in each round", series, ROUND, axis))
        caption = " ".join(f"{note[0].upper()}{note[1:]}." for note in frozen_notes(run.config))
        parts += _score_over(run, "Score over the bytes sent", SENT, bytes_of, caption)
    rows = run.frame("transfers", ["round", "exchange", "client", "down", "up"])
    if not rows.empty:
        rows = rows.assign(client=rows["client"].astype(str), exchange=rows["exchange"].astype(str))
        by = rows.groupby("exchange", sort=False)[["down", "up"]].sum()
        parts.append(_shares("Where the bytes went, by exchange", "exchange", by))
        domain = rows["client"].map(run.clients).fillna("other")
        by = rows.groupby(domain)[["down", "up"]].sum()
        by = by.reindex(run.order([str(d) for d in by.index]))
        parts.append(_shares("Where the bytes went, by domain", "domain", by))
        parts.append(_by_client(run, rows.groupby("client")[["down", "up"]].sum()))
    return Section("Transfers", parts)


def _score_over(
    run: RecordedRun, title: str, axis: Axis, of: Callable[[Row], float], caption: str = ""
) -> Iterator[Part]:
    """The score after each round over what all rounds until then cost, `of` being the cost of one."""
    key = run.prefix + run.metric
    total = list(accumulate(map(of, run.rounds)))
    points = [(t, row[key]) for t, row in zip(total, run.rounds, strict=True) if row.get(key) is not None]
    if points and total[-1]:
        series = Series(label=level_words(run.metric), x=[t for t, _ in points], y=[v for _, v in points])
        yield curves(title, [series], axis, share_axis(run.metric), caption)


def _shares(title: str, what: str, sums: pd.DataFrame) -> Table:
    """Bytes by the index of a table with the columns down and up, and their share of all bytes."""
    total = float(sums.to_numpy().sum()) or 1.0
    rows: list[list[Cell]] = [
        [str(name), float(down), float(up), float(down + up) / total]
        for name, down, up in zip(sums.index, sums["down"], sums["up"], strict=True)
    ]
    columns = [Column(what), *(Column(words, "bytes") for words in DIRECTIONS.values())]
    return Table(title=title, columns=[*columns, Column("share of all", "percent")], rows=rows)


def _by_client(run: RecordedRun, sums: pd.DataFrame) -> Table:
    """Bytes of each client over the run, or quantiles of many."""
    ways = [Column(words, "bytes") for words in DIRECTIONS.values()]
    rows: list[list[Cell]]
    if len(sums) <= MOST_CLIENTS:
        order = [cid for cid in run.clients if cid in sums.index]
        rows = [[cid, run.clients[cid], float(sums["down"][cid]), float(sums["up"][cid])] for cid in order]
        columns = [Column("client"), Column("domain"), *ways]
        return Table(
            title="Bytes of each client", columns=columns, rows=rows, filters={"domain": ""}, folded=True
        )
    quantiles = sums.quantile(list(QUANTILES.values()))
    rows = [[name, *map(float, quantiles.loc[share])] for name, share in QUANTILES.items()]
    caption = f"Quantiles over {len(sums):,} clients, which are too many for a row each."
    return Table(title="Bytes of a client", notes=(caption,), columns=[Column("quantile"), *ways], rows=rows)


def times(run: RecordedRun) -> Section:
    """Seconds of the rounds, share in which actors were idle, virtual time, and operations of training."""
    parts: list[Part] = []
    rows = [row for row in run.rounds if isinstance(row.get("seconds"), int | float)]
    if rows:
        numbers = [row["round"] for row in rows]
        training = [float(row.get("seconds_training") or 0.0) for row in rows]
        rest = [row["seconds"] - value for row, value in zip(rows, training, strict=True)]
        series = [
            Series(label="clients and server", x=numbers, y=training),
            Series(label="evaluation of the global model", x=numbers, y=rest),
        ]
        axis = Axis(name="time of a round", kind="seconds", low=0.0)
        caption = "The first round also loads the model where it is needed."
        parts.append(curves("Time of the rounds", series, ROUND, axis, caption))
    parts += _idle(run)
    timed = [row for row in run.rounds if row.get("virtual_time") is not None]
    if timed:
        series = [
            Series(label="virtual time", x=[r["round"] for r in timed], y=[r["virtual_time"] for r in timed])
        ]
        axis = Axis(name="virtual time", kind="seconds", low=0.0)
        parts.append(curves("Virtual time", series, ROUND, axis, "As the simulated clients would need it."))
    parts += _score_over(run, "Score over the operations of training", OPERATIONS, gflops_of)
    return Section("Time", parts)


def _idle(run: RecordedRun) -> Iterator[Part]:
    """Share of the rounds in which no call of a client ran."""
    points = []
    for row in run.rounds:
        idle, busy = row.get("seconds_idle"), row.get("seconds_clients")
        if isinstance(idle, int | float) and isinstance(busy, int | float) and idle + busy > 0:
            points.append((row["round"], idle / (idle + busy)))
    if points:
        series = Series(label="idle", x=[n for n, _ in points], y=[v for _, v in points])
        caption = (
            "Share of the actors' time in which none of them ran a call of a client: they waited for the "
        )
        caption += (
            "server, for other actors, or for data. In one process: time that was not spent in clients."
        )
        yield curves("Idle share of the actors", [series], ROUND, percent_axis("idle"), caption)


def failures(run: RecordedRun) -> Section:
    """Failures by kind, one by one, and missing clients."""
    parts: list[Part] = []
    missing = [(row["round"], row["missing"]) for row in run.rounds if row.get("missing")]
    if not run.events and not missing:
        return Section(
            "Failures", [Sentences(sentences=["No failure was recorded, and no client was missing."])]
        )
    if run.events:
        counts = Counter((str(e.get("kind")), str(e.get("action"))) for e in run.events)
        columns = [Column("kind"), Column("what was done"), Column("events", "count")]
        rows: list[list[Cell]] = [[kind, action, n] for (kind, action), n in counts.most_common()]
        parts.append(Table(title="Failures by kind", columns=columns, rows=rows))
        keys = ("round", "kind", "action", "client", "message")
        kinds: dict[str, Kind] = {"round": "count"}
        listed: list[list[Cell]] = [[_cell(e.get(key)) for key in keys] for e in run.events[:MOST_EVENTS]]
        more = f" The first {MOST_EVENTS} of {len(run.events)}." if len(run.events) > MOST_EVENTS else ""
        parts.append(
            Table(
                title="Failures one by one",
                notes=(f"docs/recovery.md says what each kind means.{more}",),
                columns=[Column(key, kinds.get(key, "text")) for key in keys],
                rows=listed,
                filters={"kind": ""},
                folded=True,
            )
        )
    if missing:
        series = Series(
            label="missing clients",
            x=[row["round"] for row in run.rounds],
            y=[float(row.get("missing") or 0) for row in run.rounds],
        )
        parts.append(curves("Missing clients", [series], ROUND, Axis(name="clients", kind="count", low=0.0)))
    return Section("Failures", parts)


def _cell(value: object) -> Cell:
    if isinstance(value, int | float) or value is None:
        return value
    return str(value).splitlines()[0][:300] if str(value) else ""


def bytes_of(row: Row) -> float:
    return float((row.get("bytes_up") or 0) + (row.get("bytes_down") or 0))


def gflops_of(row: Row) -> float:
    return float(row.get("flops") or 0) / 1e9


def seconds_of(row: Row) -> float:
    return float(row.get("seconds") or 0.0)


PICTURES = {
    "client_map": "Representations of the clients (t-SNE)",
    "sample_map": "Representations of single images (t-SNE)",
    "landscape": "Loss around the global and the clients' models",
    "feature_map": "Features of seen and of unseen domains (t-SNE)",
}
"""Figures of the run's folder that are shown as they are, by name of the file."""
SHOWN_ELSEWHERE = (
    *("round", "worst_domain", "clients", "loss", "missing", "lr", "virtual_seconds", "virtual_time"),
    *("bytes_", "seconds", "sigma_", "val_", "personal_", "global_", "held_out_", "worst_", "best_"),
    *("clients_",),
    *METRICS,
)
"""Beginnings of columns of a round that other sections show."""
MOST_DOMAINS = 12
"""Largest number of domains that have a curve of weights each."""
MOST_NUMBERS = 12
"""Largest number of further columns of a round that are drawn."""


def method(run: RecordedRun) -> Section:
    """Blocks, groups, weights and gaps of the clients, further numbers of the rounds, and pictures."""
    parts = [*_blocks(run), *_groups(run), *_weights(run), *_gaps(run), *_numbers(run), *_pictures(run)]
    return Section("Method", parts)


def _blocks(run: RecordedRun) -> Iterator[Part]:
    """Clients that hold each block, by round; and how often each client holds each block."""
    rows = run.frame("allocations", ["round", "client", "blocks"])
    if rows.empty:
        return
    rows = rows.explode("blocks").dropna(subset=["blocks"])
    rows["blocks"] = rows["blocks"].astype(int)
    count = 1 + int(rows["blocks"].max())
    names = [str(block) for block in range(count)]
    held = rows.groupby(["blocks", "round"]).size().unstack(fill_value=0).reindex(range(count), fill_value=0)
    cells = Cells(
        values=held.to_numpy(dtype=float)[::-1],
        down=names[::-1],
        across=[str(number) for number in held.columns],
        row="block",
        column="round",
        value=Column("clients", "count"),
        colours="zero",
    )
    yield heat_map("Clients that hold each block of the model", cells, "Block 0 is next to the input.")
    if len(run.clients) > MOST_CLIENTS:
        return
    took = run.frame("allocations", ["round", "client"]).groupby("client", observed=True).size()
    shares = rows.groupby(["client", "blocks"], observed=True).size().unstack(fill_value=0)
    shares = shares.reindex(columns=range(count), fill_value=0)
    shares = shares.reindex([cid for cid in run.clients if cid in took.index], fill_value=0)
    cells = Cells(
        values=shares.to_numpy(dtype=float) / took.reindex(shares.index).to_numpy(dtype=float)[:, None],
        down=[str(cid) for cid in shares.index],
        across=names,
        row="client",
        column="block",
        value=Column("share of its rounds", "percent"),
        colours="zero",
    )
    yield heat_map("How often each client holds each block", cells, "Of the rounds in which it took part.")


def _groups(run: RecordedRun) -> Iterator[Part]:
    """Group of each client over the rounds; of many clients, the sizes of the groups."""
    rows = run.frame("clusters", ["round", "client", "cluster"])
    if rows.empty:
        return
    if rows["client"].nunique() > MOST_CLIENTS:
        yield _group_sizes(rows)
        return
    plain: Sequence[Mapping[str, object]] = [
        {"round": r, "client": str(c), "cluster": int(k)} for r, c, k in rows.itertuples(index=False)
    ]
    flat = [(number, cid, group) for number, of in matched_groups(plain).items() for cid, group in of.items()]
    frame = pd.DataFrame(flat, columns=["round", "client", "value"])
    yield by_client_and_round(
        run, "Group of each client over the rounds", frame, Column("group", "count"), "groups"
    )


def _group_sizes(rows: pd.DataFrame) -> Figure:
    """Sizes of the groups over the rounds, the largest first, as groups are numbered anew in every round."""
    sizes = rows.groupby(["round", "cluster"]).size().reset_index(name="size")
    sizes["rank"] = sizes.groupby("round")["size"].rank(method="first", ascending=False).astype(int)
    series = [
        Series(label=f"group {rank} by size", x=of["round"].tolist(), y=of["size"].tolist())
        for rank, of in sizes.groupby("rank")
    ]
    axis = Axis(name="clients", kind="count", low=0.0)
    return curves("Sizes of the groups", series, ROUND, axis, "In each round, the largest group first.")


def _weights(run: RecordedRun) -> Iterator[Part]:
    """Weights of domains and clients in the mean of each round."""
    rows = run.frame("aggregation", ["round", "client", "weight"]).rename(columns={"weight": "value"})
    rows = rows[rows["value"].notna()]
    if rows.empty:
        return
    rows["client"] = rows["client"].astype(str)
    rows["domain"] = rows["client"].map(run.clients).fillna("all clients")
    sums = rows.groupby(["domain", "round"])["value"].sum()
    order = run.order(list(rows["domain"].unique()))
    places = run.domains
    if len(order) <= MOST_DOMAINS:
        series = [
            Series(
                label=name,
                x=sums[name].index.tolist(),
                y=sums[name].tolist(),
                place=places.index(name) if name in places else None,
            )
            for name in order
        ]
        axis = Axis(name="weight", kind="percent", low=0.0)
        yield curves("Weight of each domain", series, ROUND, axis, "Sum over its clients.")
    if len(run.clients) > MOST_CLIENTS:
        axis = Axis(name="weight", kind="percent")
        lines = quantile_curves(rows[["round", "value"]])
        yield curves("Weights of the clients", lines, ROUND, axis, "Quantiles over the clients.")
        return
    weight = Column("weight", "percent")
    yield by_client_and_round(run, "Weight of each client", rows, weight, "zero")


def _gaps(run: RecordedRun) -> Iterator[Part]:
    """Variance of the generalization gaps under the weights of different servers."""
    if "gap" not in run.columns_of("gaps"):
        return
    series = [
        Series(label=LABELS.get(name, name), x=[n for n, _ in points], y=[v for _, v in points])
        for name, points in gap_variances(run).items()
    ]
    axis = Axis(name="variance", low=0.0)
    caption = "Sum over pairs of clients of squared differences, under the weights of different servers."
    yield curves("Variance of the clients' generalization gaps", series, ROUND, axis, caption)


def _numbers(run: RecordedRun) -> Iterator[Part]:
    """Further numbers of the rounds, which the method or the schedule wrote."""
    keys = dict.fromkeys(key for row in run.rounds for key in row if not key.startswith(SHOWN_ELSEWHERE))
    if any("lr" in row for row in run.rounds):
        keys = {"lr": None, **keys}
    for key in list(keys)[:MOST_NUMBERS]:
        pairs = [(row["round"], row.get(key)) for row in run.rounds]
        points = [(number, float(v)) for number, v in pairs if isinstance(v, int | float)]
        if points and len({value for _, value in points}) > 1:
            series = Series(label=key, x=[n for n, _ in points], y=[v for _, v in points])
            yield curves(f"{key} over the rounds", [series], ROUND, Axis(name=key))


def _pictures(run: RecordedRun) -> Iterator[Part]:
    """Figures of the run's folder whose numbers are too many for this page."""
    for name, title in PICTURES.items():
        file = run.path / "figures" / f"{name}.png"
        if file.exists():
            data = base64.b64encode(read_bytes(file)).decode()
            source = f"data:image/png;base64,{data}"
            picture = f'<img src="{source}" alt="{escape(title)}">'
            yield Figure(title=title, svg=picture, summary=title, columns=[], rows=[])


def answers(run: RecordedRun) -> Section:
    """Answers that the language model wrote, with their scores."""
    return Section("Answers", on_page(run.path))


def other_tables(run: RecordedRun) -> Table | None:
    """The Parquet tables in the folder, with their columns; None where there are none."""
    rows: list[list[Cell]] = [
        [f"{name}.parquet", count, ", ".join(run.columns_of(name))] for name, count in run.tables.items()
    ]
    columns = [Column("file"), Column("rows", "count"), Column("columns")]
    return Table(title="Tables in the folder", columns=columns, rows=rows, folded=True) if rows else None


NOT_COMPARED = ("output", "overwrite", "compare", "report", "figures")
"""Keys of the config that say nothing about what was run."""


def flat(tree: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Keys of a config with dots, and their values.

    >>> dict(flat({"rounds": 3, "train": {"lr": 0.1}}))
    {'rounds': 3, 'train.lr': 0.1}
    """
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value


def config_text(value: Any) -> str:
    """A value of a config as text."""
    if isinstance(value, float):
        return f"{value:.6g}"
    return value if isinstance(value, str) else json.dumps(value, default=str)


def repeat_command(file: Path) -> str:
    """The command that runs a config in a new folder, to be copied."""
    return f"python -m rayfed.run --config {shlex.quote(str(file))} output=NEW"


def commands(run: RecordedRun) -> Section:
    """The commands of a run, and one that repeats it exactly."""
    sentences = ["This repeats the run in a new folder; config and seed decide every number of it."]
    if run.digest:
        sentences.append(f"On the same kind of processor its tensors have the digest {run.digest[:16]}.")
    parts: list[Part] = [
        Sentences(title="One command", sentences=sentences, code=[repeat_command(run.path / "config.yaml")])
    ]
    if run.commands:
        parts.append(Sentences(title="Commands with which it was made", code=run.commands))
    parts.append(environment([run]))
    if tables := other_tables(run):
        parts.append(tables)
    return Section("Repeat it", parts)


def environment(runs: Sequence[RecordedRun], names: Sequence[str] = ("value",)) -> Table:
    """Versions and digests of runs, a column for each; what differs is highlighted."""
    facts = [dict(flat({k: v for k, v in run.environment.items() if k != "commands"})) for run in runs]
    return _side_by_side("Environment", "fact", facts, names)


def config(run: RecordedRun) -> Section:
    """Every setting of a run."""
    rows: list[list[Cell]] = [[key, config_text(value)] for key, value in flat(run.config)]
    grid = Table(title="All settings", columns=[Column("key"), Column("value")], rows=rows, folded=True)
    return Section("Config", [grid])


def configs(runs: Sequence[RecordedRun], names: Sequence[str]) -> Section:
    """The settings that differ between runs, highlighted, and those that do not."""
    trees = [dict(flat(run.config)) for run in runs]
    keys = list(dict.fromkeys(key for one in trees for key in one))
    different = [key for key in keys if differs(trees, key)]
    same = [key for key in keys if key not in different and key not in NOT_COMPARED]
    shown = [{key: one[key] for key in different if key in one} for one in trees]
    parts: list[Part] = [_side_by_side("Settings that differ", "key", shown, names)]
    rows: list[list[Cell]] = [[key, config_text(trees[0].get(key))] for key in same]
    columns = [Column("key"), Column("value")]
    parts.append(Table(title="Settings that all runs share", columns=columns, rows=rows, folded=True))
    return Section("Config", parts)


def differs(trees: Sequence[Mapping[str, Any]], key: str) -> bool:
    """Whether a key has several values in these flat configs, or is missing in some."""
    if key in NOT_COMPARED:
        return False
    return len({config_text(one[key]) if key in one else None for one in trees}) > 1


def _side_by_side(title: str, what: str, trees: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Table:
    """A row for each key and a column for each run, or with many runs a row for each run."""
    keys = list(dict.fromkeys(key for one in trees for key in one))
    marked = frozenset(place for place, key in enumerate(keys) if differs(trees, key))
    rows: list[list[Cell]]
    if len(trees) <= MOST_COLUMNS:
        rows = [[key, *(config_text(one.get(key, "")) for one in trees)] for key in keys]
        columns = [Column(what), *(Column(name) for name in names)]
        caption = "Highlighted: what differs." if len(trees) > 1 else ""
        return Table(title=title, notes=(caption,), columns=columns, rows=rows, marked=marked)
    keys = [keys[place] for place in sorted(marked)]
    rows = [
        [name, *(config_text(one.get(key, "")) for key in keys)]
        for name, one in zip(names, trees, strict=True)
    ]
    caption = "What differs, a row for each run."
    return Table(title=title, notes=(caption,), columns=[Column("run"), *map(Column, keys)], rows=rows)


MOST_COLUMNS = 8
"""Largest number of runs that have a column each."""


def glossary() -> Section:
    """Meaning of the words on the page."""
    columns = [Column("word"), Column("meaning")]
    rows: list[list[Cell]] = [[name, meaning] for name, meaning in WORDS.items()]
    return Section("Words", [Table(title="What the words mean", columns=columns, rows=rows, folded=True)])


def facts(run: RecordedRun, name: str) -> dict[str, Any]:
    """Facts about the making of a run, for the file with the numbers."""
    return {
        "name": name,
        "folder": str(run.path),
        "config": dict(run.config),
        "environment": dict(run.environment),
        "tensors_sha256": run.digest,
        "repeat": repeat_command(run.path / "config.yaml"),
    }


SECTIONS: Sequence[Callable[[RecordedRun], Section]] = (
    summary,
    over_rounds,
    domains_and_clients,
    fairness,
    holdings,
    method,
    answers,
    transfers,
    times,
    failures,
    config,
    commands,
)
"""The sections about a run, in their order; one without parts is left out."""


def sections(run: RecordedRun) -> list[Section]:
    """All sections about a run.

    Raises:
        DamagedError: A file of the run cannot be read; the message names the folder or the file.
    """
    with reading(run.path):
        all_sections = [section(run) for section in SECTIONS]
    return [section for section in all_sections if section.parts]


def single_page(run: RecordedRun) -> Page:
    """The page about one run.

    Raises:
        DamagedError: A file of the run cannot be read.
    """
    model, tuning = run.config.get("model", {}), run.config.get("tuning", {})
    subtitle = (
        f"{model.get('name')}, {tuning.get('name')}, {len(run.rounds)} of {run.planned} rounds; {run.path}"
    )
    return Page(
        title=run.name,
        subtitle=subtitle,
        sections=[*sections(run), glossary()],
        facts=[facts(run, run.name)],
    )
