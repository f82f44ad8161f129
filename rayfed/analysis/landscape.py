"""Loss around the global model and the clients' models of a finished run, in the plane they lie in.

All clients train once more from the final model. The plane goes through the mean of their models and is
spanned by the two directions in which they differ most; with three clients it is the plane through their
models, as in FFT-GP's Figure 5. The loss is that of the unseen domain, or, where none is held out, the mean
over the clients' test images. BatchNorm statistics move linearly with the parameters; variances stay >= 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from rayfed.analysis.reopen import Finished, reopen, thinned
from rayfed.engine.loop import Experiment, make_cohort, score_global
from rayfed.errors import ConfigError
from rayfed.evaluation.metrics import summary
from rayfed.executors.inline import InlineExecutor
from rayfed.federation.cohort import Cohort, Ledger
from rayfed.federation.params import mean_by_name, subtract
from rayfed.federation.visit import fit
from rayfed.record.files import write_parquet
from rayfed.record.readers import read_table
from rayfed.types import Params, ServerState, Update, is_statistic

Vectors: TypeAlias = npt.NDArray[np.float64]
MARGIN = 0.5  # of the extent of the models, on each side


@dataclass(frozen=True, kw_only=True)
class Plane:
    """A plane in the space of parameters.

    Attributes:
        centre: The model at (0, 0).
        moves: Models minus the centre.
        mix: The two axes, of length 1, as combinations of the moves, shape (2, M).
        places: The models in the plane, shape (M, 2).
        share: Share of the models' squared distances from the centre that lies in the plane.
    """

    centre: Params
    moves: Sequence[Params]
    mix: Vectors
    places: Vectors
    share: float

    def at(self, x: float, y: float) -> Params:
        """The model at a point."""
        weights = np.array([x, y]) @ self.mix
        found = {name: value.double() for name, value in self.centre.items()}
        for weight, move in zip(weights.tolist(), self.moves, strict=True):
            for name, value in move.items():
                found[name] = found[name] + weight * value.double()
        return {
            name: (value.clamp_min(0) if name.endswith("running_var") else value).to(self.centre[name].dtype)
            for name, value in found.items()
        }


def plane_through(centre: Params, models: Sequence[Params]) -> Plane:
    """The plane through the centre along the two directions in which the models lie farthest from it.

    Args:
        centre: A model.
        models: Others, with the same names; lengths are measured over their parameters, not over BatchNorm
            statistics.

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
    lengths, axes = np.sqrt(sizes[:-3:-1]), vectors[:, :-3:-1].T  # (2,), (2, M)
    axes = axes * np.sign(axes[np.arange(2), np.abs(axes).argmax(1)])[:, None]
    return Plane(
        centre=centre,
        moves=moves,
        mix=axes / lengths[:, None],
        places=(axes * lengths[:, None]).T,
        share=float(sizes[-2:].sum() / sizes.sum()),
    )


def grid(places: Vectors, points: int) -> tuple[Vectors, Vectors]:
    """Coordinates that cover the places and the origin, and half of their extent more on each side."""
    covered = np.vstack([places, np.zeros((1, 2))])
    low, high = covered.min(0), covered.max(0)
    room = MARGIN * (high - low)
    x, y = (np.linspace(low[k] - room[k], high[k] + room[k], points) for k in (0, 1))
    return x, y


def losses(
    plane: Plane, names: Sequence[str], points: int, loss: Callable[[Params], float]
) -> list[dict[str, Any]]:
    """Rows of the table `landscape`: the models themselves, then the grid.

    Args:
        plane: Of the models.
        names: Of the clients whose models they are.
        points: Of the grid, in each direction.
        loss: Of a model.
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


def trained_once_more(run: Finished, cohort: Cohort) -> tuple[list[str], list[Params], Params]:
    """Clients, their models after training from the final one, and the mean with the last round's weights."""
    experiment = run.setup.experiment
    state = experiment.local.exchange(run.state, cohort)
    task = partial(fit, local=experiment.local)
    updates = cohort.run(task, experiment.server.send(state, cohort), tag="fit")
    models = [{**state.params, **update.params} for update in updates]
    weights = last_weights(read_table(run.folder, "aggregation"))
    shares = [weights.get(u.client, 0.0) for u in updates]
    if not sum(shares):
        shares = [float(u.num_examples) for u in updates]
    whole = [Update(client=u.client, params=m) for u, m in zip(updates, models, strict=True)]
    return [u.client for u in updates], models, mean_by_name(whole, shares)


def last_weights(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Weight of each client in the last round that has weights."""
    last = max((row["round"] for row in rows), default=0)
    return {row["client"]: row["weight"] for row in rows if row["round"] == last}


def loss_on(experiment: Experiment, cohort: Cohort, state: ServerState, params: Params) -> float:
    """Loss of a model on the unseen domain, or on the clients' test images."""
    unseen = tuple(s for s in experiment.sets if not s.clients)
    looking = replace(experiment, sets=unseen or experiment.sets)
    scores = score_global(looking, cohort, replace(state, params=params))
    if unseen:
        return float(np.mean([score.loss for score in scores.held_out.values()]))
    return float(summary(scores)["loss"])


def survey(folder: Path, points: int, images: int) -> list[dict[str, Any]]:
    """Open a finished run and measure; the rows of its table `landscape`, which is written."""
    run = reopen(folder)
    world = replace(run.setup.world, splits=only_tests_thinned(run, images))
    executor = InlineExecutor(world, run.setup.weights)
    experiment = run.setup.experiment
    cohort = replace(make_cohort(experiment, executor, run.state.round).everyone, ledger=Ledger())
    names, models, centre = trained_once_more(run, cohort)
    plane = plane_through(centre, models)
    rows = losses(plane, names, points, partial(loss_on, experiment, cohort, run.state))
    write_parquet(folder / "landscape.parquet", rows)
    return rows


def only_tests_thinned(run: Finished, images: int) -> dict[str, Any]:
    """All training images, at most so many test images of each set."""
    few = thinned(run.setup.world.splits, images)
    return {
        owner: {**parts, **{name: rows for name, rows in few[owner].items() if name == "test"}}
        for owner, parts in run.setup.world.splits.items()
    }
