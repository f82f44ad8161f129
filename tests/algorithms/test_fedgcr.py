"""FedGCR's formulas against the vectors of the specification (section 9), its reductions and its rounds."""

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from algorithms.fedgc import authors_loss_weights
from algorithms.fedgcr import (
    beta,
    client_representation,
    group_customization_loss,
    group_weights,
    representation_alignment_loss,
)
from algorithms.fedgr import quantized
from rayfed.errors import ClientError, ConfigError

N, L, GROUPS = [100, 200, 50, 150, 500], [0.8, 0.6, 1.5, 1.2, 0.3], [0, 0, 1, 1, 0]


ROUNDS = (1, 2, 3, 4, 5, 10, 20, 50)


SHARES = [0.1, 0.2, 0.05, 0.15, 0.5]


def near(value, expected, tol=1e-6):
    np.testing.assert_allclose(np.asarray(value, dtype=float), expected, atol=tol, rtol=0)


@pytest.mark.parametrize(
    ("delta", "gamma", "shift", "expected"),
    [
        (0.5, 0.5, 0, [0, 0.25, 0.375, 0.4375, 0.46875, 0.499023, 0.499999, 0.5]),
        (0.9, 0.5, 0, [0, 0.45, 0.675, 0.7875, 0.84375, 0.898242, 0.899998, 0.9]),
        (0.1, 0.5, 0, [0, 0.05, 0.075, 0.0875, 0.09375, 0.099805, 0.1, 0.1]),
        (0.5, 0.9, 1, [0.05, 0.095, 0.1355, 0.17195, 0.204755, 0.325661, 0.439212, 0.497423]),
        (0.7, 0.9, 1, [0.07, 0.133, 0.1897, 0.24073, 0.286657, 0.455925, 0.614896, 0.696392]),
    ],
)
def test_v1_beta(delta, gamma, shift, expected):
    near([beta(r + shift, delta, gamma) for r in ROUNDS], expected)


@pytest.mark.parametrize(
    ("mean", "share", "q", "expected"),
    [
        ("simple", 0.0, 1, [0.125613, 0.141315, 0.220805, 0.423945, 0.088322]),
        ("simple", 0.25, 1, [0.103284, 0.134170, 0.204649, 0.439305, 0.118591]),
        ("simple", 0.5, 1, [0.083551, 0.125326, 0.186607, 0.447857, 0.156658]),
        ("simple", 1.0, 1, [0.051676, 0.103353, 0.146647, 0.439942, 0.258382]),
        ("data", 0.0, 1, [0.125613, 0.141315, 0.220805, 0.423945, 0.088322]),
        ("data", 0.25, 1, [0.096684, 0.125596, 0.211881, 0.454828, 0.111012]),
        ("data", 0.5, 1, [0.073183, 0.109775, 0.199948, 0.479875, 0.137219]),
        ("data", 1.0, 1, [0.040022, 0.080044, 0.169956, 0.509867, 0.200111]),
        ("simple", 0.5, 0, [0.103239, 0.178816, 0.109098, 0.292742, 0.316105]),
        ("simple", 0.5, 2, [0.054643, 0.070983, 0.257938, 0.553695, 0.062741]),
    ],
)
@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_v2_group_weights(mean, share, q, expected, kind):
    found = group_weights(kind(N), kind(L), kind(GROUPS), share, q, mean)
    near(found, expected)
    assert found.dtype in (np.float64, torch.float64)
    assert float(found.sum()) == pytest.approx(1, abs=1e-12)


def test_v2_authors_losses():
    near([quantized(loss) for loss in L], [0.8, 0.602410, 1.515152, 1.204819, 0.3003])
    weights = group_weights(N, [quantized(loss) for loss in L], GROUPS, 0.05, 1, "data")
    near(weights, [0.118305, 0.138024, 0.221612, 0.430130, 0.091930])
    near(group_weights(N, [1.0] * 5, GROUPS, 0.3, 1), SHARES)


def test_v2_aggregate():
    rows = np.array([[1, 0], [0, 1], [2, 2], [-1, 1], [0.5, -0.5]])
    near(group_weights(N, L, GROUPS, 0.5, 1) @ rows, [0.087237, 0.868069])


def test_weights_reduce_as_they_should():
    assert group_weights(N, L, GROUPS, 0.7, -1).tolist() == SHARES  # FedAvg needs the exponent q + 1 = 0
    raw = np.array(N) * np.array(L)
    near(group_weights(N, L, GROUPS, 0.0, 0), raw / raw.sum(), 1e-15)  # delta = 0: individual losses only
    near(group_weights(N, L, [0] * 5, 1.0, 3), SHARES, 1e-15)  # one group whose loss alone counts
    near(group_weights(N, L, range(5), 0.9, 1), group_weights(N, L, GROUPS, 0.0, 1), 1e-12)  # everybody alone
    order = [3, 0, 4, 2, 1]
    moved = group_weights(*(np.array(v)[order] for v in (N, L, GROUPS)), 0.5, 1)
    near(moved, group_weights(N, L, GROUPS, 0.5, 1)[order], 1e-12)


def test_odd_losses_follow_the_policy():
    zero = group_weights(N, [0.0, *L[1:]], GROUPS, 0.5, 1)
    assert 0 < zero[0] < 1e-6
    assert zero.sum() == pytest.approx(1)
    near(group_weights(N, [0.0] * 5, GROUPS, 0.5, 1), SHARES, 1e-12)
    assert np.isfinite(group_weights(N, [1e300, *L[1:]], GROUPS, 0.5, 1)).all()
    for bad in (float("nan"), float("inf"), -1.0):
        with pytest.raises(ValueError, match="not a finite number"):
            group_weights(N, [bad, *L[1:]], GROUPS, 0.5, 1)


def test_v3_client_representation():
    h = [[1.0, 0], [3, 0], [5, 0], [0, 2], [0, 4], [-6, 6]]
    y = [0, 0, 0, 1, 1, 4]
    for kind in (np.array, torch.tensor):
        near(client_representation(kind(h), kind(y)), [-1, 3])
    near(
        client_representation(torch.tensor(h)[[5, 2, 4, 0, 1, 3]], torch.tensor(y)[[5, 2, 4, 0, 1, 3]]),
        [-1, 3],
    )


H = [[1.0, 0, 0], [0, 1, 0], [0.5, 0.5, 1]]


PAST = [0.8, 0.3, 0.1]


BATCH = [[0.9, 0.2, -0.1], [0.1, 0.4, 0.7]]


@pytest.mark.parametrize(
    ("centres", "group", "past", "similarity", "each"),
    [
        (H, 0, PAST, "cosine", [0.927260, 2.308872]),
        (H, 0, PAST, "dot", [0.885509, 2.272230]),
        (H, 2, PAST, "cosine", [2.075844, 0.645484]),
        ([*H[:2], [0, 0, 0]], 0, PAST, "cosine", [0.856137, 1.716979]),
        (H, 0, H[0], "cosine", [0.931404, 2.237520]),
    ],
)
def test_v4_group_customization(centres, group, past, similarity, each):
    for kind in (np.array, lambda v: torch.tensor(v, dtype=torch.float64)):
        args = (kind(centres), group, kind(past), 0.5, similarity)
        near([group_customization_loss(kind([row]), *args) for row in BATCH], each)
        near(group_customization_loss(kind(BATCH), *args), np.mean(each))


Z, Z0 = [[0.5, 1, -0.5], [1.0, 0, 1]], [[0.4, 0.9, -0.2], [0.5, 0.5, 1]]


ZP = [[-0.3, 0.8, 0.1], [1, -0.2, 0.9]]


@pytest.mark.parametrize(
    ("tau", "similarity", "each"),
    [
        (0.5, "cosine", [0.367741, 0.822277]),
        (0.5, "dot", [0.263282, 1.171101]),
        (1.0, "cosine", [0.510836, 0.755867]),
    ],
)
def test_v4_representation_alignment(tau, similarity, each):
    found = [
        representation_alignment_loss([z], [a], [b], tau, similarity)
        for z, a, b in zip(Z, Z0, ZP, strict=True)
    ]
    near(found, each)
    near(representation_alignment_loss(*map(torch.tensor, (Z, Z0, ZP)), tau, similarity), np.mean(each))


def test_v4_the_whole_objective():
    gc = group_customization_loss(BATCH, H, 0, PAST, 0.5)
    near(1.234567 + 0.5 * gc + 0.1 * representation_alignment_loss(Z, Z0, ZP, 0.5), 2.103101)
    pull, align = authors_loss_weights(11, 50)
    near(1.234567 + pull * gc + align * representation_alignment_loss(Z, Z0, ZP, 1.0), 1.363319)


def test_only_h_and_z_get_gradients():
    h, past = torch.tensor(BATCH, requires_grad=True), torch.tensor(PAST, requires_grad=True)
    group_customization_loss(h, torch.tensor(H), 0, past, 0.5).backward()
    assert h.grad.abs().sum() > 0
    assert past.grad is None


def test_rounds_share_centres_from_the_second_on(short):
    result = short("fedgcr")
    history = result.history
    width, classes = 64, 10
    trained = 4 * width + (width * 256 + 256) + (256 * width + width) + (width * classes + classes)
    assert sum(v.numel() for v in result.params.values()) == trained
    down = history.bytes_down.tolist()
    assert history.bytes_up.tolist() == [5 * 4 * (trained + width)] * 3
    assert down[0] == 5 * 4 * trained
    assert down[1] > down[0]  # centres and the own representation
    assert history.beta.tolist() == [0, 0.25, 0.375]
    assert history.cluster_accuracy.between(0, 1).all()
    rows = pq.read_table(result.path / "clusters.parquet").to_pylist()
    assert {"round", "client", "domain", "cluster", "weight", "loss", "representation"} == set(rows[0])
    assert len(rows[0]["representation"]) == width
    for number in (1, 2, 3):
        assert sum(row["weight"] for row in rows if row["round"] == number) == pytest.approx(1)


def test_exponent_zero_is_fedavg(short):
    plain = short("fedavg", "tuning=gc_prompt")
    assert short("fedgr", "tuning=gc_prompt", "server.q=-1").sha256 == plain.sha256
    assert short("fedgr", "tuning=gc_prompt").sha256 != plain.sha256
    none = ("local.lambda1=0", "local.lambda2=0")
    assert short("fedgc", *none).sha256 == plain.sha256


@pytest.mark.parametrize("groups", [1, 5, 9])
def test_any_number_of_groups(short, groups):
    assert short("fedgcr", f"server.num_groups={groups}").history.clusters.max() <= min(groups, 5)


def test_authors_options_run(short):
    server = (
        "gamma=0.9",
        "beta_start=0",
        "group_mean=data",
        "first_losses=ones",
        "quantize=true",
        "rep_batches=3",
    )
    local = (
        "lambda_mode=authors",
        "tau_alignment=1",
        "z0_model=stale",
        "first_loss=both",
        "optimizer=authors",
    )
    options = [f"server.{text}" for text in server] + [f"local.{text}" for text in local]
    options += ["local.keep_optimizer=true", "server.empty_groups=zero", "tuning.prompt_mix=scramble"]
    result = short("fedgcr", *options, "tuning.feature_dropout=0.1")
    assert result.history.beta.iloc[0] == pytest.approx(0.05)
    rows = pq.read_table(result.path / "clusters.parquet").to_pylist()
    assert len({round(row["weight"] * 1e9) for row in rows if row["round"] == 2}) > 1


def test_local_representations_partial_cohorts_and_lonely_clients(short):
    imbalanced = ("data.partition.scheme=imbalanced", "data.partition.factor=5", "data.limit=200")
    result = short("fedgcr", *imbalanced, "server.rep_model=local", "clients_per_round=4")
    rows = pq.read_table(result.path / "clusters.parquet").to_pylist()
    assert len(rows) == 12


def test_any_tuning_has_a_representation(short):
    for tuning in ("lora", "head", "visual_prompt"):
        assert short("fedgr", f"tuning={tuning}", "rounds=1").metrics["cluster_accuracy"] > 0


def test_parts_that_do_not_fit_are_refused(short):
    with pytest.raises(ConfigError, match="prompts by image"):
        short("fedgcr", "tuning=lora")
    with pytest.raises(ConfigError, match="centers"):
        short("fedgc", "server.name=fedavg")


def test_a_broken_loss_names_its_client(short):
    with pytest.raises(ClientError, match=r"c1-inverted.*loss is nan"):
        short("tests.algorithms.test_fedgcr:BROKEN")


def _broken():
    from dataclasses import dataclass, replace
    from functools import partial

    from algorithms._losses import RECEIVED, LossWeighted
    from rayfed.federation.method import Method
    from rayfed.federation.visit import fit

    def lie(client, sent, local):
        update = fit(client, sent, local)
        return replace(update, metrics={RECEIVED: float("nan") if "inverted" in client.id else 1.0})

    @dataclass(frozen=True)
    class Broken(LossWeighted):
        def visit(self, local):
            return partial(lie, local=local)

        def aggregate(self, state, cohort, updates):
            return self.average(state, updates, self.losses(cohort, updates))

    return Method(server=Broken)


BROKEN = _broken()
