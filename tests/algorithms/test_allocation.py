from itertools import combinations, product
from math import comb, factorial

import numpy as np
import pytest
import torch

from algorithms._allocation import count_covering, draw_covering, draw_disjoint
from algorithms.fedra import draw_allocation
from tests.rounding import near
from tests.vectors import vector

V2 = vector("fedra", "V2")
V3 = vector("fedra", "V3")
SIZES = V2.inputs["sizes"]
LAYERS = V2.inputs["layers"]
LIMIT = V2.inputs["maximal_deviation_in_standard_deviations"]


def sizes_of(name):
    """Depths of clients: 6x4 are six of depth 4."""
    if "x" not in name:
        return [int(depth) for depth in name.split(",")]
    clients, depth = name.split("x")
    return [int(depth)] * int(clients)


ALL = {name: sizes_of(name) for name in V3.expected["covering"]}


def rng(seed=0):
    return np.random.default_rng(seed)


def test_v2_selection_frequencies_are_depth_over_layers():
    n = V2.inputs["draws"]
    generator = rng()
    count = np.zeros((len(SIZES), LAYERS))
    for _ in range(n):
        count += draw_allocation(SIZES, LAYERS, generator)
    frequency = V2.expected["frequency"]
    V2.matches(np.array(SIZES) / LAYERS, frequency)
    V2.matches(100 * np.array(SIZES) / LAYERS, np.round(V2.expected["selections_in_100_rounds"], 6))
    deviations = V2.expected["standard_deviation"]
    for row, depth, deviation in zip(count / n, SIZES, deviations, strict=True):
        near(row.mean(), depth / LAYERS, LAYERS + 3, 1.0, torch.float64)
        assert np.abs(row - depth / LAYERS).max() <= LIMIT * deviation
    V2.matches(count.sum() / n / LAYERS, V2.expected["holders_per_layer"])


@pytest.mark.parametrize("name", V2.expected["no_layer_unselected"])
def test_v2_how_often_layers_go_unselected(name):
    missing = V2.expected["layer_unselected"][name]
    covered = V2.expected["no_layer_unselected"][name]
    sizes = sizes_of(name)
    n = 4000
    generator = rng(1)
    draws = np.stack([draw_allocation(sizes, LAYERS, generator).any(0) for _ in range(n)])
    V2.matches(np.prod([1 - d / LAYERS for d in sizes]), missing)
    ways = count_covering(sizes, LAYERS)[0][LAYERS] / np.prod([float(comb(LAYERS, d)) for d in sizes])
    V2.matches(ways, covered)
    assert abs((~draws).mean() - missing) <= LIMIT * np.sqrt(missing / n)
    from scipy.stats import binom, norm

    fewest, most = binom.interval(2 * norm.cdf(LIMIT) - 1, n, covered)
    assert fewest <= draws.all(1).sum() <= most


def test_v2_dynamic_depths_leave_a_layer_unselected_this_often():
    exact = (sum(1 - d / LAYERS for d in range(1, LAYERS + 1)) / LAYERS) ** 6
    V2.matches(exact, V2.expected["layer_unselected"]["dynamic6"])


@pytest.mark.parametrize("name", ALL)
def test_v3_covering_counts(name):
    assert count_covering(ALL[name], LAYERS)[0][LAYERS] == V3.expected["covering"][name]


def test_v3_the_smallest_covering_is_a_partition():
    assert V3.expected["covering"]["6x2"] == factorial(LAYERS) // 2**6


def all_matrices(sizes, layers):
    rows = [[set(c) for c in combinations(range(layers), d)] for d in sizes]
    return list(product(*rows))


@pytest.mark.slow
@pytest.mark.steady
def test_v3_covering_draws_are_uniform_over_all_covering_matrices():
    sizes = V3.inputs["sizes"]
    layers = V3.inputs["layers"]
    n = V3.inputs["draws"]
    everything = all_matrices(sizes, layers)
    covering = [m for m in everything if set().union(*m) == set(range(layers))]
    assert len(everything) == V3.expected["all_matrices"]
    assert len(covering) == count_covering(sizes, layers)[0][layers] == V3.expected["admissible"]
    generator = rng(2)
    seen = {}
    columns = np.zeros(4)
    total = np.zeros((3, 4))
    for _ in range(n):
        matrix = draw_allocation(sizes, layers, generator, cover=True)
        key = tuple(frozenset(np.flatnonzero(row).tolist()) for row in matrix)
        seen[key] = seen.get(key, 0) + 1
        total += matrix
        columns += np.bincount(matrix.sum(0), minlength=4)[:4]
    assert set(seen) == {tuple(map(frozenset, m)) for m in covering}
    distance = sum(abs(c / n - 1 / len(covering)) for c in seen.values()) / 2
    limits = V3.expected["distance"]
    assert (
        distance < (limits["noise_floor"] + limits["cover_then_fill"]) / 2
    )  # between exact and nearly uniform
    assert np.abs(total / n - V3.expected["marginals"]).max() < 0.012
    assert np.abs(columns / n / layers - list(V3.expected["column_sums"].values())).max() < 0.012


@pytest.mark.parametrize(
    "sizes", [*(sizes for sizes in ALL.values() if sum(sizes) >= LAYERS), SIZES, [12], [1] * 12]
)
def test_covering_rows_and_columns(sizes):
    generator = rng(3)
    for _ in range(50):
        matrix = draw_allocation(sizes, 12, generator, cover=True)
        assert matrix.dtype == np.bool_
        assert matrix.sum(1).tolist() == list(sizes)
        assert matrix.any(0).all()


def test_what_cannot_be_covered_is_covered_as_far_as_possible():
    generator = rng(4)
    counts = np.zeros(12)
    for _ in range(600):
        matrix = draw_allocation([2] * 5, 12, generator, cover=True)
        assert matrix.sum(1).tolist() == [2] * 5
        assert matrix.sum(0).max() == 1
        counts += matrix.any(0)
    assert np.abs(counts / 600 - 10 / 12).max() < 4.5 * np.sqrt(10 / 12 * 2 / 12 / 600)
    with pytest.raises(ValueError, match="cannot cover 12"):
        draw_covering([2] * 5, 12, generator)


def test_the_layers_trained_longest_ago_come_first():
    generator = rng(5)
    last = np.full(12, -1)
    for round in range(3):
        last[draw_disjoint([2, 2], 12, generator, last).any(0)] = round
    assert sorted(last.tolist()) == [0] * 4 + [1] * 4 + [2] * 4  # every layer within ceil(12 / 4) rounds


@pytest.mark.parametrize("bad", [[0], [13], [3, -1], [2.5], [True]])
@pytest.mark.parametrize("cover", [False, True])
def test_a_depth_outside_the_layers_is_refused(bad, cover):
    with pytest.raises(ValueError, match="from 1 to 12"):
        draw_allocation(bad, 12, rng(), cover)


def test_the_same_generator_gives_the_same_matrix():
    one, two = (draw_allocation(SIZES, 12, rng(7)) for _ in range(2))
    assert (one == two).all()
    assert (one != draw_allocation(SIZES, 12, rng(8))).any()
