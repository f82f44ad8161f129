"""MOON: a contrastive loss draws features to those of the global model, away from the last local model's.

Li, He, Song, Model-Contrastive Federated Learning, CVPR 2021 [li2021moon], section 3.3.2 with Eq. 4,
and Algorithm 1.

Differs from the paper: the features are those before the head, without their own projection head. In its
first visit a client has no earlier local model, and no contrastive loss.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, softplus

from rayfed import Broadcast, Client, Knob, Local, Method, Update
from rayfed.federation.local import pure
from rayfed.objective import LANGUAGE_MODELING
from rayfed.types import Batch, NonNegative, Positive

PREVIOUS = "previous"


@dataclass(frozen=True)
class Moon(Local):
    """Local loss plus mu times the model-contrastive loss.

    Attributes:
        mu: Weight of the contrastive loss; 0 gives FedAvg.
        tau: Temperature.
    """

    mu: NonNegative = 1.0
    tau: Positive = 0.5

    not_for: ClassVar[frozenset[str]] = frozenset({LANGUAGE_MODELING})
    grouped: ClassVar[bool] = True

    def train(self, client: Client, sent: Broadcast) -> Update:
        update = super().train(client, sent)
        client.store[PREVIOUS] = {**client.store.get(PREVIOUS, {}), **update.params}
        return update

    @pure
    def loss(self, client: Client, sent: Broadcast, batch: Batch) -> Tensor:
        if not self.mu or PREVIOUS not in client.store:
            return super().loss(client, sent, batch)
        x, y = batch
        z = client.model.features(x)
        received = client.reference(sent.params, x, headless=True)
        previous = client.reference(client.store[PREVIOUS], x, headless=True)
        apart = contrast(z.flatten(1), received.flatten(1), previous.flatten(1), self.tau)
        client.measure(contrastive_loss=apart)
        return client.objective.loss(client.model.classify(z), y) + self.mu * apart


def contrast(z: Tensor, received: Tensor, previous: Tensor, tau: float) -> Tensor:
    """Mean of -log(e^(s_g / tau) / (e^(s_g / tau) + e^(s_p / tau))) with cosine similarities s; a scalar.

    Args:
        z: Features of the model in training, shape (B, d).
        received: Those of the received model.
        previous: Those of the client's model at the end of its last visit.
        tau: Temperature.
    """
    towards = cosine_similarity(z, received)
    away = cosine_similarity(z, previous)
    return torch.mean(softplus((away - towards) / tau))


METHOD = Method(local=Moon, knob=Knob("local.mu", 0.1, 10.0))
