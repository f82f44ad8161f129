"""Worlds of one round for the methods that deal out blocks."""

import torch

from rayfed.client_facts import ClientTable
from rayfed.federation.cohort import ClientInfo, Cohort, Ledger
from rayfed.types import Update


class Nobody:
    """An executor that is never asked."""

    def map(self, calls):
        raise AssertionError(calls)

    def close(self):
        pass


def cohort(capacity, depth=12, round=0, block_bytes=(), clients=None, seed=0):
    ids = tuple(capacity)
    infos = ClientTable.of({cid: ClientInfo(domain=cid, num_examples=1) for cid in clients or ids})
    return Cohort(
        round=round,
        ids=ids,
        clients=infos,
        seed=seed,
        rounds=10,
        depth=depth,
        capacity=capacity,
        executor=Nobody(),
        block_bytes=tuple(block_bytes) or (100,) * depth,
        ledger=Ledger(),
    )


def block(j, leaf="x"):
    return f"blocks.{j}.{leaf}"


def scalars(values):
    """One scalar per block: {block index: value}."""
    return {block(j): torch.tensor([float(v)], dtype=torch.float64) for j, v in values.items()}


def update(client, values, num_examples=1):
    return Update(client=client, params=scalars(values), num_examples=num_examples)


def numbers(params, depth):
    return [params[block(j)].item() for j in range(depth)]
