"""FedPer, FedRep and FedBN: a visit of FedRep by hand, and the settings in which they are FedAvg or local."""

import pytest
import torch

from algorithms.fedrep import FedRep
from rayfed import Broadcast, Update
from rayfed.federation.client import Client
from rayfed.federation.train_config import TrainConfig
from tests.algorithms.batch_norm import WITH_BATCH_NORM, statistics
from tests.rounding import equally_near

RATE = 0.1


class Product(Client):
    """A client whose model is the product of two numbers, `body` and `head`; one batch, the target."""

    def __init__(self, body, head, target):
        config = TrainConfig(lr=RATE, momentum=0.0)
        super().__init__("a", None, None, config, None, {}, stays=frozenset({"head"}))
        self.target = target
        numbers = {"body": body, "head": head}
        self.own = {n: torch.nn.Parameter(torch.tensor(v, dtype=torch.float64)) for n, v in numbers.items()}

    def trainable(self):
        return self.own

    def batches(self, split="train", shuffle=True):
        return iter([self.target])

    def backward(self, loss, batch):
        loss(batch).backward()

    def update(self, **parts):
        return Update(client=self.id, params={n: p.detach().clone() for n, p in self.own.items()})


class Squared(FedRep):
    def loss(self, client, sent, batch):
        return (client.own["body"] * client.own["head"] - batch) ** 2 / 2


def test_two_steps_of_the_head_and_one_of_the_body_by_hand():
    """body 2, head 1, target 4. Head: 1 + 0.1 * 2 * 2 = 1.4, then 1.4 + 0.1 * 1.2 * 2 = 1.64. Body: the error
    is 3.28 - 4 = -0.72, so 2 + 0.1 * 0.72 * 1.64 = 2.11808."""
    answer = Squared(head_passes=2).train(Product(2.0, 1.0, 4.0), Broadcast(round=0, params={}))
    assert answer.params["head"].item() == pytest.approx(1.64)
    assert answer.params["body"].item() == pytest.approx(2.11808)


@pytest.mark.parametrize("name", ["fedper", "fedbn"])
def test_where_nothing_stays_it_is_fedavg(short, name):
    assert short(name, "tuning=full", "local.stays=[]").sha256 == short("fedavg", "tuning=full").sha256


def test_the_first_round_of_fedper_is_that_of_fedavg_but_for_the_head(short):
    plain, run = short("fedavg", "rounds=1").params, short("fedper", "rounds=1").params
    assert {name for name in plain if name not in run} == {"head.weight", "head.bias"}
    assert all(torch.equal(value, plain[name]) for name, value in run.items())


@pytest.mark.parametrize("name", ["fedper", "fedrep"])
def test_where_only_the_head_trains_clients_train_alone(short, exact, name):
    """FedRep trains the head for `head_passes` passes, and then what is shared: nothing."""
    fast = ("tuning=head", "evaluation.personal_split=test", "rounds=2")
    passes = ["local.head_passes=1"] if name == "fedrep" else []
    run, alone = short(name, *fast, *passes), short("local", *fast)
    assert run.params == {}
    assert run.history["bytes_up"].tolist() == [0, 0]
    assert run.history["accuracy"].tolist() == alone.history["accuracy"].tolist()
    losses = [
        torch.tensor(each.history["loss"].tolist()).double() for each in (alone, run, exact("local", *fast))
    ]
    equally_near(*([each] for each in losses))


@pytest.mark.slow
@pytest.mark.steady
def test_fedbn_sends_no_parameter_and_no_statistic_of_batch_norm(short):
    run = short("fedbn", *WITH_BATCH_NORM)
    plain = short("fedavg", *WITH_BATCH_NORM)
    assert statistics(plain)
    assert statistics(run) == {}
    missing = set(plain.params) - set(run.params)
    assert {name.rsplit(".", 1)[1] for name in missing} == {"weight", "bias", "running_mean", "running_var"}
    assert len(missing) == 2 * len(statistics(plain))
