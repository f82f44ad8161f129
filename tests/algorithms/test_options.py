"""Options of methods that change how clients train or how clients are weighted and grouped."""

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from algorithms import _grouping
from algorithms._clustering import cluster
from algorithms.faa import FairnessAware, fairness_aware_weights
from algorithms.ga import adjusted_weights, step_at
from rayfed.record.readers import read_rows
from rayfed.types import ServerState
from tests.algorithms.depth import cohort, update
from tests.rounding import near

PLAIN = ("model.options={depth: 1}", "rounds=1", "data.limit=32", "train.batch_size=8")
ONE = (*PLAIN, "tuning.dropout=0")
NO_PULL = ("local.align_weight=0", "local.meta_update=sequential")


def column(run, table, name):
    return pq.read_table(run.path / f"{table}.parquet").column(name).to_pylist()


def test_halves_of_a_batch_are_two_plain_steps(short):
    """Without alignment, two sequential steps on halves of 16 are FedAvg on two batches of 8."""
    even = (*ONE, "data.val=0", "train.max_steps=2")
    plain = short("fedavg", *even)
    double = (*even, *NO_PULL, "train.batch_size=16", "train.max_steps=1")
    assert short("bgp", *double, "local.meta_batch=half").sha256 == plain.sha256
    assert short("bgp", *double, "local.meta_batch=fresh").sha256 != plain.sha256


def test_the_first_step_has_its_own_learning_rate(short):
    one = (*ONE, *NO_PULL)
    default, same, larger = (
        short("bgp", *one, *more).sha256 for more in ((), ("local.inner_lr=0.02",), ("local.inner_lr=0.04",))
    )
    assert default == same
    assert default != larger


def test_the_first_step_is_the_optimizers_or_plain_sgd(short):
    """Plain SGD is what the optimizer does without momentum, and not what it does with momentum."""
    for momentum, equal in ((0, True), (0.9, False)):
        one = (*ONE, *NO_PULL, f"train.momentum={momentum}")
        kinds = [
            short("bgp", *one, f"local.inner_optimizer={kind}").sha256 for kind in ("client", "plain_sgd")
        ]
        assert (kinds[0] == kinds[1]) is equal


def test_personal_steps_change_the_personal_model_only(short):
    none, three = (short("perfedavg", *ONE, f"local.personal_steps={steps}") for steps in (0, 3))
    assert none.sha256 == three.sha256

    def losses(run):
        rows = pq.read_table(run.path / "clients.parquet").to_pylist()
        return [row["value"] for row in rows if row["model"] == "personal" and row["metric"] == "loss"]

    assert losses(none)
    assert all(a != b for a, b in zip(losses(none), losses(three), strict=True))


@pytest.mark.parametrize("center", [False, True])
def test_ga_centres_the_gaps(short, center):
    """The weights of round 2 are those of the formula, from the gaps of round 1."""
    run = short("ga", *ONE, "rounds=2", "data.val=4", f"server.center={str(center).lower()}")
    weights = column(run, "aggregation", "weight")
    gaps = column(run, "gaps", "gap")[:5]
    step = step_at(1, 2, 0.2)
    expected, other = (adjusted_weights([0.2] * 5, gaps, step, kind) for kind in (center, not center))
    assert weights[5:] == pytest.approx(expected.tolist())
    assert weights[5:] != pytest.approx(other.tolist())


NEGATIVE = ([0.4, 0.3, 0.2, 0.1], [0.05, 0.6, 0.5, 0.45], [0.36, 0.34, 0.19, 0.11], [0.15, 0.52, 0.5, 0.47])


def test_negative_slopes_by_hand():
    """Slopes 0.4, 0.5, 0 and -0.5: without it, with 0.5, and as it is."""
    a = np.array(NEGATIVE[0])
    g = np.array(NEGATIVE[1])
    for rule, slopes in (
        ("zero", [0.4, 0.5, 0, 0]),
        ("abs", [0.4, 0.5, 0, 0.5]),
        ("keep", [0.4, 0.5, 0, -0.5]),
    ):
        k = np.array(slopes)
        raw = np.clip(a + k * (g - (k * g).sum() / k.sum()), 0, 1)
        assert fairness_aware_weights(*NEGATIVE, rule).tolist() == pytest.approx((raw / raw.sum()).tolist())


def test_a_run_treats_negative_slopes_as_it_is_told(short):
    few = (*ONE, "data.val=4", "train.batch_size=4", "train.lr=0.05")
    runs = {rule: short("faa", *few, f"server.k_negative={rule}") for rule in ("zero", "abs", "keep")}
    assert read_rows(runs["zero"].path)[0]["slopes_negative"] > 0
    slopes = {rule: np.array(column(run, "fairness", "slope")) for rule, run in runs.items()}
    assert (slopes["keep"] < 0).any()
    assert slopes["zero"].tolist() == np.maximum(slopes["keep"], 0).tolist()
    assert slopes["abs"].tolist() == np.abs(slopes["keep"]).tolist()
    assert len({tuple(column(run, "fairness", "weight")) for run in runs.values()}) == 3


@pytest.mark.parametrize(("rule", "expected"), [("clip", [11 / 19, 8 / 19, 0]), ("project", [0.6, 0.4, 0])])
def test_weights_outside_the_simplex_by_hand(monkeypatch, rule, expected):
    """Slopes of 1 and gaps with mean 1: weights 1/3 + gap - 1 = 11/15, 8/15 and -4/15 before the rule."""
    gaps = np.array([1.4, 1.2, 0.4])
    moved = 1 / 3 + gaps / 1.4 * 0.2 / 3
    answers = iter([gaps, gaps - (moved / moved.sum() - 1 / 3)])
    monkeypatch.setattr(FairnessAware, "gaps", lambda self, *given, **more: next(answers))
    context = cohort(dict.fromkeys("abc", 1), depth=1)
    updates = [update(cid, {0: 1.0}) for cid in "abc"]
    start = ServerState(round=0, params=updates[0].params)
    FairnessAware(off_simplex=rule).aggregate(start, context, updates)
    weights = [row["weight"] for row in context.ledger.tables["aggregation"]]
    near(weights, expected, 15, 1.4, torch.float64)


@pytest.mark.parametrize("kind", ["gmm", "kmeans", "finch"])
def test_clients_are_grouped_by_the_algorithm_that_is_chosen(short, monkeypatch, kind):
    given = []

    def spy(h, wanted, chosen, seed):
        given.append((chosen, cluster(h, wanted, chosen, seed)))
        return given[-1][1]

    monkeypatch.setattr(_grouping, "cluster", spy)
    run = short("fedgr", *PLAIN, f"server.clustering={kind}", "server.num_groups=5")
    assert [chosen for chosen, _ in given] == [kind]
    assert column(run, "clusters", "cluster") == given[0][1].tolist()
    groups = int(read_rows(run.path)[0]["clusters"])
    assert groups < 5 if kind == "finch" else groups == 5  # first neighbours choose the number themselves
