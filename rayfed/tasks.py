"""Client-side work that does not depend on the method: score a model, and visit a client once."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

from rayfed.client import Client
from rayfed.local import Local, logits
from rayfed.tuning.base import train_mode
from rayfed.types import Broadcast, Update


@torch.no_grad()
def score(client: Client, split: str) -> dict[str, float]:
    """Mean cross entropy and accuracy (a fraction) of `client.model` on one split, in evaluation mode.

    A split without examples gives no metrics. With exits, also the accuracy of both ways to predict: the mean
    of all exits and the last one.
    """
    client.model.eval()
    loss, correct, n = 0.0, {"accuracy": 0}, client.data.size(split)
    for x, y in client.batches(split, shuffle=False):
        output = client.model(x)
        predicted = {"accuracy": client.model.predict(output)}
        if isinstance(output, list):
            predicted |= {"accuracy_ensemble": logits(output), "accuracy_last_exit": output[-1]}
        loss += F.cross_entropy(predicted["accuracy"], y, reduction="sum").item()
        for name, out in predicted.items():
            correct[name] = correct.get(name, 0) + int((out.argmax(-1) == y).sum())
    train_mode(client.model)
    return {"loss": loss / n, "num": n, **{name: count / n for name, count in correct.items()}} if n else {}


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
        start: Split for the received model; its metrics come back as start/loss, start/accuracy. Empty: skip.
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
