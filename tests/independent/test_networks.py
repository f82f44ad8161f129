"""Networks of libraries and of a user, tuned in full by FedAvg: RayFed and plain PyTorch say the same.

The judge (`judge.py`) is run in float32, as RayFed is, and in float64, which gives its own error. RayFed may
be `SPREAD` times as far from the exact values: nobody can count the roundings of a network
(`tests/rounding.py`, `equally_near`).
"""

import copy
import functools
from functools import partial

import pytest
import torch

import rayfed
from rayfed.experiment.experiment import end_session
from tests.conftest import quickly
from tests.independent import networks
from tests.independent.judge import fedavg
from tests.independent.networks import LIBRARIES, OWN, Case
from tests.rounding import SPREAD, equally_near, near

ROUNDS, SEED, BATCH = 2, 5, 8
SIZES = {"ann": (20, 7), "bob": (13, 12), "eve": (27, 9)}
"""Training and test examples of each client."""


def examples(takes: str) -> dict:
    random = torch.Generator().manual_seed(1)

    def some(num: int) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.arange(num) % networks.CLASSES
        if takes == "ids":
            return torch.randint(3, networks.VOCABULARY, (num, networks.TOKENS), generator=random), y
        shape = (3, 32, 32) if takes == "images" else (networks.FEATURES,)
        return torch.randn(num, *shape, generator=random), y

    return {c: {"train": some(train), "test": some(test)} for c, (train, test) in SIZES.items()}


def network(case: Case) -> torch.nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return case.make()


def run_of(case: Case, cluster="inline") -> rayfed.Run:
    train = {"optimizer": "sgd", "lr": case.lr, "momentum": 0.9, "batch_size": BATCH}
    model = partial(network, case) if case.by_function else network(case)
    given = {"model": model, "data": examples(case.takes), "train": train, "cluster": cluster}
    experiment = rayfed.Experiment(method="fedavg", tuning="full", rounds=ROUNDS, seed=SEED, **given)
    return experiment.run(quiet=True)


def judged(net: torch.nn.Module, clients: dict, lr: float, exact: bool = False) -> tuple[dict, dict]:
    """The tensors of the judge's network, and its scores, by name; `exact`: in float64."""
    if exact:
        # `double()` alone would make two tensors of a buffer that two modules share.
        doubles = {id(buffer): buffer.double() for buffer in net.buffers() if buffer.is_floating_point()}
        net = copy.deepcopy(net, doubles).double()
        clients = {
            c: {s: (x.double() if x.is_floating_point() else x, y) for s, (x, y) in splits.items()}
            for c, splits in clients.items()
        }
    trained, history = fedavg(net, clients, ROUNDS, SEED, lr, BATCH)
    scores = {f"{name} {n}": value for n, row in enumerate(history) for name, value in row.items()}
    return every_tensor(trained), scores


def every_tensor(net: torch.nn.Module) -> dict:
    """All parameters and buffers, also those that a state dict leaves out, with its names."""
    return {**net.state_dict(), **dict(net.named_parameters()), **dict(net.named_buffers())}


def parted(tensors: dict) -> tuple[dict, dict]:
    """Floats, and counters."""
    floats = {n: t.detach() for n, t in tensors.items() if t.is_floating_point()}
    return floats, {n: t for n, t in tensors.items() if n not in floats}


def compare(run: rayfed.Run, case: Case) -> None:
    net = network(case)
    clients = dict(zip(run.clients.index, examples(case.takes).values(), strict=True))
    (one, scores), (exact, exact_scores) = (
        judged(net, clients, case.lr),
        judged(net, clients, case.lr, exact=True),
    )
    floats, counters = parted(every_tensor(run.model()))
    own, own_counters = parted(one)
    assert [*floats] == [*own]
    assert [*counters] == [*own_counters]
    for name, value in own_counters.items():
        assert torch.equal(counters[name], value), name
    assert any(not torch.equal(own[n], t.detach()) for n, t in net.named_parameters())  # it trained
    equally_near(own, floats, parted(exact)[0])
    rows = run.history.to_dict("records")
    found = {key: torch.tensor(rows[int(key.split()[1])][key.split()[0]]) for key in scores}
    accuracies = [name for name in scores if name.startswith("accuracy")]
    for name in accuracies:  # rounding changes one only where two classes are equally likely
        flips = SPREAD * abs(float(scores[name] - exact_scores.pop(name)))
        near(found.pop(name), scores.pop(name), roundings=8, known=flips)
    equally_near(scores, found, exact_scores)


QUICK = [*OWN, "torchvision squeezenet1_1", "timm mixer", "transformers distilbert"]
ALL = {**OWN, **LIBRARIES}


@pytest.mark.parametrize("name", quickly(ALL, QUICK))
def test_a_run_is_that_of_plain_pytorch(name):
    compare(run_of(ALL[name]), ALL[name])


@functools.cache
def here(name: str) -> tuple[str, list]:
    return facts(run_of(ALL[name]))


def facts(run: rayfed.Run) -> tuple[str, list]:
    """Digest of the tensors, and the scores of each round."""
    return run.sha256, run.history[["loss", "accuracy"]].to_numpy().tolist()


@pytest.fixture(scope="module")
def one_session(ray_cluster):
    yield
    end_session()


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("actors", [1, pytest.param(3, marks=pytest.mark.steady)])
def test_actors_compute_the_same_bits(name, actors, one_session):
    assert facts(run_of(ALL[name], {"executor": "ray", "actors": actors})) == here(name)
