"""FedGC: prompts customised per image, and a local objective that knows the client's group.

Gong et al., FedGCR, AAAI 2024, section "Group customization", Eq. 6-8; the authors' ablation "FedGC only":
clients are grouped every round, but averaged by their data. Needs tuning=gc_prompt.

Differs from the authors' code: see the options; `clean`, the default, follows the paper where it is explicit.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms._arrays import Array, to_tensors
from algorithms._grouping import CENTERS, GROUP, PREVIOUS, ROUNDS, GroupingServer
from rayfed.federation.client import Client
from rayfed.federation.local import Local
from rayfed.federation.method import Method
from rayfed.types import Batch, Broadcast, NonNegative, Params, Positive, Update

Similarity: TypeAlias = Literal["cosine", "dot"]
MINE, RECEIVED_BEFORE, OPTIMIZER = "trained", "received_before", "optimizer"


@dataclass(frozen=True)
class GroupCustomization(Local):
    """Cross entropy + lambda1 group customisation + lambda2 representation alignment.

    A client that has never been grouped, as everybody in the first round, minimises cross entropy only.

    Attributes:
        lambda1: Weight of the pull of h towards the group's centre.
        lambda2: Weight of the pull of the features towards the received model's and away from its own of the
            round before.
        tau: Temperature of the first.
        tau_alignment: Temperature of the second.
        similarity: Of two vectors; `dot` is the paper's notation, `cosine` the authors' code.
        lambda_mode: `constant`, or the authors' weights: 0.1 (0.5 + 0.5 (r - 1) / R) and 0.05.
        z0_model: What features are pulled towards: those of the model just received, or of the one received
            the round before, as in the authors' code.
        first_loss: Without a group: cross entropy, or (authors) that plus the one with prompts that GC-Net
            does not touch.
        optimizer: `train`: as the section says; `authors`: AdamW with learning rates 1e-2, 1e-3, 1e-3 and
            weight decays 1e-5, 1e-3, 1e-2 for prompts, GC-Net and head.
        keep_optimizer: Carry the optimizer's moments from round to round.
    """

    lambda1: NonNegative = 0.5
    lambda2: NonNegative = 0.1
    tau: Positive = 0.5
    tau_alignment: Positive = 0.5
    similarity: Similarity = "cosine"
    lambda_mode: Literal["constant", "authors"] = "constant"
    z0_model: Literal["received", "stale"] = "received"
    first_loss: Literal["customized", "both"] = "customized"
    optimizer: Literal["train", "authors"] = "train"
    keep_optimizer: bool = False

    needs: ClassVar[frozenset[str]] = frozenset({CENTERS, "prompts by image"})

    def train(self, client: Client, sent: Broadcast) -> Update:
        optimizer = self._optimizer(client)
        for batch in client.batches():
            self.step(client, sent, batch, optimizer)
        update = client.update()
        client.store[MINE] = update.params
        if self.z0_model == "stale":
            client.store[RECEIVED_BEFORE] = {n: v.detach().cpu().clone() for n, v in sent.params.items()}
        if self.keep_optimizer:
            client.store[OPTIMIZER] = optimizer.state_dict()
        return update

    def loss(self, client: Client, sent: Broadcast, batch: Batch) -> Tensor:
        x, y = batch
        model, shared = client.model, sent.shared
        z, h = model.encode(x)
        loss = client.objective.loss(model.classify(z), y)
        if CENTERS not in shared or MINE not in client.store:
            if self.first_loss == "both":
                plain = model.classify(model.encode(x, customize=False)[0])
                loss = loss + client.objective.loss(plain, y)
            return loss
        pull, align = self._strengths(sent)
        h_loss = group_customization_loss(
            h, shared[CENTERS], shared[GROUP], shared[PREVIOUS], self.tau, self.similarity
        )
        loss = loss + pull * h_loss
        if align:
            z0 = client.reference(self._reference(client, sent), x, headless=True)
            z_previous = client.reference(client.store[MINE], x, headless=True)
            loss = loss + align * representation_alignment_loss(
                z, z0, z_previous, self.tau_alignment, self.similarity
            )
        return loss

    def _strengths(self, sent: Broadcast) -> tuple[float, float]:
        if self.lambda_mode == "constant":
            return self.lambda1, self.lambda2
        return authors_strengths(sent.round + 1, sent.shared[ROUNDS])

    def _reference(self, client: Client, sent: Broadcast) -> Params:
        params: Any = client.store.get(RECEIVED_BEFORE) if self.z0_model == "stale" else None
        return sent.params if params is None else params

    def _optimizer(self, client: Client) -> torch.optim.Optimizer:
        optimizer = client.optimizer() if self.optimizer == "train" else authors_optimizer(client)
        if self.keep_optimizer and OPTIMIZER in client.store:
            optimizer.load_state_dict(client.store[OPTIMIZER])
        return optimizer


def authors_strengths(round: int, rounds: int) -> tuple[float, float]:
    """Effective weights of the two terms in the authors' code, in round 1, 2, ... of `rounds`."""
    return 0.1 * (0.5 + 0.5 * (round - 1) / rounds), 0.05


def authors_optimizer(client: Client) -> torch.optim.Optimizer:
    """AdamW with the learning rates and weight decays of the authors' code for prompts, GC-Net and head."""
    live = client.trainable()
    groups = (("prompt", 1e-2, 1e-5), ("gc_net.", 1e-3, 1e-3), ("", 1e-3, 1e-2))
    taken: set[str] = set()
    found = []
    for prefix, lr, decay in groups:
        names = [name for name in live if name.startswith(prefix) and name not in taken]
        taken.update(names)
        if names:
            found.append({"params": [live[name] for name in names], "lr": lr, "weight_decay": decay})
    return torch.optim.AdamW(found)


def group_customization_loss(
    h: Array, centers: Array, cluster: int, previous: Array, tau: float, similarity: Similarity = "cosine"
) -> Array:
    """Pull h towards the centre of its group, away from the other centres and its own past; FedGCR, Eq. 7.

    Per sample minus the log share of the own centre among all centres and the previous representation; the
    mean over the batch.

    Args:
        h: GC-Net's output, shape (B, D).
        centers: Centres of all groups, shape (T, D).
        cluster: The client's group.
        previous: The client's representation of the round before, shape (D,).
        tau: Temperature.
        similarity: cosine or dot.
    """
    (rows, known, past), back = to_tensors(h, centers, previous)
    others = torch.cat((known, past.reshape(1, -1))).detach()
    logits = similarities(rows[:, None, :], others[None], similarity) / tau
    return back(F.cross_entropy(logits, torch.full((len(rows),), int(cluster), device=rows.device)))


def representation_alignment_loss(
    z: Array, z_global: Array, z_previous: Array, tau: float, similarity: Similarity = "cosine"
) -> Array:
    """Pull features towards the global model's, away from the client's previous model's; FedGCR, Eq. 8.

    Args:
        z: Features under the model being trained, shape (B, D).
        z_global: The same images under the received model.
        z_previous: The same images under the client's own model of the round before.
        tau: Temperature.
        similarity: cosine or dot.
    """
    (rows, towards, away), back = to_tensors(z, z_global, z_previous)
    pair = [similarities(rows, other.detach(), similarity) / tau for other in (towards, away)]
    logits = torch.stack(pair, dim=1)
    return back(F.cross_entropy(logits, torch.zeros(len(rows), dtype=torch.long, device=rows.device)))


def similarities(a: Tensor, b: Tensor, similarity: Similarity) -> Tensor:
    """Over the last dimension, with broadcasting."""
    return F.cosine_similarity(a, b, dim=-1) if similarity == "cosine" else (a * b).sum(-1)


METHOD = Method(server=GroupingServer, local=GroupCustomization)
