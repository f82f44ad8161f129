"""Client-side work that does not depend on the method: score a model, and visit a client once."""

from __future__ import annotations

from dataclasses import replace

import torch

from rayfed.federation.client import Client
from rayfed.federation.local import Local, logits
from rayfed.tuning.base import train_mode
from rayfed.types import Broadcast, Update


@torch.no_grad()
def score(client: Client, split: str) -> dict[str, float]:
    """Mean loss and metrics (fractions) of `client.model` on one split, in evaluation mode.

    A split without examples gives no metrics. With exits, also the accuracy of both ways to predict: the mean
    of all exits and the last one.
    """
    client.model.eval()
    task, sums, n = client.objective, dict[str, float](), client.data.size(split)
    for x, y in client.batches(split, shuffle=False):
        output = client.model(x)
        found = task.scores(client.model.predict(output), y)
        if isinstance(output, list):
            for name, out in (("ensemble", logits(output)), ("last_exit", output[-1])):
                found[f"{task.metric}_{name}"] = task.scores(out, y)[task.metric]
        for name, value in found.items():
            sums[name] = sums.get(name, 0.0) + value
    train_mode(client.model)
    return {"loss": sums.pop("loss") / n, "num": n, **{name: s / n for name, s in sums.items()}} if n else {}


def evaluate(client: Client, sent: Broadcast, split: str = "val", local: Local | None = None) -> Update:
    """Score the broadcast model, on the inputs that `local` prepares."""
    if local is not None:
        local.prepare(client, sent)
    return Update(client=client.id, num_examples=client.data.size(split), metrics=score(client, split))


def fit(client: Client, sent: Broadcast, local: Local, start: str = "", end: str = "") -> Update:
    """One visit: score what was received, train, score what is sent back, score what the client would deploy.

    Args:
        client: Who is visited; its model holds `sent.params`.
        sent: What the server sent.
        local: The client half of the method.
        start: Split for the received model; its metrics come back as start/loss, start/<metric>. Empty: skip.
        end: Split for the trained parameters, as end/...
    """
    metrics: dict[str, float] = {}
    local.prepare(client, sent)
    if start:
        metrics |= _named("start", score(client, start))
    update = local.train(client, sent)
    if end:
        client.load(update.params)
        metrics |= _named("end", score(client, end))
    if client.personal_split:
        local.personalize(client, sent, update)
        metrics |= _named("personal", score(client, client.personal_split))
    return replace(update, metrics={**update.metrics, **metrics})


def _named(prefix: str, metrics: dict[str, float]) -> dict[str, float]:
    return {f"{prefix}/{name}": value for name, value in metrics.items()}
