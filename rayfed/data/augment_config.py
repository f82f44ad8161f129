"""The config section `data.augment`: which random changes of training images, and how strong."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, TypeAlias

from annotated_types import Ge, Gt, Le

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
