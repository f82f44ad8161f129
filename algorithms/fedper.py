"""FedPer: the head stays at the client, the other layers are averaged.

Arivazhagan et al., Federated Learning with Personalization Layers, 2019 [arivazhagan2019fedper], Algorithms 1
and 2; these two numbers were not checked with the paper. Clients are scored with their own heads.

Differs from the paper: the heads of all clients begin with the same values.
"""

from dataclasses import dataclass, field

from rayfed import Local, Method


@dataclass(frozen=True)
class FedPer(Local):
    """Local training of the common layers and of the client's own ones.

    Attributes:
        stays: Tensors that stay at the client.
    """

    stays: tuple[str, ...] = field(default=("head",), kw_only=True)


METHOD = Method(local=FedPer, knob="which tensors stay at the client has no strength")
