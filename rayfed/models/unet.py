"""The U-Net of the Fed-Prostate experiments, from MONAI.

Ronneberger, Fischer, Brox, U-Net, MICCAI 2015, in the size of GRACE's and HarmoFL's released code: two 3 x 3
convolutions without bias at every level, widths from `width` to 16 `width` at the bottom, transposed
convolutions on the way up.

Differs from that code: every convolution is followed by a ReLU (there, the second one is not), and
InstanceNorm without parameters replaces BatchNorm without parameters and running statistics.
"""

from __future__ import annotations

from torch import nn

from rayfed.data.formats.slices import MEAN, ONE_SD
from rayfed.errors import ConfigError

LEVELS = 4
"""Number of times that the network halves the size of its input."""

STANDARDISED_MEAN = (MEAN / 255, MEAN / 255, MEAN / 255)
STANDARDISED_STD = (ONE_SD / 255, ONE_SD / 255, ONE_SD / 255)
"""Normalisation that turns prepared slices back into standard deviations from the volume's mean."""


def unet(size: int, width: int) -> nn.Module:
    """A U-Net without its last layer; maps images (B, 3, size, size) to features (B, width, size, size).

    Args:
        size: Input height and width in pixels, a multiple of 2 ** LEVELS.
        width: Channels of the first level and of the features.

    Raises:
        ConfigError: MONAI is not installed, or the size is not a multiple of 2 ** LEVELS.
    """
    if size % 2**LEVELS:
        raise ConfigError(f"model.size: {size} is not a multiple of {2**LEVELS}, which 'unet' needs")
    try:
        from monai.networks.nets.basic_unet import BasicUNet
    except ImportError as err:
        raise ConfigError("model.name: 'unet' needs MONAI; install rayfed-sim[segmentation]") from err
    net: nn.Module = BasicUNet(
        spatial_dims=2,
        in_channels=3,
        out_channels=1,
        features=(*(width * 2**level for level in range(LEVELS + 1)), width),
        act="RELU",
        norm=("instance", {"affine": False}),
        bias=False,
        upsample="deconv",
    )
    net.final_conv = nn.Identity()
    return net
