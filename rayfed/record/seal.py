"""Digests in a checkpoint, by which later changes of its entries, the config or the data are detected."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rayfed.config.changes import changes
from rayfed.errors import ConfigError
from rayfed.record.readers import DamagedError, read_json, reading

FORMAT = 2
FACTS = "checkpoint.json"
WHAT = {
    "stores": "which client has which store",
    "personal": "the scores of the clients' own models",
    "config": "the config",
    "data": "the digests of the data",
}
"""Entries of a checkpoint, as messages name them."""
DIGESTS = {
    "data_digest": "data: the images",
    "partition_digest": "data.partition: the clients' images",
    "trace_digest": "faults.trace: the file",
}
"""What the digests of the data are about, by their names in environment.json."""


@dataclass(frozen=True, kw_only=True)
class Basis:
    """The inputs of a run, with which a checkpoint can be continued.

    Attributes:
        config: The config, as in config.yaml.
        data: Digests of images, partition and trace, by their names in environment.json.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, str] = field(default_factory=dict)

    def check_unchanged(self, facts: Mapping[str, Any], path: Path) -> None:
        """Check that a checkpoint was saved with the same inputs.

        Args:
            facts: Entries of the checkpoint.
            path: Folder of the run, for errors.

        Raises:
            ConfigError: A key of the config or a digest that affects the result changed; names it.
        """
        where = f"when round {facts['round']} of {path} was saved"
        advice = "put it back or start a new run"
        now = json.loads(json.dumps(self.config))  # with the key types that JSON has
        for key, old, new in changes(facts["config"], now):
            if key != "rounds" or _depends_on_rounds(now):  # a continued run may have more rounds
                raise ConfigError(f"{key} in config.yaml was {old!r} {where} and is {new!r} now; {advice}")
        for key, _, _ in changes(facts["data"], self.data):
            raise ConfigError(
                f"{DIGESTS.get(key, key)} changed since round {facts['round']} of {path}; {advice}"
            )


def _depends_on_rounds(config: Mapping[str, Any]) -> bool:
    """Whether the learning rate of a round depends on the number of all rounds."""
    train = config.get("train")
    return isinstance(train, Mapping) and train.get("schedule", "constant") != "constant"


NOTHING = Basis()


def seals(facts: Mapping[str, Any]) -> dict[str, str]:
    """The SHA-256 digest of every entry of a checkpoint."""
    return {
        key: hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
        for key, value in facts.items()
    }


def read_facts(path: Path) -> dict[str, Any]:
    """The entries of a checkpoint, checked against their digests.

    Raises:
        DamagedError: An entry was changed, or the format is not known.
    """
    facts = read_json(path / FACTS, dict)
    with reading(path / FACTS):
        if facts["format"] != FORMAT:
            raise DamagedError(f"format {facts['format']!r}, this version reads {FORMAT}")
        sealed = facts.pop("seals")
        changed = [key for key, seal in seals(facts).items() if sealed.get(key) != seal]
        changed += [key for key in sealed if key not in facts]
        if changed:
            what = WHAT.get(changed[0], changed[0])
            raise DamagedError(f"{FACTS}: {what} was changed")
        if path.name != f"round-{facts['round']:06d}":
            raise DamagedError(f"{FACTS} belongs to round {facts['round']}")
    return facts
