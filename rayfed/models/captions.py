"""Captions of the glyph pool, on which clip_mini is pre-trained, and its tokenizer.

The tokenizer spells unknown words letter by letter. Digits are not in the pool; their names appear in
captions of glyphs that look like one ("a zero shape" for the letter o), so that the text tower learns words
that class prompts such as `a picture of a zero` use.
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
"""Length of a tokenized text, with the tokens for begin and end; longer texts are cut."""

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")

TEMPLATES = ("a picture of a {}", "a photo of a {}", "an image of a {}", "{}")

STYLES = ("", "white on black", "on a photo")
"""Words of a caption for the kind of the background: coloured (no words), black, a photograph."""

LOOKS = {
    "Oo": "zero", "Q": "zero", "Il": "one", "/": "one", "Zz": "two", "ξ": "three", "}": "three",
    "Y": "four", "y": "four", "Ss": "five", "b": "six", "T": "seven", "?": "seven", "B": "eight",
    "&": "eight", "§": "eight", "q": "nine", "g": "nine",
}  # fmt: skip
"""Names of the digits that some glyphs of the pool resemble, by a string of such glyphs."""

_CONSONANTS = "bdfgklmnprst"
_VOWELS = "ao"
_WORD = re.compile(r"[a-z]+|[^\sa-z]")


def class_names() -> tuple[str, ...]:
    """Names of the pool's classes, in the order of its labels."""
    letters = [f"letter {c[0].lower()}" if len(c) > 1 else _unicode_name(c) for c in LETTERS]
    scribbles = [
        f"scribble {_CONSONANTS[i % 12]}{_VOWELS[i // 12]}{_CONSONANTS[(5 * i + 3) % 12]}i"
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
"""Words by token number; 0 pads short texts. The packaged weights depend on the order."""

_NUMBER = {word: i for i, word in enumerate(VOCABULARY)}


def tokenize(texts: Sequence[str], context: int = CONTEXT) -> Tensor:
    """Turn texts into token numbers: begin, known words or the letters of unknown ones, end, zeros.

    A single digit becomes the word for it. Characters that are not in the vocabulary are dropped.

    Args:
        texts: Any texts; case does not matter.
        context: Length of a tokenized text.

    Returns:
        Token numbers, shape (len(texts), context), int64.
    """
    rows = torch.zeros(len(texts), context, dtype=torch.long)
    for row, text in zip(rows, texts, strict=True):
        numbers = [n for word in _WORD.findall(text.lower()) for n in _numbers(word)][: context - 2]
        full = [_NUMBER["<begin>"], *numbers, _NUMBER["<end>"]]
        row[: len(full)] = torch.tensor(full)
    return rows


def _numbers(word: str) -> list[int]:
    word = DIGITS[int(word)] if word in set("0123456789") else word
    return [_NUMBER[word]] if word in _NUMBER else [_NUMBER[c] for c in word if c in _NUMBER]


class Captioner:
    """Writes a random caption for each picture of the pool; tokens of captions are cached by their text."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self._names = class_names()
        self._looks = [LOOKS.get(c) for c in (*LETTERS, *SYMBOLS)] + [None] * NUM_SCRIBBLES
        self._made: dict[str, Tensor] = {}

    def __call__(self, labels: Tensor, kinds: Tensor) -> Tensor:
        """Tokens of one caption for each picture, shape (n, CONTEXT).

        Args:
            labels: Classes of the pool, shape (n,).
            kinds: Kind of the background, an index into STYLES, shape (n,).
        """
        numbers = self.rng.random((len(labels), 3))
        texts = [
            self._caption(label, kind, triple)
            for label, kind, triple in zip(labels.tolist(), kinds.tolist(), numbers, strict=True)
        ]
        for text in texts:
            if text not in self._made:
                self._made[text] = tokenize([text])[0]
        return torch.stack([self._made[text] for text in texts])

    def _caption(self, label: int, kind: int, uniform: np.ndarray) -> str:
        """A caption that three random numbers in [0, 1) choose: its subject, template and style."""
        look = self._looks[label]
        style = STYLES[kind]
        subject = f"{look} shape" if look and uniform[0] < 1 / 3 else self._names[label]
        text = TEMPLATES[int(uniform[1] * len(TEMPLATES))].format(subject)
        return f"{text}, {style}" if style and uniform[2] < 1 / 2 else text
