"""Attacks of clients: on the labels they train with, or on the answer they send."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rayfed.federation.client import Client
from rayfed.federation.executor import ClientTask, Content, Leave
from rayfed.heterogeneity.faults import HONEST, Attack
from rayfed.types import Broadcast, Params, Update, beyond_rank, is_statistic


def with_attack(task: ClientTask, attack: Attack, scale: float) -> tuple[ClientTask, tuple[Leave, ...]]:
    """The training exchange as a client with this attack runs it: its task, and what changes its answer.

    Args:
        task: The task of honest clients.
        attack: What the client does (`faults.attack`).
        scale: Strength of the attack (`faults.attack_scale`).
    """
    if attack == HONEST:
        return task, ()
    if attack == "labels":
        return partial(_relabel, task=task), ()
    return task, (partial(_attack, attack, scale),)


def _relabel(client: Client, sent: Broadcast, task: ClientTask) -> Update:
    """Task: run another task on labels that are counted from the other end."""
    last = client.model.num_classes - 1
    client.data = replace(client.data, relabel=lambda y: last - y)
    return task(client, sent)


def _attack(
    attack: Attack, scale: float, client: Client, sent: Broadcast, params: Params, extra: Mapping[str, Any]
) -> Content:
    """The answer of an attacker in place of the one of its task."""
    own = [n for n, value in params.items() if value.is_floating_point() and not is_statistic(n)]
    start = {n: sent.params[n] if n in sent.params else torch.zeros_like(params[n]) for n in own}
    if attack == "sign_flip":
        changed = {n: start[n] - scale * (params[n] - start[n]) for n in own}
    else:
        changed = _noisy(client, start, scale)
    return {**params, **changed}, extra


def _noisy(client: Client, start: Params, scale: float) -> Params:
    """Values plus Gaussian noise of this standard deviation, within the rank of the client."""
    noisy = {}
    for name in sorted(start):
        noise: Tensor = client.to_device(torch.randn(start[name].shape, generator=client.rng)) * scale
        if client.rank is not None:
            for part in beyond_rank(name, noise, client.rank):
                part.zero_()
        noisy[name] = start[name] + noise.to(start[name].dtype)
    return noisy
