"""Lets the methods of a study do as much work as each other (`rayfed.experiment.equal_work`)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from rayfed.columns import Unit
from rayfed.engine.setup import Setup
from rayfed.errors import ConfigError
from rayfed.experiment.equal_work import RunWork, equal_rounds, expected_work
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


def with_equal_work(
    configs: Mapping[Key, C],
    names: tuple[str, ...],
    scored: Collection[Key],
    unit: Unit,
    common: CommonParts,
    prepared: Callable[[C, CommonParts], Sequence[Setup]] = its_setup,
) -> dict[Key, C]:
    """The cells, with more rounds where another method of their setting does more work.

    A setting is what the cells of a row have in common besides the method. Methods are compared with the
    first seed and over all parts; the other seeds have the same numbers of rounds.

    Args:
        configs: The cells.
        names: Names of their coordinates.
        scored: The cells that train nothing, but score the model of another one.
        unit: What is to be equal.
        common: What was made for the cells already.
        prepared: Gives the runs of a cell.

    Raises:
        ConfigError: Only one method trains, or one needs too many rounds.
        RayFedError: A client that was tried failed.
    """
    settings: dict[Key, dict[str, list[Key]]] = {}
    for key in configs:
        at = dict(zip(names, key, strict=True))
        setting = tuple(value for name, value in at.items() if name not in (METHOD, PART, SEED))
        settings.setdefault(setting, {}).setdefault(str(at.get(METHOD)), []).append(key)
    if all(len(methods) < 2 for methods in settings.values()):
        raise ConfigError("equal: nothing is compared; add compare=[NAME], or leave out equal")
    rounds: dict[Key, int] = {}
    for methods in settings.values():
        trained = {name: [key for key in keys if key not in scored] for name, keys in methods.items()}
        first = {
            name: [key for key in keys if configs[key].seed == configs[keys[0]].seed]
            for name, keys in trained.items()
        }
        works = {
            name: [_work([*prepared(configs[key], common)], name, unit) for key in keys]
            for name, keys in first.items()
        }
        for name, found in equal_rounds(works, unit).items():
            by_part = {_without_seed(k, names): n for k, n in zip(first[name], found, strict=True)}
            rounds |= {key: by_part[_without_seed(key, names)] for key in trained[name]}
    return {
        key: config if key not in rounds else replace(config, rounds=rounds[key])
        for key, config in configs.items()
    }


def _without_seed(key: Key, names: Sequence[str]) -> Key:
    return tuple(value for name, value in zip(names, key, strict=True) if name != SEED)


def _work(setups: Sequence[Setup], name: str, unit: Unit) -> RunWork:
    """The work of the runs of one cell together, which have as many rounds as each other."""
    each = [expected_work(setup, name, unit) for setup in setups]
    return RunWork(
        rounds=each[0].rounds, first=sum(one.first for one in each), later=sum(one.later for one in each)
    )
