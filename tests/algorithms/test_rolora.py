"""RoLoRA: which factor is trained and sent, exactness, and its reduction to FFA-LoRA."""

import torch

from algorithms.rolora import METHOD, at_rest
from rayfed.types import ServerState, Update
from tests.rounding import equally_near, near


def factors(run, letter):
    return {name: value for name, value in run.params.items() if name.endswith(f".lora_{letter}")}


def same(one, other):
    return all(torch.equal(value, other[name]) for name, value in one.items())


def test_b_is_trained_first_then_a():
    assert [at_rest(r)[-1] for r in range(4)] == ["A", "B", "A", "B"]


def test_each_round_changes_one_factor_and_sends_half(short):
    runs = [
        short("rolora", f"rounds={n}", "train.momentum=0.9", "train.weight_decay=0.01") for n in (1, 2, 3)
    ]
    assert same(factors(runs[0], "B"), factors(runs[1], "B"))
    assert not same(factors(runs[0], "A"), factors(runs[1], "A"))
    assert same(factors(runs[1], "A"), factors(runs[2], "A"))
    assert not same(factors(runs[1], "B"), factors(runs[2], "B"))
    sizes = {letter: 5 * 4 * sum(v.numel() for v in factors(runs[0], letter).values()) for letter in "AB"}
    rest = runs[2].history["bytes_up"].tolist()
    assert rest == [rest[0], rest[0] - sizes["B"] + sizes["A"], rest[0]]


def test_the_first_round_is_that_of_ffa_lora(short, exact):
    several_steps = ("rounds=1", "train.batch_size=4", "train.epochs=2", "train.lr=0.1")
    run, frozen = short("rolora", *several_steps), short("ffa_lora", *several_steps)
    # Gradients of A, which RoLoRA removes, change the rounding of others.
    found = {name: run.params[name] for name in frozen.params}
    equally_near(frozen.params, found, exact("ffa_lora", *several_steps).params)
    assert set(run.params) - set(frozen.params) == set(factors(run, "A"))


def test_the_mean_of_the_products_is_the_product_of_the_means():
    """Clients send one factor; the other one is that of the server."""
    g = torch.Generator().manual_seed(0)
    a = torch.randn(2, 5, generator=g, dtype=torch.float64)
    bs = [torch.randn(4, 2, generator=g, dtype=torch.float64) for _ in range(3)]
    shares = [0.2, 0.3, 0.5]
    answers = [Update(client=str(i), params={"w.lora_B": b}) for i, b in enumerate(bs)]
    start = ServerState(round=0, params={"w.lora_A": a, "w.lora_B": torch.zeros_like(bs[0])})
    after = METHOD.server().average(start, answers, shares).params
    mean = sum(w * b @ a for w, b in zip(shares, bs, strict=True))
    size = 2 * float(a.abs().max() * max(b.abs().max() for b in bs))  # a sum of two products
    near(after["w.lora_B"] @ after["w.lora_A"], mean, 2 + 3 + 3, size, torch.float64)
