"""Shakespeare's plays by speaking role: windows of 80 characters and the character after each of them.

The data set of LEAF (Caldas et al., 2018) as q-FFL and FFT-GP use it: 31 roles, each a client.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from string import ascii_lowercase, ascii_uppercase, digits
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from rayfed.data.source import Decoded, Listing
from rayfed.data.text import SYMBOLS, WINDOW
from rayfed.errors import ConfigError, DataError, unknown
from rayfed.objective import NEXT_CHARACTER
from rayfed.seeds import generator

ALPHABET = "\n !\"&'(),-." + digits + ":;>?" + ascii_uppercase + "[]" + ascii_lowercase + "}"
"""The alphabet of LEAF; any other character becomes the last one."""
NAMES = {"\n": "newline", " ": "space"}
"""Class names of characters that cannot be printed."""
ROLES = 31
"""Number of roles that are chosen, as in the papers."""
FEWEST = 64
"""Smallest number of windows of a role that can be chosen."""
FILE = "input.txt"
LAYOUT = f"{FILE} (speeches between blank lines, each begins with `<role>:`), or <role>.txt for each role"


@dataclass(frozen=True, kw_only=True)
class Shakespeare:
    """Reads all windows of the roles in `data.domains`, or of 31 roles that a fixed seed chooses.

    Line breaks become spaces and several spaces become one, as in LEAF. The windows of a role overlap, also
    those of different splits, as in the papers.
    """

    name: str
    root: str | None
    domains: list[str] | None

    task: ClassVar[str] = NEXT_CHARACTER

    def fingerprint(self) -> str:
        out = hashlib.sha256()
        for path in self._files:
            about = path.stat()
            out.update(f"{path.name}|{about.st_size}|{about.st_mtime_ns}\n".encode())
        return f"shakespeare/1:{self.domains}:{out.hexdigest()}"

    def scan(self) -> Listing:
        chosen = self._choose_users()
        keys: list[str] = []
        labels: list[NDArray[np.int64]] = []
        domain: list[NDArray[np.int64]] = []
        for place, role in enumerate(chosen):
            text = self._texts[role]
            keys += [f"{role}/{start}" for start in range(len(text) - WINDOW)]
            labels.append(text[WINDOW:].astype(np.int64))
            domain.append(np.full(len(text) - WINDOW, place, dtype=np.int64))
        return Listing(
            name=self.name,
            classes=tuple(NAMES.get(character, character) for character in ALPHABET),
            domains=tuple(chosen),
            keys=keys,
            labels=np.concatenate(labels),
            domain=np.concatenate(domain),
            test=np.zeros(len(keys), dtype=np.bool_),
            fingerprint=self.fingerprint(),
        )

    def decode(self, listing: Listing, index: int, size: int) -> Decoded:
        if size > WINDOW:
            raise ConfigError(f"model.size: {size} is more than the {WINDOW} characters of a window")
        role, _, start = listing.keys[index].rpartition("/")
        end = int(start) + WINDOW
        return self._texts[role][end - size : end]

    def _choose_users(self) -> list[str]:
        large = sorted(role for role, text in self._texts.items() if len(text) - WINDOW >= FEWEST)
        if not large:
            raise DataError(f"data.root: no role in {self.root} has {FEWEST} windows of {WINDOW} characters")
        if self.domains is None:
            order = generator(0, "shakespeare").permutation(len(large))[:ROLES]
            return [large[place] for place in sorted(order)]
        for role in self.domains:
            if role not in large:
                raise ConfigError(unknown("data.domains", role, large))
        return list(dict.fromkeys(self.domains))

    @cached_property
    def _texts(self) -> dict[str, NDArray[np.uint8]]:
        """Text of each role as indices into the alphabet, uint8."""
        code = {character: place for place, character in enumerate(ALPHABET)}
        texts = {}
        for role, text in _speeches(self._files).items():
            plain = re.sub(r"  +", " ", text.replace("\n", " "))
            texts[role] = np.array([code.get(character, SYMBOLS - 1) for character in plain], dtype=np.uint8)
        return texts

    @cached_property
    def _files(self) -> list[Path]:
        if not self.root:
            raise ConfigError(f"data.root: not set; give the folder of {self.name!r}: {LAYOUT}")
        folder = Path(self.root).expanduser().absolute()
        files = [folder / FILE] if (folder / FILE).is_file() else sorted(folder.glob("*.txt"))
        if not files:
            raise DataError(f"data.root: no text in {folder}; expected {LAYOUT}")
        return files


def _speeches(files: list[Path]) -> dict[str, str]:
    """Text of each role: its speeches, joined by line breaks."""
    try:
        texts = {path: path.read_text(encoding="utf-8-sig") for path in files}
    except (OSError, UnicodeDecodeError) as err:
        raise DataError(f"data.root: a text cannot be read ({err})") from err
    if len(files) > 1 or files[0].name != FILE:
        return {path.stem: text for path, text in texts.items()}
    speeches: dict[str, list[str]] = {}
    for block in re.split(r"\n\s*\n", texts[files[0]]):
        role, colon, speech = block.strip().partition(":\n")
        if colon:
            speeches.setdefault(role.replace(" ", "_"), []).append(speech)
    return {role: "\n".join(own) for role, own in speeches.items()}


READER = Shakespeare
