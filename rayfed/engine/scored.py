"""Scores the final model of a finished run on other data, instead of training one (`evaluation.model_of`)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from rayfed.config.schema import Config
from rayfed.engine.loop import Experiment
from rayfed.errors import ConfigError
from rayfed.executors.worker import World
from rayfed.federation.cohort import Cohort
from rayfed.federation.local import Local
from rayfed.federation.params import digest
from rayfed.federation.server import Server
from rayfed.record.checkpoint import Checkpoints
from rayfed.record.folder import TENSORS, how_to_go_on
from rayfed.record.readers import read_tensors
from rayfed.types import Params, ServerState


@dataclass(frozen=True, kw_only=True)
class Finished(Server):
    """Server that begins with the state at the end of another run, and leaves it as it is.

    Attributes:
        state: That state.
    """

    trains: ClassVar[bool] = False

    state: ServerState

    def start(self, params: Params) -> ServerState:
        return replace(self.state, round=0, virtual_time=0.0)

    def round(self, state: ServerState, cohort: Cohort, local: Local) -> ServerState:
        return state


def check_scored(config: Config, world: World) -> None:
    """Check, before anything runs, that a model trained on other classes can score those of this data set.

    Args:
        config: The experiment; without `evaluation.model_of` nothing is checked.
        world: What builds its model.

    Raises:
        ConfigError: Its rounds would train, its model has no text tower, or the values that it trains belong
            to the classes one by one.
    """
    if config.evaluation.model_of is None:
        return
    if config.rounds != 1:
        raise ConfigError(
            f"rounds: {config.rounds}, but with evaluation.model_of nothing is trained; set rounds=1"
        )
    model = world.skeleton()
    if model.text is None:
        raise ConfigError(
            f"model.name: the classifier of {model.label!r} has an output for each class that it was "
            f"trained on, and cannot score new ones; choose a model that makes it from the names of the "
            f"classes, such as model=clip_mini or clip_vit_b_16"
        )
    one_more = replace(world, num_classes=world.num_classes + 1, classes=()).skeleton()
    other = {name: entry.tensor.shape for name, entry in one_more.tensors().items() if entry.is_trained}
    for name, entry in model.tensors().items():
        if entry.is_trained and other[name] != entry.tensor.shape:
            raise ConfigError(
                f"tuning.name: {config.tuning['name']!r} trains {name!r}, which has values for each class, "
                f"so that it cannot score new ones; set tuning.train_head=false where it has that option, or "
                f"choose text_prompt (without class_specific), residual_adapter or attention_adapter"
            )


def model_digest(folder: str) -> str:
    """SHA-256 digest of the final tensors of a run; empty where it is not finished."""
    file = Path(folder) / TENSORS
    return digest(read_tensors(file)) if file.is_file() else ""


def scored(trained: str, experiment: Experiment, start: Params) -> tuple[Experiment, Params]:
    """The experiment that begins with the final state of another run and trains nothing, and its tensors.

    Args:
        trained: Folder of the other run (`evaluation.model_of`).
        experiment: The experiment as it was prepared.
        start: Initial values of the tensors that it would send and train.

    Raises:
        ConfigError: The folder is not that of a finished run, or its tensors are not those of this model.
    """
    folder = Path(trained)
    if not (folder / TENSORS).is_file():
        what = how_to_go_on(folder) if folder.is_dir() else "there is no such folder"
        raise ConfigError(f"evaluation.model_of: {trained!r} is not the folder of a finished run: {what}")
    found, wanted = (
        {name: tuple(value.shape) for name, value in params.items()}
        for params in (read_tensors(folder / TENSORS), start)
    )
    if found != wanted:
        raise ConfigError(
            f"evaluation.model_of: the tensors of {trained!r} are not those of this model and tuning; set "
            f"model, tuning and algorithm as in its config.yaml"
        )
    saved = Checkpoints(folder).load(start, lambda rounds: True)
    if saved is None:
        raise ConfigError(f"evaluation.model_of: {trained!r} has no checkpoint, which holds the final state")
    return replace(experiment, server=Finished(state=saved.state)), dict(saved.state.params)
