"""Numbers of FedCLIP's and FFT-GP's specification (section H) that have no test beside a method's own."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from algorithms.afl import AgnosticServer, project_to_simplex
from algorithms.bgp import _covariance
from algorithms.fft_gp import coral
from algorithms.qffl import FairServer, fair_step, step_sizes
from rayfed.config.schema import load_config
from rayfed.engine.loop import run_rounds
from rayfed.engine.setup import prepare
from rayfed.evaluation.metrics import dice, spread
from rayfed.executors.inline import InlineExecutor
from rayfed.federation.cohort import ClientInfo, Cohort
from rayfed.federation.server import Server
from rayfed.types import ServerState, Update
from tests.algorithms.depth import cohort
from tests.algorithms.test_meta import X, Y
from tests.vectors import vector

V3 = vector("fedclip_fftgp", "V3")
V5 = vector("fedclip_fftgp", "V5")
V6 = vector("fedclip_fftgp", "V6")
V9 = vector("fedclip_fftgp", "V9")
V10 = vector("fedclip_fftgp", "V10")
V12 = vector("fedclip_fftgp", "V12")


def doubles(values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(("weighting", "name"), [("data_size", "by_data"), ("uniform", "uniform")])
def test_v3_the_server_weighs_adapters_by_data_or_all_the_same(weighting, name):
    sizes = V3.inputs["num_examples"]
    updates = [
        Update(client=str(i), params={"adapter.g": doubles(gate)}, num_examples=n)
        for i, (gate, n) in enumerate(zip(V3.inputs["params"], sizes, strict=True))
    ]
    cohort = Cohort(
        round=0,
        ids=("0", "1", "2"),
        clients={str(i): ClientInfo(domain="d", num_examples=n) for i, n in enumerate(sizes)},
        seed=0,
        rounds=1,
        depth=0,
        capacity={},
        executor=None,
    )
    start = ServerState(round=0, params={"adapter.g": torch.zeros(2, dtype=torch.float64)})
    after = Server(weighting=weighting).aggregate(start, cohort, updates)
    V3.matches(after.params["adapter.g"], V3.expected[name])
    weights = V3.expected["weights"] if weighting == "data_size" else [1 / 3] * 3
    V3.matches([row["weight"] for row in cohort.ledger.tables["aggregation"]], weights)


SCHEDULES = (
    *((every, every, V5.expected["extra_cost"][str(every)]) for every in V5.inputs["every"]),
    (4, 10, 0.2),
)


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
    assert with_faa == V5.expected["rounds_every_4_of_10"]


def test_v6_moments():
    for i, batch in enumerate((X, Y)):
        V6.matches(batch.mean(0), V6.expected["means"][i])
        V6.matches(_covariance(batch), V6.expected[("covariance_x", "covariance_y")[i]])
    means = (X.mean(0) - Y.mean(0)).square().mean()
    covariances = (_covariance(X) - _covariance(Y)).square().mean()
    V6.matches(means, V6.expected["mean_term"])
    V6.matches(covariances, V6.expected["covariance_term"])
    V6.matches(coral(X, Y), means + covariances)


def test_v9_parts_of_the_meta_loss():
    """Scalar feature h(x) = phi x; the pull is far steeper than the task."""
    phi = doubles(V9.expected["phi_after_train"]).requires_grad_()
    x, y = map(doubles, V9.inputs["test"])
    task = (phi * x - y).square().mean() / 2
    received = V9.inputs["phi_received"] * x
    align = V9.inputs["weight"] * coral(received[:, None], (phi * x)[:, None])
    for found, name in (
        (task, "task"),
        (align, "alignment"),
        (task + align, "loss"),
        (torch.autograd.grad(task, phi)[0], "gradient_task"),
        (torch.autograd.grad(align, phi)[0], "gradient_alignment"),
    ):
        V9.matches(found, V9.expected[name])


def test_v10_q_fedavg():
    given = V10.inputs
    start = {"w": doubles(given["start"])}
    updates = [Update(client=str(k), params={"w": doubles(w)}) for k, w in enumerate(given["trained"])]
    lipschitz = 1 / given["rate"]
    losses = given["losses"]
    moves = [(start["w"] - u.params["w"]) * lipschitz for u in updates]
    V10.matches(torch.stack(moves), V10.expected["moves"])
    q = given["q"]
    weighted = [loss**q * move for loss, move in zip(losses, moves, strict=True)]
    V10.matches(torch.stack(weighted), V10.expected["weighted_moves"])
    h = step_sizes(start, updates, losses, q, lipschitz, "l2_sq")
    V10.matches(h, V10.expected["h"])
    after = fair_step(start, updates, [lipschitz * loss**q for loss in losses], h)["w"]
    V10.matches(after, V10.expected["params"])
    server = FairServer(q=q, lr=given["rate"], norm="l2_sq")
    told = [replace(u, metrics={"start/loss": loss}) for u, loss in zip(updates, losses, strict=True)]
    stepped = server.aggregate(ServerState(round=0, params=start), cohort(two_clients()), told)
    V10.matches(stepped.params["w"], V10.expected["params"])
    h = step_sizes(start, updates, losses, 0, lipschitz, "l2_sq")
    V10.matches(fair_step(start, updates, [lipschitz] * 2, h)["w"], V10.expected["params_q_0"])


def two_clients():
    """Two clients that hold all blocks."""
    return {"0": 12, "1": 12}


@pytest.mark.parametrize(
    ("rate", "expected"), [("rate_shares", "projected"), ("small_rate_shares", "projected_small_rate")]
)
def test_v10_afl_on_the_server(rate, expected):
    losses = V10.inputs["client_losses"]
    clients = {str(k): 12 for k in range(len(losses))}
    updates = [
        Update(client=cid, params={"w": doubles([0.0])}, num_examples=1, metrics={"start/loss": loss})
        for cid, loss in zip(clients, losses, strict=True)
    ]
    world = cohort(clients)
    server = AgnosticServer(lr_lambda=V10.inputs[rate], weighting="uniform")
    server.aggregate(ServerState(round=0, params={"w": doubles([0.0])}), world, updates)
    V10.matches([row["weight"] for row in world.ledger.tables["aggregation"]], V10.expected[expected])


def test_v10_afl():
    shares = np.array(V10.inputs["shares"])
    losses = np.array(V10.inputs["client_losses"])
    stepped = shares + V10.inputs["rate_shares"] * losses
    V10.matches(stepped, V10.expected["stepped"])
    V10.matches(project_to_simplex(stepped), V10.expected["projected"])
    small = shares + V10.inputs["small_rate_shares"] * losses
    V10.matches(project_to_simplex(small), V10.expected["projected_small_rate"])


# The specification gives the results for 31 devices, not the 31 accuracies; these have the same statistics.
DEVICES = [
    *(51, 70, 44, 59, 36, 54, 64, 47, 39, 61, 56, 35, 69, 45, 54, 63),
    *(47, 71, 38, 55, 61, 44, 68, 53, 37, 56, 45, 64, 54, 47, 59),
]


def test_v12_metrics():
    found = spread(DEVICES)
    assert len(DEVICES) == V12.inputs["devices"]
    for name in ("average", "worst", "best", "variance"):
        V12.matches(getattr(found, name), V12.expected[name])
    tail = V12.inputs["tail"]
    V12.matches(np.sort(DEVICES)[:tail].mean(), V12.expected["worst"])
    predicted = V12.inputs["predicted"]
    truth = V12.inputs["truth"]
    V12.matches(dice(predicted, truth), V12.expected["dice"])
    both = (dice(predicted, truth, label=0) + dice(predicted, truth)) / 2
    V12.matches(both, V12.expected["dice_mean"])
    assert dice([0, 0], [0, 0]) == 0
    assert spread([0.2, 0.8]).worst == 0.2  # a tenth of few is one
    assert math.isclose(spread([0.5]).variance, 0)
