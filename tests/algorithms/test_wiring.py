"""What methods pass on, on three clients of a model with two parameters, against NumPy: two rounds each."""

from functools import partial

import numpy as np
import pytest
import torch

from algorithms.afl import METHOD as AFL
from algorithms.alllarge import METHOD as ALLLARGE
from algorithms.ditto import Ditto
from algorithms.fedavg import METHOD as FEDAVG
from algorithms.feddyn import METHOD as FEDDYN
from algorithms.fedprox import METHOD as FEDPROX
from algorithms.fedsam import METHOD as FEDSAM
from algorithms.grace import METHOD as GRACE
from algorithms.harmofl import Harmonized
from algorithms.local import METHOD as LOCAL
from algorithms.perfedavg import METHOD as PERFEDAVG
from algorithms.qffl import METHOD as QFFL
from algorithms.term import METHOD as TERM
from rayfed.federation.local import Local
from rayfed.federation.server import Server
from tests.algorithms.tiny import RATE, START, TRAIN, batch_orders, close, encode, play, shares, slope, task
from tests.rounding import near


def descent(theta, cid, number, pull=lambda v: 0.0, start=None, **_):
    """Two full-batch steps of the mean cross entropy plus `pull`."""
    w = theta if start is None else start
    for _ in range(2):
        w = w - RATE * slope(lambda v: task(v, TRAIN[cid]) + pull(v), w)
    return w


def proximal(theta, cid, number, mu=0.7, **_):
    return descent(theta, cid, number, lambda v: mu / 2 * np.square(v - theta).sum())


def sharpness(theta, cid, number, rho=0.3, **_):
    w = theta
    for _ in range(2):
        g = slope(lambda v: task(v, TRAIN[cid]), w)
        w = w - RATE * slope(lambda v: task(v, TRAIN[cid]), w + rho * g / np.linalg.norm(g))
    return w


def halves(theta, cid, number, align=0.0, rate=RATE, **_):
    """First-order MAML on the two halves of the whole split, once; a gradient at w' moves w."""
    rows = np.array(TRAIN[cid])[batch_orders(cid, number, 1)[0]]
    first, second = np.split(rows, [len(rows) // 2])
    moved = theta - rate * slope(lambda v: task(v, first), theta)

    def outer(v):
        pull = 0.0
        if align and len(second) > 1:
            a, b = encode(theta, second)[0], encode(v, second)[0]
            between = np.cov(a, rowvar=False) - np.cov(b, rowvar=False)
            pull = np.square(a.mean(0) - b.mean(0)).mean() + np.square(between).mean()
        return task(v, second) + align * pull

    return theta - RATE * slope(outer, moved)


def by_data(theta, own, losses, memory):
    return shares() @ own


def alike(theta, own, losses, memory):
    return own.mean(0)


def tilted(theta, own, losses, memory, t=1.5):
    raw = shares() * np.exp(t * losses)
    return raw / raw.sum() @ own


def official(theta, own, losses, memory, t=1.5):
    raw = np.exp(t * (losses - losses.max()))
    memory["ema"] = 0.5 * memory.get("ema", 0.0) + 0.5 * raw.mean()
    steps = raw / (3 * memory["ema"])
    return np.mean([theta + step * (w - theta) for step, w in zip(steps, own, strict=True)], axis=0)


def minimax(theta, own, losses, memory, rate=0.1, start=None):
    before = memory.get("mixture", shares() if start is None else start)
    v = before + rate * losses
    levels = np.sort(v)[::-1]
    heights = [(1 - levels[: n + 1].sum()) / (n + 1) for n in range(3)]
    height = [h for h, level in zip(heights, levels, strict=True) if level + h > 0][-1]
    after = np.maximum(v + height, 0)
    if start is None or start is not FORGETFUL:
        memory["mixture"] = after
    return after @ own


FORGETFUL = shares()


def fair(theta, own, losses, memory, q=1.0, squared=True):
    """Algorithm 2 of q-FFL, as w - sum of Delta over sum of h."""
    moves = (theta - own) / RATE
    norms = np.linalg.norm(moves, axis=1)
    h = q * losses ** (q - 1) * (norms**2 if squared else norms) + losses**q / RATE
    return theta - (losses[:, None] ** q * moves).sum(0) / h.sum()


def agreeing(theta, own, losses, memory):
    """GRACE: shares times the mean cosine of a client's move with those of the others."""
    moves = theta - own
    unit = moves / np.linalg.norm(moves, axis=1, keepdims=True)
    c = ((unit @ unit.T).sum(1) - 1) / 2
    c = c - c.min() + 1e-3 if c.min() < 0 else c
    raw = shares() * (c / c.max() if c.max() > 1 else c)
    return raw / raw.sum() @ own


class PerturbedOnly(Harmonized):
    """HarmoFL on inputs that are no images: without the exchange of amplitudes."""

    def exchange(self, state, cohort):
        return state


TWO = {"epochs": 2}
CASES = {
    "fedavg": (FEDAVG.server(), FEDAVG.local(), TWO, descent, by_data),
    "uniform": (FEDAVG.server(weighting="uniform"), FEDAVG.local(), TWO, descent, alike),
    "fedprox": (FEDPROX.server(), FEDPROX.local(mu=0.7), TWO, proximal, by_data),
    "fedsam": (FEDSAM.server(), FEDSAM.local(rho=0.3), TWO, sharpness, by_data),
    "harmofl": (FEDAVG.server(), PerturbedOnly(alpha=0.3), TWO, sharpness, by_data),
    "term": (TERM.server(t=1.5), TERM.local(), TWO, descent, tilted),
    "term_official": (TERM.server(t=1.5, rule="official"), TERM.local(), TWO, descent, official),
    "afl": (AFL.server(lr_lambda=0.1), AFL.local(), TWO, descent, minimax),
    "afl_uniform": (
        AFL.server(lr_lambda=0.1, weighting="uniform"),
        AFL.local(),
        TWO,
        descent,
        lambda *given: minimax(*given, start=np.full(3, 1 / 3)),
    ),
    "afl_memoryless": (
        AFL.server(lr_lambda=0.1, memoryless=True),
        AFL.local(),
        TWO,
        descent,
        lambda *given: minimax(*given, start=FORGETFUL),
    ),
    "qffl": (QFFL.server(norm="l2_sq"), QFFL.local(), TWO, descent, fair),
    "qffl_half": (
        QFFL.server(q=0.5),
        QFFL.local(),
        TWO,
        descent,
        lambda *given: fair(*given, q=0.5, squared=False),
    ),
    "perfedavg": (PERFEDAVG.server(), PERFEDAVG.local(), {}, halves, by_data),
    "inner_rate": (
        PERFEDAVG.server(),
        PERFEDAVG.local(inner_lr=0.1),
        {},
        lambda *given: halves(*given, rate=0.1),
        by_data,
    ),
    "perfedavg_momentum": (PERFEDAVG.server(), PERFEDAVG.local(), {"momentum": 0.9}, halves, by_data),
    "grace": (GRACE.server(), GRACE.local(), {}, lambda *given: halves(*given, align=1.0), agreeing),
}


@pytest.mark.parametrize("case", CASES)
def test_two_rounds(case):
    server, local, train, fit, mean = CASES[case]
    found = play(server, local, rounds=2, **train)
    theta = START
    memory = {}
    for number, (params, _) in enumerate(found):
        losses = np.array([task(theta, rows) for rows in TRAIN.values()])
        own = np.stack([fit(theta, cid, number) for cid in TRAIN])
        theta = mean(theta, own, losses, memory)
        close(params, theta)


def test_afl_gives_out_the_mean_of_the_models_and_trains_the_last_one():
    found = play(AFL.server(lr_lambda=0.1, output="mean"), AFL.local(), rounds=3, epochs=2)
    last = START
    memory = {}
    models = []
    for number, (params, _) in enumerate(found):
        losses = np.array([task(last, rows) for rows in TRAIN.values()])
        last = minimax(last, np.stack([descent(last, cid, number) for cid in TRAIN]), losses, memory)
        models.append(last)
        close(params, np.mean(models, axis=0))


def dynamic(v, theta, alpha, g):
    """What FedDyn adds to a client's loss."""
    return alpha / 2 * np.square(v - theta).sum() - g @ v


@pytest.mark.parametrize("by", ["same", "data"])
def test_feddyns_alpha_of_a_client(by):
    """alpha, or alpha times the mean number of examples (4) over the client's own (4, 6 and 2)."""
    alphas = dict(zip(TRAIN, 0.4 * np.array([1, 1, 1] if by == "same" else [1, 4 / 6, 2]), strict=True))
    server = FEDDYN.server(feddyn_alpha=0.4, feddyn_alpha_by=by)
    theta, h, g = START, np.zeros(2), dict.fromkeys(TRAIN, np.zeros(2))
    for number, (params, _) in enumerate(play(server, FEDDYN.local(), rounds=2, epochs=2)):
        own = {}
        for cid, alpha in alphas.items():
            pull = partial(dynamic, theta=theta, alpha=alpha, g=g[cid])
            own[cid] = descent(theta, cid, number, pull)
        g = {cid: g[cid] - alphas[cid] * (own[cid] - theta) for cid in TRAIN}
        h = h - 0.4 / 3 * sum(own[cid] - theta for cid in TRAIN)
        theta = np.mean(list(own.values()), axis=0) - h / 0.4
        close(params, theta)


def test_weights_by_the_samples_that_were_seen():
    """Two steps of at most two examples: 4 of 4 examples, 4 of 6, and all 2, once."""
    found = play(ALLLARGE.server(weighting="samples_seen"), ALLLARGE.local(), batch_size=2, max_steps=2)
    recorded = [row["weight"] for row in found[0][1].tables["aggregation"]]
    near(recorded, [0.4, 0.4, 0.2], 3, 1.0, torch.float64)


def test_dittos_personal_models_stay_with_their_clients():
    """They start at the first global model, are pulled to the present one, and are not averaged."""
    found = play(Server(), Ditto(lam=0.6), rounds=2, epochs=2)
    theta = START
    personal = dict.fromkeys(TRAIN, START)
    for number, (params, ledger) in enumerate(found):
        for cid in TRAIN:
            pull = lambda v, theta=theta: 0.3 * np.square(v - theta).sum()  # noqa: E731
            personal[cid] = descent(theta, cid, number, pull, start=personal[cid])
            close(ledger.stores[cid]["own"]["w"].numpy(), personal[cid])
        theta = shares() @ np.stack([descent(theta, cid, number) for cid in TRAIN])
        close(params, theta)


def test_clients_on_their_own_continue_and_send_nothing_back():
    found = play(LOCAL.server(), LOCAL.local(), rounds=2, epochs=2)
    own = dict.fromkeys(TRAIN, START)
    for number, (params, ledger) in enumerate(found):
        assert params.tolist() == START.tolist()
        for cid in TRAIN:
            own[cid] = descent(own[cid], cid, number)
            close(ledger.stores[cid]["own"]["w"].numpy(), own[cid])


def test_the_model_that_is_scored_as_personal():
    """GA and FAA score the mean model and the client's own model after the same preparation of the inputs."""
    from dataclasses import dataclass

    from algorithms.ga import GeneralizationAdjustment

    @dataclass(frozen=True)
    class Doubled(Local):
        def prepare(self, client, sent):
            client.transform = lambda x: 2 * x

    plain, doubled = (
        play(GeneralizationAdjustment(), local, epochs=2)[0][1].tables["gaps"]
        for local in (Local(), Doubled())
    )
    assert [row["gap"] for row in plain] != [row["gap"] for row in doubled]
    own, mean = _doubled_scores()
    close([row["gap"] for row in doubled], mean - own)


def _doubled_scores():
    """Validation losses of the clients' own models and of their mean, all on doubled inputs."""
    from tests.algorithms import tiny

    kept = tiny.X.copy()
    tiny.X *= 2
    try:
        own = np.stack([descent(START, cid, 0) for cid in TRAIN])
        losses = [[task(w, tiny.VAL[cid]) for w in (own[k], own.mean(0))] for k, cid in enumerate(TRAIN)]
    finally:
        tiny.X[:] = kept
    return np.array(losses).T
