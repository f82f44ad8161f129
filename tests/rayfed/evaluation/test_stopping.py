"""The rule that ends a run early, and the best round, from rows alone."""

from math import nan

import pytest

from rayfed.errors import ConfigError
from rayfed.evaluation.stopping import BestRound, StopConfig, Stopping


def rows(*values, name="val_accuracy"):
    """Rows of rounds; None: the round was not scored."""
    scored = ({} if v == "unscored" else {name: v, "loss": 1.0, "clients_scored": 2} for v in values)
    return [{"round": number, "virtual_time": 10.0 * number, **one} for number, one in enumerate(scored, 1)]


def end(rule, seen):
    """The number of the round after which a rule ends a run, looking at its rows one by one."""
    whole = Stopping(rule)
    for row in seen:
        whole.add(row)
    for cut in range(len(seen)):  # a run that was continued after any round ends after the same one
        again = Stopping(rule, seen[:cut])
        for row in seen[cut:]:
            again.add(row)
        assert (again.round, again.reason) == (whole.round, whole.reason)
    return whole.round


@pytest.mark.parametrize(
    ("rule", "values", "ends"),
    [
        ({"patience": 2}, [0.1, 0.3, 0.2, 0.3], 4),  # equal is no better
        ({"patience": 2}, [0.1, 0.3, 0.2, 0.31, 0.3, 0.29], 6),
        ({"patience": 1}, [0.1, 0.2, 0.3], 0),
        ({"patience": 2}, [0.3, "unscored", 0.1, "unscored", 0.2, 0.1], 5),  # of scored rounds
        ({"patience": 2}, [0.3, None, float("nan"), 0.9], 3),
        ({"patience": 2}, [None, None, 0.9], 2),
        ({"patience": 2, "min_delta": 0.05}, [0.30, 0.34, 0.34, 0.9], 3),
        ({"patience": 2, "min_delta": 0.05}, [0.30, 0.34, 0.36, 0.36], 0),  # compared with the best
        ({"target": 0.5}, [0.1, 0.4999, 0.5, 0.6], 3),
        ({"target": 0.5, "patience": 1}, [0.1, 0.1, 0.6], 2),
        ({"virtual_seconds": 25}, [0.1, 0.2, 0.3, 0.4], 3),
        ({"virtual_seconds": 30}, [0.1, 0.2, 0.3, 0.4], 3),
    ],
)
def test_it_ends_after_the_first_round_that_meets_it(rule, values, ends):
    assert end(StopConfig(**rule), rows(*values)) == ends


def test_smaller_losses_are_better():
    loss = rows(2.0, 1.5, 1.6, 1.5, 0.9, name="val_loss")
    assert end(StopConfig(metric="val_loss", patience=2), loss) == 4
    assert end(StopConfig(metric="val_loss", target=1.5), loss) == 2
    assert BestRound("val_loss", rows=loss).round == 5


def test_the_reason_says_what_was_seen():
    rule = Stopping(StopConfig(patience=2), rows(0.25, 0.5, 0.5, 0.25))
    assert rule.reason == (
        "val_accuracy has its best value, 50%, in round 2, with 2 scored rounds after it (stop.patience)"
    )
    assert Stopping(StopConfig(target=0.5), rows(0.6)).reason == "val_accuracy is 60% (stop.target)"
    loss = Stopping(StopConfig(metric="val_loss", target=0.5), rows(0.25, name="val_loss"))
    assert loss.reason == "val_loss is 0.25 (stop.target)"
    assert "not finite in 2 scored rounds" in Stopping(StopConfig(patience=2), rows(None, nan)).reason
    assert "30 of 25 virtual seconds" in Stopping(StopConfig(virtual_seconds=25), rows(0, 0, 0)).reason


def test_a_scored_round_without_the_metric_is_an_error():
    rule = StopConfig(metric="acuracy", target=0.5)
    with pytest.raises(
        ConfigError, match=r"stop\.metric: 'acuracy' does not exist; did you mean 'accuracy'\?"
    ):
        Stopping(rule, rows(0.5, name="accuracy"))


@pytest.mark.parametrize(("ties", "best"), [("first", 2), ("last", 4)])
def test_the_best_round_is_the_first_or_last_of_equal_ones(ties, best):
    seen = rows(0.1, 0.5, None, 0.5, 0.4)
    found = BestRound("auto", ties)
    assert [found.add(row) for row in seen] == [True, True, False, ties == "last", False]
    assert found.round == best
    assert BestRound("auto", ties, seen).round == best
    assert BestRound("val_accuracy", ties, rows(None, float("inf"))).round == 0
