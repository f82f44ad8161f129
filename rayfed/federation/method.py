"""A federated method: a server half and a local half, found by name."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass
from typing import Any

from rayfed.errors import ConfigError, check_name, unknown
from rayfed.federation.local import Local
from rayfed.federation.lora_mean import EXACT
from rayfed.federation.server import Server

PACKAGE = "algorithms"


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


def method_names() -> list[str]:
    """Every method that ships: the files of algorithms/ whose name has no leading underscore."""
    package = importlib.import_module(PACKAGE)
    return sorted(m.name for m in pkgutil.iter_modules(package.__path__) if not m.name.startswith("_"))


def load_method(name: str, key: str = "algorithm") -> Method:
    """The METHOD of `algorithms/<name>.py`, or the object that `package.module:NAME` names.

    Args:
        name: File name without extension, or module and attribute of an installed package.
        key: Config key to name in an error.

    Raises:
        ConfigError: There is no such method, or what is there is not a Method.
    """
    check_name(key, name)
    module_name, _, attribute = name.partition(":") if ":" in name else (f"{PACKAGE}.{name}", "", "METHOD")
    try:
        found: Any = getattr(importlib.import_module(module_name), attribute, None)
    except ModuleNotFoundError as err:
        if err.name is None or not (module_name == err.name or module_name.startswith(f"{err.name}.")):
            raise
        raise ConfigError(unknown(key, name, method_names())) from err
    if not isinstance(found, Method):
        raise ConfigError(f"{key}: {module_name} must define {attribute} = Method(...), found {found!r}")
    return found
