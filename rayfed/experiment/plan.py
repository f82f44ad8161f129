"""Prepares all runs of a command and checks them, before anything is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from rayfed.config.schema import Config
from rayfed.config.variants import PROTOCOLS, comparisons, tuned_otherwise
from rayfed.data.config import DataConfig
from rayfed.data.shards import Dataset
from rayfed.engine.inputs import dataset_of
from rayfed.engine.preflight import check_resources
from rayfed.engine.setup import Setup, prepare
from rayfed.engine.shared import Shared
from rayfed.federation.method import METHODS


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A checked experiment.

    Attributes:
        config: Its config.
        path: Its folder.
        setup: The prepared experiment; None for a protocol, which consists of its runs only.
        parts: The runs of the protocol, such as folds by held-out domain, or the algorithms that it is
            compared with, by name.
    """

    config: Config
    path: Path
    setup: Setup | None = None
    parts: Mapping[str, Plan] = field(default_factory=dict)

    @property
    def setups(self) -> tuple[Setup, ...]:
        """The prepared experiment, or those of all folds; not those of compared methods."""
        if self.setup is not None:
            return (self.setup,)
        return tuple(setup for fold in self.parts.values() for setup in fold.setups)

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods that are run on the same data, the main one first."""
        if self.setup is None:
            return next(iter(self.parts.values())).methods
        return self.config.algorithm, *self.parts

    @property
    def in_words(self) -> str:
        """The methods with their rounds, why one without training is among them, and which lack their tuning.

        For example `fedavg, afl (3 rounds each)`, or `fedclip (3 rounds), zero_shot (1 round); ...`.
        """
        if self.setup is None:
            return next(iter(self.parts.values())).in_words
        rounds = [self.config.rounds, *(part.config.rounds for part in self.parts.values())]
        if len(set(rounds)) == 1:
            each = " each" if len(rounds) > 1 else ""
            return f"{', '.join(self.methods)} ({_rounds(rounds[0])}{each}){self._notes}"
        pairs = zip(self.methods, rounds, strict=True)
        return ", ".join(f"{name} ({_rounds(count)})" for name, count in pairs) + self._notes

    @property
    def _notes(self) -> str:
        """What a user may not expect of the methods that are compared; or nothing."""
        every = (self.config, *(part.config for part in self.parts.values()))
        tunings = tuned_otherwise({config.algorithm: config.tuning["name"] for config in every})
        return self._reference + (f"; {tunings}" if tunings else "")

    @property
    def _reference(self) -> str:
        """Says where the reference without training comes from that a model's config brings; or nothing."""
        name = self.config.compare
        if not isinstance(name, str) or name not in self.parts or METHODS.load(name, "compare").server.trains:
            return ""
        return (
            f"; {name} trains nothing, it is the reference that model={self.config.model.name} brings: "
            f"compare=[] leaves it out"
        )


def _rounds(count: int) -> str:
    return "1 round" if count == 1 else f"{count} rounds"


def make_plan(config: Config, path: Path, shared: Shared | None = None) -> Plan:
    """Prepare an experiment and all others that it runs; nothing is written to `path`.

    Args:
        config: The experiment.
        path: Its folder.
        shared: What was made for other experiments of the command.

    Raises:
        ConfigError: One of the experiments cannot be run.
    """
    if config.protocol in PROTOCOLS:
        shared = shared or Shared()
        runs = _runs(config, path, shared)
        parts = {name: make_plan(run, Path(str(run.output)), shared) for name, run in runs.items()}
        return Plan(config=config, path=path, parts=parts)
    others = comparisons(config, path)
    if others:
        shared = shared or Shared()
    parts = {name: make_plan(other, Path(str(other.output)), shared) for name, other in others.items()}
    setup = prepare(config, shared=shared)
    check_resources(config.cluster, setup, path, config.checkpoint.keep + 1)
    return Plan(config=config, path=path, setup=setup, parts=parts)


def first_run(config: Config) -> Config:
    """The experiment itself, or the first run of its protocol.

    Raises:
        ConfigError: The protocol has no runs on these data.
    """
    if config.protocol not in PROTOCOLS:
        return config
    return next(iter(_runs(config, Path(config.output or "run"), Shared()).values()))


def _runs(config: Config, path: Path, shared: Shared) -> dict[str, Config]:
    """The runs of a protocol by name."""

    def open_data(data: DataConfig) -> Dataset:
        return dataset_of(replace(config, data=data), shared)

    return PROTOCOLS[config.protocol].parts(config, open_data, path)
