"""Federated methods: a server half and a local half, looked up by name in `algorithms/`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from types import FunctionType
from typing import Any

from rayfed.errors import ConfigError
from rayfed.federation.aggregation import EXACT
from rayfed.federation.knob import Knob, check_knob
from rayfed.federation.local import Local
from rayfed.federation.server import Server
from rayfed.objective import LANGUAGE_MODELING
from rayfed.registry import METHOD_FILES, Registry
from rayfed.tuning.base import TUNINGS, Tuning
from rayfed.user_objects import place


@dataclass(frozen=True)
class Method:
    """A federated method, as a file of `algorithms/` defines it. A half that is not given is FedAvg's.

    Attributes:
        server: The server half.
        local: The client half.
        knob: The main hyperparameter, which `rayfed.tuned` tunes besides the rate of the clients; or in words
            why there is none. None: nothing is said.
    """

    server: type[Server] = Server
    local: type[Local] = Local
    knob: Knob | str | None = None

    def __post_init__(self) -> None:
        """Check the names of what both halves define, and the main hyperparameter.

        Raises:
            ConfigError: A half defines a function that would never be called, or the main hyperparameter is
                one of neither half.
        """
        _check_hooks(self.server, Server, Local)
        _check_hooks(self.local, Local, Server)
        if isinstance(self.knob, Knob):
            check_knob(self.knob, with_fields(self.server), with_fields(self.local))


NEAR = 0.8
"""Likeness of two names, 0..1, from which on one is taken for a misspelling of the other."""


def _check_hooks(half: type, base: type, other: type) -> None:
    """Check that no function of a half is a misspelled hook, or a hook of the other half.

    Raises:
        ConfigError: One is; names it and the hook.
    """
    hooks, others = ([name for name in dir(each) if not name.startswith("_")] for each in (base, other))
    defined = {
        name: kind
        for kind in half.__mro__
        if kind not in base.__mro__
        for name, value in vars(kind).items()
        if isinstance(value, FunctionType | property) and not name.startswith("_") and name not in hooks
    }
    for name, kind in defined.items():
        where = f"algorithm: {kind.__name__}.{name}{place(kind)}"
        helper = f"begin the name with _ if it is a helper, as in _{name}"
        if name in others:
            raise ConfigError(
                f"{where}: only a {other.__name__} has this hook, a {base.__name__} has not; {helper}"
            )
        if near := get_close_matches(name, hooks, 1, NEAR):
            raise ConfigError(
                f"{where}: a {base.__name__} has no such hook; did you mean {near[0]!r}? {helper}"
            )


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The three exchangeable parts of an algorithm."""

    server: Server
    local: Local
    tuning: Tuning


def check_compatible(
    server: Server, local: Local, tuning: object, chosen: Mapping[str, str] | None = None
) -> None:
    """Check before a run that every part gets what it needs from the others.

    Args:
        chosen: The names of the algorithm, of its halves and of the tuning, by config key (`algorithm`,
            `server`, `local`, `tuning`), for the message; None: the message names classes.

    Raises:
        ConfigError: A part needs something that no part offers (the message says what can be chosen instead),
            or a LoRA rule needs residuals or factors and the tuning has none.
    """
    if server.lora_agg in EXACT and not getattr(tuning, "residual", False):
        raise ConfigError(
            f"server.lora_agg: {server.lora_agg!r} needs tuning=lora with tuning.residual=true, which stores "
            f"the part of the mean that the factors cannot represent"
        )
    parts = {"server": server, "local": local, "tuning": tuning}
    offered: frozenset[str] = frozenset().union(
        *(getattr(part, "offers", frozenset()) for part in parts.values())
    )
    for key, part in parts.items():
        if missing := sorted(getattr(part, "needs", frozenset()) - offered):
            named = chosen or {name: type(value).__name__ for name, value in parts.items()}
            raise ConfigError(_incompatible(key, missing, named))
    has_factors = "lora" in getattr(tuning, "offers", ()) or hasattr(tuning, "inner")
    if server.lora_agg != Server.lora_agg and not has_factors:
        raise ConfigError(
            f"server.lora_agg: {server.lora_agg!r} combines the factors of tuning=lora, which this tuning "
            f"does not have; leave it out"
        )


def _incompatible(key: str, missing: Sequence[str], chosen: Mapping[str, str]) -> str:
    """The message for a part that lacks something.

    Args:
        key: Config key of the part.
        missing: What it lacks.
        chosen: Names by config key.
    """
    whole = chosen.get("algorithm", chosen[key])
    who = f"algorithm={whole}" if chosen[key] == whole else f"{key}.name={chosen[key]}"
    fitting = [f"tuning={name}" for name in TUNINGS.names() if set(missing) <= set(TUNINGS.load(name).offers)]
    if fitting:
        return (
            f"tuning: {chosen['tuning']!r} cannot be used with {who}, which needs {' or '.join(fitting)}; "
            f"keep that, or choose another algorithm, for example algorithm=fedavg tuning={chosen['tuning']}"
        )
    others = ", ".join(f"{name}.name={chosen[name]}" for name in ("server", "local", "tuning") if name != key)
    return (
        f"{key}.name: {chosen[key]} needs {', '.join(missing)}, which none of {others} offers; leave out "
        f"server.name and local.name, so that both halves are of the same algorithm"
    )


def check_task(task: str, *halves: Server | Local) -> None:
    """Check before a run that both halves of a method support the task of the data set.

    Raises:
        ConfigError: A half does not support the task (`rayfed.objective`); names the tasks it supports.
    """
    for half in halves:
        if isinstance(half, Server) and half.weighting == "tokens" and task != LANGUAGE_MODELING:
            raise ConfigError(
                f"server.weighting: tokens counts what a language model learns, and the data set is for "
                f"{task}; set server.weighting=data_size or uniform"
            )
        if isinstance(half, Local) and task in half.not_for:
            raise ConfigError(
                f"algorithm: {type(half).__name__} is not for {task}, which the data set is for; choose "
                f"another method"
            )
        if half.tasks and task not in half.tasks:
            *others, last = sorted(half.tasks)
            allowed = f"{', '.join(others)} and {last}" if others else last
            raise ConfigError(
                f"algorithm: {type(half).__name__} is for {allowed}, and the data set is for {task}"
            )


def with_fields(half: type[Any]) -> type[Any]:
    """A half of a method whose annotated attributes are its hyperparameters, as those of a dataclass are.

    A class that is not a dataclass becomes one, in place.
    """
    if "__dataclass_fields__" not in vars(half) and vars(half).get("__annotations__"):
        return dataclass(frozen=True)(half)
    return half


def method_of(value: Any) -> Any:
    """The method of a `Server` class, of a `Local` class, or of a pair of them; anything else as it is."""
    if isinstance(value, type) and issubclass(value, Server):
        return Method(server=with_fields(value))
    if isinstance(value, type) and issubclass(value, Local):
        return Method(local=with_fields(value))
    return value


METHODS = Registry(
    files=METHOD_FILES,
    attribute="METHOD",
    key="algorithm",
    accepts=lambda value: isinstance(value, Method),
    expected="a method, which is a Method(...), a Server class or a Local class",
    made=method_of,
)
