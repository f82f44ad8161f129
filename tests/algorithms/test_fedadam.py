"""FedAdam against an independent computation, its reduction to FedAvg, its state and BatchNorm."""

import numpy as np
import pytest
import torch

from algorithms.fedadam import FedAdam
from rayfed import Cohort, ServerState, Update
from tests import rounding
from tests.algorithms.batch_norm import WITH_BATCH_NORM, statistics

RULE = FedAdam(lr=0.5, beta1=0.9, beta2=0.99, tau=0.1)


def cohort(*ids):
    return Cohort(round=0, ids=ids, clients={}, seed=0, rounds=3, depth=0, capacity={}, executor=None)


def update(client, num_examples, **params):
    tensors = {name: torch.tensor(value, dtype=torch.float64) for name, value in params.items()}
    return Update(client=client, params=tensors, num_examples=num_examples)


def state(**params):
    return ServerState(round=0, params=update("", 0, **params).params)


def test_the_first_step_by_hand():
    """The mean of 2 and 4 (three times) is 3.5, delta is 2.5, m = 0.25, v = 0.99 * 0.01 + 0.01 * 6.25."""
    answers = [update("a", 1, w=[2.0]), update("b", 3, w=[4.0])]
    after = RULE.aggregate(state(w=[1.0]), cohort("a", "b"), answers)
    assert after.memory["step"]["m"]["w"].item() == pytest.approx(0.25)
    assert after.memory["step"]["v"]["w"].item() == pytest.approx(0.0724)
    assert after.params["w"].item() == pytest.approx(1 + 0.5 * 0.25 / (0.0724**0.5 + 0.1))


def test_three_rounds_against_numpy():
    rng = np.random.default_rng(0)
    x = rng.normal(size=4)
    now = state(w=x.tolist())
    m, v = np.zeros(4), np.full(4, 0.1**2)
    for _ in range(3):
        sent = rng.normal(size=4)
        now = RULE.aggregate(now, cohort("a"), [update("a", 1, w=sent.tolist())])
        delta = sent - x
        m = 0.9 * m + 0.1 * delta
        v = 0.99 * v + 0.01 * delta**2
        x = x + 0.5 * m / (np.sqrt(v) + 0.1)
        # Twelve operations a round; each later round enlarges an error at most 1 + lr / tau = 6 times.
        rounding.near(now.params["w"], x, 3 * 12, size=2 * 6**2, precision=torch.float64)


def test_statistics_stay_the_mean_and_names_that_nobody_sent_stay_as_they_were():
    start = {"norm.running_var": [1.0], "norm.weight": [1.0], "w": [1.0]}
    sent = update("a", 1, **{"norm.running_var": [0.25], "norm.weight": [0.25]})
    after = RULE.aggregate(state(**start), cohort("a"), [sent])
    assert after.params["norm.running_var"].item() == 0.25
    assert after.params["norm.weight"].item() != 0.25
    assert after.params["w"].item() == 1
    assert set(after.memory["step"]["v"]) == set(after.memory["step"]["m"]) == {"norm.weight"}


def test_without_decay_and_with_a_large_tau_it_is_fedavg(short, exact):
    plain = short("fedavg")
    found = short("fedadam", "server.beta1=0", "server.beta2=0", "server.tau=1e4", "server.lr=1e4")
    rounding.equally_near(plain.params, found.params, exact("fedavg").params)
    other = short("fedadam").params
    assert any((other[n] - v).norm() > rounding.SAME * v.norm() for n, v in plain.params.items())


def test_the_moments_count(short):
    assert short("fedadam").sha256 != short("fedadam", "server.beta1=0").sha256


@pytest.mark.slow
@pytest.mark.steady
def test_statistics_of_a_real_network_are_the_mean_of_the_clients(short):
    plain = statistics(short("fedavg", *WITH_BATCH_NORM, "rounds=1"))
    found = statistics(short("fedadam", *WITH_BATCH_NORM, "rounds=1"))
    assert plain
    assert all(torch.equal(found[name], value) for name, value in plain.items())
    assert all(torch.isfinite(v).all() for v in short("fedadam", *WITH_BATCH_NORM).params.values())
