"""FedRot-LoRA: the rotation against a search over angles, the product it keeps, and what it reduces to."""

import math

import numpy as np
import pytest
import torch

from algorithms.fedrot_lora import Rotating, aligned, nearest_rotation
from rayfed.errors import ConfigError
from rayfed.testing import small_setup
from rayfed.types import ServerState, Update
from tests.rounding import limit, near

NAMES = A, B = "w.lora_A", "w.lora_B"


def draw(seed, rank=2):
    g = torch.Generator().manual_seed(seed)
    sizes = {A: (rank, 5), B: (4, rank)}
    return {name: torch.randn(size, generator=g, dtype=torch.float64) for name, size in sizes.items()}


def angle(degrees):
    c, s = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return np.array([[c, -s], [s, c]])


MIRRORS = (np.eye(2), np.diag([1.0, -1.0]))


@pytest.mark.parametrize("measure", ["lora_A", "lora_B"])
def test_no_angle_of_a_fine_grid_is_nearer_and_the_product_is_kept(measure):
    trained, received = draw(0), draw(3)
    turned = aligned(trained, received, measure, 1.0, None)
    near(turned[B] @ turned[A], trained[B] @ trained[A], 12, 20.0, torch.float64)

    def far(factors):
        own, other = (each[f"w.{measure}"] for each in (factors, received))
        return float(np.linalg.norm(np.asarray(own) - np.asarray(other)))

    def at(degrees):
        r = angle(degrees)
        return far({A: r.T @ trained[A].numpy(), B: trained[B].numpy() @ r})

    best = min(map(at, np.arange(0, 360, 0.1)))
    assert far(turned) <= best + limit(30, 4.0, torch.float64)
    assert far(turned) < far(trained) - 0.1


def test_the_strength_turns_by_a_part_of_the_angle():
    """The received A is the trained one, turned by 80 degrees; halfway between I and R is half the angle."""
    trained = draw(0)
    received = {A: torch.tensor(angle(80).T) @ trained[A], B: trained[B]}
    for lam, degrees in ((1.0, 80), (0.5, 40), (0.0, 0)):
        turned = aligned(trained, received, "lora_A", lam, None)
        near(turned[A], torch.tensor(angle(degrees).T) @ trained[A], 40, 4.0, torch.float64)


def test_the_determinant_is_one_and_what_is_open_stays():
    reflection = torch.diag(torch.tensor([3.0, 1.0, -2.0]).double())
    assert nearest_rotation(reflection).tolist() == [[1, 0, 0], [0, -1, 0], [0, 0, -1]]
    assert torch.equal(nearest_rotation(torch.zeros(3, 3).double()), torch.eye(3).double())
    x, y = (torch.nn.functional.normalize(row, dim=0) for row in draw(2, rank=4)[A][:2, :4])
    k = torch.outer(x, y) - torch.outer(y, x)  # the smallest rotation from y to x, in their plane
    smallest = torch.eye(4).double() + k + k @ k / (1 + x @ y)
    near(nearest_rotation(3 * torch.outer(x, y)), smallest, 100, 1.0, torch.float64)


@pytest.mark.parametrize("seed", range(6))
def test_the_hard_rotation_may_reflect_and_is_the_nearest_of_all_orthogonal_matrices(seed):
    trained, received = draw(seed), draw(seed + 50)
    turned = aligned(trained, received, "lora_A", 1.0, None, reflect=True)
    near(turned[B] @ turned[A], trained[B] @ trained[A], 12, 20.0, torch.float64)
    every = [angle(degrees) @ mirror for degrees in np.arange(0, 360, 0.1) for mirror in MIRRORS]
    best = min(np.linalg.norm(r.T @ trained[A].numpy() - received[A].numpy()) for r in every)
    found = float((turned[A] - received[A]).norm())
    assert found <= best + limit(30, 4.0, torch.float64)
    assert found <= float((aligned(trained, received, "lora_A", 1.0, None)[A] - received[A]).norm()) + 1e-12


def test_a_reflection_needs_the_whole_turn():
    reflection = torch.diag(torch.tensor([3.0, 1.0, -2.0]).double())
    assert nearest_rotation(reflection, reflect=True).tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, -1]]
    with pytest.raises(ConfigError, match=r"server.reflect: true cannot be used with server.lam=0.5"):
        Rotating(lam=0.5, reflect=True)
    trained, received = draw(1), draw(4)
    update = [Update(client="a", params=trained, rank=None)]
    found = Rotating(reflect=True).average(ServerState(round=1, params=received), update, [1.0]).params
    assert torch.equal(found[A], aligned(trained, received, "lora_A", 1.0, None, reflect=True)[A])


def test_a_client_of_a_lower_rank_turns_what_it_holds():
    trained, received = draw(0, rank=3), draw(1, rank=3)
    trained[A][2:], trained[B][:, 2:] = 0, 0
    turned = aligned(trained, received, "lora_A", 1.0, 2)
    held = aligned(
        {A: trained[A][:2], B: trained[B][:, :2]}, {A: received[A][:2], B: received[B]}, "lora_A", 1.0, None
    )
    assert torch.equal(turned[A][:2], held[A])
    assert torch.equal(turned[B][:, :2], held[B])
    assert not turned[A][2:].any()
    assert not turned[B][:, 2:].any()


def test_a_round_turns_each_client_at_its_rank_and_measures_by_turns():
    """A in round 1, B in round 2, nothing in round 0; the product of one client stays what it was."""
    trained, received = draw(0, rank=3), draw(1, rank=3)
    trained[A][2:], trained[B][:, 2:] = 0, 0
    update = Update(client="a", params=trained, rank=2)
    for number, measure in ((0, None), (1, "lora_A"), (2, "lora_B")):
        found = Rotating().average(ServerState(round=number, params=received), [update], [1.0]).params
        expected = trained if measure is None else aligned(trained, received, measure, 1.0, 2)
        assert torch.equal(found[A], expected[A])
        assert torch.equal(found[B], expected[B])
        assert not found[A][2:].any()
        near(found[B] @ found[A], trained[B] @ trained[A], 20, 20.0, torch.float64)


def test_a_convolution_is_turned_along_its_rank():
    g = torch.Generator().manual_seed(0)
    kernel = torch.randn(2, 3, 2, 2, generator=g, dtype=torch.float64)
    last = torch.randn(4, 2, 1, 1, generator=g, dtype=torch.float64)
    flat = {A: kernel.flatten(1), B: last.flatten(1)}
    other = {A: kernel.flip(0), B: last}
    turned = aligned({A: kernel, B: last}, other, "lora_A", 1.0, None)
    expected = aligned(flat, {A: other[A].flatten(1), B: flat[B]}, "lora_A", 1.0, None)
    assert torch.equal(turned[A].flatten(1), expected[A])
    assert torch.equal(turned[B].flatten(1), expected[B])


@pytest.mark.slow
@pytest.mark.steady
def test_the_first_round_and_strength_0_are_fedit(short):
    plain = short("fedit", "rounds=2")
    assert short("fedrot_lora", "rounds=2", "server.lam=0").sha256 == plain.sha256
    assert short("fedrot_lora", "rounds=2").sha256 != plain.sha256


@pytest.mark.parametrize("option", ["tuning.freeze_a=true", "tuning.core=true"])
def test_an_adapter_with_one_trained_factor_is_refused(option):
    with pytest.raises(ConfigError, match="keeps A at its start value"):
        small_setup("algorithm=fedrot_lora", option)
