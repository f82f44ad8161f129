"""Executes one call of a client of an experiment again, in this process, to the bit.

The rounds from the nearest checkpoint before it are run again, then those exchanges of the round that come
before the call. In its exchange only the client is called, or the clients that shared its passes
(`train.group`).
"""

from __future__ import annotations

import math
import pdb
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from rayfed.columns import is_result
from rayfed.config.schema import Config, composed, load_run, resolve, to_dict
from rayfed.data.examples import ClientData
from rayfed.engine.client_places import inline_device
from rayfed.engine.loop import RoundPlan, run_rounds
from rayfed.engine.record_rounds import basis_of
from rayfed.engine.setup import Setup
from rayfed.errors import ConfigError, RayFedError, unknown
from rayfed.evaluation.nonfinite import COLUMN
from rayfed.executors.inline import InlineExecutor
from rayfed.executors.worker import Worker
from rayfed.experiment.plan import prepared
from rayfed.federation.client import Client
from rayfed.federation.cohort import TRAINING
from rayfed.federation.executor import Call, units
from rayfed.federation.local import Local
from rayfed.federation.passes import Passes
from rayfed.record.checkpoint import Checkpoints, restore
from rayfed.record.readers import SENT
from rayfed.record.recorded_run import RecordedRun
from rayfed.types import Batch, Broadcast, ServerState, Update
from rayfed.user_files import without_nonfinite

if TYPE_CHECKING:
    import pandas as pd

MAY_CHANGE = ("local", "train")
"""Sections of the config of which a replay may change values for its call."""

Told = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Replay:
    """One call that was executed again.

    Attributes:
        client: Id of the client.
        round: Number of the round, from 1.
        exchange: Name of the exchange; `fit` is training.
        update: Its answer, as the server receives it: `params`, `extra`, `metrics`.
        sent: The message to it.
        steps: One row for each backward pass: `loss`; `split` of the client and `rows`, numbers of the
            examples of the batch before it, which are those of the column `index` of partition.parquet.
            Without rows for a method that makes no backward pass, such as FedKSeed.
        recorded: Metrics of this call in the folder of the run, by name; empty: none was recorded.
        alone: Whether the client was computed alone. Where it shared its passes with others, `update` is of
            the group, and `steps` are those of the client alone, which rounds otherwise.
        changes: Values of the config that were changed for this call, by key.
        other_round: Number of a round before it that gave other numbers than in the folder when it was run
            again; 0: all gave those in the folder; None: none was run again.
    """

    client: str
    round: int
    exchange: str
    update: Update
    sent: Broadcast
    steps: pd.DataFrame
    recorded: Mapping[str, float]
    alone: bool
    changes: Mapping[str, Any]
    other_round: int | None = None

    @property
    def is_as_recorded(self) -> bool | None:
        """Whether the metrics of the call, and the rounds before it, are those in the folder.

        None: no round was run again, and there are no metrics to compare.
        """
        if self.other_round:
            return False
        wanted = {name: value for name, value in self.update.metrics.items() if value == value}
        if not self.recorded or not wanted:
            return None if self.other_round is None else True
        return {name: self.recorded.get(name) for name in wanted} == wanted


class _ReachedError(RayFedError):
    """Ends the rounds after the wanted call."""


@dataclass(frozen=True)
class _Data(ClientData):
    """The examples of a client, of which it is noted which ones a batch has.

    Attributes:
        seen: Where it is noted.
    """

    seen: _Seen = field(kw_only=True)

    def batches(self, split: str, order: Tensor | None, size: int) -> Iterator[Batch]:
        rows = self.splits[split]
        places = np.arange(len(rows)) if order is None else order.cpu().numpy()
        for number, batch in enumerate(super().batches(split, order, size)):
            self.seen.batch = split, rows[places[number * size : (number + 1) * size]]
            yield batch


class _Seen:
    """Notes on a call while it is executed: a loss for each backward pass, and the batch before it."""

    def __init__(self) -> None:
        self.batch: tuple[str, Any] = ("", np.empty(0, np.int64))
        self.steps: list[dict[str, Any]] = []

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note the loss of each backward pass in the block, whoever begins it."""
        whole = Tensor.backward

        def backward(loss: Tensor, *given: Any, **options: Any) -> None:
            split, rows = self.batch
            value = float(loss.detach()) if loss.numel() == 1 else math.nan
            self.steps.append({"loss": value, "split": split, "rows": rows.tolist()})
            whole(loss, *given, **options)

        Tensor.backward = backward  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            Tensor.backward = whole  # type: ignore[method-assign]


class _Noting(Worker):
    """A worker that notes what a client does."""

    seen: _Seen | None = None

    def client(
        self, call: Call, model: Any, store: dict[str, Any], rng: torch.Generator, passes: Passes
    ) -> Client:
        client = super().client(call, model, store, rng, passes)
        if self.seen is not None:
            values = {each.name: getattr(client.data, each.name) for each in fields(ClientData)}
            client.data = _Data(**values, seen=self.seen)
        return client


class _Replayer(InlineExecutor):
    """Runs all calls until the wanted one, and then no more.

    Attributes:
        found: The wanted call, its answer, what was noted, and whether the client was computed alone.
        called: Exchanges of the wanted round, with the clients that were called in each.
    """

    worker_kind = _Noting
    worker: _Noting

    def __init__(self, setup: Setup, device: torch.device, client: str, exchange: str, local: Local) -> None:
        super().__init__(setup.context, setup.weights, setup.design.failures, device)
        self.wanted = client, exchange
        self.round = -1
        self.debugs = False
        self.found: tuple[Call, Update, _Seen, bool] | None = None
        self.called: dict[str, list[str]] = {}
        self._local = local

    def map(self, calls: Sequence[Call]) -> list[Update | None]:
        if not calls or calls[0].sent.round != self.round:
            return super().map(calls)
        client, exchange = self.wanted
        self.called[calls[0].tag] = [call.client for call in calls]
        if calls[0].tag != exchange or client not in self.called[exchange]:
            return super().map(calls)
        place = self.called[exchange].index(client)
        unit = next(own for own in units(calls) if place in own)
        self._find(calls[place], [calls[i] for i in unit])
        raise _ReachedError

    def _find(self, call: Call, together: Sequence[Call]) -> None:
        """Execute the wanted call. Args: together: the calls that shared its passes, itself included."""
        update = None
        if len(together) > 1 and (done := self._together_copies(together)) is not None:
            update = done[[each.client for each in together].index(call.client)]
        self.worker.seen = seen = _Seen()
        task = partial(_debugged, call.task, self._local) if self.debugs else call.task
        with seen.noting():
            alone, _ = self.worker.call(replace(call, task=task), self._copy(call.client))
        self.worker.seen = None
        self.found = call, alone if update is None else update, seen, update is None

    def _together_copies(self, calls: Sequence[Call]) -> list[Update] | None:
        done = self.worker.call_group(calls, lambda: [self._copy(call.client) for call in calls])
        return None if done is None else [update for update, _ in done]


def _debugged(
    task: Callable[[Client, Broadcast], Update], local: Local, client: Client, sent: Broadcast
) -> Update:
    """Run the task of a call in Python's debugger, which stops in the method's code, and where it fails."""
    debugger = pdb.Pdb()
    if (line := _first_line(local)) is not None:
        debugger.rcLines += [f"tbreak {line}", "continue"]
    try:
        answer: Update = debugger.runcall(task, client, sent)  # type: ignore[assignment]  # it is what task returns
    except Exception:
        pdb.post_mortem(sys.exc_info()[2])
        raise
    return answer


def _first_line(local: Local) -> str | None:
    """File and line of what a method does at a client: its loss, its step or its training; None: nothing."""
    for name in ("loss", "step", "train"):
        own = getattr(type(local), name)
        if own is not getattr(Local, name):
            code = own.__code__
            lines = (line for *_, line in code.co_lines() if line and line > code.co_firstlineno)
            return f"{code.co_filename}:{min(lines)}"
    return None


def replay(
    path: Path,
    round: int,
    client: str,
    *,
    exchange: str = TRAINING,
    changes: Mapping[str, Any] | None = None,
    debug: bool = False,
    config: Config | None = None,
    tell: Told = lambda _: None,
) -> Replay:
    """Execute one call of a run again; its folder stays as it is.

    Args:
        path: Folder of the run, which may be finished, have failed, or go on in another process.
        round: Number of the round, from 1; the first one that is not finished may be named, too.
        client: Id of the client, or the part of it after or before the first hyphen.
        exchange: Name of the exchange, as in transfers.parquet.
        changes: Values of the sections `local` and `train` that are other ones in this call, by key.
        debug: Execute the client in Python's debugger.
        config: The config of the run; None: that in its folder.
        tell: Called with a sentence about what is run again before.

    Raises:
        ConfigError: There is no such call, the data changed, or a key may not be changed.
        ClientError: The client fails, as in the run.
    """
    whole = config or load_run(path).alone()
    run = RecordedRun(path)
    last = len(run.rounds) + 1
    if not 1 <= round <= min(last, whole.rounds):
        raise ConfigError(f"round: {round} is not one of the rounds 1 to {min(last, whole.rounds)} of {path}")
    setup = prepared(whole)
    if facts := Checkpoints(path).newest_facts():
        basis_of(setup).check_unchanged(facts, path)
    name = _id_of(client, setup)
    device, _ = inline_device(setup, whole.cluster)
    executor = _Replayer(setup, device, name, exchange, setup.experiment.local)
    state, other_round = _state_before(run, round, setup, executor, tell)
    changed = prepared(_changed(whole, changes or {})) if changes else setup
    if changes:
        again = _Replayer(changed, device, name, exchange, changed.experiment.local)
        again._stores, executor = executor._stores, again
    executor.round, executor.debugs = round - 1, debug
    plan = replace(changed.experiment, rounds=max(round, changed.experiment.rounds))
    call, update, seen, alone = _reach(executor, plan, setup, state, round)
    return Replay(
        client=name,
        round=round,
        exchange=exchange,
        update=update,
        sent=call.sent,
        steps=_table(seen),
        recorded={} if changes else recorded(run, round, exchange, name),
        alone=alone,
        changes=dict(changes or {}),
        other_round=other_round,
    )


def _state_before(
    run: RecordedRun, round: int, setup: Setup, executor: _Replayer, tell: Told
) -> tuple[ServerState | None, int | None]:
    """The state of the server before a round, None before the first; the executor gets the stores.

    Returns:
        The state, and `Replay.other_round`.
    """
    saved = Checkpoints(run.path).before(round, setup.start)
    restore(saved.stores if saved else setup.stores, executor)
    state, other = saved.state if saved else None, 0
    first = 1 if state is None else state.round + 2
    if first == round:
        return state, None
    which = f"rounds {first} to {round - 1}" if first + 1 < round else f"round {first}"
    tell(f"running {which} again, as no checkpoint is nearer (checkpoint.keep)")
    for done in run_rounds(setup.experiment, executor, setup.start, state):
        state, number = done.state, done.row["round"]
        if not other and _results(done.row) != _results(run.rounds[number - 1]):
            other = number
        if number == round - 1:
            break
    return state, other


def _results(row: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of a round that are the same whenever it is repeated, and that every row has."""
    kept = without_nonfinite({name: value for name, value in row.items() if is_result(name)})
    return {name: value for name, value in kept.items() if name != COLUMN}


def _reach(
    executor: _Replayer, plan: RoundPlan, setup: Setup, state: ServerState | None, round: int
) -> tuple[Call, Update, _Seen, bool]:
    """Run a round until the wanted call."""
    with suppress(_ReachedError):
        next(run_rounds(plan, executor, setup.start, state))
    if executor.found is None:
        client, exchange = executor.wanted
        if exchange not in executor.called:
            raise ConfigError(unknown("exchange", exchange, executor.called))
        raise ConfigError(
            unknown(f"client of round {round}, exchange {exchange}", client, executor.called[exchange])
        )
    return executor.found


def _changed(config: Config, changes: Mapping[str, Any]) -> Config:
    """The config with other values.

    Raises:
        ConfigError: A key is in no section that may change, or a value is wrong.
    """
    for key in changes:
        if key.partition(".")[0] not in MAY_CHANGE or "." not in key:
            sections = " or ".join(MAY_CHANGE)
            raise ConfigError(
                f"set: {key!r} is not of the client; change a key of {sections}, such as train.lr"
            )
    return resolve(composed((), to_dict(config), changes)).alone()


def _id_of(client: str, setup: Setup) -> str:
    """The id of a client, or of a test set, by its id or one side of its first hyphen."""
    every = list(setup.context.splits)
    if client in every:
        return client
    found = [each for each in every if client in each.split("-", 1)]
    if len(found) != 1:
        raise ConfigError(unknown("client", client, every))
    return found[0]


def recorded(run: RecordedRun, round: int, exchange: str, client: str) -> dict[str, float]:
    """The metrics of a call in the folder of a run, by name as in `Update.metrics`."""
    rows = run.frame("clients", ["round", "exchange", "client", "model", "metric", "value"])
    if not len(rows):
        return {}
    rows = rows[(rows["round"] == round) & (rows["exchange"] == exchange) & (rows["client"] == client)]
    named = zip(rows["model"], rows["metric"], rows["value"], strict=True)
    return {metric if model == SENT else f"{model}/{metric}": float(value) for model, metric, value in named}


def _table(seen: _Seen) -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame(seen.steps, columns=["loss", "split", "rows"])
