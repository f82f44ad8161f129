"""What a checkpoint holds comes back to the bit, and nothing damaged or foreign is taken for one."""

import json

import pytest
import torch

from rayfed.errors import ConfigError, StorageError
from rayfed.federation.executor import Kept
from rayfed.record.checkpoint import Checkpoints, from_file, restore, to_bytes
from rayfed.types import ServerState

WEIGHT = torch.arange(6.0).view(2, 3)


def saved_and_read(value, tmp_path):
    file = tmp_path / "value"
    file.write_bytes(to_bytes(value, "value"))
    return from_file(file)


def test_nested_values_come_back_with_their_types(tmp_path):
    flat = torch.arange(10, dtype=torch.bfloat16)
    value = {
        "views": [flat[:4], flat[4:], flat[:4]],  # one memory behind three tensors
        "transposed": WEIGHT.t(),
        "scalar": torch.tensor(3),
        "nothing": torch.zeros(0, 5),
        3: ("a", None, True, 2, 0.1, float("nan"), float("-inf")),
        "names/with/slashes": {"x/y": torch.ones(1), "x": {"y": torch.zeros(1)}},
        "empty": [{}, (), []],
    }
    found = saved_and_read(value, tmp_path)
    assert list(found) == list(value)
    assert [t.tolist() for t in found["views"]] == [t.tolist() for t in value["views"]]
    assert found["views"][0].dtype == torch.bfloat16
    assert torch.equal(found["transposed"], WEIGHT.t())
    assert found["scalar"].shape == ()
    assert found["nothing"].shape == (0, 5)
    assert repr(found[3]) == repr(value[3])
    assert found["names/with/slashes"]["x"]["y"] == 0
    assert found["names/with/slashes"]["x/y"] == 1
    assert found["empty"] == [{}, (), []]
    found["views"][0][0] = 7  # memory of its own
    assert found["views"][2][0] == 0


@pytest.mark.parametrize("value", [{"a": {1, 2}}, {"a": [torch.float32]}, {1.5: 2}, [object()], {"f": print}])
def test_what_cannot_be_read_without_running_code_is_refused(value):
    with pytest.raises(TypeError, match="state"):
        to_bytes(value, "state")


class Stores:
    """An executor that only keeps stores, and counts how often each is fetched."""

    def __init__(self, **stores):
        self.kept = {client: Kept(i, store) for i, (client, store) in enumerate(stores.items())}
        self.fetched = []

    def stores(self):
        return dict(self.kept)

    def fetch(self, client, kept):
        self.fetched.append(kept.serial)
        return kept.value

    def forget(self):
        self.kept.clear()

    def restore(self, client, store):
        self.kept[client] = Kept(1000 + len(self.kept), store)


def state(round):
    return ServerState(
        round=round,
        params={"w": WEIGHT + round},
        shared={"s": (1, 2)},
        memory={"m": {"c": 0.5}},
        blocks=(0, 2),
    )


def write(folder, rounds, keep=2, executor=None):
    executor = executor or Stores(a={"own": WEIGHT}, b={"n": 1})
    checkpoints = Checkpoints(folder, keep)
    for r in range(rounds):
        checkpoints.save(state(r), executor.stores(), executor)
    return checkpoints, executor


def load(folder, usable=lambda _: True):
    return Checkpoints(folder).load({"w": WEIGHT}, usable)


def test_everything_comes_back(tmp_path):
    write(tmp_path, 3)
    found, executor = load(tmp_path), Stores(stranger={"x": 1})
    assert found.state.round == 2
    assert torch.equal(found.state.params["w"], WEIGHT + 2)
    assert (found.state.shared, found.state.memory, found.state.blocks) == (
        {"s": (1, 2)},
        {"m": {"c": 0.5}},
        (0, 2),
    )
    restore(found.stores, executor)
    assert list(executor.kept) == ["a", "b"]
    assert torch.equal(executor.kept["a"].value["own"], WEIGHT)
    assert executor.kept["b"].value == {"n": 1}


def test_no_checkpoint_is_not_an_error(tmp_path):
    assert load(tmp_path) is None


def test_only_the_last_ones_stay_and_a_store_is_written_once(tmp_path):
    checkpoints, executor = write(tmp_path, 5)
    assert sorted(p.name for p in checkpoints.path.glob("round-*")) == ["round-000004", "round-000005"]
    assert executor.fetched == [0, 1]
    executor.kept["a"] = Kept(9, {"own": WEIGHT + 1})
    for r in (5, 6):
        checkpoints.save(state(r), executor.stores(), executor)
    assert executor.fetched == [0, 1, 9]
    assert len(list((checkpoints.path / "stores").iterdir())) == 2  # the old one of a is gone
    again = Checkpoints(tmp_path, keep=1)
    again.save(state(7), {}, executor)
    assert [p.name for p in (checkpoints.path).iterdir() if p.name.startswith("round")] == ["round-000008"]
    assert not list((checkpoints.path / "stores").iterdir())


def truncate(path):
    path.write_bytes(path.read_bytes()[:-3])


def flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def set_fact(**facts):
    def change(path):
        path.write_text(json.dumps({**json.loads(path.read_text()), **facts}))

    return change


DAMAGES = {
    "truncated tensors": ("round-000003/state.safetensors", truncate),
    "a changed bit": ("round-000003/state.safetensors", flip),
    "no tensors": ("round-000003/state.safetensors", lambda p: p.unlink()),
    "truncated facts": ("round-000003/checkpoint.json", truncate),
    "another format": ("round-000003/checkpoint.json", set_fact(format=99)),
    "a store elsewhere": ("round-000003/checkpoint.json", set_fact(stores={"a": "../../../etc/passwd"})),
    "a store that is missing": ("round-000003/checkpoint.json", set_fact(stores={"a": "0" * 64})),
    "stores of another kind": ("round-000003/checkpoint.json", set_fact(stores=[1])),
    "nonsense": ("round-000003/checkpoint.json", lambda p: p.write_text("[" * 100_000)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_falls_back_to_the_one_before_and_says_so(damage, tmp_path, caplog):
    checkpoints, _ = write(tmp_path, 3)
    name, spoil = DAMAGES[damage]
    spoil(checkpoints.path / name)
    assert load(tmp_path).state.round == 1
    assert "round-000003 cannot be used" in caplog.text


def test_a_checkpoint_without_its_history_is_not_used(tmp_path):
    write(tmp_path, 3)
    assert load(tmp_path, usable=lambda rounds: rounds < 3).state.round == 1


def test_nothing_usable_is_an_error_not_a_fresh_start(tmp_path):
    checkpoints, _ = write(tmp_path, 2)
    for file in checkpoints.path.glob("stores/*"):
        flip(file)
    with pytest.raises(ConfigError, match="none of 2 checkpoints"):
        load(tmp_path)


def test_tensors_of_another_experiment_are_refused(tmp_path):
    write(tmp_path, 1)
    with pytest.raises(ConfigError, match="none of 1"):
        Checkpoints(tmp_path).load({"w": WEIGHT.double()}, lambda _: True)


def test_a_failed_write_leaves_the_last_checkpoint(tmp_path, monkeypatch):
    checkpoints, executor = write(tmp_path, 1)

    def full(path, data):
        raise StorageError(f"cannot write {path}: No space left on device")

    monkeypatch.setattr("rayfed.record.checkpoint.write_bytes", full)
    with pytest.raises(StorageError):
        checkpoints.save(state(1), executor.stores(), executor)
    monkeypatch.undo()
    assert load(tmp_path).state.round == 0
