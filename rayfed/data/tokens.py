"""Makes tokens of the texts of a data set, once, with the tokenizer of the model.

Prompt and answer are made tokens apart and joined, so that no text is searched for what is learned. Every
answer ends with the end-of-sequence token, or as the template of a conversation ends it. Where a text is too
long, the prompt is cut, but not below half of the size, and then the answer at its end.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from rayfed.data.source import Listing, Source, task_of
from rayfed.data.text import Text, Tokens
from rayfed.errors import ConfigError, one_line
from rayfed.objective import LANGUAGE_MODELING

Side = Literal["left", "right"]

PLACE = "{prompt}"
"""Stands for the prompt in `data.template`."""

ANSWERING = "assistant"
"""Role of the messages that a model learns to write."""

PLAIN = "{role}: {content}\n"
"""A message where the tokenizer has no template of conversations."""


ANSWER_SECONDS = 5.0
"""Seconds in which the hub must begin to answer."""


@contextmanager
def answered_or_cached(name: str = "") -> Iterator[bool]:
    """Whether the hub answers. If it does not, the library uses its cache while the block runs.

    Any answer counts, also one that says that the server is busy: then the library tries again, as it does by
    default. Without a network these tries would take half a minute.

    Args:
        name: What is loaded; the absolute path of a folder needs no hub.
    """
    from huggingface_hub import constants, get_session

    before = constants.HF_HUB_OFFLINE
    if not before and not Path(name).is_absolute():
        try:
            get_session().head(constants.ENDPOINT, timeout=ANSWER_SECONDS)
        except Exception:  # the kinds of errors differ between versions of the library
            constants.HF_HUB_OFFLINE = True
    try:
        yield not constants.HF_HUB_OFFLINE
    finally:
        constants.HF_HUB_OFFLINE = before


def load_tokenizer(name: str) -> Any:
    """The tokenizer of a model of transformers, from a folder or from the hub or its cache.

    Args:
        name: A folder, or the name of the model on the hub.

    Raises:
        ConfigError: It cannot be loaded, or is not one of the fast ones.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads do not survive a fork
    from transformers import AutoTokenizer

    try:
        with answered_or_cached(name):
            found = AutoTokenizer.from_pretrained(name, trust_remote_code=False, use_fast=True)
    except Exception as err:  # the library raises almost anything
        raise ConfigError(
            f"model.name: the tokenizer of {name!r} cannot be loaded ({one_line(err)[:200]}); it lies in the "
            f"folder of the model, as tokenizer.json"
        ) from err
    if not getattr(found, "is_fast", False):
        raise ConfigError(f"model.name: {name!r} has no tokenizer.json, which holds a fast tokenizer")
    found.backend_tokenizer.no_truncation()
    found.backend_tokenizer.no_padding()
    return found


def digest_of(tokenizer: Any) -> str:
    """A hash of everything that decides which tokens a text becomes."""
    rules = json.loads(tokenizer.backend_tokenizer.to_str())
    for set_by_each_call in ("truncation", "padding"):
        rules.pop(set_by_each_call, None)
    parts = [
        json.dumps(rules),
        json.dumps({key: str(value) for key, value in sorted(tokenizer.special_tokens_map.items())}),
        str(tokenizer.chat_template),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


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
    def sparse(self) -> bool:
        """Whether domains need not have samples of every class."""
        return bool(getattr(self.source, "sparse", False))

    def fingerprint(self) -> str:
        about = [self.source.fingerprint(), digest_of(self._tokenizer), self.template, self._side]
        return f"tokens/2:{hashlib.sha256(json.dumps(about).encode()).hexdigest()}"

    def scan(self) -> Listing:
        return replace(self._listing, fingerprint=self.fingerprint())

    def decode(self, listing: Listing, index: int, size: int) -> Tokens:
        """Tokens of one sample, at most `size`; by one thread at a time."""
        found = self.source.decode(self._listing, index, size)
        if not isinstance(found, Text):
            raise TypeError(f"the reader of {self.name!r} returned {type(found).__name__} instead of a Text")
        if self.task == LANGUAGE_MODELING:
            return self._learning_tokens(found, size)
        pieces = self._tokenizer.backend_tokenizer
        pieces.enable_truncation(size, direction=self._side)
        made = pieces.encode(found.text, found.pair)
        flaws = ("text",) if made.overflowing else ()
        return Tokens(ids=np.array(made.ids, dtype=np.int32), score=found.score, flaws=flaws)

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
            yield from self._conversation(text.messages)
            return
        yield self._begin, 0
        if text.answer is None:
            yield [*self._ids(text.text), self._end], 1
        else:
            yield self._ids((self.template or f"{PLACE}\n").replace(PLACE, text.text)), 0
            yield [*self._ids(text.answer), self._end], 1

    def _conversation(self, messages: tuple[tuple[str, str], ...]) -> Iterator[tuple[list[int], int]]:
        """The parts of a conversation; what the tokenizer's template adds before an answer is not learned."""
        if not self._tokenizer.chat_template:
            yield self._begin, 0
            for role, content in messages:
                answers = role == ANSWERING
                shown = PLAIN.format(role=role, content="" if answers else content)
                yield self._ids(shown.removesuffix("\n") if answers else shown), 0
                if answers:
                    yield [*self._ids(content), self._end], 1
            return
        turns = [{"role": role, "content": content} for role, content in messages]
        before = ""
        for place, (role, _) in enumerate(messages):
            if role == ANSWERING:
                prompt = self._render(turns[:place], add=True)
                whole = self._render(turns[: place + 1], add=False)
                if not prompt.startswith(before) or not whole.startswith(prompt):
                    raise ConfigError(
                        f"data.columns.messages: the template of {self.tokenizer!r} changes earlier messages "
                        f"when one is added, so that answers cannot be told from prompts; use prompt and "
                        f"completion"
                    )
                yield self._ids(prompt[len(before) :]), 0
                yield self._ids(whole[len(prompt) :]), 1
                before = whole
        if not before:
            yield self._ids(self._render(turns, add=False)), 0

    def _render(self, messages: list[dict[str, str]], add: bool) -> str:
        text: str = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add)
        return text

    def _ids(self, text: str) -> list[int]:
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
