"""Changes of a network that save memory or time: checkpointing, torch.compile, pooling by means."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from rayfed.errors import ConfigError
from rayfed.models.backbone import Backbone
from rayfed.models.named_tensors import is_trained_norm

WORKERS = "TORCHINDUCTOR_COMPILE_THREADS"
"""Variable of torch's compiler; it is read when the compiler is first used."""


def has_trained_norms(model: nn.Module) -> bool:
    """Whether the model has BatchNorm layers that are trained, whose statistics are those of a batch."""
    return any(is_trained_norm(module) for module in model.modules() if isinstance(module, _BatchNorm))


def use_checkpointing(model: Backbone) -> None:
    """Keep the activations between the blocks only; those within a block are computed again when needed.

    Raises:
        ConfigError: The network offers no such mode, or its BatchNorm statistics would be updated twice.
    """
    if has_trained_norms(model):
        raise ConfigError(
            f"train.checkpointing: {model.label!r} has trained BatchNorm layers, whose statistics a second "
            f"forward pass would update twice; leave it out, or use train.batch_size for less memory"
        )
    net: Any = model.net
    if model.num_blocks:
        model.stack.checkpointing = True
    elif hasattr(net, "set_grad_checkpointing"):
        try:
            net.set_grad_checkpointing(True)
        except AssertionError as err:
            raise ConfigError(_cannot_checkpoint(model)) from err
    else:
        raise ConfigError(_cannot_checkpoint(model))
    if model.text is not None and hasattr(model.text.tower, "transformer"):
        model.text.tower.transformer.grad_checkpointing = True


def _cannot_checkpoint(model: Backbone) -> str:
    return (
        f"train.checkpointing: {model.label!r} has no blocks between which activations could be kept; leave "
        f"it out, or use train.micro_batch for less memory"
    )


def use_compile(model: Backbone, device: str) -> None:
    """Compile the network of a backbone at its first call.

    The compiler starts as many processes as this process has threads, unless TORCHINDUCTOR_COMPILE_THREADS
    says another number; torch's own default is up to 32 for each client actor.

    Raises:
        ConfigError: This machine has no compiler for the device.
    """
    check_compiler(device)
    os.environ.setdefault(WORKERS, str(torch.get_num_threads()))
    model.net.compile()


def check_compiler(device: str) -> None:
    """Check that torch.compile can make code: with a C++ compiler, and for GPUs also with triton.

    Raises:
        ConfigError: It cannot; names what is missing.
    """
    missing = ""
    if not any(shutil.which(name) for name in (os.environ.get("CXX") or "g++", "clang++")):
        missing = "a C++ compiler (g++, clang++ or $CXX)"
    elif device != "cpu" and find_spec("triton") is None:
        missing = "the package triton"
    if missing:
        raise ConfigError(f"train.compile: true needs {missing}, which is not installed; leave it out")


def use_mean_pooling(model: nn.Module) -> None:
    """Let adaptive average pooling be computed by `MeanPool`.

    Args:
        model: The model, on a GPU.
    """
    for module in model.modules():
        if type(module) is nn.AdaptiveAvgPool2d:
            module.__class__ = MeanPool


class MeanPool(nn.AdaptiveAvgPool2d):
    """Adaptive average pooling by means of windows.

    The backward pass of torch's kernel for GPUs adds in any order, so that two runs differ in the last bits.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Means of windows, shape (B, C, h, w).

        Args:
            x: A map, shape (B, C, H, W).
        """
        wanted = self.output_size
        pair = wanted if isinstance(wanted, tuple) else (wanted, wanted)
        high, wide = (_windows(size, parts or size) for size, parts in zip(x.shape[-2:], pair, strict=True))
        rows = [torch.stack([x[..., i, j].mean((-2, -1)) for j in wide], -1) for i in high]
        return torch.stack(rows, -2)


def _windows(size: int, parts: int) -> list[slice]:
    """The windows of adaptive pooling, which overlap where the size is no multiple of their number."""
    return [slice(k * size // parts, -(-(k + 1) * size // parts)) for k in range(parts)]
