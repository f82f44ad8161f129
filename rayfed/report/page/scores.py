"""Sections of one run about its scores: the curves, domains and clients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from rayfed.report.page.charts import ROUND, Axis, Series, curves, share_axis
from rayfed.report.page.heat import Cells, Colours, heat_map
from rayfed.report.page.parts import Cell, Column, Figure, Grid, Part, Section
from rayfed.report.page.run import PageRun
from rayfed.report.page.svg import thinned

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
