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
from algorithms.fedgr import quantize_loss
from rayfed.errors import ClientError, ConfigError
from tests import rounding
from tests.pretended import pretended
from tests.vectors import vector

V1 = vector("fedgcr", "V1")
V2 = vector("fedgcr", "V2")
V3 = vector("fedgcr", "V3")
V4 = vector("fedgcr", "V4")
N = V2.inputs["num_examples"]
L = V2.inputs["losses"]
GROUPS = V2.inputs["groups"]
SHARES = V2.expected["weights_of_equal_losses"]
MEANS = {"simple": "simple", "data_weighted": "data"}
"""Our names of the two means over the clients of a group."""


def near(value, expected):
    """Two sums over five clients, two powers and ten other operations, in float64."""
    rounding.near(value, expected, 30, 1.0, torch.float64)


@pytest.mark.parametrize(
    ("schedule", "expected"), zip(V1.inputs["schedules"], V1.expected["beta"], strict=True)
)
def test_v1_beta(schedule, expected):
    rounds = [r + schedule["rounds_ahead"] for r in V1.inputs["rounds"]]
    V1.matches([beta(r, schedule["delta"], schedule["gamma"]) for r in rounds], expected)


@pytest.mark.parametrize(("case", "expected"), zip(V2.inputs["cases"], V2.expected["weights"], strict=True))
@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_v2_group_weights(case, expected, kind):
    found = group_weights(kind(N), kind(L), kind(GROUPS), case["beta"], case["q"], MEANS[case["group_mean"]])
    V2.matches(found, expected)
    assert found.dtype in (np.float64, torch.float64)
    near(found.sum(), 1.0)


@pytest.mark.parametrize("mean", MEANS)
def test_v2_losses_of_groups(mean):
    """With beta 1 and q 0 a client weighs as much as its examples times the loss of its group."""
    raw = np.array(N) * V2.expected["group_losses"][mean]
    V2.matches(group_weights(N, L, GROUPS, 1.0, 0, MEANS[mean]), raw / raw.sum())


def test_v2_weights_are_normalised():
    raw = np.array(V2.expected["not_normalised"])
    known = rounding.printed(V2.digits) * (1 + len(raw)) / raw.sum()  # of a quotient of printed numbers
    found = group_weights(N, L, GROUPS, 0.5, 1)
    rounding.near(found, raw / raw.sum(), 16, precision=torch.float64, known=known)


def test_v2_authors_losses():
    losses = [quantize_loss(loss) for loss in L]
    V2.matches(losses, V2.expected["quantized_losses"])
    case = V2.inputs["quantized_case"]
    weights = group_weights(N, losses, GROUPS, case["beta"], case["q"], MEANS[case["group_mean"]])
    V2.matches(weights, V2.expected["quantized_weights"])
    V2.matches(group_weights(N, [1.0] * 5, GROUPS, 0.3, 1), SHARES)


def test_v2_aggregate():
    rows = np.array(V2.inputs["params"])
    V2.matches(group_weights(N, L, GROUPS, 0.5, 1) @ rows, V2.expected["aggregate"])


def test_weights_reduce_as_they_should():
    assert group_weights(N, L, GROUPS, 0.7, -1).tolist() == SHARES  # FedAvg needs the exponent q + 1 = 0
    raw = np.array(N) * np.array(L)
    near(group_weights(N, L, GROUPS, 0.0, 0), raw / raw.sum())  # delta = 0: individual losses only
    near(group_weights(N, L, [0] * 5, 1.0, 3), SHARES)  # one group whose loss alone counts
    near(group_weights(N, L, range(5), 0.9, 1), group_weights(N, L, GROUPS, 0.0, 1))  # everybody alone
    order = [3, 0, 4, 2, 1]
    moved = group_weights(*(np.array(v)[order] for v in (N, L, GROUPS)), 0.5, 1)
    near(moved, group_weights(N, L, GROUPS, 0.5, 1)[order])


def test_odd_losses_follow_the_policy():
    zero = group_weights(N, [0.0, *L[1:]], GROUPS, 0.5, 1)
    assert 0 < zero[0] < 1e-6
    assert zero.sum() == pytest.approx(1)
    near(group_weights(N, [0.0] * 5, GROUPS, 0.5, 1), SHARES)
    assert np.isfinite(group_weights(N, [1e300, *L[1:]], GROUPS, 0.5, 1)).all()
    for bad in (float("nan"), float("inf"), -1.0):
        with pytest.raises(ValueError, match="not a finite number"):
            group_weights(N, [bad, *L[1:]], GROUPS, 0.5, 1)


def test_v3_client_representation():
    h = np.array(V3.inputs["h"])
    y = np.array(V3.inputs["labels"])
    expected = V3.expected["representation"]
    for kind in (np.array, torch.tensor):
        V3.matches(client_representation(kind(h), kind(y)), expected)
    order = [5, 2, 4, 0, 1, 3]
    V3.matches(client_representation(torch.tensor(h[order]), torch.tensor(y[order])), expected)
    V3.matches(
        [client_representation(h[y == c], y[y == c]) for c in np.unique(y)], V3.expected["class_means"]
    )


def test_a_representation_needs_no_wait_of_a_device():
    h, y = torch.tensor(V3.inputs["h"]), torch.tensor(V3.inputs["labels"])
    with pretended() as device:
        there = h.to(device.name), y.to(device.name)
        device.counts.clear()
        found = client_representation(*there, int(y.max()) + 3)
        assert device.counts.waits == 0
    V3.matches(found.inner, V3.expected["representation"])


def test_v3_every_class_that_is_present_counts_the_same():
    V3.matches(np.mean(V3.inputs["h"], axis=0), V3.expected["not_the_sample_mean"])
    V3.matches(np.sum(V3.expected["class_means"], axis=0) / 10, V3.expected["not_over_all_classes"])
    found = client_representation(np.array(V3.inputs["h"]), np.array(V3.inputs["labels"]))
    for other in ("not_the_sample_mean", "not_over_all_classes"):
        assert not np.allclose(found, V3.expected[other])


H = V4.inputs["centers"]
PAST = V4.inputs["h_previous"]
BATCH = V4.inputs["h"]
TAU = V4.inputs["tau"]
CUSTOMIZATIONS = {
    "cosine, group 0": (H, 0, PAST, "cosine"),
    "dot, group 0": (H, 0, PAST, "dot"),
    "cosine, group 2": (H, 2, PAST, "cosine"),
    "cosine, group 0, center of group 2 is zero": ([*H[:2], [0, 0, 0]], 0, PAST, "cosine"),
    "cosine, group 0, previous is the center": (H, 0, H[0], "cosine"),
}


@pytest.mark.parametrize("case", V4.expected["group_customization"])
def test_v4_group_customization(case):
    centers, group, past, similarity = CUSTOMIZATIONS[case]
    each = V4.expected["group_customization"][case]
    mean = V4.expected["group_customization_mean"].get(case, np.mean(each))
    for kind in (np.array, lambda v: torch.tensor(v, dtype=torch.float64)):
        args = (kind(centers), group, kind(past), TAU, similarity)
        V4.matches([group_customization_loss(kind([row]), *args) for row in BATCH], each)
        V4.matches(group_customization_loss(kind(BATCH), *args), mean)


Z = [V4.inputs[name] for name in ("z", "z_received", "z_previous")]
ALIGNMENTS = {
    "cosine, tau 0.5": (TAU, "cosine"),
    "dot, tau 0.5": (TAU, "dot"),
    "cosine, tau 1.0": (V4.inputs["tau_authors"], "cosine"),
}


@pytest.mark.parametrize("case", V4.expected["alignment"])
def test_v4_representation_alignment(case):
    each = [
        representation_alignment_loss(*([v] for v in row), *ALIGNMENTS[case]) for row in zip(*Z, strict=True)
    ]
    V4.matches(each, V4.expected["alignment"][case])
    mean = representation_alignment_loss(*map(torch.tensor, Z), *ALIGNMENTS[case])
    V4.matches(mean, V4.expected["alignment_mean"][case])


def test_v4_the_whole_objective():
    loss = V4.inputs["cross_entropy"]
    gc = group_customization_loss(BATCH, H, 0, PAST, TAU)
    for lambdas, tau, expected in (
        (V4.inputs["lambdas"], TAU, "objective"),
        (
            authors_loss_weights(V4.inputs["round_index"] + 1, V4.inputs["rounds"]),
            V4.inputs["tau_authors"],
            "objective_authors",
        ),
    ):
        aligned = representation_alignment_loss(*Z, tau)
        V4.matches(loss + lambdas[0] * gc + lambdas[1] * aligned, V4.expected[expected])


def test_only_h_and_z_get_gradients():
    h = torch.tensor(BATCH, requires_grad=True)
    past = torch.tensor(PAST, requires_grad=True)
    group_customization_loss(h, torch.tensor(H), 0, past, 0.5).backward()
    assert h.grad.abs().sum() > 0
    assert past.grad is None


def test_rounds_share_centres_from_the_second_on(short):
    result = short("fedgcr")
    history = result.history
    width = 64
    classes = 10
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


@pytest.mark.slow
@pytest.mark.steady
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
    options += ["train.keep_optimizer=true", "server.empty_groups=zero", "tuning.prompt_mix=scramble"]
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
    with pytest.raises(ConfigError, match="fedgcr, which needs tuning=gc_prompt"):
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
    from rayfed.federation.client_tasks import fit
    from rayfed.federation.method_registry import Method

    def lie(client, sent, local):
        update = fit(client, sent, local)
        return replace(update, metrics={RECEIVED: float("nan") if "inverted" in client.id else 1.0})

    @dataclass(frozen=True)
    class Broken(LossWeighted):
        def training_task(self, local):
            return partial(lie, local=local)

        def aggregate(self, state, cohort, updates):
            return self.average(state, updates, self.losses(cohort, updates))

    return Method(server=Broken)


BROKEN = _broken()
