"""BGP, Per-FedAvg, GRACE and Ditto: hand-worked steps and reductions."""

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from algorithms._meta import meta_step
from algorithms.ditto import personal_loss
from algorithms.fft_gp import coral
from algorithms.grace import consistent_weights
from rayfed.report.table import read_rows

A1, C1 = torch.tensor([[2.0, 0.5], [0.5, 1.0]]), torch.tensor([1.0, -1.0])
A2, C2 = torch.tensor([[1.0, 0.0], [0.0, 3.0]]), torch.tensor([0.0, 0.5])
X = torch.tensor([[1.0, 2.0], [3.0, 0.0], [2.0, 4.0]], dtype=torch.float64)
Y = torch.tensor([[0.0, 1.0], [1.0, 1.0], [2.0, -1.0]], dtype=torch.float64)


def quadratic(w, a, c):
    return (w - c) @ a @ (w - c) / 2


@pytest.mark.parametrize(
    ("update", "expected"),
    [
        ("sequential", [0.43, 0.36]),
        ("fo_restore", [0.3925, 0.46]),
        ("second_order", [0.4035, 0.444375]),
    ],
)
def test_meta_steps_on_quadratics(update, expected):
    w = torch.nn.Parameter(torch.tensor([0.5, 0.25]))
    optimizer = torch.optim.SGD([w], lr=0.2)
    meta_step(optimizer, lambda: quadratic(w, A1, C1), lambda: quadratic(w, A2, C2), update, 0.1)
    assert w.tolist() == pytest.approx(expected, abs=1e-6)
    assert optimizer.param_groups[0]["lr"] == 0.2


@pytest.mark.parametrize(("update", "expected"), [("sequential", 1.043862), ("fo_restore", 1.068863)])
def test_meta_update_with_alignment(update, expected):
    x_tr, y_tr = (torch.tensor(v, dtype=torch.float64) for v in ([1.0, 2.0], [1.0, 1.0]))
    x_te, y_te = (torch.tensor(v, dtype=torch.float64) for v in ([1.0, 3.0], [2.0, 1.0]))
    phi = torch.nn.Parameter(torch.tensor(0.8, dtype=torch.float64))

    def task(x, y):
        return (phi * x - y).square().mean() / 2

    def second():
        return task(x_te, y_te) + coral((1.0 * x_te)[:, None], (phi * x_te)[:, None])

    meta_step(torch.optim.SGD([phi], lr=0.05), lambda: task(x_tr, y_tr), second, update)
    assert phi.item() == pytest.approx(expected, abs=1e-6)


def test_coral_vectors():
    assert float(coral(X, Y)) == pytest.approx(3.666667, abs=1e-6)
    assert float(coral(X.numpy(), Y.numpy())) == pytest.approx(3.666667, abs=1e-6)
    assert float(coral(X, Y, "deep")) == pytest.approx(0.444444, abs=1e-6)
    assert float(coral(X, X)) == 0
    with pytest.raises(ValueError, match="at least two rows"):
        coral(X[:1], Y)


MOVES = [[0.5, 0.2], [0.1, 0.6], [0.3, 0.3]]


def test_grace_vectors():
    weights = consistent_weights(MOVES, [0.5, 0.3, 0.2])
    assert weights.tolist() == pytest.approx([0.490676, 0.272826, 0.236498], abs=1e-6)
    local = np.array([[0.5, 0.8], [0.9, 0.4], [0.7, 0.7]])
    assert (weights @ local).tolist() == pytest.approx([0.65643, 0.66722], abs=1e-6)
    apart = consistent_weights([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.2]], [0.5, 0.3, 0.2])
    assert apart.tolist() == pytest.approx([0.002537, 0.896956, 0.100507], abs=1e-6)


def test_grace_identical_zero_and_lonely_moves():
    assert consistent_weights([MOVES[0]] * 3, [0.5, 0.3, 0.2]).tolist() == pytest.approx([0.5, 0.3, 0.2])
    assert consistent_weights([MOVES[0]], [1.0]).tolist() == [1.0]
    assert consistent_weights([[0.0, 0.0]] * 2, [0.6, 0.4]).tolist() == [0.6, 0.4]


ONE = ("model.options={depth: 1}", "rounds=2", "tuning.dropout=0")


def test_only_da_without_alignment_is_fedavg(short):
    plain = short("fedavg", *ONE)
    assert short("bgp", *ONE, "local.align_weight=0", "local.meta_update=none").sha256 == plain.sha256
    steps = (*ONE, "train.batch_size=8")  # the pull is zero in the first step of a round
    assert short("bgp", *steps, "local.meta_update=none").sha256 != short("fedavg", *steps).sha256


def test_ditto_global_copies_are_fedavg_and_its_pull_matters(short):
    plain = short("fedavg", *ONE)
    runs = [short("ditto", *ONE, f"local.lam={lam}") for lam in (0, 5)]
    assert all(run.sha256 == plain.sha256 for run in runs)
    alone = short("local", *ONE)
    personal = [row["accuracy"] for row in read_rows(alone.path)]
    assert [row["accuracy"] for row in read_rows(runs[0].path)] == personal


def test_ditto_vector():
    """One step of the personal and of the global copy, with the gradients given."""
    received = {"p": torch.tensor([0.2, 0.4])}
    for start, slope, lam, expected in (
        ([0.5, -1.0], [0.3, -0.6], 0.5, [0.455, -0.87]),
        ([0.2, 0.4], [0.1, 0.2], 0.0, [0.19, 0.38]),
    ):
        own = {"p": torch.nn.Parameter(torch.tensor(start))}
        personal_loss((torch.tensor(slope) * own["p"]).sum(), own, received, lam).backward()
        torch.optim.SGD(own.values(), lr=0.1).step()
        assert own["p"].tolist() == pytest.approx(expected, abs=1e-6)


def test_second_order_and_restore_run_and_differ(short):
    names = ("sequential", "fo_restore", "second_order")
    hashes = {short("bgp", *ONE, "rounds=1", f"local.meta_update={name}").sha256 for name in names}
    assert len(hashes) == 3


def test_bgp_with_batch_norm_leaves_messages_alone(short):
    small = ("model.size=32", "model.options={}", "tuning=full", "rounds=1", "data.limit=12")
    run = short("bgp", "model=timm", "model.name=resnet10t", *small)
    assert all(torch.isfinite(v).all() for v in run.params.values())


def test_mediabrains_ditto_averages_the_clients_own_models(short):
    """One model per client: the global one is the mean of those, and they are never replaced by it."""
    few = (*ONE, "data.limit=12")
    runs = {v: short("ditto", *few, f"local.variant={v}", "local.lam=0") for v in ("official", "mediabrain")}
    alone = [row["accuracy"] for row in read_rows(short("local", *few).path)]
    assert all([row["accuracy"] for row in read_rows(run.path)] == alone for run in runs.values())
    assert runs["official"].sha256 != runs["mediabrain"].sha256


def test_bgp_without_pull_is_two_plain_steps_and_plain_sgd_is_an_option():
    w = [torch.nn.Parameter(torch.tensor([0.5, 0.25])) for _ in range(3)]
    adam = torch.optim.Adam([w[0]], lr=0.1)
    meta_step(adam, lambda: quadratic(w[0], A1, C1), lambda: quadratic(w[0], A2, C2), "sequential")
    twice = torch.optim.Adam([w[1]], lr=0.1)
    for a, c in ((A1, C1), (A2, C2)):
        twice.zero_grad()
        quadratic(w[1], a, c).backward()
        twice.step()
    assert torch.equal(w[0], w[1])
    adam = torch.optim.Adam([w[2]], lr=0.1)
    losses = (lambda: quadratic(w[2], A1, C1), lambda: 0 * quadratic(w[2], A2, C2))
    meta_step(adam, *losses, "sequential", inner="plain_sgd")
    assert w[2].tolist() == pytest.approx([0.5375, 0.15], abs=1e-6)


def test_the_size_of_the_alignment_is_logged(short):
    run = short("bgp", *ONE, "train.batch_size=4", "data.limit=12")
    rows = pq.read_table(run.path / "clients.parquet").to_pylist()
    sizes = [row["value"] for row in rows if row["model"] == "train" and row["metric"] == "alignment"]
    assert len(sizes) == 2 * 5
    assert all(size > 0 for size in sizes)


def test_fedprox_with_the_plain_distance(short):
    few = (*ONE, "train.batch_size=4", "rounds=1", "data.limit=12")
    plain, none = short("fedavg", *few), short("fedprox", *few, "local.mu=0", "local.form=norm")
    assert plain.sha256 == none.sha256
    norm, squared = (short("fedprox", *few, "local.mu=1", f"local.form={f}") for f in ("norm", "squared"))
    assert len({plain.sha256, norm.sha256, squared.sha256}) == 3
    assert all(torch.isfinite(v).all() for v in norm.params.values())


def test_the_reference_leaves_a_clip_model_as_it_was(short):
    """Its blocks have two names; the received parameters must not stay in the model."""
    few = ("model=clip_mini", "model.options={depth: 1}", "rounds=2", "data.limit=12", "compare=[]")
    run = short("bgp", *few, "train.batch_size=4")
    plain = short("bgp", *few, "train.batch_size=4", "local.align_weight=0")
    assert all(torch.isfinite(v).all() for v in run.params.values())
    assert run.sha256 != plain.sha256
    still = short("bgp", *few, "train.batch_size=4", "local.align_weight=1.0e-30")  # looks, but does not pull
    for name, value in plain.params.items():
        torch.testing.assert_close(still.params[name], value, rtol=1e-4, atol=1e-6)
