"""Frozen features: one file for a set of images, a budget in memory, and no error where the disk is full."""

import time

import numpy as np
import pytest
import torch

from rayfed.models import trunk
from rayfed.models.trunk import FeatureCache, FeatureFolder
from rayfed.testing import small_setup
from tests.pretended import TYPE, pretended

KEYS = [("a", "train", (0,)), ("b", "train", (0,)), ("c", "train", (0,))]
SPLITS = {name: {"train": np.array([i, i + 1])} for i, name in enumerate("abc")}
ONE = torch.ones(2, 3)


def test_a_set_of_images_has_one_file_whoever_owns_it(tmp_path):
    splits = {
        "a": {"train": np.array([1, 2])},
        "b": {"train": np.array([1, 2])},
        "c": {"train": np.array([2])},
    }
    FeatureCache(1e9, FeatureFolder(tmp_path, splits), shared=True)["a", "train", (0, 1)] = ONE
    again = FeatureCache(1e9, FeatureFolder(tmp_path, splits))
    assert torch.equal(again["b", "train", (0, 1)], ONE)
    assert ("c", "train", (0, 1)) not in again
    assert ("a", "train", (0,)) not in again  # another depth


def test_features_that_cannot_be_written_stay_in_memory(tmp_path):
    (tmp_path / "occupied").write_text("a file where the folder would be")
    cache = FeatureCache(1e9, FeatureFolder(tmp_path / "occupied", SPLITS), shared=True)
    cache[KEYS[0]] = ONE
    assert torch.equal(cache[KEYS[0]], ONE)
    assert FeatureFolder(tmp_path / "occupied", SPLITS).read(KEYS[0]) is None


def test_a_file_that_is_damaged_is_not_used(tmp_path):
    folder = FeatureFolder(tmp_path, SPLITS)
    folder.write(KEYS[0], ONE)
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-5])
    assert folder.read(KEYS[0]) is None


@pytest.mark.parametrize("mapped", [0, 10**9])
def test_a_file_is_written_whole_and_read_with_the_same_bits(mapped, tmp_path, monkeypatch):
    monkeypatch.setattr(trunk, "MAPPED", mapped)
    folder = FeatureFolder(tmp_path / "new", SPLITS)
    value = torch.randn(2, 3)
    folder.write(KEYS[0], value)
    assert [path.suffix for path in (tmp_path / "new").iterdir()] == [".npy"]
    assert torch.equal(folder.read(KEYS[0]), value)


def test_a_cache_holds_no_more_than_its_budget_and_forgets_what_was_not_used_for_longest():
    cache = FeatureCache(2 * ONE.nbytes)
    for key in KEYS[:2]:
        cache[key] = ONE
    assert KEYS[0] in cache  # which is a use, so that the other one is the older one now
    cache[KEYS[2]] = ONE
    assert list(cache) == [KEYS[0], KEYS[2]]
    cache[KEYS[0]] = torch.ones(4, 3)  # which leaves room for no other
    assert list(cache) == [KEYS[0]]
    cache[KEYS[1]] = torch.ones(5, 3)
    assert list(cache) == []


@pytest.mark.parametrize(("seconds", "spilled"), [(1e9, 0), (0.0, 1)])
def test_what_leaves_goes_to_disk_where_that_is_faster_than_computing_it(seconds, spilled, tmp_path):
    folder = FeatureFolder(tmp_path / "new", SPLITS)
    folder.written = (ONE.nbytes, seconds)
    cache = FeatureCache(ONE.nbytes, folder)
    for key in KEYS[:2]:
        assert cache.get(key) is None
        cache[key] = ONE
    assert len(list(tmp_path.glob("new/*"))) == spilled
    assert (cache.get(KEYS[0]) is not None) == bool(spilled)
    size, measured = folder.written
    assert (measured != seconds) == bool(spilled)  # the next file is compared with this one
    assert folder.seconds(size // 2) == measured
    assert folder.seconds(3 * size) == pytest.approx(3 * measured)


def test_the_time_of_features_is_that_of_the_work_not_of_its_launch(monkeypatch):
    with pretended() as device:
        monkeypatch.setattr(getattr(torch, TYPE), "synchronize", lambda _: time.sleep(0.05), raising=False)
        cache = FeatureCache(1e9)
        assert cache.get("key") is None
        cache["key"] = ONE.to(device.name)
        assert cache._held["key"][1] >= 0.05


@pytest.mark.parametrize("memory", [1, 30_000, 10**9])
def test_the_budget_changes_no_bit(memory, tmp_path):
    from rayfed.engine.loop import run_rounds
    from rayfed.executors.inline import InlineExecutor
    from rayfed.federation.params import digest

    setup = small_setup("algorithm=fedavg", "tuning=head", f"train.cache_memory={memory}", "rounds=2")
    assert setup.context.features
    assert not setup.context.shares_features
    executor = InlineExecutor(setup.context, setup.weights)
    *_, last = run_rounds(setup.experiment, executor, setup.start)
    held = sum(value.nbytes for value in executor.worker.cache.values())
    assert held <= memory
    assert (held > 0) == (memory > 1)
    plain = small_setup("algorithm=fedavg", "tuning=head", "rounds=2")
    *_, other = run_rounds(plain.experiment, InlineExecutor(plain.context, plain.weights), plain.start)
    assert digest(last.state.params) == digest(other.state.params)


def test_features_that_were_computed_in_another_way_are_not_read(tmp_path, monkeypatch):
    place = (tmp_path / "data.arrow", SPLITS, torch.device("cpu"), "weights")
    trunk.feature_folder(*place).write(KEYS[0], ONE)
    assert torch.equal(trunk.feature_folder(*place).read(KEYS[0]), ONE)
    monkeypatch.setattr(trunk, "REVISION", trunk.REVISION + 1)
    assert trunk.feature_folder(*place).read(KEYS[0]) is None


def test_features_of_another_kernel_of_attention_are_not_read(tmp_path):
    place = (tmp_path / "data.arrow", SPLITS, torch.device("cpu"), "digest")
    fused = torch.backends.mha.get_fastpath_enabled()
    trunk.feature_folder(*place).write(KEYS[0], ONE)
    assert trunk.feature_folder(*place).read(KEYS[0]) is not None
    torch.backends.mha.set_fastpath_enabled(not fused)
    try:
        assert trunk.feature_folder(*place).read(KEYS[0]) is None
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)


@pytest.mark.parametrize("other", ["kind", "kernels"])
def test_features_of_another_kind_of_gpu_are_not_read(other, tmp_path, monkeypatch):
    place = (tmp_path / "data.arrow", SPLITS, torch.device(TYPE, 0), "digest")
    module = getattr(torch, TYPE)
    monkeypatch.setattr(module, "get_device_name", lambda device: "one kind", raising=False)
    with pretended():
        trunk.feature_folder(*place).write(KEYS[0], ONE)
        assert trunk.feature_folder(*place).read(KEYS[0]) is not None
        if other == "kind":
            monkeypatch.setattr(module, "get_device_name", lambda device: "another kind")
        else:
            monkeypatch.setattr(trunk, "are_deterministic_algorithms_enabled", lambda: True)
        assert trunk.feature_folder(*place).read(KEYS[0]) is None
