"""What is known of the columns of results."""

import json

import pytest

from rayfed import columns, objective
from rayfed.columns import (
    ADAPTED,
    COLUMNS,
    DEPLOYED,
    MEAN,
    PERSONAL,
    SIGMA_TYPE,
    UNSEEN,
    WORST_DOMAIN,
    WORST_UNSEEN,
    better_values,
    column_of,
    is_result,
    level_words,
    metric_in,
    metric_of,
    scale_of,
)
from rayfed.objective import METRICS, OBJECTIVES, Metric, register_metric
from rayfed.terminal.table_formats import Column


@pytest.fixture
def own_metric(monkeypatch):
    """The error of a user's task, of which smaller values are better, and which is no share."""
    monkeypatch.setattr(columns, "METRICS", {**METRICS, "error": Metric(larger=False, percent=False)})
    return "error"


def test_the_metric_that_scores_hold():
    assert metric_of({"dice": 1, "loss": 2}) == "dice"
    assert metric_of({"val_accuracy": 1}, "val_") == "accuracy"
    assert metric_of({"loss": 2}) is None


def test_the_metric_of_a_column_is_named_by_whole_words(monkeypatch):
    names = ("accuracy", "mse", "u", "token_accuracy")
    monkeypatch.setattr(columns, "METRICS", dict.fromkeys(names, Metric()))
    found = {
        "val_accuracy": "accuracy",
        "worst_domain_mse": "mse",
        "token_accuracy_domain": "token_accuracy",
    }
    assert {column: metric_in(column) for column in found} == found
    assert [metric_in(column) for column in ("quality", "rmse", "accuracies")] == [None] * 3


def test_the_metrics_are_those_of_the_tasks():
    for task in OBJECTIVES.values():
        known = METRICS[task.metric]
        assert (known.larger, known.percent) == (task.larger, task.percent)
        assert known.pooled == (task.metric in task.over_set)


def test_of_a_metric_of_a_user_the_last_description_counts(monkeypatch):
    monkeypatch.setattr(objective, "METRICS", {"accuracy": Metric()})
    register_metric({"metric": "accuracy"})  # of a file that was damaged
    register_metric({"metric": "error", "larger": True, "percent": True})
    register_metric({"metric": "error", "larger": False, "percent": False})
    assert {"accuracy": Metric(), "error": Metric(larger=False, percent=False)} == objective.METRICS


def test_every_column_of_a_run_is_described(gallery_row):
    assert {name for name in gallery_row if column_of(name) is None} == set()


@pytest.fixture
def gallery_row(gallery, small):
    """The columns of a run with personal models, validation, clients that never train, and virtual time."""
    overrides = (
        *("algorithm=ditto", "evaluation.personal=true", "data.val=0.2", "evaluation.validation=true"),
        *("data.unseen_clients=1", "data.partition.clients_per_domain=2", "data.limit=60", "rounds=1"),
        *("faults.seconds_per_example=0.01", "evaluation.local_steps=1"),
    )
    run = gallery.get(overrides, lambda path: small(*overrides, f"output={path}"))
    return json.loads((run.path / "rounds.jsonl").read_text().splitlines()[-1])


def test_columns_have_names_for_the_models_and_clients_that_they_are_of():
    assert WORST_DOMAIN.name("dice", PERSONAL) == "personal_worst_domain_dice"
    assert SIGMA_TYPE.name("dice") == "sigma_type"
    assert column_of("personal_worst_domain_dice") is WORST_DOMAIN
    assert column_of("unseen_worst_accuracy") is WORST_UNSEEN
    assert column_of(MEAN.name("accuracy", ADAPTED)) is column_of(MEAN.name("accuracy", UNSEEN)) is MEAN
    assert column_of("gap_variance") is column_of("personal_beta") is None
    names = [column.name("accuracy", of) for column in COLUMNS for of in (DEPLOYED, PERSONAL)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("name", "better"),
    [
        ("accuracy", "larger"),
        ("worst_domain_mae", "smaller"),
        ("sigma_type", "smaller"),
        ("personal_sigma_client", "smaller"),
        ("val_loss", "smaller"),
        ("bytes_up", "smaller"),
        ("mcc", "larger"),
        ("gap_ga_population_variance", "smaller"),  # of a method
        ("beta", None),
    ],
)
def test_better_values_follow_from_names(name, better):
    assert better_values(name) == better


def test_columns_of_a_metric_of_a_user_are_described_by_what_it_said(own_metric):
    assert metric_of({own_metric: 0.5}) == own_metric
    assert column_of("worst_domain_error") is WORST_DOMAIN
    assert better_values("worst_domain_error") == "smaller"
    assert (scale_of("worst_domain_error"), scale_of("worst_domain_accuracy")) == (1.0, 100.0)


def test_totals_are_sums_over_the_rounds_that_have_a_value():
    assert columns.BYTES_UP.total([{"bytes_up": 3}, {}, {"bytes_up": None}, {"bytes_up": 4}]) == 7


def test_durations_are_no_results():
    assert [is_result(name) for name in ("accuracy", "virtual_time", "seconds", "seconds_idle")] == [
        *(True, True),
        *(False, False),
    ]


def test_words_say_over_what_a_score_is():
    assert (level_words("accuracy"), level_words("auc")) == ("mean over clients", "over all examples")


def test_kinds_are_those_that_tables_can_show():
    assert all(Column(column.words, column.kind).show(0.5) for column in COLUMNS)
