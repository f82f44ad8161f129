"""Attacks in the training exchange, by clients whose tier has a `faults.attack`.

An attack changes the labels that a client trains with, or its answer before the channel. It changes neither
what a method sends in `extra`, nor what stays at the client, nor other exchanges, nor scores of the client.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from rayfed.federation.client import Client
from rayfed.federation.executor import Task
from rayfed.federation.stays import keep_own
from rayfed.heterogeneity.faults import HONEST, Attack
from rayfed.types import Broadcast, Params, Update, beyond_rank, is_statistic


def with_attack(task: Task, attack: Attack, scale: float) -> Task:
    """The task of the training exchange as a client with this attack runs it.

    Args:
        task: The task of honest clients.
        attack: What the client does (`faults.attack`).
        scale: Strength of the attack (`faults.attack_scale`).
    """
    return task if attack == HONEST else partial(_attack, task=task, attack=attack, scale=scale)


def _attack(client: Client, sent: Broadcast, task: Task, attack: Attack, scale: float) -> Update:
    """Task: run another task as an attacker."""
    if attack == "labels":
        last = client.model.num_classes - 1
        client.data = replace(client.data, relabel=lambda y: last - y)
        return task(client, sent)
    update = keep_own(task(client, sent), client)
    own = [n for n, value in update.params.items() if value.is_floating_point() and not is_statistic(n)]
    start = {n: sent.params[n] if n in sent.params else torch.zeros_like(update.params[n]) for n in own}
    if attack == "sign_flip":
        changed = {n: start[n] - scale * (update.params[n] - start[n]) for n in own}
    else:
        changed = _noisy(client, start, scale)
    return replace(update, params={**update.params, **changed})


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
