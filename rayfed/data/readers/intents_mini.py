"""The embedded data set intents-mini: made-up requests, see `rayfed.data.embedded.intents_mini`."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata, resources

import numpy as np

from rayfed.data.embedded.intents_mini import INTENTS, STYLES, requests
from rayfed.data.source import Listing, choose_classes
from rayfed.data.text import Text
from rayfed.objective import TEXT_CLASSIFICATION


@dataclass(frozen=True, kw_only=True)
class IntentsMini:
    """Four styles with 12 intents and 40 requests of each."""

    name: str
    classes: Sequence[str] | int | None = None

    task = TEXT_CLASSIFICATION

    def fingerprint(self) -> str:
        out = hashlib.sha256(f"numpy={metadata.version('numpy')}\n{self.classes}\n".encode())
        out.update(resources.files("rayfed.data").joinpath("embedded/intents_mini.py").read_bytes())
        return f"intents_mini/1:{out.hexdigest()}"

    def scan(self) -> Listing:
        styles, intents = list(STYLES), self._intents
        keys = list(self._texts)
        named = [key.split("/") for key in keys]
        return Listing(
            name=self.name,
            classes=tuple(intents),
            domains=tuple(styles),
            keys=keys,
            labels=np.array([intents.index(intent) for _, intent, _ in named], dtype=np.int64),
            domain=np.array([styles.index(style) for style, _, _ in named], dtype=np.int64),
            test=np.zeros(len(keys), dtype=np.bool_),
            fingerprint=self.fingerprint(),
        )

    def decode(self, listing: Listing, index: int, size: int) -> Text:
        return Text(text=self._texts[listing.keys[index]])

    @cached_property
    def _intents(self) -> list[str]:
        return choose_classes(self.classes, sorted(INTENTS))

    @cached_property
    def _texts(self) -> dict[str, str]:
        return {
            f"{style}/{intent}/{number:02d}": text
            for style in STYLES
            for intent in self._intents
            for number, text in enumerate(requests(style, intent))
        }


READER = IntentsMini
