"""FedSA-LoRA: A and B of every LoRA adapter are trained, only A is sent and averaged, B stays at the client.

Guo et al., Selective Aggregation for Low-Rank Adaptation in Federated Learning, ICLR 2025
[guo2025fedsalora], Figure 1. Clients are scored with their own B. The head is sent and averaged, because the
paper's text keeps only B at the client. The released configs for classification keep the head there, too:
`local.stays=[lora_B,head]`.
"""

from dataclasses import dataclass, field
from typing import ClassVar

from rayfed import Local, Method


@dataclass(frozen=True)
class FedSaLora(Local):
    """Local training of A, which is averaged, and of the client's own B.

    Attributes:
        stays: Tensors that stay at the client.
    """

    stays: tuple[str, ...] = field(default=("lora_B",), kw_only=True)

    needs: ClassVar[frozenset[str]] = frozenset({"lora"})


METHOD = Method(local=FedSaLora, knob="which tensors stay at the client has no strength")
