from itertools import combinations, product
from math import comb, factorial

import numpy as np
import pytest

from algorithms._allocation import count_covering, draw_covering, draw_disjoint
from algorithms.fedra import draw_allocation

SIZES = [12, 10, 8, 6, 4, 3]
ALL = {"6x4": [4] * 6, "6x6": [6] * 6, "6x10": [10] * 6, "mixed": [10, 10, 6, 6, 4, 4], "6x2": [2] * 6}


def rng(seed=0):
    return np.random.default_rng(seed)


def test_selection_frequencies_are_depth_over_layers():
    n = 20000
    generator = rng()
    count = np.zeros((6, 12))
    for _ in range(n):
        count += draw_allocation(SIZES, 12, generator)
    sd = [np.sqrt(d / 12 * (1 - d / 12) / n) for d in SIZES]
    assert np.round(sd, 6).tolist() == [0.0, 0.002635, 0.003333, 0.003536, 0.003333, 0.003062]
    for row, depth, deviation in zip(count / n, SIZES, sd, strict=True):
        assert abs(row.mean() - depth / 12) < 1e-12
        assert np.abs(row - depth / 12).max() <= 4.5 * deviation
    assert np.isclose(count.sum() / n / 12, 43 / 12)


@pytest.mark.parametrize(
    ("name", "missing", "covered"),
    [
        ("6x4", 0.087791, 0.275314),
        ("6x6", 0.015625, 0.821472),
        ("mixed", 0.003086, 0.963104),
        ("6x2", 0.334898, 0.000091),
    ],
)
def test_how_often_layers_go_unselected(name, missing, covered):
    sizes = ALL[name]
    n = 4000
    generator = rng(1)
    draws = np.stack([draw_allocation(sizes, 12, generator).any(0) for _ in range(n)])
    exact = float(np.prod([1 - d / 12 for d in sizes]))
    assert round(exact, 6) == missing
    ways = count_covering(sizes, 12)[0][12] / np.prod([float(comb(12, d)) for d in sizes])
    assert round(ways, 6) == covered
    assert abs((~draws).mean() - missing) < 4.5 * np.sqrt(missing / n)
    assert abs(draws.all(1).mean() - covered) <= 4.5 * np.sqrt(covered * (1 - covered) / n) + 1e-3


def test_dynamic_depths_leave_a_layer_unselected_this_often():
    assert round((sum(1 - d / 12 for d in range(1, 13)) / 12) ** 6, 6) == 0.009270


def test_covering_counts():
    found = {name: count_covering(sizes, 12)[0][12] for name, sizes in ALL.items()}
    assert found == {
        "6x4": 4050035642475900,
        "6x6": 511239554264051844,
        "6x10": 82632691350,
        "mixed": 877637793463200,
        "6x2": 7484400,
    }
    assert found["6x2"] == factorial(12) // 2**6
    assert count_covering([2] * 5, 12)[0][12] == 0


def all_matrices(sizes, layers):
    rows = [[set(c) for c in combinations(range(layers), d)] for d in sizes]
    return list(product(*rows))


def test_covering_draws_are_uniform_over_all_covering_matrices():
    sizes = [2, 2, 1]
    layers = 4
    n = 20000
    everything = all_matrices(sizes, layers)
    covering = [m for m in everything if set().union(*m) == set(range(layers))]
    assert (len(everything), len(covering), count_covering(sizes, layers)[0][layers]) == (144, 48, 48)
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
    distance = sum(abs(c / n - 1 / 48) for c in seen.values()) / 2
    assert distance < 0.025  # noise of 20000 draws: 0.0194; a nearly uniform sampler: about 0.035
    assert np.abs(total / n - np.array([[0.5], [0.5], [0.25]])).max() < 0.012
    assert np.abs(columns / n / 4 - [0, 0.75, 0.25, 0]).max() < 0.012


@pytest.mark.parametrize("sizes", [*ALL.values(), SIZES, [12], [1] * 12])
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
