"""Composes YAML groups and overrides into one plain mapping. Only this module uses Hydra.

Hydra's compose API puts groups together (`algorithm=fedprox`, `data=pacs`); plain `key=value` overrides are
YAML values merged on top. Nothing is checked here beyond names and syntax: `rayfed.config.schema` does that.

A method, a tuning scheme and a reader need no YAML file: the name of the Python file is enough, and so is
`package.module:NAME`. A YAML file in a group is for values that differ from the defaults.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from rayfed.documents import parse_value, read_file
from rayfed.errors import ConfigError, check_name, unknown
from rayfed.registry import METHOD_FILES, READER_FILES, TUNING_FILES, Entries

SECTIONS_OF_GROUP = {"algorithm": ("algorithm", "server", "local")}
"""Sections that a choice from a group sets, for groups that do not set the section of their name."""

NAMED: Mapping[str, Entries] = {"algorithm": METHOD_FILES, "tuning": TUNING_FILES, "data": READER_FILES}
"""Groups whose choices are also the names of Python files."""

OWN_IMAGES = (
    "; your own images: data=image_folder data.root=DIR with the layout DIR/<domain>/<class>/<image>, or "
    "DIR/<class>/<image> for one domain"
)
"""What is said about a data set that does not exist."""

BRINGS = "brings"
"""Section of a data set's YAML file: the choices in other groups that the data set needs."""


def folder() -> Path:
    """Folder of the YAML groups: inside the installed package, or beside it in a checkout."""
    package = Path(__file__).parent.parent
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


def compose(overrides: Sequence[str] = (), base: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Groups first, then values, in the order given.

    Args:
        overrides: `group=name` and `section.key=value`.
        base: A resolved config to start from instead of the defaults.

    Raises:
        ConfigError: One line: the override, what is allowed.
    """
    pairs = [_split(text) for text in overrides]
    groups = {key: value for key, value in pairs if key in config_groups()}
    values = [(key, value) for key, value in pairs if key not in groups]
    chosen = {**_brought(groups, has_method=base is not None or "experiment" in groups), **groups}
    tree = _compose(chosen) if base is None else _replaced(base, chosen)
    for key, value in values:
        _set(tree, key, value)
    return tree


def config_groups() -> set[str]:
    """Keys whose value is the name of a YAML file or of a Python file."""
    folders = {p.name for p in folder().iterdir() if p.is_dir()} - {"sweep"}  # those are for tune.run
    return folders.union(NAMED)


def _split(text: str) -> tuple[str, str]:
    key, sep, value = text.partition("=")
    if not sep or not all(part.strip() for part in key.split(".")):
        raise ConfigError(f"{text!r} is not an override; write key=value or section.key=value")
    return key.strip(), value.strip()


def _brought(groups: Mapping[str, str], has_method: bool) -> dict[str, str]:
    """The choices that the data set of the command line brings.

    Args:
        groups: The choices of the command line.
        has_method: An experiment or a saved config has chosen the method, which then stays.
    """
    file = folder() / "data" / f"{groups.get('data')}.yaml"
    has_file = groups.get("data") in choices("data") and file.is_file()
    brings = read_file(file, "data").get(BRINGS, {}) if has_file else {}
    return {group: name for group, name in brings.items() if not (has_method and group == "algorithm")}


def _replaced(base: Mapping[str, Any], groups: Mapping[str, str]) -> dict[str, Any]:
    """A resolved config with the sections that the choices fill replaced."""
    tree = deepcopy(dict(base))
    plain = {"algorithm": "fedavg"}
    before = _compose(plain)
    for group, name in groups.items():
        composed = _compose({**plain, group: name})
        changed = {key for key in composed if composed[key] != before.get(key)}
        sections = changed.union(SECTIONS_OF_GROUP.get(group, (group,)))
        tree = {k: v for k, v in tree.items() if k not in sections}
        tree |= {k: v for k, v in composed.items() if k in sections}
    return tree


def _compose(groups: Mapping[str, str]) -> dict[str, Any]:
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from omegaconf import OmegaConf

    for group, files in NAMED.items():
        for name in files.names():
            if not (folder() / group / f"{name}.yaml").is_file():
                _register(group, name)
    chosen = [
        f"{'+' if group == 'experiment' else ''}{group}={_choice(group, name)}"
        for group, name in groups.items()
    ]
    with initialize_config_dir(str(folder().resolve()), version_base=None):
        tree: Any = OmegaConf.to_container(hydra_compose("config", overrides=chosen), resolve=True)
    tree["data"].pop(BRINGS, None)
    if _is_other_model(groups):
        tree |= _model(groups["model"], tree["model"])
    return dict(tree)


def _register(group: str, name: str) -> None:
    """Let Hydra know a name that has no YAML file."""
    from hydra.core.config_store import ConfigStore

    content: dict[str, Any] = {group: {"name": name}}
    if group == "algorithm":
        content = {"algorithm": name}
    elif group == "data":
        content = {"data": {"name": name.replace(":", "."), "reader": name}}
    ConfigStore.instance().store(group=group, name=name, node=content, package="_global_")


def _choice(group: str, name: str) -> str:
    """The choice as Hydra knows it.

    Raises:
        ConfigError: There is no such name.
    """
    if name in choices(group):
        return name
    if group == "model":
        return "timm"
    if group in NAMED and ":" in name:
        check_name(group, name)
        _register(group, name)
        return name
    raise ConfigError(unknown(group, name, choices(group)) + (OWN_IMAGES if group == "data" else ""))


def _is_other_model(groups: Mapping[str, str]) -> bool:
    return "model" in groups and groups["model"] not in choices("model")


def _model(name: str, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The sections of a model without a YAML file: any model of timm or of open_clip."""
    from rayfed.models.config import OPEN_CLIP

    reference = {"compare": "zero_shot"} if name.startswith(OPEN_CLIP) else {}
    return {"model": {**defaults, "name": name}, **reference}


def choices(group: str) -> list[str]:
    """Every name of a config group: its YAML files, in nested folders too, and its Python files."""
    root = folder() / group
    files = {str(path.relative_to(root).with_suffix("")) for path in root.rglob("*.yaml")}
    return sorted(files.union(NAMED[group].names() if group in NAMED else ()))


def _set(tree: dict[str, Any], key: str, text: str) -> None:
    """Put the YAML value of `a.b.c=text` into nested mappings."""
    value = parse_value(key, text)
    *path, last = key.split(".")
    node = tree
    for part in path:
        inner = node.setdefault(part, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"{key}: {part} is a value, not a section")
        node = inner
    node[last] = value
