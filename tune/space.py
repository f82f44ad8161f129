"""Search spaces: parameters with ranges and conditions, read from YAML and suggested by Optuna."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from rayfed.errors import ConfigError, unknown
from rayfed.user_files import as_scalar

if TYPE_CHECKING:
    from optuna.trial import BaseTrial

Values: TypeAlias = Mapping[str, Any]

NEAR_END = 0.05
"""Part of a range within which a value is near its end."""


@dataclass(frozen=True)
class Parameter:
    """One config key that is searched.

    Attributes:
        key: Config key `section.key`, or a group such as `tuning`.
        kind: uniform, loguniform, quniform, randint, lograndint or choice.
        args: Both ends of the range (included) and for quniform the step; or the options.
        when: Condition: earlier keys, and the values of these with which this parameter is active.
    """

    key: str
    kind: str
    args: tuple[Any, ...]
    when: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    def is_active(self, values: Values) -> bool:
        """Whether the condition holds for these values."""
        return all(key in values and values[key] in allowed for key, allowed in self.when.items())

    def suggest(self, trial: BaseTrial) -> Any:
        """Ask Optuna for a value."""
        if self.kind == "choice":
            labels = [as_scalar(option) for option in self.args]
            return self.args[labels.index(trial.suggest_categorical(self.key, labels))]
        low, high, *step = self.args
        log = self.kind in ("loguniform", "lograndint")
        if self.kind in ("randint", "lograndint"):
            return trial.suggest_int(self.key, low, high, log=log)
        return trial.suggest_float(self.key, low, high, step=step[0] if step else None, log=log)

    def end_near(self, value: Any) -> Any:
        """The end of the range that is at most 5 % of it away from a value; None: neither, or no range.

        Of a logarithmic range the distance is that of the logarithms. A range of few whole numbers has only
        its ends themselves.
        """
        if self.kind == "choice" or not self.contains(value):
            return None
        scale = math.log if self.kind in ("loguniform", "lograndint") else float
        low, high = self.args[:2]
        nearest = min((low, high), key=lambda end: abs(scale(end) - scale(value)))
        near = abs(scale(nearest) - scale(value)) <= NEAR_END * (scale(high) - scale(low))
        return nearest if near else None

    def contains(self, value: Any) -> bool:
        """Whether a value is in the range or among the options."""
        if self.kind == "choice":
            return value in self.args
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        whole = self.kind not in ("randint", "lograndint") or value == int(value)
        return bool(whole and self.args[0] <= value <= self.args[1])

    def probes(self) -> tuple[Any, ...]:
        """Values that are checked before a sweep starts: every option, or both ends of the range."""
        return self.args if self.kind == "choice" else self.args[:2]

    def __str__(self) -> str:
        return f"{self.kind}: {list(self.args)}"


@dataclass(frozen=True)
class Space:
    """Parameters in the order in which they are suggested."""

    parameters: tuple[Parameter, ...]

    def suggest(self, trial: BaseTrial) -> dict[str, Any]:
        """Suggested values of all parameters that are active."""
        values: dict[str, Any] = {}
        for parameter in self.parameters:
            if parameter.is_active(values):
                values[parameter.key] = parameter.suggest(trial)
        return values

    def select(self, values: Values) -> dict[str, Any]:
        """The given values of active parameters, in the order of the space."""
        chosen: dict[str, Any] = {}
        for parameter in self.parameters:
            if parameter.key in values and parameter.is_active(chosen):
                chosen[parameter.key] = values[parameter.key]
        return chosen

    def point(self, values: Values, where: str) -> dict[str, Any]:
        """A point to try first, in the form that Optuna expects.

        Raises:
            ConfigError: A key is not searched, a value is outside its range, or one is missing.
        """
        keys = [p.key for p in self.parameters]
        for key in values:
            if key not in keys:
                raise ConfigError(unknown(f"{where}.{key}", key, keys))
        chosen = self.select(values)
        for parameter in self.parameters:
            if not parameter.is_active(chosen):
                continue
            if parameter.key not in chosen:
                raise ConfigError(
                    f"{where}.{parameter.key}: missing; a point needs a value for every active parameter"
                )
            if not parameter.contains(chosen[parameter.key]):
                raise ConfigError(
                    f"{where}.{parameter.key}: {chosen[parameter.key]!r} is outside space.{parameter.key}, "
                    f"{parameter}"
                )
        return {key: as_scalar(value) for key, value in chosen.items()}

    def check(self, resolve: Callable[[Values], object]) -> None:
        """Check every option and both ends of every range against the schema of the config.

        Args:
            resolve: Checks the experiment with these values; raises ConfigError.

        Raises:
            ConfigError: A value is not allowed; the message has the key and the value.
        """
        for parameter in self.parameters:
            parents = self._parents(parameter)
            for probe in parameter.probes():
                try:
                    resolve({**parents, parameter.key: probe})
                except ConfigError as err:
                    raise ConfigError(f"space.{parameter.key} ({parameter}): {err}") from err

    def _parents(self, parameter: Parameter) -> dict[str, Any]:
        """Values of other parameters with which a parameter is active."""
        values: dict[str, Any] = {}
        by_key = {p.key: p for p in self.parameters}
        for key, allowed in parameter.when.items():
            values |= {**self._parents(by_key[key]), key: allowed[0]}
        return values


SCIENTIFIC = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")
"""Numbers such as 1e-3, which YAML 1.1 reads as text because they have no dot or no sign."""


def with_numbers(value: Any) -> Any:
    """Plain containers in which every text such as `1e-3` is a number, as the fields of a config read it.

    >>> with_numbers({"train.lr": {"loguniform": ["1e-3", 1]}})
    {'train.lr': {'loguniform': [0.001, 1]}}
    """
    if isinstance(value, Mapping):
        return {key: with_numbers(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [with_numbers(entry) for entry in value]
    return float(value) if isinstance(value, str) and SCIENTIFIC.fullmatch(value) else value


KINDS = {"uniform": 2, "loguniform": 2, "quniform": 3, "randint": 2, "lograndint": 2}
"""Kinds of ranges, with the number of arguments of each."""


def read_space(tree: Any) -> Space:
    """A space from YAML: `key: {kind: [...], when: {other key: value}}`.

    Raises:
        ConfigError: A kind does not exist, a range is wrong, or a condition names a key that comes later.
    """
    if not isinstance(tree, Mapping) or not tree:
        raise ConfigError("space: holds no parameter; write space.<key>={uniform: [0, 1]}")
    parameters: list[Parameter] = []
    for key, entry in tree.items():
        parameters.append(_read(str(key), entry, {p.key: p for p in parameters}))
    return Space(tuple(parameters))


def _read(key: str, entry: Any, earlier: Mapping[str, Parameter]) -> Parameter:
    where = f"space.{key}"
    if not isinstance(entry, Mapping):
        raise ConfigError(
            f"{where}: {entry!r} is not a range; write for example, in quotation marks, "
            f"'{where}={{uniform: [0, 1]}}'"
        )
    kinds = [name for name in entry if name != "when"]
    if len(kinds) != 1:
        raise ConfigError(f"{where}: give exactly one of {', '.join([*KINDS, 'choice'])}")
    kind = kinds[0]
    args = entry[kind]
    if kind not in (*KINDS, "choice"):
        raise ConfigError(unknown(where, kind, [*KINDS, "choice"]))
    if isinstance(args, str) or not isinstance(args, Sequence):
        raise ConfigError(f"{where}.{kind}: {args!r} is not a list")
    if kind == "choice":
        _check_options(where, args)
    else:
        _check_range(where, kind, args)
    return Parameter(key, kind, tuple(args), _conditions(where, entry.get("when") or {}, earlier))


def _check_options(where: str, options: Sequence[Any]) -> None:
    labels = [as_scalar(option) for option in options]
    if not labels or len(set(map(repr, labels))) < len(labels):
        raise ConfigError(f"{where}.choice: {list(options)!r} needs options, each one once")


def _check_range(where: str, kind: str, args: Sequence[Any]) -> None:
    numbers = [a for a in args if isinstance(a, int | float) and not isinstance(a, bool)]
    whole = kind in ("randint", "lograndint")
    if len(args) != KINDS[kind] or len(numbers) != len(args):
        raise ConfigError(f"{where}.{kind}: {list(args)!r} should be {KINDS[kind]} numbers")
    if whole and any(a != int(a) for a in numbers):
        raise ConfigError(f"{where}.{kind}: {list(args)!r} should be whole numbers")
    if not args[0] < args[1]:
        raise ConfigError(f"{where}.{kind}: {args[0]!r} is not below {args[1]!r}")
    if kind in ("loguniform", "lograndint") and args[0] <= 0:
        raise ConfigError(
            f"{where}.{kind}: {args[0]!r} is not above 0; a logarithmic range needs positive ends"
        )
    if kind == "quniform" and args[2] <= 0:
        raise ConfigError(f"{where}.quniform: the step {args[2]!r} is not above 0")


def _conditions(where: str, when: Any, earlier: Mapping[str, Parameter]) -> dict[str, tuple[Any, ...]]:
    if not isinstance(when, Mapping):
        raise ConfigError(f"{where}.when: {when!r} is not a mapping of keys to values")
    conditions = {}
    for key, value in when.items():
        if key not in earlier:
            raise ConfigError(unknown(f"{where}.when", key, earlier) + " (a key of the space, further up)")
        allowed = tuple(value) if isinstance(value, list) else (value,)
        for one in allowed:
            if not earlier[key].contains(one):
                raise ConfigError(f"{where}.when.{key}: {one!r} is never suggested ({earlier[key]})")
        conditions[str(key)] = allowed
    return conditions
