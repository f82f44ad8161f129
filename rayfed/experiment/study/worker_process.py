"""A process that another one, which runs a study, starts and sends cells to; it runs each of them.

Messages are pickled, one after the other, on its standard input and output. What cells print goes to standard
error. The process ends with its standard input, so that it never outlives the process that started it.
"""

from __future__ import annotations

import io
import os
import pickle
import signal
import sys
import threading
from collections import ChainMap
from collections.abc import Mapping
from dataclasses import MISSING, replace
from queue import SimpleQueue
from typing import Any, ClassVar, TypeAlias

import cloudpickle

from rayfed.engine.session import Session
from rayfed.errors import cause_of
from rayfed.experiment.single_run import Show
from rayfed.experiment.study.run_cell import CommonParts, Outcome, run_cell
from rayfed.models.user_model import Network
from rayfed.user_objects import Known, remember


class _Pickler(cloudpickle.CloudPickler):  # type: ignore[misc]  # the library has no types
    """Sends classes of a script by value, and what dataclasses compare by identity by its name."""

    dispatch_table: ClassVar[Any] = ChainMap(
        {type(MISSING): lambda _: "MISSING"}, cloudpickle.CloudPickler.dispatch_table
    )


def packed(value: Any) -> bytes:
    """A value, with functions and classes of a script or a notebook in it, for another process."""
    out = io.BytesIO()
    _Pickler(out).dump(value)
    return out.getvalue()


Sent: TypeAlias = dict[str, tuple[Known, Any]]
"""Objects of a user by name; with each network its values, which its own form for other processes lacks."""


def with_values(objects: Mapping[str, Known]) -> Sent:
    """The objects as they are sent."""
    return {
        name: (known, known.value.values if isinstance(known.value, Network) else None)
        for name, known in objects.items()
    }


def without_values(sent: Sent) -> dict[str, Known]:
    """The objects that were sent, as this process knows them."""
    return {
        name: known if values is None else replace(known, value=replace(known.value, values=values))
        for name, (known, values) in sent.items()
    }


def main() -> None:
    """Run cells until standard input ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that sends the cells decides when to end
    tasks: SimpleQueue[tuple[Any, ...]] = SimpleQueue()
    threading.Thread(target=_receive, args=(tasks,), daemon=True).start()
    common = CommonParts()
    while True:
        try:
            objects, cell = (pickle.loads(each) for each in tasks.get())
            remember(without_values(objects))
            outcome = run_cell(cell, common, Show(quiet=True), Session())
        except Exception as err:  # a method may raise anything
            outcome = Outcome(failed=cause_of(err))
        pickle.dump(outcome, answers)
        answers.flush()


def _receive(tasks: SimpleQueue[tuple[Any, ...]]) -> None:
    """Queue each message; ends the process, at once, when there are no more."""
    while True:
        try:
            tasks.put(pickle.load(sys.stdin.buffer))
        except (EOFError, OSError):
            os._exit(0)
