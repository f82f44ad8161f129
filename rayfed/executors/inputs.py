"""Turns stored inputs into what a network gets, on the device of the client."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rayfed.data.examples import Normalizer
from rayfed.data.shards import Dataset
from rayfed.data.text import Inputs
from rayfed.models.backbone import Backbone
from rayfed.objective import symbols

CHANNELS = (1, 3)
"""Numbers of channels of images of a user that are stored as bytes."""


def converter(
    dataset: Dataset, pixels: bool, model: Backbone, device: torch.device
) -> Callable[[Tensor], Tensor]:
    """The function that turns a batch of stored inputs, shape (B, ...), into input of the network.

    Inputs of a user stay what they are: images of bytes, with channels first or last, become numbers from 0
    to 1 with channels first, and are normalised if the model says with what; other whole numbers become
    int64, such as those that an embedding takes; floats are given as they are, unless a `rayfed.Model` says
    what they are normalised with.

    Args:
        dataset: The examples.
        pixels: Whether the task of a data set of RayFed has images.
        model: The network, with its mean and standard deviation by channel.
        device: Its device.
    """
    if not dataset.own or isinstance(dataset.images, Inputs):
        return Normalizer(model.mean, model.std, device) if pixels else symbols
    shape, kind = dataset.images.shape[1:], dataset.images.dtype
    if kind == "u1" and len(shape) == 3 and shape[-1] == 3 and len(model.mean) == 3:
        return Normalizer(model.mean, model.std, device)
    if kind == "u1" and len(shape) in (2, 3):
        return Images(shape, model, device)
    if kind.kind in "iub":
        return symbols
    if getattr(model, "scales", False):
        return Scaled(len(shape), model, device)
    return torch.Tensor.float


class Images:
    """Images of bytes, shape (B, C, H, W), (B, H, W, C) or (B, H, W), as numbers, shape (B, C, H, W)."""

    def __init__(self, shape: tuple[int, ...], model: Backbone, device: torch.device) -> None:
        """Args: shape: that of one image. model: has mean and deviation. device: that of batches."""
        self._last = len(shape) == 3 and shape[-1] in CHANNELS and shape[0] not in CHANNELS
        self._flat = len(shape) == 2
        channels = 1 if self._flat else shape[-1] if self._last else shape[0]
        mean, std = (v if len(v) == channels else v[:1] * channels for v in (model.mean, model.std))
        self._mean = torch.tensor(mean, device=device).view(1, -1, 1, 1)
        self._std = torch.tensor(std, device=device).view(1, -1, 1, 1)

    def __call__(self, images: Tensor) -> Tensor:
        """Normalise a batch."""
        images = images[:, None] if self._flat else images.permute(0, 3, 1, 2) if self._last else images
        x = images.to(torch.float32, memory_format=torch.contiguous_format)
        return x.div_(255).sub_(self._mean).div_(self._std)


class Scaled:
    """Floats with channels first, normalised by channel."""

    def __init__(self, dims: int, model: Backbone, device: torch.device) -> None:
        """Args: dims: dimensions of one input. model, device: as of `Images`."""
        shape = (1, -1, *[1] * (dims - 1))
        self._mean = torch.tensor(model.mean, device=device).view(shape)
        self._std = torch.tensor(model.std, device=device).view(shape)

    def __call__(self, inputs: Tensor) -> Tensor:
        """Normalise a batch."""
        return (inputs.float() - self._mean) / self._std
