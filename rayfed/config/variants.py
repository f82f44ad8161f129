"""Other experiments that a config asks for: compared algorithms, and the runs of a protocol."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rayfed.config import generalization
from rayfed.config.catalog import listed
from rayfed.config.generalization import Open, part
from rayfed.config.parse import plain
from rayfed.config.schema import Config, compatible_parts, with_method
from rayfed.errors import ConfigError
from rayfed.federation.method import METHODS


def comparisons(config: Config, path: Path) -> dict[str, Config]:
    """The other experiments of `compare`, by algorithm: the same but for the method, which has its defaults.

    Args:
        config: The main experiment.
        path: Folder of the main run.

    Raises:
        ConfigError: An algorithm does not exist, or does not fit the tuning.
    """
    names = (config.compare,) if isinstance(config.compare, str) else config.compare
    found = {}
    for name in names:
        if name == config.algorithm:
            continue
        rounds = config.rounds if METHODS.load(name, "compare").server.trains else 1
        changes: dict[str, Any] = {"output": str(path / "compare" / name), "overwrite": True}
        if (trained := config.evaluation.model_of) is not None:  # its own run, inside that of the main method
            scored = replace(config.evaluation, model_of=str(Path(trained) / "compare" / name))
            changes["evaluation"] = plain(scored)
        found[name] = with_method(config, name, compare=(), rounds=rounds, **changes)
        compatible_parts(found[name])
    return found


def tuned_otherwise(tunings: Mapping[str, str]) -> str:
    """Says which compared methods train another tuning than their own settings have; empty where none does.

    Args:
        tunings: The name of the tuning of each compared method; a single method chose its tuning itself.
    """
    if len(tunings) < 2:
        return ""
    own = {choice.name: choice.brings.get("tuning") for choice in listed("algorithm")}
    return "; ".join(
        f"{name} trains tuning={tuning} here, not its own tuning={usual}"
        for name, tuning in tunings.items()
        if (usual := own.get(name)) not in (None, tuning) and METHODS.load(name).server.trains
    )


def folds(config: Config, open_data: Open, path: Path) -> dict[str, Config]:
    """One experiment per domain, with that domain held out, in a folder of its name.

    Raises:
        ConfigError: A domain is held out already, there is only one, or there is nothing to select with.
    """
    if config.data.held_out:
        raise ConfigError(
            f"data.held_out: {config.data.held_out!r} is set, but protocol=leave_one_out holds out each"
        )
    if not config.data.val:
        raise ConfigError(
            f"data.val: {config.data.val!r} leaves no images to choose a round with; set data.val=0.1"
        )
    domains = config.data.domains or open_data(config.data).domains
    if len(domains) < 2:
        raise ConfigError(f"protocol: leave_one_out needs two or more domains, there is {', '.join(domains)}")
    evaluation = replace(
        config.evaluation, every=config.evaluation.every or 1, personal=True, validation=True
    )
    return {
        name: part(config, path, name, data=replace(config.data, held_out=name), evaluation=evaluation)
        for name in domains
    }


SHOTS = (1, 2, 4, 8, 16)
"""Numbers of shots of protocol=few_shot where `data.shots` is not set, those of CoOp (Zhou et al., 2022)."""


def few_shots(config: Config, path: Path) -> dict[str, Config]:
    """One experiment for each number of training samples of a class and client, in a folder of its name.

    Raises:
        ConfigError: A number is listed twice, or none is.
    """
    shots = [config.data.shots] if isinstance(config.data.shots, int) else config.data.shots
    shots = list(SHOTS) if shots is None else shots
    if not shots or len(set(shots)) < len(shots):
        raise ConfigError(f"data.shots: {shots} must list one number of samples or more, each once")
    return {
        f"shots-{count}": part(config, path, f"shots-{count}", data=replace(config.data, shots=count))
        for count in shots
    }


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """An experiment that consists of several runs.

    Attributes:
        parts: The runs by name, in their order, from the config, what opens data sets, and the folder.
        doing: What is said when it begins, with the names of the runs.
        part: What a run is, for messages.
        data: What the matrix of a paper's table says of the data.
        setting: What tells a run apart from the others, with its name.
        by_validation: The round with the best validation score is reported, not the last evaluated one.
    """

    parts: Callable[[Config, Open, Path], dict[str, Config]]
    doing: str
    part: str
    data: str
    setting: str = "{name}"
    by_validation: bool = False


PROTOCOLS: Mapping[str, Protocol] = {
    "leave_one_out": Protocol(
        parts=folds,
        doing="holding out {names} in turn",
        part="held-out domain",
        data="each domain held out",
        setting="{name} held out",
        by_validation=True,
    ),
    "few_shot": Protocol(
        parts=lambda config, open_data, path: few_shots(config, path),
        doing="training with {names}",
        part="number of shots",
        data="few shots",
    ),
    "unseen_clients": Protocol(
        parts=lambda config, open_data, path: generalization.unseen_clients(config, path),
        doing="holding back clients: {names}",
        part="share of unseen clients",
        data="some clients never train",
    ),
    "cross_domain": Protocol(
        parts=generalization.cross_domains,
        doing="training on source domains: {names}",
        part="source",
        data="scored on domains without clients",
    ),
    "base_to_new": Protocol(
        parts=generalization.base_to_new,
        doing="training on the base classes, then scoring on the new ones: {names}",
        part="set of classes",
        data="base and new classes",
        setting="{name} classes",
    ),
    "cross_dataset": Protocol(
        parts=lambda config, open_data, path: generalization.cross_datasets(config, path),
        doing="training on the first and scoring on the other data sets: {names}",
        part="data set",
        data="scored on other data sets",
    ),
}
"""Every protocol but `single`; `rayfed.report.protocols` has the table of each."""
