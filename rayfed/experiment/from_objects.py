"""Turns names, dicts, dataclasses and objects of a user into the overrides and values of a config."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from rayfed import user_objects
from rayfed.columns import check_metrics
from rayfed.config.check_keys import plain
from rayfed.config.compose import choices
from rayfed.errors import ConfigError, shown
from rayfed.executors.kinds.base import EXECUTORS, ExecutorKind
from rayfed.federation.local import Local
from rayfed.federation.method_registry import METHODS, Method, method_of
from rayfed.federation.server import Server
from rayfed.objective import MetricObject, Task
from rayfed.record.trackers.tracker import TRACKERS
from rayfed.sampling.base import SAMPLERS
from rayfed.tuning.base import TUNINGS
from rayfed.tuning.peft import is_config, plain_config

GROUPS = ("algorithm", "data", "model", "tuning", "cluster", "experiment")
"""Keys whose value may be a name that chooses a section."""


def to_overrides(given: Mapping[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """The overrides and the values of a config for what was given by key.

    Args:
        given: Names, plain values, dicts, dataclasses and objects, by key of the config; keys may have dots.

    Raises:
        ConfigError: An object is of no kind that its key accepts.
    """
    overrides: list[str] = []
    values: dict[str, Any] = {}
    for key, value in given.items():
        if key == "columns":
            continue
        if key == "data":
            made = data(value, given.get("columns"), given.get("task"))
        else:
            made = OBJECTS[key](value) if key in OBJECTS else {key: value}
        for own, each in made.items():
            name, rest = _choose(own, each)
            overrides += [f"{own}={name}"] if name else []
            if isinstance(rest, Mapping) and isinstance(values.get(own), Mapping):
                values[own] = {**values[own], **rest}
            elif rest is not None:
                values[own] = rest
    return overrides, values


def _choose(key: str, value: Any) -> tuple[str, Any]:
    """The name that chooses a section, and what else is set; empty and None: nothing of it."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = plain(value)
    if key not in GROUPS:
        return "", value
    if isinstance(value, str):
        return value, None
    if not isinstance(value, Mapping):
        raise ConfigError(f"{key}: {shown(value)} is neither a name nor a dict of its keys")
    name = value.get("name")
    if isinstance(name, str) and (key == "model" or name in choices(key) or user_objects.find(name)):
        return name, {own: each for own, each in value.items() if own != "name"} or None
    return "", dict(value)


def method(value: Any) -> dict[str, Any]:
    """The keys `algorithm`, `server` and `local` for a method in any form.

    Args:
        value: A name, a `Server` or `Local` class or an instance of one, a pair of both, or a `Method`; the
            fields of an instance become hyperparameters.

    Raises:
        ConfigError: It is none of these, or a field of an instance cannot be written into a config.
    """
    if isinstance(value, str):
        return {"algorithm": value}
    if isinstance(value, Method):
        return _pair(value, {})
    parts = value if isinstance(value, tuple | list) else (value,)
    keys = [_half_of(part) for part in parts]
    halves = {
        key: getattr(method_of(part if isinstance(part, type) else type(part)), key)
        for key, part in zip(keys, parts, strict=True)
        if key
    }
    fields = {
        key: _fields(part, key)
        for key, part in zip(keys, parts, strict=True)
        if key and not isinstance(part, type)
    }
    if len(halves) != len(parts) or not halves:
        raise ConfigError(
            f"method: {shown(value)} is no method; give a name, a Server or Local class or an instance of "
            f"one, a pair of both, or a Method"
        )
    if len(halves) == 1:
        (half,) = halves.values()
        return {"algorithm": _name_of(half), **fields}
    return _pair(Method(**halves), fields)


def _pair(value: Method, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a method of two halves: those of both, if they can be imported, else those of the pair.

    Args:
        fields: Hyperparameters of its halves, by `server` and `local`.
    """
    whole = _name_of(value)
    server, local = map(user_objects.import_path, (value.server, value.local))
    if not (user_objects.is_own(whole) and server and local):
        return {"algorithm": whole, **fields}
    return {"algorithm": server, **fields, "local": {"name": local, **fields.get("local", {})}}


def _half_of(part: Any) -> str:
    """Key of the config that a half belongs to; empty: it is none."""
    kind = part if isinstance(part, type) else type(part)
    return "server" if issubclass(kind, Server) else "local" if issubclass(kind, Local) else ""


def _fields(half: Any, key: str) -> dict[str, Any]:
    """The hyperparameters of an instance of a half."""
    try:
        return plain(half)
    except Exception as err:
        raise ConfigError(
            f"{key}: {shown(half)} has a field that is no number, text, list or dict ({err})"
        ) from err


def _name_of(value: Any) -> str:
    """The name of a method, or of half of one."""
    halves = (value.server, value.local) if isinstance(value, Method) else (value,)
    whole = method_of(value)
    for half in halves:
        module = half.__module__
        if (
            module.startswith("algorithms.")
            and (name := module.removeprefix("algorithms.")) in METHODS.names()
        ):
            built = METHODS.load(name)
            if built == whole:
                return name
    if not isinstance(value, Method):
        return user_objects.register(value)
    own = [half for half in halves if half not in (Server, Local)] or [Server]
    digest = "".join(user_objects.source_digest(half) for half in own)
    label = "_".join(half.__name__ for half in own)
    return user_objects.register(value, own[0], user_objects.text_digest(digest), label)


def tuning(value: Any) -> dict[str, Any]:
    """The key `tuning` for a scheme in any form.

    Args:
        value: A name, a dict of its keys, a class with a method `apply` or an instance of one, or a
            configuration of PEFT, which may also be the key `config` of a dict.

    Raises:
        ConfigError: It is none of these, or a configuration of PEFT cannot be trained here.
    """
    if is_config(value):
        return {"tuning": {"name": "peft", "config": plain_config(value)}}
    if isinstance(value, Mapping):
        return {"tuning": {key: plain_config(v) if is_config(v) else v for key, v in value.items()}}
    if isinstance(value, str):
        return {"tuning": value}
    kind = value if isinstance(value, type) else type(value)
    if not hasattr(kind, "apply"):
        raise ConfigError(f"tuning: {shown(value)} is no tuning scheme; give a name, or rayfed.LoRA(rank=8)")
    module = kind.__module__.removeprefix("rayfed.tuning.")
    name = (
        module if module in TUNINGS.names() and TUNINGS.load(module) is kind else user_objects.register(kind)
    )
    return {"tuning": {"name": name, **({} if isinstance(value, type) else plain(value))}}


def sampling(value: Any) -> dict[str, Any]:
    """The key `sampling` for a rule in any form.

    Args:
        value: A name, or a function `(round, clients, rng)` that returns ids, or an object that can be
            called so; its values belong to its name.

    Raises:
        ConfigError: It cannot be called so.
    """
    if isinstance(value, str):
        return {"sampling": value}
    if not SAMPLERS.accepts(value):
        raise ConfigError(f"sampling: {shown(value)} is not {SAMPLERS.expected}")
    if hasattr(value, "__qualname__"):
        return {"sampling": user_objects.register(value)}
    code = user_objects.source_digest(type(value))
    digest = user_objects.text_digest(
        f"{code} {plain(value) if dataclasses.is_dataclass(value) else value!r}"
    )
    return {"sampling": user_objects.register(value, type(value), digest)}


def cluster(value: Any) -> dict[str, Any]:
    """The section `cluster` for a name, keys, or an executor.

    Args:
        value: A name, a section, or an `ExecutorKind`.
    """
    if not isinstance(value, ExecutorKind):
        return {"cluster": value}
    shipped = [name for name in EXECUTORS.names() if EXECUTORS.load(name) is value]
    return {"cluster": {"executor": shipped[0] if shipped else _name_of_executor(value)}}


def _name_of_executor(value: ExecutorKind) -> str:
    """The name of an executor of a user, with a digest of its code."""
    if value.make is None:
        raise ConfigError("cluster: an ExecutorKind without make runs on Ray; write cluster=local")
    code = "".join(map(user_objects.source_digest, (value.make, value.fits, value.describe)))
    return user_objects.register(
        value, value.make, user_objects.text_digest(f"{code} {value.clients_at_once}")
    )


def model(value: Any) -> dict[str, Any]:
    """The key `model` for a network in any form.

    Args:
        value: A name, a section, an `nn.Module`, a function without arguments that makes one, or a
            `rayfed.Model`. The network maps a batch of inputs, shape (B, ...) as the data have them, to
            outputs of shape (B, classes), (B, numbers) or, for masks, (B, classes, height, width).

    Raises:
        ConfigError: It is none of these, or it cannot be sent to other processes; shapes are checked later,
            against the first examples of a client.
    """
    from rayfed.models.model_config import ModelConfig

    if isinstance(value, str | Mapping | ModelConfig):
        return {"model": value}
    from rayfed.config.own_network import register

    return {"model": {"name": register(value), "pretrained": False}}


def task(value: Any) -> dict[str, Any]:
    """The key `task` for a task in any form.

    Args:
        value: A name, or a `rayfed.Task`, whose loss and metrics return one number for each of B examples,
            shape (B,), and whose metrics over a set return one number. Metrics are in their own unit, and
            shown in percent if `percent` names them.

    Raises:
        ConfigError: It is neither.
    """
    if isinstance(value, Task):
        check_metrics(value)
        functions = [value.loss, *value.metrics.values(), *value.over_set.values()]
        sources = [user_objects.source_digest(getattr(each, "of", each)) for each in functions]
        settings = [each.describe() for each in functions if isinstance(each, MetricObject)]
        rest = repr((value.smaller, value.percent, *settings))
        digest = user_objects.text_digest("".join(sources) + rest)
        return {"task": user_objects.register(value, value.loss, digest, value.name)}
    if not isinstance(value, str):
        raise ConfigError(f"task: {shown(value)} is neither a name nor a rayfed.Task")
    return {"task": value}


def data(value: Any, columns: Any = None, task: Any = None) -> dict[str, Any]:
    """The section `data` for examples in any form.

    Args:
        value: A name, a section, or examples in one of the forms of docs/models.md. Inputs have shape (N,
            ...), equal for all clients but for N; images of bytes (0 to 255) become numbers from 0 to 1
            with channels first, other numbers keep their unit. Targets have shape (N,) or (N, numbers), and
            masks that of the images.
        columns: Names of columns, if the examples are a table.
        task: The task, if it was given.

    Raises:
        DataError: A client has no examples, shapes or types differ between examples, or a value is NaN.
        ConfigError: The examples have none of the forms, or a column does not exist.
    """
    from rayfed.data.data_config import DataConfig
    from rayfed.data.user_data import is_own, make_reader, own_data

    if isinstance(value, str | DataConfig) or not is_own(value):
        return {"data": value, **({"data.columns": columns} if columns else {})}
    goal = task if isinstance(task, str) else None
    reader = own_data(value, columns, task=goal) if columns else make_reader(value, task=goal)
    name = user_objects.import_path(value) if callable(value) else ""
    name = name or user_objects.register(reader, type(reader), reader.fingerprint(), "own_data")
    return {"data": name, "data.name": "own_data"}


def trackers(value: Any) -> dict[str, Any]:
    """The key `trackers` for names, and for classes with `open`, `send` and `end`.

    Raises:
        ConfigError: Something in it is neither.
    """
    given = value if isinstance(value, list | tuple) else [value]
    for each in given:
        if not isinstance(each, str) and not TRACKERS.accepts(each):
            raise ConfigError(f"trackers: {shown(each)} is not {TRACKERS.expected}")
    return {"trackers": [each if isinstance(each, str) else user_objects.register(each) for each in given]}


OBJECTS = {
    "algorithm": method,
    "tuning": tuning,
    "model": model,
    "task": task,
    "sampling": sampling,
    "cluster": cluster,
    "trackers": trackers,
}
"""Keys that accept objects, and what turns these into keys of the config."""
