"""Prepares and checks all runs of a command before anything is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rayfed.config.schema import Config, of_compared
from rayfed.config.variants import PROTOCOLS, comparisons, trained_otherwise
from rayfed.data.data_config import DataConfig
from rayfed.data.shards import Dataset
from rayfed.engine.built_once import Shared
from rayfed.engine.measure_client import check_resources
from rayfed.engine.setup import Setup, dataset_of, prepare
from rayfed.errors import ConfigError
from rayfed.experiment.equal_steps import batches_of, factors_beside, with_passes
from rayfed.experiment.single_run import Show
from rayfed.federation.method_registry import METHODS
from rayfed.terminal.table_formats import fit_width, terminal_width

if TYPE_CHECKING:
    from rayfed.data.partition.partition import ClientSplit


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
        """Notes on what a user may not expect of the compared methods; or nothing."""
        every = (self.config, *(part.config for part in self.parts.values()))
        tunings = trained_otherwise({c.algorithm: (c.tuning["name"], c.train.optimizer) for c in every})
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
        runs = protocol_runs(config, path, shared)
        parts = {name: make_plan(run, Path(str(run.output)), shared) for name, run in runs.items()}
        return Plan(config=config, path=path, parts=parts)
    others = comparisons(config, path)
    if others:
        shared = shared or Shared()
    setup = prepare(config, shared=shared)
    parts = {}
    for name, other in others.items():
        with of_compared(name):
            parts[name] = make_plan(other, Path(str(other.output)), shared)
    if config.equal_steps:
        parts = _trained_equally(config, setup, others, parts, shared)
    check_resources(config.cluster, setup, path, config.checkpoint.keep + 1)
    return Plan(config=config, path=path, setup=setup, parts=parts)


def _trained_equally(
    config: Config,
    setup: Setup,
    others: Mapping[str, Config],
    parts: Mapping[str, Plan],
    shared: Shared | None,
) -> dict[str, Plan]:
    """The plans of the compared methods, with more passes where they would train less than the main one.

    Raises:
        ConfigError: Nothing is compared, or no whole number of passes makes them equal.
    """
    if not parts:
        raise ConfigError("equal_steps: nothing is compared; add compare=[NAME], or leave out equal_steps")
    batches = {config.algorithm: batches_of((setup,))}
    batches |= {name: batches_of(part.setups) for name, part in parts.items()}
    factors = factors_beside(config.algorithm, batches)
    longer = {name: with_passes(other, name, factors[name]) for name, other in others.items()}
    return {name: make_plan(other, Path(str(other.output)), shared) for name, other in longer.items()}


def first_run(config: Config) -> Config:
    """The experiment itself, or the first run of its protocol.

    Raises:
        ConfigError: The protocol has no runs on these data.
    """
    if config.protocol not in PROTOCOLS:
        return config
    return next(iter(protocol_runs(config, Path(config.output or "run"), Shared()).values()))


def protocol_runs(config: Config, path: Path, shared: Shared) -> dict[str, Config]:
    """The runs of a protocol by name.

    Args:
        config: The experiment, whose protocol is not `single`.
        path: Folder of the whole, in which each run has one of its name.
        shared: What was made for other experiments.

    Raises:
        ConfigError: The protocol has no runs on these data.
    """

    def open_data(data: DataConfig) -> Dataset:
        return dataset_of(replace(config, data=data), shared)

    return PROTOCOLS[config.protocol].parts(config, open_data, path)


def describe_all(plan: Plan, show: Show) -> None:
    """Show one table of the clients of all runs, where a client has the same examples in each of them.

    Nothing for a single run, which shows its own table. Where some clients never train, a line names them for
    each run, as they may be others in each.
    """
    from rayfed.data.partition.groups import partition_of
    from rayfed.data.partition.manifest import describe

    setups = plan.setups
    if len(setups) == 1 or len({setup.dataset.digest for setup in setups}) > 1:
        return
    data = replace(plan.config.data, held_out=None, shots=None, unseen_clients=None)
    try:
        whole = partition_of(setups[0].dataset, data, plan.config.seed)
    except ConfigError:
        return
    if whole.drawn is not None:
        return
    known = {_examples(client) for client in whole.clients}
    if not all(_examples(client) in known for setup in setups for client in setup.partition.clients):
        return
    show.tell(describe(whole, setups[0].dataset, terminal_width()))
    names = {client.id for client in whole.clients}
    if any(client.id not in names for setup in setups for client in setup.partition.clients):
        show.tell("in each fold, the clients of the other domains are numbered anew")
    _tell_unseen(plan, show)
    show.described.update(setup.partition.digest for setup in setups)


def _tell_unseen(plan: Plan, show: Show) -> None:
    """Name the clients of each run of a protocol that never train."""
    from rayfed.data.partition.manifest import never_train

    for name, setup in zip(plan.parts, plan.setups, strict=True):
        if setup.partition.unseen:
            show.tell(fit_width(f"{name}: {never_train(setup.partition)}", terminal_width()))


def _examples(client: ClientSplit) -> tuple[object, ...]:
    """Domain and examples of a client, to find it under another id."""
    return client.domain, *(tuple(getattr(client, split)) for split in ("train", "val", "test"))
