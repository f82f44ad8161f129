"""FedYogi and FedAdagrad against independent computations, and their reduction to FedAvg."""

import numpy as np
import pytest
import torch

from algorithms.fedadagrad import FedAdagrad
from algorithms.fedadam import FedAdam
from algorithms.fedavgm import FedAvgM
from algorithms.fedit import FedIT
from algorithms.fedyogi import FedYogi
from rayfed.federation.local import Local
from rayfed.federation.noise_and_compression import Channel
from rayfed.federation.privacy_accountant import check_private
from rayfed.federation.train_config import TrainConfig
from tests import rounding
from tests.algorithms.test_fedadam import cohort, state, update
from tests.conftest import quickly

SENT = np.array([[0.4, -0.2], [0.1, 0.3], [2.0, 0.2]])


def yogi(v, square):
    return v - 0.01 * square * np.sign(v - square)


def adagrad(v, square):
    return v + square


@pytest.mark.parametrize(
    ("rule", "second", "beta1"),
    [
        (FedYogi(lr=0.5, beta1=0.9, beta2=0.99, tau=0.1), yogi, 0.9),
        (FedAdagrad(lr=0.5, tau=0.1), adagrad, 0.0),
    ],
    ids=["fedyogi", "fedadagrad"],
)
def test_three_rounds_against_numpy(rule, second, beta1):
    now, x = state(w=[0.0, 0.5]), np.array([0.0, 0.5])
    m, v = np.zeros(2), np.full(2, 0.1**2)
    for sent in SENT:
        now = rule.aggregate(now, cohort("a"), [update("a", 1, w=sent.tolist())])
        m = beta1 * m + (1 - beta1) * (sent - x)
        v = second(v, (sent - x) ** 2)
        x = x + 0.5 * m / (np.sqrt(v) + 0.1)
        # Twelve operations a round; each later round enlarges an error at most 1 + lr / tau = 6 times.
        rounding.near(now.params["w"], x, 3 * 12, size=2 * 6**2, precision=torch.float64)


def test_yogi_s_second_moment_grows_and_shrinks_by_hand():
    """v = 0.01 and squares 1 and 0.0004: 0.01 + 0.01 * 1 = 0.02, then 0.02 - 0.01 * 0.0004 = 0.019996."""
    rule = FedYogi(tau=0.1)
    v = rule.second_moment(state(v=[0.01]).params["v"], state(v=[1.0]).params["v"])
    assert v.item() == pytest.approx(0.02)
    assert rule.second_moment(v, state(v=[0.0004]).params["v"]).item() == pytest.approx(0.019996)


@pytest.mark.parametrize("rule", [FedAdam, FedYogi, FedAdagrad, FedAvgM, FedIT])
def test_the_rule_uses_the_mean_only_so_that_noise_protects_the_answers(rule):
    check_private(
        rule(weighting="uniform"), Local(), Channel(clip=1.0, noise=1.0), "poisson", False, TrainConfig()
    )


@pytest.mark.parametrize("name", quickly(["fedyogi", "fedadagrad"], []))
def test_with_a_large_tau_it_is_fedavg(short, exact, name):
    """v stays tau^2, so that the step is lr / (2 tau) times the difference."""
    run = short(name, "server.beta1=0", "server.tau=1e4", "server.lr=2e4")
    rounding.equally_near(short("fedavg").params, run.params, exact("fedavg").params)
