"""Injected faults: clients that cannot be reached, drop out or are slow.

Whether a fault happens depends on the seed, the round and the client only, so it is the same on every
machine, with every executor and after a resume. Time is virtual: it is computed from the training examples
and bytes of a visit, not measured.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from rayfed.errors import ConfigError, unknown
from rayfed.heterogeneity.capacity import deal_into_tiers
from rayfed.heterogeneity.traces import Trace, TraceEntry, read_trace
from rayfed.seeds import generator
from rayfed.types import RESIDUAL, Broadcast, Fraction, NonNegative, Positive, num_bytes

ByTier: TypeAlias = Mapping[str, float] | float | None
"""A value by tier, one value for all clients, or none."""

NO_ENTRY = TraceEntry()


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
        trace: Path of a CSV or Parquet file with values for single rounds and clients.
    """

    tiers: dict[str, float] | dict[str, str] = field(default_factory=dict)
    availability: Fraction | dict[str, Fraction] = 1.0
    dropout: Fraction | dict[str, Fraction] = 0.0
    speed: Positive | dict[str, Positive] = 1.0
    bandwidth: Positive | dict[str, Positive] | None = None
    seconds_per_example: NonNegative | None = None
    deadline: Positive | None = None
    trace: str | None = None


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The values of one client, from its tier; fields as in `FaultsConfig`."""

    availability: float
    dropout: float
    speed: float
    bandwidth: float | None


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
    """

    seed: int
    profiles: Mapping[str, Profile]
    work: Mapping[str, int]
    trace: Trace = field(default_factory=dict)
    seconds_per_example: float | None = None
    deadline: float | None = None

    @property
    def has_clock(self) -> bool:
        """Whether the virtual clock is on."""
        return self.seconds_per_example is not None

    def is_available(self, round: int, client: str) -> bool:
        """Whether the client can be reached in this round."""
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
        profile = self.profiles[client]
        traffic = sent.num_bytes()
        seconds = 0.0
        if trains:
            speed = self._entry(sent.round, client).speed or profile.speed
            seconds = self.work[client] * share * self.seconds_per_example / speed
            traffic += sum(
                num_bytes(v) for n, v in sent.params.items() if sent.holds(n) and not n.endswith(RESIDUAL)
            )
        return seconds if profile.bandwidth is None else seconds + traffic / profile.bandwidth

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


def plan_faults(
    config: FaultsConfig,
    domain_of: Mapping[str, str],
    work: Mapping[str, int],
    domains: Sequence[str],
    seed: int,
) -> Faults | None:
    """The faults of an experiment; None if the config asks for none.

    Args:
        config: The section `faults`.
        domain_of: Domain of every client, in client order.
        work: Number of training examples in one visit, by client.
        domains: All domains of the data set, also those without clients.
        seed: Seed of the experiment.

    Raises:
        ConfigError: A tier or client does not exist or is missing, a number is not finite, the trace cannot
            be read, or a value needs the virtual clock, which is off.
    """
    if config == FaultsConfig():
        return None
    _check_clock(config)
    trace = {} if config.trace is None else read_trace(config.trace, list(domain_of))
    if config.seconds_per_example is None and any(entry.speed is not None for entry in trace.values()):
        raise ConfigError(
            f"faults.trace: {config.trace!r} gives speeds, which need the virtual clock; "
            f"set faults.seconds_per_example"
        )
    tier_of = _tiers(config.tiers, domain_of, domains, seed)
    tiers = list(dict.fromkeys(map(str, config.tiers.values() if _is_named(config.tiers) else config.tiers)))
    values = {
        field.name: _by_tier(f"faults.{field.name}", getattr(config, field.name), tiers)
        for field in dataclasses.fields(Profile)
    }
    profiles = {tier: Profile(**{name: by[tier] for name, by in values.items()}) for tier in (*tiers, "")}
    return Faults(
        seed=seed,
        profiles={cid: profiles[tier_of.get(cid, "")] for cid in domain_of},
        work=dict(work),
        trace=trace,
        seconds_per_example=config.seconds_per_example,
        deadline=config.deadline,
    )


def _check_clock(config: FaultsConfig) -> None:
    for name in ("seconds_per_example", "deadline"):
        value = getattr(config, name)
        if value is not None and not math.isfinite(value):
            raise ConfigError(f"faults.{name}: {value!r} is not allowed: give a finite number")
    default = FaultsConfig()
    for name in ("speed", "bandwidth", "deadline"):
        if config.seconds_per_example is None and getattr(config, name) != getattr(default, name):
            raise ConfigError(
                f"faults.{name}: {getattr(config, name)!r} needs the virtual clock; "
                f"set faults.seconds_per_example"
            )


def _is_named(tiers: Mapping[str, Any]) -> bool:
    """Whether the tiers are given by domain or client, not as shares."""
    return any(isinstance(value, str) for value in tiers.values())


def _tiers(
    tiers: Mapping[str, Any], domain_of: Mapping[str, str], domains: Sequence[str], seed: int
) -> dict[str, str]:
    """The tier of every client; empty if there are no tiers."""
    if not tiers:
        return {}
    if not _is_named(tiers):
        return deal_into_tiers(dict(sorted(tiers.items())), list(domain_of), seed, "faults.tiers")
    for name in tiers:
        if name not in domain_of and name not in domains:
            ids = list(domain_of)
            raise ConfigError(
                unknown("faults.tiers", name, domains) + f", or a client, {ids[0]} to {ids[-1]}"
            )
    for cid, domain in domain_of.items():
        if cid not in tiers and domain not in tiers:
            raise ConfigError(
                f"faults.tiers: client {cid!r} has no tier; name it or its domain {domain!r}, or give shares"
            )
    return {cid: tiers[cid if cid in tiers else domain] for cid, domain in domain_of.items()}


def _by_tier(key: str, value: ByTier, tiers: Sequence[str]) -> dict[str, Any]:
    """The value of each tier; under the empty name, that of clients if there are no tiers."""
    numbers = value.values() if isinstance(value, Mapping) else () if value is None else (value,)
    if not all(map(math.isfinite, numbers)):
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
