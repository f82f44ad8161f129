"""GA and FAA: the numbers of the specification, guards, and properties."""

import logging

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from algorithms._gaps import variance
from algorithms.faa import guards, slopes_of
from algorithms.fft_gp import fairness_aware_weights
from algorithms.ga import adjusted_weights, step_at
from rayfed.record.readers import read_rows

A = [0.25, 0.25, 0.25, 0.25]
GAPS = [0.4, 0.1, -0.05, 0.3]
CLIP = ([0.02, 0.4, 0.38, 0.2], [-0.3, 0.3, 0.05, 0.0])


def close(*numbers):
    return pytest.approx(list(numbers), abs=1e-6)


def test_ga_vectors():
    assert adjusted_weights(A, GAPS, 0.2).tolist() == close(0.274286, 0.24, 0.222857, 0.262857)
    assert adjusted_weights(A, GAPS, 0.2 * 4 / 3).tolist() == close(0.281481, 0.237037, 0.214815, 0.266667)
    assert adjusted_weights(A, GAPS, 0.2, True).tolist() == close(0.428947, 0.176316, 0.05, 0.344737)
    by_accuracy = adjusted_weights(A, [0.1, 0.02, -0.01, 0.08], 0.2)
    assert by_accuracy.tolist() == close(0.273973, 0.237443, 0.223744, 0.26484)
    weights, gaps = CLIP
    assert adjusted_weights(weights, gaps, 0.2).tolist() == close(0.0, 0.433387, 0.373997, 0.192616)
    assert [step_at(i, 40, 0.2) for i in (0, 1, 2, 20, 40)] == close(0.205, 0.2, 0.195, 0.105, 0.005)


def test_ga_equal_gaps():
    before = [0.4, 0.3, 0.2, 0.1]
    assert adjusted_weights(before, [0.1] * 4, 0.2).tolist() == close(0.375, 0.291667, 0.208333, 0.125)
    assert adjusted_weights(before, [0.1] * 4, 0.2, True).tolist() == before
    assert adjusted_weights(CLIP[0], [0.0] * 4, 0.2).tolist() == CLIP[0]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_gap_that_is_no_number_changes_nothing_and_is_said(bad, caplog):
    with caplog.at_level(logging.WARNING):
        assert adjusted_weights(A, [0.1, bad, 0.2, 0.3], 0.2).tolist() == A
    assert "gap of client 1 is not a number" in caplog.text
    second = [0.3, 0.23, 0.2, 0.27]
    assert fairness_aware_weights(A, [0.1, bad, 0.2, 0.3], second, [0.0] * 4).tolist() == A
    assert fairness_aware_weights(A, [0.1] * 4, second, [bad, 0, 0, 0]).tolist() == A


def test_a_single_client_keeps_its_weight():
    assert adjusted_weights([1.0], [0.3], 0.2).tolist() == [1.0]
    assert adjusted_weights([1.0], [-0.3], 2.0).tolist() == [1.0]
    assert fairness_aware_weights([1.0], [0.3], [1.0], [0.3]).tolist() == [1.0]


FAA = {
    "plain": (
        (A, [0.4, 0.1, 0.05, 0.3], [0.3, 0.23, 0.2, 0.27], [0.32, 0.13, 0.12, 0.27]),
        (0.625, 0.666667, 0.714286, 0.666667),
        (0.370824, 0.178879, 0.138085, 0.312212),
    ),
    "degenerate": (
        ([0.4, 0.3, 0.2, 0.1], [0.05, 0.6, 0.5, 0.45], [0.36, 0.34, 0.19, 0.11], [0.15, 0.52, 0.5, 0.47]),
        (0.4, 0.5, 0.0, 0.0),
        (0.277778, 0.422222, 0.2, 0.1),
    ),
    "negative": (
        ([0.15, 0.45, 0.4, 0.0], [0.02, 0.5, 0.48, 0.3], [0.1, 0.48, 0.41, 0.01], [0.07, 0.46, 0.46, 0.29]),
        (1.0, 0.75, 0.5, 1.0),
        (0.0, 0.545079, 0.443909, 0.011012),
    ),
    "no slope": (
        (A, [0.4, 0.1, 0.05, 0.3], [0.3, 0.23, 0.2, 0.27], [0.4, 0.1, 0.05, 0.3]),
        (0.0, 0.0, 0.0, 0.0),
        (0.3, 0.23, 0.2, 0.27),
    ),
}


@pytest.mark.parametrize("case", FAA)
def test_faa_vectors(case):
    given, slopes, expected = FAA[case]
    assert slopes_of(*map(np.array, given)).tolist() == close(*slopes)
    assert fairness_aware_weights(*given).tolist() == close(*expected)
    tensors = [torch.tensor(v, dtype=torch.float64) for v in given]
    assert fairness_aware_weights(*tensors).tolist() == close(*expected)


GUARDED = {  # clients whose gap did not answer, or the wrong way; weights cut off; fell back to GA
    "plain": (0, 0, 0, 0),
    "degenerate": (1, 1, 0, 0),
    "negative": (0, 0, 1, 0),
    "no slope": (4, 0, 0, 1),
}


@pytest.mark.parametrize("case", FAA)
def test_every_guard_is_counted(case):
    a, g, b, h = map(np.array, FAA[case][0])
    found = guards(a, g, b, h, slopes_of(a, g, b, h))
    names = ("slopes_flat", "slopes_negative", "weights_clipped", "fell_back")
    assert tuple(found[name] for name in names) == GUARDED[case]


def test_faa_equal_gaps_keep_the_weights_where_they_answer_alike():
    """Equal gaps under uniform weights: nothing to balance, GA does not move, FAA neither."""
    moved = adjusted_weights(A, [0.1] * 4, 0.2)
    assert moved.tolist() == A
    assert fairness_aware_weights(A, [0.1] * 4, moved, [0.1] * 4).tolist() == A
    uneven = [0.4, 0.3, 0.2, 0.1]
    after = fairness_aware_weights(uneven, [0.1] * 4, adjusted_weights(uneven, [0.1] * 4, 0.2), [0.08] * 4)
    assert after.sum() == pytest.approx(1)
    assert after.tolist() == pytest.approx(uneven)  # every gap is the common one already


def test_without_validation_images_the_weights_stay_and_the_rounds_say_so(short, caplog):
    with caplog.at_level(logging.WARNING):
        run = short("faa", "model.options={depth: 1}", "rounds=2", "data.val=0", "data.limit=12")
    assert "set data.val" in caplog.text
    rows = read_rows(run.path)
    assert all(row["gap_unknown"] == 5 and "gap_variance" not in row for row in rows)
    weights = pq.read_table(run.path / "aggregation.parquet").column("weight").to_pylist()
    assert weights == pytest.approx([0.2] * 10)


def test_variance_vector():
    gaps = np.array([0.4, 0.1, 0.05, 0.3])
    assert variance(gaps) == pytest.approx(0.655, abs=1e-9)
    assert variance(gaps) / gaps.var() == pytest.approx(2 * len(gaps) ** 2)


def test_faa_is_exact_where_gaps_are_linear():
    kappa = np.array([0.5, 1.0, 2.0, 0.8])
    c = np.array([0.9, 0.45, 0.3, 0.6])
    a = np.array(A)

    def gap(w):
        return c - w / kappa

    moved = adjusted_weights(a, gap(a), 0.2)
    assert moved.tolist() == close(0.264828, 0.242759, 0.24, 0.252414)
    assert slopes_of(a, gap(a), moved, gap(moved)).tolist() == close(*kappa)
    final = fairness_aware_weights(a, gap(a), moved, gap(moved))
    assert final.tolist() == close(0.336047, 0.222093, 0.144186, 0.297674)
    assert gap(final).tolist() == close(*[0.227907] * 4)


@pytest.mark.parametrize("seed", range(50))
def test_weights_are_always_on_the_simplex(seed):
    rng = np.random.default_rng(seed)
    m = int(rng.integers(1, 7))
    a = rng.dirichlet(np.ones(m))
    g, h = (rng.normal(size=m) * rng.integers(0, 2, size=m) for _ in range(2))
    if seed % 7 == 0:
        g[rng.integers(m)] = np.nan
    for moved in (adjusted_weights(a, g, 0.2), adjusted_weights(a, g, 5.0, True)):
        for final in (moved, fairness_aware_weights(a, g, moved, h)):
            assert final.sum() == pytest.approx(1)
            assert (final >= 0).all()


def test_faa_schedule_and_traffic(short):
    """FAA sends two broadcasts more than GA does."""
    small = ("model.options={depth: 1}", "rounds=4", "data.val=4")
    ga = short("ga", *small)
    full = short("faa", *small)
    half = short("faa", *small, "server.every=2")
    down = [[row["bytes_down"] for row in read_rows(run.path)] for run in (ga, half, full)]
    one = down[0][0]
    assert down == [[one] * 4, [one, 3 * one, one, 3 * one], [3 * one] * 4]
    assert "gap_variance" in read_rows(ga.path)[0]
    assert "gap_ga_variance" in read_rows(full.path)[0]


def test_faa_compares_on_the_same_answers(short):
    run = short("fft_gp", "model.options={depth: 1}", "rounds=1", "data.val=4", "server.compare=true")
    names = {"gap_variance", "gap_ga_variance", "gap_fedavg_variance", "gap_faa_variance"}
    assert names <= read_rows(run.path)[0].keys()
