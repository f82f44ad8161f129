"""AFL, q-FFL and TERM against the vectors of FedGCR's specification (V6-V8), and their reductions."""

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from algorithms._losses import last_epoch_sum
from algorithms.afl import project_to_simplex
from algorithms.qffl import FairServer, fair_step, step_sizes
from algorithms.term import TiltedServer, official_steps, step_mean, tilted_weights
from rayfed.types import ServerState, Update, is_statistic
from tests.algorithms.batch_norm import WITH_BATCH_NORM, statistics
from tests.algorithms.depth import cohort
from tests.conftest import STEADY
from tests.rounding import equally_near, near
from tests.vectors import vector

V6 = vector("fedgcr", "V6")
V7 = vector("fedgcr", "V7")
V8 = vector("fedgcr", "V8")
N = V8.inputs["num_examples"]
F = np.array(V8.inputs["losses"])
SHARES = np.array(V8.expected["weights"]["0.0"])


def test_v7_accumulating():
    assert V7.inputs["losses"] == F.tolist()
    weights = np.full(5, 0.2)
    for expected in V7.expected["accumulating"]:
        weights = project_to_simplex(weights + V7.inputs["rate"] * F)
        V7.matches(weights, expected)
    once = project_to_simplex(np.full(5, 0.2) + V7.inputs["large_rate"] * F)
    V7.matches(once, V7.expected["accumulating_large_rate"])


def test_v7_memoryless_and_projection():
    rate = V7.inputs["rate"]
    V7.matches(project_to_simplex(torch.tensor(SHARES + rate * F)), V7.expected["memoryless"])
    others = project_to_simplex(SHARES + rate * np.array(V7.inputs["other_losses"]))
    V7.matches(others, V7.expected["memoryless_other_losses"])
    V7.matches(project_to_simplex(V7.inputs["point"]), V7.expected["projection"])
    near(project_to_simplex(SHARES), SHARES, len(SHARES) + 3, 1.0, torch.float64)
    assert project_to_simplex([-5.0]).tolist() == [1]
    with pytest.raises(ValueError, match="finite"):
        project_to_simplex([0.1, float("nan")])


@pytest.mark.parametrize("t", V8.expected["weights"])
def test_v8_tilted(t):
    expected = V8.expected["weights"][t]
    V8.matches(tilted_weights(F, N, float(t)), expected)
    V8.matches(tilted_weights(torch.tensor(F), torch.tensor(N), float(t)), expected)


def test_v8_large_losses_do_not_overflow():
    assert np.isfinite(tilted_weights([1e6, 1.0], [1, 1], 10.0)).all()


def test_v8_official():
    average = 0.0
    found = []
    for losses, expected in zip(V8.inputs["losses_official"], V8.expected["multipliers"], strict=True):
        steps, average = official_steps(losses, V8.inputs["t_official"], average)
        V8.matches(steps, expected)
        found.append(steps.tolist())
    start = {"a": torch.tensor([1.0, -1.0])}
    same = [Update(client=str(k), params=dict(start)) for k in range(3)]
    assert torch.equal(step_mean(start, same, found[0])["a"], start["a"])


TRAINED = V6.inputs["trained"]


def parts(values):
    """A tensor of two numbers and one of the third: the authors' norm is per tensor."""
    row = torch.tensor(values, dtype=torch.float64)
    return {"a": row[:2], "b": row[2:]}


START = parts(V6.inputs["start"])


def updates():
    return [Update(client=str(k), params=parts(row)) for k, row in enumerate(TRAINED)]


def q_step(q, norm, numerator=None):
    losses = V6.inputs["losses"]
    lipschitz = V6.inputs["lipschitz"]
    h = step_sizes(START, updates(), losses, q, lipschitz, norm)
    weights = [lipschitz * loss**q for loss in numerator or losses]
    new = fair_step(START, updates(), weights, h)
    return h, torch.cat((new["a"], new["b"]))


@pytest.mark.parametrize("q", V6.expected["h"])
def test_v6_official(q):
    h, new = q_step(int(q), "l2_sq")
    V6.matches(h, V6.expected["h"][q])
    V6.matches(new, V6.expected["params"][q])


def test_v6_authors():
    last = V6.inputs["losses"][-1]  # the authors' numerator uses the loss of the last client for all
    h, new = q_step(1, "l2_sum", numerator=[last, last])
    V6.matches(h, V6.expected["h_authors"])
    V6.matches(new, V6.expected["params_authors"])
    V6.matches(q_step(0, "l2_sum")[1], np.mean(TRAINED, axis=0))


def test_nothing_moves_when_nobody_does():
    still = [Update(client=str(k), params=dict(START)) for k in range(2)]
    h = step_sizes(START, still, [0.5, 1e-10], 1, 10, "l2_sum")
    new = fair_step(START, still, [5.0, 1e-9], h)
    assert all(torch.equal(new[name], value) for name, value in START.items())


@pytest.mark.parametrize(
    ("name", "reduced"),
    [
        pytest.param("afl", "server.lr_lambda=0", marks=STEADY),
        pytest.param("term", "server.t=0", marks=STEADY),
        ("qffl", "server.q=0"),
    ],
)
def test_each_reduces_to_fedavg(short, exact, name, reduced):
    uniform = "server.weighting=uniform" if name == "qffl" else "server.weighting=data_size"
    plain = short("fedavg", uniform)
    found = short(name, reduced)
    equally_near(plain.params, found.params, exact("fedavg", uniform).params)
    assert short(name).sha256 != found.sha256
    rows = pq.read_table(found.path / "aggregation.parquet").to_pylist()
    assert sum(row["weight"] for row in rows if row["round"] == 1) == pytest.approx(1)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("afl", ("server.memoryless=true", "server.loss=running")),
        ("afl", ("clients_per_round=2", "server.lr_lambda=5")),
        ("qffl", ("server.loss=running", "server.numerator=last")),
        ("term", ("server.rule=official", "server.loss=running")),
        ("term", ("server.t=-1", "data.partition.scheme=imbalanced", "data.limit=200")),
    ],
)
def test_options_run(short, name, options):
    assert all(torch.isfinite(value).all() for value in short(name, *options).params.values())


def test_watching_the_loss_changes_nothing(short):
    assert short("term", "server.t=0", "server.loss=running").sha256 == short("term", "server.t=0").sha256


def test_the_accumulated_loss_is_that_of_the_last_epoch():
    """Two epochs of three examples, in batches of two and one: 2 x 3 + 1 x 4, without the first epoch."""
    assert last_epoch_sum([100.0, 100.0, 3.0, 4.0], [2, 1, 2, 1], 3) == 10
    assert last_epoch_sum([5.0], [1], 3) == 5
    assert last_epoch_sum([], [], 3) == 0


def test_agnostic_weights_persist(short):
    rows = pq.read_table(short("afl", "server.lr_lambda=0.5").path / "aggregation.parquet").to_pandas()
    by_round = rows.pivot(index="client", columns="round", values="weight")
    near(by_round.sum(), np.ones(3), 2 * len(by_round) + 3, 1.0, torch.float64)
    assert by_round[3].std() > by_round[1].std()


NORM = {"w": [1.0, 0.0], "n.running_mean": [0.0], "n.running_var": [1.0]}
TWO = [
    {"w": [0.8, 0.1], "n.running_mean": [2.0], "n.running_var": [3.0]},
    {"w": [1.3, -0.4], "n.running_mean": [4.0], "n.running_var": [5.0]},
]


@pytest.mark.parametrize(
    "server",
    [
        FairServer(),
        FairServer(norm="l2_sq"),
        TiltedServer(rule="official"),
        TiltedServer(t=-2, rule="official"),
    ],
)
def test_statistics_are_averaged_and_what_trains_moves_as_without_them(server):
    def after(kept):
        updates = [
            Update(
                client=cid,
                params={name: torch.tensor(value) for name, value in row.items() if kept(name)},
                num_examples=n,
                metrics={"start/loss": loss, "lr": 0.1},
            )
            for cid, n, loss, row in zip("ab", (10, 30), (0.5, 1.5), TWO, strict=True)
        ]
        start = ServerState(round=0, params={n: torch.tensor(v) for n, v in NORM.items() if kept(n)})
        return server.aggregate(start, cohort({"a": 1, "b": 1}, depth=1), updates).params

    found = after(lambda name: True)
    assert (found["n.running_mean"].item(), found["n.running_var"].item()) == (3.0, 4.0)
    assert torch.equal(found["w"], after(lambda name: not is_statistic(name))["w"])


@pytest.mark.slow
@pytest.mark.steady
@pytest.mark.parametrize("name", ["qffl", "afl"])
def test_statistics_of_a_real_network_are_a_mean_of_the_clients(short, exact, name):
    mean = ("fedavg", *WITH_BATCH_NORM, "rounds=1", "server.weighting=uniform")
    plain = statistics(short(*mean))
    uniform = ("server.lr_lambda=0", "server.weighting=uniform") if name == "afl" else ()
    found = statistics(short(name, *WITH_BATCH_NORM, "rounds=1", *uniform))
    assert plain
    equally_near(plain, found, statistics(exact(*mean)))
