"""Capacity: how many blocks of the backbone, and which rank of LoRA adapters, a client can hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np

from rayfed.client_facts import ByClient, ClientTable, Integers
from rayfed.errors import ConfigError, count_of
from rayfed.seeds import generator

K = TypeVar("K", int, str)

Sizes: TypeAlias = int | list[int] | dict[int, float] | Literal["dynamic"] | None

CapacityConfig: TypeAlias = (
    int | list[int] | dict[int, float] | dict[Literal["blocks", "rank"], Sizes] | Literal["dynamic"] | None
)
"""The config value `capacity`: numbers of blocks (depths), or a mapping with `blocks` and `rank`.

A number is the depth of every client; a list has one depth for each client or for each domain; a mapping
gives the share of clients by depth; `dynamic` draws depths in each round uniformly from 1 to all blocks; none
means that every client holds all blocks. `rank` says the same of the rank of the clients' LoRA adapters,
which is never drawn anew.
"""


def sizes_of(config: CapacityConfig, what: Literal["blocks", "rank"]) -> Sizes:
    """The part of the config value that is about the number of blocks, or about the rank.

    >>> sizes_of({"rank": [4, 2]}, "rank"), sizes_of([12, 6], "blocks"), sizes_of(6, "rank")
    ([4, 2], [12, 6], None)
    """
    if isinstance(config, dict) and config and all(isinstance(key, str) for key in config):
        named: dict[Any, Any] = config
        return named.get(what)
    return config if what == "blocks" else None  # type: ignore[return-value]


def assign(config: CapacityConfig, clients: ClientTable, depth: int, seed: int) -> Mapping[str, int] | None:
    """The number of blocks that each client can hold, by client; None if it is drawn in each round.

    Args:
        config: The value of `capacity`.
        depth: Number of blocks of the backbone; 0 if it has no uniform blocks.
        seed: Seed of the experiment; decides which clients get which depth of a mapping.

    Raises:
        ConfigError: A depth is not in 1..depth, a list has neither one entry for each client nor one for each
            domain, or the backbone has no uniform blocks.
    """
    sizes = sizes_of(config, "blocks")
    if sizes is None:
        return ByClient.same(clients.names, depth)
    if not depth:
        raise ConfigError(
            "capacity: this backbone has no uniform blocks that could be left out; choose another model, "
            "name the blocks of your own one with rayfed.Model(net, blocks=PATH), or leave capacity out"
        )
    if sizes == "dynamic":
        return None
    depths = _by_client(sizes, clients, seed, "capacity", "depth")
    if bad := [d for d in depths.different if not 1 <= d <= depth]:
        raise ConfigError(f"capacity: {bad[0]} blocks are not possible; the backbone has 1 to {depth}")
    return depths


def assign_ranks(config: CapacityConfig, clients: ClientTable, rank: int, seed: int) -> Mapping[str, int]:
    """The rank of the LoRA adapters of each client, by client; empty where all have that of the tuning.

    Args:
        config: The value of `capacity`.
        rank: Rank of the tuning; 0 if it trains no LoRA adapters.
        seed: Seed of the experiment; decides which clients get which rank of a mapping.

    Raises:
        ConfigError: A rank is not in 1..rank or is drawn in each round, a list has neither one entry for each
            client nor one for each domain, or there are no adapters.
    """
    sizes = sizes_of(config, "rank")
    if sizes is None:
        return {}
    if not rank:
        raise ConfigError(
            "capacity.rank: this tuning trains no LoRA adapters; set tuning=lora, or leave it out"
        )
    if sizes == "dynamic":
        raise ConfigError(
            "capacity.rank: 'dynamic' is for capacity.blocks; give a rank, one for each client or for each "
            "domain, or shares by rank, as in {8: 0.5, 2: 0.5}"
        )
    ranks = _by_client(sizes, clients, seed, "capacity.rank", "rank")
    if bad := [r for r in ranks.different if not 1 <= r <= rank]:
        raise ConfigError(
            f"capacity.rank: {bad[0]} is not possible; the adapters have rank {rank} (tuning.rank)"
        )
    return ranks


def _by_client(
    sizes: int | list[int] | dict[int, float], clients: ClientTable, seed: int, key: str, one: str
) -> ByClient[int]:
    """One size for each client: the same for all, listed by client or by domain, or dealt by share."""
    if isinstance(sizes, int):
        return ByClient.same(clients.names, sizes)
    if isinstance(sizes, dict):
        shares = dict(sorted(sizes.items(), reverse=True))
        tiers = deal_into_tiers(shares, len(clients), seed, key)
        present, which = np.unique(tiers, return_inverse=True)
        return ByClient(clients.names, [tuple(shares)[tier] for tier in present], which)
    if len(sizes) == len(clients):
        return ByClient(clients.names, sizes, np.arange(len(clients)))
    if len(sizes) == len(clients.domains):
        return ByClient(clients.names, sizes, clients.domain)
    raise ConfigError(
        f"{key}: {count_of(len(sizes), one)} for {count_of(len(clients), 'client')} "
        f"in {count_of(len(clients.domains), 'domain')}; give one {one} per client or one per domain"
    )


def draw_capacities(clients: Sequence[str], depth: int, seed: int, round: int) -> dict[str, int]:
    """Draw the number of blocks of each client in a round, uniformly from 1 to `depth` (FedRA, Table 4).

    Args:
        depth: Number of blocks of the backbone.
        round: Round index, from 0.
    """
    return {cid: int(generator(seed, "capacity", round, cid).integers(1, depth + 1)) for cid in clients}


def deal_into_tiers(shares: Mapping[K, float], clients: int, seed: int, key: str) -> Integers:
    """Assign every client to a tier at random, such that tiers have exactly the sizes that their shares give.

    Args:
        shares: Share of clients by tier; only the ratios between shares matter.
        clients: Number of clients.
        key: Config key of the shares, for messages; it also names the random stream.

    Returns:
        Position of the tier in `shares` of each client, shape (N,).

    Raises:
        ConfigError: A share is negative or not finite, or all are 0.
    """
    total = sum(shares.values())
    if not 0 < total < float("inf") or min(shares.values()) < 0:
        raise ConfigError(f"{key}: shares {dict(shares)} must be finite, not negative and not all 0")
    exact = [clients * share / total for share in shares.values()]
    counts = [int(value) for value in exact]
    # Rounding down leaves some clients over; the tiers with the largest remainders get them.
    for tier in sorted(range(len(exact)), key=lambda t: counts[t] - exact[t])[: clients - sum(counts)]:
        counts[tier] += 1
    tiers = np.empty(clients, dtype=np.int32)
    tiers[generator(seed, key).permutation(clients)] = np.repeat(np.arange(len(counts)), counts)
    return tiers
