"""Metrics that are objects with `update`, `compute` and `reset`, as torchmetrics has them."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rayfed
from rayfed.errors import ConfigError
from rayfed.objective import MetricObject, Task
from tests.rounding import near


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, cache, no_figures):
    monkeypatch.setenv("RAYFED_CACHE", str(cache))


class Macro:
    """Mean of the recalls of the classes that a set has."""

    higher_is_better = True

    def __init__(self, classes=3):
        self.classes = classes
        self.reset()

    def reset(self):
        self.right, self.all = torch.zeros(self.classes), torch.zeros(self.classes)

    def update(self, outputs, targets):
        for label in range(self.classes):
            mine = targets == label
            self.right[label] += (outputs.argmax(1)[mine] == label).sum()
            self.all[label] += mine.sum()

    def compute(self):
        has = self.all > 0
        return (self.right[has] / self.all[has]).mean()


class Errors(Macro):
    higher_is_better = False

    def compute(self):
        return 1 - super().compute()


class ByClass(Macro):
    def compute(self):
        return self.right / self.all


def data():
    rng = np.random.default_rng(0)

    def part(number):
        x = rng.normal(0, 1, (number, 6)).astype(np.float32)
        return x, (x[:, 0] > 0).astype(int) + (x[:, 1] > 0)

    return {f"c{i}": {"train": part(24), "test": part(10 + 5 * i)} for i in range(3)}


def experiment(**metrics):
    torch.manual_seed(0)
    task = Task(loss=F.cross_entropy, metrics=metrics)
    own = {"model": nn.Linear(6, 3), "data": data(), "task": task, "rounds": 2, "cluster": "inline"}
    return rayfed.Experiment(**own, tuning="full", train={"batch_size": 8})


def test_the_value_of_a_set_is_that_of_the_object_and_of_this_set_alone():
    torch.manual_seed(0)
    of = MetricObject("m", Macro())
    for _ in range(2):
        outputs, targets = torch.randn(20, 3), torch.randint(0, 3, (20,))
        wanted = Macro()
        wanted.update(outputs, targets)
        assert of(outputs, targets) == float(wanted.compute())
    assert of.of.all.sum() == 0


def test_a_run_scores_with_it_over_the_examples_of_all_clients():
    run = experiment(macro=Macro()).run()
    first, again = run.metrics["macro"], experiment(macro=Macro()).run().metrics["macro"]
    assert first == again
    x, y = (np.concatenate(parts) for parts in zip(*(own["test"] for own in data().values()), strict=True))
    wanted = Macro()
    with torch.no_grad():
        wanted.update(run.model()(torch.from_numpy(x)), torch.from_numpy(y))
    near(first, float(wanted.compute()), 10)


def test_what_it_says_of_its_direction_counts_and_the_first_metric_is_the_headline():
    task = Task(loss=F.cross_entropy, metrics={"wrong": Errors(), "mine": lambda o, y: (o[:, 0] - y) ** 2})
    assert (task.first, task.smaller, list(task.metrics), list(task.over_set)) == (
        "wrong",
        ("wrong",),
        ["mine"],
        ["wrong"],
    )
    assert Task(loss=F.cross_entropy, metrics={"macro": Macro()}).smaller == ()


def test_settings_of_a_metric_are_a_part_of_the_experiment():
    names = {experiment(macro=metric).config().task for metric in (Macro(3), Macro(4), Errors(3), Macro(3))}
    assert len(names) == 3


def test_a_metric_with_a_number_for_each_class_is_refused():
    with pytest.raises(
        ConfigError, match=r"task.metrics\['each'\]: compute\(\) returned .* no single number"
    ):
        experiment(each=ByClass()).run()


def test_metrics_of_torchmetrics():
    torchmetrics = pytest.importorskip("torchmetrics", reason="torchmetrics is not installed")
    run = experiment(f1=torchmetrics.F1Score("multiclass", num_classes=3, average="macro")).run()
    assert 0 < run.metrics["f1"] <= 100
