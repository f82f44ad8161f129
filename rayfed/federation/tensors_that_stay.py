"""Tensors that stay at the client: their values are never sent, and continue in its next visit.

The server does not know these names, so that every server rule works on the rest of the model. At the client
they are like any other tensor: its code finds its own values in the message, trains them, and answers with
them; the process that runs the client takes them out of the answer and keeps them in the client's store.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import replace

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from rayfed.errors import ConfigError
from rayfed.federation.client import Client
from rayfed.models.backbone import Backbone
from rayfed.types import EXIT, RESIDUAL, Broadcast, Head, Params, at_rank, cut_to_rank

STAYS = "_stays"
"""Reserved name in a client's store: its values of the tensors that stay, by global name."""

PATTERNS = {"head": r"head\..*", "lora_A": r".*\.lora_A", "lora_B": r".*\.lora_B"}
"""Words for names, as regular expressions."""

NORM = "norm"
"""Word for the parameters and statistics of normalization layers."""

NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm)


def names_that_stay(model: Backbone, rules: Sequence[str]) -> frozenset[str]:
    """Global names of the trained tensors that stay at the client.

    Args:
        model: The tuned model; it needs no values.
        rules: Words or regular expressions (`Local.stays`).

    Raises:
        ConfigError: A rule is not a regular expression, or no trained tensor has such a name.
    """
    if not rules:
        return frozenset()
    entries = model.tensors()
    names = [name for name, entry in entries.items() if entry.is_trained and not name.endswith(RESIDUAL)]
    norms = {name for name in names if isinstance(entries[name].module, NORMS)}
    staying: set[str] = set()
    for rule in rules:
        chosen = norms if rule == NORM else {name for name in names if _matches(rule, name)}
        if not chosen:
            words = ", ".join((*PATTERNS, NORM))
            raise ConfigError(
                f"local.stays: {rule!r} is the name of no tensor that this tuning trains; choose from "
                f"{words}, or give a regular expression for whole names such as {names[-1]!r}"
            )
        staying |= chosen
    return frozenset(staying)


def head_of(model: Backbone, rules: Sequence[str]) -> Head:
    """The handling of the head of a model.

    Args:
        model: The tuned model; it needs no values.
        rules: Words or regular expressions (`Local.stays`).

    Returns:
        `frozen`: nothing in it and in early exits is trained. `personal`: all that is trained there stays at
        the clients. `shared`: the server combines it.
    """
    entries = model.tensors()
    heads = [n for n in entries if _matches("head", n) or n.startswith(EXIT)]
    trained = [n for n in heads if entries[n].is_trained]
    if not trained:
        return "frozen"
    return "personal" if names_that_stay(model, rules).issuperset(trained) else "shared"


def check_head(wanted: Head | None, head: Head, tuning: str) -> None:
    """Raise ConfigError if the head is not what the key `head` asks for.

    Args:
        wanted: The value of `head`; None: whatever method and tuning scheme make of it.
        head: What the model says, of `head_of`.
        tuning: Name of the tuning scheme.
    """
    if wanted is None or wanted == head:
        return
    if head == "frozen":
        what = f"tuning={tuning} trains no head of this model; leave it out, or use another scheme"
    elif wanted == "frozen":
        what = f"tuning={tuning} trains it; use a scheme with train_head, such as tuning=lora"
    elif wanted == "shared":
        what = "it stays at the clients (local.stays); leave one of the two out"
    else:
        what = f"tuning={tuning} has early exits, which are sent; leave it out"
    raise ConfigError(f"head: {wanted!r} is not possible: {what}")


def _matches(rule: str, name: str) -> bool:
    try:
        return re.fullmatch(PATTERNS.get(rule, rule), name) is not None
    except re.error as err:
        raise ConfigError(f"local.stays: {rule!r} is not a regular expression: {err}") from err


def add_own(sent: Broadcast, stays: Collection[str], values: Params) -> Broadcast:
    """The message as the client's code sees it: at its rank, and with its own values of what stays.

    Args:
        sent: The message of the server.
        stays: Global names of the tensors that stay.
        values: Values of all trained tensors with which the call begins.
    """
    own = {name: values[name] for name in sorted(stays) if sent.holds(name)}
    sent = at_rank(sent)
    return replace(sent, params={**sent.params, **own}) if own else sent


def keep_own(params: Params, client: Client) -> Params:
    """The values that leave the client: at its rank, and without what stays, which its store keeps.

    Args:
        params: Values that the client's code answered with.
        client: The client; its store is changed in place.
    """
    params = cut_to_rank(params, client.rank)
    own = {name: value for name, value in params.items() if name in client.stays}
    if own:
        client.store[STAYS] = {**client.store.get(STAYS, {}), **own}
    return {name: value for name, value in params.items() if name not in own}
