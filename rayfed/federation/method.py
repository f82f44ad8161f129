"""A federated method: a server half and a local half, found by name."""

from __future__ import annotations

from dataclasses import dataclass

from rayfed.errors import ConfigError
from rayfed.federation.local import Local
from rayfed.federation.lora_mean import EXACT
from rayfed.federation.server import Server
from rayfed.registry import METHOD_FILES, Registry


@dataclass(frozen=True)
class Method:
    """What a file of algorithms/ offers. A half that is not named is FedAvg's."""

    server: type[Server] = Server
    local: type[Local] = Local


def check(server: Server, local: Local, tuning: object) -> None:
    """Refuse parts that do not fit, before anything runs.

    Raises:
        ConfigError: A part needs something that none of the parts offers; names all of them.
    """
    if server.lora_agg in EXACT and not getattr(tuning, "residual", False):
        raise ConfigError(
            f"server.lora_agg: {server.lora_agg!r} needs tuning=lora with tuning.residual=true, which holds "
            f"what the factors cannot"
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
    """Refuse halves that make no sense for a task (`rayfed.objective`).

    Raises:
        ConfigError: Names the half, the task and the tasks it is for.
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
    accepts=lambda found: isinstance(found, Method),
    expected="a method, which is a Method(...)",
)
