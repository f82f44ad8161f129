"""Words and tokenizer of clip_mini, which was pre-trained on captions of glyphs (`benchmarks/glyph_pool.py`).

The tokenizer spells unknown words letter by letter. Digits are not in the pool; their names appear in
captions of glyphs that look like one ("a zero shape" for the letter o), so that the text tower learns words
that class prompts such as `a picture of a zero` use.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

import torch
from torch import Tensor

LETTERS = (
    "A", "B", "D", "E", "F", "G", "H", "J", "L", "M", "N", "Q", "R", "T", "Y",
    "a", "b", "d", "e", "f", "g", "h", "j", "m", "n", "q", "r", "t", "y",
    "Cc", "Il", "Kk", "Oo", "Pp", "Ss", "Uu", "Vv", "Ww", "Xx", "Zz",
)  # fmt: skip
"""Classes of Latin letters, each a string of the characters of the class."""

SYMBOLS = tuple("ΓΔΘΛΞΠΣΦΨΩαβγδεζηθλμξπστφψω&@#%?+=<>{}[]/\\~§¶€£¥∞∫√∂∇±÷≠→↑")
"""Classes of one character each, drawn in SYMBOL_FONTS, which have all of them."""

NUM_SCRIBBLES = 24
"""Number of classes of invented pen strokes; a class is a path, and each picture bends the path."""

CONTEXT = 32
"""Length of a tokenized text, with the tokens for begin and end; longer texts are cut."""

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")

TEMPLATES = ("a picture of a {}", "a photo of a {}", "an image of a {}", "{}")

STYLES = ("", "white on black", "on a photo")
"""Words of a caption for the kind of the background: coloured (no words), black, a photograph."""

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
