"""Random changes of training images: flip, crop, rotate, randaugment, jitter and grayscale of torchvision.

Each image of a batch is changed on its own. The random numbers come from a seed that a client draws from its
own stream, and are drawn on the CPU, so that the result does not depend on where a client runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from rayfed.data.data_config import AugmentConfig
from rayfed.errors import ConfigError, one_line
from rayfed.seeds import cpu_seeded

Channels = tuple[float, float, float]


@dataclass(frozen=True)
class Augmentation:
    """Changes batches of normalized images at random.

    Attributes:
        transform: Changes one image with values in [0, 1], shape (C, H, W).
        mean, std: Mean and standard deviation by channel that the images were normalized with; the first one
            counts for every channel of images with another number of channels.
        any_values: Images are arrays of a user with any values, which are not cut to [0, 1].
    """

    transform: Callable[[Tensor], Tensor]
    mean: Channels
    std: Channels
    any_values: bool = False

    @classmethod
    def of(
        cls,
        config: AugmentConfig,
        size: int | tuple[int, int],
        mean: Channels,
        std: Channels,
        any_values: bool = False,
    ) -> Augmentation:
        """The changes that a config section names, in its order.

        Args:
            config: The config section `data.augment`.
            size: Height and width of the images in pixels, one number or both.
            mean: Mean by channel that the images are normalized with.
            std: Standard deviation by channel.
            any_values: As of the class.
        """
        from torchvision.transforms import v2

        return cls(v2.Compose(_transforms(config, size)), mean, std, any_values)

    @torch.no_grad()
    def __call__(self, x: Tensor, seed: int) -> Tensor:
        """Change every image of a batch.

        Args:
            x: Normalized images, shape (B, C, H, W).
            seed: Determines all random numbers.

        Returns:
            A new batch of the same shape, normalized, on the same device.
        """
        mean = _by_channel(self.mean, x.shape[1], x.device)
        std = _by_channel(self.std, x.shape[1], x.device)
        pixels = x * std + mean
        if not self.any_values:
            pixels.clamp_(0, 1)  # normalization rounds
        with cpu_seeded(seed):
            changed = torch.stack([self.transform(image) for image in pixels])
        return (changed - mean) / std


@lru_cache(maxsize=8)
def _by_channel(values: Channels, channels: int, device: torch.device) -> Tensor:
    """Values of the channels for arithmetic with images, shape (1, C, 1, 1); copied to a device once."""
    fitting = values if len(values) == channels else values[:1] * channels
    return torch.tensor(fitting, device=device).view(1, -1, 1, 1)


def _transforms(config: AugmentConfig, size: int | tuple[int, int]) -> list[Any]:
    """Transforms of torchvision for images of `size` pixels."""
    from torchvision.transforms import v2

    build: dict[str, Callable[[Any], Any]] = {
        "crop": lambda c: v2.RandomResizedCrop(
            size, scale=tuple(sorted(c.scale)), ratio=tuple(sorted(c.ratio))
        ),
        "flip": lambda c: v2.RandomHorizontalFlip(c.p),
        "rotate": lambda c: v2.RandomRotation(c.degrees),
        "randaugment": lambda c: v2.RandAugment(c.num_ops, c.magnitude),
        "jitter": lambda c: v2.ColorJitter(c.brightness, c.contrast, c.saturation, c.hue),
        "grayscale": lambda c: v2.RandomGrayscale(c.p),
    }
    return [build[name](getattr(config, name)) for name in config.names]


CLIPS = ("randaugment", "jitter")
"""Changes of images that cut values outside of 0 to 1; the others take any values."""

CHANNELS = (1, 3, 4)
"""Channels that images usually have."""

ROUNDING = 1e-4
"""Values that are this far outside of 0 to 1 were rounded."""

PART = 2**24
"""Values that are looked at together."""

TRIALS = 8
"""Draws of the changes that are tried before a run; randaugment draws some of 14."""


def check_images(x: Tensor, config: AugmentConfig, images: Any, mean: Channels, std: Channels) -> None:
    """Check that the inputs of a user are images that can be changed, by changing one.

    Args:
        x: The first examples, as the network gets them.
        config: What is done.
        images: All examples of a user as they are stored; None: they are those of a data set of RayFed.
        mean: Mean by channel that `x` is normalized with.
        std: Standard deviation by channel.

    Raises:
        ConfigError: They are not, or values would be cut off.
    """
    if x.ndim != 4 or not x.is_floating_point():
        raise ConfigError(
            f"data.augment: it changes images, and the inputs have shape {tuple(x.shape[1:])}; leave it out"
        )
    if x.shape[-1] in CHANNELS and x.shape[1] not in CHANNELS:
        raise ConfigError(
            f"data.augment: it changes images of shape (channels, height, width), and the inputs have shape "
            f"{tuple(x.shape[1:])}; give floats with channels first, or leave it out"
        )
    clips = [name for name in config.names if name in CLIPS]
    if clips and images is not None and images.dtype.kind == "f":
        rows = max(1, PART // max(1, images[:1].size))
        parts = [images[start : start + rows] for start in range(0, len(images), rows)]
        low, high = min(float(part.min()) for part in parts), max(float(part.max()) for part in parts)
        if low < -ROUNDING or high > 1 + ROUNDING:
            raise ConfigError(
                f"data.augment: {clips[0]} is for values from 0 to 1, and would cut off those of the inputs, "
                f"which are from {low:g} to {high:g}; give images of bytes (uint8) or x / 255, and the "
                "mean and deviation in rayfed.Model(net, mean=, std=), or leave it out"
            )
    try:
        change = Augmentation.of(config, (x.shape[-2], x.shape[-1]), mean, std, images is not None)
        for seed in range(TRIALS):
            change(x[:1], seed)
    except Exception as err:
        raise ConfigError(
            f"data.augment: {', '.join(config.names)} cannot change images of shape {tuple(x.shape[1:])} "
            f"({one_line(err)}); leave out what is for images with one or three channels"
        ) from err
