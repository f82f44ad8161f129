"""Ditto: each client trains a personal model, regularized towards the global model.

Li, Hu, Beirami, Smith, Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021
[li2021ditto], Algorithm 1. The global and the personal model are trained on the same batches.

Differs from the released code: the server weights clients by their number of examples instead of equally.

`variant=mediabrain` is the method that the authors of GRACE call Ditto in their code: each client has one
model, which is regularized towards the global model and never replaced by it, and the global model is the
mean of these.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from rayfed import Broadcast, Client, Knob, Local, Method, Update
from rayfed.federation.params import sq_distance
from rayfed.types import Batch, NonNegative, Params

OWN = "own"


@dataclass(frozen=True)
class Ditto(Local):
    """Local training of the global model, then of the personal model.

    Attributes:
        lam: Weight of the regularization; 0: the personal model ignores the global one.
        variant: `official`: two models per client; `mediabrain`: the personal model only, which is also
            averaged.
    """

    deploys: ClassVar[Literal["global", "personal"]] = "personal"

    lam: NonNegative = 0.1
    variant: Literal["official", "mediabrain"] = "official"

    grouped: ClassVar[bool] = True

    def train(self, client: Client, sent: Broadcast) -> Update:
        if self.variant == "mediabrain":
            self._train_own(client, sent)
            return client.update()
        rng_state = client.rng.get_state()
        update = super().train(client, sent)
        client.rng.set_state(rng_state)  # the personal model sees the same batches
        self._train_own(client, sent)
        return update

    def _train_own(self, client: Client, sent: Broadcast) -> None:
        client.load({**sent_part(client, sent), **client.store.get(OWN, {})})
        optimizer = client.optimizer()

        def loss(batch: Batch) -> Tensor:
            task = self.loss(client, sent, batch)
            return personal_loss(task, client.trainable(), sent.params, self.lam)

        for batch in client.batches():
            optimizer.zero_grad()
            client.backward(loss, batch)
            client.clip_gradients()
            optimizer.step()
        client.store[OWN] = client.params()

    def personalize(self, client: Client, sent: Broadcast, update: Update) -> None:
        client.load(client.store.get(OWN, {}))


def personal_loss(
    loss: Tensor, own: Mapping[str, Tensor], received: Mapping[str, Tensor], lam: float
) -> Tensor:
    """Loss of the personal model: `loss` + lam / 2 * squared distance to the received one; Ditto, Eq. 2."""
    return loss + lam / 2 * sq_distance(own, received)


def sent_part(client: Client, sent: Broadcast) -> Params:
    """Received values of the tensors that this client holds."""
    return {name: sent.params[name] for name in client.params() if name in sent.params}


METHOD = Method(local=Ditto, knob=Knob("local.lam", 0.05, 2.0))
