"""Three rounds of the methods for LoRA adapters and personal layers on a model of scalars, against NumPy.

The model is y = head norm (w + R + B C A) x, with the mean of (y - target)^2 / 2 as its loss. Of the methods
only their halves and the options that they set in the tuning are used; the references are written down anew.
"""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from rayfed.client_facts import ClientTable
from rayfed.data.examples import ClientData, Mapped
from rayfed.federation.client import Client, TrainConfig
from rayfed.federation.cohort import ClientInfo, Cohort, Ledger
from rayfed.federation.method_registry import METHODS
from rayfed.federation.tensors_that_stay import STAYS, add_own, keep_own, names_that_stay
from rayfed.models.named_tensors import NamedTensor
from rayfed.seeds import use_seed
from rayfed.tuning.base import copies, load
from tests.rounding import near

X = np.array([0.9, -0.4, 1.1, 0.7])
Y = np.array([2, 0, -1, 1])  # whole numbers, as labels are stored
DATA = {"a": [0, 1, 2], "b": [3]}
SHARE = {"a": 0.75, "b": 0.25}
START = {"A": 0.7, "B": -0.4, "C": 0.5, "R": 0.0, "head": 1.3, "norm": 0.9}
GLOBAL = {n: f"fc.lora_{n}" for n in "ABCR"} | {"head": "head.weight", "norm": "norm.weight"}
W, RATE = 0.6, 0.3
SLOPES = 3 * 4 * 10
"""Roundings of three rounds of at most four steps with differences of losses of at most 2, over 2e-6."""


class Line(nn.Module):
    """The model; `options` are those that a method sets in the tuning `lora`."""

    gc_net = None
    has_frozen_features = False
    active = ()

    def __init__(self, options, trains_norm):
        super().__init__()
        self.norm = nn.LayerNorm(1, bias=False, dtype=torch.float64)
        core, shared = options.get("core", False), options.get("freeze_a", False)
        trained = {"A": not core and not shared, "B": not core, "C": core, "head": True}
        for name, live in trained.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(1, 1).double(), requires_grad=live))
        self.norm.weight.requires_grad_(trains_norm)
        self.register_buffer("lora_R", torch.zeros(1, 1).double())
        self.named = {GLOBAL[n]: NamedTensor(self, n, None, False, n) for n in trained}
        self.named["norm.weight"] = NamedTensor(self.norm, "weight", None, False, "norm.weight")
        if options.get("residual"):
            self.named["fc.lora_R"] = NamedTensor(self, "lora_R", None, True, "lora_R")
        for name, entry in self.named.items():
            entry.tensor.data.fill_(next(START[n] for n, known in GLOBAL.items() if known == name))
        if not core:
            self.C.data.fill_(1.0)

    def tensors(self):
        return self.named

    def forward(self, x):
        return self.head * self.norm.weight * (W + self.lora_R + self.B @ self.C @ self.A) * x


class Here:
    """An executor that runs each call in this process, and keeps what stays at a client."""

    def __init__(self, model, stays):
        self.model, self.stays, self.stores = model, stays, {cid: {} for cid in DATA}
        self.start = copies(model)

    def map(self, calls):
        return [self._run(call) for call in calls]

    def _run(self, call):
        store = self.stores[call.client]
        values = {**self.start, **store.get(STAYS, {}), **call.sent.params}
        load(self.model, values)
        splits = {"train": np.array(DATA[call.client])}
        examples = Mapped(X[:, None], Y[:, None], {call.client: splits})
        data = ClientData(call.client, examples, splits, lambda inputs: inputs)
        config = TrainConfig(lr=RATE, momentum=0.0, batch_size=9)
        squares = SimpleNamespace(
            loss=lambda output, y: ((output - y) ** 2).mean() / 2, count=len, tokens=False
        )
        with use_seed(0) as rng:
            client = Client(
                call.client, self.model, data, config, rng, store, objective=squares, stays=self.stays
            )
            update = call.task(client, add_own(call.sent, self.stays, values))
            return replace(update, params=keep_own(update.params, client))


def played(method, server, local, rounds):
    """After every round, the values of the server and of each client's own tensors."""
    options = {**server.tuning, **local.tuning}
    model = Line(options, trains_norm=method == "fedbn")
    stays = names_that_stay(model, local.stays)
    executor = Here(model, stays)
    clients = {cid: ClientInfo(domain=cid, num_examples=len(rows)) for cid, rows in DATA.items()}
    state = server.start({n: v for n, v in executor.start.items() if n not in stays})
    for number in range(rounds):
        cohort = Cohort(
            round=number, ids=tuple(DATA), clients=ClientTable.of(clients), seed=0, rounds=rounds, depth=0,
            capacity=dict.fromkeys(DATA, 0), executor=executor, ledger=Ledger(),
        )  # fmt: skip
        state = replace(server.round(replace(state, round=number), cohort, local), round=number)
        own = {cid: store.get(STAYS, {}) for cid, store in executor.stores.items()}
        yield [{n: v.item() for n, v in each.items()} for each in (state.params, *own.values())]


def loss(v, rows):
    output = v["head"] * v["norm"] * (W + v["R"] + v["B"] * v["C"] * v["A"]) * X[rows]
    return np.mean((output - Y[rows]) ** 2) / 2


def step(v, names, rows):
    def slope(name, eps=1e-6):
        return (loss({**v, name: v[name] + eps}, rows) - loss({**v, name: v[name] - eps}, rows)) / (2 * eps)

    return v | {name: v[name] - RATE * slope(name) for name in names}


def product(ends, shares=SHARE):
    return sum(shares[cid] * v["B"] * v["A"] for cid, v in ends.items())


def merged(old, ends, mean):
    return {**mean, "R": old["R"] + product(ends), "A": old["A"], "B": 0.0}


def corrected(old, ends, mean):
    return {**mean, "R": old["R"] + product(ends) - mean["B"] * mean["A"]}


def split(old, ends, mean):
    """A has norm 1, as in the released code; which of both factors has the sign does not matter."""
    return {**mean, "A": 1.0, "B": product(ends)}


def by_norm(old, ends, mean):
    norms = {cid: abs(v["B"] * v["A"]) for cid, v in ends.items()}
    weighted = {n: sum(norms[c] * v[n] for c, v in ends.items()) / sum(norms.values()) for n in "AB"}
    return {**mean, **weighted}


def averaged(old, ends, mean):
    return mean


ALL = ("A", "B", "head")
CASES = {
    "fedit": ({}, lambda r: [ALL], (), averaged),
    "ffa_lora": ({}, lambda r: [("B", "head")], (), averaged),
    "fed_sb": ({}, lambda r: [("C", "head")], (), averaged),
    "flora": ({}, lambda r: [ALL], (), merged),
    "fedex_lora": ({}, lambda r: [ALL], (), corrected),
    "flexlora": ({}, lambda r: [ALL], (), split),
    "hetlora": ({"lam": 0.0, "gamma": 1.0}, lambda r: [ALL], (), by_norm),
    "rolora": ({}, lambda r: [("AB"[r % 2 == 0], "head")], (), averaged),
    "fedsa_lora": ({}, lambda r: [ALL], ("B",), averaged),
    "fedper": ({}, lambda r: [ALL], ("head",), averaged),
    "fedrep": ({"head_passes": 3}, lambda r: [("head",)] * 3 + [("A", "B")], ("head",), averaged),
    "fedbn": ({}, lambda r: [(*ALL, "norm")], ("norm",), averaged),
}


def reference(method, steps, stays, combine, rounds):
    start = START if method == "fed_sb" else {**START, "C": 1.0}
    common, own = start, dict.fromkeys(DATA, start)
    for number in range(rounds):
        for cid, rows in DATA.items():
            own[cid] = common | {name: own[cid][name] for name in stays}
            for names in steps(number):
                own[cid] = step(own[cid], names, rows)
        mean = {name: sum(SHARE[cid] * v[name] for cid, v in own.items()) for name in START}
        common = combine(common, own, mean)
        yield [common, *({name: v[name] for name in stays} for v in own.values())]


@pytest.mark.parametrize("method", CASES)
def test_three_rounds_of_two_clients(method):
    options, steps, stays, combine = CASES[method]
    halves = METHODS.load(method)
    rounds = played(method, halves.server(), halves.local(**options), 3)
    for found, expected in zip(rounds, reference(method, steps, stays, combine, 3), strict=True):
        sent = {name for names in (*steps(0), *steps(1)) for name in names} - {*stays}
        sent |= {"R"} if combine in (merged, corrected) else set()
        assert set(found[0]) == {GLOBAL[name] for name in sent}
        for values, right in zip(found, expected, strict=True):
            sign = np.sign(values["fc.lora_A"]) if combine is split and values else 1.0
            for name in [n for n, known in GLOBAL.items() if known in values]:
                turned = sign if name in "AB" else 1.0
                near(turned * values[GLOBAL[name]], right[name], SLOPES, RATE * 2 / 2e-6, torch.float64)
