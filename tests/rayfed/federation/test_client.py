"""Scalars that a client half measures become metrics of its answer."""

from dataclasses import dataclass

import pyarrow.parquet as pq
import pytest
import torch

from rayfed import Local, Method, Server
from rayfed.fast.optimizers import joint_optimizer
from rayfed.federation.passes import PLAIN
from rayfed.federation.train_config import TrainConfig


@dataclass(frozen=True)
class Measuring(Local):
    """Reports the loss of every batch and the number of its examples."""

    def loss(self, client, sent, batch):
        value = super().loss(client, sent, batch)
        client.measure(batch_loss=value, examples=len(batch[1]))
        return value


@dataclass(frozen=True)
class Reading(Server):
    """Copies what the clients measured into its own table."""

    def aggregate(self, state, cohort, updates):
        for update in updates:
            cohort.record("measured", client=update.client, **update.metrics)
        return super().aggregate(state, cohort, updates)


METHOD = Method(server=Reading, local=Measuring)


def test_measured_scalars_are_means_and_reach_the_server_and_the_tables(small):
    options = ("data.domains=[plain]", "data.limit=12", "data.val=2", "data.test=0.2", "train.batch_size=4")
    plain = small(*options, "rounds=1")
    run = small(f"algorithm={__name__}:METHOD", *options, "rounds=1")
    assert run.sha256 == plain.sha256  # measuring changes nothing
    row = pq.read_table(run.path / "measured.parquet").to_pylist()[0]
    n = pq.read_table(run.path / "partition.parquet").to_pandas().query("split == 'train'").shape[0]
    steps = -(-n // 4)
    assert row["examples"] == pytest.approx(n / steps)
    table = pq.read_table(run.path / "clients.parquet").to_pandas()
    assert table[table.metric == "batch_loss"].value.tolist() == [row["batch_loss"]]


def test_the_mean_is_over_all_calls_and_keeps_no_graph():
    from rayfed.federation.client import Client

    client = Client("a", None, None, None, None)
    value = torch.tensor(2.0, requires_grad=True)
    client.measure(loss=value * 2, other=1)
    client.measure(loss=1.0)
    assert client.metrics() == {"loss": 2.5, "other": 1.0}
    assert not any(isinstance(v, torch.Tensor) and v.requires_grad for v in client.measured["loss"])


@pytest.mark.parametrize("make", [PLAIN.optimizer, joint_optimizer])
@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_optimizers_take_the_steps_of_torchs_own(name, make):
    config = TrainConfig(optimizer=name, lr=0.1, momentum=0.9, weight_decay=0.01)
    start = [torch.randn(4, 3), torch.randn(5)]
    mine, theirs = ([torch.nn.Parameter(v.clone()) for v in start] for _ in range(2))
    kind = getattr(torch.optim, {"sgd": "SGD", "adam": "Adam", "adamw": "AdamW"}[name])
    own = {"momentum": 0.9} if name == "sgd" else {"betas": config.betas, "eps": config.eps}
    pair = (
        make(config, mine),
        kind(theirs, lr=0.1, weight_decay=0.01, foreach=None if make == PLAIN.optimizer else True, **own),
    )
    assert isinstance(pair[0], kind)
    for _ in range(3):
        for optimizer, values in zip(pair, (mine, theirs), strict=True):
            optimizer.zero_grad()
            sum(value.square().sum() for value in values).backward()
            optimizer.step()
    assert all(map(torch.equal, mine, theirs))
    assert not mine[0].grad_fn
    again = make(config, mine)
    again.load_state_dict(pair[0].state_dict())
    assert str(again.state_dict()) == str(pair[1].state_dict())
