"""Injected faults: clients that cannot be reached, drop out, are slow or send wrong answers.

Whether a fault happens depends on the seed, the round and the client only, so it is the same on every
machine, with every executor and after a resume. Time is virtual: it is computed from the training examples
and bytes of a visit, not measured.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import numpy as np

from rayfed.client_facts import ByClient, ClientTable, Integers
from rayfed.errors import ConfigError, unknown
from rayfed.heterogeneity.capacity import deal_into_tiers
from rayfed.heterogeneity.traces import (
    Devices,
    Sessions,
    Trace,
    TraceEntry,
    read_devices,
    read_sessions,
    read_trace,
)
from rayfed.seeds import generator
from rayfed.types import RESIDUAL, Broadcast, Fraction, NonNegative, Positive, num_bytes

NO_ENTRY = TraceEntry()

Attack: TypeAlias = Literal["none", "labels", "noise", "sign_flip"]
"""The attacks of a client on its own answer."""

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
        """Virtual seconds of a round in which no client is available: until the next session begins."""
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


ByTier: TypeAlias = Mapping[str, float | str] | float | str | None
"""A value by tier, one value for all clients, or none."""


def plan_faults(
    config: FaultsConfig,
    clients: ClientTable,
    examples: Callable[[int], int],
    domains: Sequence[str],
    seed: int,
) -> Faults | None:
    """The faults of an experiment; None if the config asks for none.

    Args:
        config: The section `faults`.
        examples: Number of examples in one visit of a client with this number of training examples.
        domains: All domains of the data set, also those without clients.

    Raises:
        ConfigError: A tier or client does not exist or is missing, a number is not finite, the trace cannot
            be read, or a value needs the virtual clock, which is off.
    """
    if config == FaultsConfig():
        return None
    _check_clock(config)
    trace = {} if config.trace is None else read_trace(config.trace, clients)
    if config.seconds_per_example is None and any(entry.speed is not None for entry in trace.values()):
        raise ConfigError(
            f"faults.trace: {config.trace!r} gives speeds, which need the virtual clock; "
            f"set faults.seconds_per_example"
        )
    tiers, which = _tiers(config.tiers, clients, domains, seed)
    values = {
        field.name: _by_tier(f"faults.{field.name}", getattr(config, field.name), tiers)
        for field in dataclasses.fields(Profile)
    }
    profiles = [Profile(**{name: by[tier] for name, by in values.items()}) for tier in tiers or ("",)]
    sizes, work = np.unique(clients.sizes, return_inverse=True)
    return Faults(
        seed=seed,
        profiles=ByClient(clients.names, profiles, which),
        work=ByClient(clients.names, [examples(size) for size in sizes.tolist()], work),
        trace=trace,
        seconds_per_example=config.seconds_per_example,
        deadline=config.deadline,
        devices=read_devices(config.devices, clients, seed) if config.devices else None,
        sessions=read_sessions(config.sessions, clients, seed) if config.sessions else None,
    )


def _check_clock(config: FaultsConfig) -> None:
    for name in ("seconds_per_example", "deadline"):
        value = getattr(config, name)
        if value is not None and not math.isfinite(value):
            raise ConfigError(f"faults.{name}: {value!r} is not allowed: give a finite number")
    default = FaultsConfig()
    for name in ("speed", "bandwidth"):
        if config.devices is not None and getattr(config, name) != getattr(default, name):
            raise ConfigError(
                f"faults.{name}: {getattr(config, name)!r} cannot be used with faults.devices, which gives "
                f"every client its own; leave one of them out"
            )
    for name in ("speed", "bandwidth", "deadline", "devices", "sessions"):
        if config.seconds_per_example is None and getattr(config, name) != getattr(default, name):
            raise ConfigError(
                f"faults.{name}: {getattr(config, name)!r} needs the virtual clock; "
                f"set faults.seconds_per_example"
            )


def check_attack(config: FaultsConfig, has_labels: bool, trained_in_extra: bool = False) -> None:
    """Check that an attack has something to change.

    Args:
        config: The section `faults`.
        has_labels: Whether each example of the data set has one label.
        trained_in_extra: As of `Local`.

    Raises:
        ConfigError: There are no labels or values to change, or the strength of no attack is set.
    """
    default = FaultsConfig()
    kinds = set(config.attack.values() if isinstance(config.attack, Mapping) else (config.attack,))
    if "labels" in kinds and not has_labels:
        raise ConfigError(
            f"faults.attack: {config.attack!r} changes the labels of examples, and this data set has targets "
            f"of another kind; use noise or sign_flip"
        )
    if trained_in_extra and kinds & {"noise", "sign_flip"}:
        raise ConfigError(
            f"faults.attack: {config.attack!r} changes the values that clients send, and the clients of this "
            f"method send them in another form; use labels, or algorithm=fedavg"
        )
    if config.attack == default.attack and config.attack_scale != default.attack_scale:
        raise ConfigError(
            f"faults.attack_scale: {config.attack_scale!r} has no effect without an attack; set faults.attack"
        )


def _is_named(tiers: Mapping[str, Any]) -> bool:
    """Whether the tiers are given by domain or client, not as shares."""
    return any(isinstance(value, str) for value in tiers.values())


def _tiers(
    tiers: Mapping[str, Any], clients: ClientTable, domains: Sequence[str], seed: int
) -> tuple[list[str], Integers]:
    """Names of the tiers, and the position of that of every client; no names if there are no tiers."""
    if not tiers:
        return [], np.zeros(len(clients), dtype=np.uint8)
    if not _is_named(tiers):
        ordered = dict(sorted(tiers.items()))
        return list(ordered), deal_into_tiers(ordered, len(clients), seed, "faults.tiers")
    for name in tiers:
        if name not in clients and name not in domains:
            raise ConfigError(
                unknown("faults.tiers", name, domains)
                + f", or a client, {clients.names[0]} to {clients.names[-1]}"
            )
    names = list(dict.fromkeys(map(str, tiers.values())))
    of_domain = np.array([names.index(tiers[d]) if d in tiers else -1 for d in clients.domains])
    which = of_domain[clients.domain]
    for name in filter(clients.__contains__, tiers):
        which[clients.names.position(name)] = names.index(tiers[name])
    if (which < 0).any():
        place = int(np.flatnonzero(which < 0)[0])
        raise ConfigError(
            f"faults.tiers: client {clients.names[place]!r} has no tier; name it or its domain "
            f"{clients.domains[clients.domain[place]]!r}, or give shares"
        )
    return names, which


def _by_tier(key: str, value: ByTier, tiers: Sequence[str]) -> dict[str, Any]:
    """The value of each tier; under the empty name, that of clients if there are no tiers."""
    numbers = value.values() if isinstance(value, Mapping) else () if value is None else (value,)
    if not all(math.isfinite(number) for number in numbers if not isinstance(number, str)):
        raise ConfigError(f"{key}: {value!r} is not allowed: give finite numbers")
    if not isinstance(value, Mapping):
        return dict.fromkeys((*tiers, ""), value)
    if not tiers:
        raise ConfigError(f"{key}: {dict(value)!r} is by tier, but there are none; set faults.tiers")
    for tier in value:
        if tier not in tiers:
            raise ConfigError(unknown(key, tier, tiers))
    for tier in tiers:
        if tier not in value:
            raise ConfigError(f"{key}: tier {tier!r} is missing; give a value for each of {', '.join(tiers)}")
    return {**value, "": None}
