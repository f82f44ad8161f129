"""Draws how the generalization gaps of clients follow their weights in the mean model; FFT-GP's Figure 2.

All clients train one more round from the final model of a finished run. Then the weight of one client at a
time is changed, a_i = p_i + d, and those of the others are scaled by (1 - a_i) / (1 - p_i), where p is the
share of a client in the training examples. Each mean model is scored on the validation examples of client i:
its gap G_i is the loss of the mean model minus the loss of the client's own model (FFT-GP, Eq. 4).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from rayfed.engine.loop import cohort_of
from rayfed.errors import ConfigError
from rayfed.executors.inline import InlineExecutor
from rayfed.federation.aggregation import mean_by_name
from rayfed.federation.client_tasks import evaluate
from rayfed.federation.cohort import Cohort
from rayfed.record.atomic_files import write_parquet
from rayfed.record.recorded_run import RecordedRun
from rayfed.report import style
from rayfed.report.landscape import trained_once_more
from rayfed.report.reopen import ReopenedRun, reopen
from rayfed.report.report_md import add_figure
from rayfed.terminal.arguments import parser_of
from rayfed.terminal.console import count_up, say, screen_of, stage, use_screen
from rayfed.terminal.exit_code import run_guarded
from rayfed.types import Params, Update
from rayfed.user_files import user_folder

REACH = 0.2
"""Largest change of a weight."""

TABLE = "slopes"


def changed_weights(shares: Sequence[float], client: int, change: float) -> list[float] | None:
    """Weights after the change of one client's weight; None where one of them is outside [0, 1].

    >>> changed_weights([0.5, 0.3, 0.2], 0, 0.25)
    [0.75, 0.15, 0.1]

    Args:
        shares: Weights before, summing to 1.
        client: Position of the client.
        change: Change of its weight.
    """
    own = shares[client] + change
    if len(shares) < 2 or not 0 <= own <= 1:
        return None
    factor = (1 - own) / (1 - shares[client])
    return [own if k == client else share * factor for k, share in enumerate(shares)]


def line(changes: Sequence[float], gaps: Sequence[float]) -> tuple[float, float]:
    """Slope dG/da of the least-squares line through the points, and Pearson's correlation rho.

    Where all gaps are equal, both are 0.

    Args:
        changes: Changes of the weight, at least two different ones.
        gaps: The gap at each change.
    """
    x = np.asarray(changes) - np.mean(changes)
    y = np.asarray(gaps) - np.mean(gaps)
    size = float(np.sqrt((x @ x) * (y @ y)))
    return float(x @ y / (x @ x)), float(x @ y / size) if size else 0.0


def slope_rows(
    names: Sequence[str],
    shares: Sequence[float],
    changes: Sequence[float],
    gap: Callable[[int, Sequence[float]], float],
) -> list[dict[str, Any]]:
    """Rows of the table `slopes`: one for each client and change.

    Args:
        names: Ids of the clients.
        shares: Weight of each client before.
        changes: Changes of a weight, with 0 among them; those that leave [0, 1] are left out.
        gap: Computes the gap of the client at a position under the given weights.
    """
    rows = []
    for client, name in enumerate(names):
        pairs = [(change, changed_weights(shares, client, change)) for change in changes]
        gaps = {change: gap(client, weights) for change, weights in pairs if weights is not None}
        slope, rho = line(list(gaps), list(gaps.values()))
        rows += [
            {"client": name, "change": c, "gap": g, "gap_change": g - gaps[0.0], "slope": slope, "rho": rho}
            for c, g in gaps.items()
        ]
    return rows


def survey(folder: Path, points: int) -> list[dict[str, Any]]:
    """Compute and write the table slopes.parquet of a finished run; returns its rows.

    Args:
        folder: Folder of a finished run.
        points: Number of changes of each weight, odd, from -REACH to REACH.

    Raises:
        ConfigError: The run has one client, or a client has no validation examples.
    """
    run = reopen(folder)
    executor = InlineExecutor(run.setup.context, run.setup.weights, device=run.device)
    experiment = run.setup.experiment
    if len(experiment.clients) < 2:
        raise ConfigError("the weight of a single client is always 1: a run with two or more is needed")
    cohort = cohort_of(experiment, executor, run.state.round, ()).everyone
    stage("training all clients once more")
    names, models, _ = trained_once_more(run, cohort)
    counts = [experiment.clients[name].num_examples for name in names]
    changes = [REACH * (2 * k / (points - 1) - 1) if 2 * k != points - 1 else 0.0 for k in range(points)]
    with count_up("models scored", len(names) * (points + 1)) as advance:

        def loss(client: int, params: Params) -> float:
            advance()
            return validation_loss(run, cohort, names[client], params)

        own = [loss(k, model) for k, model in enumerate(models)]
        updates = [Update(client=name, params=model) for name, model in zip(names, models, strict=True)]

        def gap(client: int, weights: Sequence[float]) -> float:
            return loss(client, mean_by_name(updates, weights)) - own[client]

        rows = slope_rows(names, [count / sum(counts) for count in counts], changes, gap)
    write_parquet(folder / f"{TABLE}.parquet", rows)
    return rows


def validation_loss(run: ReopenedRun, cohort: Cohort, client: str, params: Params) -> float:
    """Loss of a model on the validation examples of one client.

    Raises:
        ConfigError: The client has none.
    """
    task = partial(evaluate, split="val", local=run.setup.experiment.local)
    sent = {client: run.state.broadcast(params={**run.state.params, **params})}
    [answer] = cohort.for_reporting().run(task, sent, tag=TABLE)
    metrics: Mapping[str, float] = answer.metrics
    if "loss" not in metrics:
        raise ConfigError(f"data.val: client {client!r} has no validation examples; run with data.val=0.2")
    return metrics["loss"]


USAGE = """\
python -m rayfed.report.slopes RUN [--points 21] [--debug]

Draws the generalization gap of each client over its weight in the mean model,
for example
  python -m rayfed.report.slopes runs/mine
"""
TITLE = "generalization gap of each client over its weight"
MOST_CLIENTS = 12
"""Largest number of clients that are drawn."""


@style.in_style
def gap_slopes(run: RecordedRun) -> style.Drawing | None:
    """Draw the table `slopes` of a run: points and line of each client; None where there is none."""
    rows = run.rows(TABLE)
    if not rows:
        return None
    clients = by_client(rows)
    shown, known = list(clients)[:MOST_CLIENTS], style.looks(run.domains)
    figure, axes = style.canvas(1, 1, (7.4, 4.2))
    axis = axes[0, 0]
    entries = []
    for place, name in enumerate(shown):
        own = clients[name]
        look = known.get(run.owners.get(name, ""), style.UNKNOWN)
        x, y = (np.array([row[key] for row in own]) for key in ("change", "gap_change"))
        slope, rho = own[0]["slope"], own[0]["rho"]
        kind = style.LINES[place % len(style.LINES)]
        axis.plot(x, y, look.marker, color=look.colour, markersize=3.5, alpha=0.7)
        axis.plot(x, y.mean() + slope * (x - x.mean()), kind, color=look.colour)
        label = f"{name}: dG/da {slope:.2f}, K {steepness(slope)}, rho {rho:.2f}"
        entries.append(style.line_of(look, label))
        entries[-1].set_linestyle(kind)
    axis.axhline(0, color="black", linewidth=0.6)
    axis.axvline(0, color="black", linewidth=0.6)
    axis.set(xlabel="change of the client's weight", ylabel="change of its generalization gap")
    more = f"the first {len(shown)} of {len(clients)} clients; " if len(shown) < len(clients) else ""
    last = max((row["round"] for row in run.rounds), default=0)
    what, about = run.title("Generalization gap of each client over its weight", f"round {last}")
    style.heading(figure, what, about, f"{more}K = -da/dG")
    style.legend(figure, entries, "client")
    return style.Drawing("slopes", figure)


def by_client(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Rows of the table `slopes` by client, in order."""
    rows_by_client: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        rows_by_client.setdefault(row["client"], []).append(row)
    return rows_by_client


def steepness(slope: float) -> str:
    """FFT-GP's K, Eq. 11: decrease of the gap per weight, inverted; of a line with this slope dG/da.

    >>> steepness(-0.5), steepness(0.0)
    ('2.00', 'infinite')
    """
    return f"{-1 / slope:.2f}" if slope else "infinite"


def main(argv: Sequence[str] | None = None) -> int:
    """Draw from the command line. Exit code: 0 drawn, 1 failed, 2 bad input, 130 interrupted."""
    parser = parser_of("rayfed.report.slopes", USAGE)
    parser.add_argument("run", type=user_folder, help="folder of a finished run")
    parser.add_argument("--points", type=int, default=21, help="number of weights of each client, odd")
    args = parser.parse_args(argv)

    def work() -> None:
        if args.points < 3 or args.points % 2 == 0:
            raise ConfigError(f"--points: {args.points} is not an odd number of at least 3")
        with use_screen(screen_of()):
            rows = survey(args.run, args.points)
        for name, own in by_client(rows).items():
            slope, rho = own[0]["slope"], own[0]["rho"]
            say(f"{name}: dG/da {slope:.4f}, K {steepness(slope)}, rho {rho:.4f}")
        if drawing := gap_slopes(RecordedRun(args.run)):
            say(str(add_figure(args.run, TITLE, drawing)))

    return run_guarded(work, args.debug, "the run itself is unchanged")


if __name__ == "__main__":
    sys.exit(main())
