"""BGP, Per-FedAvg, GRACE and Ditto: hand-worked steps and reductions."""

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from algorithms._meta import meta_step
from algorithms.ditto import personal_loss
from algorithms.fft_gp import coral
from algorithms.grace import consistent_weights
from rayfed.federation.params import sq_distance
from rayfed.record.readers import read_rows
from tests.rounding import equally_near, near
from tests.vectors import vector

V6 = vector("fedclip_fftgp", "V6")
V7 = vector("fedclip_fftgp", "V7")
V8 = vector("fedclip_fftgp", "V8")
V9 = vector("fedclip_fftgp", "V9")
V11 = vector("fedclip_fftgp", "V11")
A1, C1 = map(torch.tensor, V8.inputs["train"])
A2, C2 = map(torch.tensor, V8.inputs["test"])
W = V8.inputs["w"]
X = torch.tensor(V6.inputs["x"], dtype=torch.float64)
Y = torch.tensor(V6.inputs["y"], dtype=torch.float64)


def quadratic(w, a, c):
    return (w - c) @ a @ (w - c) / 2


@pytest.mark.parametrize("update", ["sequential", "fo_restore", "second_order"])
def test_v8_meta_steps_on_quadratics(update):
    w = torch.nn.Parameter(torch.tensor(W))
    outer = V8.inputs["outer_rate"]
    optimizer = torch.optim.SGD([w], lr=outer)
    losses = (lambda: quadratic(w, A1, C1), lambda: quadratic(w, A2, C2))
    meta_step(optimizer, *losses, update, V8.inputs["inner_rate"])
    V8.matches(w, V8.expected[update])
    assert optimizer.param_groups[0]["lr"] == outer


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_first_step_of_maml_leaves_the_momentum_alone(momentum):
    """Two steps of v <- momentum v + grad f_te(w - a grad f_tr(w)), w <- w - b v, in NumPy."""
    a1, c1, a2, c2 = (np.array(v, dtype=float) for v in (*V8.inputs["train"], *V8.inputs["test"]))
    inner, outer = (V8.inputs[name] for name in ("inner_rate", "outer_rate"))
    w = torch.nn.Parameter(torch.tensor(W, dtype=torch.float64))
    optimizer = torch.optim.SGD([w], lr=outer, momentum=momentum)
    losses = (
        lambda: quadratic(w, A1.double(), C1.double()),
        lambda: quadratic(w, A2.double(), C2.double()),
    )
    x = np.array(W, dtype=float)
    v = np.zeros(2)
    for step in range(2):
        meta_step(optimizer, *losses, "fo_restore", inner)
        v = momentum * v + a2 @ (x - inner * a1 @ (x - c1) - c2)
        x = x - outer * v
        near(w, x, 2 * 20, size=4.0, precision=torch.float64)  # twenty operations in each step
        if not step:
            V8.matches(w, V8.expected["fo_restore"])
    assert optimizer.param_groups[0]["momentum"] == momentum
    if momentum:
        near(optimizer.state[w]["momentum_buffer"], v, 2 * 20, size=4.0, precision=torch.float64)


def test_the_first_step_of_maml_leaves_the_moments_of_adam_alone():
    w = torch.nn.Parameter(torch.tensor(W))
    optimizer = torch.optim.Adam([w], lr=0.1)
    meta_step(
        optimizer, lambda: quadratic(w, A1, C1), lambda: (w * torch.tensor([2.0, -1.0])).sum(), "fo_restore"
    )
    state = optimizer.state[w]
    assert state["step"] == 1
    assert state["exp_avg"].tolist() == pytest.approx([0.2, -0.1])


def test_v8_gradients():
    w = torch.tensor(W, requires_grad=True)
    [first] = torch.autograd.grad(quadratic(w, A1, C1), w)
    V8.matches(first, V8.expected["gradient_train"])
    moved = (w - V8.inputs["inner_rate"] * first).detach().requires_grad_()
    V8.matches(moved, V8.expected["after_train"])
    V8.matches(torch.autograd.grad(quadratic(moved, A2, C2), moved)[0], V8.expected["gradient_test"])


@pytest.mark.parametrize("update", ["sequential", "fo_restore"])
def test_v9_meta_update_with_alignment(update):
    pairs = [[torch.tensor(v, dtype=torch.float64) for v in V9.inputs[name]] for name in ("train", "test")]
    phi = torch.nn.Parameter(torch.tensor(V9.inputs["phi"], dtype=torch.float64))

    def task(x, y):
        return (phi * x - y).square().mean() / 2

    def second():
        x = pairs[1][0]
        pull = coral((V9.inputs["phi_received"] * x)[:, None], (phi * x)[:, None])
        return task(*pairs[1]) + V9.inputs["weight"] * pull

    V9.matches(torch.autograd.grad(task(*pairs[0]), phi)[0], V9.expected["gradient_train"])
    optimizer = torch.optim.SGD([phi], lr=V9.inputs["rate"])
    meta_step(optimizer, lambda: task(*pairs[0]), second, update)
    V9.matches(phi, V9.expected[update])


def test_v6_coral():
    V6.matches(coral(X, Y), V6.expected["domainbed"])
    V6.matches(coral(X.numpy(), Y.numpy()), V6.expected["domainbed"])
    V6.matches(coral(X, Y, "deep"), V6.expected["deep"])
    assert float(coral(X, X)) == 0
    with pytest.raises(ValueError, match="at least two rows"):
        coral(X[:1], Y)


SHARES = V11.inputs["shares"]
MOVES = np.subtract(V11.inputs["start"], V11.inputs["trained"])
OPPOSED = np.array(V11.inputs["opposed_moves"])


def mean_cosines(moves):
    """Of each move with the others."""
    unit = moves / np.linalg.norm(moves, axis=1, keepdims=True)
    return ((unit @ unit.T).sum(1) - 1) / (len(moves) - 1)


def test_v11_weights_of_grace():
    V11.matches(MOVES, V11.expected["moves"])
    weights = consistent_weights(MOVES, SHARES)
    V11.matches(weights, V11.expected["weights"])
    V11.matches(weights @ np.array(V11.inputs["trained"]), V11.expected["params"])
    V11.matches(consistent_weights(OPPOSED, SHARES), V11.expected["opposed_weights"])


def test_v11_weights_are_shares_times_mean_cosines():
    """Where a mean cosine is negative, all are shifted until the smallest is 0.001."""
    shifted = np.array(V11.expected["opposed_shifted"])
    V11.matches(mean_cosines(MOVES), V11.expected["cosines"])
    V11.matches(mean_cosines(OPPOSED), V11.expected["opposed_cosines"])
    V11.matches(mean_cosines(OPPOSED) - mean_cosines(OPPOSED).min() + 1e-3, shifted)
    for moves, cosines in ((MOVES, np.array(V11.expected["cosines"])), (OPPOSED, shifted)):
        raw = cosines * SHARES
        V11.matches(consistent_weights(moves, SHARES), raw / raw.sum())


def test_grace_identical_zero_and_lonely_moves():
    assert consistent_weights([MOVES[0]] * 3, SHARES).tolist() == pytest.approx([0.5, 0.3, 0.2])
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


def test_v7_one_step_of_ditto():
    """One step of the personal and of the global copy, with the gradients given."""
    received = {"p": torch.tensor(V7.inputs["received"])}
    for start, gradient, lam, expected in (
        ("personal", "gradient_personal", V7.inputs["lam"], "personal"),
        ("received", "gradient_received", 0.0, "trained"),
    ):
        own = {"p": torch.nn.Parameter(torch.tensor(V7.inputs[start]))}
        task = (torch.tensor(V7.inputs[gradient]) * own["p"]).sum()
        personal_loss(task, own, received, lam).backward()
        torch.optim.SGD(own.values(), lr=V7.inputs["rate"]).step()
        V7.matches(own["p"], V7.expected[expected])


def test_v7_one_step_of_fedprox():
    """FedProx pulls the trained copy as Ditto pulls the personal one, if it starts there."""
    start = torch.nn.Parameter(torch.tensor(V7.inputs["personal"]))
    received = {"p": torch.tensor(V7.inputs["received"])}
    task = (torch.tensor(V7.inputs["gradient_personal"]) * start).sum()
    (task + V7.inputs["lam"] / 2 * sq_distance({"p": start}, received)).backward()
    torch.optim.SGD([start], lr=V7.inputs["rate"]).step()
    V7.matches(start, V7.expected["fedprox"])


def test_second_order_and_restore_run_and_differ(short):
    names = ("sequential", "fo_restore", "second_order")
    hashes = {short("bgp", *ONE, "rounds=1", f"local.meta_update={name}").sha256 for name in names}
    assert len(hashes) == 3


@pytest.mark.slow
@pytest.mark.steady
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
    near(w[2], [0.5375, 0.15], 20, size=1.0)


def test_the_size_of_the_alignment_is_logged(short):
    run = short("bgp", *ONE, "train.batch_size=4", "data.limit=12")
    rows = pq.read_table(run.path / "clients.parquet").to_pylist()
    sizes = [row["value"] for row in rows if row["model"] == "train" and row["metric"] == "alignment"]
    assert len(sizes) == 2 * 5
    assert all(size > 0 for size in sizes)


def test_fedprox_with_the_plain_distance(short):
    few = (*ONE, "train.batch_size=4", "rounds=1", "data.limit=12")
    plain = short("fedavg", *few)
    none = short("fedprox", *few, "local.mu=0", "local.form=norm")
    assert plain.sha256 == none.sha256
    norm, squared = (short("fedprox", *few, "local.mu=1", f"local.form={f}") for f in ("norm", "squared"))
    assert len({plain.sha256, norm.sha256, squared.sha256}) == 3
    assert all(torch.isfinite(v).all() for v in norm.params.values())


def test_the_reference_leaves_a_clip_model_as_it_was(short, exact):
    """Its blocks have two names; the received parameters must not stay in the model."""
    few = ("model=clip_mini", "model.options={depth: 1}", "rounds=2", "data.limit=12", "compare=[]")
    run = short("bgp", *few, "train.batch_size=4")
    plain = short("bgp", *few, "train.batch_size=4", "local.align_weight=0")
    assert all(torch.isfinite(v).all() for v in run.params.values())
    assert run.sha256 != plain.sha256
    still = short("bgp", *few, "train.batch_size=4", "local.align_weight=1.0e-30")  # looks, but does not pull
    judge = exact("bgp", *few, "train.batch_size=4", "local.align_weight=0")
    equally_near(plain.params, still.params, judge.params)
