"""Nothing that prepares or reads data holds a data set in memory, and a second start reads no images."""

import gzip
import pickle
import struct
import sys
import tracemalloc
from dataclasses import dataclass

import numpy as np
import pytest
from scipy.io import savemat

from rayfed.data.formats.array_files import read_idx, read_mat, read_pickles
from rayfed.data.load_dataset import load
from rayfed.data.preparation import prepare
from rayfed.data.shards import open_dataset
from rayfed.data.source import Listing
from tests.rayfed.data.folders import make_folder
from tests.rayfed.data.test_load_dataset import config

SIDE = 64


@dataclass(frozen=True, kw_only=True)
class Synthetic:
    """As many images as are asked for, made when they are decoded."""

    name: str
    count: int

    def fingerprint(self):
        return f"synthetic/{self.count}"

    def scan(self):
        return Listing(
            name=self.name,
            classes=("a", "b"),
            domains=("d",),
            keys=[f"d/{'ab'[i % 2]}/{i:06d}" for i in range(self.count)],
            labels=np.arange(self.count) % 2,
            domain=np.zeros(self.count, dtype=np.int64),
            test=np.zeros(self.count, dtype=np.bool_),
            fingerprint=self.fingerprint(),
        )

    def decode(self, listing, index, size):
        return np.full((size, size, 3), index % 256, dtype=np.uint8)


def peak(action):
    """Bytes that were allocated at once while something ran."""
    tracemalloc.start()
    try:
        result = action()
        return tracemalloc.get_traced_memory()[1], result
    finally:
        tracemalloc.stop()


def test_memory_does_not_follow_the_number_of_images(tmp_path):
    prepare(Synthetic(name="warm", count=10), SIDE, tmp_path)
    small, _ = peak(lambda: prepare(Synthetic(name="small", count=500), SIDE, tmp_path))
    large, path = peak(lambda: prepare(Synthetic(name="large", count=4000), SIDE, tmp_path))
    assert large - small < 3500 * 1000  # names and labels; the pixels alone are 12,288 bytes an image
    assert open_dataset(path).images[3999, 0, 0, 0] == 3999 % 256


@pytest.mark.parametrize("kind", ["mat", "gz"])
def test_packed_digits_do_not_pass_through_memory_as_a_whole(tmp_path, kind):
    count = 4000
    pixels = np.random.default_rng(0).integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
    if kind == "mat":
        labels = np.ones((count, 1), np.uint8)
        savemat(tmp_path / "x.mat", {"X": pixels.transpose(1, 2, 3, 0), "y": labels}, do_compression=True)
        used, (images, _) = peak(lambda: read_mat(tmp_path / "x.mat"))
        assert np.array_equal(images[count - 1], pixels[-1])
    else:
        (tmp_path / "labels").write_bytes(struct.pack(">2i", 0x801, count) + bytes(count))
        data = struct.pack(">4i", 0x803, count, 32, 96) + pixels.tobytes()
        (tmp_path / "images.gz").write_bytes(gzip.compress(data, 1))
        used, (images, _) = peak(lambda: read_idx(tmp_path / "images.gz", tmp_path / "labels"))
        assert np.array_equal(images[count - 1], pixels[-1].reshape(32, 96))
    assert used < pixels.nbytes / 3


def test_one_pickle_at_a_time(tmp_path):
    paths = []
    for part in range(8):
        images = np.full((500, 32, 32, 3), part, np.uint8)
        paths.append(tmp_path / f"{part}.pkl")
        paths[-1].write_bytes(pickle.dumps((images, np.zeros(500))))
    used, (stored, labels) = peak(lambda: read_pickles(*paths))
    assert len(stored) == len(labels) == 4000
    assert stored[3999].max() == 7
    assert used < 4000 * 3072 / 2


def test_a_second_start_opens_no_image(tmp_path):
    make_folder(tmp_path / "data")
    load(config(tmp_path), 16)
    opened, watching = [], True

    def watch(event, args):
        if watching and event == "open":
            opened.append(str(args[0]))

    sys.addaudithook(watch)
    data = load(config(tmp_path), 16)
    watching = False
    assert not [name for name in opened if name.startswith(str(tmp_path / "data"))]
    assert len(data) == 12
