import pickle
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from rayfed.data.preparation import prepare
from rayfed.data.readers.digits_five_mini import DigitsFiveMini
from rayfed.data.readers.image_folder import ImageFolder
from rayfed.data.shards import open_dataset
from tests.rayfed.data.folders import PACS, SIZE, folder, make_folder, needs_pacs


@pytest.fixture
def root(tmp_path):
    return make_folder(tmp_path / "data")


@pytest.fixture
def cache(tmp_path):
    (tmp_path / "cache").mkdir()
    return tmp_path / "cache"


def test_images_are_a_read_only_view_of_the_file(root, cache):
    dataset = open_dataset(prepare(folder(root), SIZE, cache))
    assert not dataset.images.flags.owndata
    assert not any(a.flags.writeable for a in (dataset.images, dataset.labels, dataset.domain, dataset.test))
    with pytest.raises(ValueError, match="WRITEABLE"):
        dataset.images.flags.writeable = True
    start = dataset.images.ctypes.data
    mapped = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    ranges = [
        [int(end, 16) for end in line[0].split("-")] for line in mapped if line[-1] == str(dataset.path)
    ]
    assert any(low <= start and start + dataset.images.nbytes <= high for low, high in ranges)


def test_the_name_of_the_test_split_is_kept(root, cache):
    class Named(ImageFolder):
        def scan(self):
            return replace(super().scan(), test_name="validation")

    plain = folder(root)
    named = Named(**{each.name: getattr(plain, each.name) for each in fields(plain)})
    assert open_dataset(prepare(named, SIZE, cache)).test_name == "validation"
    (cache / "plain").mkdir()
    assert open_dataset(prepare(plain, SIZE, cache / "plain")).test_name == ""


def test_pickles_as_its_path(root, cache):
    dataset = open_dataset(prepare(folder(root), SIZE, cache))
    data = pickle.dumps(dataset)
    assert len(data) < 1000
    again = pickle.loads(data)
    assert again.digest == dataset.digest
    assert np.array_equal(again.images, dataset.images)


def test_digits_five_mini(cache, monkeypatch):
    dataset = open_dataset(prepare(DigitsFiveMini(name="digits"), 32, cache))
    data = DigitsFiveMini(name="digits")._data
    assert np.array_equal(dataset.images, data.images)
    assert np.array_equal(dataset.labels, data.labels)
    assert np.array_equal(dataset.test, data.test)
    assert dataset.keys == data.keys
    assert (dataset.domains, dataset.classes) == (data.domains, data.classes)
    # The second time nothing is made.
    monkeypatch.setattr("rayfed.data.glyphs.build", None)
    prepare(DigitsFiveMini(name="digits"), 32, cache)
    with pytest.raises(TypeError):
        prepare(DigitsFiveMini(name="digits"), 16, cache)


def test_digits_five_mini_at_another_size():
    source = DigitsFiveMini(name="digits")
    image = source.decode(source.scan(), 7, 48)
    plain = Image.fromarray(source._data.images[7]).resize((48, 48), Image.Resampling.BILINEAR)
    assert np.array_equal(image, np.asarray(plain))


def resident_bytes(path: Path) -> int:
    """Bytes of a mapped file that this process has touched."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            inside = line.endswith(str(path))
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


@needs_pacs
@pytest.mark.slow
@pytest.mark.steady
def test_pacs_opens_without_reading_images(cache):
    source = ImageFolder(name="pacs", root=str(PACS))
    path = prepare(source, 64, cache)
    dataset = open_dataset(prepare(source, 64, cache))
    assert resident_bytes(path) < dataset.images.nbytes / 20
    assert len(dataset.keys) == len(dataset) == len(source.scan().keys)
    dataset.images.sum(dtype=np.int64)
    assert resident_bytes(path) > dataset.images.nbytes * 0.9  # the measure measures
    listing = source.scan()
    for row in range(0, len(dataset), 97):
        assert np.array_equal(dataset.images[row], source.decode(listing, row, 64))
