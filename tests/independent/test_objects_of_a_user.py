"""No public call changes what a user handed over, and an experiment that is run twice gives the same bits."""

from dataclasses import dataclass

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import rayfed
from rayfed import Experiment, Local, LoRA, Model, Partition, Server, Task
from tests.independent.looks import look, random_streams
from tests.independent.networks import CLASSES, MovingCentre, Own, Teacher

FEATURES = 5
SIZES = {"ann": (12, 5), "bob": (9, 4)}
TRAIN = {"optimizer": "sgd", "lr": 0.05, "momentum": 0.9, "batch_size": 5}


class Rows(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.norm, self.out = nn.Linear(FEATURES, 6), nn.BatchNorm1d(6), nn.Linear(6, CLASSES)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.notes = []

    def forward(self, x):
        if self.training:
            self.seen += 1
            self.notes.append(float(x.detach().mean()))
        x.mul_(1.5)
        return self.out(self.norm(self.one(x)).relu_())


def arrays(num: int, as_images: bool = False, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    shape = (3, 32, 32) if as_images else (FEATURES,)
    return random.normal(size=(num, *shape)).astype("f4"), np.arange(num) % CLASSES


def clients(as_images: bool = False) -> dict:
    return {
        name: {"train": arrays(train, as_images, train), "test": arrays(test, as_images, test)}
        for name, (train, test) in SIZES.items()
    }


def read_only() -> dict:
    """Arrays that cannot be written, and ones with other strides than usual."""
    found = clients()
    for splits in found.values():
        for x, y in splits.values():
            x.flags.writeable = y.flags.writeable = False
    x, y = found["ann"]["train"]
    found["ann"]["train"] = (np.asfortranarray(x), y)
    return found


def tensors() -> dict:
    return {
        name: {split: (torch.from_numpy(x), torch.from_numpy(y)) for split, (x, y) in splits.items()}
        for name, splits in clients().items()
    }


def table() -> pd.DataFrame:
    x, y = arrays(30)
    frame = pd.DataFrame({f"f{i}": x[:, i] for i in range(FEATURES)}, index=range(100, 130))
    frame["y"], frame["client"] = y, ["ann", "bob", "eve"] * 10
    frame.attrs["source"] = ["a note"]
    return frame


def dataset():
    datasets = pytest.importorskip("datasets")
    x, y = arrays(30)
    return datasets.Dataset.from_dict(
        {"x": x.tolist(), "y": y.tolist(), "client": ["ann", "bob", "eve"] * 10}
    )


class Examples(torch.utils.data.Dataset):
    def __init__(self, num: int) -> None:
        self.x, self.y = map(torch.from_numpy, arrays(num))
        self.options = {"flip": False}

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, place: int):
        return self.x[place], int(self.y[place])


def own_task() -> Task:
    weights, seen = torch.ones(CLASSES), {"names": ["a", "b"]}

    def loss(output, target):
        assert seen["names"]
        return nn.functional.cross_entropy(output, target, weights, reduction="none")

    def hits(output, target):
        return (output.argmax(1) == target).float()

    return Task(loss=loss, metrics={"hits": hits})


@dataclass(frozen=True)
class Half(Server):
    """A server half with a hyperparameter."""

    factor: float = 1.0


class Annotated(Server):
    """A server half whose class becomes a dataclass, in place, when it is first handed over."""

    factor: float = 1.0


class Plain(Local):
    """A client half that changes nothing."""


def kept_function():
    """A function that gives the same network each time."""
    net = Rows()
    return lambda: net


def of_images(net: nn.Module) -> dict:
    return {"model": net, "data": clients(as_images=True)}


COLUMNS = {"input": [f"f{i}" for i in range(FEATURES)], "target": "y"}
GIVEN = {
    "a network": lambda: {"model": Rows(), "data": clients()},
    "a network in evaluation mode, partly frozen": lambda: of_images(Teacher().eval()),
    "a network that keeps a list": lambda: of_images(MovingCentre()),
    "a function that gives one network": lambda: {"model": kept_function(), "data": clients()},
    "a class": lambda: {"model": Rows, "data": clients()},
    "a Model": lambda: of_images(Model(Own(), head="out")),
    "arrays that cannot be written": lambda: {"model": Rows(), "data": read_only()},
    "tensors": lambda: {"model": Rows(), "data": tensors()},
    "a pair of arrays": lambda: {
        "model": Rows(),
        "data": arrays(50),
        "partition": Partition(scheme="by_domain", clients_per_domain=2),
    },
    "a table": lambda: {"model": Rows(), "data": table(), "columns": COLUMNS},
    "a Dataset of datasets": lambda: {
        "model": Rows(),
        "data": dataset(),
        "columns": {"input": "x", "target": "y"},
    },
    "Datasets of torch": lambda: {"model": Rows(), "data": {"ann": Examples(20), "bob": Examples(15)}},
    "a task": lambda: {"model": Rows(), "data": clients(), "task": own_task()},
    "a method": lambda: {"model": Rows(), "data": clients(), "method": (Half(factor=0.5), Plain)},
    "a class of a method": lambda: {"model": Rows(), "data": clients(), "method": Annotated},
    "LoRA": lambda: {"model": Rows(), "data": clients(), "tuning": LoRA(rank=2, targets=["one"])},
}
QUICK = ("a network", "a function that gives one network", "arrays that cannot be written", "a table", "LoRA")


def made(name: str) -> tuple[Experiment, dict]:
    torch.manual_seed(0)
    given = {"train": dict(TRAIN), "evaluation": {"every": 1}, **GIVEN[name]()}
    return Experiment(rounds=1, seed=1, cluster="inline", **{"method": "fedavg", **given}), given


def calls(experiment: Experiment, given: dict, path, whole: bool):
    """Every public call of an experiment and of its run, one after the other, with its name."""
    yield "config", experiment.config()
    run = experiment.run(quiet=True)
    yield "run", run
    yield "repr", (repr(experiment), repr(run))
    yield "model", run.model()
    with torch.no_grad():
        for each in run.model().parameters():  # what a user does with the result is the user's own
            each.fill_(7.0)
    yield "a changed model", None
    if isinstance(given.get("tuning"), LoRA):
        yield "merged", run.model(merged=True)
        yield "adapter", run.adapter(path / "adapter")
    for client in run.clients.index:
        yield "personal", run.personal(client)
    for value in run.params.values():
        value.fill_(7.0)
    yield "params", (run.history, run.metrics, run.measured, run.plot())
    again = experiment.run(quiet=True)
    assert again.sha256 == run.sha256
    yield "a second run", None
    assert [row.loss for row in experiment] == again.history["loss"].tolist()
    yield "iteration", None
    if not whole:
        return
    yield "report", again.report(path / "report.html")
    assert experiment.run(path / "run", quiet=True).sha256 == run.sha256
    yield "a run in a folder", None
    changed = experiment.changed(**{"train.lr": 0.1})
    yield "changed", changed
    compared = rayfed.compare({"one": experiment, "other": changed}, seeds=[1], quiet=True)
    assert compared.runs["one"][0].sha256 == run.sha256
    yield "compare", (compared.results, compared.table())
    sweep = rayfed.sweep(experiment, {"train.lr": [0.05, 0.1]}, trials=2)
    assert run.sha256 in {each.sha256 for each in sweep.finished.values()}
    yield "sweep", (sweep.trials, sweep.results, sweep.table())


def check(name: str, path, whole: bool) -> None:
    experiment, given = made(name)
    if name == "a class of a method":
        experiment.config()
    before, streams = look(given), random_streams()
    for call, _ in calls(experiment, given, path, whole):
        assert look(given) == before, call
        assert random_streams() == streams, call


@pytest.mark.parametrize("name", QUICK)
def test_no_call_changes_an_object_of_a_user(name, tmp_path):
    check(name, tmp_path, whole=False)


@pytest.mark.slow
@pytest.mark.steady
@pytest.mark.parametrize("name", GIVEN)
def test_neither_does_any_of_all_calls(name, tmp_path):
    check(name, tmp_path, whole=True)


@pytest.mark.parametrize("name", ["a value", "a flag", "a key", "a mode", "a note", "a hook", "a stream"])
def test_each_change_is_seen(name):
    given = {"model": Rows(), "data": clients(), "table": table(), "of": torch.Generator()}
    before = look(given)
    assert look(given) == before
    changes = {
        "a value": lambda: given["data"]["ann"]["train"][0].__setitem__((0, 0), 7.0),
        "a flag": lambda: given["model"].one.weight.requires_grad_(False),
        "a key": lambda: given["data"].setdefault("eve", None),
        "a mode": lambda: given["model"].norm.eval(),
        "a note": lambda: given["model"].notes.append(1.0),
        "a hook": lambda: given["model"].out.register_forward_hook(lambda *_: None),
        "a stream": lambda: torch.rand((), generator=given["of"]),
    }
    changes[name]()
    assert look(given) != before
