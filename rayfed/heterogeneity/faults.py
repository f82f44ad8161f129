"""Injected faults: clients that cannot be reached, drop out, are slow or send wrong answers.

Whether a fault happens depends on the seed, the round and the client only, so it is the same on every
machine, with every executor and after a resume. Time is virtual: it is computed from the training examples
and bytes of a visit, not measured.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from rayfed.clients import ByClient
from rayfed.heterogeneity.devices import Devices, Sessions
from rayfed.heterogeneity.traces import Trace, TraceEntry
from rayfed.seeds import generator
from rayfed.types import RESIDUAL, Broadcast, Fraction, NonNegative, Positive, num_bytes

NO_ENTRY = TraceEntry()

Attack: TypeAlias = Literal["none", "labels", "noise", "sign_flip"]
"""What a client does to its answer on purpose."""

HONEST: Attack = "none"


@dataclass(frozen=True, kw_only=True)
class FaultsConfig:
    """The config section `faults`; no faults by default.

    Probabilities apply to each client in each round independently. A value may be one number for all clients,
    or a number by tier.

    Attributes:
        tiers: Tiers of clients: either the share of clients by tier, where the seed decides which clients a
            tier has, or the tier by domain or client id.
        availability: Probability that a client can be reached in a round.
        dropout: Probability that all answers of a client in a round are lost.
        speed: Speed of computation relative to `seconds_per_example`; above 0.
        bandwidth: Bytes per second of a client, for download and upload; none: transfers take no time.
        seconds_per_example: Virtual seconds to train on one example with all blocks at speed 1; setting it
            turns the virtual clock on.
        deadline: Virtual seconds after which the server stops waiting for the answers of an exchange.
        attack: What clients do instead of sending what they have trained. labels: they train with label
            C - 1 - y instead of y. noise: they send what they received plus Gaussian noise. sign_flip: they
            send the negative of their change.
        attack_scale: Standard deviation of the noise, or the factor of the negative change.
        trace: Path of a CSV or Parquet file with values for single rounds and clients.
        devices: Path of a trace of devices, which gives clients their speed and bandwidth.
        sessions: Path of a trace of devices, which says when clients can be reached.
    """

    tiers: dict[str, float] | dict[str, str] = field(default_factory=dict)
    availability: Fraction | dict[str, Fraction] = 1.0
    dropout: Fraction | dict[str, Fraction] = 0.0
    speed: Positive | dict[str, Positive] = 1.0
    bandwidth: Positive | dict[str, Positive] | None = None
    seconds_per_example: NonNegative | None = None
    deadline: Positive | None = None
    attack: Attack | dict[str, Attack] = HONEST
    attack_scale: Positive | dict[str, Positive] = 1.0
    trace: str | None = None
    devices: str | None = None
    sessions: str | None = None


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The values of one client, from its tier; fields as in `FaultsConfig`."""

    availability: float
    dropout: float
    speed: float
    bandwidth: float | None
    attack: Attack = HONEST
    attack_scale: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Faults:
    """The faults of an experiment; rounds are counted from 0.

    Attributes:
        seed: Seed of the experiment.
        profiles: Probabilities, speed and bandwidth by client.
        work: Number of training examples in one visit, over all epochs, by client.
        trace: Values that replace those of the profile and of the random draws.
        seconds_per_example: Virtual seconds for one example at speed 1 with all blocks; None turns the
            virtual clock off.
        deadline: Longest virtual time of an exchange in seconds; None for no deadline.
        devices: Speed and bandwidth by client, in place of those of the profiles; None: there are none.
        sessions: When clients can be reached; None: always.
        now: Virtual seconds at the beginning of the round.
    """

    seed: int
    profiles: ByClient[Profile]
    work: ByClient[int]
    trace: Trace = field(default_factory=dict)
    seconds_per_example: float | None = None
    deadline: float | None = None
    devices: Devices | None = None
    sessions: Sessions | None = None
    now: float = 0.0

    def at(self, time: float) -> Faults:
        """The same at the beginning of a round, in virtual seconds."""
        return replace(self, now=time)

    @property
    def wait(self) -> float:
        """Virtual seconds that a round lasts in which nobody is available: until the next session begins."""
        return self.sessions.wait(self.now) if self.sessions is not None else 0.0

    @property
    def has_clock(self) -> bool:
        """Whether the virtual clock is on."""
        return self.seconds_per_example is not None

    @property
    def limits_availability(self) -> bool:
        """Whether any client may be out of reach in any round."""
        if self.sessions is not None:
            return True
        return any(p.availability < 1 for p in self.profiles.different) or any(
            entry.available is False for entry in self.trace.values()
        )

    @property
    def has_attackers(self) -> bool:
        """Whether any client attacks."""
        return any(profile.attack != HONEST for profile in self.profiles.different)

    def is_available(self, round: int, client: str) -> bool:
        """Whether the client can be reached in this round."""
        if self.sessions is not None and not self.sessions.is_open(client, self.now):
            return False
        given = self._entry(round, client).available
        return self._happens("availability", round, client) if given is None else given

    def drops_out(self, round: int, client: str) -> bool:
        """Whether all answers of the client in this round are lost."""
        given = self._entry(round, client).dropout
        return self._happens("dropout", round, client) if given is None else given

    def seconds(self, client: str, sent: Broadcast, share: float, trains: bool) -> float:
        """Virtual seconds of a visit; 0 without the virtual clock.

        They are examples x share x seconds_per_example / speed, plus bytes / bandwidth. A visit that does not
        train takes the time of its download only. The upload is assumed to be the trained tensors among those
        that were downloaded, so that the time is known before the client trains.

        Args:
            client: Id of the visited client.
            sent: The message that it receives.
            share: Share of the backbone's blocks that the client holds, in (0, 1].
            trains: Whether the visit is part of the training exchange.
        """
        if self.seconds_per_example is None:
            return 0.0
        speed, bandwidth = self._pace(client)
        traffic = sent.num_bytes()
        seconds = 0.0
        if trains:
            speed = self._entry(sent.round, client).speed or speed
            seconds = self.work[client] * share * self.seconds_per_example / speed
            traffic += sum(
                num_bytes(v) for n, v in sent.params.items() if sent.holds(n) and not n.endswith(RESIDUAL)
            )
        return seconds if bandwidth is None else seconds + traffic / bandwidth

    def _pace(self, client: str) -> tuple[float, float | None]:
        """Speed and bandwidth of a client."""
        if self.devices is not None:
            return self.devices.of(client)
        profile = self.profiles[client]
        return profile.speed, profile.bandwidth

    def cause(self, round: int, client: str, seconds: float) -> str:
        """Why the answer of a client is lost: `dropout` or `deadline`; empty if it arrives.

        Args:
            round: Round index, from 0.
            client: Id of the client.
            seconds: Virtual seconds of the visit.
        """
        if self.drops_out(round, client):
            return "dropout"
        return "deadline" if self.deadline is not None and seconds > self.deadline else ""

    def duration(self, seconds: Mapping[str, float], answered: Collection[str]) -> float:
        """Virtual seconds of an exchange: until its last answer, or the deadline if an answer is missing.

        Without a deadline the server is assumed to notice a lost answer immediately.

        Args:
            seconds: Virtual seconds of the visit of each client, by id.
            answered: Ids of the clients whose answer arrived.
        """
        if self.has_clock and self.deadline is not None and len(answered) < len(seconds):
            return self.deadline
        return max((seconds[cid] for cid in answered), default=0.0)

    def _entry(self, round: int, client: str) -> TraceEntry:
        return self.trace.get((round, client), NO_ENTRY)

    def _happens(self, what: str, round: int, client: str) -> bool:
        probability: float = getattr(self.profiles[client], what)
        return bool(generator(self.seed, "faults", what, round, client).random() < probability)
