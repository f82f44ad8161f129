"""What clip_mini reads: captions of the glyph pool, and a tokenizer whose unknown words are spelled.

Digits are not in the pool. Their names appear for glyphs that look like one ("a zero shape" for the letter
o), so that class names such as `a picture of a zero` mean something to the text tower.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rayfed.data.embedded.pool import LETTERS, NUM_SCRIBBLES, SYMBOLS

CONTEXT = 32
"""Tokens of a text, begin and end included; longer texts are cut."""

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")

TEMPLATES = ("a picture of a {}", "a photo of a {}", "an image of a {}", "{}")

STYLES = ("", "white on black", "on a photo")
"""By the kind of paper: coloured, black, a photograph. Coloured paper is not mentioned."""

LOOKS = {
    "Oo": "zero", "Q": "zero", "Il": "one", "/": "one", "Zz": "two", "ξ": "three", "}": "three",
    "Y": "four", "y": "four", "Ss": "five", "b": "six", "T": "seven", "?": "seven", "B": "eight",
    "&": "eight", "§": "eight", "q": "nine", "g": "nine",
}  # fmt: skip
"""Digits that glyphs of the pool look like, roughly."""

_BEGIN, _END = 1, 2  # from the back of the vocabulary: the end has the largest number of all
_FIRST, _SECOND = "bdfgklmnprst", "ao"
_WORD = re.compile(r"[a-z]+|[^\sa-z]")


def class_names() -> tuple[str, ...]:
    """Names of the pool's classes, in the order of its labels."""
    letters = [f"letter {c[0].lower()}" if len(c) > 1 else _unicode_name(c) for c in LETTERS]
    scribbles = [
        f"scribble {_FIRST[i % 12]}{_SECOND[i // 12]}{_FIRST[(5 * i + 3) % 12]}i"
        for i in range(NUM_SCRIBBLES)
    ]
    return (*letters, *map(_unicode_name, SYMBOLS), *scribbles)


def _unicode_name(character: str) -> str:
    words = unicodedata.name(character).lower().replace("-", " ").split()
    return " ".join(word for word in words if word not in {"latin", "letter"})


def _vocabulary() -> tuple[str, ...]:
    texts = (*class_names()[:-NUM_SCRIBBLES], *TEMPLATES, *STYLES, *DIGITS, "scribble", "shape")
    words = {word for text in texts for word in _WORD.findall(text.replace("{}", "")) if len(word) > 1}
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    return ("", ".", ",", "'", "?", *letters, *sorted(words), "<begin>", "<end>")


VOCABULARY = _vocabulary()
"""Tokens by number; 0 fills up. Weights depend on the order."""

_NUMBER = {word: i for i, word in enumerate(VOCABULARY)}


def tokenize(texts: Sequence[str], context: int = CONTEXT) -> Tensor:
    """Numbers of words: begin, known words or the letters of unknown ones, end, zeros.

    Single digits are read as words. Characters that have no number are dropped.

    Returns:
        Shape (len(texts), context), int64.
    """
    rows = torch.zeros(len(texts), context, dtype=torch.long)
    for row, text in zip(rows, texts, strict=True):
        numbers = [n for word in _WORD.findall(text.lower()) for n in _numbers(word)][: context - 2]
        full = [len(VOCABULARY) - _END, *numbers, len(VOCABULARY) - _BEGIN]
        row[: len(full)] = torch.tensor(full)
    return rows


def _numbers(word: str) -> list[int]:
    word = DIGITS[int(word)] if word in set("0123456789") else word
    return [_NUMBER[word]] if word in _NUMBER else [_NUMBER[c] for c in word if c in _NUMBER]


class Captioner:
    """Draws a caption for each picture of the pool; those it has made before are remembered."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self._names = class_names()
        self._looks = [LOOKS.get(c) for c in (*LETTERS, *SYMBOLS)] + [None] * NUM_SCRIBBLES
        self._made: dict[str, Tensor] = {}

    def __call__(self, labels: Tensor, kinds: Tensor) -> Tensor:
        """Tokens of one caption per picture, shape (n, CONTEXT).

        Args:
            labels: Classes of the pool, shape (n,).
            kinds: Paper, index into STYLES, shape (n,).
        """
        draws = self.rng.random((len(labels), 3))
        texts = [
            self._caption(label, kind, draw)
            for label, kind, draw in zip(labels.tolist(), kinds.tolist(), draws, strict=True)
        ]
        for text in texts:
            if text not in self._made:
                self._made[text] = tokenize([text])[0]
        return torch.stack([self._made[text] for text in texts])

    def _caption(self, label: int, kind: int, draw: np.ndarray) -> str:
        look, style = self._looks[label], STYLES[kind]
        subject = f"{look} shape" if look and draw[0] < 1 / 3 else self._names[label]
        text = TEMPLATES[int(draw[1] * len(TEMPLATES))].format(subject)
        return f"{text}, {style}" if style and draw[2] < 1 / 2 else text
