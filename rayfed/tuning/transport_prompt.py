"""Two prompts for each class, matched with the patches of an image by unbalanced optimal transport.

Li et al., Global and Local Prompts Cooperation via Optimal Transport for Federated Learning, CVPR 2024
[li2024fedotp], from its abstract and released code. `algorithm=fedotp` keeps the second prompt at the client.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from annotated_types import Gt, Le
from torch import Tensor

from rayfed.errors import ConfigError
from rayfed.models.backbone import Backbone
from rayfed.models.clip import ClipHead, ImageTower
from rayfed.models.prompters import SecondContext
from rayfed.tuning.text_prompt import TextPrompt, check_common
from rayfed.types import Count, Positive


class TransportHead(ClipHead):
    """Scores of the classes: the scaled cosines of patches and prompts, weighted by a transport plan.

    Attributes:
        mass: Share of the patches that is matched, gamma; with 1 all of them are.
        entropy: Weight of the entropy of the plan; the cost of a pair is 1 - cosine.
        steps: Steps of the scaling algorithm.
    """

    def __init__(self, head: ClipHead, mass: float, entropy: float, steps: int) -> None:
        """Make the head of a CLIP model with its class features and its scale."""
        super().__init__(head.out_features, head.in_features)
        self.weight = head.weight
        self.scale = head.scale
        self.mass = mass
        self.entropy = entropy
        self.steps = steps

    def forward(self, features: Tensor, weight: Tensor | None = None) -> Tensor:
        """Scores of the classes, shape (B, C).

        Args:
            features: Features of an image and of its N patches, not normalized, shape (B, 1 + N, width).
            weight: Features of K prompts of each class, shape (K, C, width). None: the image is scored with
                `self.weight`, as by a model without tuning.
        """
        if weight is None:
            return super().forward(features[:, 0])
        patches = F.normalize(features[:, 1:], dim=-1)
        cosines = torch.einsum("bnd,kcd->bcnk", patches, F.normalize(weight, dim=-1))
        plan = transport(cosines.detach(), self.mass, self.entropy, self.steps)
        return self.scale * (plan * cosines).sum((-2, -1))


def transport(cosines: Tensor, mass: float, entropy: float, steps: int) -> Tensor:
    """The plan T that maximizes <T, cosines> + `entropy` H(T), with H(T) = -sum T (log T - 1).

    Each prompt has the mass `mass` / K, each patch at most 1 / N, so that with `mass` 1 each has 1 / N. The
    plan is diag(u) G diag(v) with G = e^(cosines / entropy). In each step, u becomes the smaller of 1 and
    (1 / N) / (G v), and then v becomes (`mass` / K) / (G' u).

    Args:
        cosines: Shape (..., N, K): patch by prompt.
        mass: Whole mass of the plan, in (0, 1].
        entropy: Positive; the smaller, the more steps are needed.
        steps: Number of steps.

    Returns:
        Shape (..., N, K); its columns sum to `mass` / K exactly, its rows to at most 1 / N in the limit.
    """
    patches, prompts = cosines.shape[-2:]
    # The largest entry of each column becomes 1, which v makes good for.
    kernel = ((cosines - cosines.amax(-2, keepdim=True)) / entropy).exp()
    v = torch.ones_like(kernel[..., :1, :])
    for _ in range(steps):
        u = (1 / (patches * (kernel * v).sum(-1, keepdim=True))).clamp(max=1)
        v = mass / (prompts * (kernel * u).sum(-2, keepdim=True))
    return u * kernel * v


@dataclass(frozen=True, kw_only=True)
class TransportPrompt(TextPrompt):
    """Train two contexts, `text.context` and `text.prompter.own`, both with their own start values.

    Attributes:
        gamma: Share of the patches that is matched with the prompts; 1: each patch has the same mass.
        entropy: Weight of the entropy of the transport plan, whose cost is 1 - cosine.
        steps: Steps in which the plan is computed.
    """

    offers: ClassVar[frozenset[str]] = frozenset({"two prompts"})

    gamma: Annotated[float, Gt(0), Le(1)] = 0.8
    entropy: Positive = 0.1
    steps: Count = 100

    def apply(self, model: Backbone) -> Backbone:
        super().apply(model)
        text = check_common(model, self.class_specific, "transport_prompt")
        if not (isinstance(model.net, ImageTower) and model.net.add_patches()):
            raise ConfigError(
                f"tuning.name: transport_prompt needs an image tower with patches and a class token, which "
                f"{model.label!r} does not have; use clip_mini or clip_vit_b_16"
            )
        with torch.device(model.head.weight.device):
            text.prompter = SecondContext(self.length, text.token_width, self.init_std)
            model.head = TransportHead(model.head, self.gamma, self.entropy, self.steps)  # type: ignore[arg-type]
        return model


TUNING = TransportPrompt
