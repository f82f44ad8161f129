"""Lets the methods of a study train on as many batches as each other (`rayfed.experiment.equal_steps`)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from rayfed.engine.setup import Setup
from rayfed.errors import ConfigError
from rayfed.experiment.equal_steps import batches_of, passes, with_passes
from rayfed.experiment.plan import prepared
from rayfed.experiment.study.coordinates import PART, SEED, Key
from rayfed.experiment.study.run_cell import CommonParts

if TYPE_CHECKING:
    from rayfed.config.schema import Config

METHOD = "method"

C = TypeVar("C", bound="Config")


def its_setup(config: Config, common: CommonParts) -> tuple[Setup, ...]:
    """The one run of a cell, prepared."""
    return (prepared(config, common.of(config)),)


def equally_trained(
    configs: Mapping[Key, C],
    names: tuple[str, ...],
    scored: Collection[Key],
    common: CommonParts,
    prepared: Callable[[C, CommonParts], Sequence[Setup]] = its_setup,
) -> dict[Key, C]:
    """The cells, with more passes where another method of their setting trains on more batches.

    A setting is what the cells of a row have in common besides the method. Methods are compared with the
    first seed and over all parts; the other seeds train by the same numbers of passes.

    Args:
        configs: The cells.
        names: Names of their coordinates.
        scored: The cells that train nothing, but score the model of another one.
        common: What was made for the cells already.
        prepared: Gives the runs of a cell.

    Raises:
        ConfigError: Only one method trains, or no whole number of passes makes two of them equal.
        RayFedError: A client that was tried failed.
    """
    settings: dict[Key, dict[str, list[Key]]] = {}
    for key in configs:
        at = dict(zip(names, key, strict=True))
        setting = tuple(value for name, value in at.items() if name not in (METHOD, PART, SEED))
        settings.setdefault(setting, {}).setdefault(str(at.get(METHOD)), []).append(key)
    if all(len(methods) < 2 for methods in settings.values()):
        raise ConfigError("equal_steps: nothing is compared; add compare=[NAME], or leave out equal_steps")
    longer: dict[Key, C] = {}
    for methods in settings.values():
        batches = {
            name: _batches([configs[key] for key in keys if key not in scored], common, prepared)
            for name, keys in methods.items()
        }
        for name, factor in passes(batches).items():
            longer |= {
                key: configs[key] if key in scored else with_passes(configs[key], name, factor)
                for key in methods[name]
            }
    return {key: longer[key] for key in configs}


def _batches(
    configs: Sequence[C], common: CommonParts, prepared: Callable[[C, CommonParts], Sequence[Setup]]
) -> float:
    """Training batches of the runs with the first seed; 0: they train nothing."""
    first = [config for config in configs if config.seed == configs[0].seed]
    return batches_of([setup for config in first for setup in prepared(config, common)])
