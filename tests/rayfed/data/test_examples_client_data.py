"""Stored images become the input of a network."""

import torch

from rayfed.data.examples import Normalizer
from tests.rounding import near


def test_images_are_scaled_by_channel_into_contiguous_planes():
    mean, std = (0.5, 0.4, 0.3), (0.5, 0.25, 0.2)
    images = torch.randint(0, 256, (2, 5, 6, 3), dtype=torch.uint8)
    before = images.clone()
    x = Normalizer(mean, std)(images)
    assert x.shape == (2, 3, 5, 6)
    assert x.dtype == torch.float32
    assert x.is_contiguous()  # in other orders the scaling takes several times as long
    wanted = (images.double() / 255 - torch.tensor(mean)) / torch.tensor(std)
    near(x, wanted.permute(0, 3, 1, 2), 4)  # a quotient, a difference, another quotient, a constant
    assert torch.equal(images, before)
