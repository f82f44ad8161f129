"""Scores the final model of a finished run on other data, instead of training one (`evaluation.model_of`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import ClassVar

from rayfed.devices import settings_restored
from rayfed.engine.setup import Setup
from rayfed.errors import ConfigError
from rayfed.executors.worker import Worker
from rayfed.federation.client import Client
from rayfed.federation.cohort import Cohort
from rayfed.federation.executor import Call
from rayfed.federation.local import Local
from rayfed.federation.params import digest
from rayfed.federation.server import Server
from rayfed.federation.tensors_that_stay import STAYS, names_that_stay
from rayfed.record.checkpoint import Checkpoints, Saved, from_file
from rayfed.record.folder import TENSORS, how_to_go_on
from rayfed.record.recorded_run import RecordedRun
from rayfed.tuning.base import export
from rayfed.types import Broadcast, Params, ServerState, Update


@dataclass(frozen=True, kw_only=True)
class FinalModel(Server):
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


def model_digest(folder: str) -> str:
    """SHA-256 digest of the final tensors of a run; empty where it is not finished."""
    file = Path(folder) / TENSORS
    return digest(RecordedRun(Path(folder)).tensors) if file.is_file() else ""


def score_model_of(trained: str, setup: Setup) -> Setup:
    """The experiment that begins with the final state of another run and trains nothing.

    Where tensors stay at the clients (`local.stays`) and the clients are those of the other run, each begins
    with what it kept at the end of that run; otherwise it begins with nothing.

    Args:
        trained: Folder of the other run (`evaluation.model_of`).
        setup: The experiment as it was prepared.

    Raises:
        ConfigError: The folder is not that of a finished run, its last checkpoint cannot be used, or its
            tensors are not those of this model.
    """
    folder = Path(trained).absolute()  # another process may read the stores
    if not (folder / TENSORS).is_file():
        what = how_to_go_on(folder) if folder.is_dir() else "there is no such folder"
        raise ConfigError(f"evaluation.model_of: {trained!r} is not the folder of a finished run: {what}")
    _check_shapes(trained, RecordedRun(folder).tensors, setup.start, whole=True)
    saved = final_state(folder, setup.start)
    if saved is None:
        raise ConfigError(
            f"evaluation.model_of: {trained!r} has no checkpoint of the round of its final model, "
            f"which holds the state of the server and of the clients; put back its folder checkpoints, or "
            f"run it again with overwrite=true"
        )
    experiment = replace(setup.experiment, server=FinalModel(state=saved.state), parts=None)
    stores = _own_stores(trained, saved.stores, setup) if setup.context.stays else {}
    return replace(setup, experiment=experiment, start=dict(saved.state.params), stores=stores)


def final_state(folder: Path, start: Params) -> Saved | None:
    """The state of the server and the stores of the clients with the final model; None: they are not there.

    Args:
        folder: Folder of a finished run.
        start: Initial tensors of its experiment, with whose names and shapes the checkpoint must agree.

    Raises:
        ConfigError: The checkpoint cannot be used.
    """
    checkpoints, number = Checkpoints(folder), RecordedRun(folder).final_round
    return checkpoints.of_round(number, start) if checkpoints.has(number) else None


@settings_restored()
def personal_params(folder: Path, client: str, setup: Setup) -> Params:
    """The values that a client would deploy at the end of a finished run, by global name.

    These are those of the server, with the tensors that stayed at the client and after the method's
    `personalize`, which loads a model that the client keeps for itself, or adapts the one of the server.

    Args:
        setup: The experiment of the run, prepared again.

    Raises:
        ConfigError: The client keeps something in this method, and never trained, or there is no checkpoint.
        ClientError: The method's `personalize` failed.
    """
    local = setup.experiment.local
    saved = final_state(folder, setup.start)
    if saved is None:
        raise ConfigError(f"personal: {folder} has no checkpoint, which holds what the clients kept")
    file = saved.stores.get(client)
    if file is None and (local.stays or local.deploys == "personal"):
        raise ConfigError(f"client: {client!r} never trained in {folder}, so that nothing stayed at it")
    call = Call(
        client=client, task=partial(deployed_model, local), tag="personal", sent=saved.state.broadcast()
    )
    update, _ = Worker(setup.context, setup.weights).call(call, {} if file is None else from_file(file))
    return dict(update.extra)


def deployed_model(local: Local, client: Client, sent: Broadcast) -> Update:
    """The model that a client would deploy, as the `extra` tensors of its answer.

    Args:
        local: The client half of the method.
        sent: The message to it.
    """
    local.prepare(client, sent)
    local.personalize(client, sent, Update(client=client.id, params=client.params(), num_examples=0))
    return Update(client=client.id, num_examples=0, extra=export(client.model))


def _own_stores(trained: str, files: Mapping[str, Path], setup: Setup) -> dict[str, Path]:
    """Files of the stores that have values of what stays, by client; none where the clients are others."""
    model = setup.context.skeleton()
    entries = model.tensors()
    wanted = {name: entries[name].tensor for name in names_that_stay(model, setup.context.stays)}
    stores = {}
    for client, file in files.items():
        if own := from_file(file).get(STAYS):
            if client not in setup.partition.table:
                return {}
            _check_shapes(trained, own, wanted)
            stores[client] = file
    return stores


def _check_shapes(trained: str, params: Params, wanted: Params, whole: bool = False) -> None:
    """Raise ConfigError unless tensors have these shapes. Args: whole: none of the names may be missing."""
    shapes = {name: tuple(value.shape) for name, value in wanted.items()}
    missing = whole and params.keys() != wanted.keys()
    if missing or any(shapes.get(name) != tuple(value.shape) for name, value in params.items()):
        raise ConfigError(
            f"evaluation.model_of: the tensors of {trained!r} are not those of this model and tuning; set "
            f"model, tuning and algorithm as in its config.yaml"
        )
