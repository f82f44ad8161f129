"""Rounds of FedGCR and FFT-GP on three clients of a model with two parameters, against NumPy.

The references are written from the equations: nothing of `algorithms` is used in them.
"""

from functools import partial

import numpy as np
import pytest
import torch

from algorithms.bgp import MetaLocal
from algorithms.faa import METHOD as FAA
from algorithms.faa import FairnessAware
from algorithms.fedgc import METHOD as FEDGC
from algorithms.fedgc import GroupCustomization
from algorithms.fedgr import GroupReweighting
from algorithms.fft_gp import METHOD as FFT_GP
from algorithms.ga import METHOD as GA
from algorithms.ga import GeneralizationAdjustment
from rayfed.federation.local import Local
from tests.algorithms.tiny import (
    RATE,
    START,
    TRAIN,
    VAL,
    Y,
    batch_orders,
    close,
    cross_entropy,
    encode,
    play,
    shares,
    slope,
    task,
)
from tests.rounding import limit


def cosine(a, b):
    return (a * b).sum(-1) / np.maximum(np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1), 1e-8)


def contrast(positive, others):
    """Mean over examples of -log of the positive's share in the exponentials."""
    return float(np.mean(np.log(np.exp(others).sum(1)) - positive))


def represented(w, cid):
    """Eq. 4: mean over classes of the mean output of GC-Net."""
    rows = np.array(TRAIN[cid])
    h = encode(w, rows)[1]
    return np.mean([h[Y[rows] == label].mean(0) for label in np.unique(Y[rows])], axis=0)


GROUPS = np.array([0, 0, 1])
"""Clients a and b are one group, c is the other."""


def objective(w, k, r, known, o):
    """Eq. 6 to 8 for client k in round r, with what it knows: received and earlier models, groups."""
    rows = np.array(list(TRAIN.values())[k])
    z, h = encode(w, rows)
    loss = cross_entropy(z, Y[rows])
    if r == 1:
        return loss + (cross_entropy(z - h, Y[rows]) if o.get("first_loss") == "both" else 0)
    others = [*known["centers"], known["previous"][k]]
    every = np.stack([cosine(h, c) for c in others], axis=1) / o.get("tau", 0.5)
    models = (known["before" if o.get("z0_model") == "stale" else "received"], known["trained"][k])
    pair = np.stack([cosine(z, encode(v, rows)[0]) for v in models], axis=1) / o.get("tau_alignment", 0.5)
    weights = (0.5, o.get("lambda2", 0.1))
    if o.get("lambda_mode") == "authors":
        weights = (0.1 * (0.5 + 0.5 * (r - 1) / 10), 0.05)
    gc = contrast(every[:, o.get("groups", GROUPS)[k]], every)
    return loss + weights[0] * gc + weights[1] * contrast(pair[:, 0], pair)


def fedgcr(rounds, o):
    """Parameters after each round; full batches, one step."""
    theta = START
    known = {}
    out = []
    for r in range(1, rounds + 1):
        known |= {"received": theta}
        goals = [partial(objective, k=k, r=r, known=known, o=o) for k in range(3)]
        trained = [theta - RATE * slope(goal, theta) for goal in goals]
        losses = [task(theta, rows) for rows in TRAIN.values()]
        if o.get("loss") in ("running", "accumulated"):
            sizes = [len(rows) if o["loss"] == "accumulated" else 1 for rows in TRAIN.values()]
            losses = [size * goal(theta) for size, goal in zip(sizes, goals, strict=True)]
        local = o.get("rep_model") == "local"
        reps = [represented(trained[k] if local else theta, cid) for k, cid in enumerate(TRAIN)]
        groups = np.array(o.get("groups", GROUPS))
        centers = [np.mean([reps[k] for k in range(3) if groups[k] == g], axis=0) for g in np.unique(groups)]
        centers += [np.zeros(2)] * o.get("empty", 0)
        known = {"centers": centers, "previous": reps, "trained": trained, "before": theta}
        theta = fedgr_weights(losses, groups, r, o) @ np.stack(trained)
        out.append(theta)
    return out


def fedgr_weights(losses, groups, r, o):
    """Eq. 3 and 5."""
    if o.get("server") == "fedgc":
        return shares()
    delta, gamma, q = o.get("delta", 0.5), o.get("gamma", 0.5), o.get("q", 1.0)
    share = delta * (1 - gamma ** (r - o.get("beta_start", 1)))
    own = np.array(losses)
    if o.get("first_losses") == "ones" and r == 1:
        own = np.ones(3)
    elif o.get("quantize"):
        own = 100 / np.floor(100 / own)
    counts = shares() if o.get("group_mean") == "data" else np.ones(3)
    group = np.array([np.average(own[groups == g], weights=counts[groups == g]) for g in groups])
    raw = shares() * (own ** (1 - share) * group**share) ** (q + 1)
    return raw / raw.sum()


SERVER = {
    *("num_groups", "empty_groups"),
    *("rep_model", "loss", "delta", "gamma", "q", "beta_start", "first_losses", "quantize", "group_mean"),
}


@pytest.mark.parametrize(
    "o",
    [
        {},
        {"rep_model": "local"},
        {"loss": "running"},
        {"loss": "accumulated", "rep_model": "local"},
        {"z0_model": "stale"},
        {"lambda2": 300.0},
        {"z0_model": "stale", "lambda2": 300.0},
        {"tau_alignment": 1.0, "lambda2": 300.0},
        {"first_loss": "both"},
        {"lambda_mode": "authors"},
        {"tau_alignment": 1.0, "tau": 0.3},
        {"gamma": 0.9, "beta_start": 0, "delta": 0.7},
        {"first_losses": "ones", "quantize": True, "group_mean": "data"},
        {"quantize": True, "q": 2.0},
        {"groups": [0, 1, 2], "num_groups": 4, "empty_groups": "zero", "empty": 1},
        {"groups": [0, 1, 2], "num_groups": 4},
        {"server": "fedgc"},
        {"server": "fedgc", "rep_model": "local", "z0_model": "stale"},
    ],
    ids=lambda o: "-".join(f"{key}={value}" for key, value in o.items()) or "paper",
)
def test_three_rounds_of_fedgcr(o):
    given = {key: value for key, value in o.items() if key in SERVER}
    options = {key: value for key, value in o.items() if key not in {*SERVER, "server", "groups", "empty"}}
    local = GroupCustomization(**options)
    server = FEDGC.server if o.get("server") else GroupReweighting
    found = play(server(**{"num_groups": 2, **given}), local, rounds=3)
    assert [row["cluster"] for row in found[0][1].tables["clusters"]] == [*o.get("groups", GROUPS)]
    for (params, _), expected in zip(found, fedgcr(3, o), strict=True):
        close(params, expected)


@pytest.mark.parametrize("kind", ["gmm", "kmeans"])
def test_the_groups_are_those_of_the_chosen_algorithm(kind):
    found = play(GroupReweighting(num_groups=3, clustering=kind), GroupCustomization())
    assert sorted(row["cluster"] for row in found[0][1].tables["clusters"]) == [0, 1, 2]
    far = play(GroupReweighting(num_groups=2, clustering=kind), GroupCustomization(), rounds=2)
    assert [row["cluster"] for row in far[1][1].tables["clusters"]] == [0, 0, 1]


def test_representations_of_some_batches_are_those_of_random_examples():
    """One batch of two: the first permutation of the client's generator chooses the examples."""
    server = GroupReweighting(num_groups=2, rep_batches=1)
    tables = play(server, GroupCustomization(), batch_size=2)[0][1].tables
    for row, (cid, rows) in zip(tables["clusters"], TRAIN.items(), strict=True):
        chosen = np.array(rows)[batch_orders(cid, 0, 1)[0][:2]]
        h = encode(START, chosen)[1]
        expected = np.mean([h[Y[chosen] == label].mean(0) for label in np.unique(Y[chosen])], axis=0)
        close(row["representation"], expected)


def test_the_optimizer_of_the_authors():
    """AdamW: a step of 1e-3 along the signs, and decay 1e-2 of what is neither prompt nor GC-Net."""
    server = GroupReweighting(num_groups=2, q=-1.0)
    params = play(server, GroupCustomization(optimizer="authors"))[0][0]
    slopes = np.stack([slope(partial(task, rows=rows), START) for rows in TRAIN.values()])
    # Adam's eps of 1e-8 shortens a step by eps / |slope|; ten roundings of numbers of at most 1 in float64.
    shorter = 1e-3 * 1e-8 / np.abs(slopes).min()
    expected = START * (1 - 1e-3 * 1e-2) - 1e-3 * shares() @ np.sign(slopes)
    assert np.abs(params - expected).max() <= shorter + limit(10, 1.0, torch.float64)


def coral(a, b):
    means = np.square(a.mean(0) - b.mean(0)).mean()
    return means + np.square(np.cov(a, rowvar=False) - np.cov(b, rowvar=False)).mean()


def bgp(theta, cid, number, o):
    """Algorithm 2: a step on one batch, a step with alignment on another; batches of two."""
    rows = np.array(TRAIN[cid])
    orders = batch_orders(cid, number, 2)
    w = theta
    for first, second in zip(*(np.split(rows[order], len(rows) // 2) for order in orders), strict=True):

        def aligned(v, second=second):
            return task(v, second) + o.get("align", 1.0) * coral(
                encode(theta, second)[0], encode(v, second)[0]
            )

        if o.get("update") == "none":
            w = w - RATE * slope(lambda v, first=first: task(v, first) + _pull(theta, v, first), w)
            continue
        moved = w - RATE * slope(lambda v, first=first: task(v, first), w)
        w = (w if o.get("update") == "fo_restore" else moved) - RATE * slope(aligned, moved)
    return w


def _pull(theta, v, rows):
    return coral(encode(theta, rows)[0], encode(v, rows)[0])


def plain(theta, cid, number, o):
    return theta - RATE * slope(lambda w: task(w, TRAIN[cid]), theta)


def ga(a, gaps, number, floor, center=False):
    """One step of GA in round `number` of 10, from 1: the official rule over the number of clients."""
    step = max(0.2 - (number - 1) * 0.2 / 10, floor)
    g = gaps - gaps.mean() if center else gaps
    moved = np.clip(a + g / np.abs(g).max() * (step if center else step / len(a)), 0, 1)
    return moved / moved.sum()


def faa(a, gaps, b, after):
    """Eq. 9 to 11; a slope that is negative counts as zero, and without any slope GA's weights are used."""
    slopes = np.maximum((b - a) / (gaps - after), 0)
    if not slopes.any():
        return b
    common = (slopes * gaps).sum() / slopes.sum()
    best = np.clip(a + slopes * (gaps - common), 0, 1)
    return best / best.sum()


def gap_rounds(rounds, train, o):
    """Parameters and weights after each round of GA (every = 0) or FAA in every n-th round."""
    theta, a, out = START, np.full(3, 1 / 3), []
    for number in range(1, rounds + 1):
        own = np.stack([train(theta, cid, number - 1, o) for cid in TRAIN])

        def gaps(weights, own=own):
            split = TRAIN if o.get("split") == "train" else VAL
            mean = weights @ own
            return np.array(
                [task(mean, split[cid]) - task(own[k], split[cid]) for k, cid in enumerate(TRAIN)]
            )

        if o.get("every") and number % o["every"] == 0:
            b = ga(a, gaps(a), number, o.get("floor", 0.05))
            a = faa(a, gaps(a), b, gaps(b))
            theta = a @ own
            out.append((theta, a))
        else:
            theta = a @ own
            out.append((theta, a))
            a = ga(a, gaps(a), number, 0.0, o.get("center", False))
    return out


@pytest.mark.parametrize(
    ("server", "local", "train", "o"),
    [
        (FFT_GP.server(), FFT_GP.local(), bgp, {"every": 1}),
        (FairnessAware(every=2), MetaLocal(align_weight=3.0), bgp, {"every": 2, "align": 3.0}),
        (FairnessAware(gap_split="train"), MetaLocal(), bgp, {"every": 1, "split": "train"}),
        (FairnessAware(), MetaLocal(meta_update="fo_restore"), bgp, {"every": 1, "update": "fo_restore"}),
        (FAA.server(), FAA.local(), plain, {"every": 1}),
        (FairnessAware(step_floor=0.6), MetaLocal(), bgp, {"every": 1, "floor": 0.6}),
        (GA.server(), GA.local(), plain, {}),
        (GeneralizationAdjustment(center=True), Local(), plain, {"center": True}),
        (GeneralizationAdjustment(), MetaLocal(meta_update="none"), bgp, {"update": "none"}),
    ],
    ids=["fft_gp", "every2", "on_training_images", "restore", "faa", "floor", "ga", "ga_centred", "only_da"],
)
def test_three_rounds_of_fft_gp(server, local, train, o):
    size = {"batch_size": 2} if train is bgp else {}
    found = play(server, local, rounds=3, **size)
    for (params, ledger), (expected, weights) in zip(found, gap_rounds(3, train, o), strict=True):
        close(params, expected)
        recorded = [row["weight"] for row in ledger.tables["aggregation"]]
        close(recorded, weights)
