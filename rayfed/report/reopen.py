"""Opens a finished run for analysis: prepares data, partition and model again and loads the final tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from rayfed.config.look_up import design_of
from rayfed.config.schema import Config, load_run
from rayfed.devices import chosen_device
from rayfed.engine.setup import Setup, prepare
from rayfed.errors import ConfigError
from rayfed.record.folder import TENSORS, how_to_go_on
from rayfed.record.readers import STUDY, DamagedError
from rayfed.record.recorded_run import RecordedRun
from rayfed.types import Params, ServerState, is_statistic
from rayfed.user_files import check_run_folder

Indices: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class ReopenedRun:
    """A run from its folder.

    Attributes:
        recorded: The files of the run.
        config: Config of the run.
        setup: Data, partition and model, prepared again.
        state: State of the server with the final tensors; its round is the next one.
    """

    recorded: RecordedRun
    config: Config
    setup: Setup
    state: ServerState

    @property
    def device(self) -> torch.device:
        """Device on which the run is analysed (`cluster.device`)."""
        return chosen_device(self.config.cluster.device)


def reopen(folder: Path) -> ReopenedRun:
    """Prepare a finished run's experiment again and read its final tensors.

    Raises:
        ConfigError: The folder is not that of a finished run, its data have changed, or it does not contain
            the whole model.
    """
    if not (folder / TENSORS).is_file():
        if not (folder / STUDY).exists():
            check_run_folder(folder)
        raise ConfigError(f"{str(folder)!r} is not the folder of a finished run; {how_to_go_on(folder)}")
    config = load_run(folder)
    setup = prepare(design_of(config))
    recorded = RecordedRun(folder)
    for what, now in (("data", setup.dataset.digest), ("partition", setup.partition.digest)):
        if recorded.environment.get(f"{what}_digest") != now:
            raise ConfigError(f"data: the {what} of {str(folder)!r} are not the same any more; run it again")
    params = _final_tensors(recorded, setup.start)
    if config.train.batch_norm == "local" and _has_statistics(setup):
        raise ConfigError(
            "train.batch_norm: with 'local' the statistics stay with the clients and are not in the run's "
            "folder; only runs with 'average' can be analysed"
        )
    if setup.context.stays:
        raise ConfigError(
            f"local.stays: {', '.join(setup.context.stays)} stay with the clients and are not in the run's "
            f"folder; only runs whose tensors are all sent can be analysed"
        )
    server = setup.experiment.server
    if not server.trains:
        raise ConfigError(f"algorithm: {config.algorithm!r} trains nothing, so there is nothing to analyse")
    state = replace(server.start(params), round=config.rounds)
    return ReopenedRun(recorded=recorded, config=config, setup=setup, state=state)


def _final_tensors(recorded: RecordedRun, start: Params) -> Params:
    params = recorded.tensors
    shapes = {name: (value.shape, value.dtype) for name, value in params.items()}
    if shapes != {name: (value.shape, value.dtype) for name, value in start.items()}:
        file = recorded.path / TENSORS
        raise DamagedError(f"{file} cannot be read: its tensors are not those of this run's model")
    return params


def _has_statistics(setup: Setup) -> bool:
    return any(is_statistic(slot) for slot in setup.weights)


def evenly(rows: Indices, count: int) -> Indices:
    """At most `count` of these rows, evenly spaced."""
    if len(rows) <= count:
        return rows
    return rows[np.linspace(0, len(rows) - 1, count).round().astype(int)]
