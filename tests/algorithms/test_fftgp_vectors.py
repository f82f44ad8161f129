"""Numbers of FedCLIP's and FFT-GP's specification (section H) that have no test beside a method's own."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from algorithms.afl import project_to_simplex
from algorithms.bgp import _covariance
from algorithms.fedclip import symmetric_loss
from algorithms.fft_gp import coral
from algorithms.qffl import fair_step, step_sizes
from rayfed.config.schema import load_config
from rayfed.engine.loop import run_rounds
from rayfed.engine.setup import prepare
from rayfed.evaluation.metrics import dice, spread
from rayfed.executors.inline import InlineExecutor
from rayfed.federation.cohort import ClientInfo, Cohort
from rayfed.federation.server import Server
from rayfed.types import ServerState, Update
from tests.algorithms.test_fedclip import CLASSES, LOGITS, features_with
from tests.algorithms.test_meta import X, Y


def near(value, expected, tol=1e-6):
    np.testing.assert_allclose(np.asarray(value, dtype=float), expected, atol=tol, rtol=0)


@pytest.mark.parametrize(
    ("logits", "labels", "sides"),
    [(LOGITS, [0, 1, 2], (0.392386, 0.393813)), (CLASSES, [0, 1, 0], (0.687904, 0.770053))],
)
def test_v2_both_sides_and_their_identities(logits, labels, sides):
    """Images over texts is class cross entropy with log counts added; texts over images has soft targets."""
    matrix = logits[:, labels]
    y = torch.tensor(labels)
    n = len(labels)
    near(F.cross_entropy(matrix, torch.arange(n)), sides[0])
    near(F.cross_entropy(matrix.T, torch.arange(n)), sides[1])
    counts = torch.bincount(y, minlength=logits.shape[1]).double()
    shifted = torch.log_softmax(logits + counts.log(), dim=1)[torch.arange(n), y]
    near(-shifted.mean() + counts[y].log().mean(), sides[0])
    over_images = torch.log_softmax(logits, dim=0)
    near(-sum(over_images[y == c, c].mean() for c in y) / n, sides[1])
    near(symmetric_loss(*features_with(logits)[:2], y, 10.0), sum(sides) / 2)


CLIENTS = ([1.0, -2.0], [3.0, 0.5], [0.0, 4.0])
SIZES = (1406, 1002, 2357)


@pytest.mark.parametrize(
    ("weighting", "weights", "expected"),
    [
        ("data_size", (0.295068, 0.210283, 0.494648), (0.925918, 1.493599)),
        ("uniform", (1 / 3, 1 / 3, 1 / 3), (1.333333, 0.833333)),
    ],
)
def test_v3_the_server_weighs_adapters_by_data_or_all_the_same(weighting, weights, expected):
    gates = [torch.tensor(values, dtype=torch.float64) for values in CLIENTS]
    updates = [
        Update(client=str(i), params={"adapter.g": gate}, num_examples=n)
        for i, (gate, n) in enumerate(zip(gates, SIZES, strict=True))
    ]
    cohort = Cohort(
        round=0,
        ids=("0", "1", "2"),
        clients={str(i): ClientInfo(domain="d", num_examples=n) for i, n in enumerate(SIZES)},
        seed=0,
        rounds=1,
        depth=0,
        capacity={},
        executor=None,
    )
    start = ServerState(round=0, params={"adapter.g": torch.zeros(2, dtype=torch.float64)})
    after = Server(weighting=weighting).aggregate(start, cohort, updates)
    near(after.params["adapter.g"], expected)
    near([row["weight"] for row in cohort.ledger.tables["aggregation"]], weights)


SCHEDULES = ((1, 1, 1), (2, 2, 0.5), (4, 4, 0.25), (8, 8, 0.125), (20, 20, 0.05), (4, 10, 0.2))


def test_v5_extra_cost_and_rounds_of_the_schedule(cache):
    small = ("data.limit=8", "data.val=2", "rounds=1")
    setup = prepare(load_config(["algorithm=fft_gp_clip", f"data.cache={cache}", *small]))
    executor = InlineExecutor(setup.world, setup.weights)
    for every, rounds, extra in SCHEDULES:
        server = replace(setup.experiment.server, every=every)
        experiment = replace(setup.experiment, server=server, rounds=rounds, evaluate_every=0)
        done = list(run_rounds(experiment, executor, setup.start))
        up = done[0].row["bytes_up"]
        assert sum(d.row["bytes_down"] + d.row["bytes_up"] for d in done) / (2 * up * rounds) == 1 + extra
        with_faa = [d.row["round"] for d in done if d.row["bytes_down"] > up]
        assert with_faa == [d.row["round"] for d in done if "fairness" in d.ledger.tables]
        assert with_faa == list(range(every, rounds + 1, every))
    assert with_faa == [4, 8]


def test_v6_moments():
    near(X.mean(0), [2, 2])
    near(Y.mean(0), [1, 0.333333])
    near(_covariance(X), [[1, -1], [-1, 4]])
    near(_covariance(Y), [[1, -1], [-1, 1.333333]])
    between = (_covariance(X) - _covariance(Y)).square()
    near((X.mean(0) - Y.mean(0)).square().mean(), 1.888889)
    near(between.mean(), 1.777778)
    near(coral(X, Y), 1.888889 + 1.777778)


def test_v9_parts_of_the_meta_loss():
    """Scalar feature h(x) = phi x, global phi 1; the pull is far steeper than the task."""
    phi = torch.tensor(0.775, dtype=torch.float64, requires_grad=True)
    x, y = (torch.tensor(v, dtype=torch.float64) for v in ([1.0, 3.0], [2.0, 1.0]))
    task = (phi * x - y).square().mean() / 2
    align = coral(x[:, None], (phi * x)[:, None])
    near(task.detach(), 0.814063)
    near(align.detach(), 0.840502)
    near((task + align).detach(), 1.654564)
    near(torch.autograd.grad(task, phi)[0], 1.375)
    near(torch.autograd.grad(align, phi)[0], -6.75225)


def test_v10_q_fedavg_and_afl():
    start = {"w": torch.tensor([1.0, -1.0], dtype=torch.float64)}
    trained = ([0.8, -0.9], [1.1, -1.4])
    updates = [
        Update(client=str(k), params={"w": torch.tensor(w, dtype=torch.float64)})
        for k, w in enumerate(trained)
    ]
    losses = [0.5, 2.0]
    for q, sizes, expected in ((1, [10, 37], [1.021277, -1.159574]), (0, [10, 10], [0.95, -1.15])):
        h = step_sizes(start, updates, losses, q, 10, "l2_sq")
        near(h, sizes)
        near(fair_step(start, updates, [10 * loss**q for loss in losses], h)["w"], expected)
    shares = np.full(4, 0.25)
    loss = np.array([0.9, 0.1, 0.4, 2.0])
    near(shares + 0.5 * loss, [0.7, 0.3, 0.45, 1.25])
    near(project_to_simplex(shares + 0.5 * loss), [0.225, 0, 0, 0.775])
    near(project_to_simplex(shares + 0.05 * loss), [0.2525, 0.2125, 0.2275, 0.3075])


# The specification gives the results for 31 devices, not the 31 accuracies; these have the same statistics.
DEVICES = [
    *(51, 70, 44, 59, 36, 54, 64, 47, 39, 61, 56, 35, 69, 45, 54, 63),
    *(47, 71, 38, 55, 61, 44, 68, 53, 37, 56, 45, 64, 54, 47, 59),
]


def test_v12_metrics():
    found = spread(DEVICES)
    assert len(DEVICES) == 31
    near(
        [found.average, found.worst, found.best, found.variance],
        [53.096774, 36.0, 70.0, 108.151925],
    )
    predicted = [1, 1, 0, 0, 0, 0]
    truth = [1, 0, 0, 0, 0, 0]
    near(dice(predicted, truth), 0.666664)
    near((dice(predicted, truth, label=0) + dice(predicted, truth)) / 2, 0.777776)
    assert dice([0, 0], [0, 0]) == 0
    assert spread([0.2, 0.8]).worst == 0.2  # a tenth of few is one
    assert math.isclose(spread([0.5]).variance, 0)
