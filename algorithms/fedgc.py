"""FedGC: group customization of prompts and features at the clients.

Cheng, Yeh, Chen, Pastor, Chen, FedGCR, AAAI 2024 [cheng2024fedgcr], sections 3.1 and 3.3, Eq. 6 to 8; the row
FedGC of Table 5: clients are grouped in every round, but weighted by their number of examples. Needs
`tuning=gc_prompt`.

Differs from the paper: the similarity in Eq. 7 and 8 is the cosine, as in the authors' code, because products
of features of this width saturate the exponential; `similarity=dot` is the paper's. Differs from the authors'
code: the other defaults follow the paper where it is explicit; the options select the behaviour of the code.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms._arrays import Array, to_tensors
from algorithms._grouping import CENTERS, GROUP, PREVIOUS, ROUNDS, GroupingServer
from rayfed import Broadcast, Client, Knob, Local, Method, Update
from rayfed.federation.local import pure
from rayfed.types import Batch, NonNegative, Params, Positive

Similarity: TypeAlias = Literal["cosine", "dot"]
TRAINED = "trained"
RECEIVED_BEFORE = "received_before"


@dataclass(frozen=True)
class GroupCustomization(Local):
    """Cross entropy + lambda1 group customization + lambda2 representation alignment.

    A client that has not been grouped yet, such as all clients in the first round, minimizes cross entropy
    only.

    Attributes:
        lambda1: Weight of the group customization loss (Eq. 7).
        lambda2: Weight of the representation alignment loss (Eq. 8).
        tau: Temperature of the group customization loss.
        tau_alignment: Temperature of the representation alignment loss.
        similarity: Similarity of two vectors: `dot` as the paper writes it, or `cosine` as in the authors'
            code.
        lambda_mode: `constant`: lambda1 and lambda2; `authors`: 0.1 (0.5 + 0.5 (r - 1) / R) and 0.05 in round
            r = 1..R, as in the authors' code.
        z0_model: Model whose features are the positive example of the alignment: the received one, or (stale)
            the one received in the round before, as in the authors' code.
        first_loss: Loss of a client without a group: cross entropy, or (both) also the cross entropy with
            prompts that GC-Net does not customize, as in the authors' code.
        optimizer: `train`: as in the config section `train`; `authors`: AdamW with learning rates 1e-2, 1e-3,
            1e-3 and weight decays 1e-5, 1e-3, 1e-2 for prompts, GC-Net and head.
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

    needs: ClassVar[frozenset[str]] = frozenset({CENTERS, "prompts by image"})

    grouped: ClassVar[bool] = True

    def train(self, client: Client, sent: Broadcast) -> Update:
        optimizer = (
            client.optimizer() if self.optimizer == "train" else client.keep(authors_optimizer(client))
        )
        for batch in client.batches():
            self.step(client, sent, batch, optimizer)
        update = client.update()
        client.store[TRAINED] = update.params
        if self.z0_model == "stale":
            client.store[RECEIVED_BEFORE] = {n: v.detach().clone() for n, v in sent.params.items()}
        return update

    @pure
    def loss(self, client: Client, sent: Broadcast, batch: Batch) -> Tensor:
        x, y = batch
        model = client.model
        shared = sent.shared
        z, h = model.encode(x)
        loss = client.objective.loss(model.classify(z), y)
        if CENTERS not in shared or TRAINED not in client.store:
            if self.first_loss == "both":
                plain = model.classify(model.encode(x, customize=False)[0])
                loss = loss + client.objective.loss(plain, y)
            return loss
        weight1, weight2 = self._loss_weights(sent)
        h_loss = group_customization_loss(
            h, shared[CENTERS], shared[GROUP], shared[PREVIOUS], self.tau, self.similarity
        )
        loss = loss + weight1 * h_loss
        if weight2:
            z0 = client.reference(self._reference(client, sent), x, headless=True)
            z_previous = client.reference(client.store[TRAINED], x, headless=True)
            loss = loss + weight2 * representation_alignment_loss(
                z, z0, z_previous, self.tau_alignment, self.similarity
            )
        return loss

    def _loss_weights(self, sent: Broadcast) -> tuple[float, float]:
        if self.lambda_mode == "constant":
            return self.lambda1, self.lambda2
        return authors_loss_weights(sent.round + 1, sent.shared[ROUNDS])

    def _reference(self, client: Client, sent: Broadcast) -> Params:
        params: Any = client.store.get(RECEIVED_BEFORE) if self.z0_model == "stale" else None
        return sent.params if params is None else params


def authors_loss_weights(round: int, rounds: int) -> tuple[float, float]:
    """Weights of the two losses in the authors' code.

    Args:
        round: Round number, from 1.
        rounds: Total number of rounds.
    """
    return 0.1 * (0.5 + 0.5 * (round - 1) / rounds), 0.05


def authors_optimizer(client: Client) -> torch.optim.Optimizer:
    """AdamW with the learning rates and weight decays of the authors' code for prompts, GC-Net and head.

    `train.schedule` multiplies these learning rates too.
    """
    live = client.trainable()
    groups = (("prompt", 1e-2, 1e-5), ("gc_net.", 1e-3, 1e-3), ("", 1e-3, 1e-2))
    taken: set[str] = set()
    param_groups = []
    for prefix, lr, decay in groups:
        names = [name for name in live if name.startswith(prefix) and name not in taken]
        taken.update(names)
        if names:
            params = [live[name] for name in names]
            param_groups.append({"params": params, "lr": lr * client.lr_factor, "weight_decay": decay})
    return torch.optim.AdamW(param_groups)


def group_customization_loss(
    h: Array,
    centers: Array,
    cluster: int | Tensor,
    previous: Array,
    tau: float,
    similarity: Similarity = "cosine",
) -> Array:
    """Group customization loss; FedGCR, Eq. 7.

    Contrastive loss of each example, mean over the batch: the positive is the centre of the client's group,
    the negatives are the other centres and the client's previous representation.

    Args:
        h: GC-Net's output, shape (B, D).
        centers: Centres of all groups, shape (T, D).
        cluster: Index of the client's group, a number or a tensor without dimensions.
        previous: The client's representation in the last grouping, shape (D,).
        tau: Temperature.
        similarity: `cosine` or `dot`.
    """
    (rows, known, past), back = to_tensors(h, centers, previous)
    others = torch.cat((known, past.reshape(1, -1))).detach()
    logits = similarities(rows[:, None, :], others[None], similarity) / tau
    own = cluster if isinstance(cluster, Tensor) else torch.full((), int(cluster), device=rows.device)
    return back(F.cross_entropy(logits, own.expand(len(rows))))


def representation_alignment_loss(
    z: Array, z_global: Array, z_previous: Array, tau: float, similarity: Similarity = "cosine"
) -> Array:
    """Representation alignment loss; FedGCR, Eq. 8.

    Contrastive loss of each example, mean over the batch: the positive are the features of the global model,
    the negative those of the model that the client trained before.

    Args:
        z: Features of the model being trained, shape (B, D).
        z_global: Features of the same examples under the received model, shape (B, D).
        z_previous: Features of the same examples under the model that the client trained before.
        tau: Temperature.
        similarity: `cosine` or `dot`.
    """
    (rows, positive, negative), back = to_tensors(z, z_global, z_previous)
    pair = [similarities(rows, other.detach(), similarity) / tau for other in (positive, negative)]
    logits = torch.stack(pair, dim=1)
    return back(F.cross_entropy(logits, torch.zeros(len(rows), dtype=torch.long, device=rows.device)))


def similarities(a: Tensor, b: Tensor, similarity: Similarity) -> Tensor:
    """Similarities of vectors in the last dimension, with broadcasting over the others."""
    return F.cosine_similarity(a, b, dim=-1) if similarity == "cosine" else (a * b).sum(-1)


METHOD = Method(server=GroupingServer, local=GroupCustomization, knob=Knob("local.lambda1", 0.1, 2.0))
