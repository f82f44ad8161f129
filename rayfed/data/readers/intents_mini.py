"""The embedded data set intents-mini: made-up requests of 12 intents in four styles of writing.

The styles are domains: the same intents, written politely, in keywords, at length, or with typing errors. So
they differ as the clients of a real service do, and what is learned in three styles can be tested in the
fourth.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata, resources

import numpy as np

from rayfed.data.source import Listing, choose_classes
from rayfed.data.text import Text
from rayfed.objective import TEXT_CLASSIFICATION
from rayfed.seeds import generator

EACH = 40
"""Requests of each intent in each style."""

SLOTS: Mapping[str, tuple[str, ...]] = {
    "city": ("paris", "oslo", "lima", "cairo", "boston", "tokyo", "madrid", "prague", "dublin", "milan"),
    "day": ("today", "tomorrow", "on monday", "on friday", "this weekend", "next week", "tonight"),
    "time": ("at six", "at half past seven", "at noon", "at nine", "in ten minutes", "in an hour"),
    "person": ("my sister", "anna", "the office", "my landlord", "john", "the dentist", "mum"),
    "thing": ("milk", "batteries", "a lamp", "bread", "a charger", "coffee", "printer paper", "apples"),
    "song": ("some jazz", "a quiet song", "my running list", "the radio", "something by bach", "old hits"),
    "room": ("the kitchen", "the bedroom", "the hall", "the garage", "upstairs", "the study"),
    "food": ("a pizza", "two soups", "noodles", "a salad", "three burgers", "dumplings"),
    "amount": ("twenty euros", "fifty dollars", "the rent", "ten pounds", "what i owe"),
    "word": ("bridge", "thank you", "station", "happy", "to borrow", "umbrella"),
    "tongue": ("french", "spanish", "polish", "japanese", "dutch", "italian"),
}

INTENTS: Mapping[str, tuple[str, ...]] = {
    "weather": (
        "what is the weather in {city} {day}",
        "will it rain in {city} {day}",
        "is it cold in {city} {day}",
    ),
    "alarm": ("wake me up {day} {time}", "set an alarm {time}", "change my alarm to ring {time}"),
    "call": ("call {person}", "phone {person} {day}", "ring up {person} {time}"),
    "shopping": (
        "put {thing} on the shopping list",
        "i need to buy {thing}",
        "add {thing} to what we buy {day}",
    ),
    "music": ("play {song} in {room}", "put on {song} {time}", "i want to hear {song}"),
    "lights": (
        "turn on the lights in {room} {time}",
        "make it brighter in {room}",
        "switch the lamps off in {room} {time}",
    ),
    "order_food": ("order {food} for dinner", "get {food} delivered {time}", "i would eat {food} {day}"),
    "pay": ("send {amount} to {person}", "transfer {amount} {day}", "pay {amount} to {person} {day}"),
    "translate": (
        "how do you say {word} in {tongue}",
        "translate {word} into {tongue}",
        "what is {tongue} for {word}",
    ),
    "train": (
        "when does the train to {city} leave {day}",
        "book a seat to {city} {day}",
        "a train to {city} {time}",
    ),
    "heating": (
        "make it warmer in {room} {day}",
        "turn the heating down {day}",
        "set {room} to twenty degrees {time}",
    ),
    "meeting": (
        "plan a meeting with {person} {day}",
        "am i free {day} {time}",
        "move my appointment with {person} {day}",
    ),
}

POLITE = (
    "could you please {}",
    "would you kindly {}, thank you",
    "i would be grateful if you could help: {}",
    "please, {}",
)
CHATTY = (
    "hey there, so i was wondering, {}, if that is alright",
    "ok listen, it has been a long day and {}",
    "right, before i forget again, {}, you know",
    "well, everybody keeps asking me, so {}",
)
LITTLE = frozenset(
    (
        *("the", "a", "an", "is", "it", "in", "to", "of", "my", "do", "you", "how", "what", "will", "does"),
        *("when", "i", "would", "put", "that", "for", "on", "am", "me", "we", "with", "up"),
    )
)
"""Words that a request in keywords leaves out."""


def _polite(text: str, rng: np.random.Generator) -> str:
    return POLITE[rng.integers(len(POLITE))].format(text)


def _keywords(text: str, rng: np.random.Generator) -> str:
    words = [word for word in text.split() if word not in LITTLE]
    return " ".join(words)


def _chatty(text: str, rng: np.random.Generator) -> str:
    return CHATTY[rng.integers(len(CHATTY))].format(text)


def _typing_errors(text: str, rng: np.random.Generator) -> str:
    letters = list(text)
    for _ in range(max(1, len(letters) // 12)):
        place = int(rng.integers(1, len(letters) - 1))
        kind = rng.integers(3)
        if kind == 0:
            letters[place], letters[place - 1] = letters[place - 1], letters[place]
        elif kind == 1:
            letters[place] = ""
        else:
            letters[place] *= 2
    return " ".join("".join(letters).split())


STYLES = {"polite": _polite, "keywords": _keywords, "chatty": _chatty, "typos": _typing_errors}


def requests(style: str, intent: str) -> list[str]:
    """The requests of one intent in one style, all different.

    Args:
        style: A key of `STYLES`.
        intent: A key of `INTENTS`.
    """
    rng = generator(0, "intents_mini", style, intent)
    phrases = INTENTS[intent]
    found: dict[str, None] = {}
    while len(found) < EACH:
        phrase = phrases[rng.integers(len(phrases))]
        filled = phrase.format(**{slot: values[rng.integers(len(values))] for slot, values in SLOTS.items()})
        found.setdefault(STYLES[style](filled, rng))
    return list(found)


@dataclass(frozen=True, kw_only=True)
class IntentsMini:
    """Four styles with 12 intents and 40 requests of each."""

    name: str
    classes: Sequence[str] | int | None = None

    task = TEXT_CLASSIFICATION

    def fingerprint(self) -> str:
        out = hashlib.sha256(f"numpy={metadata.version('numpy')}\n{self.classes}\n".encode())
        out.update(resources.files("rayfed.data").joinpath("readers/intents_mini.py").read_bytes())
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
