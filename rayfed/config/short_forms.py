"""Writes out what may be written in short: paths, and names in place of a section."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rayfed.config.settings import PATHS
from rayfed.data.partition_config import PopulationConfig
from rayfed.errors import ConfigError, shown
from rayfed.models.model_config import HF, with_weights
from rayfed.user_files import user_path

STAGES = ("clip", "noise", "top_k", "fp16", "int8")
"""Names of the stages of `channel`; the first three have a strength."""


def spelled_out(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    """Values that may be written in short, written in full.

    `data.partition: path` is `data.partition.file: path`, `model.pretrained: path` is `model.weights: path`,
    a list or a name in `data.augment` is a section, `data.population: N` is `data.population.clients: N`, and
    paths (`PATHS`) begin at the root of the file system.

    Raises:
        ConfigError: A path begins with `~` and names no home folder, the system allows no such path, or a
            short form has a value that it cannot have.
    """
    if "equal_steps" in tree:
        tree = _without_equal_steps(tree)
    data = tree.get("data")
    if isinstance(data, Mapping) and isinstance(data.get("partition"), str):
        data = {**data, "partition": {"file": data["partition"]}}
    if isinstance(data, Mapping) and isinstance(data.get("augment"), str | list | tuple):
        data = {**data, "augment": _augment_section(data["augment"])}
    if isinstance(data, Mapping) and (population := data.get("population")) is not None:
        data = {**data, "population": _population_section(population)}
    if data is not None:
        tree = {**tree, "data": data}
    if isinstance(channel := tree.get("channel"), str | list | tuple):
        tree = {**tree, "channel": _stages(channel)}
    if isinstance(model := tree.get("model"), Mapping):
        tree = {**tree, "model": _with_folder(with_weights(model))}
    for key in (*PATHS, *(f"data.targets.{name}.root" for name in _targets(tree))):
        tree = _at_home(tree, key.split("."), key)
    return tree


def _without_equal_steps(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same without a key that earlier versions wrote.

    Raises:
        ConfigError: It is set.
    """
    if tree["equal_steps"]:
        raise ConfigError(
            f"equal_steps: {shown(tree['equal_steps'])} is equal=steps now (or examples, flops, bytes), with "
            f"which methods that train less run more rounds; set equal=steps"
        )
    return {key: value for key, value in tree.items() if key != "equal_steps"}


def _targets(tree: Mapping[str, Any]) -> Iterable[str]:
    """Names of the data sets in `data.targets` that have a section; names with dots are left out."""
    data = tree.get("data")
    targets = data.get("targets") if isinstance(data, Mapping) else None
    return [name for name in targets if "." not in name] if isinstance(targets, Mapping) else []


def _population_section(value: Any) -> Mapping[str, Any]:
    """The section `data.population` for a number of clients or a section."""
    if isinstance(value, Mapping):
        return value
    if type(value) is not int:
        raise ConfigError(
            f"data.population: {shown(value)} is neither a number of clients nor a section; write "
            f"data.population=1000, or data.population.clients=1000 and other keys of the section: "
            f"{', '.join(key.name for key in dataclasses.fields(PopulationConfig) if key.name != 'clients')}"
        )
    return {"clients": value}


def _augment_section(names: str | Sequence[Any]) -> dict[str, Any] | None:
    """The section `data.augment` for a name or a list of names; None for `none` and an empty list."""
    listed = [names] if isinstance(names, str) else list(names)
    if listed in ([], ["none"]):
        return None
    if repeated := [name for name in listed if not isinstance(name, str) or listed.count(name) > 1]:
        raise ConfigError(
            f"data.augment: {shown(repeated[0])} is not a name that is listed once; write "
            f"data.augment=[crop,flip]"
        )
    return {name: {} for name in listed}


def _stages(names: str | Sequence[Any]) -> list[Any]:
    """The list `channel` for a name or a list; its names are checked, with a message that lists all."""
    stages = [names] if isinstance(names, str) else list(names)
    for stage in stages:
        wrong = [name for name in stage if name not in STAGES[:3]] if isinstance(stage, Mapping) else []
        if isinstance(stage, str) and stage not in STAGES[3:]:
            wrong = [stage]
        if wrong:
            raise ConfigError(
                f"channel: {shown(wrong[0])} is not a stage; the stages are {{clip: NORM}}, "
                f"{{noise: MULTIPLE}}, {{top_k: SHARE}}, fp16 and int8"
            )
    return stages


def _with_folder(section: Mapping[str, Any]) -> Mapping[str, Any]:
    """A section `model` in which `hf/FOLDER`, a folder with a model, is written from the root of the system.

    The library reads such a folder wherever there is one, and looks on the hub elsewhere, so that a run would
    have another model when it is resumed from another folder.
    """
    name = section.get("name")
    if not isinstance(name, str) or not name.startswith(HF):
        return section
    there = user_path(name.removeprefix(HF), "model.name")
    is_model = there.is_dir() and (there / "config.json").is_file()
    return {**section, "name": f"{HF}{there.absolute()}"} if is_model else section


def _at_home(tree: Mapping[str, Any], path: Sequence[str], key: str) -> Mapping[str, Any]:
    """The tree with one path written out, from the root of the file system; the path is checked.

    So a saved config finds its files from any folder. Only `output` stays relative, as a run may be moved.
    """
    name, *rest = path
    value = tree.get(name)
    if rest:
        return {**tree, name: _at_home(value, rest, key)} if isinstance(value, Mapping) else tree
    if isinstance(value, str) and value:
        there = user_path(value, key)
        return {**tree, name: str(there if key == "output" else there.absolute())}
    return tree
