"""Which modules are in train mode while a model is tuned."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def is_trained_norm(module: nn.Module) -> bool:
    """Whether this BatchNorm layer has affine parameters that require gradients."""
    weight = module._parameters["weight"]
    return weight is not None and weight.requires_grad


def trained_modules(model: nn.Module) -> list[nn.Module]:
    """The modules that `Backbone.train` puts into train mode; its docstring has the rule."""
    chosen: list[nn.Module] = []
    _collect(model, chosen)
    once = dict.fromkeys(chosen)  # blocks of a CLIP model have two names
    return [m for m in once if not isinstance(m, _BatchNorm) or is_trained_norm(m)]


def _collect(module: nn.Module, chosen: list[nn.Module]) -> bool | None:
    """Add the trained modules within `module` to `chosen`.

    Returns:
        Whether all parameters of the module require gradients; None if it has none.
    """
    below = {name: _collect(child, chosen) for name, child in module.named_children()}
    known = [p.requires_grad for p in module._parameters.values() if p is not None]
    known += [trained for trained in below.values() if trained is not None]
    if not known:
        return None
    trained = all(known)
    for name, child in module.named_children():
        if below[name] is None and (trained or (name == "lora_dropout" and below["lora_B"])):
            chosen.extend(child.modules())
    if trained:
        chosen.append(module)
    return trained
