import numpy as np
import pytest
import torch

from rayfed.lora_mean import ROW_NORM, product_mean, refactor, stack
from rayfed.params import mean_by_name
from rayfed.server import Server
from rayfed.types import ServerState, Update

B = torch.tensor([[1.0, 0, 2], [0, 1, 1]], dtype=torch.float64)  # one column per client
A = torch.tensor([[1.0, 2], [3, -1]], dtype=torch.float64)
FACTORS = [(B[i, :, None], A[i, None]) for i in range(2)]
NAMES = "blocks.0.attn.proj.lora_A", "blocks.0.attn.proj.lora_B"


def updates():
    return [
        Update(client=str(i), params=dict(zip(NAMES, (a, b), strict=True)))
        for i, (b, a) in enumerate(FACTORS)
    ]


def close(value, expected):
    assert np.asarray(value).ravel().tolist() == pytest.approx(np.ravel(expected).tolist(), abs=2e-6)


@pytest.mark.parametrize(
    ("weights", "of_means", "mean", "gap", "singular", "error"),
    [
        (
            [1, 1],
            [[1, 0.25], [1, 0.25], [3, 0.75]],
            [[0.5, 1], [1.5, -0.5], [2.5, 1.5]],
            1.561249,
            [3.240370, 1.322876],
            1.322876,
        ),
        (
            [0.25, 0.75],
            [[0.625, -0.0625], [1.875, -0.1875], [3.125, -0.3125]],
            [[0.25, 0.5], [2.25, -0.75], [2.75, 0.25]],
            1.170937,
            [3.570989, 0.900298],
            0.900298,
        ),
    ],
)
def test_factors_against_products(weights, of_means, mean, gap, singular, error):
    averaged = mean_by_name(updates(), weights)
    product = averaged[NAMES[1]] @ averaged[NAMES[0]]
    close(product, of_means)
    b, a = stack(FACTORS, weights)
    close(b @ a, mean)
    close(torch.linalg.norm(b @ a - product), gap)
    close(torch.linalg.svdvals(b @ a), singular)
    best = product_mean(updates(), weights, updates()[0].params)
    close(torch.linalg.norm(best[NAMES[1]] @ best[NAMES[0]] - b @ a), error)
    close(torch.linalg.norm(best[NAMES[0]], dim=1), [ROW_NORM])


def test_the_best_product_of_rank_one():
    best = product_mean(updates(), [1, 1], updates()[0].params)
    close(best[NAMES[1]] @ best[NAMES[0]], [[0.8, 0.4], [1.0, 0.5], [2.6, 1.3]])


def test_stack():
    b, a = stack(FACTORS, [0.25, 0.75])
    close(b, [[1, 0], [0, 1], [2, 1]])
    close(a, [[0.25, 0.5], [2.25, -0.75]])


def test_the_additivity_the_paper_claims_does_not_hold():
    x = torch.ones(2, 1, dtype=torch.float64)
    b, a = B.mean(0)[:, None], A.mean(0)[None]
    close(sum(f @ (g @ x) for f, g in FACTORS), [3, 2, 8])
    close(2 * b @ (a @ x), [2.5, 2.5, 7.5])


def test_components_of_size_zero_keep_their_row_and_a_zero_column():
    old = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    b, a = refactor(torch.zeros(5, 6), torch.randn(6, 4), old)
    assert torch.equal(a, old)
    assert not b.any()
    one = torch.zeros(5, 3)
    one[0, 0] = 2.0
    b, a = refactor(one, old, old)
    assert torch.equal(a[1:], old[1:])
    assert not b[:, 1:].any()
    assert torch.allclose(b @ a, one @ old, atol=1e-6)


def test_equal_factors_stay_the_same_product():
    g = torch.Generator().manual_seed(1)
    b, a = torch.randn(5, 2, generator=g), torch.randn(2, 4, generator=g)
    same = [Update(client=c, params={NAMES[0]: a, NAMES[1]: b}) for c in "xy"]
    state = ServerState(round=0, params={NAMES[0]: a, NAMES[1]: b})
    after = Server(lora_agg="product_svd").average(state, same, [0.3, 0.7]).params
    assert torch.allclose(after[NAMES[1]] @ after[NAMES[0]], b @ a, atol=1e-5)


def test_only_holders_count_and_what_nobody_holds_is_left_out():
    other = Update(client="z", params={"head.weight": torch.ones(1)})
    assert product_mean([other], [1.0], {}) == {}
    alone = product_mean([*updates(), other], [1.0, 0.0, 1.0], updates()[0].params)
    close(alone[NAMES[1]] @ alone[NAMES[0]], FACTORS[0][0] @ FACTORS[0][1])
