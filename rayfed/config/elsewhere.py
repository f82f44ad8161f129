"""For a key or a section that does not exist: where it is in the whole config, or what to write."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args, get_type_hints

from rayfed.errors import ConfigError, shown
from rayfed.federation.method import METHODS
from rayfed.tuning.base import TUNINGS

GPUS = "GPUs are used when present (cluster.gpus_per_actor=auto); write cluster.num_gpus=0 for none"
CLIENTS = (
    "data.partition.clients_per_domain is how many each domain has, clients_per_round how many take part"
)

SEEDS = (
    "a run has one seed; run it again with seed=1, seed=2, ...; rayfed report RUN RUN ... shows their mean"
)

SENTENCES: Mapping[str, str] = {
    **dict.fromkeys(("device", "cuda", "gpu", "gpus", "use_gpu", "num_gpus_per_client"), GPUS),
    **dict.fromkeys(("clients", "num_clients", "n_clients"), CLIENTS),
    **dict.fromkeys(("row", "setting"), "it chooses from a paper's table: write experiment=PAPER/TABLE too"),
    "config": "write --config FILE, with spaces, to start from a saved config",
    **dict.fromkeys(("seeds", "num_seeds", "n_seeds"), SEEDS),
}
"""What is said about keys that other programs have."""

MEANINGS: Mapping[str, str] = {
    "learning_rate": "train.lr",
    "local_epochs": "train.epochs",
    "num_epochs": "train.epochs",
    "local_steps": "train.local_steps",
    "bs": "train.batch_size",
    "num_rounds": "rounds",
    "dataset": "data",
    "method": "algorithm",
    "strategy": "algorithm",
    "backbone": "model",
    "fraction": "clients_per_round",
    "partition": "data.partition.scheme",
    "scheduler": "train.schedule",
    "output_dir": "output",
    "num_workers": "cluster.actors",
}
"""Keys that other programs have, and ours."""


def advice(key: str, message: str, whole: type[Any], tree: Mapping[str, Any]) -> str:
    """The message for a key that does not exist: where a key of that name or meaning is, if there is one.

    Args:
        key: The full name of the key that does not exist.
        message: The message that lists the keys of its section.
        whole: The dataclass of a whole config.
        tree: The config that has the key.
    """
    leaf = key.rpartition(".")[2]
    if leaf in SENTENCES:
        return f"{key}: no such key; {SENTENCES[leaf]}"
    every = [*_keys(whole), *_chosen(tree)]
    if leaf in MEANINGS:
        found = [MEANINGS[leaf]]
    else:
        found = [name for name in every if name.rpartition(".")[2] == leaf and name != key]
    if found:
        return f"{key}: no such key; did you mean {' or '.join(found)}?"
    return _of_other_methods(key, leaf, tree) or message.replace("Keys here", f"Keys {_whose(key, tree)}", 1)


def whole(tree: dict[str, Any], file: str | Path) -> dict[str, Any]:
    """The config that a file and the overrides make, if it has its sections.

    Args:
        tree: Nested mappings.
        file: The file of `--config`, for the message.

    Raises:
        ConfigError: The file has a few keys, or the name of a choice in place of a section.
    """
    for section in ("model", "data", "tuning"):
        value = tree.get(section, {} if section == "tuning" else None)
        if not isinstance(value, Mapping):
            what = f"the section {section} is missing" if value is None else f"{section} is {shown(value)}"
            raise ConfigError(
                f"--config: {str(file)!r} is no whole config: {what}; write its values as overrides, such as "
                f"algorithm=fedprox rounds=5, or change a config that --print-config has written"
            )
    return tree


def _whose(key: str, tree: Mapping[str, Any]) -> str:
    """Whose keys a section has, where that depends on what was chosen."""
    section = key.partition(".")[0]
    chosen = tree.get(section)
    if section not in ("server", "local", "tuning") or not isinstance(chosen, Mapping):
        return "here"
    name = chosen.get("name", tree.get("algorithm"))
    return f"of {'tuning' if section == 'tuning' else 'algorithm'}={name}"


def _of_other_methods(key: str, leaf: str, tree: Mapping[str, Any]) -> str:
    """The message for a hyperparameter of methods that were not chosen; empty where no method has it."""
    owners: dict[str, list[str]] = {}
    for name in METHODS.names():
        method = METHODS.load(name)
        for half, cls in (("server", method.server), ("local", method.local)):
            if leaf in {field.name for field in dataclasses.fields(cls)}:
                owners.setdefault(f"{half}.{leaf}", []).append(name)
    found = {name: methods for name, methods in owners.items() if key in (leaf, name)}
    where = "; ".join(f"{name} is a key of algorithm={'|'.join(each)}" for name, each in found.items())
    return f"{key}: no such key with algorithm={tree.get('algorithm')}; {where}" if found else ""


def _keys(cls: type[Any], where: str = "") -> Iterator[str]:
    """The full names of all keys of a dataclass and of the sections in it."""
    hints = get_type_hints(cls)
    for field in dataclasses.fields(cls):
        kinds = (hints[field.name], *get_args(hints[field.name]))
        sections = [kind for kind in kinds if isinstance(kind, type) and dataclasses.is_dataclass(kind)]
        if not sections:
            yield f"{where}{field.name}"
        for section in sections:
            yield from _keys(section, f"{where}{field.name}.")


def _chosen(tree: Mapping[str, Any]) -> Iterator[str]:
    """The keys of the halves of the chosen algorithm and of the chosen tuning scheme."""
    with suppress(ConfigError, KeyError, TypeError):
        method = METHODS.load(tree["algorithm"])
        sections = {
            "server": method.server,
            "local": method.local,
            "tuning": TUNINGS.load(tree["tuning"]["name"]),
        }
        for name, cls in sections.items():
            yield from (f"{name}.{field.name}" for field in dataclasses.fields(cls))
