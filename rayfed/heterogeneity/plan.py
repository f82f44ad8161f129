"""Plans the faults of an experiment: checks the config section `faults` and reads its traces."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from rayfed.clients import ByClient, ClientTable, Integers
from rayfed.errors import ConfigError, unknown
from rayfed.heterogeneity.capacity import deal_into_tiers
from rayfed.heterogeneity.devices import read_devices, read_sessions
from rayfed.heterogeneity.faults import Faults, FaultsConfig, Profile
from rayfed.heterogeneity.traces import read_trace

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
        clients: All clients.
        examples: Number of examples in one visit of a client with this number of training examples.
        domains: All domains of the data set, also those without clients.
        seed: Seed of the experiment.

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


def check_attack(config: FaultsConfig, has_labels: bool) -> None:
    """Check that an attack has something to change.

    Args:
        config: The section `faults`.
        has_labels: Whether each example of the data set has one label.

    Raises:
        ConfigError: There are no labels to change, or the strength of no attack is set.
    """
    default = FaultsConfig()
    kinds = config.attack.values() if isinstance(config.attack, Mapping) else (config.attack,)
    if "labels" in kinds and not has_labels:
        raise ConfigError(
            f"faults.attack: {config.attack!r} changes the labels of examples, and this data set has targets "
            f"of another kind; use noise or sign_flip"
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
