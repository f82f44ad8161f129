"""The U-Net of the Fed-Prostate experiments, from MONAI.

Ronneberger, Fischer, Brox, U-Net, MICCAI 2015, in the size of GRACE's and HarmoFL's released code: two 3 x 3
convolutions without bias at every level, widths from `width` to 16 `width` at the bottom, transposed
convolutions on the way up.

Differs from that code: every convolution is followed by a ReLU (its second one is missing there), and
InstanceNorm without parameters takes the place of BatchNorm without parameters and running statistics.
"""

from __future__ import annotations

from torch import nn

from rayfed.data.formats.slices import MEAN, ONE_SD
from rayfed.errors import ConfigError

LEVELS = 4
STANDARDISED_MEAN = (MEAN / 255, MEAN / 255, MEAN / 255)
STANDARDISED_STD = (ONE_SD / 255, ONE_SD / 255, ONE_SD / 255)


def unet(size: int, width: int) -> nn.Module:
    """A net without head: images (B, 3, size, size) to its last map (B, width, size, size).

    Raises:
        ConfigError: MONAI is not installed, or the size cannot be halved so many times.
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
