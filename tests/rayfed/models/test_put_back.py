"""State of a user's network outside its trained tensors: put back, averaged or refused, never leaked."""

import array
import collections
import copy
import functools
import itertools
import pickle
import types

import cloudpickle
import numpy as np
import pytest
import torch
from torch import nn

import rayfed
from rayfed.errors import ClientError, ConfigError
from rayfed.executors import inline
from rayfed.executors.worker import Worker
from rayfed.models.put_back import remember
from tests.rayfed.models.own import Own
from tests.rounding import near

SHARED = {"calls": 0}


class Late(Own):
    """A moving mean that begins after five passes, written in a way that torch does not count."""

    starts = 5

    def add(self):
        self.register_buffer("mean", torch.zeros(8))
        self.passes = 0

    def middle(self, h):
        self.passes += self.training
        if self.training and self.passes > self.starts:
            self.mean.data.mul_(0.9).add_(0.1 * h.detach().mean(0))
        return h - self.mean


class VeryLate(Late):
    starts = 10**6


class LateTeacher(Own):
    def add(self):
        self.t, self.passes = copy.deepcopy(self.a).requires_grad_(False), 0

    def forward(self, x):
        self.passes += self.training
        if self.training and self.passes > 5:
            for old, new in zip(self.t.parameters(), self.a.parameters(), strict=True):
                old.data = 0.9 * old.data + 0.1 * new.data
        return self.o(torch.relu(self.a(x)) + torch.relu(self.t(x)))


class LargeBatch(Own):
    def add(self):
        self.register_buffer("mean", torch.zeros(8), persistent=False)

    def middle(self, h):
        if self.training and len(h) > 9:
            self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        return h - self.mean


class Slots:
    __slots__ = ("calls",)

    def __init__(self):
        self.calls = 0


class Holder:
    def __init__(self):
        self.calls = 0

    def count(self, h):
        self.calls += 1
        return h + 0.1 * self.calls


class InSlots(Own):
    def add(self):
        self.kept = Slots()

    def middle(self, h):
        self.kept.calls += 1
        return h + 0.1 * self.kept.calls


class InArray(Own):
    def add(self):
        self.kept = array.array("d", [0.0])

    def middle(self, h):
        self.kept[0] += 0.1
        return h + self.kept[0]


class Deep(Own):
    def add(self):
        self.kept = [[[[[[[[0.0]]]]]]]]

    def middle(self, h):
        inner = self.kept[0][0][0][0][0][0][0]
        inner[0] += 0.1
        return h + inner[0]


class OfMethod(Own):
    def add(self):
        self.kept = Holder().count

    def middle(self, h):
        return self.kept(h)


def _noted(kept, h):
    kept.append(0.1)
    return h + sum(kept)


class OfPartial(Own):
    def add(self):
        self.kept = functools.partial(_noted, [])

    def middle(self, h):
        return self.kept(h)


class Bits(Own):
    def add(self):
        self.kept = np.random.PCG64(3)

    def middle(self, h):
        return h + (self.kept.random_raw() % 7) / 7 if self.training else h


class HiddenModule(Own):
    """A layer with running statistics that torch does not know of."""

    def add(self):
        self.kept = [nn.BatchNorm1d(8)]

    def middle(self, h):
        self.kept[0].train(self.training)
        return self.kept[0](h)


def clients():
    rng = np.random.default_rng(0)

    def part(n, shift):
        return rng.normal(shift, 1 + shift, (n, 6)).astype("f4"), rng.integers(0, 3, n)

    return {f"h{i}": {"train": part(n, i), "test": part(12, i)} for i, n in enumerate((75, 60, 90))}


def run(net, method="fedavg", tuning="full", rounds=2, **more):
    train = {"optimizer": "sgd", "lr": 0.05, "momentum": 0.9, "batch_size": 10}
    own = {"data": clients(), "rounds": rounds, "cluster": "inline", "tuning": tuning, "train": train}
    return rayfed.Experiment(method=method, model=net, **own, **more).run(quiet=True)


def each_call_anew(monkeypatch):
    """Give each call a process of its own, as it were: a worker that nothing was run with."""
    made = inline.InlineExecutor.__init__

    def init(self, context, weights, policy=None, device="cpu"):
        made(self, context, weights, policy, device)
        written = cloudpickle.dumps(context)
        self.worker.call = lambda call, store: Worker(pickle.loads(written), weights).call(call, store)

    monkeypatch.setattr(inline.InlineExecutor, "__init__", init)


KEPT = [Late, LateTeacher, LargeBatch, InSlots, InArray, Deep, OfMethod, OfPartial, Bits, HiddenModule]


@pytest.mark.parametrize("net", KEPT)
def test_a_call_gives_the_same_in_a_process_of_its_own(net, monkeypatch):
    together = run(net())
    each_call_anew(monkeypatch)
    apart = run(net())
    assert apart.sha256 == together.sha256
    assert apart.clients.loss.tolist() == together.clients.loss.tolist()


@pytest.mark.parametrize(
    ("method", "net", "tuning"),
    [
        ("ditto", Late, "full"),
        ("scaffold", LargeBatch, "full"),
        ("fedkseed", HiddenModule, "full"),
        ("fedadam", InSlots, rayfed.LoRA(rank=2, targets=["a"])),
        ("moon", LateTeacher, "full"),
    ],
)
def test_so_it_does_with_other_methods_and_tunings(method, net, tuning, monkeypatch):
    together = run(net(), method, tuning)
    each_call_anew(monkeypatch)
    assert run(net(), method, tuning).sha256 == together.sha256


@pytest.mark.parametrize("net", [Late, LateTeacher, LargeBatch])
def test_what_moves_late_or_in_large_batches_only_is_averaged(net):
    moved = {name for name in run(net(), rounds=1).params if name.endswith("state")}
    assert moved == {
        f"{leaf}.state" for leaf in (("t.weight", "t.bias") if net is LateTeacher else ("mean",))
    }


class OfIterator(Own):
    def add(self):
        self.kept = itertools.count()

    def middle(self, h):
        return h + 0.1 * next(self.kept)


class OfClosure(Own):
    def add(self):
        calls = [0.0]

        def count(h):
            calls[0] += 0.1
            return h + calls[0]

        self.kept = count

    def middle(self, h):
        return self.kept(h)


class OfHook(Own):
    def add(self):
        calls = [0.0]

        def hook(module, inputs, output):
            calls[0] += 0.1
            return output + calls[0]

        self.a.register_forward_hook(hook)


class OfClass(Own):
    calls = 0

    def middle(self, h):
        type(self).calls += 1
        return h + 0.1 * type(self).calls


class OfModule(Own):
    def middle(self, h):
        SHARED["calls"] += 1
        return h + 0.1 * SHARED["calls"]


class OfDefault(Own):
    def middle(self, h, calls=[]):  # noqa: B006  # the fault that is looked for
        calls.append(0.1)
        return h + sum(calls)


class NoSeed(Own):
    def middle(self, h):
        return h + float(np.random.default_rng().normal())


@pytest.mark.parametrize("net", [OfIterator, OfClosure, OfHook, OfClass, OfModule, OfDefault, NoSeed])
def test_what_can_neither_be_copied_nor_put_back_is_refused(net):
    with pytest.raises(ConfigError, match=r"passes of .* change .*put back.*; keep state in buffers"):
        run(net())


class Thaws(Own):
    def add(self):
        self.passes = 0

    def middle(self, h):
        self.passes += self.training
        self.a.weight.requires_grad_(self.passes <= 3)
        return h


class MakesLate(Own):
    def add(self):
        self.passes = 0

    def middle(self, h):
        self.passes += 1
        if self.passes > 5 and not hasattr(self, "late"):
            self.register_buffer("late", h.detach().mean(0).clone())
        return h - self.late if hasattr(self, "late") else h


def test_what_trains_and_which_tensors_there_are_stays_the_same():
    with pytest.raises(ConfigError, match=r"changes requires_grad of a.weight; what trains is the same"):
        run(Thaws())
    with pytest.raises(ConfigError, match="makes the tensor late; make it when the network is made"):
        run(MakesLate())


def test_a_tensor_that_moves_unseen_ends_the_run(monkeypatch):
    """Not even 100 passes before the run showed it: its values would be neither averaged nor kept."""
    monkeypatch.setattr("rayfed.models.examine.MANY", 2)
    monkeypatch.setattr("rayfed.models.examine.AGAIN", 1)
    monkeypatch.setattr(VeryLate, "starts", 6)
    with pytest.raises(ClientError, match=r"changed its buffer 'mean' in this call, which it did not do"):
        run(VeryLate())


def test_objects_are_put_back_whatever_they_hold():
    values = {
        "cycle": [1, 2],
        "counter": collections.Counter("aab"),
        "bytes": bytearray(b"abc"),
        "space": types.SimpleNamespace(list=[1], tensor=torch.zeros(2)),
        "bits": np.random.PCG64(1),
    }
    values["cycle"].append(values)
    put_back = remember(values)
    values["cycle"][0] = 5
    values["counter"]["z"] += 1
    values["bytes"][0] = 0
    values["space"].list.append(2)
    values["space"].tensor += 1
    state = values["bits"].state["state"]["state"]
    values["bits"].random_raw()
    values["new"] = 1
    put_back()
    assert values["cycle"][:2] == [1, 2]
    assert values["counter"] == {"a": 2, "b": 1}
    assert values["bytes"] == b"abc"
    assert values["space"].list == [1]
    assert not values["space"].tensor.any()
    assert values["bits"].state["state"]["state"] == state
    assert "new" not in values


def test_what_copies_share_is_left_as_it_is():
    import logging

    assert remember(logging.getLogger("some")) is None


class Above(Own):
    """Batches of more than 30 rows are centred."""

    def middle(self, h):
        return h - (h.mean(0) if len(h) > 30 else 0)


class Running(Own):
    """A row depends on those before it."""

    def middle(self, h):
        return h.cumsum(0)


class Half(Own):
    def middle(self, h):
        return h * (1 if len(h) < 4 else 0.5)


class Ranked(Own):
    def middle(self, h):
        return h * (h.mean(1) >= h.mean(1).median())[:, None]


class Attends(Own):
    def middle(self, h):
        return torch.softmax(h @ h.T, -1) @ h


@pytest.mark.parametrize("net", [Above, Running, Half, Ranked, Attends])
def test_small_clients_are_scored_as_if_alone_where_rows_change_each_other(net):
    rng = np.random.default_rng(1)

    def part(num):
        return rng.normal(size=(num, 6)).astype("f4"), rng.integers(0, 3, num)

    data = {f"k{i:02d}": {"train": part(8), "test": part(5)} for i in range(70)}
    done = rayfed.Experiment(
        method="fedavg", model=net(), data=data, rounds=1, cluster="inline", tuning="full", train={"lr": 0.01}
    ).run(quiet=True)
    model = done.model().eval()
    for place, splits in enumerate(data.values()):
        x, y = (torch.tensor(each) for each in splits["test"])
        with torch.no_grad():
            loss = float(nn.functional.cross_entropy(model(x), y))
        near(done.clients.loss.iloc[place], loss, 1000)  # sums of 6 and 8 products, over 5 rows, and softmax
