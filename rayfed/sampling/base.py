"""Draws the clients of a round by a rule, and says what a rule knows of them.

A rule is a function `(round, clients, rng) -> ids`: the index of the round from 0, the clients (`Candidates`)
and a random generator that depends on the seed of the experiment and on the round. It keeps nothing between
rounds, so that a continued run draws as if it had never stopped; what it needs it reads from `clients`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, TypeAlias

import numpy as np

from rayfed.client_facts import ClientInfo, ClientTable
from rayfed.errors import ServerError, cause_of, place_of, shown
from rayfed.heterogeneity.faults import Faults
from rayfed.registry import SAMPLING_FILES, Registry
from rayfed.seeds import generator

MANY = 10_000
"""From this number of clients on, only those that might be drawn are asked whether they are available."""

Losses: TypeAlias = Callable[[Sequence[str]], Mapping[str, float]]


class Candidates(Mapping[str, ClientInfo]):
    """The clients from which those of a round are drawn: by id, in a fixed order, what the server knows.

    Attributes:
        table: The same as arrays; `table.sizes` are the numbers of training examples, shape (N,).
        wanted: Number of clients that shall be drawn (`clients_per_round`).
    """

    def __init__(
        self,
        table: ClientTable,
        wanted: int,
        is_open: Callable[[str], bool] | None = None,
        ask: Losses | None = None,
    ) -> None:
        """Say who may be drawn.

        Args:
            wanted: Number of clients that shall be drawn.
            is_open: Tells whether a client is available in this round; None: all are.
            ask: Gives the losses of clients.
        """
        self.table, self.wanted = table, wanted
        self._is_open, self._ask = is_open, ask
        self._known: dict[str, bool] = {}

    def __getitem__(self, client: str) -> ClientInfo:
        return self.table[client]

    def __iter__(self) -> Iterator[str]:
        return iter(self.table)

    def __len__(self) -> int:
        return len(self.table)

    @property
    def all_available(self) -> bool:
        """Whether no client can be unavailable in this experiment."""
        return self._is_open is None

    def is_available(self, client: str) -> bool:
        """Whether a client is available in this round. Others cannot be drawn."""
        if self._is_open is None:
            return True
        if client not in self._known:
            self._known[client] = self._is_open(client)
        return self._known[client]

    @property
    def available(self) -> tuple[str, ...]:
        """Ids of the available clients, in order. With very many clients this takes time."""
        return tuple(filter(self.is_available, self.table))

    def losses(self, clients: Iterable[str]) -> dict[str, float]:
        """The mean loss of the present global model on the training examples of each of these clients.

        They are sent the model and answer with a number, which is counted as traffic of the method in the
        exchange `draw`. A client that does not answer is missing.

        Args:
            clients: Ids of available clients.

        Raises:
            ServerError: No round has begun, as where clients are only counted before a run.
        """
        asked = self.table.in_order(set(clients))
        if not asked:
            return {}
        if self._ask is None:
            raise ServerError("sampling: losses can be asked for in a round only")
        return dict(self._ask(asked))


Rule: TypeAlias = Callable[[int, Candidates, np.random.Generator], Collection[str]]
"""Draws the ids of the clients of a round. With an attribute `usual_size`, a function `(table, wanted)`, it
says how many clients a round has where all are available, or is expected to have; else as many as wanted."""


def sample(
    candidates: Candidates, rule: Rule, seed: int, round: int, name: str = "the rule"
) -> tuple[str, ...]:
    """Ids of the cohort, in client order.

    Args:
        rule: Draws them.
        round: Round index, from 0.
        name: Name of the rule, for messages.

    Raises:
        ServerError: The rule failed, or drew what is no client, one twice, or one that is not available.
    """
    try:
        drawn = rule(round, candidates, generator(seed, "sample", round))
    except Exception as err:  # a rule may raise anything
        if isinstance(err, ServerError | OSError | MemoryError) or not place_of(err):
            raise
        raise ServerError(f"round {round + 1}: sampling: {name} failed: {cause_of(err)}") from err
    try:
        places = _places_of(drawn, candidates)
    except ValueError as err:
        raise ServerError(f"round {round + 1}: sampling: {name} {err}") from err
    return tuple(candidates.table.names[place] for place in sorted(places))


def _places_of(drawn: Any, candidates: Candidates) -> set[int]:
    """The places of drawn clients in the table.

    Raises:
        ValueError: The rule drew what it may not; says what, and what to do instead.
    """
    if isinstance(drawn, str) or not isinstance(drawn, Iterable):
        raise ValueError(f"returned {shown(drawn)}; return a list of ids of clients")  # noqa: TRY004
    places: set[int] = set()
    for one in drawn:
        if one not in candidates.table:
            raise ValueError(f"drew {shown(one)}, which is no client; draw from `clients`, a dict by id")
        if not candidates.is_available(one):
            raise ValueError(f"drew {one!r}, which is not available in this round; see clients.available")
        place = candidates.table.names.position(one)
        if place in places:
            raise ValueError(f"drew {one!r} twice; draw each client once")
        places.add(place)
    return places


def candidates_of(
    table: ClientTable, wanted: int, faults: Faults | None, round: int, ask: Losses | None = None
) -> Candidates:
    """The clients of a round from which a rule draws.

    Args:
        wanted: Number of clients to draw.
        faults: They tell who is available; None: everybody.
        round: Round index, from 0.
        ask: Gives the losses of clients.
    """
    limited = faults is not None and faults.limits_availability
    is_open = partial(faults.is_available, round) if faults is not None and limited else None
    return Candidates(table, wanted, is_open, ask)


def usual_size(clients: ClientTable, wanted: int, rule: Rule) -> int:
    """Number of clients in a round where all are available; of a draw of random size, the expected number.

    Args:
        wanted: Number of clients that shall be drawn (`clients_per_round`).
        rule: Draws them.
    """
    own = getattr(rule, "usual_size", None)
    return wanted if own is None else int(own(clients, wanted))


def some_available(
    clients: Candidates, places: range, wanted: int, rng: np.random.Generator
) -> Sequence[int]:
    """Places of the available ones among these clients; of very many, the first ones in a random order.

    Args:
        places: Places in `clients.table` of those that are meant.
        wanted: Of very many clients, this number of available ones is enough.
        rng: Draws the order.
    """

    def is_open(place: int) -> bool:
        return clients.is_available(clients.table.names[place])

    if clients.all_available:
        return places
    if len(places) < MANY:
        return [place for place in places if is_open(place)]
    available: list[int] = []
    asked: set[int] = set()
    while len(available) < wanted and 2 * len(asked) < len(places):
        place = places[int(rng.integers(len(places)))]
        if place not in asked:
            asked.add(place)
            available += [place] if is_open(place) else []
    if len(available) < wanted:  # few are available: ask all the others, too
        others = rng.permutation([place for place in places if place not in asked]).tolist()
        available += islice(filter(is_open, others), wanted - len(available))
    return available


def _takes_three(rule: Any) -> bool:
    """Whether something can be called with a round, clients and a generator."""
    if not callable(rule) or isinstance(rule, type):
        return False
    try:
        inspect.signature(rule).bind(0, None, None)
    except (TypeError, ValueError):
        return False
    return True


SAMPLERS = Registry(
    files=SAMPLING_FILES,
    attribute="draw",
    key="sampling",
    accepts=_takes_three,
    expected="a rule that draws clients, which is a function (round, clients, rng) that returns their ids",
)
