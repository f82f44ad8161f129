"""What a checkpoint stands on, and the digests by which a change of it by hand is noticed."""

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

FORMAT, UNSEALED = 2, 1
FACTS = "checkpoint.json"
WHAT = {
    "stores": "which client has which store",
    "personal": "the scores of the clients' own models",
    "config": "the config",
    "data": "the digests of the data",
}
"""Facts of a checkpoint, in words."""


@dataclass(frozen=True, kw_only=True)
class Basis:
    """What a run stands on, beside its own rounds.

    Attributes:
        config: The experiment, as in config.yaml.
        data: Digests of images, partition and trace, by their names in environment.json.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, str] = field(default_factory=dict)

    def check_unchanged(self, facts: Mapping[str, Any], path: Path) -> None:
        """Compare with what a checkpoint was saved with.

        Raises:
            ConfigError: Something that alters the result is another now; names it.
        """
        where = f"when round {facts['round']} of {path} was saved"
        advice = "put it back or start a new run"
        now = json.loads(json.dumps(self.config))  # keys as they are in the checkpoint
        for key, old, new in changes(facts["config"], now):
            if key != "rounds":  # more of them is what a run is continued for
                raise ConfigError(f"{key} in config.yaml was {old!r} {where} and is {new!r} now; {advice}")
        for key, old, new in changes(facts["data"], self.data):
            raise ConfigError(f"{key} was {str(old)[:16]} {where} and is {str(new)[:16]} now; {advice}")


NOTHING = Basis()


def seals(facts: Mapping[str, Any]) -> dict[str, str]:
    """The digest of every fact of a checkpoint."""
    return {
        key: hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
        for key, value in facts.items()
    }


def read_facts(path: Path) -> dict[str, Any]:
    """The facts of a checkpoint as they were saved.

    Raises:
        DamagedError: One was changed, or the format is another.
    """
    facts = read_json(path / FACTS, dict)
    with reading(path / FACTS):
        if facts["format"] == UNSEALED:
            return facts
        if facts["format"] != FORMAT:
            raise DamagedError(f"format {facts['format']!r}, this version reads {FORMAT}")
        sealed = facts.pop("seals")
        changed = [key for key, seal in seals(facts).items() if sealed.get(key) != seal]
        changed += [key for key in sealed if key not in facts]
        if changed:
            what = WHAT.get(changed[0], changed[0])
            raise DamagedError(f"{FACTS}: {what} is not what was written")
        if path.name != f"round-{facts['round']:06d}":
            raise DamagedError(f"{FACTS} is that of round {facts['round']}")
    return facts
