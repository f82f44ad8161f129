"""Sections of one run about what its method did: blocks, groups and weights of the clients, and more."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING

import pandas as pd

from rayfed.objective import METRICS
from rayfed.record.readers import read_bytes, read_footer
from rayfed.report.gap_figures import LABELS, gap_variances
from rayfed.report.group_figures import matched_groups
from rayfed.report.page.charts import ROUND, Axis, Series, curves
from rayfed.report.page.heat import Cells, heat_map
from rayfed.report.page.parts import Column, Figure, Grid, Part, Section
from rayfed.report.page.run import PageRun
from rayfed.report.page.scores import MOST_CLIENTS, by_client_and_round, quantile_curves

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

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
    *METRICS,
)
"""Beginnings of columns of a round that other sections show."""
MOST_DOMAINS = 12
"""Largest number of domains that have a curve of weights each."""
MOST_NUMBERS = 12
"""Largest number of further columns of a round that are drawn."""


def method(run: PageRun) -> Section:
    """Blocks, groups, weights and gaps of the clients, further numbers of the rounds, and pictures."""
    parts = [*_blocks(run), *_groups(run), *_weights(run), *_gaps(run), *_numbers(run), *_pictures(run)]
    return Section("Method", parts)


def _blocks(run: PageRun) -> Iterator[Part]:
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


def _groups(run: PageRun) -> Iterator[Part]:
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
    found = pd.DataFrame(flat, columns=["round", "client", "value"])
    yield by_client_and_round(
        run, "Group of each client over the rounds", found, Column("group", "count"), "groups"
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


def _weights(run: PageRun) -> Iterator[Part]:
    """Weights of domains and clients in the mean of each round."""
    rows = run.frame("aggregation", ["round", "client", "weight"]).rename(columns={"weight": "value"})
    rows = rows[rows["value"].notna()]
    if rows.empty:
        return
    rows["client"] = rows["client"].astype(str)
    rows["domain"] = rows["client"].map(run.clients).fillna("all clients")
    sums = rows.groupby(["domain", "round"])["value"].sum()
    order = run.order(list(rows["domain"].unique()))
    places = list(run.tables.domains)
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
        found = quantile_curves(rows[["round", "value"]])
        yield curves("Weights of the clients", found, ROUND, axis, "Quantiles over the clients.")
        return
    weight = Column("weight", "percent")
    yield by_client_and_round(run, "Weight of each client", rows, weight, "zero")


def _gaps(run: PageRun) -> Iterator[Part]:
    """Variance of the generalization gaps under the weights of different servers."""
    if "gap" not in run.columns_of("gaps") or not (run.path / "gaps.parquet").exists():
        return
    series = [
        Series(label=LABELS.get(name, name), x=[n for n, _ in points], y=[v for _, v in points])
        for name, points in gap_variances(run.path).items()
    ]
    axis = Axis(name="variance", low=0.0)
    caption = "Sum over pairs of clients of squared differences, under the weights of different servers."
    yield curves("Variance of the clients' generalization gaps", series, ROUND, axis, caption)


def _numbers(run: PageRun) -> Iterator[Part]:
    """Further numbers of the rounds, which the method or the schedule wrote."""
    keys = dict.fromkeys(key for row in run.rounds for key in row if not key.startswith(SHOWN_ELSEWHERE))
    if any("lr" in row for row in run.rounds):
        keys = {"lr": None, **keys}
    for key in list(keys)[:MOST_NUMBERS]:
        found = [(row["round"], row.get(key)) for row in run.rounds]
        points = [(number, float(v)) for number, v in found if isinstance(v, int | float)]
        if points and len({value for _, value in points}) > 1:
            series = Series(label=key, x=[n for n, _ in points], y=[v for _, v in points])
            yield curves(f"{key} over the rounds", [series], ROUND, Axis(name=key))


def _pictures(run: PageRun) -> Iterator[Part]:
    """Figures of the run's folder whose numbers are too many for this page."""
    for name, title in PICTURES.items():
        file = run.path / "figures" / f"{name}.png"
        if file.exists():
            data = base64.b64encode(read_bytes(file)).decode()
            source = f"data:image/png;base64,{data}"
            picture = f'<img src="{source}" alt="{escape(title)}">'
            yield Figure(title=title, svg=picture, summary=title, columns=[], rows=[])


def other_tables(run: PageRun) -> Grid | None:
    """The Parquet tables in the folder, with their columns; None where there are none."""
    rows = [
        [file.name, read_footer(file).num_rows, ", ".join(run.columns_of(file.stem))]
        for file in sorted(run.path.glob("*.parquet"))
    ]
    columns = [Column("file"), Column("rows", "count"), Column("columns")]
    return Grid(title="Tables in the folder", columns=columns, rows=rows, folded=True) if rows else None
