"""Three clients of a model with two parameters, and the same model in NumPy, to work out rounds by hand.

Parameters are psi and p; an input x has two numbers, and there are two classes:

  h = tanh(psi x), z = p x + h, logits = z

so that `encode` gives z and h, as the tuning `gc_prompt` does.
"""

from copy import deepcopy
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from rayfed.client_facts import ClientTable
from rayfed.data.examples import ClientData, Mapped
from rayfed.federation.client import Client, TrainConfig
from rayfed.federation.cohort import ClientInfo, Cohort, Ledger
from rayfed.models.named_tensors import NamedTensor
from rayfed.seeds import derive, use_seed
from rayfed.tuning.base import load
from rayfed.types import ServerState
from tests.rounding import near

X = np.array(
    [
        *([0.9, 0.2], [0.4, -0.5], [1.1, 0.3], [-0.2, 0.8], [0.7, 0.6], [0.3, 1.0]),
        *([0.8, 0.1], [0.5, -0.4], [1.0, 0.5], [-0.1, 0.9], [0.6, -0.7], [0.2, 0.3], [0.9, -0.3], [0.1, 0.6]),
        *([-0.7, 1.2], [-1.0, 0.4], [-0.6, -0.9], [-0.3, -1.1]),
    ]
)
Y = np.array([*(0, 0, 1, 1, 1, 0), *(0, 1, 0, 1, 0, 0, 1, 1), *(1, 0, 0, 0)])
TRAIN = {"a": range(4), "b": range(6, 12), "c": range(14, 16)}
VAL = {"a": range(4, 6), "b": range(12, 14), "c": range(16, 18)}
START = np.array([0.3, 0.8])
RATE = 0.5


class Tiny(nn.Module):
    """The model; `w` holds psi and p."""

    exits = gc_net = adapter = None
    text_is_live = net_is_frozen = has_frozen_features = False
    active = ()
    num_classes = 2

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(START))

    def tensors(self):
        return {"w": _Trained(self, "w", None, False, "w")}

    def module_name(self, name):
        return name

    def encode(self, x, customize=True):
        h = torch.tanh(self.w[0] * x)
        return self.w[1] * x + (h if customize else 0), h

    def forward(self, x, headless=False):
        return self.encode(x)[0]

    def output_with(self, params, x, headless=False):
        return torch.func.functional_call(self, dict(params), (x,), {"headless": headless})

    def classify(self, z):
        return z

    def predict(self, output):
        return output


class _Trained(NamedTensor):
    @property
    def is_trained(self):
        return True


class Here:
    """An executor that runs each call in this process."""

    def __init__(self, seed=0, **train):
        self.model = Tiny()
        self.config = TrainConfig(**{"lr": RATE, "momentum": 0.0, "batch_size": 100, **train})
        self.kept = {}
        self.seed = seed

    def map(self, calls):
        return [self._run(call) for call in calls]

    def _run(self, call):
        with use_seed(derive(self.seed, call.tag, call.sent.round, call.client)) as rng:
            load(self.model, {"w": torch.tensor(START), **call.sent.params})
            self.model.zero_grad(set_to_none=True)
            splits = {"train": np.array(TRAIN[call.client]), "val": np.array(VAL[call.client])}
            examples = Mapped(X, Y, {call.client: splits})
            data = ClientData(call.client, examples, splits, lambda inputs: inputs)
            store = self.kept.setdefault(call.client, {})
            client = Client(call.client, self.model, data, self.config, rng, store)
            update = call.task(client, call.sent)
            return _with(update, client.metrics())


def _with(update, metrics):
    return replace(update, metrics={**update.metrics, **metrics})


def play(server, local, rounds=1, seed=0, **train):
    """The parameters and the ledger of every round, with the stores of the clients in `ledger.stores`.

    Args:
        server: Server half.
        local: Client half.
        rounds: Number of rounds.
        seed: Seed of the experiment.
        train: Settings of local optimisation.
    """
    executor = Here(seed, **train)
    state = server.start({"w": torch.tensor(START)})
    found = []
    for number in range(rounds):
        cohort = Cohort(
            round=number,
            ids=tuple(TRAIN),
            clients=ClientTable.of(
                {cid: ClientInfo(domain=cid, num_examples=len(rows)) for cid, rows in TRAIN.items()}
            ),
            seed=seed,
            rounds=10,
            depth=0,
            capacity=dict.fromkeys(TRAIN, 0),
            executor=executor,
            ledger=Ledger(),
        )
        state = _at(server.round(_at(state, number), cohort, local), number)
        cohort.ledger.stores = deepcopy(executor.kept)
        found.append((state.params["w"].numpy().copy(), cohort.ledger))
    return found


def _at(state, number):
    assert isinstance(state, ServerState)
    return replace(state, round=number)


def batch_orders(cid, number, count, seed=0, tag="fit"):
    """The first permutations of a client's training examples that its generator draws in a round."""
    with use_seed(derive(seed, tag, number, cid)) as rng:
        return [torch.randperm(len(TRAIN[cid]), generator=rng).numpy() for _ in range(count)]


def encode(w, rows):
    """z and h of some examples, shape (n, 2) each."""
    h = np.tanh(w[0] * X[rows])
    return w[1] * X[rows] + h, h


def cross_entropy(logits, y):
    """Mean of the cross entropy."""
    shifted = logits - logits.max(1, keepdims=True)
    return float(np.mean(np.log(np.exp(shifted).sum(1)) - shifted[np.arange(len(y)), y]))


def task(w, rows):
    """Mean cross entropy of the model on some examples."""
    rows = np.array(rows)
    return cross_entropy(encode(w, rows)[0], Y[rows])


def slope(f, w, eps=1e-6):
    """Gradient of a function of the two parameters, by central differences."""
    steps = np.eye(2) * eps
    return np.array([(f(w + step) - f(w - step)) / (2 * eps) for step in steps])


def close(found, expected):
    """Fail unless numbers of `play` are those that were worked out with `slope`, both in float64.

    At most twelve steps, each with the rate times a slope: a difference of two objectives of at most 4, each
    with about ten roundings, over twice the `eps` of `slope`.
    """
    near(found, expected, 12 * 10, size=RATE * 4 / 2e-6, precision=torch.float64)


def shares():
    """Share of each client in the training examples."""
    sizes = np.array([len(rows) for rows in TRAIN.values()], dtype=float)
    return sizes / sizes.sum()
