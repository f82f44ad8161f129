"""FedCLIP: a frozen CLIP model and one small adapter that all clients train, with a loss over batches.

Lu et al., FedCLIP: Fast Generalization and Personalization for CLIP in Federated Learning, IEEE Data
Engineering Bulletin 2023, Algorithm 1 and Eq. 7 to 9.
"""

from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from annotated_types import Ge
from torch import Tensor

from algorithms._arrays import Array, to_tensors
from rayfed.federation.client import Client
from rayfed.federation.local import Local
from rayfed.federation.method import Method
from rayfed.federation.params import sq_distance
from rayfed.federation.visit import score
from rayfed.tuning.attention_adapter import AttentionAdapter
from rayfed.types import Batch, Broadcast, NonNegative, Update


@dataclass(frozen=True)
class BatchMatching(Local):
    """Local training of a CLIP model.

    Attributes:
        objective: `symmetric`: find the label's text for every image of the batch and the other way round;
            `class`: cross entropy over the class prompts.
        mu: Proximal term, as in FedProx: the paper's baseline of that name has FedCLIP's loss.
        finetune_epochs: The model scored as personal is the received one after so many passes over the
            client's own data, the best of them on its validation images (the paper's Figure 3c); 0: what the
            client sends back.
    """

    objective: Literal["symmetric", "class"] = "symmetric"
    mu: NonNegative = 0.0
    finetune_epochs: Annotated[int, Ge(0)] = 0

    def train(self, client: Client, sent: Broadcast) -> Update:
        update = super().train(client, sent)
        return replace(update, metrics={**update.metrics, **gate_statistics(client)})

    def step(self, client: Client, sent: Broadcast, batch: Batch, optimizer: torch.optim.Optimizer) -> None:
        if self.objective == "class" or len(batch[1]) > 1:  # a single image has nothing to be matched with
            super().step(client, sent, batch, optimizer)

    def loss(self, client: Client, sent: Broadcast, batch: Batch) -> Tensor:
        task = super().loss(client, sent, batch) if self.objective == "class" else self._match(client, batch)
        return task + self.mu / 2 * sq_distance(client.trainable(), sent.params) if self.mu else task

    def _match(self, client: Client, batch: Batch) -> Tensor:
        x, y = batch
        model = client.model
        texts = model.class_features()  # before the head is asked for its scale: it may not have one
        images = model(x, headless=True)
        loss: Tensor = symmetric_loss(images, texts, y, model.head.scale)
        return loss

    def personalize(self, client: Client, sent: Broadcast, update: Update) -> None:
        if not self.finetune_epochs:
            super().personalize(client, sent, update)
            return
        client.load({name: sent.params[name] for name in client.params() if name in sent.params})
        optimizer = client.optimizer()
        best, kept = -1.0, client.params()
        for _ in range(self.finetune_epochs):
            for batch in client.batches():
                self.step(client, sent, batch, optimizer)
            accuracy = score(client, "val").get("accuracy", best)
            if accuracy > best or not client.data.size("val"):  # without validation images: the last
                best, kept = accuracy, client.params()
        client.load(kept)


@torch.no_grad()
def gate_statistics(client: Client) -> dict[str, float]:
    """Norms of a gate's two matrices and how uneven its attention is; nothing for other adapters.

    Returns:
        gate/inner_norm, gate/outer_norm, and gate/attention_variation: the coefficient of variation of the
        attention over the dimensions, mean over the client's first training images. It is 0 for uniform
        attention, which is zero-shot; the coupled weight decay shrinks the norms and with them the variation.
    """
    model, gate = client.model, client.model.adapter
    if not isinstance(gate, AttentionAdapter):
        return {}
    found = {
        "gate/inner_norm": float(gate.inner.weight.norm()),
        "gate/outer_norm": float(gate.outer.weight.norm()),
    }
    if model.net_is_frozen:
        x, _ = next(client.batches("train", shuffle=False))
        attention = gate.attention(model.frozen_features(x))
        spread = attention.std(dim=1, correction=0) / attention.mean(dim=1)
        found["gate/attention_variation"] = float(spread.mean())
    return found


def symmetric_loss(image_features: Array, text_features: Array, labels: Array, scale: Array) -> Array:
    """Mean of the cross entropies of images over texts and of texts over images; FedCLIP, Eq. 7 and 8.

    Each image brings the text of its label, so texts repeat in a batch, and the smallest value is the mean
    of log n_y with n_y images of label y, not 0.

    Args:
        image_features: Shape (B, D), of any length.
        text_features: One row per class, shape (C, D), of any length.
        labels: Shape (B,).
        scale: Factor on the cosines.
    """
    (images, texts), back = to_tensors(image_features, text_features)
    rows = torch.as_tensor(labels, dtype=torch.long, device=images.device)
    cosines = F.normalize(images, dim=-1) @ F.normalize(texts, dim=-1).T  # (B, C)
    matrix = (scale * cosines)[:, rows]  # (B, B): image by text
    targets = torch.arange(len(rows), device=images.device)
    return back((F.cross_entropy(matrix, targets) + F.cross_entropy(matrix.T, targets)) / 2)


METHOD = Method(local=BatchMatching)
