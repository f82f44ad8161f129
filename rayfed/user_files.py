"""Reads YAML, JSON and paths that users wrote: plain values only, with errors of one kind.

Every file and every override of a user is read with these functions, and so are the files of run folders
(`rayfed.record.readers`), so that a user never sees the exception of a parser.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from yaml.composer import Composer
from yaml.constructor import SafeConstructor
from yaml.resolver import Resolver

from rayfed.errors import ConfigError, one_line, shown

MAX_DEPTH = 64
"""Largest depth of nested containers that is accepted."""

MAX_BYTES = 1_000_000
"""Largest config file that is read."""

BEGINNING = 2000
"""Bytes at the beginning of a file in which the command that wrote it is named."""

BRACKETS = (("[", "]"), ("{", "}"))
"""Opening and closing brackets of lists and mappings in YAML."""

OPEN = "a bracket is not closed, as happens where the shell splits a value at its spaces"
"""Note about a value that was cut."""

ADVICE: Mapping[str, str] = {
    "--config": "; give the config.yaml of a run, or what --print-config writes",
    "sweep": "; give a file such as those in configs/sweep",
}
"""Advice about a file that cannot be read, by the key that names it."""


class DocumentError(ValueError):
    """A text is not YAML or JSON, or holds something that is not allowed; the message is one line."""


class _RefusedError(yaml.MarkedYAMLError):
    """Something that YAML allows and RayFed refuses; the message is ours."""


class _Plain(Composer, SafeConstructor, Resolver):
    """Accepts plain values only: no objects, no aliases (a few can stand for gigabytes), no key twice."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):  # type: ignore[attr-defined]
            mark = self.peek_event().start_mark  # type: ignore[attr-defined]
            raise _RefusedError(None, None, "an alias (*name); write the value out", mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    message = f"the key {key.value!r} is there twice"
                    raise _RefusedError(None, None, message, key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


class _Loader(_Plain, yaml.SafeLoader):
    """Reads with PyYAML's own parser, whose errors say more."""


def _quick_loader() -> type[Any]:
    """The loader with libyaml's parser, which takes a fifth of the time; without libyaml, `_Loader`."""
    if not yaml.__with_libyaml__:
        return _Loader

    from yaml.cyaml import CParser  # type: ignore[attr-defined]

    class _Quick(_Plain, CParser):
        def __init__(self, stream: str) -> None:
            CParser.__init__(self, stream)
            Composer.__init__(self)
            SafeConstructor.__init__(self)
            Resolver.__init__(self)

    return _Quick


_QUICK = _quick_loader()


def parse_yaml(text: str) -> Any:
    """The plain value of a YAML text.

    Raises:
        DocumentError: It is not YAML, is nested too deeply, or holds a Python object, an alias, a key twice
            or a value that its tag does not allow (`!!float x`).
    """
    try:
        try:
            value = yaml.load(text, _QUICK)
        except yaml.YAMLError:
            value = yaml.load(text, _Loader)
        return checked_depth(value)
    except RecursionError:
        raise DocumentError(f"it is nested more than {MAX_DEPTH} deep") from None
    except yaml.YAMLError as err:
        raise DocumentError(_reason(err)) from err
    except DocumentError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as err:
        # PyYAML's constructors let through what int(), float() and date() raise.
        raise DocumentError("a number or a date cannot be read") from err


def parse_value(key: str, text: str) -> Any:
    """The value of an override `key=text`, which is YAML.

    Raises:
        ConfigError: It is not YAML of plain values; names the key.
    """
    try:
        return parse_yaml(text)
    except DocumentError as err:
        is_cut = any(text.count(opening) > text.count(closing) for opening, closing in BRACKETS)
        reason = f"{OPEN}; write it without spaces, or '{key}=...' in quotation marks" if is_cut else err
        raise ConfigError(f"{key}: {shown(text)} is not a YAML value: {reason}") from err


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
        line = ""
        if isinstance(err, json.JSONDecodeError) and "\n" in err.doc.strip():
            line = f" in line {err.lineno}"
        raise DocumentError(f"it is not JSON{line}") from err


def checked_depth(value: Any) -> Any:
    """The value itself; raises DocumentError where containers are nested deeper than `MAX_DEPTH`."""
    level = [value]
    for _ in range(MAX_DEPTH):
        containers = [each for each in level if isinstance(each, dict | list)]
        level = [v for each in containers for v in (each.values() if isinstance(each, dict) else each)]
        if not level:
            return value
    raise DocumentError(f"it is nested more than {MAX_DEPTH} deep")


def read_file(path: str | Path, key: str) -> dict[str, Any]:
    """The keys of a YAML file that a user wrote.

    Args:
        path: The file; `~` stands for the home folder.
        key: Config key or option that names the file, for errors.

    Raises:
        ConfigError: It cannot be read, is too large, or is not YAML of plain values.
    """
    path = user_path(path, key)
    more = ADVICE.get(key, "")
    if is_folder(path):
        inside = path / "config.yaml"
        raise ConfigError(
            f"{key}: {str(path)!r} is a directory{f'; write {inside}' if inside.is_file() else more}"
        )
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ConfigError(
                f"{key}: {str(path)!r} is larger than {MAX_BYTES // 1_000_000} MB; is it a config?"
            )
        tree = parse_yaml(content.decode())
    except OSError as err:
        raise ConfigError(f"{key}: cannot read {str(path)!r}: {os.strerror(err.errno or 0)}{more}") from err
    except (DocumentError, ValueError) as err:
        reason = err if isinstance(err, DocumentError) else "it is not a text in UTF-8"
        raise ConfigError(f"{key}: {str(path)!r} is not YAML: {reason}{more}") from err
    if not isinstance(tree, dict):
        raise ConfigError(f"{key}: {str(path)!r} holds no keys{more}")
    return tree


def user_path(text: str | Path, key: str) -> Path:
    """A path that a user wrote; `~` stands for the home folder.

    Args:
        text: The path.
        key: Config key or option that holds it, for errors.

    Raises:
        ConfigError: `~` stands for no home folder, or the system allows no such path.
    """
    try:
        path = Path(text).expanduser()
    except RuntimeError as err:
        raise ConfigError(f"{key}: {str(text)!r} names no home folder; write the path out") from err
    try:
        path.lstat()
    except (OSError, ValueError) as err:
        if getattr(err, "errno", None) == errno.ENAMETOOLONG:
            raise ConfigError(
                f"{key}: {shown(str(text))} is not a path: {os.strerror(errno.ENAMETOOLONG)}"
            ) from err
    return path


def is_folder(path: str | Path) -> bool:
    """Whether there is such a folder; False also where the system allows no such path."""
    try:
        return Path(path).is_dir()
    except (OSError, ValueError):
        return False


def user_folder(text: str) -> Path:
    """A path on the command line, as the type of an argument of argparse; `~` stands for the home folder."""
    try:
        return user_path(text, "path")
    except ConfigError as err:
        raise argparse.ArgumentTypeError(one_line(err)) from err


def check_own(option: str, file: Path, mark: str) -> None:
    """Check that a file to be written does not exist, or was written by the same command before.

    Args:
        option: Option of the command line that names the file, for errors.
        mark: Text that the command writes within the first `BEGINNING` bytes of its files.

    Raises:
        ConfigError: It is a file of another program, a folder, a pipe, or a file that cannot be read.
    """
    if not os.path.lexists(file):
        return
    try:
        own = file.is_file()  # reading a pipe would wait for ever
        if own:
            with file.open("rb") as opened:
                own = mark.encode() in opened.read(BEGINNING)
    except OSError:
        own = False
    if not own:
        raise ConfigError(
            f"{option}: {str(file)!r} is there and was not written by this command; choose another name"
        )


def check_run_folder(path: Path) -> None:
    """Check that a folder exists and holds a config.yaml, as that of a run does.

    Raises:
        ConfigError: There is no such folder, or it holds no run.
    """
    if not os.path.lexists(path):
        raise ConfigError(
            f"{path}: there is no such folder; give the folder of a run, such as those under runs/"
        )
    file = path / "config.yaml"
    if not os.path.lexists(file):
        if (path / "sweep.yaml").is_file():
            raise ConfigError(
                f"{path}: holds a sweep, which is no run: its report.md has the table, its cells/ the runs, "
                f"and python -m tune.run resume={path} continues it"
            )
        reason = "holds no run (there is no config.yaml)" if is_folder(path) else "is no folder"
        raise ConfigError(f"{path}: {reason}{_run_near(path)}")
    if file.exists() and not (file.is_file() or file.is_dir()):  # reading a pipe would wait for ever
        raise ConfigError(f"{path}: config.yaml is not a file; restore it")


def _run_near(path: Path) -> str:
    """The folder of a run that may be meant by a path that is none; empty if there is none near."""
    around = [folder for folder in path.parents if os.path.lexists(folder / "config.yaml")]
    inside = sorted(file.parent for file in path.glob("*/config.yaml"))
    found = [*around, *inside]
    return f"; give the folder of a run, such as {found[0]}" if found else ""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for position, name in enumerate(names) if name in names[:position])
        raise DocumentError(f"the key {twice!r} is there twice")
    return mapping


def _reason(err: yaml.YAMLError) -> str:
    """The fault of a text and its line, not in the words of the parser."""
    if isinstance(err, _RefusedError):
        words = str(err.problem)
    elif isinstance(err, yaml.constructor.ConstructorError):
        words = "a key or a tag (!!...) that stands for no plain value"
    elif isinstance(err, yaml.reader.ReaderError):
        words = "a character that YAML does not allow"
    else:
        words = "a colon, an indent, a bracket or a quotation mark is missing or too many"
    mark = getattr(err, "problem_mark", None)
    return f"{words} in line {mark.line + 1}" if mark else words


def without_nonfinite(value: Any) -> Any:
    """Plain containers with None for every float that is NaN or infinite: JSON has no such numbers."""
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, str | int):  # asked first, because whether it is a mapping takes long to find out
        return value
    if isinstance(value, Mapping):
        return {key: without_nonfinite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [without_nonfinite(each) for each in value]
    return value


SCALARS = (type(None), bool, int, float, str)


def as_scalar(value: Any) -> bool | int | float | str | None:
    """A value, or the JSON text of a list or a mapping.

    >>> as_scalar("lora"), as_scalar([1, 2])
    ('lora', '[1, 2]')
    """
    scalar: bool | int | float | str | None = value if isinstance(value, SCALARS) else json.dumps(value)
    return scalar


def to_json(value: Any, indent: int | None = None) -> str:
    """Plain containers as JSON for other programs; null for what is not finite."""
    return json.dumps(without_nonfinite(value), indent=indent, allow_nan=False)


def nearby(root: str | None, domains: Collection[str]) -> Path | None:
    """The folder with folders of all these domains: the one above `root`, or one inside it; None: neither."""
    if not root or not domains:
        return None
    folder = Path(root).expanduser()
    places = [folder.absolute().parent]
    with suppress(OSError):
        places = sorted(folder.iterdir()) + places
    return next((place for place in places if all(is_folder(place / name) for name in domains)), None)
