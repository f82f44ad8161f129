"""From YAML groups and overrides to one plain mapping. The only module that knows Hydra.

Hydra's compose API puts groups together (`algorithm=fedprox`, `data=pacs`); plain `key=value` overrides are
YAML values merged on top. Nothing is checked here beyond names and syntax: `rayfed.config.schema` does that.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rayfed.documents import DocumentError, parse_yaml, user_path
from rayfed.errors import ConfigError, shown, unknown
from rayfed.federation.method import METHODS
from rayfed.models.clip import PREFIX

SECTIONS_OF_GROUP = {"algorithm": ("algorithm", "server", "local")}
"""Which sections a group fills, where that is not the section of the same name."""

MAX_BYTES = 1_000_000
"""Largest config file that is read."""

WITHOUT_FILE = {"algorithm": "fedavg", "model": "timm"}
"""What a name without a YAML file of its own starts from."""


def folder() -> Path:
    """Where the YAML groups are: inside the installed package, or beside it in a checkout."""
    package = Path(__file__).parent.parent
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


def compose(overrides: Sequence[str] = (), file: str | Path | None = None) -> dict[str, Any]:
    """Groups first, then values, in the order given.

    Args:
        overrides: `group=name` and `section.key=value`.
        file: A resolved config to start from instead of the defaults.

    Raises:
        ConfigError: One line: the override, what is allowed.
    """
    pairs = [_split(text) for text in overrides]
    groups = {key: value for key, value in pairs if key in _groups()}
    values = [(key, value) for key, value in pairs if key not in groups]
    if file is None:
        tree = _compose(groups)
    else:
        tree = read_yaml(user_path(file, "--config"), "--config")
        plain = {"algorithm": WITHOUT_FILE["algorithm"]}
        before = _compose(plain)
        for group, name in groups.items():
            composed = _compose({**plain, group: name})
            changed = {key for key in composed if composed[key] != before.get(key)}
            sections = changed.union(SECTIONS_OF_GROUP.get(group, (group,)))
            tree = {k: v for k, v in tree.items() if k not in sections}
            tree |= {k: v for k, v in composed.items() if k in sections}
    for key, value in values:
        _set(tree, key, value)
    return tree


def _groups() -> set[str]:
    return {p.name for p in folder().iterdir() if p.is_dir()} - {"sweep"}  # those are for tune.run


def _split(text: str) -> tuple[str, str]:
    key, sep, value = text.partition("=")
    if not sep or not all(part.strip() for part in key.split(".")):
        raise ConfigError(f"{text!r} is not an override; write key=value or section.key=value")
    return key.strip(), value.strip()


def _compose(groups: Mapping[str, str]) -> dict[str, Any]:
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from omegaconf import OmegaConf

    chosen: list[str] = []
    extra: dict[str, str] = {}
    for group, value in groups.items():
        if (folder() / group / f"{value}.yaml").is_file():
            chosen.append(f"{'+' if group == 'experiment' else ''}{group}={value}")
        else:
            extra |= _without_file(group, value)
            chosen += [f"{group}={WITHOUT_FILE[group]}"]
    with initialize_config_dir(str(folder().resolve()), version_base=None):
        tree: Any = OmegaConf.to_container(hydra_compose("config", overrides=chosen), resolve=True)
    for key, value in extra.items():
        _set(tree, key, value)
    return dict(tree)


def _without_file(group: str, value: str) -> dict[str, str]:
    """A name without a YAML file of its own, where the group allows that."""
    if group == "algorithm" and (":" in value or value in METHODS.names()):
        return {"algorithm": value}
    if group == "model":
        reference = {"compare": "zero_shot"} if value.startswith(PREFIX) else {}
        return {"model.name": value, **reference}
    files = {str(p.relative_to(folder() / group).with_suffix("")) for p in (folder() / group).rglob("*.yaml")}
    names = files | set(METHODS.names()) if group == "algorithm" else files
    raise ConfigError(unknown(group, value, {n for n in names if not n.startswith("_")}))


def _set(tree: dict[str, Any], key: str, text: str) -> None:
    """Put the YAML value of `a.b.c=text` into nested mappings."""
    try:
        value = parse_yaml(text)
    except DocumentError as err:
        raise ConfigError(f"{key}: {shown(text)} is not a YAML value: {err}") from err
    *path, last = key.split(".")
    node = tree
    for part in path:
        inner = node.setdefault(part, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"{key}: {part} is a value, not a section")
        node = inner
    node[last] = value


def read_yaml(path: Path, key: str) -> dict[str, Any]:
    """The mapping in a YAML file.

    Raises:
        ConfigError: It cannot be read, is not YAML, or is larger than any config; names `key` and the path.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ConfigError(
                f"{key}: {str(path)!r} is larger than {MAX_BYTES // 1_000_000} MB; is it a config?"
            )
        tree = parse_yaml(content.decode())
    except OSError as err:
        raise ConfigError(f"{key}: cannot read {str(path)!r}: {os.strerror(err.errno or 0)}") from err
    except (DocumentError, UnicodeDecodeError) as err:
        raise ConfigError(f"{key}: {str(path)!r} is not YAML: {err}") from err
    if not isinstance(tree, dict):
        raise ConfigError(f"{key}: {str(path)!r} holds no keys")
    return tree
