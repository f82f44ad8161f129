"""How many backbone blocks each client can hold: by client, by domain, in tiers, or drawn each round."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, TypeAlias, TypeVar

from rayfed.errors import ConfigError
from rayfed.seeds import generator

K = TypeVar("K", int, str)

CapacityConfig: TypeAlias = int | list[int] | dict[int, float] | Literal["dynamic"] | None
"""One depth for all; one per client or domain; share of clients by depth; uniform in 1..L each round; all."""


def assign(
    config: CapacityConfig, domain_of: Mapping[str, str], depth: int, seed: int
) -> dict[str, int] | None:
    """Blocks each client can hold; None when they are drawn each round.

    Args:
        config: What the config says.
        domain_of: Domain of every client, in client order.
        depth: Blocks of the backbone; 0 where it has no uniform blocks.
        seed: Seed of the experiment; decides which clients a tier consists of.

    Raises:
        ConfigError: A depth outside 1..depth, or a list that fits neither the clients nor the domains.
    """
    if config is None:
        return dict.fromkeys(domain_of, depth)
    if not depth:
        raise ConfigError("capacity: this backbone has no uniform blocks; choose another or leave it out")
    if config == "dynamic":
        return None
    domains = list(dict.fromkeys(domain_of.values()))
    if isinstance(config, int):
        found = dict.fromkeys(domain_of, config)
    elif isinstance(config, dict):
        shares = dict(sorted(config.items(), reverse=True))
        found = deal(shares, list(domain_of), seed, "capacity")
    elif len(config) == len(domain_of):
        found = dict(zip(domain_of, config, strict=True))
    elif len(config) == len(domains):
        by_domain = dict(zip(domains, config, strict=True))
        found = {cid: by_domain[domain] for cid, domain in domain_of.items()}
    else:
        raise ConfigError(
            f"capacity: {len(config)} depths for {len(domain_of)} clients in {len(domains)} domains; "
            f"give one depth per client or one per domain"
        )
    _check(found.values(), depth)
    return found


def draw_capacities(clients: Sequence[str], depth: int, seed: int, round: int) -> dict[str, int]:
    """Depths of one round, uniform in 1..depth, both ends included (FedRA, Table 4)."""
    return {cid: int(generator(seed, "capacity", round, cid).integers(1, depth + 1)) for cid in clients}


def deal(shares: Mapping[K, float], clients: Sequence[str], seed: int, key: str) -> dict[str, K]:
    """Put clients into tiers of these shares; the sizes are exact, the seed decides who is where.

    Args:
        shares: By tier, in any unit.
        clients: All clients, in order.
        seed: Seed of the experiment.
        key: Config key that the shares are from; names the random stream too.

    Raises:
        ConfigError: A share is negative or not finite, or all are 0.
    """
    total = sum(shares.values())
    if not 0 < total < float("inf") or min(shares.values()) < 0:
        raise ConfigError(f"{key}: shares {dict(shares)} must be finite, not negative and not all 0")
    exact = {tier: len(clients) * share / total for tier, share in shares.items()}
    counts = {tier: int(value) for tier, value in exact.items()}
    # Largest remainders get the clients that rounding down left over.
    for tier in sorted(exact, key=lambda t: counts[t] - exact[t])[: len(clients) - sum(counts.values())]:
        counts[tier] += 1
    order = generator(seed, key).permutation(list(clients)).tolist()
    tiers = [tier for tier, count in counts.items() for _ in range(count)]
    chosen = dict(zip(order, tiers, strict=True))
    return {cid: chosen[cid] for cid in clients}


def _check(depths: Iterable[int], depth: int) -> None:
    bad = [d for d in depths if not 1 <= d <= depth]
    if bad:
        raise ConfigError(f"capacity: {bad[0]} blocks are not possible; the backbone has 1 to {depth}")
