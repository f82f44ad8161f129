"""Contract tests that every method must pass."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file

from rayfed.config.schema import build_parts, load_config
from rayfed.engine.loop import Experiment, run_rounds
from rayfed.engine.recorded import Keeping, record_rounds
from rayfed.engine.setup import Setup
from rayfed.executors.inline import InlineExecutor
from rayfed.federation.executor import Executor
from rayfed.federation.method import check_compatible
from rayfed.federation.params import digest
from rayfed.heterogeneity.traces import TraceEntry
from rayfed.testing.small import DOMAINS, WatchingExecutor, small_setup, two_actors, without_times
from rayfed.types import Params

ONE_EXAMPLE = ("data.limit=13", "data.val=0", "data.test=1", "data.partition.clients_per_domain=6")
"""A split of the embedded data in which some clients have a single training example."""

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
    check_compatible(parts.server, parts.local, parts.tuning)
    module = name.partition(":")[0] if ":" in name else f"algorithms.{name}"
    doc = importlib.import_module(module).__doc__ or ""
    first = doc.strip().partition("\n")[0]
    assert len(first) > SHORTEST, f"{name}: begin the file with a docstring that says what the method does"


def leaves_messages_and_frozen_weights_alone(name: str, overrides: Sequence[str] = ()) -> None:
    """The method does not change messages or frozen weights, and all values stay finite."""
    setup = _setup(name, overrides)
    executor = WatchingExecutor(setup.world, setup.weights)
    frozen = executor.worker.checksum()
    *_, last = run_rounds(setup.experiment, executor, setup.start)
    assert executor.worker.checksum() == frozen, f"{name}: a frozen weight was changed"
    _check_finite(name, last.state.params)
    assert last.row["round"] == setup.experiment.rounds
    assert 0 <= last.row[setup.world.objective.metric] <= 1


def survives_a_client_with_one_example(name: str, overrides: Sequence[str] = ()) -> None:
    """A client with a single training example does not break a round."""
    setup = _setup(name, (*ONE_EXAMPLE, *overrides))
    *_, last = run_rounds(setup.experiment, InlineExecutor(setup.world, setup.weights), setup.start)
    _check_finite(name, last.state.params)


def repeats_itself_after_an_interruption(name: str, overrides: Sequence[str] = ()) -> list[dict[str, Any]]:
    """With missing clients, an interrupted and continued run ends with the tensors of an uninterrupted one.

    Some clients drop out in the first round, all of them in the second, and one in the third. Whatever a
    method keeps between rounds must be in `state.memory`, `state.shared` or `client.store` to pass this.

    Returns:
        The rows of the rounds, and a last one with the digest of the tensors.
    """
    setup = _setup(name, ("rounds=3", "evaluation.every=3", "faults.dropout=0.4", *overrides))
    experiment = _with_missing_clients(setup.experiment)
    with TemporaryDirectory() as folder:
        whole = _record(setup, experiment, Path(folder) / "whole")
        interrupted = Path(folder) / "interrupted"
        first = _record(setup, experiment, interrupted, rounds=1)
        continued = first + _record(setup, experiment, interrupted, resume=True)
        params = load_file(interrupted / "model" / "params.safetensors")
    assert continued == whole, (
        f"{name}: an interruption after the first round changed the result; keep what must survive a round "
        f"in state.memory, state.shared or client.store"
    )
    assert digest(params) == whole[-1]["sha256"]
    _check_finite(name, params)
    return whole


def same_tensors_on_actors(
    name: str,
    overrides: Sequence[str] = (),
    pool: Callable[[Setup], AbstractContextManager[Executor]] = two_actors,
) -> None:
    """Two Ray actors give the tensors and the rows that one process gives.

    Args:
        name: As for `check_method`.
        overrides: As for `check_method`.
        pool: Opens an executor with actors.
    """
    setup = _setup(name, overrides)
    experiment = replace(setup.experiment, clients_per_round=min(2, len(setup.experiment.clients)))
    *_, here = run_rounds(experiment, InlineExecutor(setup.world, setup.weights), setup.start)
    with pool(setup) as executor:
        *_, there = run_rounds(experiment, executor, setup.start)
    assert digest(here.state.params) == digest(there.state.params), f"{name}: actors give other tensors"
    assert without_times(here.row) == without_times(there.row), f"{name}: actors give other rows"


METHOD_CHECKS: tuple[Callable[[str, Sequence[str]], Any], ...] = (
    says_what_it_is,
    leaves_messages_and_frozen_weights_alone,
    survives_a_client_with_one_example,
    repeats_itself_after_an_interruption,
)
"""Every contract test of a method that needs no Ray: functions of its name and of overrides."""


def _setup(name: str, overrides: Sequence[str]) -> Setup:
    return small_setup(f"algorithm={name}", DOMAINS, *overrides)


def _with_missing_clients(experiment: Experiment) -> Experiment:
    """The experiment with faults: some clients drop out in round 1, all in round 2, one in round 3."""
    ids = list(experiment.clients)
    assert experiment.faults is not None
    lost = {(1, cid): TraceEntry(dropout=True) for cid in ids}
    lost |= {(2, cid): TraceEntry(dropout=cid == ids[0] and len(ids) > 1) for cid in ids}
    return replace(experiment, faults=replace(experiment.faults, trace=lost))


def _record(
    setup: Setup, experiment: Experiment, path: Path, rounds: int | None = None, resume: bool = False
) -> list[dict[str, Any]]:
    """Run all rounds, or the first `rounds`, and record them in a folder, with a new executor."""
    path.mkdir(exist_ok=True)
    executor = InlineExecutor(setup.world, setup.weights)
    running = record_rounds(experiment, executor, setup.start, Keeping(path=path, domains={}, resume=resume))
    rows = [without_times(row) for row in islice(running, rounds)]
    running.close()  # type: ignore[attr-defined]  # a generator
    return rows


def _check_finite(name: str, params: Params) -> None:
    bad = [key for key, value in params.items() if not torch.isfinite(value).all()]
    assert not bad, f"{name}: {bad[0]} is NaN or infinite after the last round"
