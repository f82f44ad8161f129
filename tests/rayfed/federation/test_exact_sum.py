"""Sums without rounding against rational arithmetic, in any order and any partition."""

import random
from fractions import Fraction
from math import inf, nan

import pytest
import torch

from rayfed.federation import exact_lanes, exact_sum
from rayfed.federation.aggregation import mean_by_name
from rayfed.federation.exact_sum import ExactSum
from rayfed.federation.params import digest
from rayfed.types import Update

SIZE = 60
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def normal(draw, dtype):
    return torch.randn(SIZE, generator=draw, dtype=torch.float64).mul(0.02).to(dtype)


def any_bits(draw, dtype):
    """Numbers of all magnitudes: whatever bits make."""
    drawn = torch.randint(-(2**31), 2**31, (SIZE,), generator=draw).to(BITS[dtype]).view(dtype)
    return torch.where(drawn.isfinite(), drawn, 0)


def denormal(draw, dtype):
    return torch.randint(0, 9, (SIZE,), generator=draw).to(BITS[dtype]).view(dtype)


def cancelling(draw, dtype):
    """Large numbers of both signs whose sum is far smaller."""
    sign = torch.randint(0, 2, (SIZE,), generator=draw) * 2 - 1
    return (sign * (1000 + torch.rand(SIZE, generator=draw) / 100)).to(dtype)


def small_wholes(draw, dtype):
    """Numbers of which many means lie half-way between two of bfloat16."""
    return torch.randint(-300, 300, (SIZE,), generator=draw).to(dtype)


def largest(draw, dtype):
    return torch.full((SIZE,), torch.finfo(dtype).max, dtype=dtype)


VALUES = (normal, any_bits, denormal, cancelling, small_wholes, largest)
WEIGHTS = {
    "one": lambda count: [1.0] * count,
    "examples": lambda count: [float(37 * (i % 7 + 1)) for i in range(count)],
    "large": lambda count: [float(2**40 + i) for i in range(count)],
    "shares": lambda count: [(i + 1) / sum(range(count + 1)) for i in range(count)],
    "unequal": lambda count: [2.0 ** (-9 * i) / 3 for i in range(count)],
}


def exact_mean(clients, weights):
    """The weighted mean of numbers in rational arithmetic."""
    total = sum(map(Fraction, weights))
    columns = zip(*(client.double().tolist() for client in clients), strict=True)
    return [sum(Fraction(v) * Fraction(w) for v, w in zip(c, weights, strict=True)) / total for c in columns]


def nearest(exact, dtype):
    """The nearest number of a type to a fraction, and of two equally near ones the even one."""
    guess = torch.tensor(float(exact), dtype=torch.float64).to(dtype)
    guess = guess.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max)
    bits = guess.view(BITS[dtype])
    around = torch.stack([bits - 1, bits, bits + 1]).view(dtype)
    finite = [number for number in around if number.isfinite()]
    odd = [int(number.view(BITS[dtype])) & 1 for number in finite]
    away = [abs(Fraction(float(number)) - exact) for number in finite]
    return float(finite[min(range(len(finite)), key=lambda i: (away[i], odd[i]))])


def sum_of(clients, weights, order):
    total = ExactSum()
    for i in order:
        total.add([clients[i]], [weights[i]])
    return total


@pytest.mark.parametrize("weighting", WEIGHTS)
@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("dtype", BITS)
def test_the_mean_is_the_exact_one_rounded_once(dtype, values, weighting):
    draw = torch.Generator().manual_seed(0)
    for count in (1, 2, 5, 19):
        weights = WEIGHTS[weighting](count)
        clients = [values(draw, dtype) for _ in weights]
        updates = [Update(client=str(i), params={"a": value}) for i, value in enumerate(clients)]
        mean = mean_by_name(updates, weights)["a"]
        assert mean.dtype == dtype
        assert mean.tolist() == [nearest(number, dtype) for number in exact_mean(clients, weights)]


@pytest.mark.parametrize("weighting", WEIGHTS)
def test_in_float64_the_error_is_that_of_one_rounding(weighting):
    draw = torch.Generator().manual_seed(1)
    for size in (1.0, 1e-200, 1e200):
        weights = WEIGHTS[weighting](7)
        clients = [torch.randn(SIZE, generator=draw, dtype=torch.float64) * size for _ in weights]
        clients[1] = clients[1] - clients[0]
        mean = mean_by_name([Update(client=str(i), params={"a": v}) for i, v in enumerate(clients)], weights)
        for number, exact in zip(mean["a"], exact_mean(clients, weights), strict=True):
            ulp = Fraction(float(torch.nextafter(number.abs(), torch.tensor(inf).double()) - number.abs()))
            assert abs(Fraction(float(number)) - exact) <= Fraction("0.51") * ulp


@pytest.mark.parametrize("seed", range(20))
def test_any_order_and_any_partition_give_the_same_bytes(seed):
    """Of clients that hold different tensors of different types, with NaN and infinity among the values."""
    draw, chance = torch.Generator().manual_seed(seed), random.Random(seed)
    count = chance.choice([1, 3, 8, 40])
    weighting = chance.choice(list(WEIGHTS))
    weights = WEIGHTS["shares" if weighting == "unequal" else weighting](count)
    clients = []
    for _ in range(count):
        kinds = [chance.choice(VALUES) for _ in range(3)]
        params = {
            "a": kinds[0](draw, torch.float32).view(3, 20),
            "b": kinds[1](draw, torch.bfloat16),
            "c": kinds[2](draw, torch.float32).double() / 3,
            "d": torch.randint(-5, 6, (4, 2), generator=draw),
            "e": torch.complex(kinds[0](draw, torch.float32), kinds[2](draw, torch.float32)),
        }
        params["a"][0, chance.randrange(20)] = chance.choice([nan, inf, -inf])
        clients.append({name: params[name] for name in params if name == "a" or chance.random() < 0.8})
    updates = [Update(client=str(i), params=params) for i, params in enumerate(clients)]
    expected = digest(mean_by_name(updates, weights))
    order = list(range(count))
    for _ in range(4):
        chance.shuffle(order)
        shuffled = mean_by_name([updates[i] for i in order], [weights[i] for i in order])
        assert digest(shuffled) == expected
        parts = [sum_of(clients, weights, order[k::3]) for k in range(3)]
        chance.shuffle(parts)
        whole = ExactSum()
        for part in parts:
            whole.merge(part)
        assert digest(whole.mean()) == expected


def test_lanes_that_are_full_hand_on_their_upper_part(monkeypatch):
    """With room for a few clients only, and with 2^13 of the largest digit, which pass 2^53 steps."""
    value = torch.tensor([0.7, -0.3, 1e-12, 3e8])
    weight = 2.0**14 - 1
    one = sum_of([{"a": value}], [weight], [0])
    for _ in range(13):
        twice = ExactSum()
        twice.merge(one)
        twice.merge(one)
        one = twice
    assert torch.equal(one.mean()["a"], value)
    draw = torch.Generator().manual_seed(2)
    clients = [{"a": normal(draw, torch.float32)} for _ in range(50)]
    weights = WEIGHTS["examples"](50)
    expected = sum_of(clients, weights, range(50)).mean()["a"]
    folded = []
    plain = exact_lanes.in_one_form
    monkeypatch.setattr(exact_lanes, "CAPACITY", 2**44)
    monkeypatch.setattr(exact_lanes, "in_one_form", lambda lanes: folded.append(1) or plain(lanes))
    total = sum_of(clients, weights, range(50))
    assert folded
    assert torch.equal(total.mean()["a"], expected)


def test_special_values():
    rows = torch.tensor(
        [[inf, inf, nan, -inf, -0.0, 0.0, 1.0], [1.0, -inf, 2.0, -inf, -0.0, -0.0, -1.0]],
    )
    mean = mean_by_name([Update(client=str(i), params={"a": row}) for i, row in enumerate(rows)], [1, 2])["a"]
    assert [str(number) for number in mean.tolist()] == [
        "inf",
        "nan",
        "nan",
        "-inf",
        "0.0",
        "0.0",
        "-0.3333333432674408",
    ]
    one = mean_by_name([Update(client="x", params={"a": torch.tensor([-nan, 2.0])})], [1])["a"]
    other = mean_by_name([Update(client="x", params={"a": torch.tensor([nan, 2.0])})], [1])["a"]
    assert digest({"a": one}) == digest({"a": other})


@pytest.mark.parametrize(("last", "expected"), [(1.0, 1.0), (1 + 2.0**-23, 1 + 2.0**-23)])
def test_a_sum_of_weights_that_no_float_holds_decides_a_tie(last, expected):
    """With weights W, W and 1 the mean is on the side of 1 + 2^-24 on which the last value is; W = 2^53."""
    total = ExactSum()
    for value, weight in ((1.0, 2.0**53), (1 + 2.0**-23, 2.0**53), (last, 1.0)):
        total.add([{"a": torch.tensor([value])}], [weight])
    assert total.mean()["a"].item() == expected


def test_the_type_of_a_mean_is_the_one_that_holds_all_clients_values():
    updates = [Update(client=str(t), params={"a": torch.tensor([1.0], dtype=t)}) for t in BITS]
    for order in (updates, updates[::-1]):
        assert mean_by_name(order, [1, 1, 1])["a"].dtype == torch.float32


def test_values_in_float64_beyond_the_room():
    value = torch.tensor([2.0**701, -(2.0**701), 2.0**700, 2.0**-800, 2.0**-766], dtype=torch.float64)
    mean = mean_by_name([Update(client="x", params={"a": value})], [3])["a"]
    assert mean.tolist() == [inf, -inf, 2.0**700, 0.0, 2.0**-766]


def test_weights_beyond_the_range():
    """`mean_by_name` scales them; what is below 2^-200 of the largest changes no mean, but may hold alone."""
    one = Update(client="x", params={"a": torch.tensor([1.0])})
    two = Update(client="y", params={"a": torch.tensor([5.0]), "b": torch.tensor([7.0])})
    mean = mean_by_name([one, two], [1e300, 1e-300])
    assert (mean["a"].item(), mean["b"].item()) == (1.0, 7.0)
    for weight in (0.0, -1.0, nan, inf, 2.0**-201):
        with pytest.raises(ValueError, match="is not between"):
            ExactSum().add([one.params], [weight])


def test_parts_of_large_tensors_and_groups_of_small_ones_are_as_one_sum(monkeypatch):
    draw = torch.Generator().manual_seed(3)
    shapes = {"a": (7, 11), "b": (), "c": (3,), "d": (0, 4), "e": (5, 5)}
    clients = [{n: torch.randn(shape, generator=draw) for n, shape in shapes.items()} for _ in range(5)]
    updates = [Update(client=str(i), params=params) for i, params in enumerate(clients)]
    whole = mean_by_name(updates, [1, 2, 3, 4, 5])
    monkeypatch.setattr("rayfed.federation.aggregation.SUMMED_AT_ONCE", 8)
    monkeypatch.setattr(exact_lanes, "CACHED", 10)
    parts = mean_by_name(updates, [1, 2, 3, 4, 5])
    assert digest(whole) == digest(parts) == digest(sum_of(clients, [1, 2, 3, 4, 5], range(5)).mean())
    assert list(parts) == list(shapes)


def test_different_shapes_in_two_sums_are_refused():
    one, two = (sum_of([{"a": torch.zeros(n)}], [1], [0]) for n in (2, 3))
    one.merge(two)
    with pytest.raises(ValueError, match=r"'a' with shapes \(2,\) and \(3,\)"):
        one.mean()


@pytest.mark.parametrize("dtype", BITS)
def test_a_quick_mean_has_the_bits_of_one_without_rounding(dtype, monkeypatch):
    draw = torch.Generator().manual_seed(2)
    kept = torch.randn(3000, generator=draw) * 0.02
    clients = [(kept + torch.randn(3000, generator=draw) * 0.01).to(dtype) for _ in range(11)]
    clients[3][:40], clients[5][20:60], clients[7][50:90] = 0.0, -0.0, 1e-30
    clients[2][100], clients[4][101], clients[6][102] = nan, inf, torch.finfo(dtype).tiny
    for client in clients:
        client[200:240] = -0.0
    weights = [Fraction(30 + i) for i in range(11)]
    left = []
    whole = exact_sum.ExactLanes.add
    monkeypatch.setattr(
        exact_sum.ExactLanes,
        "add",
        lambda self, rows, shares: (left.append(self.size), whole(self, rows, shares)),
    )
    quick = exact_sum.mean_at_once([{"a": client} for client in clients], weights)["a"]
    assert sum(left) < 600  # most sums have no error in float64
    total = ExactSum()
    total.add([{"a": client} for client in clients], weights)
    exact = total.mean()["a"]
    assert torch.equal(quick.view(BITS[dtype]), exact.view(BITS[dtype]))
    assert not quick[200:240].signbit().any()
