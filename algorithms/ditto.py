"""Ditto: beside the global model every client keeps one of its own, pulled towards the received one.

Li, Hu, Beirami, Smith, Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021,
Algorithm 1. Both models see the same batches.

Differs from the code: the server weighs clients by their data, not all the same.

`variant=mediabrain` is what the authors of GRACE call Ditto in their code: one model per client, which is
never replaced by the global one, only pulled towards it, and the mean of these models is the global one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from rayfed.federation.client import Client
from rayfed.federation.local import Local
from rayfed.federation.method import Method
from rayfed.federation.params import sq_distance
from rayfed.types import Broadcast, NonNegative, Params, Update

OWN = "own"


@dataclass(frozen=True)
class Ditto(Local):
    """Ordinary training of the global model, then of the client's own.

    Attributes:
        lam: Strength of the pull; 0: a purely local model.
        variant: `official`: two models per client; `mediabrain`: its own one only, which is also averaged.
    """

    deploys: ClassVar[Literal["global", "personal"]] = "personal"

    lam: NonNegative = 0.1
    variant: Literal["official", "mediabrain"] = "official"

    def train(self, client: Client, sent: Broadcast) -> Update:
        if self.variant == "mediabrain":
            self._train_own(client, sent)
            return client.update()
        seen = client.rng.get_state()
        update = super().train(client, sent)
        client.rng.set_state(seen)
        self._train_own(client, sent)
        return update

    def _train_own(self, client: Client, sent: Broadcast) -> None:
        client.load({**sent_part(client, sent), **client.store.get(OWN, {})})
        optimizer = client.optimizer()
        for batch in client.batches():
            optimizer.zero_grad()
            pulled(self.loss(client, sent, batch), client.trainable(), sent.params, self.lam).backward()
            client.clip_gradients()
            optimizer.step()
        client.store[OWN] = client.params()

    def personalize(self, client: Client, sent: Broadcast, update: Update) -> None:
        client.load(client.store[OWN])


def pulled(loss: Tensor, own: Mapping[str, Tensor], received: Mapping[str, Tensor], lam: float) -> Tensor:
    """The loss of a client's own model: Ditto, Eq. 2."""
    return loss + lam / 2 * sq_distance(own, received)


def sent_part(client: Client, sent: Broadcast) -> Params:
    """What was received of the tensors this client holds."""
    return {name: sent.params[name] for name in client.params() if name in sent.params}


METHOD = Method(local=Ditto)
