"""FedOTP: a common and a local prompt, matched with the patches of an image by optimal transport.

Li et al., Global and Local Prompts Cooperation via Optimal Transport for Federated Learning, CVPR 2024
[li2024fedotp], from its abstract and released code. The local prompt stays at the client, and clients are
scored with their own.

Differs from the released code: the transport plan is computed in a fixed number of steps; there it ends
earlier where u changes by less than 0.001.
"""

from dataclasses import dataclass, field
from typing import ClassVar

from rayfed import Local, Method


@dataclass(frozen=True)
class FedOtp(Local):
    """Local training of the common prompt, which is averaged, and of the client's own one.

    Attributes:
        stays: Tensors that stay at the client.
    """

    stays: tuple[str, ...] = field(default=(r"text\.prompter\.own",), kw_only=True)

    needs: ClassVar[frozenset[str]] = frozenset({"two prompts"})


METHOD = Method(local=FedOtp, knob="which tensors stay at the client has no strength")
