"""FedCLIP: a frozen CLIP model and one small adapter that all clients train, with a loss over batches.

Lu et al., FedCLIP: Fast Generalization and Personalization for CLIP in Federated Learning, IEEE Data
Engineering Bulletin 2023, Algorithm 1 and Eq. 7 to 9.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms._arrays import Array, to_tensors
from rayfed.client import Client
from rayfed.local import Local
from rayfed.method import Method
from rayfed.types import Batch, Broadcast


@dataclass(frozen=True)
class BatchMatching(Local):
    """Local training of a CLIP model.

    Attributes:
        objective: `symmetric`: find the label's text for every image of the batch and the other way round;
            `class`: cross entropy over the class prompts.
    """

    objective: Literal["symmetric", "class"] = "symmetric"

    def step(self, client: Client, sent: Broadcast, batch: Batch, optimizer: torch.optim.Optimizer) -> None:
        if self.objective == "class" or len(batch[1]) > 1:  # a single image has nothing to be matched with
            super().step(client, sent, batch, optimizer)

    def loss(self, client: Client, sent: Broadcast, batch: Batch) -> Tensor:
        if self.objective == "class":
            return super().loss(client, sent, batch)
        x, y = batch
        model = client.model
        texts = model.class_features()  # before the head is asked for its scale: it may not have one
        images = model(x, headless=True)
        loss: Tensor = symmetric_loss(images, texts, y, model.head.scale)
        return loss


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
