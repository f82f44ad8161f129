"""Faults that are injected on purpose: clients that cannot be reached, drop out or are slow.

Every answer depends on names only (seed, round, client), so it is the same on any machine, with any executor
and after a resume. Time is virtual: it follows from the work and the bytes of a visit, not from this machine.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from rayfed.errors import ConfigError, unknown
from rayfed.heterogeneity.capacity import deal
from rayfed.heterogeneity.traces import Said, Trace, read_trace
from rayfed.seeds import generator
from rayfed.types import RESIDUAL, Broadcast, Fraction, NonNegative, Positive, num_bytes

ByTier: TypeAlias = Mapping[str, float] | float | None


@dataclass(frozen=True, kw_only=True)
class FaultsConfig:
    """What goes wrong; nothing by default. Probabilities are per client and round, independent.

    Attributes:
        tiers: Kinds of clients: shares by tier (the seed decides who is where), or tiers by domain or client
            id.
        availability: Probability that a client can be reached in a round; one number, or one by tier.
        dropout: Probability that a client that is called never answers in a round; one number, or by tier.
        speed: How fast clients compute, 1 by default; one number, or by tier.
        bandwidth: Bytes per second of a client, down and up; one number, or by tier; none: transfers take no
            time.
        seconds_per_example: Time for one training example through all blocks at speed 1; turns the virtual
            clock on.
        deadline: Seconds after which the server waits no longer for the answers of an exchange.
        trace: CSV or Parquet file that says for single rounds and clients what happens.
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
    """The values of one client's tier."""

    availability: float
    dropout: float
    speed: float
    bandwidth: float | None


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What happens to whom. Rounds count from 0.

    Attributes:
        seed: Seed of the experiment.
        profiles: By client.
        work: Training examples of one visit, all passes together, by client.
        trace: Replaces what the profile says where it says something.
        seconds_per_example: At speed 1 and full depth; None: there is no clock.
        deadline: Longest virtual time of an exchange.
    """

    seed: int
    profiles: Mapping[str, Profile]
    work: Mapping[str, int]
    trace: Trace = field(default_factory=dict)
    seconds_per_example: float | None = None
    deadline: float | None = None

    @property
    def has_clock(self) -> bool:
        return self.seconds_per_example is not None

    def is_available(self, round: int, client: str) -> bool:
        """Whether the client can be reached in this round."""
        said = self._said(round, client).available
        return self._happens("availability", round, client) if said is None else said

    def drops_out(self, round: int, client: str) -> bool:
        """Whether nothing the client answers in this round arrives."""
        said = self._said(round, client).dropout
        return self._happens("dropout", round, client) if said is None else said

    def seconds(self, client: str, sent: Broadcast, share: float, trains: bool) -> float:
        """Virtual seconds of a visit; 0 without a clock.

        Examples x share x seconds_per_example / speed, plus bytes / bandwidth. Only training counts as work,
        and only trained tensors, those that came down, as bytes up.

        Args:
            client: Who is visited.
            sent: What it receives.
            share: Of the blocks it holds.
            trains: Whether this is the training exchange.
        """
        if self.seconds_per_example is None:
            return 0.0
        profile, seconds, traffic = self.profiles[client], 0.0, sent.num_bytes()
        if trains:
            speed = self._said(sent.round, client).speed or profile.speed
            seconds = self.work[client] * share * self.seconds_per_example / speed
            traffic += sum(
                num_bytes(v) for n, v in sent.params.items() if sent.holds(n) and not n.endswith(RESIDUAL)
            )
        return seconds if profile.bandwidth is None else seconds + traffic / profile.bandwidth

    def cause(self, round: int, client: str, seconds: float) -> str:
        """Why the answer of a visit of so many seconds is lost: dropout, deadline, or empty if it is not."""
        if self.drops_out(round, client):
            return "dropout"
        return "deadline" if self.deadline is not None and seconds > self.deadline else ""

    def duration(self, seconds: Mapping[str, float], answered: Collection[str]) -> float:
        """Virtual seconds of an exchange: until the last answer, or the deadline where somebody is missing.

        Without a deadline the server knows at once that a client is gone.

        Args:
            seconds: Of everybody called.
            answered: Those whose answer arrived.
        """
        if self.has_clock and self.deadline is not None and len(answered) < len(seconds):
            return self.deadline
        return max((seconds[cid] for cid in answered), default=0.0)

    def _said(self, round: int, client: str) -> Said:
        return self.trace.get((round, client), NOTHING)

    def _happens(self, what: str, round: int, client: str) -> bool:
        probability: float = getattr(self.profiles[client], what)
        return bool(generator(self.seed, "faults", what, round, client).random() < probability)


NOTHING = Said()


def plan_faults(
    config: FaultsConfig,
    domain_of: Mapping[str, str],
    work: Mapping[str, int],
    domains: Sequence[str],
    seed: int,
) -> Faults | None:
    """Faults of an experiment; None where none are asked for.

    Args:
        config: What the config says.
        domain_of: Domain of every client, in client order.
        work: Training examples of one visit, by client.
        domains: All domains of the data, those without clients included.
        seed: Seed of the experiment.

    Raises:
        ConfigError: Tiers and clients do not fit, a number is not finite, or the trace is wrong.
    """
    if config == FaultsConfig():
        return None
    _check_clock(config)
    trace = {} if config.trace is None else read_trace(config.trace, list(domain_of))
    if config.seconds_per_example is None and any(said.speed is not None for said in trace.values()):
        raise ConfigError(
            f"faults.trace: {config.trace!r} gives speeds, which need the virtual clock; "
            f"set faults.seconds_per_example"
        )
    tier_of = _tiers(config.tiers, domain_of, domains, seed)
    tiers = list(dict.fromkeys(map(str, config.tiers.values() if _is_named(config.tiers) else config.tiers)))
    values = {f.name: _by_tier(f"faults.{f.name}", getattr(config, f.name), tiers) for f in PROFILE}
    profiles = {tier: Profile(**{name: by[tier] for name, by in values.items()}) for tier in (*tiers, "")}
    return Faults(
        seed=seed,
        profiles={cid: profiles[tier_of.get(cid, "")] for cid in domain_of},
        work=dict(work),
        trace=trace,
        seconds_per_example=config.seconds_per_example,
        deadline=config.deadline,
    )


PROFILE = dataclasses.fields(Profile)


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
    """Whether tiers are given by name of a domain or client, not as shares."""
    return any(isinstance(value, str) for value in tiers.values())


def _tiers(
    tiers: Mapping[str, Any], domain_of: Mapping[str, str], domains: Sequence[str], seed: int
) -> dict[str, str]:
    """The tier of every client; nothing without tiers."""
    if not tiers:
        return {}
    if not _is_named(tiers):
        return deal(dict(sorted(tiers.items())), list(domain_of), seed, "faults.tiers")
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
    """The value of every tier, and of clients without one under an empty name."""
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
