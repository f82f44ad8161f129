"""FedIT, FFA-LoRA, FLoRA, FedEx-LoRA, FlexLoRA, FedSA-LoRA and Fed-SB: exactness, and what they reduce to."""

import pytest
import torch

from algorithms.fed_sb import METHOD as FED_SB
from algorithms.fedex_lora import METHOD as FEDEX
from algorithms.fedit import METHOD as FEDIT
from algorithms.ffa_lora import METHOD as FFA
from algorithms.flexlora import METHOD as FLEX
from algorithms.flora import METHOD as FLORA
from rayfed.config.schema import load_config, with_method
from rayfed.types import ServerState, Update
from tests import rounding
from tests.conftest import refused

SHARES = [0.2, 0.3, 0.5]
D_OUT, R, D_IN = 6, 4, 5


def draw(seed, **sizes):
    g = torch.Generator().manual_seed(seed)
    return {f"w.{name}": torch.randn(size, generator=g, dtype=torch.float64) for name, size in sizes.items()}


def clients(rank=(R, R, R), common=None):
    """Answers of three clients whose factors are zero beyond their ranks."""
    found = []
    for i, k in enumerate(rank):
        factors = draw(i, lora_A=(R, D_IN), lora_B=(D_OUT, R))
        factors["w.lora_A"][k:] = 0
        factors["w.lora_B"][:, k:] = 0
        found.append(Update(client=f"c{i}", params={**factors, **(common or {})}))
    return found


def mean_product(updates, *names):
    products = [torch.linalg.multi_dot([u.params[f"w.{n}"] for n in names]) for u in updates]
    return sum(w * p for w, p in zip(SHARES, products, strict=True))


def after(method, updates, **old):
    start = {**draw(9, lora_A=(R, D_IN), lora_B=(D_OUT, R)), **old}
    return method.server().average(ServerState(round=0, params=start), updates, SHARES).params


def near(one, other):
    """Three products with sums of at most 24, of numbers of at most 100, and a decomposition, in float64."""
    rounding.near(one, other, 200, 100.0, torch.float64)


def test_ffa_lora_the_mean_of_the_products_is_the_product_of_the_means():
    a = draw(7, lora_A=(R, D_IN))
    updates = clients(common=a)
    near(after(FFA, updates)["w.lora_B"] @ a["w.lora_A"], mean_product(updates, "lora_B", "lora_A"))


def test_fed_sb_the_mean_of_the_products_is_the_product_of_the_means():
    outer = draw(7, lora_A=(R, D_IN), lora_B=(D_OUT, R))
    updates = [
        Update(client=u.client, params={**outer, **draw(i, lora_C=(R, R))}) for i, u in enumerate(clients())
    ]
    core = after(FED_SB, updates)["w.lora_C"]
    product = outer["w.lora_B"] @ core @ outer["w.lora_A"]
    near(product, mean_product(updates, "lora_B", "lora_C", "lora_A"))


@pytest.mark.parametrize("method", [FLORA, FEDEX], ids=["flora", "fedex_lora"])
@pytest.mark.parametrize("rank", [(R, R, R), (1, 4, 2)], ids=["equal_ranks", "unequal_ranks"])
def test_product_and_residual_are_the_mean_of_the_products(method, rank):
    """Whatever the residual was before; FLoRA begins anew with B = 0, FedEx-LoRA with the mean factors."""
    updates, old = clients(rank), draw(8, lora_R=(D_OUT, D_IN))
    new = after(method, updates, **old)
    exact = mean_product(updates, "lora_B", "lora_A") + old["w.lora_R"]
    near(new["w.lora_B"] @ new["w.lora_A"] + new["w.lora_R"], exact)
    assert bool(new["w.lora_B"].any()) == (method is FEDEX)


def test_fedit_is_not_exact():
    updates = clients()
    new = after(FEDIT, updates)
    gap = new["w.lora_B"] @ new["w.lora_A"] - mean_product(updates, "lora_B", "lora_A")
    assert gap.norm() > 1


def test_flexlora_gives_each_rank_the_best_approximation_of_the_mean_of_the_products():
    """By the theorem of Eckart and Young the error is the rest of the singular values."""
    updates = clients((1, 4, 2))
    new, product = after(FLEX, updates), mean_product(updates, "lora_B", "lora_A")
    values = torch.linalg.svdvals(product)
    for k in range(1, R + 1):
        error = (new["w.lora_B"][:, :k] @ new["w.lora_A"][:k] - product).norm()
        near(error, values[k:].norm())


@pytest.mark.slow
@pytest.mark.steady
def test_presets_are_fedavg_with_their_settings(short):
    once = "rounds=2"
    assert short("fedit", once).sha256 == short("fedavg", once).sha256
    assert short("ffa_lora", once).sha256 == short("fedavg", once, "tuning.freeze_a=true").sha256
    assert short("flexlora", once).sha256 == short("fedavg", once, "server.lora_agg=product_svd").sha256
    exact = short("fedavg", once, "tuning.residual=true", "server.lora_agg=residual")
    assert short("fedex_lora", once).sha256 == exact.sha256
    assert short("fed_sb", once).sha256 == short("fedavg", once, "tuning.core=true").sha256


def test_flora_without_merging_is_fedit(short):
    run, plain = short("flora", "rounds=2", "server.lora_agg=factor_mean"), short("fedit", "rounds=2").params
    assert all(torch.equal(run.params[name], value) for name, value in plain.items())


def test_fedsa_lora_sends_a_and_not_b(short):
    run, plain = short("fedsa_lora", "rounds=2"), short("fedit", "rounds=2")
    own = {name for name in plain.params if name.endswith(".lora_B")}
    assert set(plain.params) - set(run.params) == own
    size = 5 * 4 * sum(plain.params[name].numel() for name in own)
    for way in ("bytes_up", "bytes_down"):
        assert run.history[way].tolist() == [b - size for b in plain.history[way]]
    assert short("fedsa_lora", "rounds=2", "local.stays=[]").sha256 == plain.sha256


def test_fed_sb_sends_the_core_only(short):
    run = short("fed_sb", "rounds=1")
    cores = {name: value for name, value in run.params.items() if name.endswith(".lora_C")}
    assert set(run.params) - set(cores) == {"head.weight", "head.bias"}
    assert {tuple(value.shape) for value in cores.values()} == {(8, 8)}
    assert all(value.any() for value in cores.values())


def test_a_method_brings_its_options_and_takes_them_along_in_a_comparison():
    config = load_config(["compare=[ffa_lora,fedit,fedex_lora,fedsa_lora,fed_sb]"])
    brought = {"freeze_a", "residual", "core"}
    tunings = {n: with_method(config, n).tuning for n in (config.algorithm, *config.compare)}
    found = {n: {k for k in brought if t[k]} for n, t in tunings.items()}
    own = {"ffa_lora": {"freeze_a"}, "fedex_lora": {"residual"}, "fed_sb": {"core"}}
    assert found == {"fedit": set(), "fedsa_lora": set(), **own}


@pytest.mark.parametrize("name", ["fedit", "ffa_lora", "flora", "hetlora"])
def test_another_tuning_is_refused(name):
    from rayfed.config.schema import compatible_parts
    from rayfed.errors import ConfigError

    with pytest.raises(ConfigError, match="needs tuning=lora"):
        compatible_parts(load_config([f"algorithm={name}", "tuning=head"]))
    assert "tuning.freez_a" in refused(f"algorithm={name}", "tuning.freez_a=true")


@pytest.mark.parametrize("name", ["lora_fair", "hetlora", "fednova"])
def test_a_rule_without_effect_is_refused(name):
    message = refused(f"algorithm={name}", "server.lora_agg=product_svd")
    assert message.startswith("server.lora_agg: 'product_svd' has no effect")
