"""Names a network that a user hands over, so that a config can hold it, and finds it again by this name."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from rayfed import user_objects
from rayfed.errors import ConfigError, shown
from rayfed.models.user_model import Model, Network, of_module
from rayfed.registry import import_object


def register(value: Any) -> str:
    """Name a network, a function that makes one, or a `Model`, so that a config can hold it.

    Raises:
        ConfigError: It is none of these, has values on a device, or cannot be copied.
    """
    model = value if isinstance(value, Model) else Model(value)
    net = model.net
    if isinstance(net, nn.Module):
        network = of_module(net)
        source: Any = type(net)
        digest = _digest(net, repr(model.said))
    elif callable(net):
        network = Network(label="", make=net)
        source = net
        digest = user_objects.text_digest(user_objects.source_digest(net) + repr(model.said))
    else:
        raise ConfigError(
            f"model: {shown(value)} is no network; give a name, an nn.Module, a function that makes one, "
            "or a "
            f"rayfed.Model"
        )
    plain = not isinstance(net, nn.Module) and not isinstance(value, Model)
    path = user_objects.import_path(net) if plain else ""
    known = replace(network, said=model.said, place=user_objects.place(source))
    return path or user_objects.register(known, source, digest)


def _digest(net: nn.Module, hints: str) -> str:
    """Digest of the classes and the values of a network. Args: hints: what its user said of it, as text."""
    out = hashlib.sha256(hints.encode())
    for module in net.modules():
        out.update(type(module).__qualname__.encode())
    for name, tensor in (*net.named_parameters(), *net.named_buffers()):
        out.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        out.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return out.hexdigest()


def network_of(name: str) -> Network | None:
    """The network of a user that a config names; None: the name is that of a model of a library.

    Raises:
        ConfigError: It cannot be imported, or was handed over in another process.
    """
    known = user_objects.find(name)
    value = known.value if known is not None else None
    if value is None and user_objects.is_own(name):
        raise ConfigError(
            f"model.name: {name!r} was handed over in a notebook or a script; hand it over again, with "
            f"rayfed.Experiment(...).run(), or .resume(FOLDER) for a run that has begun"
        )
    if value is None and ":" in name:
        value = _import(name)
    if value is None:
        return None
    if not isinstance(value, Network):
        model = value if isinstance(value, Model) else Model(value)
        network = (
            of_module(model.net) if isinstance(model.net, nn.Module) else Network(label=name, make=model.net)
        )
        value = replace(network, said=model.said, place=user_objects.place(model.net))
    return replace(value, label=name)


def _import(name: str) -> Any:
    value = import_object("model.name", name)
    if not (isinstance(value, Model | nn.Module) or callable(value)):
        raise ConfigError(
            f"model.name: {name!r} is {shown(value)}, neither a network nor a function that makes one"
        )
    return value
