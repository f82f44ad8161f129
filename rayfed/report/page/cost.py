"""Sections of one run about what it cost: bytes, time, and failures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import TYPE_CHECKING

from rayfed.report.page.charts import ROUND, Axis, Series, curves, share_axis
from rayfed.report.page.parts import Cell, Column, Grid, Kind, Part, Section, Text
from rayfed.report.page.run import PageRun
from rayfed.report.page.scores import MOST_CLIENTS, QUANTILES
from rayfed.types import Row

if TYPE_CHECKING:
    import pandas as pd

DIRECTIONS = {"down": "to the clients", "up": "to the server"}
SENT = Axis(name="sent in both directions", kind="bytes", low=0.0)
OPERATIONS = Axis(name="training of all clients, GFLOP", low=0.0)
MOST_EVENTS = 200
"""Largest number of failures that are listed one by one."""


def transfers(run: PageRun) -> Section:
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
        parts += _score_over(run, "Score over the bytes sent", SENT, bytes_of)
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


def _score_over(run: PageRun, title: str, axis: Axis, of: Callable[[Row], float]) -> Iterator[Part]:
    """The score after each round over what all rounds until then cost, `of` being the cost of one."""
    key = run.prefix + run.metric
    total = list(accumulate(map(of, run.rounds)))
    points = [(t, row[key]) for t, row in zip(total, run.rounds, strict=True) if row.get(key) is not None]
    if points and total[-1]:
        series = Series(label="mean over clients", x=[t for t, _ in points], y=[v for _, v in points])
        yield curves(title, [series], axis, share_axis(run.metric))


def _shares(title: str, what: str, sums: pd.DataFrame) -> Grid:
    """Bytes by the index of a table with the columns down and up, and their share of all bytes."""
    total = float(sums.to_numpy().sum()) or 1.0
    rows: list[list[Cell]] = [
        [str(name), float(down), float(up), float(down + up) / total]
        for name, down, up in zip(sums.index, sums["down"], sums["up"], strict=True)
    ]
    columns = [Column(what), *(Column(words, "bytes") for words in DIRECTIONS.values())]
    return Grid(title=title, columns=[*columns, Column("share of all", "percent")], rows=rows)


def _by_client(run: PageRun, sums: pd.DataFrame) -> Grid:
    """Bytes of each client over the run, or quantiles of many."""
    ways = [Column(words, "bytes") for words in DIRECTIONS.values()]
    rows: list[list[Cell]]
    if len(sums) <= MOST_CLIENTS:
        order = [cid for cid in run.clients if cid in sums.index]
        rows = [[cid, run.clients[cid], float(sums["down"][cid]), float(sums["up"][cid])] for cid in order]
        columns = [Column("client"), Column("domain"), *ways]
        return Grid(
            title="Bytes of each client", columns=columns, rows=rows, filters={"domain": ""}, folded=True
        )
    found = sums.quantile(list(QUANTILES.values()))
    rows = [[name, *map(float, found.loc[share])] for name, share in QUANTILES.items()]
    caption = f"Quantiles over {len(sums):,} clients, which are too many for a row each."
    return Grid(title="Bytes of a client", caption=caption, columns=[Column("quantile"), *ways], rows=rows)


def times(run: PageRun) -> Section:
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


def _idle(run: PageRun) -> Iterator[Part]:
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
        yield curves("Idle share of the actors", [series], ROUND, share_axis("idle"), caption)


def failures(run: PageRun) -> Section:
    """Failures by kind, one by one, and missing clients."""
    parts: list[Part] = []
    missing = [(row["round"], row["missing"]) for row in run.rounds if row.get("missing")]
    if not run.events and not missing:
        return Section("Failures", [Text(sentences=["No failure was recorded, and no client was missing."])])
    if run.events:
        counts = Counter((str(e.get("kind")), str(e.get("action"))) for e in run.events)
        columns = [Column("kind"), Column("what was done"), Column("events", "count")]
        rows: list[list[Cell]] = [[kind, action, n] for (kind, action), n in counts.most_common()]
        parts.append(Grid(title="Failures by kind", columns=columns, rows=rows))
        keys = ("round", "kind", "action", "client", "message")
        kinds: dict[str, Kind] = {"round": "count"}
        listed: list[list[Cell]] = [[_cell(e.get(key)) for key in keys] for e in run.events[:MOST_EVENTS]]
        more = f" The first {MOST_EVENTS} of {len(run.events)}." if len(run.events) > MOST_EVENTS else ""
        parts.append(
            Grid(
                title="Failures one by one",
                caption=f"docs/recovery.md says what each kind means.{more}",
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
