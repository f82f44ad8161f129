"""FedNova by hand and in closed form, and its reduction to FedAvg."""

import pytest
import torch

from algorithms.fednova import STEPS, NovaServer, effective_steps
from rayfed.federation.train_config import TrainConfig
from rayfed.types import ServerState, Update
from tests.rounding import equally_near


def answer(client, steps, **params):
    values = {name: torch.tensor([value], dtype=torch.float64) for name, value in params.items()}
    return Update(client=client, params=values, num_examples=1, extra={STEPS: steps})


def test_two_clients_by_hand():
    """x = 1, shares 1/4 and 3/4, answers 3 after 2 steps and 7 after 6: 1 + (0.5 + 4.5) (1/4 + 3/4) = 6."""
    start = ServerState(round=0, params={"w": torch.tensor([1.0], dtype=torch.float64)})
    after = NovaServer().average(start, [answer("a", 2.0, w=3.0), answer("b", 6.0, w=7.0)], [0.25, 0.75])
    assert after.params["w"].item() == pytest.approx(1 + 5 * (0.25 * 2 / 2 + 0.75 * 6 / 6))
    unlike = NovaServer().average(start, [answer("a", 2.0, w=3.0), answer("b", 6.0, w=1.6)], [0.25, 0.75])
    assert unlike.params["w"].item() == pytest.approx(1 + 5 * (0.25 * 1 + 0.75 * 0.1))


def test_statistics_are_the_mean_and_what_nobody_sent_stays():
    values = {"running_var": torch.tensor([1.0]), "w": torch.tensor([2.0])}
    after = NovaServer().average(
        ServerState(round=0, params=values), [answer("a", 4.0, running_var=0.25)], [1.0]
    )
    assert after.params["running_var"].item() == 0.25
    assert after.params["w"].item() == 2


@pytest.mark.parametrize(("rho", "steps"), [(0.0, 5), (0.9, 1), (0.9, 7), (0.5, 3)])
def test_effective_steps_are_those_of_the_closed_form(rho, steps):
    found = effective_steps(TrainConfig(momentum=rho), steps)
    assert found == pytest.approx((steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho))
    assert effective_steps(TrainConfig(optimizer="adam", momentum=rho), steps) == steps
    assert effective_steps(TrainConfig(), 0) == 1


def test_momentum_gives_a_constant_gradient_this_weight():
    p = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([p], lr=1.0, momentum=0.9)
    for _ in range(4):
        p.grad = torch.ones(1)
        optimizer.step()
    assert -p.item() == pytest.approx(effective_steps(TrainConfig(momentum=0.9), 4))


def test_with_equal_steps_it_is_fedavg(short, exact):
    same = ("train.local_steps=2", "rounds=2")
    plain = short("fedavg", *same).params
    equally_near(plain, short("fednova", *same).params, exact("fedavg", *same).params)
