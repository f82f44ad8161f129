"""Experiments as a study needs them: one method each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from rayfed.config.schema import Config, ProtocolName, Request, load_run
from rayfed.errors import ConfigError, shown
from rayfed.experiment.kept_session import QUIETLY
from rayfed.federation.method_registry import METHODS


class Described(Protocol):
    """An experiment, as far as a study needs it."""

    @property
    def given(self) -> Mapping[str, Any]:
        """The values that were given, by key."""

    def config(self, **values: Any) -> Request:
        """The checked config, with other values."""


class Varied(Described, Protocol):
    """An experiment with values that a search changes."""

    def changed(self, **changes: Any) -> Varied:
        """The same experiment with other values, by key."""


class Fixed:
    """An experiment that is a checked config.

    Args:
        given: The values that its user gave, by key.
    """

    def __init__(self, config: Request, given: Mapping[str, Any]) -> None:
        self._config, self.given = config, given

    @classmethod
    def of(cls, config: Config, given: Mapping[str, Any], protocol: ProtocolName = "single") -> Fixed:
        """The runs of a protocol of a checked config; `single`: its one run."""
        return cls(Request.of(config, protocol), given)

    def config(self, **values: Any) -> Request:
        """The config, with other values of its top level."""
        return replace(self._config, **values)


class RecordedExperiment:
    """An experiment as the folder of its run has it, whose objects may not be known to this process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def given(self) -> Mapping[str, Any]:
        """The values that the study would set otherwise."""
        return dict.fromkeys(QUIETLY)

    def config(self, **values: Any) -> Request:
        """The config, with other values of its top level.

        Raises:
            ConfigError: It names an object that this process cannot import; hand the experiments over again.
        """
        return replace(load_run(self._folder), **values)


def compared(config: Request, given: Mapping[str, Any]) -> bool:
    """Whether a user asked for other methods besides that of an experiment.

    A model may bring a reference, such as `zero_shot`, which `rayfed run` runs, too, without being asked.

    Args:
        config: The config of the experiment.
        given: The values that its user gave, by key.
    """
    names = (config.compare,) if isinstance(config.compare, str) else config.compare
    others = [name for name in names if name != config.algorithm]
    asked = "compare" in given or not isinstance(config.compare, str)
    return any(asked or METHODS.load(name, "compare").server.trains for name in others)


def one_method(config: Request, given: Mapping[str, Any]) -> Request:
    """The experiment with its own method alone, without the reference that a model brings.

    Raises:
        ConfigError: It compares methods.
    """
    if compared(config, given):
        raise ConfigError(
            f"compare: {shown(config.compare)} makes several runs, and an experiment of one method is needed "
            f"here; give one experiment for each method, or call run() of this one"
        )
    return replace(config, compare=(), compare_options={})
