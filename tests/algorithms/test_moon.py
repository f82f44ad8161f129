"""MOON's contrastive loss by hand, and its reductions to FedAvg."""

import math
from types import SimpleNamespace

import pytest
import torch

from algorithms.moon import PREVIOUS, Moon, contrast
from rayfed import Broadcast


def test_the_contrastive_loss_by_hand():
    """Similarities 1 and 0 at temperature 0.5: log(1 + e^-2); 0.6 and 0.8: log(1 + e^0.4)."""
    z, received, previous = (torch.tensor([v]) for v in ([3.0, 4.0], [3.0, 4.0], [4.0, -3.0]))
    assert contrast(z, received, previous, 0.5).item() == pytest.approx(math.log1p(math.exp(-2)))
    both = contrast(z, torch.tensor([[2.0, 0.0]]), torch.tensor([[0.0, 5.0]]), 0.5).item()
    assert both == pytest.approx(math.log1p(math.exp(0.4)))


def test_the_loss_of_a_batch_by_hand():
    """The task has 2; features are those of the received model and at a right angle to the earlier one's."""
    features = {"received": torch.tensor([[3.0, 4.0]]), "earlier": torch.tensor([[4.0, -3.0]])}
    measured = {}
    client = SimpleNamespace(
        store={PREVIOUS: "earlier"},
        model=SimpleNamespace(features=lambda x: x, classify=lambda z: z),
        objective=SimpleNamespace(loss=lambda output, y: torch.tensor(2.0)),
        reference=lambda params, x, headless: features[params],
        measure=lambda **values: measured.update(values),
    )
    loss = Moon(mu=3.0, tau=0.5).loss(
        client, Broadcast(round=1, params="received"), (features["received"], None)
    )
    assert loss.item() == pytest.approx(2 + 3 * math.log1p(math.exp(-2)))
    assert measured["contrastive_loss"].item() == pytest.approx(math.log1p(math.exp(-2)))


def test_without_mu_and_in_the_first_round_it_is_fedavg_and_later_it_is_not(short):
    plain = short("fedavg", "rounds=2")
    assert short("moon", "rounds=2", "local.mu=0").sha256 == plain.sha256
    assert short("moon", "rounds=1").sha256 == short("fedavg", "rounds=1").sha256
    run = short("moon", "rounds=2")
    assert run.sha256 != plain.sha256
    assert run.sha256 != short("moon", "rounds=2", "local.tau=5").sha256


def test_clients_that_hold_other_blocks_in_each_round(short):
    run = short("moon", "server.name=fedra", "capacity=1", "model.options={depth: 2}")
    assert all(torch.isfinite(value).all() for value in run.params.values())
