"""Texts: their samples before and after they are made tokens, and batches of texts of different lengths.

A batch of texts has one row for each text and is padded on the right to the length of its longest text,
rounded up to a multiple of 8 and at most the length that the model takes. So the padded length follows from
the batch of a client alone: neither the process that runs it nor other clients change it. Pads are -1, which
is no token, so that what is padded is known by position; a model never sees them.

A number in such a batch has two parts: the token, and its type where the tokenizer gives tokens of a text and
of its pair different types (`with_types`). So types go wherever tokens go.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rayfed.objective import IGNORED

WINDOW = 80
"""Characters of an example of the Shakespeare data set, and of its model's input by default."""

SYMBOLS = 80
"""Size of LEAF's alphabet, and of the embedding of the model."""

PAD = -1
"""Value behind the end of a text in a batch of tokens."""

TYPE_BITS = 24
"""The bits of a number below this one are the token, those from it on the type of the token."""

MOST_TYPES = 127
"""Types of tokens that there can be, in the bits of an int32."""

MULTIPLE = 8
"""Padded lengths are multiples of this number."""


@dataclass(frozen=True, kw_only=True)
class Text:
    """A sample of a data set of texts, as a reader returns it.

    Attributes:
        text: The text to classify, or the prompt before an answer.
        pair: A second text that belongs to the first one, such as the hypothesis to a premise; None: none.
        answer: What a language model learns to write after the prompt; None: it learns all of `text`.
        messages: The messages of a conversation, as templates of conversations take them, in place of prompt
            and answer: `role`, `content`, and what else they hold, such as `tool_calls`.
        asked: Number of messages that are the prompt, after which everything is learned; None: all turns of
            the assistant are learned.
        tools: Descriptions of the functions that the assistant may call, for the template.
        score: The number that a regression learns for the text; None: it is for another task.
    """

    text: str = ""
    pair: str | None = None
    answer: str | None = None
    messages: tuple[Mapping[str, Any], ...] = ()
    asked: int | None = None
    tools: tuple[Any, ...] = ()
    score: float | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Tokens:
    """A sample after it was made tokens.

    Attributes:
        ids: Token ids, with their types (`with_types`) where there are several, int32, shape (L,).
        learned: For language models, whether the model learns to write a token, uint8, shape (L,).
        score: For regression, the target.
        flaws: What is wrong with the text, or was cut because it is longer than the model takes, of `FLAWS`.
    """

    ids: NDArray[np.int32]
    learned: NDArray[np.uint8] | None = None
    score: float | None = None
    flaws: tuple[str, ...] = ()


def with_types(ids: Sequence[int], types: Sequence[int]) -> NDArray[np.int32]:
    """Tokens and their types as one number each, int32, shape (L,); with types of 0 these are the tokens.

    Args:
        ids: Token ids.
        types: Types of the tokens, in BERT 0 for those of a text and 1 for those of its pair.

    Raises:
        ValueError: A number is too large to be stored.

    >>> with_types([5, 6], [0, 1]).tolist() == [5, 6 + 2**24]
    True
    """
    if (
        max(ids, default=0) >= 1 << TYPE_BITS
        or max(types, default=0) > MOST_TYPES
        or min(types, default=0) < 0
    ):
        raise ValueError(f"tokens are below {1 << TYPE_BITS:,} and their types from 0 to {MOST_TYPES}")
    return np.array(ids, dtype=np.int32) + (np.array(types, dtype=np.int32) << TYPE_BITS)


CUT = {
    "answer": "the answer of {}",
    "prompt": "a part of the prompt of {}",
    "text": "a part of {}",
}
"""Parts of a text that can be cut, with words for a number of texts."""

FLAWS = (*CUT, "empty", "endless")
"""Texts are counted for these: what was cut, empty answers, answers without an end that is learned."""


def flaw_bits(flaws: Sequence[str]) -> int:
    """Flaws of a text as one number, which has a bit for each of `FLAWS`."""
    return sum(1 << FLAWS.index(flaw) for flaw in flaws)


def count_flaws(bits: NDArray[np.uint8]) -> dict[str, int]:
    """Number of texts with each flaw. Args: bits: `flaw_bits` of each text, shape (N,)."""
    return {flaw: int((bits >> place & 1).sum()) for place, flaw in enumerate(FLAWS)}


def cut_in_words(flaws: Mapping[str, int], texts: int, size: int) -> str:
    """Number of texts that are not whole, and the key to change; empty where all are whole.

    Args:
        flaws: Number of texts by flaw.
        texts: Number of all texts.
        size: Tokens that the model takes.

    >>> cut_in_words({"answer": 3}, 9, 128)
    'cut at model.size=128 tokens, of 9 texts: the answer of 3 (33 %); a larger model.size cuts fewer'
    """
    found = ((words, flaws.get(kind, 0)) for kind, words in CUT.items())
    parts = [
        words.format(f"{count:,} ({count / texts:.0%})".replace("%", " %")) for words, count in found if count
    ]
    sentence = f"cut at model.size={size} tokens, of {texts:,} texts: {', '.join(parts)}"
    return f"{sentence}; a larger model.size cuts fewer" if parts else ""


Rows: TypeAlias = Any
"""Numbers of rows, or a slice, as NumPy takes them."""


def padded_length(longest: int, most: int) -> int:
    """Length to which a batch of texts is padded.

    Args:
        longest: Tokens of its longest text.
        most: Tokens that the model takes.

    >>> padded_length(13, 128), padded_length(0, 128), padded_length(127, 127)
    (16, 8, 127)
    """
    return min(most, max(1, -(-longest // MULTIPLE)) * MULTIPLE)


@dataclass(frozen=True, eq=False)
class Inputs:
    """Texts of different lengths; indexing with row numbers gives a padded batch, int32, shape (B, L).

    Attributes:
        tokens: Tokens of all texts with their types (`with_types`), one after the other, int32.
        starts: Position of the first token of each text, and the number of all tokens, int64, shape (N + 1,).
        size: Tokens that the model takes.
    """

    tokens: NDArray[np.int32]
    starts: NDArray[np.int64]
    size: int

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Number of tokens of each text, int64, shape (N,)."""
        return np.diff(self.starts)

    def __getitem__(self, rows: Rows) -> NDArray[np.int32]:
        """Token ids of a batch, and `PAD` behind the end of each text."""
        places, there = self.places(rows)
        batch = np.full(there.shape, PAD, dtype=np.int32)
        batch[there] = self.tokens[places[there]]
        return batch

    def places(self, rows: Rows) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Positions of a batch in `tokens`, and where there is a token at all, both shape (B, L)."""
        chosen = np.arange(len(self))[rows]
        first = self.starts[chosen]
        lengths = self.starts[chosen + 1] - first
        length = padded_length(int(lengths.max(initial=0)), self.size)
        steps = np.arange(length)
        return first[:, None] + steps, steps < lengths[:, None]


@dataclass(frozen=True, eq=False)
class Targets:
    """Targets of language models: the token after each position where that one is learned, else `IGNORED`.

    Indexing with row numbers gives int64, shape (B, L), for the same batch of `inputs`.

    Attributes:
        inputs: The texts.
        learned: Whether a token is learned, for all tokens, uint8.
    """

    inputs: Inputs
    learned: NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, rows: Rows) -> NDArray[np.int64]:
        """Targets of a batch."""
        places, there = self.inputs.places(rows)
        targets = np.full(there.shape, IGNORED, dtype=np.int64)
        follows = there[:, 1:]
        tokens, learned = (values[places[:, 1:][follows]] for values in (self.inputs.tokens, self.learned))
        targets[:, :-1][follows] = np.where(learned == 1, tokens, IGNORED)
        return targets

    def learned_in(self, rows: NDArray[np.int64]) -> int:
        """Number of learned tokens of these texts; the first token of a text is never learned."""
        starts = self.inputs.starts
        return sum(int(self.learned[starts[i] + 1 : starts[i + 1]].sum()) for i in rows)

    @property
    def counts(self) -> NDArray[np.int64]:
        """Number of learned tokens of each text, shape (N,); the first token of a text is never learned."""
        sums = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.learned, dtype=np.int64)])
        first = self.learned[np.minimum(self.inputs.starts[:-1], max(len(self.learned) - 1, 0))]
        has_any = self.inputs.lengths > 0
        return np.diff(sums[self.inputs.starts]) - np.where(has_any, first, 0)
