"""Where the final model of a finished run puts images of its clients' domains and of the unseen domain.

FFT-GP's Figure 7: t-SNE of the features before the head, training images of the clients (equal shares of
their domains) against as many of the unseen domain; one panel a run. The number is the proxy A-distance
(Ben-David et al., Analysis of Representations for Domain Adaptation, NIPS 2006, section 4): 0 where a linear
classifier cannot tell the two apart, 2 where it always can.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from rayfed.analysis.reopen import Finished, Indices, evenly, reopen
from rayfed.errors import ConfigError
from rayfed.executors.inline import InlineExecutor
from rayfed.federation.client import Client
from rayfed.federation.executor import Call
from rayfed.federation.local import Local
from rayfed.record.files import write_parquet
from rayfed.tuning.base import train_mode
from rayfed.types import Broadcast, Update

Vectors: TypeAlias = npt.NDArray[np.float64]
Rows: TypeAlias = Sequence[Mapping[str, Any]]
SPLIT = "shown"
PERPLEXITY = 30.0


@torch.no_grad()
def represent(client: Client, sent: Broadcast, local: Local) -> Update:
    """Features (n, D) before the head, and labels, of the images to be shown."""
    local.prepare(client, sent)
    client.model.eval()
    batches = list(client.batches(SPLIT, shuffle=False))
    features = torch.cat([client.model.features(x).cpu() for x, _ in batches])
    train_mode(client.model)
    labels = torch.cat([y.cpu() for _, y in batches])
    return Update(client=client.id, extra={"features": features, "labels": labels})


def chosen(run: Finished, images: int) -> dict[str, tuple[bool, Indices]]:
    """By domain: whether it is unseen, and the rows to show.

    The seen domains have equal shares of `images`, or all their training images if these are fewer; the
    unseen ones together as many as the seen ones.

    Raises:
        ConfigError: No domain was held out.
    """
    partition = run.setup.partition
    if not partition.held_out:
        raise ConfigError(
            f"data.held_out: {str(run.folder)!r} has seen all domains; run it with data.held_out=DOMAIN, or "
            f"give one run of protocol=leave_one_out"
        )
    seen: dict[str, list[Indices]] = {}
    for client in partition.clients:
        seen.setdefault(client.domain, []).append(client.train)
    found = {
        domain: (False, evenly(np.concatenate(parts), images // len(seen))) for domain, parts in seen.items()
    }
    total = sum(len(rows) for _, rows in found.values())
    share = -(-total // len(partition.held_out))
    return found | {domain: (True, evenly(rows, share)) for domain, rows in partition.held_out.items()}


def features(folder: Path, images: int) -> list[dict[str, Any]]:
    """Rows of the table `features`, which is written: domain, unseen, label, place in the plane, features."""
    run = reopen(folder)
    shown = chosen(run, images)
    splits = {domain: {SPLIT: rows} for domain, (_, rows) in shown.items()}
    executor = InlineExecutor(replace(run.setup.world, splits=splits), run.setup.weights)
    task = partial(represent, local=run.setup.experiment.local)
    calls = [Call(domain, task, "features", run.state.broadcast()) for domain in shown]
    answers = [answer for answer in executor.map(calls) if answer is not None]
    x = torch.cat([answer.extra["features"] for answer in answers]).double().numpy()
    domains = [answer.client for answer in answers for _ in answer.extra["labels"]]
    labels = torch.cat([answer.extra["labels"] for answer in answers]).tolist()
    places = in_plane(x)
    rows = [
        {"domain": domain, "unseen": shown[domain][0], "label": label, "x": px, "y": py, "features": own}
        for domain, label, (px, py), own in zip(domains, labels, places.tolist(), x.tolist(), strict=True)
    ]
    write_parquet(folder / "features.parquet", rows)
    return rows


def in_plane(x: Vectors) -> Vectors:
    """t-SNE in two dimensions: perplexity 30, PCA start, always the same seed. Shape (n, 2)."""
    from sklearn.manifold import TSNE

    perplexity = min(PERPLEXITY, (len(x) - 1) / 3)
    places: Vectors = TSNE(perplexity=perplexity, init="pca", random_state=0).fit_transform(x)
    return places


def proxy_a_distance(x: Vectors, unseen: npt.NDArray[np.bool_]) -> float:
    """2 (1 - 2 e) with the balanced error e of a linear classifier on images it was not fitted to, >= 0.

    Args:
        x: Features, shape (n, D).
        unseen: What is to be told apart, shape (n,), at least five of each.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedKFold, cross_val_predict
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    classifier = make_pipeline(StandardScaler(), LogisticRegression(class_weight="balanced", max_iter=5000))
    folds = StratifiedKFold(5, shuffle=True, random_state=0)
    told = cross_val_predict(classifier, x, unseen, cv=folds)
    error = np.mean([(told[unseen == kind] != kind).mean() for kind in (False, True)])
    return max(0.0, float(2 * (1 - 2 * error)))


def distance(rows: Rows) -> float:
    """Proxy A-distance between the seen and the unseen images of a table `features`."""
    x = np.array([row["features"] for row in rows])
    return proxy_a_distance(x, np.array([row["unseen"] for row in rows], dtype=np.bool_))
