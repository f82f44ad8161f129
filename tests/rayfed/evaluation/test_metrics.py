"""Scores that are no means over examples."""

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score, matthews_corrcoef

import rayfed
from rayfed.evaluation.metrics import of_classes
from rayfed.objective import TextClassification


def test_scores_of_classes_are_those_of_scikit_learn():
    random = torch.Generator().manual_seed(3)
    logits = torch.randn(60, 5, generator=random)
    truth = torch.randint(4, (60,), generator=random)  # the fifth class has no example
    found = of_classes(TextClassification().by_class(logits, truth).numpy())
    predicted = logits.argmax(1)
    assert found["macro_f1"] == pytest.approx(f1_score(truth, predicted, average="macro"))
    assert found["mcc"] == pytest.approx(matthews_corrcoef(truth, predicted))


def share(output, y):
    return (output.argmax(1) == y).float()


def margin(output, y):
    return output[range(len(y)), y]


@pytest.mark.parametrize("names", [("margin", "accuracy"), ("accuracy", "margin"), ("margin", "mae")])
def test_the_first_metric_is_that_of_the_run_whatever_the_others_are_called(names, tmp_path):
    """Also where another task of the process had the second one as its first."""
    random = np.random.default_rng(0)
    data = {k: (random.normal(size=(20, 4)), random.integers(0, 3, 20)) for k in "ab"}
    functions = dict(zip(names, (margin, share), strict=True))
    given = {"model": torch.nn.Linear(4, 3), "data": data, "rounds": 1, "cluster": "inline"}
    for metrics in (dict([*functions.items()][1:]), functions):
        task = rayfed.Task(loss=torch.nn.CrossEntropyLoss(), metrics=metrics)
        run = rayfed.Experiment(method="fedavg", task=task, **given).run(
            tmp_path / str(len(metrics)), quiet=True
        )
        assert run.recorded.metric == next(iter(metrics))
        assert {*metrics} <= {*run.metrics} & {*run.clients.columns}
        assert [name for name in metrics if f"worst_client_{name}" in run.metrics] == [*metrics][:1]
    for name in names:
        assert run.metrics[name] == pytest.approx(run.clients[name].mean())
