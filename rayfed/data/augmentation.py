"""Random changes of training images: flip, crop, rotate, randaugment, jitter and grayscale of torchvision.

Each image of a batch is changed on its own. The random numbers come from a seed that a client draws from its
own stream, and are drawn on the CPU, so that the result does not depend on where a client runs.

The config section `data.augment` says which changes, and how strong.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Annotated, Any, TypeAlias

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor

from rayfed.seeds import cpu_seeded

# The ranges of `rayfed.types` are not imported: readers of configs need no torch.
Share: TypeAlias = Annotated[float, Ge(0), Le(1)]
Factor: TypeAlias = Annotated[float, Ge(0)]
Area: TypeAlias = Annotated[float, Ge(1e-4), Le(1)]
Ratio: TypeAlias = Annotated[float, Gt(0), Le(100)]


@dataclass(frozen=True, kw_only=True)
class Flip:
    """Mirror an image from left to right.

    Attributes:
        p: Probability.
    """

    p: Share = 0.5


@dataclass(frozen=True, kw_only=True)
class Crop:
    """Cut out a random part and resize it to the input of the model (bilinear, with antialiasing).

    The default is that of FFT-GP's and DomainBed's code; ImageNet training uses scale [0.08, 1].

    Attributes:
        scale: Smallest and largest share of the area.
        ratio: Smallest and largest ratio of width to height.
    """

    scale: tuple[Area, Area] = (0.7, 1.0)
    ratio: tuple[Ratio, Ratio] = (0.75, 4 / 3)


@dataclass(frozen=True, kw_only=True)
class Rotate:
    """Rotate an image about its centre (nearest pixel; corners become black).

    Attributes:
        degrees: Largest angle in either direction; 30 in the code of FedGCR and FedCLIP.
    """

    degrees: Annotated[float, Ge(0), Le(180)] = 30.0


@dataclass(frozen=True, kw_only=True)
class RandAugment:
    """RandAugment (Cubuk et al., 2020): operations drawn from a list of 14, all of the same strength.

    Attributes:
        num_ops: Operations on an image.
        magnitude: Their strength, from 0 to 30.
    """

    num_ops: Annotated[int, Ge(1), Le(14)] = 2
    magnitude: Annotated[int, Ge(0), Le(30)] = 9


@dataclass(frozen=True, kw_only=True)
class Jitter:
    """Change brightness, contrast, saturation and hue, in random order.

    The default is that of FFT-GP's code; DomainBed uses 0.3 for all four.

    Attributes:
        brightness, contrast, saturation: Factors are drawn from [max(0, 1 - value), 1 + value].
        hue: The hue is turned by up to this share of the circle in either direction.
    """

    brightness: Factor = 0.4
    contrast: Factor = 0.4
    saturation: Factor = 0.4
    hue: Annotated[float, Ge(0), Le(0.5)] = 0.4


@dataclass(frozen=True, kw_only=True)
class Grayscale:
    """Remove the colours.

    Attributes:
        p: Probability; 0.1 in the code of FFT-GP and DomainBed.
    """

    p: Share = 0.1


@dataclass(frozen=True, kw_only=True)
class AugmentConfig:
    """The config section `data.augment`: what is done to training images, in the order of this list.

    On the command line a list of names is enough, with the defaults of each: `data.augment=[crop,flip]`.
    Numbers are given as in `data.augment.crop.scale=[0.08,1]`.

    Attributes:
        crop: Random part, resized.
        flip: Mirror.
        rotate: Rotation.
        randaugment: Random operations.
        jitter: Brightness, contrast, saturation, hue.
        grayscale: Without colours.
    """

    crop: Crop | None = None
    flip: Flip | None = None
    rotate: Rotate | None = None
    randaugment: RandAugment | None = None
    jitter: Jitter | None = None
    grayscale: Grayscale | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of what is done, in order."""
        return tuple(f.name for f in fields(self) if getattr(self, f.name) is not None)


Channels = tuple[float, float, float]


@dataclass(frozen=True)
class Augmentation:
    """Changes batches of normalised images at random.

    Attributes:
        transform: Changes one image with values in [0, 1], shape (3, size, size).
        mean, std: Mean and standard deviation by channel that the images were normalised with.
    """

    transform: Callable[[Tensor], Tensor]
    mean: Channels
    std: Channels

    @classmethod
    def of(cls, config: AugmentConfig, size: int, mean: Channels, std: Channels) -> Augmentation:
        """The changes that a config section names, in its order.

        Args:
            config: The config section `data.augment`.
            size: Height and width of the images in pixels.
            mean: Mean by channel that the images are normalised with.
            std: Standard deviation by channel.
        """
        from torchvision.transforms import v2

        return cls(v2.Compose(_transforms(config, size)), mean, std)

    @torch.no_grad()
    def __call__(self, x: Tensor, seed: int) -> Tensor:
        """Change every image of a batch.

        Args:
            x: Normalised images, shape (B, 3, H, W).
            seed: Determines all random numbers.

        Returns:
            A new batch of the same shape, normalised, on the same device.
        """
        mean = _by_channel(self.mean, x.device)
        std = _by_channel(self.std, x.device)
        pixels = (x * std + mean).clamp_(0, 1)
        with cpu_seeded(seed):
            changed = torch.stack([self.transform(image) for image in pixels])
        return (changed - mean) / std


@lru_cache(maxsize=8)
def _by_channel(values: Channels, device: torch.device) -> Tensor:
    """Values of the channels for arithmetic with images, shape (1, 3, 1, 1); copied to a device once."""
    return torch.tensor(values, device=device).view(1, 3, 1, 1)


def _transforms(config: AugmentConfig, size: int) -> list[Any]:
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
