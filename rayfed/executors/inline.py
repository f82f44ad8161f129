"""Runs all calls in this process, one after the other: for debugging and tests."""

from __future__ import annotations

import copy
import faulthandler
import itertools
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from rayfed.devices import HOST
from rayfed.errors import ClientError, DeviceError, StoppedError
from rayfed.executors.worker import ClientContext, Weights, Worker
from rayfed.federation.executor import Call, CallTiming, Event, Kept, Policy, action_for, event_of, units
from rayfed.types import Update


class InlineExecutor:
    """Runs the calls of clients in this process, so that a debugger can stop inside a client.

    `client_timeout` has no effect here. The watchdog writes the stack of this process to standard error.
    """

    actors = 0
    worker_kind: type[Worker] = Worker
    """The class that runs the calls."""

    def __init__(
        self,
        context: ClientContext,
        weights: Weights,
        policy: Policy | None = None,
        device: str | torch.device = HOST,
    ) -> None:
        self.worker = self.worker_kind(context, weights, device)
        self.policy = policy or Policy()
        self.on_event: Callable[[Event], None] = lambda _: None
        self.on_visit: Callable[[CallTiming], None] = lambda _: None
        self._stores: dict[str, Kept] = {}
        self._serial = itertools.count()
        self._stopped = threading.Event()

    def map(self, calls: Sequence[Call]) -> list[Update | None]:
        try:
            answers: dict[int, Update | None] = {}
            for unit in sorted(units(calls)):
                own = [calls[i] for i in unit]
                together = self._together(own) if len(unit) > 1 else None
                answers |= zip(unit, together or map(self._answer, own), strict=True)
            return [answers[i] for i in range(len(calls))]
        finally:
            if self.policy.watchdog:
                faulthandler.cancel_dump_traceback_later()

    def _together(self, calls: Sequence[Call]) -> list[Update] | None:
        """Answers of calls that share their passes; None if one failed, which then has to be found."""
        began = self._begin()
        try:
            done = self.worker.call_group(calls, lambda: [self._copy(call.client) for call in calls])
        except DeviceError as err:
            self.on_event(event_of(err, err.kind, "raise", 1))
            raise
        if done is None:
            return None
        seconds = (time.perf_counter() - began) / len(calls)
        for call, (_, store) in zip(calls, done, strict=True):
            self.restore(call.client, store)
            self.on_visit(CallTiming(call.client, call.tag, seconds))
        return [update for update, _ in done]

    def _begin(self) -> float:
        """Start the watchdog for what is run next; returns the present time (`time.perf_counter`)."""
        if self._stopped.is_set():
            raise StoppedError("the run was asked to end")
        if self.policy.watchdog and sys.__stderr__:
            faulthandler.dump_traceback_later(self.policy.watchdog, file=sys.__stderr__)
        return time.perf_counter()

    def _answer(self, call: Call) -> Update | None:
        for attempt in itertools.count(1):
            began = self._begin()
            try:
                update, store = self.worker.call_anew(call, partial(self._copy, call.client))
            except ClientError as err:
                failed = isinstance(err, DeviceError)  # and this process has no other device
                action = "raise" if failed else action_for(self.policy, attempt)
                self.on_event(event_of(err, err.kind, action, attempt))
                if action == "raise":
                    raise
                if action == "drop":
                    return None
            else:
                self.restore(call.client, store)
                self.on_visit(CallTiming(call.client, call.tag, time.perf_counter() - began))
                return update
        raise AssertionError

    def _copy(self, client: str) -> dict[str, Any]:
        """A new copy of the store of a client."""
        kept = self._stores.get(client)
        return copy.deepcopy(kept.value) if kept else {}

    def stores(self) -> dict[str, Kept]:
        return dict(self._stores)

    def fetch(self, client: str, kept: Kept) -> dict[str, Any]:
        return dict(kept.value)

    def restore(self, client: str, store: Mapping[str, Any]) -> None:
        if store:
            self._stores[client] = Kept(next(self._serial), store)
        else:
            self._stores.pop(client, None)

    def forget(self) -> None:
        self._stores.clear()

    def stop(self) -> None:
        self._stopped.set()

    def close(self) -> None:
        """Do nothing: this executor has started no actors."""
