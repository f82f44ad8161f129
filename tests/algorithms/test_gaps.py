"""GA and FAA: the numbers of the specification, guards, and properties."""

import logging

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from algorithms._gaps import variance
from algorithms.faa import guards, slopes_of
from algorithms.faa import weights_before_clipping as unclipped_faa
from algorithms.fft_gp import fairness_aware_weights
from algorithms.ga import adjusted_weights, step_at, weights_before_clipping
from rayfed.record.readers import read_rows
from tests.vectors import vector

V4 = vector("fedclip_fftgp", "V4")
V5 = vector("fedclip_fftgp", "V5")
A = V4.inputs["weights"]
STEP = V4.inputs["step"]
CLIP = (V4.inputs["clip_weights"], V4.inputs["clip_gaps"])


def test_v4_weights_of_ga():
    gaps = np.subtract(V4.inputs["loss_mean"], V4.inputs["loss_own"])
    V4.matches(gaps, V4.expected["gaps"])
    V4.matches(adjusted_weights(A, gaps, STEP), V4.expected["weights"])
    V4.matches(adjusted_weights(A, gaps, STEP * len(A) / 3), V4.expected["over_three"])
    V4.matches(gaps.mean(), V4.expected["mean_gap"])
    V4.matches(adjusted_weights(A, gaps, STEP, True), V4.expected["centered"])
    worse = np.subtract(V4.inputs["accuracy_mean"], V4.inputs["accuracy_own"])
    V4.matches(worse, V4.expected["accuracy_gaps"])
    V4.matches(adjusted_weights(A, -worse, STEP), V4.expected["by_accuracy"])
    V4.matches(adjusted_weights(*CLIP, STEP), V4.expected["clipped"])


def test_v4_before_the_weights_are_clipped_and_scaled():
    gaps = np.array(V4.expected["gaps"])
    for weights, each, step, expected in (
        (A, gaps, STEP, "before_scaling"),
        (A, gaps, STEP * len(A) / 3, "over_three_before_scaling"),
        (*CLIP, STEP, "clipped_before"),
    ):
        V4.matches(
            weights_before_clipping(np.array(weights), np.array(each), step, False), V4.expected[expected]
        )


def test_v4_steps():
    rounds = V4.inputs["rounds"]
    V4.matches([step_at(i, rounds, STEP) for i in V4.inputs["schedule_rounds"]], V4.expected["schedule"])


def test_v4_equal_gaps():
    before = V4.inputs["equal_gaps_weights"]
    same = [V4.inputs["equal_gap"]] * 4
    V4.matches(adjusted_weights(before, same, STEP), V4.expected["equal_gaps"])
    assert adjusted_weights(before, same, STEP, True).tolist() == before
    assert adjusted_weights(CLIP[0], [0.0] * 4, STEP).tolist() == V4.expected["without_gaps"]


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


CASES = V5.inputs["cases"]


@pytest.mark.parametrize("case", CASES)
def test_v5_weights_of_faa(case):
    given = CASES[case]
    V5.matches(slopes_of(*map(np.array, given)), V5.expected["slopes"][case])
    V5.matches(fairness_aware_weights(*given), V5.expected["weights"][case])
    tensors = [torch.tensor(v, dtype=torch.float64) for v in given]
    V5.matches(fairness_aware_weights(*tensors), V5.expected["weights"][case])


@pytest.mark.parametrize("case", V5.expected["common_gap"])
def test_v5_common_gap_and_weights_before_clipping(case):
    a, g, b, h = map(np.array, CASES[case])
    slopes = slopes_of(a, g, b, h)
    V5.matches((slopes * g).sum() / slopes.sum(), V5.expected["common_gap"][case])
    V5.matches(unclipped_faa(a, g, slopes), V5.expected["before_clipping"][case])


GUARDED = {  # clients whose gap did not answer, or the wrong way; weights cut off; fell back to GA
    "plain": (0, 0, 0, 0),
    "degenerate": (1, 1, 0, 0),
    "negative": (0, 0, 1, 0),
    "no slope": (4, 0, 0, 1),
}


@pytest.mark.parametrize("case", CASES)
def test_every_guard_is_counted(case):
    a, g, b, h = map(np.array, CASES[case])
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


def test_v5_variance():
    gaps = np.array(CASES["plain"][1])
    V5.matches(variance(gaps), V5.expected["variance"])
    V5.matches(gaps.var(), V5.expected["variance_population"])
    assert variance(gaps) / gaps.var() == pytest.approx(V5.expected["double_sum_over_population"])


def test_v5_faa_is_exact_where_gaps_are_linear():
    given = V5.inputs["linear"]
    expected = V5.expected["linear"]
    kappa, c, a = (np.array(given[name]) for name in ("kappa", "c", "weights"))

    def gap(w):
        return c - w / kappa

    moved = adjusted_weights(a, gap(a), given["step"])
    slopes = slopes_of(a, gap(a), moved, gap(moved))
    final = fairness_aware_weights(a, gap(a), moved, gap(moved))
    for found, name in (
        (gap(a), "gaps"),
        (moved, "moved"),
        (gap(moved), "gaps_moved"),
        (slopes, "slopes"),
        (final, "weights"),
        (gap(final), "gaps_final"),
    ):
        V5.matches(found, expected[name])


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
