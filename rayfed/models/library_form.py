"""The network of a backbone in the form that it has in its library, with the modules' names there.

A backbone keeps its head and its blocks apart. Other libraries find layers by the names that a network has
where it comes from: of transformers, such as `bert.encoder.layer.0`, of timm, or of the user's own network.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import nn

from rayfed.models.backbone import Backbone
from rayfed.models.language import TextHead, TextNet
from rayfed.models.user_model import OwnBackbone, OwnNet


@contextmanager
def as_in_library(model: Backbone) -> Iterator[nn.Module]:
    """The network without head as one tree of modules, whose names are those of the library.

    Args:
        model: The backbone; what is replaced in the tree is replaced in the backbone.
    """
    net = model.net
    if isinstance(net, OwnNet):
        yield net.body
    elif isinstance(net, TextNet):
        place, _, leaf = net.path.rpartition(".")
        owner = net.trunk.get_submodule(place)
        root = nn.Module()
        root.config = {"model_type": net.trunk.config.model_type}  # type: ignore[assignment]
        root.add_module(net.prefix, net.trunk)
        owner._modules[leaf] = net.blocks
        try:
            yield root
        finally:
            del owner._modules[leaf]
    else:
        yield net


def head_names(model: Backbone) -> Mapping[str, str]:
    """Names in the library of the layers of the head, by the beginning of their global names; {}: none."""
    if isinstance(model, OwnBackbone):
        return {} if model.place is None else {"head": model.place}
    if isinstance(model.head, TextHead):
        plan = model.head.plan
        return {"head": plan.last, **({"head.dense": plan.hidden} if plan.hidden else {})}
    if isinstance(model.net, TextNet):
        return {"head": "lm_head"}
    return {"head": model.classifier} if model.classifier else {}


def name_of_head(names: Mapping[str, str], tensor: str) -> str:
    """The name in the library of a tensor of the head.

    Args:
        names: As of `head_names`.
        tensor: Its global name, such as `head.dense.weight`.
    """
    place, _, leaf = tensor.rpartition(".")
    return f"{names[place]}.{leaf}"
