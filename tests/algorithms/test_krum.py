"""Median, trimmed mean and Krum by hand, their reductions to FedAvg, and one wrong answer."""

import pytest

from algorithms.krum import KrumServer, scores
from algorithms.median import MedianServer
from algorithms.trimmed_mean import TrimmedMeanServer
from rayfed import Server
from rayfed.errors import ConfigError
from rayfed.testing import small_setup
from tests.algorithms.test_fedadam import cohort, state, update
from tests.rounding import near


def after(rule, *values, **others):
    names = [chr(97 + i) for i in range(len(values))]
    answers = [update(name, 1 + i, w=[v]) for i, (name, v) in enumerate(zip(names, values, strict=True))]
    return rule.aggregate(state(w=[0.0], other=[7.0]), cohort(*names), answers, **others).params


@pytest.mark.parametrize(
    ("rule", "values", "expected"),
    [
        (MedianServer(), (5, 1, 100), 5),
        (MedianServer(), (5, 1, 100, 3), 4),
        (TrimmedMeanServer(beta=0.25), (5, 1, 100, 3), 4),
        (TrimmedMeanServer(beta=0.2), (1, 2, 3, 4, 1000), 3),
        (TrimmedMeanServer(beta=0.1), (1, 2, 6), 3),
        # distances to the 5 - 1 - 2 = 2 nearest: 1 + 4, 1 + 1, 1 + 4, 9 + 16 of 6 and more of 100
        (KrumServer(byzantine=1), (1, 2, 3, 6, 100), 2),
        (KrumServer(byzantine=1, selected=2), (1, 2, 3, 6, 100), 1.5),
        (KrumServer(byzantine=1, selected=4), (1, 2, 3, 6, 100), 3),
    ],
)
def test_by_hand_and_without_the_weight_of_data(rule, values, expected):
    found = after(rule, *map(float, values))
    assert found["w"].item() == pytest.approx(expected)
    assert found["other"].item() == 7.0


def test_scores_of_krum():
    answers = [update(c, 1, w=[v]) for c, v in zip("abcde", (1.0, 2.0, 3.0, 6.0, 100.0), strict=True)]
    assert scores(answers, 1) == pytest.approx([5, 2, 5, 25, 94**2 + 97**2])


def test_of_two_answers_the_median_is_the_mean_and_a_mean_trimmed_to_the_middle_is_the_median():
    two, five = (1.0, 4.0), (5.0, 1.0, 100.0, 3.0, -7.0)
    assert after(MedianServer(), *two)["w"] == after(Server(weighting="uniform"), *two)["w"]
    assert after(TrimmedMeanServer(beta=0.4), *five)["w"] == after(MedianServer(), *five)["w"] == 3


@pytest.mark.parametrize("rule", [TrimmedMeanServer(beta=0.0), KrumServer(selected=4)])
def test_without_leaving_anything_out_they_are_the_unweighted_mean(rule):
    plain = after(Server(weighting="uniform"), 1.0, 2.0, 4.0, 9.0)
    near(after(rule, 1.0, 2.0, 4.0, 9.0)["w"], plain["w"], 4 + 4, 9.0)


def test_with_few_answers_krum_says_how_many_wrong_ones_it_tolerates():
    few = cohort("a", "b", "c")
    KrumServer(byzantine=3).aggregate(state(w=[0.0]), few, [update(c, 1, w=[1.0]) for c in "abc"])
    assert few.ledger.metrics == {"tolerated": 0.0}
    KrumServer().aggregate(state(w=[0.0]), five := cohort(*"abcde"), [update(c, 1, w=[1.0]) for c in "abcde"])
    assert five.ledger.metrics == {"tolerated": 1.0}


@pytest.mark.parametrize(
    ("byzantine", "clients", "allowed"), [(5, 5, "0..1 or auto"), (2, 6, "0..1 or auto"), (1, 4, "0 or auto")]
)
def test_more_wrong_answers_than_the_clients_of_a_round_allow_are_refused(byzantine, clients, allowed):
    with pytest.raises(ConfigError, match=rf"^server.byzantine: {byzantine} .* {clients}; .*={allowed}$"):
        KrumServer(byzantine=byzantine).check(clients)
    KrumServer(byzantine=byzantine).check(2 * byzantine + 3)
    KrumServer().check(1)


@pytest.mark.parametrize(("drawn", "there"), [("clients_per_round=6", 6), ("sampling=one_per_domain", 5)])
def test_an_experiment_with_too_few_clients_in_a_round_is_refused(drawn, there, cache):
    """Ten clients of five domains, of whom fewer are drawn; the rule replaces that of another method."""
    two = (
        "algorithm=fedprox",
        "server.name=krum",
        "server.byzantine=2",
        "data.partition.clients_per_domain=2",
    )
    with pytest.raises(ConfigError, match=f"rounds of 7 clients .* there are {there};"):
        small_setup(*two, drawn, f"data.cache={cache}")
