"""Switches on what the config asks of the network of a model."""

from __future__ import annotations

import sys

import torch
from torch import nn

from rayfed.federation.train_config import TrainConfig
from rayfed.models.backbone import Backbone
from rayfed.models.frozen_linear import use_onednn
from rayfed.models.pooling import use_mean_pooling
from rayfed.models.trunk import use_checkpointing, use_compile


def adjust_trunk(model: Backbone, train: TrainConfig, device: str = "cpu") -> None:
    """Switch on the checkpointing and the compilation of the network that the config asks for.

    A network that is not compiled gets attention that is quicker, a last block that computes the class token
    only, and linear layers that are quicker on a CPU. On a GPU pooling has the same bits in every run, and
    convolutions get the layout of tensor cores.

    Raises:
        ConfigError: The network or the machine does not support it.
    """
    if device != "cpu":
        use_mean_pooling(model)
        use_channels_last(model)
    if train.checkpointing:
        use_checkpointing(model)
    if train.compile:
        use_compile(model, device)
    else:
        use_onednn(model)
        if "timm" in sys.modules:  # otherwise no layer is timm's, and its import would take 190 MB
            from rayfed.models.attention import use_direct_attention
            from rayfed.models.class_token import use_class_token

            use_direct_attention(model)
            use_class_token(model)


def use_channels_last(model: nn.Module) -> None:
    """Store weights of 2d convolutions, shape (out, in, height, width), with the channels next to each other.

    Kernels of a GPU that want this layout then need not convert the weights. Values stay the same.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.to(memory_format=torch.channels_last)
