"""Tasks that clients run for every method: evaluate a model, and train with evaluations around it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from rayfed.devices import numbers, total
from rayfed.federation.client import Client
from rayfed.federation.local import Local
from rayfed.federation.passes import logits
from rayfed.objective import NUM, Objective
from rayfed.tuning.base import copies, train_mode
from rayfed.types import Broadcast, Update

SETS = "sets"
"""Name of what belongs to the sets of a pack, in their order: `shared` has the sizes, `extra` the metrics."""

INSTEAD = "instead"
"""Name in `shared` of values with which a client is scored in place of its tensors, by global name."""

BY_CLASS = "by_class"
"""Name in `scored` of the numbers that `Objective.by_class` counts."""

OUTPUT, TARGET = "output", "target"
"""Names in `scored` of the outputs and targets of a set, for metrics over the examples of several sets."""

VALIDATED = "validated"
"""Beginning of the names of what the model that a client would deploy has on its validation split."""

PERSONAL = "personal"
"""The same for `evaluation.personal_split`."""

Scoring: TypeAlias = Callable[[Any, Tensor], dict[str, Tensor]]


@torch.no_grad()
def score(client: Client, split: str, kept: dict[str, Tensor] | None = None) -> dict[str, float]:
    """Mean loss and metrics (fractions) of `client.model` on one split, in evaluation mode.

    Args:
        kept: Where the tensors for `Update.scored` are put: counts by class (`Objective.by_class`), or
            outputs and targets for metrics over sets.

    Returns:
        `loss`, `num` (number of examples, or of what they are means over) and the metrics of the task, by
        name, but for those that the targets do not define; empty where the split has no examples. For a model
        with several exits also `<metric>_ensemble`, the metric of the mean over exits, and
        `<metric>_last_exit`, that of the last.
    """
    client.model.eval()
    objective = client.objective
    found: dict[str, list[Tensor]] = {}
    counts: list[Tensor] = []
    together: list[tuple[Tensor, Tensor]] = []
    n = client.data.size(split)
    for x, y in client.batches(split, shuffle=False):
        output = client.model(x)
        for name, value in _sums(client, output, y).items():
            found.setdefault(name, []).append(value)
        if kept is not None and (own := objective.by_class(client.model.predict(output), y)) is not None:
            counts.append(own)
        if objective.over_set or objective.whole:
            together.append((client.model.predict(output), y))
    train_mode(client.model)
    read = iter(numbers([value for values in found.values() for value in values]))
    sums = {name: total(next(read) for _ in values) for name, values in found.items()}
    units = sums.pop(NUM, n)
    means = {name: value / max(units, 1) for name, value in sums.items()}
    if together:
        outputs, targets = (torch.cat(parts) for parts in zip(*together, strict=True))
        means |= {name: _mean(objective.by_set[name], outputs, targets) for name in sorted(objective.whole)}
        outputs, targets = outputs.cpu(), targets.cpu()
        means |= over_set(objective, outputs, targets)
        if kept is not None and objective.over_set:
            kept |= {OUTPUT: outputs, TARGET: targets}
    if counts and kept is not None:
        kept[BY_CLASS] = torch.stack(counts).sum(0).cpu()
    return {"loss": means.pop("loss"), NUM: units, **means} if n else {}


def _mean(of: Callable[[Tensor, Tensor], Tensor], output: Tensor, y: Tensor) -> float:
    return float(of(output, y).float().mean())


def over_set(objective: Objective, output: Tensor, y: Tensor) -> dict[str, float]:
    """Metrics over all examples of a set, by name, but for those that its targets do not define.

    Args:
        output: Outputs for all examples, on the CPU.
        y: Their targets, on the CPU.
    """
    values = {name: float(of(output, y)) for name, of in objective.over_set.items()}
    return {name: value for name, value in values.items() if value == value}  # not NaN: it is defined


def _sums(client: Client, output: Any, y: Tensor) -> dict[str, Tensor]:
    """Sums of the loss and the metrics over a batch, from the output of the model, on its device."""
    return _scores(client, output, y, client.objective.sums)


def _scores(client: Client, output: Any, y: Tensor, of: Scoring) -> dict[str, Tensor]:
    """The loss and the metrics of the model's prediction, and of those of a model with several exits."""
    values = of(client.model.predict(output), y)
    if isinstance(output, list):
        metric = client.objective.metric
        for name, out in (("ensemble", logits(output)), ("last_exit", output[-1])):
            scores = of(out, y)
            values |= {f"{metric}_{name}": scores[metric]} if metric in scores else {}
    return values


def evaluate(client: Client, sent: Broadcast, split: str = "val", local: Local | None = None) -> Update:
    """Task that scores the received model on one split.

    Args:
        client: The client; its model holds `sent.params`.
        sent: Message from the server. `shared[INSTEAD]`, if present, has values to use in place of those that
            the client has of tensors which stay at it, by global name; the client keeps its own.
        local: Client half of the method, whose `prepare` is called first; None: inputs are used as they are.
    """
    if local is not None:
        local.prepare(client, sent)
    instead = sent.shared.get(INSTEAD, {})
    own = copies(client.model) if instead else {}
    client.load(instead)
    kept: dict[str, Tensor] = {}
    metrics = score(client, split, kept)
    client.load(own)
    return Update(client=client.id, num_examples=client.data.size(split), metrics=metrics, scored=kept)


@torch.no_grad()
def evaluate_pack(client: Client, sent: Broadcast, split: str) -> Update:
    """Task that scores the received model on many small sets, whose examples share batches.

    Args:
        client: Not one client: its split holds the examples of the sets, one after the other.
        sent: Message from the server; `shared[SETS]` is the number of examples of each of the S sets, int64,
            shape (S,).

    Returns:
        An answer with `extra[SETS]`: the metrics of the sets, as of `score`, by name, NaN where a set does
        not define one; float64, shape (S,). Its `scored` has what `score` keeps, for all sets: outputs and
        targets one after the other, and counts by class, shape (S, 3, C).
    """
    client.model.eval()
    objective = client.objective
    found: dict[str, list[Tensor]] = {}
    together: list[tuple[Tensor, Tensor]] = []
    for x, y in client.batches(split, shuffle=False):
        output = client.model(x)
        for name, values in _scores(client, output, y, objective.values).items():
            found.setdefault(name, []).append(values)
        together.append((client.model.predict(output), y))
    train_mode(client.model)
    sizes = sent.shared[SETS].cpu().numpy()
    first = np.cumsum(sizes) - sizes
    every = {name: torch.cat(parts).double().cpu().numpy() for name, parts in found.items()}
    sums = {name: np.add.reduceat(own, first) for name, own in every.items()}
    units = sums.get(NUM, sizes)
    means = {name: own / np.maximum(units, 1) for name, own in sums.items() if name != NUM}
    means |= {NUM: units} if NUM in sums else {}
    by_set, kept = _set_by_set(objective, together, sizes.tolist())
    return Update(
        client=client.id,
        num_examples=int(sizes.sum()),
        extra={SETS: {name: torch.from_numpy(own) for name, own in (means | by_set).items()}},
        scored=kept,
    )


def _set_by_set(
    objective: Objective, together: list[tuple[Tensor, Tensor]], sizes: list[int]
) -> tuple[dict[str, np.ndarray[Any, Any]], dict[str, Tensor]]:
    """Values of the sets of a pack that no single example has, and tensors that are kept of them.

    Args:
        together: Outputs and targets of the batches of the pack.
        sizes: Number of examples of each set.

    Returns:
        Values by name, shape (S,), and tensors as of `score`.
    """
    output, y = together[0] if len(together) == 1 else map(torch.cat, zip(*together, strict=True))
    sets = list(zip(output.split(sizes), y.split(sizes), strict=True))
    values = {name: [_mean(of, *own) for own in sets] for name, of in objective.by_set.items()}
    kept: dict[str, Tensor] = {}
    if objective.over_set:
        output, y = output.cpu(), y.cpu()
        kept |= {OUTPUT: output, TARGET: y}
        each = [over_set(objective, *own) for own in zip(output.split(sizes), y.split(sizes), strict=True)]
        values |= {name: [one.get(name, float("nan")) for one in each] for name in objective.over_set}
    counts = [own for own in (objective.by_class(*one) for one in sets) if own is not None]
    if counts:
        kept[BY_CLASS] = torch.stack(counts).to(torch.int32).cpu()
    return {name: np.array(own) for name, own in values.items()}, kept


def fit(client: Client, sent: Broadcast, local: Local, start: str = "", end: str = "") -> Update:
    """Task of the training exchange: train, and score the received, the trained and the personal model.

    Args:
        client: The client; its model holds `sent.params`.
        sent: Message from the server.
        local: Client half of the method.
        start: Split on which the received model is scored; the metrics are returned as start/loss and
            start/<metric>. Empty: it is not scored.
        end: The same for the trained model, as end/loss and end/<metric>.

    Returns:
        The answer of `local.train`, with these metrics added. On each of `client.deployed_on` the model that
        the client would deploy is scored too, such as personal/loss and personal/<metric>.
    """
    metrics: dict[str, float] = {}
    local.prepare(client, sent)
    if start:
        metrics |= _with_prefix("start", score(client, start))
    update = local.train(client, sent)
    client.end_training()
    if end:
        client.load(update.params)
        metrics |= _with_prefix("end", score(client, end))
    kept: dict[str, Tensor] = {}
    if client.deployed_on:
        local.personalize(client, sent, update)
        found, kept = score_deployed(client)
        metrics |= found
    return replace(update, metrics={**update.metrics, **metrics}, scored=kept) if metrics else update


def score_deployed(client: Client) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Metrics of the model of a client on each of `client.deployed_on`, and what is kept, with its names."""
    metrics: dict[str, float] = {}
    kept: dict[str, Tensor] = {}
    for name, split in client.deployed_on.items():
        own: dict[str, Tensor] = {}
        metrics |= _with_prefix(name, score(client, split, own))
        kept |= {f"{name}/{what}": value for what, value in own.items()}
    return metrics, kept


def deployed(client: Client, sent: Broadcast, local: Local) -> Update:
    """Task that scores the model which a client would deploy that does not train in this round.

    The store of the client, and what stays at it, are as before.

    Args:
        client: The client; its model holds `sent.params`.
        sent: Message from the server.
        local: Client half of the method, whose `personalize` loads what the client kept for itself, or adapts
            what it received. A client that has kept nothing deploys what it received.

    Returns:
        An answer with the scores on `client.deployed_on`, and without tensors.
    """
    with unchanged(client):
        local.prepare(client, sent)
        client.end_training()
        local.personalize(client, sent, client.update())
        metrics, kept = score_deployed(client)
    return Update(client=client.id, metrics=metrics, scored=kept)


@contextmanager
def unchanged(client: Client) -> Iterator[None]:
    """Put the store of a client, and the values that it may change, back after the block."""
    store = deepcopy(client.store)
    values = copies(client.model)
    yield
    client.load(values)
    client.store.clear()
    client.store.update(store)


def adapt(client: Client, sent: Broadcast, local: Local, steps: int) -> Update:
    """Task that scores the model which the client would deploy after a few steps from the received one.

    What is trained is discarded: the store of the client and what stays at it are as before.

    Args:
        client: The client; its model holds `sent.params`.
        sent: Message from the server.
        local: Client half of the method, which trains as in a round but for the number of steps.
        steps: Number of optimization steps; a half that passes over the data several times takes as many in
            each pass.

    Returns:
        An answer with the scores on the test split, as of `score`, and without tensors.
    """
    kept: dict[str, Tensor] = {}
    with unchanged(client):
        client.config = replace(client.config, local_steps=steps, max_steps=None)
        local.prepare(client, sent)
        update = local.train(client, sent)
        client.end_training()
        local.personalize(client, sent, update)
        metrics = score(client, "test", kept)
    num = client.data.size("test")
    return Update(client=client.id, num_examples=num, metrics=metrics, scored=kept)


def _with_prefix(prefix: str, metrics: dict[str, float]) -> dict[str, float]:
    return {f"{prefix}/{name}": value for name, value in metrics.items()}
