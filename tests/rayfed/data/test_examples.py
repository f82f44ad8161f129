import tracemalloc

import numpy as np
import pytest
import torch

from rayfed.client_facts import ClientNames, RowTable
from rayfed.data import examples as module
from rayfed.data.examples import Mapped, OnDevice, Streamed, choose, rows_of
from rayfed.devices import HOST
from tests.pretended import pretended

rng = np.random.default_rng(0)
IMAGES = rng.integers(0, 256, (20, 4, 4, 3), dtype=np.uint8)
LABELS = rng.integers(0, 5, 20)
MASKS = rng.integers(0, 2, (20, 4, 4), dtype=np.uint8)
SPLITS = {
    "a": {"train": np.array([1, 3, 5, 7, 9]), "val": np.array([], dtype=np.int64)},
    "b": {"test": np.array([3, 4])},
}
ORDER = torch.tensor([4, 0, 2, 1, 3])


def batches(examples, order=ORDER, split=("a", "train"), size=2):
    return [(x.cpu(), y.cpu()) for x, y in examples.batches(*split, order, size)]


@pytest.mark.parametrize("targets", [LABELS, MASKS])
@pytest.mark.parametrize("kind", [OnDevice, Streamed])
@pytest.mark.parametrize("order", [ORDER, None])
def test_batches_of_a_device_are_those_of_the_cpu(kind, targets, order):
    mapped = batches(Mapped(IMAGES, targets, SPLITS), order)
    with pretended() as device:
        there = batches(kind(IMAGES, targets, SPLITS, torch.device(device.name)), order)
    assert [len(y) for _, y in mapped] == [2, 2, 1]
    for ours, theirs in zip(mapped, there, strict=True):
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(ours, theirs, strict=True))


def test_what_is_copied():
    with pretended() as device:
        where = torch.device(device.name)
        resident = OnDevice(IMAGES, LABELS, SPLITS, where)
        assert device.counts.down == 3  # pixels, labels, and where each split has them
        at_start = device.counts.waits
        for _ in resident.batches("a", "train", ORDER, 2):
            pass
        assert device.counts.down == 4  # the order
        for _ in resident.batches("a", "train", None, 2):
            pass
        assert device.counts.down == 4
        for _ in Streamed(IMAGES, LABELS, SPLITS, where).batches("a", "train", ORDER, 2):
            pass
        assert device.counts.down == 4 + 3  # a copy for each batch
        assert (device.counts.up, device.counts.waits) == (0, at_start)


def test_examples_go_to_a_device_in_parts(monkeypatch):
    """A whole copy in the memory of the CPU would be made by all actors of a machine at once."""
    monkeypatch.setattr(module, "PART", 100_000, raising=False)
    images = rng.integers(0, 256, (3000, 16, 16, 3), dtype=np.uint8)
    labels = rng.integers(0, 5, 3000)
    splits = {"a": {"train": np.arange(0, 3000, 2)}, "b": {"test": np.arange(1, 3000, 2)}}
    with pretended() as device:
        tracemalloc.start()
        resident = OnDevice(images, labels, splits, torch.device(device.name))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < images.nbytes / 3
        (x, y), *_ = resident.batches("b", "test", None, 1500)
        assert np.array_equal(x.cpu().numpy(), images[1::2])
        assert np.array_equal(y.cpu().numpy(), labels[1::2])


class Drawn:
    """A client `v` whose rows are drawn, three of them repeated."""

    names = ClientNames(["v"])

    def rows_of(self, client):
        self.names.position(client)
        return {"train": np.array([0, 4, 4, 9]), "val": np.array([9])}

    def used(self):
        return np.array([9, 0, 4])


def test_rows_of_a_drawn_client_are_found_on_the_device(monkeypatch):
    table = RowTable(SPLITS, Drawn())
    assert rows_of(table).tolist() == [0, 1, 3, 4, 5, 7, 9]
    for most in (10, 0):
        monkeypatch.setattr("rayfed.data.examples.MOST_PLACED", most)
        with pretended() as device:
            resident = OnDevice(IMAGES, LABELS, table, torch.device(device.name))
            for _ in range(2):
                ((x, y),) = resident.batches("v", "train", None, 8)
                assert torch.equal(x.cpu(), torch.from_numpy(IMAGES[[0, 4, 4, 9]]))
                assert torch.equal(y.cpu(), torch.from_numpy(LABELS[[0, 4, 4, 9]]))
                ((x, _),) = resident.batches("v", "val", None, 8)
                assert torch.equal(x.cpu(), torch.from_numpy(IMAGES[[9]]))
            assert device.counts.down == 3 + (2 if most else 4)  # remembered, or copied again
    with pytest.raises(KeyError):
        table["w"]


def test_a_pass_that_is_given_up_or_empty():
    with pretended() as device:
        for kind in (OnDevice, Streamed):
            examples = kind(IMAGES, LABELS, SPLITS, torch.device(device.name))
            x, _ = next(examples.batches("a", "train", ORDER, 2))
            assert torch.equal(x.cpu(), torch.from_numpy(IMAGES[[9, 1]]))
            assert sum(len(y) for _, y in examples.batches("a", "val", None, 2)) == 0


def test_examples_are_resident_where_they_fit():
    used = rows_of(SPLITS)
    assert used.tolist() == [1, 3, 4, 5, 7, 9]
    need = len(used) * (4 * 4 * 3 + 8)
    with pretended() as device:
        kinds = [
            type(choose(IMAGES, LABELS, SPLITS, torch.device(where), resident, budget))
            for where, resident, budget in (
                ("cpu", True, need),
                (device.name, "auto", need),
                (device.name, "auto", need - 1),
                (device.name, True, 0),
                (device.name, False, need),
            )
        ]
    assert kinds == [Mapped, OnDevice, Streamed, OnDevice, Streamed]
    assert choose(IMAGES, LABELS, SPLITS, HOST, "auto", need).device == HOST
    assert len(rows_of({})) == 0


def test_free_memory_of_the_device_counts(monkeypatch):
    monkeypatch.setattr("rayfed.data.examples.free_memory", lambda device: 600)
    with pretended() as device:
        where = torch.device(device.name)
        assert type(choose(IMAGES, LABELS, SPLITS, where, "auto", 1e9)) is Streamed  # 336 of 600 bytes
        monkeypatch.setattr("rayfed.data.examples.free_memory", lambda device: 700)
        assert type(choose(IMAGES, LABELS, SPLITS, where, "auto", 1e9)) is OnDevice
