"""The small experiment on which the contract tests run, and an executor that checks messages."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rayfed.config.schema import load_config
from rayfed.config.variants import own_optimizer
from rayfed.engine.setup import Setup, prepare
from rayfed.executors.inline import InlineExecutor
from rayfed.executors.wire import encode
from rayfed.federation.executor import Call, Executor
from rayfed.federation.params import digest
from rayfed.types import Broadcast, Update

SMALL = (
    "rounds=2",
    "model.options={depth: 4}",
    "model.pretrained=false",
    "train.batch_size=4",
    "data.partition.scheme=by_domain",
    "data.limit=12",
    "data.val=2",
)
"""Overrides of an experiment of about a second: two rounds of a small vision transformer."""

DOMAINS = "data.domains=[plain,fonts,street]"
"""Three clients of the embedded data set."""

SGD = ("train.optimizer=sgd", "train.lr=0.02")


def plain_steps(overrides: Sequence[str]) -> tuple[str, ...]:
    """Overrides for steps of SGD where the method brings no optimizer of its own.

    Adam's step of a gradient near zero depends on how it is rounded, so that with the optimizer of a tuning
    two ways to compute the same could not be compared.

    Args:
        overrides: Those of an experiment, which are to follow.
    """
    chosen = dict(text.partition("=")[::2] for text in overrides)
    if "experiment" in chosen:
        return ()
    method = chosen.get("algorithm", "fedgcr")
    return () if own_optimizer(method) else SGD


def small_setup(*overrides: str) -> Setup:
    """The small experiment with `plain_steps`, prepared; later overrides win.

    Raises:
        ConfigError: An override is wrong.
    """
    return prepare(load_config([*SMALL, *plain_steps(overrides), *overrides]))


class WatchingExecutor(InlineExecutor):
    """Runs calls in this process; raises AssertionError if a call has changed its message."""

    def map(self, calls: Sequence[Call]) -> list[Update | None]:
        before = [_content(call.sent) for call in calls]
        updates = super().map(calls)
        for call, content in zip(calls, before, strict=True):
            assert _content(call.sent) == content, (
                f"the message to client {call.client!r} was changed in exchange {call.tag!r}; messages are "
                f"read-only: copy a tensor before writing into it"
            )
        return updates


def _content(sent: Broadcast) -> tuple[str, bytes]:
    """The content of a message, for exact comparison."""
    return digest(sent.params), pickle.dumps(encode(dict(sent.shared)))


@contextmanager
def two_actors(setup: Setup) -> Iterator[Executor]:
    """Two Ray actors that run clients; a cluster that is started for them ends with the block."""
    import ray

    from rayfed.executors.actors import RayExecutor
    from rayfed.executors.connection import connection

    with connection("local", num_cpus=2, num_gpus=0, dashboard=False):
        weights = ray.put(dict(setup.weights))
        executor = RayExecutor(setup.world, weights, ["a", "b"], [{"num_cpus": 0}] * 2)
        try:
            yield executor
        finally:
            executor.close()


def without_times(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row of a round without its timings."""
    return {name: value for name, value in row.items() if not name.startswith(("seconds", "slowest"))}
