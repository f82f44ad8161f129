"""Losses and scores of the three tasks."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import rayfed
from rayfed.columns import BEGINNINGS, COLUMNS, check_metrics, is_larger_better
from rayfed.errors import ConfigError
from rayfed.executors import worker
from rayfed.models.backbone import samples_of
from rayfed.objective import (
    EMPTY,
    OBJECTIVES,
    Classification,
    Objective,
    OwnObjective,
    Segmentation,
    Task,
    dice,
    objective,
    pearson,
    spearman,
)
from tests.rounding import limit, near
from tests.vectors import vector

V12 = vector("fedclip_fftgp", "V12")
ONE = torch.tensor([[V12.inputs["truth"]]])


def maps(n=3, size=8, classes=2):
    rng = torch.Generator().manual_seed(0)
    output = torch.randn(n, classes, size, size, generator=rng)
    return output, torch.randint(classes, (n, size, size), generator=rng)


@pytest.mark.parametrize("task", ["classification", "next_character"])
def test_one_class_for_each_example_is_cross_entropy_and_accuracy(task):
    output, y = torch.tensor([[2.0, 0.0], [0.0, 1.0], [3.0, 0.0]]), torch.tensor([0, 0, 0])
    found = objective(task).scores(output, y)
    assert found["accuracy"] == 2
    assert found["loss"] == F.cross_entropy(output, y, reduction="sum").item()
    assert torch.equal(objective(task).loss(output, y), F.cross_entropy(output, y))


def test_dice_as_in_the_specification():
    predicted = torch.tensor([V12.inputs["predicted"]]).float()
    output = torch.stack([1 - predicted, predicted])[None]
    found = Segmentation().scores(output, ONE)
    V12.matches(found["dice"], V12.expected["dice"])
    V12.matches(found["dice_mean2"], V12.expected["dice_mean"])


def test_dice_of_nothing_is_nothing():
    assert dice(torch.zeros(1, 2, 4), torch.zeros(1, 2, 4)).tolist() == [[0, 0]]


def test_scores_of_slices_do_not_depend_on_the_batch():
    output, y = maps()
    whole = Segmentation().scores(output, y)
    single = [Segmentation().scores(output[i : i + 1], y[i : i + 1]) for i in range(3)]
    for name, value in whole.items():
        near(sum(one[name] for one in single), value, y.numel() + 10)  # a sum over all pixels
    near(Segmentation().loss(output, y), whole["loss"] / 3, y.numel() + 10)


def test_loss_of_slices_is_half_cross_entropy_and_half_soft_dice():
    output, y = maps(n=1)
    soft, hard = output.softmax(1)[0].flatten(1), torch.stack([y == 0, y == 1])[:, 0].float().flatten(1)
    overlap = (2 * (soft * hard).sum(1) / (soft.sum(1) + hard.sum(1) + 1e-5)).mean()
    expected = (F.cross_entropy(output, y) + 1 - overlap) / 2
    near(Segmentation().loss(output, y), expected, y.numel() + 10, size=1.0)
    certain = 20.0 * torch.stack([1 - y, y], dim=1)
    wrong = math.exp(-20)  # probability of the other class in each pixel
    rest = (2 * y.numel() * wrong + EMPTY) / 2 + limit(y.numel() + 10)
    assert 0 <= float(Segmentation().loss(certain, y)) <= rest


def test_layouts_say_what_an_example_is():
    wanted = {"classification": 16 * 16 * 3, "segmentation": 16 * 16 * 4, "next_character": 16}
    wanted |= dict.fromkeys(("text_classification", "language_modeling"), 16 * 4)
    assert {task: OBJECTIVES[task].layout(16).itemsize for task in wanted} == wanted
    x = worker.symbols(np.array([[1, 79]], dtype=np.uint8))
    assert x.dtype == torch.int64
    assert x.tolist() == [[1, 79]]


def test_a_task_that_does_not_exist_is_refused():
    with pytest.raises(ConfigError, match=r"'segmentatoin' does not exist; did you mean 'segmentation'"):
        objective("segmentatoin")


def test_pixels_are_samples_of_maps():
    features = torch.arange(2 * 3 * 16 * 16.0).view(2, 3, 16, 16)
    rows = samples_of(features)
    assert rows.shape == (2 * 2 * 2, 3)
    assert torch.equal(rows[1], features[0, :, 0, 8])
    flat = torch.rand(4, 5)
    assert samples_of(flat) is flat


def test_correlations_are_those_of_scipy():
    from scipy import stats

    rng = torch.Generator().manual_seed(0)
    y = torch.randint(0, 6, (50,), generator=rng).float()  # with equal values
    output = y[:, None] + torch.randn(50, 1, generator=rng)
    near(pearson(output, y), stats.pearsonr(output[:, 0].double(), y.double()).statistic, 300, 1.0)
    near(spearman(output, y), stats.spearmanr(output[:, 0].double(), y.double()).statistic, 300, 1.0)
    assert pearson(torch.ones(3, 1), torch.arange(3.0)) != pearson(torch.ones(3, 1), torch.arange(3.0))  # NaN


def test_a_number_of_a_text_has_a_squared_error():
    goal = objective("text_regression")
    output, y = torch.tensor([[1.0], [3.0]]), torch.tensor([1.0, 1.0])
    assert goal.loss(output, y) == 2
    assert goal.values(output, y)["loss"].tolist() == [0, 4]


@pytest.mark.parametrize(
    ("task", "shape", "y"),
    [
        ("classification", (4, 3), torch.tensor([0, 2, 1, 1])),
        (
            "segmentation",
            (4, 3, 2, 2),
            torch.randint(0, 3, (4, 2, 2), generator=torch.Generator().manual_seed(0)),
        ),
        ("regression", (4, 2), torch.arange(8.0).view(4, 2)),
        ("multilabel", (4, 2), torch.tensor([[0, 1], [1, 1], [0, 0], [1, 0]])),
        ("text_regression", (4, 1), torch.arange(4.0)),
    ],
)
def test_the_loss_of_a_batch_is_the_mean_over_its_examples(task, shape, y):
    goal = objective(task)
    output = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    assert goal.by_example
    assert goal.losses(output, y).shape == (4,)
    near(goal.losses(output, y).mean(), goal.loss(output, y), 12, 10.0)
    for one in range(4):
        near(goal.losses(output, y)[one], goal.loss(output[one : one + 1], y[one : one + 1]), 12, 10.0)


@pytest.mark.parametrize(
    ("task", "shape", "y"),
    [
        ("classification", (6, 3), torch.tensor([0, 1, 2, 2, 1, 0])),
        ("regression", (6, 2), torch.arange(12.0).view(6, 2)),
        (
            "language_modeling",
            (6, 3, 4),
            torch.tensor([[0, 1, 2], [-100, -100, 3], [-100] * 3, [1, -100, 2], [0, 0, 0], [-100] * 3]),
        ),
    ],
)
def test_losses_of_clients_are_those_of_their_rows(task, shape, y):
    goal = objective(task)
    output = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    shares = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]])  # the last row has no answer
    first, second = goal.losses_of_clients(output, y, shares)
    near(first, goal.loss(output[:2], y[:2]), 12, 10.0)
    near(second, goal.loss(output[5:], y[5:]), 12, 10.0)


def test_losses_that_are_means_over_something_else_are_not_joined():
    assert not objective("language_modeling").by_example  # over the tokens of answers
    own = OwnObjective(Task(loss=lambda output, y: (output - y).mean(), metrics={"a": None}))
    assert not own.by_example
    assert not own.joins


def test_only_tasks_with_one_class_for_each_example_are_classification():
    with pytest.raises(TypeError, match="abstract"):
        Objective()
    found = {name for name, each in OBJECTIVES.items() if isinstance(each, Classification)}
    assert found == {"classification", "next_character", "text_classification", "language_modeling"}


def test_a_metric_has_a_name_that_no_other_column_of_results_has():
    written = {column.pattern for column in COLUMNS if "{}" not in column.pattern}
    free = {"perplexity", "macro_f1", "mcc"}  # which no task of a user has besides
    for name in sorted(written - free) + [f"{begin}a" for begin in BEGINNINGS]:
        with pytest.raises(ConfigError, match=r"task\.metrics: .* of another column"):
            check_metrics(Task(loss=torch.sub, metrics={name: torch.sub}))
    for name in ("", " ", "two\nlines", 3):
        with pytest.raises(ConfigError, match="is no text that can be printed"):
            check_metrics(Task(loss=torch.sub, metrics={name: torch.sub}))
    with pytest.raises(ConfigError, match="'m' is there twice"):
        check_metrics(Task(loss=torch.sub, metrics={"m": torch.sub}, over_set={"m": torch.dist}))
    with pytest.raises(ConfigError, match="'val_m' is, or begins as"):
        rayfed.Experiment(task=Task(loss=torch.sub, metrics={"val_m": torch.sub})).config()
    check_metrics(
        Task(loss=torch.sub, metrics={"accuracy": torch.sub, "worst_group": torch.sub, "mcc": torch.sub})
    )


def test_the_direction_of_a_metric_is_that_of_its_last_task():
    for smaller in ((), ("points",), ()):
        OwnObjective(Task(loss=torch.sub, metrics={"points": torch.sub}, smaller=smaller))
        assert is_larger_better("points") == (not smaller)
    OwnObjective(Task(loss=torch.sub, metrics={"mae": torch.sub}))
    assert not is_larger_better("mae")  # as every reader expects
