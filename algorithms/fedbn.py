"""FedBN: the normalization layers stay at the client, the other layers are averaged.

Li et al., FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, ICLR 2021
[li2021fedbn], by its released code: the scale, the shift and the statistics of BatchNorm layers. The same is
done with the LayerNorm and GroupNorm layers of networks that have these instead. Clients are scored with
their own.

Differs from the released code: the server weights clients by their number of examples instead of equally.
"""

from dataclasses import dataclass, field

from rayfed import Local, Method


@dataclass(frozen=True)
class FedBN(Local):
    """Local training of the common layers and of the client's own normalization layers.

    Attributes:
        stays: Tensors that stay at the client.
    """

    stays: tuple[str, ...] = field(default=("norm",), kw_only=True)


METHOD = Method(local=FedBN, knob="which tensors stay at the client has no strength")
