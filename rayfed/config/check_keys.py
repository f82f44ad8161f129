"""Builds dataclasses from plain mappings, with error messages for wrong keys and values.

Only this module uses pydantic.

A key or a section that does not exist gets the place where it is in the whole config, or what to write.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast, get_args, get_type_hints

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from rayfed.errors import ConfigError, shown, unknown
from rayfed.federation.method_registry import METHODS
from rayfed.tuning.base import TUNINGS
from rayfed.user_files import DocumentError, checked_depth

T = TypeVar("T")


class UnknownKeyError(ConfigError):
    """A section has no such key.

    Attributes:
        key: Its full name.
    """

    def __init__(self, message: str, key: str = "") -> None:
        super().__init__(message)
        self.key = key

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.key)


def parse(cls: type[T], values: Mapping[str, Any], where: str) -> T:
    """Build a dataclass from a mapping, refusing unknown keys and wrong types.

    Raises:
        ConfigError: Names the key by its full path, the value and what is allowed.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where}: {shown(values)} is not a section; write {where}.<key>=<value>")
    _check_keys(cls, values, where)
    try:
        return cast(T, _validator(cls).validate_python(dict(values)))  # type: ignore[arg-type]  # a class can be hashed
    except ValidationError as err:
        raise ConfigError(_explain(err, where)) from err


@cache
def _validator(cls: type[Any]) -> TypeAdapter[Any]:
    """The validator of a dataclass; making one takes milliseconds, and a config has about ten."""
    return TypeAdapter(cls)


@cache
def _kinds(cls: type[Any]) -> dict[str, Any]:
    """The types of the fields of a dataclass, by name; evaluating hints takes milliseconds."""
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls) if field.init}


def _explain(err: ValidationError, where: str) -> str:
    errors = _within(err.errors())
    first = errors[0]
    key = [str(p) for p in first["loc"] if isinstance(p, int) or str(p).isidentifier()][
        : _depth(first["loc"])
    ]
    path = ".".join([*([where] if where else []), *key])
    if first["type"] == "missing":
        return f"{path}: missing; set {path}=..."
    # A union gives one error per member under the same key; the message lists all that is allowed.
    same = [error for error in errors if error["input"] == first["input"]]
    kinds = [_kind(error) for error in same]
    if set(kinds) == {KINDS["list"]} and isinstance(first["input"], str | Mapping):
        return f"{path}: {shown(first['input'])} is not a list; write {path}=[{first['input']}]"
    if path == "seed" and isinstance(first["input"], list | tuple):
        return f"seed: {shown(first['input'])} is a list; {SEEDS}"
    if all(kinds):
        words = [kind for kind in dict.fromkeys(kinds) if "a number" not in kinds or kind != "a whole number"]
        return f"{path}: {shown(first['input'])} is not {' or '.join(words)}{_nearest(first['input'], words)}"
    allowed = " or ".join(dict.fromkeys(_kind(error) or _limit(error) for error in same))
    return f"{path}: {shown(first['input'])} is not allowed; it must be {allowed}"


def _nearest(value: Any, allowed: Sequence[str]) -> str:
    """A question for the nearest word, where a text is none of the words that are allowed."""
    words = re.findall(r"'([^']+)'", " ".join(allowed))
    near = difflib.get_close_matches(value, words, 1) if isinstance(value, str) else []
    return f"; did you mean {near[0]!r}?" if near else ""


def _within(errors: list[ErrorDetails]) -> list[ErrorDetails]:
    """The errors in the keys of a section, where a word was possible too and a section was given."""
    place = len(errors[0]["loc"])
    if errors[0]["type"] != "literal_error" or not isinstance(errors[0]["input"], Mapping):
        return errors
    inside = [error for error in errors if len(error["loc"]) > place]
    for error in inside:  # without the name of the section's class
        error["loc"] = (*error["loc"][: place - 1], *error["loc"][place:])
    return inside or errors


KINDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "a text",
    "tuple": "a list such as [1, 2]",
    "list": "a list such as [1, 2]",
    "dict": "a mapping such as {key: value}",
    "mapping": "a mapping such as {key: value}",
    "dataclass": "a section; write a key of it, as in section.key=value",
}
"""The wanted kind of value, by the first word of the type of pydantic's error."""

LIMITS = {
    "greater_than": ("greater than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}
"""Words for an error about the size of a number, and where the error has the limit."""


def _kind(error: ErrorDetails) -> str:
    """The kind of value that is needed; empty if the kind is right and something else is wrong."""
    if error["type"] == "literal_error":
        return str(error["ctx"]["expected"])
    return KINDS.get(error["type"].partition("_")[0], "")


def _limit(error: ErrorDetails) -> str:
    """The limit that a value of the right kind breaks."""
    if error["type"] in LIMITS:
        words, name = LIMITS[error["type"]]
        return f"{words} {error['ctx'][name]:.12g}"
    message = error["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    return message[0].lower() + message[1:]


def _depth(loc: Sequence[int | str]) -> int:
    """Number of leading parts of an error location that are config keys and not names of union members."""
    for i, part in enumerate(loc):
        if not (isinstance(part, int) or part.isidentifier()) or part in {"int", "float", "str", "literal"}:
            return i
    return len(loc)


def _check_keys(cls: type[Any], values: Mapping[str, Any], where: str) -> None:
    known = _kinds(cls)  # type: ignore[arg-type]  # as above
    for key, value in values.items():
        path = f"{where}.{key}" if where else str(key)
        if key not in known:
            raise UnknownKeyError(unknown_key(path, str(key), list(known)), path)
        if isinstance(value, bool) and not _allows_bool(known[key]):  # pydantic would convert it to 0 or 1
            raise ConfigError(f"{path}: {shown(value)} is not allowed: true or false has no meaning here")
        check_plain(path, value)
        for kind in (known[key], *get_args(known[key])):
            if isinstance(kind, type) and dataclasses.is_dataclass(kind) and isinstance(value, Mapping):
                _check_keys(kind, value, path)


MOST_WHOLE = 2**63 - 1


def check_plain(path: str, value: Any) -> None:
    """Refuse values that no key accepts, in nested values too.

    Raises:
        ConfigError: NaN or infinity, a whole number beyond 64 bits, a text with a NUL character, or nesting
            without end; names the key.
    """
    try:
        checked_depth(value)
    except DocumentError as err:
        raise ConfigError(f"{path}: {err}") from err
    for key, each in _leaves(path, value):
        if isinstance(each, float) and not math.isfinite(each):
            raise ConfigError(f"{key}: {each} is not allowed: a finite number is needed")
        if isinstance(each, int) and abs(each) > MOST_WHOLE:
            raise ConfigError(f"{key}: {shown(each)} is not allowed: whole numbers end at {MOST_WHOLE}")
        if isinstance(each, str) and "\0" in each:
            raise ConfigError(f"{key}: {shown(each)} holds a NUL character")


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Every value that is no container, with its key; keys of mappings are values too."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield path, key
            yield from _leaves(f"{path}.{key}", each)
    elif isinstance(value, list | tuple):
        for position, each in enumerate(value):
            yield from _leaves(f"{path}.{position}", each)
    else:
        yield path, value


def _allows_bool(kind: Any) -> bool:
    return kind in (bool, Any) or any(_allows_bool(arg) for arg in get_args(kind))


def unknown_key(path: str, key: str, known: Sequence[str]) -> str:
    """The message for a key that does not exist."""
    message = unknown(path, key, known)
    return message.replace(f"{key!r} does not exist", "no such key", 1).replace(
        "Choose one of", "Keys here", 1
    )


def plain(part: object) -> dict[str, Any]:
    """A dataclass as plain containers, as YAML and JSON hold them; what it holds is checked by `parse`."""
    validator = _validator(type(part))  # type: ignore[arg-type]  # as above
    return cast(dict[str, Any], validator.dump_python(part, mode="json", warnings=False))


GPUS = "GPUs are used when present (cluster.gpus_per_actor=auto); write cluster.num_gpus=0 for none"
CLIENTS = (
    "data.partition.clients_per_domain is how many each domain has, clients_per_round how many take part"
)

SEEDS = (
    "a run has one seed; run it again with seed=1, seed=2, ...; rayfed report RUN RUN ... shows their mean"
)

SENTENCES: Mapping[str, str] = {
    **dict.fromkeys(("device", "cuda", "gpu", "gpus", "use_gpu", "num_gpus_per_client"), GPUS),
    **dict.fromkeys(("clients", "num_clients", "n_clients"), CLIENTS),
    **dict.fromkeys(("row", "setting"), "it chooses from a paper's table: write experiment=PAPER/TABLE too"),
    "config": "write --config FILE, with spaces, to start from a saved config",
    **dict.fromkeys(("seeds", "num_seeds", "n_seeds"), SEEDS),
    "patience": "all rounds are run, without early stopping; failures.patience is about lost processes",
}
"""Advice about keys that other programs have."""

MEANINGS: Mapping[str, str] = {
    "learning_rate": "train.lr",
    "local_epochs": "train.epochs",
    "num_epochs": "train.epochs",
    "local_steps": "train.local_steps",
    "bs": "train.batch_size",
    "num_rounds": "rounds",
    "dataset": "data",
    "method": "algorithm",
    "strategy": "algorithm",
    "backbone": "model",
    "fraction": "clients_per_round",
    "partition": "data.partition.scheme",
    "scheduler": "train.schedule",
    "output_dir": "output",
    "num_workers": "cluster.actors",
}
"""Keys that other programs have, and ours."""


def advice(key: str, message: str, whole: type[Any], tree: Mapping[str, Any]) -> str:
    """The message for a key that does not exist: where a key of that name or meaning is, if there is one.

    Args:
        key: The full name of the key that does not exist.
        message: The message that lists the keys of its section.
        whole: The dataclass of a whole config.
        tree: The config that has the key.
    """
    leaf = key.rpartition(".")[2]
    if leaf in SENTENCES:
        return f"{key}: no such key; {SENTENCES[leaf]}"
    every = [*keys_of(whole), *_keys_of_halves(tree)]
    if leaf in MEANINGS:
        hints = [MEANINGS[leaf]]
    else:
        hints = [name for name in every if name.rpartition(".")[2] == leaf and name != key]
    if hints:
        return f"{key}: no such key; did you mean {' or '.join(hints)}?"
    return _of_other_methods(key, leaf, tree) or message.replace("Keys here", f"Keys {_whose(key, tree)}", 1)


def whole(tree: dict[str, Any], file: str | Path) -> dict[str, Any]:
    """The config that a file and the overrides make, if it has its sections.

    Args:
        tree: Nested mappings.
        file: The file of `--config`, for the message.

    Raises:
        ConfigError: The file has a few keys, or the name of a choice in place of a section.
    """
    for section in ("model", "data", "tuning"):
        value = tree.get(section, {} if section == "tuning" else None)
        if not isinstance(value, Mapping):
            what = f"the section {section} is missing" if value is None else f"{section} is {shown(value)}"
            raise ConfigError(
                f"--config: {str(file)!r} is no whole config: {what}; write its values as overrides, such as "
                f"algorithm=fedprox rounds=5, or change a config that --print-config has written"
            )
    return tree


def _whose(key: str, tree: Mapping[str, Any]) -> str:
    """The part that defines a section's keys, such as an algorithm or a tuning scheme."""
    section = key.partition(".")[0]
    chosen = tree.get(section)
    if section not in ("server", "local", "tuning") or not isinstance(chosen, Mapping):
        return "here"
    name = chosen.get("name", tree.get("algorithm"))
    return f"of {'tuning' if section == 'tuning' else 'algorithm'}={name}"


def _of_other_methods(key: str, leaf: str, tree: Mapping[str, Any]) -> str:
    """The message for a hyperparameter of methods that were not chosen; empty where no method has it."""
    owners: dict[str, list[str]] = {}
    for name in METHODS.names():
        method = METHODS.load(name)
        for half, cls in (("server", method.server), ("local", method.local)):
            if leaf in {field.name for field in dataclasses.fields(cls)}:
                owners.setdefault(f"{half}.{leaf}", []).append(name)
    found = {name: methods for name, methods in owners.items() if key in (leaf, name)}
    where = "; ".join(f"{name} is a key of algorithm={'|'.join(each)}" for name, each in found.items())
    return f"{key}: no such key with algorithm={tree.get('algorithm')}; {where}" if found else ""


def keys_of(cls: type[Any], where: str = "") -> Iterator[str]:
    """The full names of all keys of a dataclass and of the sections in it."""
    hints = get_type_hints(cls)
    for field in dataclasses.fields(cls):
        kinds = (hints[field.name], *get_args(hints[field.name]))
        sections = [kind for kind in kinds if isinstance(kind, type) and dataclasses.is_dataclass(kind)]
        if not sections:
            yield f"{where}{field.name}"
        for section in sections:
            yield from keys_of(section, f"{where}{field.name}.")


def _keys_of_halves(tree: Mapping[str, Any]) -> Iterator[str]:
    """The keys of the halves of the chosen algorithm and of the chosen tuning scheme."""
    with suppress(ConfigError, KeyError, TypeError):
        method = METHODS.load(tree["algorithm"])
        sections = {
            "server": method.server,
            "local": method.local,
            "tuning": TUNINGS.load(tree["tuning"]["name"]),
        }
        for name, cls in sections.items():
            yield from (f"{name}.{field.name}" for field in dataclasses.fields(cls))
