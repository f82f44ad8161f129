"""FedCLIP: trains a small adapter on a frozen CLIP model, with a symmetric contrastive loss.

Lu, Hu, Wang, Xie, FedCLIP: Fast Generalization and Personalization for CLIP in Federated Learning, IEEE Data
Engineering Bulletin 2023 [lu2023fedclip], Algorithm 1 and Eq. 7 to 9.

Differs from the paper, as its released code does: text features are divided by their own norm (Eq. 6 prints
that of the image features), the loss is the mean of the two terms of Eq. 8 (the paper does not say how they
are combined), and a batch of B images has the targets 0 to B - 1 (the paper prints one more). The code
weights all clients equally; `server.weighting=uniform` does so here.
"""

from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from annotated_types import Ge
from torch import Tensor

from algorithms._arrays import Array, to_tensors
from rayfed import Broadcast, Client, Local, Method, Update
from rayfed.devices import numbers
from rayfed.federation.client_tasks import score
from rayfed.federation.local import pure
from rayfed.federation.params import sq_distance
from rayfed.models.backbone import Backbone
from rayfed.tuning.attention_adapter import AttentionAdapter
from rayfed.types import Batch, NonNegative


@dataclass(frozen=True)
class BatchMatching(Local):
    """Local training of a CLIP model.

    Attributes:
        objective: `symmetric`: contrastive loss between the images of a batch and the texts of their labels,
            in both directions; `class`: cross entropy over the class prompts.
        mu: Weight of a proximal term as in FedProx; the paper's FedProx baseline uses FedCLIP's loss.
        finetune_epochs: Number of passes over the client's data with which the received model is fine-tuned
            to the personal model; the best pass on the validation images is kept (the paper's Figure 3c). 0:
            the personal model is the one the client sends back.
    """

    objective: Literal["symmetric", "class"] = "symmetric"
    mu: NonNegative = 0.0
    finetune_epochs: Annotated[int, Ge(0)] = 0

    grouped: ClassVar[bool] = True

    @property
    def averages_rows(self) -> bool:
        return self.objective == "class"  # a contrast compares all rows of a batch

    def check(self, model: Backbone) -> None:
        if self.objective == "symmetric":
            model.class_features()  # raises where there is no text tower, or more than one prompt of a class

    def train(self, client: Client, sent: Broadcast) -> Update:
        update = super().train(client, sent)
        return replace(update, metrics={**update.metrics, **gate_statistics(client)})

    def step(self, client: Client, sent: Broadcast, batch: Batch, optimizer: torch.optim.Optimizer) -> None:
        if self.objective == "class" or len(batch[1]) > 1:  # one image has no contrast
            super().step(client, sent, batch, optimizer)

    @pure
    def loss(self, client: Client, sent: Broadcast, batch: Batch) -> Tensor:
        task = super().loss(client, sent, batch) if self.objective == "class" else self._match(client, batch)
        return task + self.mu / 2 * sq_distance(client.trainable(), sent.params) if self.mu else task

    def _match(self, client: Client, batch: Batch) -> Tensor:
        x, y = batch
        model = client.model
        texts = model.class_features()
        images = model(x, headless=True)
        loss: Tensor = symmetric_loss(images, texts, y, model.head.scale)
        return loss

    def personalize(self, client: Client, sent: Broadcast, update: Update) -> None:
        if not self.finetune_epochs:
            super().personalize(client, sent, update)
            return
        client.load({name: sent.params[name] for name in client.params() if name in sent.params})
        optimizer = client.optimizer()
        metric = client.objective.metric
        sign = 1.0 if client.objective.larger else -1.0
        best = -float("inf")
        kept = client.params()
        for _ in range(self.finetune_epochs):
            for batch in client.batches():
                self.step(client, sent, batch, optimizer)
            value = score(client, "val").get(metric)
            level = best if value is None else sign * value
            if level > best or not client.data.size("val"):  # else: the last pass
                best = level
                kept = client.params()
        client.load(kept)


@torch.no_grad()
def gate_statistics(client: Client) -> dict[str, float]:
    """Norms of the two matrices of an attention adapter, and the variation of its attention.

    Returns:
        gate/inner_norm, gate/outer_norm, and, where the network is frozen, gate/attention_variation: the
        coefficient of variation of the attention over the dimensions, mean over the client's first batch. It
        is 0 for uniform attention, which gives the zero-shot model. Weight decay shrinks the norms and
        thereby the variation. Empty for other adapters.
    """
    model = client.model
    gate = model.adapter
    if not isinstance(gate, AttentionAdapter):
        return {}
    statistics = {
        "gate/inner_norm": gate.inner.weight.norm(),
        "gate/outer_norm": gate.outer.weight.norm(),
    }
    if model.net_is_frozen:
        x, _ = next(client.batches("train", shuffle=False))
        attention = gate.attention(model.frozen_features(x))
        spread = attention.std(dim=1, correction=0) / attention.mean(dim=1)
        statistics["gate/attention_variation"] = spread.mean()
    return dict(zip(statistics, numbers([*statistics.values()]), strict=True))


def symmetric_loss(image_features: Array, text_features: Array, labels: Array, scale: Array) -> Array:
    """Mean of the cross entropies of images over texts and of texts over images; FedCLIP, Eq. 7 and 8.

    Each image is paired with the text of its label, so that texts repeat in a batch; the smallest possible
    value is therefore the mean of log n_y over the batch, where n_y is the number of images with label y.

    Args:
        image_features: One row per image, shape (B, D); rows are normalized here.
        text_features: One row per class, shape (C, D); rows are normalized here.
        labels: Labels, shape (B,).
        scale: Factor of the cosines (inverse temperature).
    """
    (images, texts), back = to_tensors(image_features, text_features)
    rows = torch.as_tensor(labels, dtype=torch.long, device=images.device)
    image_side, text_side = both_sides(images, texts, rows, scale)
    return back((image_side + text_side) / 2)


def both_sides(images: Tensor, texts: Tensor, labels: Tensor, scale: Any) -> tuple[Tensor, Tensor]:
    """Cross entropies of images over the texts of the batch, and of these texts over the images; Eq. 8.

    Args:
        images: One row per image, shape (B, D).
        texts: One row per class, shape (C, D).
        labels: Labels, shape (B,).
        scale: Factor of the cosines.
    """
    cosines = F.normalize(images, dim=-1) @ F.normalize(texts, dim=-1).T  # (B, C)
    matrix = (scale * cosines)[:, labels]  # (B, B): image by text
    targets = torch.arange(len(labels), device=images.device)
    return F.cross_entropy(matrix, targets), F.cross_entropy(matrix.T, targets)


METHOD = Method(local=BatchMatching, knob="its loss has no weight; local.mu adds FedProx to it")
