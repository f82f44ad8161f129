"""File formats of digits, against other programs' idea of them; nothing is in memory as a whole."""

import bz2
import gzip
import pickle
import struct

import numpy as np
import pytest
from scipy.io import loadmat, savemat

from rayfed.data.formats.array_files import matrices, read_idx, read_listed, read_mat, read_pickles, read_usps
from rayfed.data.readers.digits import Digits
from rayfed.errors import DataError


def everything(images):
    return np.stack([images[i] for i in range(len(images))])


@pytest.mark.parametrize("packed", [False, True])
def test_matlab_as_scipy_reads_it(tmp_path, packed):
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (32, 32, 3, 57), dtype=np.uint8)
    y = rng.integers(1, 11, (57, 1))
    for kind in (np.uint8, np.float64, np.int32):
        path = tmp_path / "x.mat"
        savemat(
            path, {"other": np.arange(4.0), "y": y.astype(kind), "X": x, "text": "abc"}, do_compression=packed
        )
        images, labels = read_mat(path)
        assert np.array_equal(everything(images), loadmat(path)["X"].transpose(3, 0, 1, 2))
        assert np.array_equal(labels, y[:, 0] % 10)


def test_matlab_values_small_enough_for_their_tag(tmp_path):
    savemat(tmp_path / "x.mat", {"a": np.array([[1, 2, 3]], np.uint8), "b": np.array([[7.5]])})
    found = {matrix.name: matrix.values().tolist() for matrix in matrices(tmp_path / "x.mat")}
    assert found["a"] == [1, 2, 3]
    assert found["b"] == [7.5]


@pytest.mark.parametrize("packed", [False, True])
def test_matlab_files_that_end_early(tmp_path, packed):
    path = tmp_path / "x.mat"
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (32, 32, 3, 9), dtype=np.uint8)
    savemat(path, {"X": x, "y": np.ones((9, 1))}, do_compression=packed)
    whole = path.read_bytes()
    for length in (100, 130, 200, len(whole) // 2):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"ends early|no X|incomplete|error"):
            read_mat(path)


def test_idx_sizes_must_be_those_of_the_file(tmp_path):
    labels = tmp_path / "labels"
    labels.write_bytes(struct.pack(">2i", 0x801, 2) + b"\1\2")
    for claim, count in ((3, 2), (2**31 - 1, 2), (-1, 2)):
        data = struct.pack(">4i", 0x803, claim, 4, 4) + bytes(16 * count)
        (tmp_path / "images").write_bytes(data)
        (tmp_path / "images.gz").write_bytes(gzip.compress(data))
        for name in ("images", "images.gz"):
            with pytest.raises(ValueError, match=r"the header says|sizes|not a whole number"):
                read_idx(tmp_path / name, labels)


def test_packed_files_that_hold_too_much(tmp_path, monkeypatch):
    monkeypatch.setattr("rayfed.data.formats.array_files.MAX_BYTES", 1000)
    (tmp_path / "labels").write_bytes(struct.pack(">2i", 0x801, 2) + b"\1\2")
    data = struct.pack(">4i", 0x803, 2, 32, 32) + bytes(2048)
    (tmp_path / "images.gz").write_bytes(gzip.compress(data))
    with pytest.raises(ValueError, match="its decompressed size is more than"):
        read_idx(tmp_path / "images.gz", tmp_path / "labels")


def test_digits_stay_in_their_files(tmp_path):
    for line, words in (("1 257:0\n", "pixel 257"), ("1 0:0\n", "pixel 0"), ("1 3:nan\n", "finite")):
        (tmp_path / "usps.bz2").write_bytes(bz2.compress(line.encode()))
        with pytest.raises(ValueError, match=words):
            read_usps(tmp_path / "usps.bz2")
    for name in ("../x.png", "/etc/x.png"):
        (tmp_path / "list.txt").write_text(f"{name} 3\n")
        with pytest.raises(ValueError, match="which is outside of its folder"):
            read_listed(tmp_path, tmp_path / "list.txt")


def write_fedbn(root, parts=3):
    """All five sources as FedBN's archive has them: image i of a part shows digit i in its first pixel."""
    shapes = {"MNIST": (28, 28), "USPS": (16, 16), "SynthDigits": (32, 32, 3), "MNIST_M": (28, 28, 3)}
    for folder, shape in (shapes | {"SVHN": (32, 32, 3)}).items():
        (root / folder / "partitions").mkdir(parents=True)
        images = np.zeros((10, *shape), np.uint8)
        images[:, 0, 0] = (np.arange(10) * 20).reshape(-1, *[1] * (len(shape) - 2))
        for part in range(parts):
            with (root / folder / "partitions" / f"train_part{part}.pkl").open("wb") as file:
                pickle.dump((images + np.uint8(part), np.arange(10)), file)
        with (root / folder / "test.pkl").open("wb") as file:
            pickle.dump((images, np.arange(10)[:, None]), file)


def test_digits_as_fedbn_prepared_them(tmp_path):
    write_fedbn(tmp_path, parts=11)
    reader = Digits(name="digits", root=str(tmp_path))
    listing = reader.scan()
    assert listing.domains == ("mnist", "usps", "synth", "mnist_m", "svhn")
    assert len(listing.keys) == len(set(listing.keys)) == 5 * 120
    assert listing.test.sum() == 50
    for domain in range(5):
        rows = np.flatnonzero((listing.domain == domain) & ~listing.test)
        assert listing.labels[rows].tolist() == [*range(10)] * 11
        size = (28, 16, 32, 28, 32)[domain]
        # Part 10 comes after part 9, not after part 1.
        assert reader.decode(listing, int(rows[107]), size)[0, 0].tolist() == [150, 150, 150]
    assert reader.fingerprint() == listing.fingerprint


class Evil:
    def __reduce__(self):
        return (open, ("/tmp/never", "w"))


def test_a_pickle_of_something_else_is_refused(tmp_path):
    write_fedbn(tmp_path)
    bad = tmp_path / "SVHN" / "partitions" / "train_part1.pkl"
    bad.write_bytes(pickle.dumps((Evil(), [1])))
    with pytest.raises(DataError, match=r"not in the format.*open, which is not an array"):
        Digits(name="digits", root=str(tmp_path)).scan()
    for content in ([1, 2], (np.zeros((2, 4, 4), np.uint8), np.zeros(3)), (np.zeros((2, 4, 4)), np.zeros(2))):
        bad.write_bytes(pickle.dumps(content))
        with pytest.raises((ValueError, TypeError)):
            read_pickles(bad)
