import pytest
import torch
from torch import nn
from torch.nn import functional as F

from rayfed import Task
from rayfed.engine.tried_loss import check_functions, check_outputs, kinds_of
from rayfed.errors import ConfigError
from rayfed.objective import OwnObjective

X = torch.randn(16, 3, generator=torch.Generator().manual_seed(0))
CLASSES = torch.arange(16) % 3
WEIGHTS = torch.tensor([1.0, 2.0, 3.0])
NUMBERS = torch.linspace(-1, 2, 16)


class Moving(nn.Module):
    """A loss that remembers how often it was called."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, output, y):
        self.calls += 1
        return F.cross_entropy(output, y)


def kinds(loss, output=X, y=CLASSES, targets=CLASSES, **metrics):
    return kinds_of(OwnObjective(Task(loss=loss, metrics={"m": loss, **metrics})), output, y, targets)


def first(of):
    return lambda output, y: of(output[:, 0], y)


KINDS = {
    "rows": (nn.CrossEntropyLoss(reduction="none"), CLASSES, "row"),
    "several numbers for each row": (lambda o, y: (o - y[:, None]).square(), NUMBERS, "row"),
    "weights of rows": (nn.CrossEntropyLoss(weight=WEIGHTS, reduction="none"), CLASSES, "row"),
    "mean": (nn.CrossEntropyLoss(), CLASSES, "mean"),
    "smoothed": (nn.CrossEntropyLoss(label_smoothing=0.1), CLASSES, "mean"),
    "mean squared error": (first(nn.MSELoss()), NUMBERS, "mean"),
    "focal": (lambda o, y: (o.softmax(1)[range(len(y)), y] ** 2).mean(), CLASSES, "mean"),
    "shares": (lambda o, y: F.binary_cross_entropy(o[:, 0], (y > 0).float()), CLASSES, "mean"),
    "class weights": (nn.CrossEntropyLoss(weight=torch.tensor([0.1, 1.0, 9.0])), CLASSES, "set"),
    "ignored class": (nn.CrossEntropyLoss(ignore_index=2), CLASSES, "set"),
    "sum": (nn.CrossEntropyLoss(reduction="sum"), CLASSES, "set"),
    "root": (lambda o, y: first(F.mse_loss)(o, y).sqrt(), NUMBERS, "set"),
    "contrast": (lambda o, y: F.cross_entropy(o @ o.T, torch.arange(len(y))), CLASSES, "set"),
    "correlation": (lambda o, y: 1 - torch.corrcoef(torch.stack([o[:, 0], y]))[0, 1], NUMBERS, "set"),
    "standardised rows": (lambda o, y: (o[:, 0] - o[:, 0].mean()).square(), NUMBERS, "set"),
    "noise": (lambda o, y: F.cross_entropy(o + torch.rand_like(o), y), CLASSES, "set"),
    "median": (lambda o, y: (o[:, 0] - y).abs().median(), NUMBERS, "set"),
}  # fmt: skip


@pytest.mark.parametrize("zero", [False, True], ids=("outputs", "zero outputs"))
@pytest.mark.parametrize("name", KINDS)
def test_a_loss_is_known_by_what_it_computes(name, zero):
    loss, y, kind = KINDS[name]
    output = X.sigmoid() if name == "shares" else X
    output = torch.full_like(X, 0.5 if name == "shares" else 0.0) if zero else output
    found = kinds(loss, output, y, y)
    assert found["loss"] == (kind if name != "correlation" or not zero else found["loss"])
    assert found["loss"] in (kind, "set")


def test_a_class_that_only_other_examples_have_is_tried():
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 1.0, 9.0]))
    few = torch.zeros(16, dtype=torch.long)
    assert kinds(loss, y=few, targets=CLASSES)["loss"] == "set"


def test_metrics_are_tried_too_and_a_loss_with_a_state_keeps_it():
    loss = Moving()
    found = kinds(loss, centred=lambda o, y: o[:, 0] - o[:, 0].mean(), own=lambda o, y: o[:, 0])
    assert found == {"loss": "mean", "m": "mean", "centred": "set", "own": "row"}
    assert int(loss.calls) == 0


def test_what_needs_the_outputs_of_all_examples_is_refused_where_they_are_too_large():
    goal = OwnObjective(Task(loss=nn.CrossEntropyLoss(), over_set={"auc": lambda o, y: 0.5}))
    check_outputs(goal, torch.zeros(2, 10), 1000)
    with pytest.raises(ConfigError, match=r"task: auc, loss needs the outputs for all 100000 test examples"):
        check_outputs(goal, torch.zeros(2, 1000, 100), 100_000)


class Centres(nn.Module):
    """A loss with parameters of its own."""

    def __init__(self):
        super().__init__()
        self.centres = nn.Parameter(torch.zeros(3, 3))

    def forward(self, output, y):
        return F.cross_entropy(output, y) + (output - self.centres[y]).square().mean()


class Balance(nn.Module):
    """Class weights that move with the targets, in training only."""

    def __init__(self):
        super().__init__()
        self.register_buffer("weight", torch.ones(3))

    def forward(self, output, y):
        if output.requires_grad:
            self.weight.mul_(0.9).add_(0.1 * F.one_hot(y, 3).float().mean(0))
        return F.cross_entropy(output, y, self.weight)


def counting():
    calls = []

    def loss(output, y):
        calls.append(1)
        return F.cross_entropy(output, y) * len(calls)

    return loss


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (Centres(), "task.loss has parameters of its own, which no optimizer"),
        (Balance(), "task.loss returns something else when it is called again"),
        (counting(), "task.loss returns something else when it is called again"),
    ],
    ids=("parameters", "moving weights", "variables of a function"),
)
def test_a_loss_that_holds_more_than_it_says_is_refused(loss, words):
    with pytest.raises(ConfigError, match=words):
        check_functions(Task(loss=loss, metrics={"m": lambda o, y: o[:, 0]}), X, CLASSES, CLASSES)
    plain = Task(loss=F.cross_entropy, metrics={"m": lambda o, y: o[:, 0]})
    assert check_functions(plain, X, CLASSES, CLASSES) == frozenset()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (lambda o, y: None, r"the metric 's' returned None; return one number"),
        (lambda o, y: o.mean(0), r"the metric 's' returned tensor\(.*return one number"),
        (lambda o, y: 1 / 0, r"the metric 's' failed for .* ZeroDivisionError"),
    ],
)
def test_a_metric_over_a_set_that_returns_no_number_is_refused_before_the_run(value, words):
    with pytest.raises(ConfigError, match=words):
        check_functions(Task(loss=F.cross_entropy, over_set={"s": value}), X, CLASSES, CLASSES)


def test_functions_that_write_into_what_they_get_change_nothing_for_the_next():
    def loss(output, y):
        y[y == 2] = 0
        return F.cross_entropy(output, y, reduction="none")

    task = Task(
        loss=loss,
        metrics={"share": lambda o, y: o.exp_()[:, 0], "twos": lambda o, y: y == 2},
        over_set={"mean": lambda o, y: float(o.sigmoid_().mean()), "same": lambda o, y: float(o.mean())},
    )
    writes = check_functions(task, X, CLASSES, CLASSES)
    assert writes == {"loss", "share", "mean"}
    for goal in (
        OwnObjective(task),
        OwnObjective(task).with_known(kinds_of(OwnObjective(task), X, CLASSES, CLASSES), writes),
    ):
        output, y = X.clone(), CLASSES.clone()
        goal.loss(output, y)
        found = goal.check(output, y)
        assert [float(of(output, y)) for of in goal.over_set.values()] == [
            float(X.sigmoid().mean()),
            float(X.mean()),
        ]
        assert torch.equal(found["twos"], (CLASSES == 2).float())
        assert torch.equal(output, X)
        assert torch.equal(y, CLASSES)
