"""Base class of servers that group clients by the mean representation of their examples (FedGCR)."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from algorithms._arrays import Array, to_tensors
from algorithms._clustering import Clustering, Matrix, cluster, purity
from algorithms._losses import RECEIVED, LossKind, LossWeighted, fit_watched
from rayfed import Broadcast, Client, Cohort, Local, ServerState, Update
from rayfed.devices import HOST, numbers, total
from rayfed.errors import NobodyAnsweredError
from rayfed.federation.client_tasks import fit
from rayfed.federation.cohort import TRAINING
from rayfed.federation.executor import ClientTask
from rayfed.objective import CLASSIFICATION, NEXT_CHARACTER, TEXT_CLASSIFICATION
from rayfed.seeds import derive
from rayfed.tuning.base import train_mode
from rayfed.types import Count

REPRESENTATION = "representation"
GROUP = "group"
CENTERS = "centers"
PREVIOUS = "previous"
ROUNDS = "rounds"
MOST_SAMPLES = 300
"""Examples whose representations are recorded after the last round, over all clients."""
Empty: TypeAlias = Literal["drop", "zero"]


@dataclass(frozen=True)
class GroupingServer(LossWeighted):
    """FedAvg that groups clients in every round, and sends each its group if the local objective needs it.

    The representation of a client is the mean over classes of the mean representation of its examples: the
    output of GC-Net with the tuning `gc_prompt`, else the features before the head. All clients that have
    taken part so far are grouped; those absent in this round by their last representation.

    Attributes:
        clustering: Algorithm: gmm, kmeans, or finch, which chooses the number of groups itself.
        num_groups: Number of groups; none: the number of domains.
        rep_model: Model that computes the representations: the received one, which is the same for all
            clients, or the client's own model after training.
        rep_batches: Number of random training batches to use; none: the whole training split.
        empty_groups: Whether groups without members have no centre (drop) or the centre 0 (zero).
    """

    clustering: Clustering = "gmm"
    num_groups: Count | None = None
    rep_model: Literal["received", "local"] = "received"
    rep_batches: Count | None = None
    empty_groups: Empty = "drop"

    offers: ClassVar[frozenset[str]] = frozenset({CENTERS})
    tasks: ClassVar[frozenset[str]] = frozenset({CLASSIFICATION, NEXT_CHARACTER, TEXT_CLASSIFICATION})

    def round(self, state: ServerState, cohort: Cohort, local: Local) -> ServerState:
        state = local.exchange(state, cohort)
        messages = dict(self.send(state, cohort))
        if CENTERS in local.needs:
            messages = {cid: self._tell(sent, state, cid, cohort.rounds) for cid, sent in messages.items()}
        updates = cohort.run(self.training_task(local), messages, tag=TRAINING)
        return self.aggregate(state, cohort, updates)

    def _tell(self, message: Broadcast, state: ServerState, cid: str, rounds: int) -> Broadcast:
        """The message with the centres of the last grouping, and the client's group and representation."""
        group = state.memory.get(GROUP, {})
        known = state.memory.get(REPRESENTATION, {})
        if cid not in group:
            return message
        private = {CENTERS: state.memory[CENTERS], GROUP: group[cid], PREVIOUS: known[cid], ROUNDS: rounds}
        return replace(message, shared={**message.shared, **private})

    def training_task(self, local: Local) -> ClientTask:
        return partial(
            fit_represented, local=local, when=self.rep_model, batches=self.rep_batches, loss=self.loss
        )

    def aggregate(self, state: ServerState, cohort: Cohort, updates: Sequence[Update]) -> ServerState:
        state = self.group(state, cohort, updates)
        losses = self.losses(cohort, updates)
        groups = [state.memory[GROUP][u.client] for u in updates]
        weights = self.weigh(cohort, updates, losses, groups)
        self.record_weights(cohort, updates, weights)
        for update, loss, group, weight in zip(updates, losses, groups, weights, strict=True):
            cohort.record(
                "clusters",
                client=update.client,
                domain=cohort.clients[update.client].domain,
                cluster=group,
                weight=weight,
                loss=loss,
                representation=update.extra[REPRESENTATION].tolist(),
            )
        state = self.average(state, updates, weights)
        if cohort.round + 1 == cohort.rounds:
            record_samples(cohort, state)
        return state

    def weigh(
        self, cohort: Cohort, updates: Sequence[Update], losses: Sequence[float], groups: Sequence[int]
    ) -> list[float]:
        """Weights of the updates, summing to 1."""
        return self.base_weights(updates)

    def group(self, state: ServerState, cohort: Cohort, updates: Sequence[Update]) -> ServerState:
        """Group all clients with a known representation, and remember their groups and the centres.

        Records the purity of the groups with respect to domains as `cluster_accuracy`.
        """
        new = {u.client: u.extra[REPRESENTATION].clone() for u in updates}
        known: dict[str, Tensor] = {**state.memory.get(REPRESENTATION, {}), **new}
        ordered = cohort.clients.in_order(known)
        h: Matrix = torch.stack([known[cid] for cid in ordered]).double().numpy()
        domains = [cohort.clients[cid].domain for cid in ordered]
        wanted = self.num_groups or len(cohort.clients.domains)
        labels = cluster(h, wanted, self.clustering, derive(cohort.seed, "cluster", cohort.round))
        cohort.measure(cluster_accuracy=purity(labels.tolist(), domains), clusters=float(labels.max() + 1))
        return state.remember(
            **{
                REPRESENTATION: {cid: known[cid] for cid in ordered},
                GROUP: dict(zip(ordered, labels.tolist(), strict=True)),
                CENTERS: centers(h, labels, wanted if self.empty_groups == "zero" else 0),
            }
        )


def record_samples(cohort: Cohort, state: ServerState) -> None:
    """Record representations of random examples of every client under the final model, for a figure.

    The traffic of this exchange is not counted as the method's.
    """
    share = max(1, MOST_SAMPLES // len(cohort.ids))
    answers: Sequence[Update] = ()
    with suppress(NobodyAnsweredError):
        answers = cohort.for_reporting().run(
            partial(sample_representations, most=share), state.broadcast(), tag="samples"
        )
    for answer in answers:
        for h, label in zip(answer.extra[REPRESENTATION], answer.extra["labels"], strict=True):
            cohort.record(
                "samples",
                client=answer.client,
                domain=cohort.clients[answer.client].domain,
                label=int(label),
                representation=h.tolist(),
            )


@torch.no_grad()
def sample_representations(client: Client, sent: Broadcast, most: int) -> Update:
    """Task that returns the representations, shape (n, D), and labels of up to `most` random examples."""
    chosen = torch.randperm(client.data.size("train"), generator=client.rng)[:most]
    client.model.eval()
    x, y = client.batch("train", chosen)
    h = client.model.encode(x)[1]
    train_mode(client.model)
    return Update(client=client.id, extra={REPRESENTATION: h, "labels": y})


def centers(h: Matrix, labels: Any, at_least: int = 0) -> Tensor:
    """Unweighted mean of the members of each group, shape (T, D), float32.

    Args:
        h: One representation per row, shape (K, D).
        labels: Group of each row.
        at_least: Rows of zeros are appended up to this number of centres.
    """
    means = [h[labels == label].mean(axis=0) for label in range(int(labels.max()) + 1)]
    means += [np.zeros(h.shape[1])] * (at_least - len(means))
    return torch.from_numpy(np.stack(means)).float()


def client_representation(h: Array, y: Array, num_classes: int | None = None) -> Array:
    """Mean over the classes present of the mean over their examples; FedGCR, Eq. 4. Shape (D,).

    Args:
        h: One representation per row, shape (n, D).
        y: Labels, shape (n,).
        num_classes: Number C of classes, with which a device is not waited for; none: they are looked for.
    """
    (rows, labels), back = to_tensors(h, y)
    if num_classes is not None and rows.device != HOST:
        known = torch.arange(num_classes, device=rows.device)
        members = (labels == known[:, None]).type(rows.dtype)  # (C, n)
        counts = members.sum(1, keepdim=True)
        every = members @ rows / counts.clamp(min=1)
        return back(every.sum(0) / (counts > 0).sum())
    means = [rows[labels == label].mean(0) for label in labels.unique()]
    return back(torch.stack(means).mean(0))


def fit_represented(
    client: Client,
    sent: Broadcast,
    local: Local,
    when: Literal["received", "local"] = "received",
    batches: int | None = None,
    loss: LossKind = "received",
) -> Update:
    """As `fit`, and also returns the client's representation, the loss of the received model, and `loss`.

    Args:
        client: The client; its model holds `sent.params`.
        sent: Message from the server.
        local: Client half of the method.
        when: Model that computes the representation: the received or the trained one.
        batches: Number of random batches to use; None: the whole training split.
        loss: Kind of loss by which the server weights, as of `LossWeighted`.
    """
    local.prepare(client, sent)
    before, representation = loss_and_representation(client, batches if when == "received" else None)
    update = fit(client, sent, local) if loss == "received" else fit_watched(client, sent, local, loss)
    if when == "local":
        client.load(update.params)
        representation = loss_and_representation(client, batches)[1]
    return replace(
        update,
        metrics={**update.metrics, RECEIVED: before},
        extra={**update.extra, REPRESENTATION: representation},
    )


@torch.no_grad()
def loss_and_representation(client: Client, batches: int | None = None) -> tuple[float, Tensor]:
    """Mean loss of the model over the training split, and the client's representation, in evaluation mode.

    Args:
        client: The client; `client.model` is used as it is.
        batches: Number of random batches for the representation; None: the whole training split.

    Returns:
        The loss, and the representation, shape (D,).
    """
    model = client.model
    losses = []
    rows = []
    labels = []
    model.eval()
    for x, y in client.batches(shuffle=False):
        features, h = model.encode(x)
        output = model.classify(features) if model.exits is None else model.predict(model(x))
        losses.append(client.objective.sums(output, y)["loss"])
        rows.append(h)
        labels.append(y)
    every = torch.cat(rows)
    classes = torch.cat(labels)
    if batches is not None:
        order = torch.randperm(len(every), generator=client.rng)[: batches * client.config.batch_size]
        chosen = client.to_device(order)
        representation = client_representation(every[chosen], classes[chosen], model.num_classes)
    else:
        representation = client_representation(every, classes, model.num_classes)
    train_mode(model)
    return total(numbers(losses)) / len(classes), representation
