import numpy as np
import pytest
import torch

from rayfed.errors import ConfigError
from rayfed.federation.aggregation import mean_by_name, product_mean, refactor, stack
from rayfed.federation.server import Server
from rayfed.types import ServerState, Update
from tests.rounding import limit, near
from tests.vectors import vector

V7 = vector("fedra", "V7")
B = torch.tensor(V7.inputs["B"], dtype=torch.float64)  # one column per client
A = torch.tensor(V7.inputs["A"], dtype=torch.float64)
WEIGHTS = V7.inputs["weights"]
FACTORS = [(B[i, :, None], A[i, None]) for i in range(2)]
NAMES = "blocks.0.attn.proj.lora_A", "blocks.0.attn.proj.lora_B"


def updates():
    return [
        Update(client=str(i), params=dict(zip(NAMES, (a, b), strict=True)))
        for i, (b, a) in enumerate(FACTORS)
    ]


def close(value, expected):
    """Two products of two numbers of at most 3 and a decomposition of two columns, in float64."""
    near(np.ravel(value), np.ravel(expected), 50, 9.0, torch.float64)


@pytest.mark.parametrize("case", ["equal", "weights_25_75"])
def test_v7_factors_against_products(case):
    weights = WEIGHTS[case]
    expected = V7.expected[case]
    averaged = mean_by_name(updates(), weights)
    product = averaged[NAMES[1]] @ averaged[NAMES[0]]
    V7.matches(product, expected["Bbar_Abar"])
    b, a = stack(FACTORS, weights)
    V7.matches(b @ a, expected["mean_BA"])
    V7.matches(torch.linalg.norm(b @ a - product), expected["gap_fro"])
    V7.matches(torch.linalg.svdvals(b @ a)[:2], expected["singular_values"])
    best = product_mean(updates(), weights, updates()[0].params)
    V7.matches(torch.linalg.norm(best[NAMES[1]] @ best[NAMES[0]] - b @ a), expected["svd_rank1_error_fro"])
    close(torch.linalg.norm(best[NAMES[0]], dim=1), [1.0])


def test_v7_the_best_product_of_rank_one():
    best = product_mean(updates(), WEIGHTS["equal"], updates()[0].params)
    V7.matches(best[NAMES[1]] @ best[NAMES[0]], V7.expected["equal"]["svd_rank1"])


def test_v7_stack():
    b, a = stack(FACTORS, WEIGHTS["weights_25_75"])
    V7.matches(b, V7.expected["weights_25_75"]["stacked"]["B"])
    V7.matches(a, V7.expected["weights_25_75"]["stacked"]["A"])


def test_v7_the_additivity_the_paper_claims_does_not_hold():
    expected = V7.expected["paper_identity_x_1_1"]
    x = torch.ones(2, 1, dtype=torch.float64)
    b = B.mean(0)[:, None]
    a = A.mean(0)[None]
    V7.matches(sum(f @ (g @ x) for f, g in FACTORS).flatten(), expected["B1A1x_plus_B2A2x"])
    V7.matches((2 * b @ (a @ x)).flatten(), expected["two_Bbar_Abar_x"])


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
    near(b @ a, one @ old, 3 + 3)


@pytest.mark.parametrize("seed", range(8))
def test_the_factors_depend_on_the_product_only_and_not_on_the_signs_of_singular_vectors(seed):
    """Rounding decides these signs, so that a kept momentum would belong to another row otherwise."""
    g = torch.Generator().manual_seed(seed)
    a, b, old, square = (
        torch.randn(size, generator=g, dtype=torch.float64) for size in ((6, 9), (7, 6), (3, 9), (6, 6))
    )
    turn = torch.linalg.qr(square).Q
    new_b, new_a = refactor(b, a, old)
    assert (new_a.gather(1, new_a.abs().argmax(1, keepdim=True)) > 0).all()
    best = torch.linalg.svd(b @ a)
    # Sums of at most 9 in three products and two decompositions. An error e of a matrix turns its singular
    # vectors by at most e over the distance of their values (Davis and Kahan).
    most, gap = float(best.S[0]), float(-best.S[:4].diff().max())
    rounded = {"roundings": 9 * 10, "precision": torch.float64}
    near(new_b @ new_a, best.U[:, :3] * best.S[:3] @ best.Vh[:3], size=most * most / gap, **rounded)
    for other in (refactor(b @ turn, turn.T @ a, old), refactor(-b, -a, old)):
        near(other[0], new_b, size=most * most / gap, **rounded)
        near(other[1], new_a, size=most / gap, **rounded)


def test_equal_factors_stay_the_same_product():
    g = torch.Generator().manual_seed(1)
    b = torch.randn(5, 2, generator=g)
    a = torch.randn(2, 4, generator=g)
    same = [Update(client=c, params={NAMES[0]: a, NAMES[1]: b}) for c in "xy"]
    state = ServerState(round=0, params={NAMES[0]: a, NAMES[1]: b})
    after = Server(lora_agg="product_svd").average(state, same, [0.3, 0.7]).params
    near(after[NAMES[1]] @ after[NAMES[0]], b @ a, 2 + 6, size=float(b.norm() * a.norm()))


def test_only_holders_count_and_what_nobody_holds_is_left_out():
    other = Update(client="z", params={"head.weight": torch.ones(1)})
    assert product_mean([other], [1.0], {}) == {}
    alone = product_mean([*updates(), other], [1.0, 0.0, 1.0], updates()[0].params)
    close(alone[NAMES[1]] @ alone[NAMES[0]], FACTORS[0][0] @ FACTORS[0][1])


EXACT_SIZES = {"w.lora_A": (2, 4), "w.lora_B": (5, 2), "w.lora_R": (5, 4)}


def random_factors(seed, names=("w.lora_A", "w.lora_B")):
    g = torch.Generator().manual_seed(seed)
    return {name: torch.randn(EXACT_SIZES[name], generator=g) for name in names}


@pytest.mark.parametrize("rule", ["residual", "stack_merge"])
def test_with_a_residual_the_mean_of_the_products_is_exact(rule):
    """B A + R after the round is the weighted mean of every client's B_i A_i + R, whatever R was before."""
    old = random_factors(0, tuple(EXACT_SIZES))
    updates = [Update(client=f"c{i}", params=random_factors(i + 1)) for i in range(3)]
    weights = [0.2, 0.3, 0.5]
    after = Server(lora_agg=rule).average(ServerState(round=0, params=old), updates, weights).params
    expected = sum(
        w * (u.params["w.lora_B"] @ u.params["w.lora_A"] + old["w.lora_R"])
        for u, w in zip(updates, weights, strict=True)
    )
    # Products of rank 2, three clients, and R in and out.
    near(after["w.lora_B"] @ after["w.lora_A"] + after["w.lora_R"], expected, 2 + 2 * 3 + 4)
    if rule == "stack_merge":
        assert not after["w.lora_B"].any()
        assert torch.equal(after["w.lora_A"], old["w.lora_A"])
    else:
        plain = Server().average(ServerState(round=0, params=old), updates, weights).params
        assert torch.equal(after["w.lora_B"], plain["w.lora_B"])


def test_a_layer_without_holders_keeps_its_residual():
    old = random_factors(0, tuple(EXACT_SIZES))
    after = Server(lora_agg="residual").average(ServerState(round=0, params=old), [Update(client="c")], [1.0])
    assert all(torch.equal(after.params[name], old[name]) for name in old)


@pytest.mark.slow
@pytest.mark.steady
def test_a_run_with_residuals_sends_them_down_only_and_leaves_frozen_weights_alone(small):
    steps = "train.epochs=3"
    plain = small(steps)
    run = small(steps, "tuning.residual=true", "server.lora_agg=residual")
    residuals = {n: v for n, v in run.params.items() if n.endswith(".lora_R")}
    assert len(residuals) == 8  # two layers in each of four blocks
    assert all(v.any() for v in residuals.values())
    dense = sum(v.numel() * 4 for v in residuals.values())
    assert run.history["bytes_up"].tolist() == plain.history["bytes_up"].tolist()
    assert run.history["bytes_down"].tolist() == [b + 5 * dense for b in plain.history["bytes_down"]]
    assert run.sha256 == small(steps, "tuning.residual=true", "server.lora_agg=residual").sha256
    # In the first round nothing is in R yet: what clients send is what they send without it.
    one = small(steps, "rounds=1", "tuning.residual=true")
    assert torch.equal(one.params["head.weight"], small(steps, "rounds=1").params["head.weight"])


def test_one_client_has_nothing_to_put_into_a_residual(small):
    alone = ("data.domains=[plain]", "train.epochs=3", "rounds=1")
    run = small(*alone, "tuning.residual=true", "server.lora_agg=residual")
    layers = [name.removesuffix(".lora_R") for name in run.params if name.endswith(".lora_R")]
    assert layers
    for layer in layers:
        b, a, rest = (run.params[f"{layer}.lora_{part}"] for part in "BAR")
        assert rest.abs().max() <= limit(a.shape[0] + 2, float((b.abs() @ a.abs()).max()))


def test_an_exact_rule_without_a_residual_is_refused(small):
    with pytest.raises(ConfigError, match=r"tuning\.residual=true"):
        small("server.lora_agg=stack_merge")


@pytest.mark.slow
@pytest.mark.steady
@pytest.mark.ray
def test_residuals_are_the_same_on_actors(cache, pool_of_two):
    from rayfed.config.schema import load_config
    from rayfed.engine.loop import run_rounds
    from rayfed.executors.inline import InlineExecutor
    from rayfed.experiment.plan import prepared
    from rayfed.federation.params import digest
    from tests.conftest import SMALL

    exact = (
        "tuning.residual=true",
        "server.lora_agg=stack_merge",
        "algorithm=fedra",
        "capacity=2",
        "train.epochs=2",
    )
    setup = prepared(load_config([*SMALL, f"data.cache={cache}", *exact]))
    alone = InlineExecutor(setup.context, setup.weights)
    before = alone.worker.checksum()
    here = list(run_rounds(setup.experiment, alone, setup.start))[-1].state.params
    there = list(run_rounds(setup.experiment, pool_of_two(setup), setup.start))[-1].state.params
    assert digest(here) == digest(there)
    assert alone.worker.checksum() == before
