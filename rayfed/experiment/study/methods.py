"""The methods that one experiment compares, as the cells of a study, and in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayfed.config.variants import comparisons, trained_otherwise
from rayfed.errors import ConfigError, count_of
from rayfed.experiment.study.cells import Study
from rayfed.experiment.study.coordinates import SEED
from rayfed.experiment.study.described import Fixed
from rayfed.experiment.study.equal_cells import METHOD
from rayfed.experiment.study.study_folder import Manifest
from rayfed.federation.method_registry import METHODS
from rayfed.record.readers import STUDY
from rayfed.user_objects import title

if TYPE_CHECKING:
    from rayfed.config.schema import Config, Request


def methods_study(config: Request, given: Mapping[str, Any]) -> Study:
    """A study of the methods that an experiment compares, on the same data, tuning and training.

    With `equal`, those that would do less work than another one run more rounds.

    Args:
        config: The checked config of the experiment.
        given: The values that its user gave, by key.

    Returns:
        The study, which is not run; its coordinates are `method` and `seed`, and those of a protocol get
        `part` when it is run.

    Raises:
        ConfigError: A compared method does not fit, or has no model to be scored.
    """
    methods = {config.algorithm: config.alone(), **comparisons(config)}
    names = [title(name) for name in methods]
    cells = []
    for (method, each), name in zip(methods.items(), names, strict=True):
        at = {METHOD: name if names.count(name) == 1 else method, SEED: config.seed}
        cells.append((at, Fixed.of(_scoring_its_own(each), given, config.protocol)))
    return Study(cells, equal=config.equal)


def _scoring_its_own(config: Config) -> Config:
    """The config; where `evaluation.model_of` is a study, the cell of this method is scored."""
    folder = config.evaluation.model_of
    if folder is None or not (Path(folder) / STUDY).exists():
        return config
    manifest = Manifest.read(Path(folder))
    places = [manifest.place(key) for key in manifest.entries if title(config.algorithm) in key]
    if len(places) != 1:
        raise ConfigError(
            f"evaluation.model_of: {folder!r} holds a study with {count_of(len(places), 'run')} of "
            f"{title(config.algorithm)}; give the folder of one run, such as {folder}/cells/NAME"
        )
    return replace(config, evaluation=replace(config.evaluation, model_of=str(places[0])))


def in_words(config: Request, methods: Sequence[Config]) -> str:
    """The methods with their rounds, why one without training is among them, and which lack their tuning.

    For example `fedavg, afl (3 rounds each)`, or `fedclip (3 rounds), zero_shot (1 round); ...`.

    Args:
        config: The experiment that compares them.
        methods: The config of each of them.
    """
    rounds = [each.rounds for each in methods]
    tunings = trained_otherwise(
        {each.algorithm: (each.tuning["name"], each.train.optimizer) for each in methods}
    )
    notes = _reference(config, methods) + (f"; {tunings}" if tunings else "")
    if len(set(rounds)) == 1:
        each_of = " each" if len(rounds) > 1 else ""
        names = ", ".join(each.algorithm for each in methods)
        return f"{names} ({count_of(rounds[0], 'round')}{each_of}){notes}"
    return ", ".join(f"{each.algorithm} ({count_of(each.rounds, 'round')})" for each in methods) + notes


def _reference(config: Request, methods: Sequence[Config]) -> str:
    """Says where the reference without training comes from that a model brings; or nothing."""
    name = config.compare
    if not isinstance(name, str) or name not in [each.algorithm for each in methods[1:]]:
        return ""
    if METHODS.load(name, "compare").server.trains:
        return ""
    return (
        f"; {name} trains nothing, it is the reference that model={config.model.name} brings: "
        f"compare=[] leaves it out"
    )
