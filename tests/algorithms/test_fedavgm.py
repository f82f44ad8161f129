"""FedAvgM by hand, its reduction to FedAvg, its state and BatchNorm."""

import pytest

from algorithms.fedavgm import FedAvgM
from tests import rounding
from tests.algorithms.test_fedadam import cohort, state, update


def test_two_rounds_by_hand():
    """x = 1: the mean 3.5 gives v = 2.5 and x = 1 + 0.4 * 2.5 = 2; then 3 gives v = 0.5 * 2.5 + 1 = 2.25."""
    rule = FedAvgM(lr=0.4, beta=0.5)
    now = rule.aggregate(state(w=[1.0]), cohort("a", "b"), [update("a", 1, w=[2.0]), update("b", 3, w=[4.0])])
    assert now.params["w"].item() == pytest.approx(2)
    now = rule.aggregate(now, cohort("a"), [update("a", 1, w=[3.0])])
    assert now.memory["step"]["v"]["w"].item() == pytest.approx(2.25)
    assert now.params["w"].item() == pytest.approx(2 + 0.4 * 2.25)


def test_statistics_stay_the_mean():
    rule = FedAvgM()
    now = rule.aggregate(state(running_var=[1.0]), cohort("a"), [update("a", 1, running_var=[0.25])])
    assert now.params["running_var"].item() == 0.25
    assert now.memory == {}


def test_without_momentum_it_is_fedavg_and_with_it_it_is_not(short, exact):
    plain = short("fedavg").params
    rounding.equally_near(plain, short("fedavgm", "server.beta=0").params, exact("fedavg").params)
    other = short("fedavgm").params
    assert any((other[n] - v).norm() > rounding.SAME * v.norm() for n, v in plain.items())
