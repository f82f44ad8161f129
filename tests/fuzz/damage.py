"""Strategies that draw what a user may hand over: from the schema itself, and damaged."""

from __future__ import annotations

import dataclasses
import json
import math
from copy import deepcopy
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt
from hypothesis import strategies as st

from rayfed.config.schema import Request

PLACES = ("output", "data.cache", "data.root", "faults.trace", "data.partition.file", "model.weights")
"""Keys that name a place: damaged with PATHS only, so that no case reads or writes somewhere else."""

FIXED = (
    "cluster.executor",
    "data.reader",
    "data.name",
    "model.name",
    "compare",
    "protocol",
    "trackers",
    "failures.watchdog",
)
"""Keys that valid cases leave as they are, because another value is another experiment or takes long."""

PATHS = (
    "",
    "/proc",
    "/dev/null/x",
    "/etc/passwd",
    "x" * 300,
    "~nobody-of-that-name/x",
    "a\0b",
    5,
    [1],
    {"a": 1},
    True,
)

WRONG = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([-1, 0, 10**9, 10**18, 2**63 - 1, 2**63, 10**23, -(2**70), 2**200]),
    st.sampled_from([0.0, -0.5, 1.5, 1e-320, 1e308, math.nan, math.inf, -math.inf]),
    st.text(max_size=20),
    st.sampled_from(["", "\ud800", "\x1b[31m", "a\0b", "\n", "🙂" * 80, "x" * 100_000, "!!python/x"]),
    st.lists(st.one_of(st.integers(-3, 3), st.text(max_size=3), st.none()), max_size=4),
    st.dictionaries(st.text(max_size=5), st.one_of(st.integers(-3, 3), st.text(max_size=3)), max_size=3),
    st.sampled_from([[[[]]], {"a": {"b": {"c": 1}}}, [0] * 5000, {"name": "lora"}, {"name": {}}]),
)
"""A value that is probably not allowed: of another type, out of range, odd text, nested, large."""

RAW = st.one_of(
    st.sampled_from(
        ["[" * 3000, "{a: " * 3000, "[" * 70 + "]" * 70, "!!float x", "!!int x", "&a [*a]", "2026-99-99"]
    ),
    st.sampled_from(
        ["? [a]", "{[]: 1}", "'", "a: b: c", "!!binary x", "!!set {a, b}", "0x" + "f" * 5000, "%", "@"]
    ),
    st.text(max_size=30).filter(lambda text: "\0" not in text),
)
"""What stands after `key=` and is perhaps no YAML at all."""


def leaves(kind: type, prefix: str = "") -> dict[str, Any]:
    """Type of every key of a dataclass of the schema, by dotted path; sections that it nests included."""
    found: dict[str, Any] = {}
    hints = get_type_hints(kind, include_extras=True)
    for option in dataclasses.fields(kind):
        key, hint = f"{prefix}{option.name}", hints[option.name]
        if dataclasses.is_dataclass(hint):
            found |= leaves(hint, f"{key}.")  # type: ignore[arg-type]  # it is a class
        else:
            found[key] = hint
    return found


KEYS = leaves(Request)


def valid(hint: Any) -> st.SearchStrategy[Any]:
    """Values that a type of the schema allows, small ones where numbers cost time."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _bounded(arguments[0], arguments[1:])
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin in (Union, UnionType):
        return st.one_of(*map(valid, arguments))
    if origin is tuple:
        each = [valid(a) for a in arguments if a is not Ellipsis]
        return st.lists(each[0], max_size=3) if Ellipsis in arguments else st.tuples(*each).map(list)
    if origin is list:
        return st.lists(valid(arguments[0]), max_size=3)
    if origin is dict or hint is dict:
        return st.just({})
    plain = {
        bool: st.booleans(),
        int: st.integers(0, 9),
        float: st.floats(0.01, 9),
        str: st.sampled_from(["plain", "street", "a b"]),
        NoneType: st.none(),
    }
    return plain.get(hint, st.none())


def _bounded(kind: type, limits: tuple[Any, ...]) -> st.SearchStrategy[Any]:
    low, high = 0.0, 9.0
    for limit in limits:
        low = limit.ge if isinstance(limit, Ge) else limit.gt if isinstance(limit, Gt) else low
        high = min(high, limit.le if isinstance(limit, Le) else limit.lt if isinstance(limit, Lt) else high)
    if kind is int:
        return st.integers(int(low), int(max(low, high)))
    return st.floats(low + 1e-3, high - 1e-3)


def written(value: Any) -> str:
    """A value as somebody may write it after `key=`."""
    if isinstance(value, float) and not math.isfinite(value):
        return f".{value}".replace(".-", "-.")
    return hex(value) if isinstance(value, int) and value > 2**80 else json.dumps(value)


@st.composite
def overrides(draw: st.DrawFn) -> tuple[list[str], bool]:
    """A few `key=value`, each once, and whether one of them is damaged."""
    names = [key for key in KEYS if key not in (*FIXED, *PLACES)]
    chosen = draw(st.lists(st.sampled_from(names), max_size=3, unique=True))
    pairs = {key: written(draw(valid(KEYS[key]))) for key in chosen}
    damaged = draw(st.booleans())
    if damaged:
        how = draw(st.sampled_from(["value", "raw", "place", "unknown", "section", "group", "text"]))
        key = draw(st.sampled_from([k for k in KEYS if k not in PLACES]))
        if how == "value":
            pairs[key] = written(draw(WRONG))
        elif how == "raw":
            pairs[key] = draw(RAW)
        elif how == "place":
            pairs[draw(st.sampled_from(PLACES))] = written(draw(st.sampled_from(PATHS)))
        elif how == "unknown":
            pairs[key + draw(st.sampled_from(["x", ".a", ".a.b", "s", " "]))] = "1"
        elif how == "section":
            sections = ["tuning", "server", "local", "model.options", "faults", "train", "capacity"]
            pairs[draw(st.sampled_from(sections))] = written(draw(WRONG))
        elif how == "group":
            group = draw(st.sampled_from(["algorithm", "tuning", "model", "data", "cluster", "experiment"]))
            pairs[group] = draw(
                st.one_of(st.text(max_size=12), st.sampled_from(["fedprox", "full", "../config"]))
            )
        else:
            return [*_joined(pairs), draw(st.text(max_size=20).filter(lambda t: not t.startswith("-")))], True
    return _joined(pairs), damaged


def _joined(pairs: dict[str, str]) -> list[str]:
    return [f"{key}={value}" for key, value in pairs.items()]


@st.composite
def damaged_tree(draw: st.DrawFn, tree: dict[str, Any]) -> tuple[str, Any]:
    """A resolved config with one value, of whatever depth, replaced, removed or added."""
    paths = [key for key in _paths(tree) if not key.startswith(PLACES)]
    key, how = draw(st.sampled_from(paths)), draw(st.sampled_from(["replace", "remove", "add"]))
    copy = deepcopy(tree)
    *path, last = key.split(".")
    node = copy
    for part in path:
        node = node[part]
    if how == "remove":
        del node[last]
    elif how == "replace":
        node[last] = draw(WRONG)
    else:
        node[draw(st.text(max_size=8))] = draw(WRONG)
    return key, copy


def _paths(tree: dict[str, Any], prefix: str = "") -> list[str]:
    found = []
    for key, value in tree.items():
        found.append(f"{prefix}{key}")
        if isinstance(value, dict):
            found += _paths(value, f"{prefix}{key}.")
    return found


@st.composite
def damaged_bytes(draw: st.DrawFn, content: bytes, others: list[bytes]) -> bytes:
    """The bytes of a file: cut short, a range of them flipped or replaced, or those of another file."""
    how = draw(st.sampled_from(["cut", "flip", "replace", "swap", "json", "deep", "double"]))
    start = draw(st.integers(0, max(0, len(content) - 1)))
    if how == "cut":
        return content[:start]
    if how == "swap" and others:
        return draw(st.sampled_from(others))
    if how == "json":
        value = draw(st.one_of(WRONG, st.just([]), st.just({}), st.just([1])))
        return written(value).encode(errors="surrogatepass")
    if how == "deep":
        return b"[" * 100_000
    if how == "double":
        return content + content
    length = draw(st.integers(1, 16))
    old = content[start : start + length]
    new = (
        bytes(b ^ 1 << draw(st.integers(0, 7)) for b in old)
        if how == "flip"
        else draw(st.binary(max_size=16))
    )
    return content[:start] + new + content[start + length :]
