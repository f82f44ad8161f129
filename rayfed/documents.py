"""YAML and JSON written by others: plain values only, bounded in depth, errors of one kind.

Every file and every override that a user writes is read here, so that no parser's own exception gets out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from rayfed.errors import ConfigError

MAX_DEPTH = 64
"""Deepest nesting of containers that is read."""


class DocumentError(ValueError):
    """A text is not YAML or JSON, or holds what is not allowed in it; the message is one line."""


class _Loader(yaml.SafeLoader):
    """Plain values only: no objects, no aliases (a few of them stand for gigabytes), no key twice."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark
            raise yaml.composer.ComposerError(None, None, "an alias (*name); write the value out", mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    message = f"the key {key.value!r} is there twice"
                    raise yaml.constructor.ConstructorError(None, None, message, key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def parse_yaml(text: str) -> Any:
    """The plain value of a YAML text.

    Raises:
        DocumentError: It is not YAML, is nested too deeply, or holds a Python object, an alias, a key twice
            or a value that its tag does not allow (`!!float x`).
    """
    try:
        return checked_depth(yaml.load(text, _Loader))
    except RecursionError:
        raise DocumentError(f"it is nested more than {MAX_DEPTH} deep") from None
    except yaml.YAMLError as err:
        raise DocumentError(_reason(err)) from err
    except DocumentError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as err:
        # PyYAML's constructors let through what int(), float() and date() raise.
        raise DocumentError(f"a value does not fit its type: {_first_line(err)}") from err


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text.

    Raises:
        DocumentError: It is not JSON in UTF-8, is nested too deeply, or holds a key twice.
    """
    try:
        return checked_depth(json.loads(text, object_pairs_hook=_once))
    except RecursionError:
        raise DocumentError(f"it is nested more than {MAX_DEPTH} deep") from None
    except DocumentError:
        raise
    except ValueError as err:
        raise DocumentError(_first_line(err)) from err


def checked_depth(value: Any) -> Any:
    """The value itself; raises DocumentError where containers are nested deeper than `MAX_DEPTH`."""
    level = [value]
    for _ in range(MAX_DEPTH):
        containers = [each for each in level if isinstance(each, dict | list)]
        level = [v for each in containers for v in (each.values() if isinstance(each, dict) else each)]
        if not level:
            return value
    raise DocumentError(f"it is nested more than {MAX_DEPTH} deep")


def user_path(text: str | Path, key: str) -> Path:
    """A path that a user wrote, with `~` for a home folder.

    Raises:
        ConfigError: There is no such user.
    """
    try:
        return Path(text).expanduser()
    except RuntimeError as err:
        raise ConfigError(f"{key}: {str(text)!r} names no home folder; write the path out") from err


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for position, name in enumerate(names) if name in names[:position])
        raise DocumentError(f"the key {twice!r} is there twice")
    return found


def _reason(err: yaml.YAMLError) -> str:
    mark, problem = getattr(err, "problem_mark", None), getattr(err, "problem", None)
    where = f" in line {mark.line + 1}" if mark else ""
    return f"{problem or _first_line(err)}{where}"


def _first_line(err: BaseException) -> str:
    return (str(err).splitlines() or [type(err).__name__])[0]


def without_nonfinite(value: Any) -> Any:
    """Plain containers with None for every float that is NaN or infinite: JSON has no such numbers."""
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, Mapping):
        return {key: without_nonfinite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [without_nonfinite(each) for each in value]
    return value


def to_json(value: Any, indent: int | None = None) -> str:
    """Plain containers as JSON for other programs; null for what is not finite."""
    return json.dumps(without_nonfinite(value), indent=indent, allow_nan=False)
