"""Makes tokens of the texts of a data set, once, with the tokenizer of the model.

Prompt and answer are made tokens apart and joined, so that no text is searched for what is learned. Every
answer ends with the end-of-sequence token. Where a text is too long, the prompt is cut, but not below half of
the size, and then the answer at its end.

A conversation has the tokens of `apply_chat_template`, which writes it as one text. What is learned are the
marks of the template (`{% generation %}`) where it has some. Otherwise it is what the template writes for an
answer after the prompt for it, as the difference between longer and shorter conversations shows.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np

from rayfed.data.source import Listing, Source, task_of
from rayfed.data.text import Text, Tokens, with_types
from rayfed.data.tokenizer import TYPES, digest_of, load_tokenizer
from rayfed.errors import ConfigError, DataError, RayFedError, one_line
from rayfed.objective import LANGUAGE_MODELING

Side = Literal["left", "right"]

PLACE = "{prompt}"
"""Stands for the prompt in `data.template`."""

ANSWERING = "assistant"
"""Role of the messages that a model learns to write."""

PLAIN = "{role}: {content}\n"
"""A message where the tokenizer has no template of conversations."""

MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""The mark of a template for what the assistant writes, as the library looks for it."""

HALF = re.compile("[\ud800-\udfff]")
"""Halves of characters, which JSON can hold, and which are no text."""

Message = Mapping[str, Any]
"""A message of a conversation, as templates take it."""


class RefusedError(Exception):
    """Why a text cannot be made tokens, as the end of a sentence that begins with its row."""


def _check_characters(text: str) -> None:
    """Raise RefusedError for a text with half of a character, which tokenizers do not take."""
    if half := HALF.search(text):
        raise RefusedError(
            f"has half of a character (U+{ord(half[0]):04X}), as of a text that was cut inside of an emoji; "
            f"remove it"
        )


@dataclass(frozen=True, kw_only=True)
class Tokenized:
    """A reader whose samples are tokens: those of the texts of another reader.

    Attributes:
        source: The reader of the texts.
        tokenizer: Folder or name of the model whose tokenizer is used.
        template: The value of `data.template`: what a prompt becomes; None: prompt and a line break.
        truncate: The value of `data.truncate`: the end at which a text that is too long is cut.
    """

    source: Source
    tokenizer: str
    template: str | None = None
    truncate: Side | None = None

    resize: ClassVar[str] = "squash"

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def task(self) -> str:
        return task_of(self.source)

    @property
    def said(self) -> str:
        """The sentence of the reader of the texts about its columns; empty: none."""
        return str(getattr(self.source, "said", ""))

    @property
    def sparse(self) -> bool:
        """Whether domains need not have samples of every class."""
        return bool(getattr(self.source, "sparse", False))

    def fingerprint(self) -> str:
        about = [self.source.fingerprint(), digest_of(self._tokenizer), self.template, self._side]
        return f"tokens/3:{hashlib.sha256(json.dumps(about).encode()).hexdigest()}"

    def scan(self) -> Listing:
        return replace(self._listing, fingerprint=self.fingerprint())

    def decode(self, listing: Listing, index: int, size: int) -> Tokens:
        """Tokens of one sample, at most `size`; by one thread at a time.

        Raises:
            DataError: Tokenizer or template refuse the text; one line that names its row.
        """
        found = self.source.decode(self._listing, index, size)
        if not isinstance(found, Text):
            raise TypeError(f"the reader of {self.name!r} returned {type(found).__name__} instead of a Text")
        learns = self.task == LANGUAGE_MODELING
        try:
            return self._learning_tokens(found, size) if learns else self._classified_tokens(found, size)
        except (RayFedError, MemoryError):
            raise
        except RefusedError as err:
            raise DataError(f"data: {self.place(index)} {err}") from err
        except Exception as err:  # tokenizers and templates raise almost anything
            raise DataError(
                f"data: {self.place(index)} cannot be made tokens with the tokenizer of {self.tokenizer!r} "
                f"({type(err).__name__}: {one_line(err)[:200]}); correct it, or leave it out"
            ) from err

    def _classified_tokens(self, text: Text, size: int) -> Tokens:
        """Tokens of a text to classify, and of its pair, with the tokenizer's special tokens and types."""
        for own in (text.text, text.pair or ""):
            _check_characters(own)
        pieces = self._tokenizer.backend_tokenizer
        pieces.enable_truncation(size, direction=self._side)
        made = pieces.encode(text.text, text.pair)
        types = made.type_ids if TYPES in self._tokenizer.model_input_names else [0] * len(made.ids)
        flaws = ("text",) if made.overflowing else ()
        return Tokens(ids=with_types(made.ids, types), score=text.score, flaws=flaws)

    def place(self, index: int) -> str:
        """Words for a sample, for messages: its row and file where the reader says them, else its key."""
        key = str(self._listing.keys[index])
        place = getattr(self.source, "place", None)
        return str(place(key)) if place else f"text {key} of {self.name}"

    def whole(self, index: int) -> tuple[list[int], list[int]]:
        """Tokens before the first answer of a text, and those of this answer, of any length.

        Args:
            index: Index of the sample in the listing.
        """
        found = self.source.decode(self._listing, index, 0)
        assert isinstance(found, Text)
        prompt: list[int] = []
        for ids, learned in self._parts(found):
            if learned:
                return prompt, ids
            prompt += ids
        return prompt, []

    def shortened(self, prompt: list[int], most: int) -> list[int]:
        """A prompt of at most so many tokens, cut as `data.truncate` says; its first special token stays."""
        begin = len(self._begin)
        over = max(0, len(prompt) - most)
        where = begin if self._side == "left" else max(begin, len(prompt) - over)
        return (prompt[:where] + prompt[where + over :])[:most]

    @cached_property
    def _tokenizer(self) -> Any:
        return load_tokenizer(self.tokenizer)

    @cached_property
    def _listing(self) -> Listing:
        return self.source.scan()

    @property
    def _side(self) -> Side:
        """End at which texts are cut: of a prompt the beginning, of a text to classify the end."""
        return self.truncate or ("left" if self.task == LANGUAGE_MODELING else "right")

    def _learning_tokens(self, text: Text, size: int) -> Tokens:
        """Tokens of a prompt and an answer, of a conversation, or of a text that is learned as a whole."""
        parts = list(self._parts(text))
        ids = [token for own, _ in parts for token in own]
        learned = [flag for own, flag in parts for _ in own]
        flaws: list[str] = []
        answers = [own for own, flag in parts if flag]
        if text.answer is not None and any(own == [self._end] for own in answers):
            flaws.append("empty")
        if any(self._tokenizer.eos_token_id not in own for own in answers):
            flaws.append("endless")
        if len(ids) > size:
            first = learned.index(1) if 1 in learned else len(ids)
            begin = len(self._begin)
            prompt, room = max(0, first - begin), size - begin
            kept = min(prompt, max((room + 1) // 2, room - (len(ids) - first)))
            flaws += ["prompt"] if kept < prompt else []
            whole_text = text.answer is None and not text.messages
            flaws += ["text" if whole_text else "answer"] if begin + kept + len(ids) - first > size else []
            where = begin if self._side == "left" else begin + kept
            ids, learned = (row[:where] + row[where + prompt - kept :] for row in (ids, learned))
        return Tokens(
            ids=np.array(ids[:size], dtype=np.int32),
            learned=np.array(learned[:size], dtype=np.uint8),
            flaws=tuple(flaws),
        )

    def _parts(self, text: Text) -> Iterator[tuple[list[int], int]]:
        """Token ids, and 1 where the model learns to write them."""
        if text.messages:
            has_template = bool(self._tokenizer.chat_template)
            yield from self._conversation(text) if has_template else self._without_template(text)
            return
        yield self._begin, 0
        if text.answer is None:
            yield [*self._ids(text.text), self._end], 1
        else:
            yield self._ids((self.template or f"{PLACE}\n").replace(PLACE, text.text)), 0
            yield [*self._ids(text.answer), self._end], 1

    def _without_template(self, text: Text) -> Iterator[tuple[list[int], int]]:
        """The parts of a conversation whose messages are written one after the other."""
        if text.tools or any(message.keys() - {"role", "content"} for message in text.messages):
            raise RefusedError(
                f"has tools, or messages with more than role and content, and the tokenizer of "
                f"{self.tokenizer!r} has no template of conversations to write them; choose a model that has "
                f"one, or leave them out"
            )
        yield self._begin, 0
        for place, message in enumerate(text.messages):
            role, content = message["role"], message["content"]
            answers = role == ANSWERING
            shown = PLAIN.format(role=role, content="" if answers else content)
            yield self._ids(shown.removesuffix("\n") if answers else shown), 0
            if answers:
                yield [*self._ids(content), self._end], int(place >= (text.asked or 0))

    def _conversation(self, text: Text) -> Iterator[tuple[list[int], int]]:
        """The parts of a conversation as the tokenizer's template writes it."""
        turns, tools = text.messages, text.tools
        marked = MARKS.search(self._tokenizer.get_chat_template(tools=list(tools) or None))
        if text.asked is None and marked:
            _check_characters(self._render(turns, tools))
            made = self._apply(
                turns, tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
            )
            ids, learned = list(made["input_ids"]), list(made["assistant_masks"])
        else:
            whole = self._render(turns, tools)
            ids = self._ids(whole)
            learned = [0] * len(ids)
            if text.asked is None:
                answers = [place for place, turn in enumerate(turns) if turn["role"] == ANSWERING]
                spans = [
                    (self._start(turns, tools, i, whole), self._stop(turns, tools, i, whole)) for i in answers
                ]
            else:
                spans = [(self._start(turns, tools, text.asked, whole), len(whole))]
            for first, last in spans:
                begin, end = (self._tokens_before(whole, place, ids) for place in (first, last))
                learned[begin:end] = [1] * (end - begin)
        places = [i for i in range(len(ids)) if i == 0 or learned[i] != learned[i - 1]]
        for begin, end in zip(places, [*places[1:], len(ids)], strict=True):
            yield ids[begin:end], int(learned[begin])

    def _tokens_before(self, whole: str, place: int, ids: Sequence[int]) -> int:
        """Number of the tokens of a text that end at a place in it or before.

        Args:
            place: The place, as a number of characters.
            ids: The tokens of the text.
        """
        if place >= len(whole):
            return len(ids)
        pairs = zip(self._ids(whole[:place]), ids, strict=False)
        return next(
            (i for i, (one, other) in enumerate(pairs) if one != other), len(self._ids(whole[:place]))
        )

    def _start(self, turns: Sequence[Message], tools: Sequence[Any], first: int, whole: str) -> int:
        """Where an answer begins in a conversation that is written, in characters.

        That is behind what the template writes to ask for it. Where it asks otherwise, or for nothing, as
        before a first message, it is where the answer differs from another one.

        Args:
            turns: All messages.
            tools: Those of the conversation.
            first: Number of the message that answers.
            whole: What the template writes for all messages.
        """
        for add in (True, False):
            asked = self._rendered(turns[:first], tools, add)
            if asked is not None and whole.startswith(asked) and (add or turns[first]["role"] != ANSWERING):
                return len(asked)
        if turns[first]["role"] == ANSWERING:
            content = str(turns[first]["content"]).lstrip()
            other = self._rendered(
                [*turns[:first], {"role": ANSWERING, "content": "1" if content[:1] == "0" else "0"}], tools
            )
            if other is not None and other[:1] == whole[:1]:
                pairs = enumerate(zip(whole, other, strict=False))
                return next((i for i, (own, its) in pairs if own != its), min(len(whole), len(other)))
        raise self._unclear(first)

    def _stop(self, turns: Sequence[Message], tools: Sequence[Any], last: int, whole: str) -> int:
        """Where an answer ends in a conversation that is written. Args: as of `_start`."""
        until = whole if last == len(turns) - 1 else self._rendered(turns[: last + 1], tools)
        if until is None or not whole.startswith(until):
            raise self._unclear(last)
        return len(until)

    def _unclear(self, place: int) -> RefusedError:
        return RefusedError(
            f"has an answer (message {place + 1}) that cannot be told from what stands before and behind it, "
            f"because the template of {self.tokenizer!r} writes a message otherwise when others follow; mark "
            f"answers with {{% generation %}} in chat_template.jinja, or write prompt and completion"
        )

    def _rendered(self, turns: Sequence[Message], tools: Sequence[Any], add: bool = False) -> str | None:
        """A part of a conversation as the template writes it; None: it refuses it."""
        if not turns:
            return None
        try:
            return self._render(turns, tools, add)
        except RefusedError:
            return None

    def _render(self, turns: Sequence[Message], tools: Sequence[Any], add: bool = False) -> str:
        text: str = self._apply(turns, tools, tokenize=False, add_generation_prompt=add)
        return text

    def _apply(self, turns: Sequence[Message], tools: Sequence[Any], **options: Any) -> Any:
        """The text or the tokens that the template makes of a conversation.

        Raises:
            RefusedError: It does not write such a conversation.
        """
        own = [dict(turn) for turn in turns]
        try:
            return self._tokenizer.apply_chat_template(own, tools=list(tools) or None, **options)
        except Exception as err:  # what a template raises, and whatever it meets
            raise RefusedError(
                f"is refused by the template of {self.tokenizer!r}: {one_line(err)[:200]}; change its "
                f"messages, or leave it out"
            ) from err

    def _ids(self, text: str) -> list[int]:
        _check_characters(text)
        ids: list[int] = self._tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    @cached_property
    def _begin(self) -> list[int]:
        """The token that the tokenizer puts before every text, if it does."""
        first = self._tokenizer("")["input_ids"][:1]
        return list(first) if first and first[0] == self._tokenizer.bos_token_id else []

    @cached_property
    def _end(self) -> int:
        end: int | None = self._tokenizer.eos_token_id
        if end is None:
            raise ConfigError(
                f"model.name: the tokenizer of {self.tokenizer!r} has no end-of-sequence token, with which "
                f"every answer ends; set eos_token in its tokenizer_config.json"
            )
        return end
