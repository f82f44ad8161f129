"""FedPGP: a common prompt, and at each client a low-rank matrix that is added to it; with a contrastive loss.

Cui et al., Harmonizing Generalization and Personalization in Federated Prompt Learning, ICML 2024
[cui2024fedpgp], from its abstract and released code. The contrastive loss draws the text features of the
common prompt to those of CLIP's own prompt, away from those of the client's prompt. The matrices U and V stay
at the client, and clients are scored with their own.

Differs from the released code: CLIP's own prompt is `model.template`; there it is a row of X.
"""

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from algorithms.moon import contrast
from rayfed import Broadcast, Client, Knob, Local, Method
from rayfed.types import Batch, NonNegative, Positive


@dataclass(frozen=True)
class FedPgp(Local):
    """Local training of the common prompt and of the client's own matrices.

    Attributes:
        mu: Weight of the contrastive loss.
        tau: Its temperature.
        stays: Tensors that stay at the client.
    """

    mu: NonNegative = 1.0
    tau: Positive = 0.5
    stays: tuple[str, ...] = field(default=(r"text\.prompter\..*",), kw_only=True)

    needs: ClassVar[frozenset[str]] = frozenset({"low-rank prompt"})

    def loss(self, client: Client, sent: Broadcast, batch: Batch) -> Tensor:
        if not self.mu:
            return super().loss(client, sent, batch)
        x, y = batch
        model = client.model
        assert model.text is not None  # the tuning needs it
        own = model.class_features()
        common = model.class_features(context=model.text.context)
        apart = contrast(common, model.head.weight, own, self.tau)
        client.measure(contrastive_loss=apart)
        return client.objective.loss(model.head(model.features(x), own), y) + self.mu * apart


METHOD = Method(local=FedPgp, knob=Knob("local.mu", 0.1, 10.0))
