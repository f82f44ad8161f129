"""The experiment that a sweep varies: a config to which the values of a trial are applied."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from rayfed.config.compose import compose, config_groups, put_value
from rayfed.config.schema import Config, resolve
from rayfed.errors import ConfigError
from rayfed.experiment.kept_session import QUIETLY
from rayfed.user_files import read_file

FIXED = ("rounds", "seed", "output", "overwrite", "compare", "protocol", "checkpoint")
"""Keys and sections that are the same in all trials of a sweep."""

FIXED_CLUSTER = ("executor", "address", "num_cpus", "num_gpus", "dashboard")


@dataclass(frozen=True)
class Base:
    """The config that all trials start from.

    Attributes:
        overrides: Overrides as on the command line of rayfed.run.
        file: Path of a resolved config that they are applied to; None: the defaults.
    """

    overrides: tuple[str, ...] = ()
    file: str | None = None

    @cached_property
    def tree(self) -> dict[str, Any]:
        return self._compose(self.overrides)

    def config(self, values: Mapping[str, Any], seed: int | None = None) -> Config:
        """The checked config of a trial, as for `rayfed.run`, which compares its method with no other.

        Args:
            values: Values by config key; groups (`tuning: lora`) are applied before single keys.
            seed: Seed of the experiment; None: that of the config.

        Raises:
            ConfigError: A key does not exist or a value is not allowed.
        """
        groups = {key: value for key, value in values.items() if key in group_names()}
        if groups:
            chosen = tuple(f"{group}={value}" for group, value in groups.items())
            tree = self._compose((*self.overrides, *chosen))
        else:
            tree = copy.deepcopy(self.tree)
        for key, value in values.items():
            if key not in groups:
                put_value(tree, key, value)
        config = resolve(tree).alone()
        return config if seed is None else replace(config, seed=seed)

    def cell(self, values: Mapping[str, Any], seed: int) -> Config:
        """The checked config of the cell of a trial; it draws no figures unless the overrides say so."""
        given = {text.partition("=")[0].lstrip("+") for text in self.overrides}
        own: dict[str, Any] = {name: value for name, value in QUIETLY.items() if name not in given}
        return replace(self.config(values, seed), overwrite=False, **own)

    def _compose(self, overrides: tuple[str, ...]) -> dict[str, Any]:
        return compose(overrides, None if self.file is None else read_file(self.file, "--config"))


def group_names() -> set[str]:
    """Config groups that a sweep may search."""
    return config_groups() - {"experiment"}


def check_searchable(key: str) -> None:
    """Check that a key may differ between the trials of a sweep.

    Raises:
        ConfigError: The key is the same for the whole sweep.
    """
    section, _, rest = key.partition(".")
    if section in FIXED or key == "cluster" or (section == "cluster" and rest in FIXED_CLUSTER):
        raise ConfigError(f"space.{key}: cannot be searched, it is the same for the whole sweep")
