"""What every method promises, whoever wrote it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file

from rayfed.config.schema import build_parts, load_config
from rayfed.engine.loop import Experiment, run
from rayfed.engine.recorded import Keeping, conduct
from rayfed.engine.setup import Setup
from rayfed.executors.inline import InlineExecutor
from rayfed.federation.executor import Executor
from rayfed.federation.method import METHODS, check, check_task
from rayfed.federation.params import digest
from rayfed.heterogeneity.traces import Said
from rayfed.testing.small import DOMAINS, WatchingExecutor, small_setup, two_actors, without_times
from rayfed.types import Params

Check = Callable[[str, Sequence[str]], None]
SHORTEST = 20
"""Fewest characters of the first line of a method's docstring."""


def check_method(name: str, overrides: Sequence[str] = (), actors: bool = False) -> None:
    """Run every contract test on a method.

    Args:
        name: File name in algorithms/, or `package.module:NAME` of a `Method`.
        overrides: Settings as on the command line, such as `local.mu=0.1`; they win over those of the small
            experiment that the tests run on.
        actors: Also compare with two Ray actors, which takes some seconds more.

    Raises:
        AssertionError: The method breaks the contract; the message says how.
        ConfigError: There is no such method, or an override is wrong.
        ClientError: The method's client half failed.
    """
    for one in METHOD_CHECKS:
        one(name, overrides)
    if actors:
        same_tensors_on_actors(name, overrides)


def says_what_it_is(name: str, overrides: Sequence[str] = ()) -> None:
    """The module begins with a line that describes it, and its halves fit each other and the tuning."""
    config = load_config([f"algorithm={name}", *overrides])
    parts = build_parts(config)
    check(parts.server, parts.local, parts.tuning)
    module, colon, _ = name.partition(":")
    doc = importlib.import_module(module if colon else f"{METHODS.package}.{name}").__doc__ or ""
    first = doc.strip().partition("\n")[0]
    assert len(first) > SHORTEST, f"{name}: begin the file with a docstring that says what the method does"


def leaves_messages_and_frozen_weights_alone(name: str, overrides: Sequence[str] = ()) -> None:
    """Nobody writes into a message or a frozen weight, and all values stay finite."""
    setup = _setup(name, overrides)
    executor = WatchingExecutor(setup.world, setup.weights)
    frozen = executor.worker.checksum()
    *_, last = run(setup.experiment, executor, setup.start)
    assert executor.worker.checksum() == frozen, f"{name}: a frozen weight was changed"
    _check_finite(name, last.state.params)
    assert last.row["round"] == setup.experiment.rounds
    assert 0 <= last.row[setup.world.objective.metric] <= 1


def survives_a_client_with_one_example(name: str, overrides: Sequence[str] = ()) -> None:
    """A client with a single training example does not break a round."""
    split = ("data.limit=13", "data.val=0", "data.test=1", "data.partition.clients_per_domain=6")
    setup = _setup(name, (*split, *overrides))
    *_, last = run(setup.experiment, InlineExecutor(setup.world, setup.weights), setup.start)
    _check_finite(name, last.state.params)


def repeats_itself_after_an_interruption(name: str, overrides: Sequence[str] = ()) -> None:
    """With missing clients, an interrupted and continued run ends with the tensors of an uninterrupted one.

    Some clients drop out in the first round, all of them in the second, and one in the third. Whatever a method
    keeps between rounds must therefore be in `state.memory`, `state.shared` or `client.store`.
    """
    setup = _setup(name, ("rounds=3", "evaluation.every=3", "faults.dropout=0.4", *overrides))
    experiment = with_missing_clients(setup.experiment)
    with TemporaryDirectory() as folder:
        whole, ends = record(experiment, setup, Path(folder) / "whole"), None
        again, ends = record(experiment, setup, Path(folder) / "interrupted", stop_after=1), whole
        params = load_file(Path(folder) / "interrupted" / "model" / "params.safetensors")
    assert again == ends, f"{name}: after an interruption the rounds differ; keep state in the server or the store"
    assert digest(params) == whole[-1]["sha256"]
    _check_finite(name, params)
