"""Tasks that clients run for every method: evaluate a model, and train with evaluations around it."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from rayfed.devices import numbers, total
from rayfed.federation.client import Client
from rayfed.federation.local import Local, logits
from rayfed.objective import NUM
from rayfed.tuning.base import copies, train_mode
from rayfed.types import Broadcast, Update

SETS = "sets"
"""Name of what belongs to the sets of a pack, in their order: `shared` has the sizes, `extra` the metrics."""

INSTEAD = "instead"
"""Name in `shared` of values with which a client is scored in place of its tensors, by global name."""

BY_CLASS = "by_class"
"""Name in `extra` of the numbers that `Objective.by_class` counts."""

Scoring: TypeAlias = Callable[[Any, Tensor], dict[str, Tensor]]


@torch.no_grad()
def score(client: Client, split: str, by_class: list[Tensor] | None = None) -> dict[str, float]:
    """Mean loss and metrics (fractions) of `client.model` on one split, in evaluation mode.

    Args:
        client: The client.
        split: Name of the split.
        by_class: List to which the numbers by class of every batch are added (`Objective.by_class`).

    Returns:
        `loss`, `num` (number of examples, or of what they are means over) and the metrics of the task, by
        name; empty where the split has no examples. For a model with several exits also
        `<metric>_ensemble`, the metric of the mean over exits, and `<metric>_last_exit`, that of the last.
    """
    client.model.eval()
    found: dict[str, list[Tensor]] = {}
    together: list[tuple[Tensor, Tensor]] = []
    n = client.data.size(split)
    for x, y in client.batches(split, shuffle=False):
        output = client.model(x)
        for name, value in _sums(client, output, y).items():
            found.setdefault(name, []).append(value)
        if by_class is not None:
            counts = client.objective.by_class(client.model.predict(output), y)
            by_class += [] if counts is None else [counts]
        if client.objective.over_set:
            together.append((client.model.predict(output), y))
    train_mode(client.model)
    read = iter(numbers([value for values in found.values() for value in values]))
    sums = {name: total(next(read) for _ in values) for name, values in found.items()}
    units = sums.pop(NUM, n)
    means = {name: value / max(units, 1) for name, value in sums.items()}
    if together:
        outputs, targets = (torch.cat(parts).cpu() for parts in zip(*together, strict=True))
        whole = {name: float(of(outputs, targets)) for name, of in client.objective.over_set.items()}
        means |= {name: value for name, value in whole.items() if value == value}  # not NaN: it is defined
    return {"loss": means.pop("loss"), NUM: units, **means} if n else {}


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
        split: Name of the split.
        local: Client half of the method, whose `prepare` is called first; None: inputs are used as they are.
    """
    if local is not None:
        local.prepare(client, sent)
    instead = sent.shared.get(INSTEAD, {})
    own = copies(client.model) if instead else {}
    client.load(instead)
    counts: list[Tensor] = []
    metrics = score(client, split, counts)
    client.load(own)
    extra = {BY_CLASS: torch.stack(counts).sum(0)} if counts else {}
    return Update(client=client.id, num_examples=client.data.size(split), metrics=metrics, extra=extra)


@torch.no_grad()
def evaluate_pack(client: Client, sent: Broadcast, split: str) -> Update:
    """Task that scores the received model on many small sets, whose examples share batches.

    Args:
        client: Not one client: its split holds the examples of the sets, one after the other.
        sent: Message from the server; `shared[SETS]` is the number of examples of each of the S sets, int64,
            shape (S,).
        split: Name of the split.

    Returns:
        An answer with `extra[SETS]`: the metrics of the sets, as of `score`, by name; float64, shape (S,).
    """
    client.model.eval()
    found: dict[str, list[Tensor]] = {}
    for x, y in client.batches(split, shuffle=False):
        for name, values in _scores(client, client.model(x), y, client.objective.values).items():
            found.setdefault(name, []).append(values)
    train_mode(client.model)
    sizes = sent.shared[SETS].cpu().numpy()
    first = np.cumsum(sizes) - sizes
    every = {name: torch.cat(parts).double().cpu().numpy() for name, parts in found.items()}
    sums = {name: np.add.reduceat(own, first) for name, own in every.items()}
    units = sums.get(NUM, sizes)
    means = {name: own / np.maximum(units, 1) for name, own in sums.items() if name != NUM}
    means |= {NUM: units} if NUM in sums else {}
    return Update(
        client=client.id,
        num_examples=int(sizes.sum()),
        extra={SETS: {name: torch.from_numpy(own) for name, own in means.items()}},
    )


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
        The answer of `local.train`, with these metrics added. Where `client.personal_split` is set, the model
        that the client would deploy is scored too, as personal/loss and personal/<metric>.
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
    if client.personal_split:
        local.personalize(client, sent, update)
        metrics |= _with_prefix("personal", score(client, client.personal_split))
    return replace(update, metrics={**update.metrics, **metrics}) if metrics else update


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
    store = deepcopy(client.store)
    values = copies(client.model)
    client.config = replace(client.config, local_steps=steps, max_steps=None)
    local.prepare(client, sent)
    update = local.train(client, sent)
    client.end_training()
    local.personalize(client, sent, update)
    metrics = score(client, "test")
    client.load(values)
    client.store.clear()
    client.store.update(store)
    return Update(client=client.id, num_examples=client.data.size("test"), metrics=metrics)


def _with_prefix(prefix: str, metrics: dict[str, float]) -> dict[str, float]:
    return {f"{prefix}/{name}": value for name, value in metrics.items()}
