"""Sections of one run about its scores: the summary, the curves, domains and clients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from rayfed.report.page.charts import ROUND, Axis, Series, curves, share_axis
from rayfed.report.page.heat import Cells, Colours, heat_map
from rayfed.report.page.parts import Cell, Column, Figure, Grid, Kind, Part, Section, Text, Tiles, in_bytes
from rayfed.report.page.run import PageRun
from rayfed.report.page.svg import thinned
from rayfed.report.privacy import privacy_notes
from rayfed.report.run_tables import own_tensors
from rayfed.report.table import fault_notes, selection_notes, total_cost

if TYPE_CHECKING:
    import pandas as pd

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
"""What stands for the clients where there are too many of them."""

HEADLINES: Mapping[str, tuple[str, Kind]] = {
    "{}": ("mean over clients, %", "percent"),
    "{}_domain": ("mean over domains, %", "percent"),
    "worst_domain_{}": ("worst domain: {}, %", "percent"),
    "worst_tenth_{}": ("worst tenth of the clients, %", "percent"),
    "sigma_type": ("sigma_type, deviation over domains, points", "points"),
    "sigma_client": ("sigma_client, deviation over clients, points", "points"),
}
"""Columns of a round, the first `{}` being the metric, with their words, `{}` being the worst domain."""


def summary(run: PageRun) -> Section:
    """The numbers that matter most, and notes on the run."""
    return Section("Summary", [Tiles(title="Result", pairs=[*_pairs(run)]), Text(sentences=_rules(run))])


def _pairs(run: PageRun) -> Iterator[tuple[str, str]]:
    for key, (words, kind) in HEADLINES.items():
        if (value := run.number(key)) is not None:
            yield words.format(run.row.get(f"{run.prefix}worst_domain")), Column("", kind).show(value)
    for words, value in run.unseen.items():
        yield f"{words}, %", Column("", "percent").show(value)
    if run.held_out_score is not None:
        name = ", ".join(run.tables.held_out)
        yield f"held-out domain: {name}, %", Column("", "percent").show(run.held_out_score)
    yield "rounds", f"{len(run.rounds)} of {run.planned}"
    if run.clients:
        yield "clients", f"{len(run.clients):,}"
    for key, words in (("bytes_up", "sent by clients"), ("bytes_down", "received by clients")):
        yield words, in_bytes(sum(row.get(key) or 0 for row in run.rounds))
    gflops, trained = total_cost(run.rounds)
    if trained:
        yield "training of all clients, GFLOP", Column("", "number").show(gflops)
        yield "parameters that a client trains", Column("", "count").show(trained)
    yield "time", _duration(sum(row.get("seconds") or 0.0 for row in run.rounds))


def _duration(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    if hours:
        return f"{hours} h {rest // 60} min"
    return f"{rest // 60} min {rest % 60} s" if rest >= 60 else f"{rest} s"


def _rules(run: PageRun) -> list[str]:
    """Which round is reported, and what happened on the way."""
    if not run.row:
        return ["No round was evaluated yet."]
    rule = f"the {run.ties} with the best validation score" if run.by_validation else "the last evaluated one"
    whose = "the clients' own models" if run.deployed == "personal" else "the global model"
    found = [f"Reported is the {run.metric} of {whose} after round {run.row['round']}, {rule}."]
    found += [f"{note}." for note in own_tensors([run.config])]
    if not run.by_validation:
        found += [f"Other rules: {note.partition('; ')[2]}." for note in selection_notes(run.rounds)]
    notes = (*privacy_notes(run.config, run.rounds), *fault_notes(run.rounds))
    found += [note[0].upper() + note[1:] + "." for note in notes]
    if len(run.rounds) < run.planned:
        found.append(f"The run is not finished: {len(run.rounds)} of {run.planned} rounds.")
    if run.digest:
        found.append(f"SHA-256 digest of the final tensors: {run.digest}.")
    return found


def over_rounds(run: PageRun) -> Section:
    """Score and loss by domain over the rounds, for each kind of model."""
    parts: list[Part] = []
    for model in run.models:
        words = "" if len(run.models) == 1 else f" of the {model} model{'s' if model == 'personal' else ''}"
        for metric in (run.metric, "loss"):
            axis = Axis(name="loss") if metric == "loss" else share_axis(run.metric)
            if found := _by_domain(run, model, metric):
                caption = "One curve a domain; its band goes from the lowest to the highest of its clients."
                if any(one.dashed for one in found):
                    caption += " Dashed: a domain of which no client has an example."
                if len(found) == len(QUANTILES):
                    caption = "Quantiles over the domains, of which there are too many for a curve each."
                parts.append(curves(f"Test {metric} by domain{words}", found, ROUND, axis, caption))
    return Section("Curves", parts)


def _by_domain(run: PageRun, model: str, metric: str) -> list[Series]:
    rows = run.scores
    rows = rows[(rows["model"] == model) & (rows["metric"] == metric)]
    own = rows[rows["of"] == "client"].groupby(["domain", "round"])["value"].agg(["min", "max"])
    domains = rows[rows["of"] != "client"]
    names = run.order(list(domains["name"].unique()))
    if len(names) > MOST_CURVES:
        return quantile_curves(domains)
    found = []
    for place, name in enumerate(names):
        of = domains[domains["name"] == name].sort_values("round")
        edges = own.loc[name].reindex(of["round"]) if name in own.index.get_level_values(0) else None
        low, high = (None, None) if edges is None else (edges["min"].tolist(), edges["max"].tolist())
        held_out = bool((of["of"] == "held out").any())
        found.append(
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
    return found


def _place(run: PageRun, domain: str, other: int) -> int:
    """The place of a domain in the data set, which decides its colour in all figures."""
    order = list(run.tables.domains)
    return order.index(domain) if domain in order else other


def quantile_curves(rows: pd.DataFrame) -> list[Series]:
    """Quantiles of the column `value` over the rounds."""
    found = rows.groupby("round")["value"].quantile(np.asarray(list(QUANTILES.values()))).unstack()
    return [
        Series(label=name, x=found.index.tolist(), y=found[share].tolist())
        for name, share in QUANTILES.items()
    ]


def domains_and_clients(run: PageRun) -> Section:
    """Tables of the domains and of the clients, and the clients' scores at the end and over the rounds."""
    parts: list[Part] = [Grid(title="Domains", columns=_domain_columns(run), rows=list(_domain_rows(run)))]
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
            f"Round {run.row['round']}.",
        )
    )
    parts.append(_clients_over_rounds(run))
    parts.append(_client_grid(run, own))
    return Section("Domains and clients", parts)


def _domain_columns(run: PageRun) -> list[Column]:
    what = run.environment.get("examples", "examples")
    counts = [Column("clients", "count"), Column(f"train {what}", "count"), Column(f"test {what}", "count")]
    scored = [Column(f"{model} {run.metric}", "percent") for model in run.models]
    return [
        Column("domain"),
        *counts,
        *scored,
        Column("lowest client", "percent"),
        Column("highest client", "percent"),
        Column("loss", "number"),
    ]


def _domain_rows(run: PageRun) -> Iterator[list[str | float | None]]:
    counts = split_counts(run)
    scored = {
        model: {**run.now("domain", model, run.metric), **run.now("held out", model, run.metric)}
        for model in run.models
    }
    loss = {**run.now("domain", run.deployed, "loss"), **run.now("held out", run.deployed, "loss")}
    own = run.now("client", run.deployed, run.metric)
    extremes = own.groupby(own.index.map(lambda cid: run.clients.get(str(cid), ""))).agg(["min", "max"])
    names = run.order([*run.tables.domains, *(name for found in scored.values() for name in found)])
    for name in names:
        sizes = counts.get(name, {})
        ends = list(extremes.loc[name]) if name in extremes.index else [None, None]
        label = name + (" (held out)" if name in run.tables.held_out else "")
        tested = sizes.get("test", 0) + sizes.get("held_out", 0)
        values = [scored[model].get(name) for model in run.models]
        yield [label, sizes.get("clients", 0), sizes.get("train", 0), tested, *values, *ends, loss.get(name)]


def split_counts(run: PageRun) -> dict[str, dict[str, int]]:
    """Numbers of clients and of examples of each split, by domain."""
    if run.tables.manifest is None:
        return {}
    manifest = run.tables.manifest.select(["domain", "split", "client"])
    pairs = manifest.group_by(["domain", "split"]).aggregate([([], "count_all")]).to_pylist()
    counts: dict[str, dict[str, int]] = {}
    for pair in pairs:
        counts.setdefault(pair["domain"], {})[pair["split"]] = pair["count_all"]
    for domain in run.clients.values():
        held = counts.setdefault(domain, {})
        held["clients"] = held.get("clients", 0) + 1
    return counts


def _clients_over_rounds(run: PageRun) -> Figure:
    """Scores of the clients over the rounds: a heat map, or quantiles of many clients."""
    rows = run.scores
    rows = rows[(rows["of"] == "client") & (rows["model"] == run.deployed) & (rows["metric"] == run.metric)]
    title = "Score of the clients over the rounds"
    if rows["name"].nunique() > MOST_CLIENTS:
        axis = share_axis(run.metric)
        return curves(title, quantile_curves(rows), ROUND, axis, "Quantiles over the clients.")
    value = Column(run.metric, "percent")
    return by_client_and_round(run, title, rows.rename(columns={"name": "client"}), value)


def by_client_and_round(
    run: PageRun, title: str, rows: pd.DataFrame, value: Column, colours: Colours = "range"
) -> Figure:
    """A heat map of clients, domain by domain, and rounds.

    Args:
        run: The run.
        title: What is shown.
        rows: Columns client, round and value.
        value: What the values are.
        colours: What the colours stand for.
    """
    table = rows.pivot_table(index="client", columns="round", values="value", observed=True, dropna=False)
    known = [cid for cid in run.clients if cid in table.index]
    table = table.reindex([*known, *(cid for cid in table.index if cid not in run.clients)])
    chosen = thinned(len(table.columns), MOST_ROUNDS)
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


def _client_grid(run: PageRun, own: pd.Series[float]) -> Grid:
    """A row for each client, or the quantiles of each domain."""
    loss = run.now("client", run.deployed, "loss")
    if len(own) <= MOST_CLIENTS:
        numbers = Column(run.metric, "percent"), Column("loss", "number")
        columns = [Column("client"), Column("domain"), *numbers]
        rows: list[list[Cell]] = [
            [str(cid), run.clients.get(str(cid), ""), float(own[cid]), float(loss.get(cid, np.nan))]
            for cid in [
                *(c for c in run.clients if c in own.index),
                *(c for c in own.index if c not in run.clients),
            ]
        ]
        return Grid(title="Clients", columns=columns, rows=rows, filters={"domain": ""})
    domain = own.index.map(lambda cid: run.clients.get(str(cid), ""))
    found = own.groupby(domain).quantile(np.asarray(list(QUANTILES.values()))).unstack()
    counts = own.groupby(domain).size()
    columns = [Column("domain"), Column("clients", "count"), *(Column(q, "percent") for q in QUANTILES)]
    quantiles: list[list[Cell]] = [[d, int(counts[d]), *found.loc[d]] for d in run.order(list(found.index))]
    caption = f"Quantiles of the {run.metric} of {len(own):,} clients, which are too many for a row each."
    return Grid(title="Clients, by domain", caption=caption, columns=columns, rows=quantiles)
