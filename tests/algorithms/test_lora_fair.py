"""LoRA-FAIR's correction against a search by NumPy and in closed form, and its reduction to FedIT."""

import numpy as np
import pytest
import torch

from algorithms.lora_fair import LoraFair, correct
from rayfed.types import ServerState, Update
from tests.rounding import limit


def objective(b, a, w, start, lam):
    """Eq. 8 for many B at once, shape (n, d_out, 1)."""
    product = b @ a
    cosine = (w * product).sum((1, 2)) / (np.linalg.norm(w) * np.linalg.norm(product, axis=(1, 2)))
    return 1 - cosine + lam * np.linalg.norm(b - start, axis=(1, 2))


@pytest.mark.parametrize("lam", [0.01, 0.2])
def test_no_point_of_a_fine_grid_is_better(lam):
    start, a = np.array([[1.0], [0.2]]), np.array([[0.5, -1.0, 2.0]])
    w = np.array([[1.0], [1.5]]) @ a + np.array([[0.1, 0.3, -0.2], [0.0, 0.2, 0.4]])
    found = correct(*(torch.tensor(x) for x in (start, a, w)), lam, 100).numpy()
    grid = np.linspace(-1.5, 1.5, 601)
    points = start + np.stack(np.meshgrid(grid, grid), -1).reshape(-1, 2, 1)
    with np.errstate(invalid="ignore"):
        best = np.nanmin(objective(points, a, w, start, lam))
    reached, begun = (objective(b[None], a, w, start, lam)[0] for b in (found, start))
    assert reached <= best + limit(6 * 5, 1.0, torch.float64)  # sums of six, and five operations
    assert reached < begun - (begun - best) / 2


def test_without_lambda_the_product_has_the_direction_of_the_projection():
    """The best factor of A is W A^T (A A^T)^-1; the correction may have any length."""
    g = torch.Generator().manual_seed(0)
    b, a, w = (torch.randn(s, generator=g, dtype=torch.float64) for s in ((5, 2), (2, 7), (5, 7)))
    found = correct(b, a, w, 0.0, 500)
    best = w @ a.T @ torch.linalg.inv(a @ a.T)

    def cosine(x):
        return float((x @ a * w).sum() / ((x @ a).norm() * w.norm()))

    # L-BFGS ends where the loss, 1 - cosine, no longer falls by 1e-9 of it: tolerance_grad 1e-7, squared.
    assert abs(cosine(found) - cosine(best)) <= limit(5 * 7 + 5, 1.0, torch.float64)
    assert cosine(b) < cosine(best) - 0.1


def test_the_correction_is_zero_where_the_slope_of_the_cosine_is_not_above_lambda():
    g = torch.Generator().manual_seed(0)
    b, a, w = (torch.randn(s, generator=g, dtype=torch.float64) for s in ((5, 2), (2, 7), (5, 7)))
    live = b.clone().requires_grad_()
    cosine = (live @ a * w).sum() / ((live @ a).norm() * w.norm())
    slope = float(torch.autograd.grad(cosine, live)[0].norm())
    assert torch.equal(correct(b, a, w, 1.001 * slope, 100), b)
    assert (correct(b, a, w, 0.999 * slope, 100) - b).norm() > 0.1


def test_a_product_of_zero_and_equal_factors_need_no_correction():
    b, a = torch.ones(3, 1), torch.ones(1, 2)
    assert torch.equal(correct(torch.zeros(3, 1), a, torch.zeros(3, 2).double(), 0.01, 10), torch.zeros(3, 1))
    same = Update(client="a", params={"w.lora_A": a, "w.lora_B": b})
    after = LoraFair().average(ServerState(round=0, params=same.params), [same, same], [0.5, 0.5])
    assert torch.equal(after.params["w.lora_B"], b)


@pytest.mark.slow
@pytest.mark.steady
def test_with_a_large_lambda_it_is_fedit(short):
    settings = ("train.epochs=3", "rounds=2")
    plain = short("fedit", *settings)
    assert short("lora_fair", "server.lam=100", *settings).sha256 == plain.sha256
    run = short("lora_fair", *settings)
    assert run.sha256 != plain.sha256
    assert run.sha256 != short("lora_fair", "server.lam=0", *settings).sha256
    assert all(torch.isfinite(value).all() for value in run.params.values())
