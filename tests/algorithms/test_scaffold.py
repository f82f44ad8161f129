"""SCAFFOLD against an independent computation, its reductions to FedAvg, its state and BatchNorm."""

import numpy as np
import pytest
import torch

from algorithms.scaffold import ScaffoldLocal, ScaffoldServer
from rayfed import Broadcast, Cohort, ServerState, Update
from rayfed.federation.client import Client
from rayfed.federation.train_config import TrainConfig
from tests.algorithms.batch_norm import WITH_BATCH_NORM, statistics
from tests.rounding import equally_near, near

RATE = 0.1
PLAIN_SGD = ("train.momentum=0", "server.weighting=uniform")


class Point(Client):
    """A client whose model is one number w, with the loss (w - target)^2 / 2 and a batch per target."""

    def __init__(self, targets, w, store=None):
        config = TrainConfig(lr=RATE, momentum=0.0, batch_size=1)
        super().__init__("a", None, None, config, None, store if store is not None else {})
        self.targets = targets
        self.w = torch.nn.Parameter(torch.tensor([w], dtype=torch.float64))

    def trainable(self):
        return {"w": self.w}

    def batches(self, split="train", shuffle=True):
        return iter(self.targets)

    def num_steps(self, split="train"):
        return len(self.targets)

    def update(self, **parts):
        return Update(client=self.id, params={"w": self.w.detach().clone()}, num_examples=1, **parts)


class Quadratic(ScaffoldLocal):
    def loss(self, client, sent, batch):
        return ((client.w - batch) ** 2 / 2).sum()


def cohort_of(index, ids, everyone):
    return Cohort(
        round=index,
        ids=tuple(ids),
        clients=dict.fromkeys(everyone),
        seed=0,
        rounds=3,
        depth=0,
        capacity={},
        executor=None,
    )


def number(value):
    return torch.tensor([value], dtype=torch.float64)


def test_two_local_steps_by_hand():
    """c = 0.5, c_i = 0.2, so 0.3 joins every gradient.

    Step 1: gradient 1 - 3 = -2, w = 1 - 0.1 (-2 + 0.3) = 1.17. Step 2: gradient 1.17 - 2 = -0.83,
    w = 1.17 - 0.1 (-0.83 + 0.3) = 1.223. The new c_i is (-2 - 0.83) / 2 = -1.415, its change -1.615.
    """
    store = {"control": {"w": number(0.2)}}
    client = Point([3.0, 2.0], 1.0, store)
    sent = Broadcast(round=1, params={"w": number(1.0)}, shared={"control": {"w": number(0.5)}})
    answer = Quadratic().train(client, sent)
    assert answer.params["w"].item() == pytest.approx(1.223)
    assert client.store["control"]["w"].item() == pytest.approx(-1.415)
    assert answer.extra["control_change"]["w"].item() == pytest.approx(-1.615)
    option_2 = 0.2 - 0.5 + (1 - answer.params["w"].item()) / (2 * RATE)
    assert client.store["control"]["w"].item() == pytest.approx(option_2)


def test_the_server_rule_by_hand():
    """Answers 2 and 4 of unlike sizes, x = 1: 1 + 0.5 (3 - 1) = 2. Of four clients: c = 0 + (1 - 3) / 4."""
    server = ScaffoldServer(lr=0.5)
    answers = [
        Update(
            client=cid, params={"w": number(w)}, num_examples=n, extra={"control_change": {"w": number(d)}}
        )
        for cid, w, n, d in (("a", 2.0, 1, 1.0), ("b", 4.0, 9, -3.0))
    ]
    after = server.aggregate(server.start({"w": number(1.0)}), cohort_of(0, "ab", "abcd"), answers)
    assert after.params["w"].item() == pytest.approx(2)
    assert after.shared["control"]["w"].item() == pytest.approx(-0.5)


def test_rounds_of_two_clients_against_numpy():
    """Algorithm 1 with option II, written down again with numbers instead of tensors."""
    targets = {"a": [3.0, 2.5], "b": [-1.0, 0.5]}
    server, stores = ScaffoldServer(lr=0.7), {"a": {}, "b": {}}
    state = server.start({"w": number(0.4)})
    x, c, own = 0.4, 0.0, {"a": 0.0, "b": 0.0}
    for index in range(3):
        cohort = cohort_of(index, "ab", "ab")
        answers, moves, changes = [], [], []
        for cid in cohort.ids:
            client = Point(targets[cid], state.params["w"].item(), stores[cid])
            client.id = cid
            answers.append(Quadratic().train(client, state.broadcast()))
            y = x
            for target in targets[cid]:
                y = y - RATE * ((y - target) - own[cid] + c)
            new = own[cid] - c + (x - y) / (2 * RATE)
            moves.append(y - x)
            changes.append(new - own[cid])
            own[cid] = new
        state = server.aggregate(state, cohort, answers)
        x = x + 0.7 * np.mean(moves)
        c = c + np.mean(changes)
        # Three rounds of thirty operations, with numbers of at most 3; one is divided by 2 * RATE.
        near(state.params["w"].item(), x, 3 * 30, size=3 / (2 * RATE), precision=torch.float64)
        near(state.shared["control"]["w"].item(), c, 3 * 30, size=3 / (2 * RATE), precision=torch.float64)


def test_the_first_round_is_that_of_fedavg(short):
    steps = ("rounds=1", "train.epochs=2", "server.weighting=uniform")
    assert short("scaffold", *steps).sha256 == short("fedavg", *steps).sha256


def test_one_client_alone_trains_as_with_fedavg(short, exact):
    """Its control variate is the server's, so that the correction is zero in every round."""
    alone = ("data.domains=[plain]", "train.epochs=2", *PLAIN_SGD)
    plain = short("fedavg", *alone).params
    equally_near(plain, short("scaffold", *alone).params, exact("fedavg", *alone).params)


@pytest.mark.slow
@pytest.mark.steady
def test_later_rounds_differ_and_other_optimizers_work(short):
    assert (
        short("scaffold", "train.epochs=2", *PLAIN_SGD).sha256
        != short("fedavg", "train.epochs=2", *PLAIN_SGD).sha256
    )
    adam = short("scaffold", "train.optimizer=adam", "train.lr=0.001", "train.clip_norm=1")
    assert all(torch.isfinite(value).all() for value in adam.params.values())


@pytest.mark.parametrize("half", ["server", "local"])
def test_one_half_alone_is_refused(half):
    from rayfed.config.schema import build_parts, load_config
    from rayfed.errors import ConfigError
    from rayfed.federation.method_registry import check_compatible

    parts = build_parts(load_config(["algorithm=fedavg", f"{half}.name=scaffold"]))
    with pytest.raises(ConfigError, match="needs control"):
        check_compatible(parts.server, parts.local, parts.tuning)


def test_clients_that_hold_some_blocks_only(short):
    run = short("scaffold", "capacity=[1,2,1,2,2]", "model.options={depth: 2}")
    assert all(torch.isfinite(value).all() for value in run.params.values())


@pytest.mark.slow
@pytest.mark.steady
def test_statistics_of_a_real_network_are_the_mean_of_the_clients(short):
    first = (*WITH_BATCH_NORM, "rounds=1", "server.weighting=uniform")
    plain = statistics(short("fedavg", *first))
    found = short("scaffold", *first, "server.lr=2")
    assert plain
    assert all(torch.equal(statistics(found)[name], value) for name, value in plain.items())
    whole = short("scaffold", *WITH_BATCH_NORM, "server.lr=1.5").params
    assert all(torch.isfinite(value).all() for value in whole.values())


def test_state_starts_at_zero_for_what_trains_only():
    state = ScaffoldServer().start({"w": number(1.0), "norm.running_mean": number(1.0)})
    assert isinstance(state, ServerState)
    assert state.shared["control"] == {"w": number(0.0)}
