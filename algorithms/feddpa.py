"""FedDPA: two LoRA adapters at each client, a global one and its own, mixed by how familiar an example is.

Yang et al., Dual-Personalizing Adapter for Federated Foundation Models, NeurIPS 2024 [yang2024feddpa]. The
global adapter is trained alone and averaged. Before it, from the second round on, a client trains its own one
for as many steps, with the frozen global one next to it: W x + (1 - alpha) B A x + alpha B' A' x. It is never
sent. An example x is predicted with the weight w = lam times the mean cosine between its features and those
of some training examples of the client, all computed with its own adapter, in place of alpha.

The paper is not in our copy: this follows its abstract and parts of the released code, and is its variant T,
in which both adapters are trained in every round; F, which trains the own one after all rounds, is not built.
The largest weight `lam` is 1, as in the code, where it is 0.5 with a flag. Our choices: the own adapter
begins with LoRA's start values; a negative w is 0; the training examples are drawn for a visit and not for
each example; the head is trained with the global adapter. Language models are refused, because they have
features of tokens and not of examples.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms._partial import partial_step
from rayfed import Broadcast, Client, Knob, Local, Method, Update
from rayfed.models.backbone import Backbone
from rayfed.objective import LANGUAGE_MODELING
from rayfed.tuning.lora import WEIGH, mix
from rayfed.types import Count, Fraction

OWN = (".own_A.weight", ".own_B.weight")
"""Ends of the names of a client's own factors."""
TRAINED = "trained"
"""Name in a client's store: whether its own adapter was trained."""


@dataclass(frozen=True)
class DualAdapters(Local):
    """Local training of the client's own adapter, then of the global one.

    Attributes:
        alpha: Weight of the own adapter while it is trained.
        lam: Weight of the own adapter for an example that is as the client's training examples.
        instances: Training examples with which an example is compared.
        stays: Tensors that stay at the client.
    """

    alpha: Fraction = 0.5
    lam: Fraction = 1.0
    instances: Count = 5
    stays: tuple[str, ...] = field(default=(r".*\.own_[AB]\.weight",), kw_only=True)

    needs: ClassVar[frozenset[str]] = frozenset({"lora"})
    tuning: ClassVar[Mapping[str, object]] = {"personal": True}
    not_for: ClassVar[frozenset[str]] = frozenset({LANGUAGE_MODELING})
    changes_passes: ClassVar[bool] = True

    def prepare(self, client: Client, sent: Broadcast) -> None:
        model, n = client.model, client.data.size("train")
        vars(model).pop(WEIGH, None)
        mix(model, 0.0)
        if n and client.store.get(TRAINED):
            before = client.rng.get_state()
            chosen = torch.randperm(n, generator=client.rng)[: self.instances]
            client.rng.set_state(before)  # the batches are those of FedAvg
            vars(model)[WEIGH] = Weights(client.batch("train", chosen)[0], self.lam)

    def train(self, client: Client, sent: Broadcast) -> Update:
        vars(client.model).pop(WEIGH, None)
        common, own = client.optimizer(), client.optimizer()  # in one order, for train.keep_optimizer
        if sent.round:
            before = client.rng.get_state()
            mix(client.model, float(self.alpha))
            for batch in client.batches():
                partial_step(self, client, sent, batch, own, lambda name: name.endswith(OWN))
            client.rng.set_state(before)  # both adapters see the same batches
            client.store[TRAINED] = client.num_steps() > 0
        mix(client.model, 0.0)
        for batch in client.batches():
            partial_step(self, client, sent, batch, common, lambda name: not name.endswith(OWN))
        self.prepare(client, sent)
        return client.update()


class Weights:
    """Sets the weight of a client's own adapter for each example of a batch before it is scored."""

    def __init__(self, known: Tensor, lam: float) -> None:
        """Args: known: training examples of the client. lam: as of `DualAdapters`."""
        self.known, self.lam = known, lam
        self.features: Tensor | None = None

    @torch.no_grad()
    def __call__(self, model: Backbone, x: Tensor) -> None:
        """Args: model: the model. x: the batch."""
        mix(model, torch.ones(len(x), device=x.device))
        features = model.features(x)
        if self.features is None:
            mix(model, torch.ones(len(self.known), device=x.device))
            self.features = model.features(self.known)
        mix(model, weights(features, self.features, self.lam))


def weights(features: Tensor, known: Tensor, lam: float) -> Tensor:
    """Weight of each example, shape (B,).

    Args:
        features: Features of the examples, shape (B, width).
        known: Features of S training examples, shape (S, width).
        lam: Weight where all cosines are 1.
    """
    cosines = F.normalize(features, dim=1) @ F.normalize(known, dim=1).T
    return lam * cosines.mean(1).clamp(min=0)


METHOD = Method(local=DualAdapters, knob=Knob("local.lam", 0.1, 1.0))
