"""Finds methods, tunings, readers, executors and rules by the name of their file, or as package.module:NAME.

Objects that a user handed over are found by the names of `rayfed.user_objects`.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from rayfed.errors import ConfigError, check_name, one_line, place_of, unknown
from rayfed.user_objects import find, is_own


@dataclass(frozen=True)
class Entries:
    """The files of one package that can be chosen by name. They are not imported here.

    Attributes:
        package: Package whose file names are the entries; files that begin with an underscore are not.
        helpers: Other files of the package that are not entries.
    """

    package: str
    helpers: frozenset[str] = frozenset()

    def names(self) -> list[str]:
        """Names of all entries that are part of RayFed, sorted."""
        names = _modules(tuple(importlib.import_module(self.package).__path__))
        return [name for name in names if not name.startswith("_") and name not in self.helpers]

    def description(self, name: str) -> str:
        """The first line of an entry's docstring, without its final full stop; empty if there is none."""
        spec = importlib.util.find_spec(f"{self.package}.{name}")
        if spec is None or not spec.origin:
            return ""
        doc = ast.get_docstring(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))) or ""
        return doc.partition("\n")[0].rstrip(".")


@cache
def _modules(folders: tuple[str, ...]) -> list[str]:
    """Names of the modules in these folders, sorted; they are read once, because a config asks five times."""
    return sorted(module.name for module in pkgutil.iter_modules(folders))


METHOD_FILES = Entries("algorithms")
TUNING_FILES = Entries("rayfed.tuning", helpers=frozenset({"base", "sites"}))
SAMPLING_FILES = Entries("rayfed.sampling", helpers=frozenset({"base"}))
READER_FILES = Entries("rayfed.data.readers")
TRACKER_FILES = Entries("rayfed.record.trackers", helpers=frozenset({"tracker"}))
EXECUTOR_FILES = Entries("rayfed.executors.kinds", helpers=frozenset({"base"}))


@dataclass(frozen=True)
class Registry:
    """Loads the object that each file of one package defines.

    Attributes:
        files: The entries that are part of RayFed.
        attribute: Name of the object that each file defines.
        key: Config key that names an entry, for errors.
        accepts: Tells whether an object is of the right kind.
        expected: What the object must be, for errors.
        made: Turns what a module defines, such as half of a method, into an object of the right kind.
    """

    files: Entries
    attribute: str
    key: str
    accepts: Callable[[Any], bool]
    expected: str
    made: Callable[[Any], Any] = lambda value: value

    def names(self) -> list[str]:
        """Names of all entries that are part of RayFed, sorted."""
        return self.files.names()

    def load(self, name: str, key: str | None = None) -> Any:
        """The object of the file `<name>.py`, or the one that `package.module:NAME` names.

        Args:
            name: File name without extension, or module and attribute of an installed package.
            key: Config key to name in an error, where it is not the registry's own.

        Raises:
            ConfigError: There is no such entry, or the object is of another kind.
        """
        key = key or self.key
        if (known := find(name)) is not None:
            return self._right(
                self.made(known.value), f"{key}: {name!r} is not {self.expected}: {known.text}"
            )
        if is_own(name):
            raise ConfigError(
                f"{key}: {name!r} was defined in a notebook or a script and cannot be imported; hand it over "
                f"again: rayfed.Experiment(...).run(), or .resume(FOLDER) for a run that has begun"
            )
        check_name(key, name)
        module_name, colon, attribute = name.partition(":")
        if not colon:
            if name not in self.names():
                check_no_module(key, name, self.attribute)
                raise ConfigError(unknown(key, name, self.names()))
            module_name = f"{self.files.package}.{name}"
            attribute = self.attribute
        module = _import_module(key, name, module_name)
        if not hasattr(module, attribute):
            classes = {
                n for n, v in vars(module).items() if isinstance(v, type) and v.__module__ != module_name
            }
            near = sorted(n for n, v in vars(module).items() if self.accepts(v) and n not in classes)
            others = f"; it has {', '.join(near)}" if near else ""
            raise ConfigError(
                f"{key}: {name!r} is not {self.expected}: {module_name} defines no {attribute}{others}"
            )
        entry = getattr(module, attribute)
        wrong = f"{module_name} must define {attribute} so, found {entry!r}"
        try:
            made = self.made(entry)
        except ConfigError as err:
            raise type(err)(f"{key}: {name!r}: {err}") from err
        return self._right(made, f"{key}: {name!r} is not {self.expected}: {wrong}")

    def _right(self, entry: Any, otherwise: str) -> Any:
        """An object of the right kind.

        Raises:
            ConfigError: It is of another kind; the message is `otherwise`.
        """
        if not self.accepts(entry):
            raise ConfigError(otherwise)
        return entry


def check_no_module(key: str, name: str, attribute: str) -> None:
    """Refuse a name that looks like a file or a module of a user.

    Args:
        key: Config key to name in the error.
        name: The value of the key.
        attribute: Name of the object that such a file defines.

    Raises:
        ConfigError: It does; says what to write.
    """
    file = Path(name.removesuffix(".py"))
    module = ".".join((file.name,) if file.is_absolute() else file.parts)
    looks_so = name.endswith(".py") or "." in name or (Path.cwd() / f"{name}.py").is_file()
    if looks_so and all(part.isidentifier() for part in module.split(".")):
        raise ConfigError(
            f"{key}: {name!r} is no name that ships with RayFed; for the file {module.replace('.', '/')}.py "
            f"here write {module}:{attribute}"
        )


def import_object(key: str, name: str) -> Any:
    """The object that `package.module:NAME` names.

    Args:
        key: Config key to name in an error.
        name: The value of the key.

    Raises:
        ConfigError: There is no such module or object, or the code of the module fails.
    """
    check_name(key, name)
    module_name, _, attribute = name.partition(":")
    module = _import_module(key, name, module_name)
    if not hasattr(module, attribute):
        raise ConfigError(f"{key}: {name!r}: the module {module_name} has no {attribute}")
    return getattr(module, attribute)


def _import_module(key: str, name: str, module: str) -> ModuleType:
    """The module of an entry.

    Raises:
        ConfigError: There is no such module, or its own code fails; the message names file and line.
    """
    try:
        return _import(module)
    except ModuleNotFoundError as err:
        if err.name is not None and (module == err.name or module.startswith(f"{err.name}.")):
            raise ConfigError(
                f"{key}: {name!r}: there is no module {err.name!r}; install its package, or start the "
                f"command in the folder that holds it"
            ) from err
        raise _failed_import(key, name, err) from err
    except Exception as err:
        raise _failed_import(key, name, err) from err


def _failed_import(key: str, name: str, err: Exception) -> ConfigError:
    what = err.msg if isinstance(err, SyntaxError) else one_line(err)
    return ConfigError(
        f"{key}: {name!r} cannot be imported: {type(err).__name__}: {what}{place_of(err)}; correct it, "
        f"or see the traceback with --debug"
    )


def _import(name: str) -> ModuleType:
    """Import a module, also from the current folder, which is not on the path of a console command.

    The folder is added at the end of the path, so that its files do not hide installed modules.
    """
    if not {"", str(Path.cwd())} & set(sys.path):
        sys.path.append(str(Path.cwd()))
    return importlib.import_module(name)
