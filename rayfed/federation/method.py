"""Federated methods: a server half and a local half, looked up by name in `algorithms/`."""

from __future__ import annotations

from dataclasses import dataclass

from rayfed.errors import ConfigError
from rayfed.federation.local import Local
from rayfed.federation.lora_mean import EXACT
from rayfed.federation.server import Server
from rayfed.registry import METHOD_FILES, Registry


@dataclass(frozen=True)
class Method:
    """A federated method, as a file of `algorithms/` defines it. A half that is not given is FedAvg's."""

    server: type[Server] = Server
    local: type[Local] = Local


def check_compatible(server: Server, local: Local, tuning: object) -> None:
    """Check before a run that every part gets what it needs from the others.

    Raises:
        ConfigError: A part needs something that no part offers (the message names all parts), or a LoRA rule
            needs residuals and the tuning has none.
    """
    if server.lora_agg in EXACT and not getattr(tuning, "residual", False):
        raise ConfigError(
            f"server.lora_agg: {server.lora_agg!r} needs tuning=lora with tuning.residual=true, which stores "
            f"the part of the mean that the factors cannot represent"
        )
    parts = (server, local, tuning)
    offered: frozenset[str] = frozenset().union(*(getattr(part, "offers", frozenset()) for part in parts))
    for part in parts:
        missing = sorted(getattr(part, "needs", frozenset()) - offered)
        if missing:
            names = ", ".join(type(p).__name__ for p in parts)
            raise ConfigError(
                f"algorithm: {type(part).__name__} needs {', '.join(missing)}, which none of {names} offers"
            )


def check_task(task: str, *halves: Server | Local) -> None:
    """Check before a run that both halves of a method support the task of the data set.

    Raises:
        ConfigError: A half does not support the task (`rayfed.objective`); names the tasks it supports.
    """
    for half in halves:
        if half.tasks and task not in half.tasks:
            allowed = " and ".join(sorted(half.tasks))
            raise ConfigError(
                f"algorithm: {type(half).__name__} is for {allowed}, and the data set is for {task}"
            )


METHODS = Registry(
    files=METHOD_FILES,
    attribute="METHOD",
    key="algorithm",
    accepts=lambda value: isinstance(value, Method),
    expected="a method, which is a Method(...)",
)
