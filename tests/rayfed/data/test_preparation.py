import multiprocessing
import os
import shutil
import signal
import time

import numpy as np
import pytest
from PIL import Image

from rayfed.data import preparation
from rayfed.data.preparation import prepare
from rayfed.data.readers.image_folder import ImageFolder
from rayfed.data.shards import open_dataset
from rayfed.errors import ConfigError, DataError
from tests.rayfed.data.folders import SIZE, BlindFolder, CountingFolder, assert_right, folder, make_folder


@pytest.fixture
def root(tmp_path):
    return make_folder(tmp_path / "data")


@pytest.fixture
def cache(tmp_path):
    (tmp_path / "cache").mkdir()
    return tmp_path / "cache"


def test_round_trip(root, cache):
    dataset = open_dataset(prepare(folder(root), SIZE, cache))
    assert dataset.images.shape == (12, SIZE, SIZE, 3)
    assert (dataset.name, dataset.size, dataset.skipped, len(dataset)) == ("toy", SIZE, 0, 12)
    assert dataset.keys == folder(root).scan().keys
    assert_right(dataset, root)


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_sizes_that_are_no_multiple_of_eight_bytes(root, cache, size):
    assert_right(open_dataset(prepare(folder(root), size, cache)), root)


def test_nothing_changed_nothing_decoded(root, cache):
    path = prepare(folder(root), SIZE, cache)
    before = path.stat()
    assert prepare(folder(root, BlindFolder), SIZE, cache) == path
    assert path.stat() == before
    with pytest.raises(AssertionError, match="decoded"):
        prepare(folder(root, BlindFolder), SIZE + 1, cache)


def test_a_touched_file_is_decoded_again(root, cache):
    first = prepare(folder(root), SIZE, cache)
    image = root / "photo" / "cat" / "0.jpg"
    os.utime(image, ns=(1, 1))
    second = prepare(folder(root), SIZE, cache)
    assert second != first
    assert open_dataset(second).digest == open_dataset(first).digest  # the content is the same


def test_a_replaced_file_is_decoded_again(root, cache):
    first = open_dataset(prepare(folder(root), SIZE, cache))
    Image.new("RGB", (9, 9), (255, 0, 0)).save(root / "sketch" / "dog" / "2.png")
    second = open_dataset(prepare(folder(root), SIZE, cache))
    assert (second.images[11] == (255, 0, 0)).all()
    assert second.digest != first.digest
    assert np.array_equal(second.images[:11], first.images[:11])


def test_digest_does_not_depend_on_the_place(root, cache, tmp_path):
    shutil.copytree(root, tmp_path / "elsewhere")
    here, there = (open_dataset(prepare(folder(r), SIZE, cache)) for r in (root, tmp_path / "elsewhere"))
    assert here.digest == there.digest


def test_bad_image_stops(root, cache):
    bad = root / "photo" / "dog" / "1.jpg"
    bad.write_bytes(bad.read_bytes()[:200])
    with pytest.raises(DataError, match=r"photo/dog/1\.jpg is corrupt"):
        prepare(folder(root), SIZE, cache)
    assert [path.suffix for path in cache.iterdir()] == [".lock"]


def test_bad_images_are_skipped_and_counted(root, cache, caplog):
    for key in ("photo/cat/0.jpg", "sketch/cat/1.png", "sketch/dog/2.png"):
        (root / key).write_bytes(b"broken")
    path = prepare(folder(root), SIZE, cache, "skip")
    dataset = open_dataset(path)
    assert (dataset.skipped, len(dataset)) == (3, 9)
    assert "photo/cat/0.jpg" not in dataset.keys
    assert "sketch/cat/1.png" in caplog.text
    assert_right(dataset, root)
    with pytest.raises(DataError):  # another key: what was skipped does not pass as whole
        prepare(folder(root), SIZE, cache, "stop")


def test_nothing_but_bad_images(root, cache):
    for path in root.rglob("*.*g"):
        path.write_bytes(b"broken")
    with pytest.raises(DataError, match="none of the 12 images"):
        prepare(folder(root), SIZE, cache, "skip")


@pytest.mark.parametrize("length", [0, 100, 2000, -1])
def test_a_damaged_shard_is_made_again(root, cache, length, caplog):
    path = prepare(folder(root), SIZE, cache)
    whole = path.read_bytes()
    path.write_bytes(whole[:length])
    with pytest.raises(DataError, match="not a prepared data set"):
        open_dataset(path)
    prepare(folder(root), SIZE, cache)
    assert path.read_bytes() == whole
    assert [record.getMessage() for record in caplog.records] == [f"{path} is damaged and is prepared again"]


@pytest.mark.parametrize(("column", "field"), [("label", "labels"), ("domain", "domain")])
def test_a_shard_that_points_at_nothing_is_made_again(root, cache, column, field):
    """Whole, but with a number out of range: a model would be asked for a class it does not have."""
    path = prepare(folder(root), SIZE, cache)
    whole = path.read_bytes()
    values = getattr(open_dataset(path), field).astype("<i8").tobytes()
    at = whole.index(values)
    path.write_bytes(whole[:at] + np.full(12, 90, "<i8").tobytes() + whole[at + len(values) :])
    with pytest.raises(DataError, match=f"a {column} is outside"):
        open_dataset(path)
    prepare(folder(root), SIZE, cache)
    assert path.read_bytes() == whole


def test_a_disk_that_fails_while_writing(root, cache, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(preparation.os, "fsync", full)
    with pytest.raises(ConfigError, match=r"data\.cache: cannot write .*No space left"):
        prepare(folder(root), SIZE, cache)
    assert [path.suffix for path in cache.iterdir()] == [".lock"]


class ChangingFolder(ImageFolder):
    """A file is replaced while the last image is being decoded."""

    def decode(self, listing, index, size):
        if index == len(listing.keys) - 1:
            os.utime(self._folder() / listing.keys[0], ns=(5, 5))
        return super().decode(listing, index, size)


def test_data_that_changes_meanwhile(root, cache):
    with pytest.raises(DataError, match="changed while it was being prepared"):
        prepare(folder(root, ChangingFolder), SIZE, cache)
    assert not list(cache.glob("*.arrow"))
    assert_right(open_dataset(prepare(folder(root), SIZE, cache)), root)


def start_preparing(root, cache, **options):
    process = multiprocessing.get_context("spawn").Process(
        target=prepare, args=(folder(root, CountingFolder, **options), SIZE, cache)
    )
    process.start()
    return process


def wait_for(condition, seconds=120):
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.005)
    return value


def test_two_at_once_do_the_work_once(root, cache, tmp_path):
    log = tmp_path / "log"
    both = [start_preparing(root, cache, log=str(log), seconds=0.1) for _ in range(2)]
    for process in both:
        process.join(120)
    assert [process.exitcode for process in both] == [0, 0]
    assert sorted(log.read_text().split()) == sorted(folder(root).scan().keys)
    assert_right(open_dataset(prepare(folder(root, BlindFolder), SIZE, cache)), root)


def test_killed_midway_and_the_waiting_one_takes_over(root, cache, tmp_path):
    log = tmp_path / "log"
    first = start_preparing(root, cache, log=str(log), seconds=600)
    wait_for(lambda: list(cache.glob("*.tmp")))
    second = start_preparing(root, cache, log=str(log))
    time.sleep(0.1)
    os.kill(first.pid, signal.SIGKILL)
    first.join(120)
    second.join(120)
    assert (first.exitcode, second.exitcode) == (-signal.SIGKILL, 0)
    assert sorted(path.suffix for path in cache.iterdir()) == [".arrow", ".lock"]
    assert_right(open_dataset(prepare(folder(root, BlindFolder), SIZE, cache)), root)


def test_killed_alone_then_run_again(root, cache, tmp_path):
    process = start_preparing(root, cache, log=str(tmp_path / "log"), seconds=600)
    wait_for(lambda: list(cache.glob("*.tmp")))
    os.kill(process.pid, signal.SIGKILL)
    process.join(120)
    assert list(cache.glob("*.tmp"))
    assert not list(cache.glob("*.arrow"))
    assert_right(open_dataset(prepare(folder(root), SIZE, cache)), root)
    assert not list(cache.glob("*.tmp"))


def test_no_room(root, cache, monkeypatch):
    monkeypatch.setattr(preparation.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 100))
    with pytest.raises(ConfigError, match=r"data\.cache: .* free"):
        prepare(folder(root), SIZE, cache)


def test_names_are_safe_in_paths(root, cache):
    source = ImageFolder(name="my data/2 ü", root=str(root))
    path = prepare(source, SIZE, cache)
    assert path.parent == cache
    assert open_dataset(path).name == "my data/2 ü"
