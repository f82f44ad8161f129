"""pFedMMA: adapters in both towers of a CLIP model; their common layers are averaged, the others stay.

Ghiasvand et al., pFedMMA: Personalized Federated Fine-Tuning with Multi-Modal Adapter for Vision-Language
Models, ICLR 2026 [ghiasvand2026pfedmma], from its abstract and released code. Clients are scored with their
own layers.
"""

from dataclasses import dataclass, field
from typing import ClassVar

from rayfed import Local, Method


@dataclass(frozen=True)
class PFedMma(Local):
    """Local training of the common layers and of the client's own ones.

    Attributes:
        stays: Tensors that stay at the client.
    """

    stays: tuple[str, ...] = field(default=(r"paired\.(image|text)\..*",), kw_only=True)

    needs: ClassVar[frozenset[str]] = frozenset({"paired adapters"})


METHOD = Method(local=PFedMma, knob="which tensors stay at the client has no strength")
