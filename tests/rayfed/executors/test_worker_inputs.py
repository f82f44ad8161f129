"""Inputs of a user as the network gets them."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rayfed.executors.worker import converter

PLAIN = SimpleNamespace(mean=(0.0,) * 3, std=(1.0,) * 3, scales=False)


def converted(array, model=PLAIN):
    dataset = SimpleNamespace(own=True, images=array)
    return converter(dataset, True, model, torch.device("cpu"))(torch.from_numpy(array))


@pytest.mark.parametrize(
    ("shape", "becomes"),
    [
        ((2, 8, 8, 3), (2, 3, 8, 8)),
        ((2, 3, 8, 8), (2, 3, 8, 8)),
        ((2, 8, 8, 1), (2, 1, 8, 8)),
        ((2, 8, 8), (2, 1, 8, 8)),
    ],
)
def test_images_of_bytes_have_channels_first_and_numbers_up_to_one(shape, becomes):
    x = converted(np.full(shape, 255, np.uint8))
    assert tuple(x.shape) == becomes
    assert x.dtype == torch.float32
    assert bool((x == 1).all())


def test_images_are_normalised_by_channel():
    model = SimpleNamespace(mean=(0.5, 0.0, 0.25), std=(0.5, 1.0, 0.25), scales=True)
    x = converted(np.full((1, 3, 2, 2), 255, np.uint8), model)
    assert x[0, :, 0, 0].tolist() == [1.0, 1.0, 3.0]
    floats = converted(np.ones((1, 3, 2, 2), np.float32), model)
    assert floats[0, :, 0, 0].tolist() == [1.0, 1.0, 3.0]


def test_whole_numbers_and_floats_stay_what_they_are():
    words = converted(np.array([[1, 2, 3]], dtype=np.int32))
    assert words.dtype == torch.int64
    rows = np.random.default_rng(0).normal(size=(4, 7)).astype(np.float32)
    assert torch.equal(converted(rows), torch.from_numpy(rows))
