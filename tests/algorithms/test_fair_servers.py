"""AFL, q-FFL and TERM against the vectors of FedGCR's specification (V6-V8), and their reductions."""

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from algorithms.afl import project_to_simplex
from algorithms.qffl import fair_step, step_sizes
from algorithms.term import official_steps, step_mean, tilted_weights
from rayfed.types import Update

N = [100, 200, 50, 150, 500]
F = [0.8, 0.6, 1.5, 1.2, 0.3]
SHARES = np.array([0.1, 0.2, 0.05, 0.15, 0.5])


def near(value, expected, tol=1e-6):
    np.testing.assert_allclose(np.asarray(value, dtype=float), expected, atol=tol, rtol=0)


def test_v7_accumulating():
    weights = np.full(5, 0.2)
    for expected in (
        [0.192, 0.172, 0.262, 0.232, 0.142],
        [0.184, 0.144, 0.324, 0.264, 0.084],
        [0.176, 0.116, 0.386, 0.296, 0.026],
    ):
        weights = project_to_simplex(weights + 0.1 * np.array(F))
        near(weights, expected)
    near(project_to_simplex(np.full(5, 0.2) + 0.5 * np.array(F)), [0.1375, 0.0375, 0.4875, 0.3375, 0])


def test_v7_memoryless_and_projection():
    near(project_to_simplex(torch.tensor(SHARES + 0.1 * np.array(F))), [0.092, 0.172, 0.112, 0.182, 0.442])
    near(project_to_simplex(SHARES + 0.1 * np.array([4, 3, 6, 5, 0.2])), [0.136, 0.136, 0.286, 0.286, 0.156])
    near(project_to_simplex([0.5, 1.2, -0.3]), [0.15, 0.85, 0])
    near(project_to_simplex(SHARES), SHARES, 1e-15)
    near(project_to_simplex([-5.0]), [1])
    with pytest.raises(ValueError, match="finite"):
        project_to_simplex([0.1, float("nan")])


@pytest.mark.parametrize(
    ("t", "expected"),
    [
        (0.0, SHARES),
        (0.01, [0.100194, 0.199989, 0.050449, 0.150894, 0.498474]),
        (0.1, [0.101895, 0.199755, 0.054642, 0.159080, 0.484628]),
        (1.0, [0.112174, 0.183680, 0.112945, 0.251016, 0.340185]),
        (10.0, [0.001583, 0.000429, 0.868251, 0.129683, 0.000053]),
    ],
)
def test_v8_tilted(t, expected):
    near(tilted_weights(F, N, t), expected)
    near(tilted_weights(torch.tensor(F), torch.tensor(N), t), expected)
    assert np.isfinite(tilted_weights([1e6, 1.0], [1, 1], 10.0)).all()


def test_v8_official():
    first, ema = official_steps([2.0, 1.0, 0.5], 0.1, 0.0)
    near(first, [0.723185, 0.654365, 0.622451])
    near(official_steps([1.5, 0.9, 0.45], 0.1, ema)[0], [0.473388, 0.445820, 0.426203])
    start = {"a": torch.tensor([1.0, -1.0])}
    same = [Update(client=str(k), params=dict(start)) for k in range(3)]
    assert torch.equal(step_mean(start, same, first.tolist())["a"], start["a"])


START = {"a": torch.tensor([1.0, -0.5], dtype=torch.float64), "b": torch.tensor([0.2], dtype=torch.float64)}
TRAINED = ([0.9, -0.4, 0.1], [1.2, -0.7, 0.25])


def updates():
    rows = [torch.tensor(row, dtype=torch.float64) for row in TRAINED]
    return [Update(client=str(k), params={"a": row[:2], "b": row[2:]}) for k, row in enumerate(rows)]


def q_step(q, norm, numerator=None):
    losses = [0.5, 1.5]
    h = step_sizes(START, updates(), losses, q, 10, norm)
    weights = [10 * loss**q for loss in numerator or losses]
    new = fair_step(START, updates(), weights, h)
    return h, torch.cat((new["a"], new["b"]))


def test_v6_official_and_authors():
    for q, sizes, expected in (
        (0, [10, 10], [1.05, -0.55, 0.175]),
        (1, [8, 23.25], [1.08, -0.58, 0.208]),
        (2, [5.5, 47.25], [1.080569, -0.580569, 0.216588]),
    ):
        h, new = q_step(q, "l2_sq")
        near(h, sizes)
        near(new, expected)
    h, new = q_step(1, "l2_sum", numerator=[1.5, 1.5])
    near(h, [7.414214, 18.328427])
    near(new, [1.058269, -0.558269, 0.170865])
    near(q_step(0, "l2_sum")[1], np.mean(TRAINED, axis=0))


def test_nothing_moves_when_nobody_does():
    still = [Update(client=str(k), params=dict(START)) for k in range(2)]
    h = step_sizes(START, still, [0.5, 1e-10], 1, 10, "l2_sum")
    new = fair_step(START, still, [5.0, 1e-9], h)
    assert all(torch.equal(new[name], value) for name, value in START.items())


@pytest.mark.parametrize(
    ("name", "reduced"),
    [("afl", "server.lr_lambda=0"), ("term", "server.t=0"), ("qffl", "server.q=0")],
)
def test_each_reduces_to_fedavg(short, name, reduced):
    uniform = "server.weighting=uniform" if name == "qffl" else "server.weighting=data_size"
    plain = short("fedavg", uniform)
    found = short(name, reduced)
    for key, value in plain.params.items():
        torch.testing.assert_close(found.params[key], value, rtol=1e-5, atol=1e-6)
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


def test_agnostic_weights_persist(short):
    rows = pq.read_table(short("afl", "server.lr_lambda=0.5").path / "aggregation.parquet").to_pandas()
    by_round = rows.pivot(index="client", columns="round", values="weight")
    assert (by_round.sum() - 1).abs().max() < 1e-9
    assert by_round[3].std() > by_round[1].std()
