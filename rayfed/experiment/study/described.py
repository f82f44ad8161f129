"""Experiments as a study needs them, and the protocols whose runs can be its cells."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from rayfed.config.schema import Config, load_run
from rayfed.experiment.kept_session import QUIETLY

INDEPENDENT = ("leave_one_out", "few_shot", "unseen_clients", "cross_domain")
"""Protocols whose runs need nothing of each other, so that each can be a cell."""


class Described(Protocol):
    """An experiment, as far as a study needs it."""

    @property
    def given(self) -> Mapping[str, Any]:
        """The values that were given, by key."""

    def config(self, **values: Any) -> Config:
        """The checked config, with other values."""


class Fixed:
    """An experiment that is a checked config.

    Args:
        config: The config.
        given: The values that its user gave, by key.
    """

    def __init__(self, config: Config, given: Mapping[str, Any]) -> None:
        self._config, self.given = config, given

    def config(self, **values: Any) -> Config:
        """The config, with other values of its top level."""
        return replace(self._config, **values)


class RecordedExperiment:
    """An experiment as the folder of its run has it, whose objects may not be known to this process.

    Args:
        folder: The folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def given(self) -> Mapping[str, Any]:
        """The values that the study would set otherwise."""
        return dict.fromkeys(QUIETLY)

    def config(self, **values: Any) -> Config:
        """The config, with other values of its top level.

        Raises:
            ConfigError: It names an object that this process cannot import; hand the experiments over again.
        """
        return replace(load_run(self._folder), **values)


def several_runs(protocol: str) -> str:
    """The message for an experiment whose runs cannot be cells: they need each other, or one is needed."""
    return (
        f"protocol: {protocol!r} makes several runs, and here one is needed, or runs that need nothing of "
        f"each other; use rayfed run protocol={protocol} output=FOLDER, and open each run with "
        f"rayfed.load('FOLDER/PART'), or loop over data.held_out or seeds yourself"
    )
