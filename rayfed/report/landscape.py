"""Draws the loss of a finished run around the global model, in a plane through the clients' models.

All clients train one more round from the final model. The plane contains the mean of their models and the two
directions in which they differ most; with three clients it is the plane through their models, as in FFT-GP's
Figure 5. The loss is that of the held-out domain, or, where none is held out, the mean over clients of the
loss on their test images. BatchNorm statistics are interpolated like parameters; variances are clipped at 0.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from rayfed.client_facts import RowTable
from rayfed.engine.loop import RoundPlan, draw_cohort, score_global
from rayfed.errors import ConfigError
from rayfed.evaluation.metrics import summary
from rayfed.evaluation.test_sets import all_splits
from rayfed.executors.inline import InlineExecutor
from rayfed.federation.aggregation import mean_by_name
from rayfed.federation.client_tasks import fit
from rayfed.federation.cohort import Cohort, Ledger
from rayfed.federation.params import subtract
from rayfed.record.atomic_files import write_parquet
from rayfed.record.recorded_run import RecordedRun
from rayfed.report import style
from rayfed.report.reopen import ReopenedRun, evenly, reopen
from rayfed.report.report_md import add_figure
from rayfed.terminal.arguments import parser_of
from rayfed.terminal.console import count_up, say, screen_of, stage, use_screen
from rayfed.terminal.exit_code import run_guarded
from rayfed.types import Params, ServerState, Update, is_statistic
from rayfed.user_files import user_folder

Vectors: TypeAlias = npt.NDArray[np.float64]
MARGIN = 0.5
"""Margin of the grid on each side, as a share of the extent of the models."""


@dataclass(frozen=True, kw_only=True)
class Plane:
    """A plane in the space of parameters.

    Attributes:
        centre: The model at (0, 0).
        moves: Differences of the M models from the centre.
        mix: The two unit axes as linear combinations of the differences, shape (2, M).
        places: Coordinates of the models in the plane, shape (M, 2).
        share: Share of the sum of squared distances of the models from the centre that lies in the plane.
    """

    centre: Params
    moves: Sequence[Params]
    mix: Vectors
    places: Vectors
    share: float

    def at(self, x: float, y: float) -> Params:
        """Parameters of the model at a point of the plane."""
        weights = np.array([x, y]) @ self.mix
        params = {name: value.double() for name, value in self.centre.items()}
        for weight, move in zip(weights.tolist(), self.moves, strict=True):
            for name, value in move.items():
                params[name] = params[name] + weight * value.double()
        return {
            name: (value.clamp_min(0) if name.endswith("running_var") else value).to(self.centre[name].dtype)
            for name, value in params.items()
        }


def plane_through(centre: Params, models: Sequence[Params]) -> Plane:
    """Plane through the centre along the first two principal directions of the models' differences from it.

    Args:
        centre: Parameters of the central model.
        models: Parameters of the other models, with the same names. BatchNorm statistics do not count for
            lengths and directions.

    Raises:
        ConfigError: The models do not span a plane.
    """
    moves = [subtract(model, centre) for model in models]
    names = [name for name in centre if not is_statistic(name)]
    flat = torch.stack([torch.cat([move[n].double().flatten() for n in names]) for move in moves])
    sizes, vectors = np.linalg.eigh((flat @ flat.T).numpy())  # ascending
    if len(models) < 2 or sizes[-2] <= 1e-12 * sizes[-1]:
        raise ConfigError(
            f"the models of {len(models)} clients do not span a plane: three or more are needed"
        )
    lengths = np.sqrt(sizes[:-3:-1])  # (2,)
    axes = vectors[:, :-3:-1].T  # (2, M)
    axes = axes * np.sign(axes[np.arange(2), np.abs(axes).argmax(1)])[:, None]
    return Plane(
        centre=centre,
        moves=moves,
        mix=axes / lengths[:, None],
        places=(axes * lengths[:, None]).T,
        share=float(sizes[-2:].sum() / sizes.sum()),
    )


def grid(places: Vectors, points: int) -> tuple[Vectors, Vectors]:
    """Coordinates x and y, shape (points,) each, that cover the places and the origin with a margin."""
    covered = np.vstack([places, np.zeros((1, 2))])
    low = covered.min(0)
    high = covered.max(0)
    room = MARGIN * (high - low)
    x, y = (np.linspace(low[k] - room[k], high[k] + room[k], points) for k in (0, 1))
    return x, y


def losses(
    plane: Plane, names: Sequence[str], points: int, loss: Callable[[Params], float]
) -> list[dict[str, Any]]:
    """Rows of the table `landscape`: the models themselves, then the grid.

    Args:
        plane: Plane through the models.
        names: Ids of the clients, in the order of the models.
        points: Number of grid points in each direction.
        loss: Computes the loss of a model from its parameters.
    """
    rows = [{"kind": "global", "client": "", "x": 0.0, "y": 0.0, "loss": loss(plane.centre)}]
    for name, (x, y), move in zip(names, plane.places.tolist(), plane.moves, strict=True):
        own = {key: value + move[key] for key, value in plane.centre.items()}
        rows.append({"kind": "client", "client": name, "x": x, "y": y, "loss": loss(own)})
    xs, ys = grid(plane.places, points)
    rows += [
        {"kind": "grid", "client": "", "x": x, "y": y, "loss": loss(plane.at(x, y))}
        for y in ys.tolist()
        for x in xs.tolist()
    ]
    return [{**row, "share": plane.share} for row in rows]


def trained_once_more(run: ReopenedRun, cohort: Cohort) -> tuple[list[str], list[Params], Params]:
    """Train all clients once more from the final model.

    Returns:
        Ids of the clients, their models, and the mean of these with the weights of the last round.
    """
    experiment = run.setup.experiment
    state = experiment.local.exchange(run.state, cohort)
    task = partial(fit, local=experiment.local)
    updates = cohort.run(task, experiment.server.send(state, cohort), tag="fit")
    models = [{**state.params, **update.params} for update in updates]
    weights = last_weights(run.recorded.rows("aggregation"))
    shares = [weights.get(u.client, 0.0) for u in updates]
    if not sum(shares):
        shares = [float(u.num_examples) for u in updates]
    whole = [Update(client=u.client, params=m) for u, m in zip(updates, models, strict=True)]
    return [u.client for u in updates], models, mean_by_name(whole, shares)


def last_weights(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Weight of each client in the last round of the table `aggregation`."""
    last = max((row["round"] for row in rows), default=0)
    return {row["client"]: row["weight"] for row in rows if row["round"] == last}


def loss_on(experiment: RoundPlan, cohort: Cohort, state: ServerState, params: Params) -> float:
    """Loss of a model on the held-out domain, else mean over clients of the loss on their test images."""
    unseen = tuple(s for s in experiment.sets if s.is_held_out)
    scored = replace(experiment, sets=unseen or experiment.sets)
    scores = score_global(scored, cohort, replace(state, params=params))
    if unseen:
        return float(np.mean([score.loss for score in scores.held_out.values()]))
    return float(summary(scores)["loss"])


def survey(folder: Path, points: int, images: int) -> list[dict[str, Any]]:
    """Compute and write the table landscape.parquet of a finished run; returns its rows.

    Args:
        folder: Folder of a finished run.
        points: Number of grid points in each direction.
        images: Largest number of images of each test set.
    """
    run = reopen(folder)
    context = replace(run.setup.context, splits=only_tests_thinned(run, images))
    executor = InlineExecutor(context, run.setup.weights, device=run.device)
    experiment = replace(run.setup.experiment, packs=())  # packs have all images of their sets
    cohort = replace(draw_cohort(experiment, executor, run.state), ledger=Ledger())
    if run.setup.partition.drawn is None:  # else there may be too many to train all of them
        cohort = cohort.everyone
    stage("training the clients once more")
    names, models, centre = trained_once_more(run, cohort)
    plane = plane_through(centre, models)
    with count_up("models scored", 1 + len(models) + points**2) as advance:

        def loss(params: Params) -> float:
            loss_there = loss_on(experiment, cohort, run.state, params)
            advance()
            return loss_there

        rows = losses(plane, names, points, loss)
    write_parquet(folder / "landscape.parquet", rows)
    return rows


def only_tests_thinned(run: ReopenedRun, images: int) -> RowTable:
    """Splits with all training images and at most `images` test images of each set."""
    partition = run.setup.partition
    thin = {
        owner: {name: evenly(rows, images) if name == "test" else rows for name, rows in parts.items()}
        for owner, parts in all_splits(partition).items()
    }
    return RowTable(thin, partition.drawn)


USAGE = """\
python -m rayfed.report.landscape RUN [--points 11] [--images 100]
    [--debug]

Draws the loss around the global model and the clients' models of a finished
run, for example
  python -m rayfed.report.landscape runs/mine --points 21
"""
MOST_NAMES = 15
"""Largest number of clients whose names are shown."""
TITLE = "loss around the global model and the clients' models"


@style.in_style
def landscape(run: RecordedRun) -> style.Drawing | None:
    """Draw the table `landscape` of a run; None where there is none."""
    rows = run.rows("landscape")
    if not rows:
        return None
    figure, axes = style.canvas(1, 1, (6.8, 4.8))
    axis = axes[0, 0]
    xs, ys, z = surface(rows)
    figure.colorbar(axis.contourf(xs, ys, z, levels=20, cmap="viridis"), ax=axis, label="loss")
    clients, looks = [row for row in rows if row["kind"] == "client"], style.looks(run.domains)
    for row in clients:
        look = looks.get(run.owners.get(row["client"], ""), style.UNKNOWN)
        place = {"marker": look.marker, "markersize": 7, "markeredgecolor": "white", "linestyle": ""}
        axis.plot(row["x"], row["y"], color=look.colour, **place)
    (centre,) = axis.plot(
        0, 0, "*", color="white", markeredgecolor="black", markersize=13, label="global model"
    )
    axis.set(xlabel="distance between models, first direction", ylabel="second direction")
    last = max((row["round"] for row in run.rounds), default=0)
    share = f"{100 * rows[0]['share']:.0f} % of the clients' squared distances from it lie in this plane"
    style.heading(figure, *run.title(f"{_whose_loss(run)} around the global model", f"round {last}"), share)
    known = {run.owners.get(row["client"]) for row in clients}
    own = [style.line_of(look, f"client of {d}") for d, look in looks.items() if d in known]
    for entry in own:
        entry.set_linestyle("")
    style.legend(figure, [centre, *own])
    if len(clients) <= MOST_NAMES:
        places = [(row["x"], row["y"]) for row in clients]
        style.place_labels(axis, [*places, (0.0, 0.0)], [row["client"] for row in clients])
    return style.Drawing("landscape", figure)


def _whose_loss(run: RecordedRun) -> str:
    """The measured loss and its data, in words, as `rayfed.report.landscape` measures it."""
    if run.held_out:
        return f"Loss on the unseen domain {', '.join(run.held_out)}"
    return "Loss on the clients' test sets (mean over clients)"


def surface(rows: Sequence[Mapping[str, Any]]) -> tuple[Vectors, Vectors, Vectors]:
    """The grid in the table `landscape`: x of shape (X,), y of shape (Y,), loss of shape (Y, X)."""
    loss = {(row["x"], row["y"]): row["loss"] for row in rows if row["kind"] == "grid"}
    xs, ys = (sorted({place[k] for place in loss}) for k in (0, 1))
    return np.array(xs), np.array(ys), np.array([[loss[x, y] for x in xs] for y in ys])


def main(argv: Sequence[str] | None = None) -> int:
    """Draw from the command line. Exit code: 0 drawn, 1 failed, 2 bad input, 130 interrupted."""
    parser = parser_of("rayfed.report.landscape", USAGE)
    parser.add_argument("run", type=user_folder, help="folder of a finished run")
    parser.add_argument("--points", type=int, default=11, help="points of the grid in each direction")
    parser.add_argument("--images", type=int, default=100, help="largest number of images of each test set")
    args = parser.parse_args(argv)

    def work() -> None:
        if args.points < 2 or args.images < 1:
            raise ConfigError("--points: at least 2, --images: at least 1")
        with use_screen(screen_of()):
            survey(args.run, args.points, args.images)
        if drawing := landscape(RecordedRun(args.run)):
            say(str(add_figure(args.run, TITLE, drawing)))

    return run_guarded(work, args.debug, "the run itself is unchanged")


if __name__ == "__main__":
    sys.exit(main())
