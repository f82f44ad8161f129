"""Ranks of clients: how they are given, what a client of a lower rank computes, and what is counted."""

from dataclasses import replace

import pytest
import torch

from rayfed.client_facts import ClientInfo, ClientTable
from rayfed.config.schema import load_config
from rayfed.engine.loop import run_rounds
from rayfed.errors import ConfigError
from rayfed.executors.inline import InlineExecutor
from rayfed.federation.client import Client
from rayfed.federation.train_config import TrainConfig
from rayfed.heterogeneity.capacity import assign, assign_ranks, sizes_of
from rayfed.testing import small_setup
from rayfed.types import Broadcast, Update, cut_to_rank, rank_axes
from tests.conftest import refused
from tests.rounding import equally_near, exactly_trained

DOMAINS = ClientTable.of({f"c{i}": ClientInfo(domain="aabb"[i], num_examples=1) for i in range(4)})


def test_blocks_and_ranks_are_given_alike():
    assert sizes_of(None, "rank") is sizes_of({3: 1.0}, "rank") is sizes_of({"rank": 2}, "blocks") is None
    both = {"blocks": [12, 3], "rank": [8, 2]}
    assert list(assign(both, DOMAINS, 12, 0).values()) == [12, 12, 3, 3]
    assert list(assign_ranks(both, DOMAINS, 8, 0).values()) == [8, 8, 2, 2]
    assert sorted(assign_ranks({"rank": {8: 1, 2: 1}}, DOMAINS, 8, 0).values()) == [2, 2, 8, 8]
    assert assign_ranks(6, DOMAINS, 8, 0) == {}
    config = load_config(["algorithm=fedit", "capacity.rank=[8,4]", "capacity.blocks={12: 0.5, 6: 0.5}"])
    assert config.capacity == {"rank": [8, 4], "blocks": {12: 0.5, 6: 0.5}}


@pytest.mark.parametrize(
    ("rank", "most", "message"),
    [
        (9, 8, "9 is not possible; the adapters have rank 8"),
        ([8, 0], 8, "0 is not possible"),
        ([1, 2, 3], 8, "3 ranks for 4 clients in 2 domains"),
        ("dynamic", 8, "is for capacity.blocks"),
        (2, 0, "trains no LoRA adapters"),
    ],
)
def test_impossible_ranks(rank, most, message):
    with pytest.raises(ConfigError, match=r"^capacity\.rank: .*" + message):
        assign_ranks({"rank": rank}, DOMAINS, most, 0)


def test_a_key_that_does_not_exist_is_refused():
    assert refused("capacity.ranks=[2,4]").startswith("capacity")


def test_a_client_holds_the_first_components():
    a, c = torch.ones(3, 5), torch.ones(3, 3)
    assert (rank_axes("w.lora_A"), rank_axes("w.lora_B"), rank_axes("w.lora_R")) == ((0,), (1,), ())
    params = {"w.lora_A": a, "w.lora_C": c, "head.weight": a}
    cut = cut_to_rank(params, 2)
    assert cut["w.lora_A"].sum(1).tolist() == [5, 5, 0]
    assert (cut["w.lora_C"].sum(), a.sum()) == (4, 15)
    assert cut["head.weight"] is cut_to_rank(params, 3)["w.lora_A"] is a
    assert cut_to_rank(params, None) is params
    params = {"w.lora_A": a, "w.lora_B": torch.ones(7, 3), "head": torch.ones(2)}
    assert Broadcast(round=0, params=params, rank=2).num_bytes() == 4 * (10 + 14 + 2)
    assert Update(client="a", params=params, rank=1).num_bytes() == 4 * (5 + 7 + 2)
    assert Update(client="a", params=params).num_bytes() == 4 * (15 + 21 + 2)


def rounds_of(cache, method, rank, start=None, ranks=None, exact=False):
    """Final tensors of a method with adapters of a rank, without dropout and with alpha / rank = 1."""
    options = (f"tuning.rank={rank}", "tuning.dropout=0", "train.clip_norm=0.05", "train.momentum=0.9")
    domains = ("data.domains=[plain,fonts]", f"data.cache={cache}", "model.options={depth: 2}")
    setup = small_setup(f"algorithm={method}", *options, *domains)
    experiment = replace(
        setup.experiment, ranks=dict.fromkeys(setup.experiment.clients, ranks) if ranks else {}
    )
    if exact:
        return setup.start, exactly_trained(setup)
    executor = InlineExecutor(setup.context, setup.weights)
    *_, last = run_rounds(experiment, executor, setup.start if start is None else start)
    return setup.start, last.state.params


@pytest.mark.parametrize("method", ["fedavg", "scaffold"])
def test_a_client_of_rank_2_in_a_model_of_rank_5_computes_what_a_model_of_rank_2_does(method, cache):
    small, wanted = rounds_of(cache, method, 2)
    larger = {name: value.clone() for name, value in rounds_of(cache, method, 5)[0].items()}
    for name, value in larger.items():
        part = value.narrow(rank_axes(name)[0], 0, 2) if rank_axes(name) else value
        part.copy_(small[name])
    found = rounds_of(cache, method, 5, larger, 2)[1]
    parts = {n: v.narrow(rank_axes(n)[0], 0, 2) if rank_axes(n) else v for n, v in found.items()}
    equally_near(wanted, parts, rounds_of(cache, method, 2, exact=True)[1])
    assert all(torch.count_nonzero(v) == torch.count_nonzero(parts[n]) for n, v in found.items())


class OneFactor(Client):
    """A client of rank 1 with one factor B of rank 3."""

    def __init__(self, **train):
        super().__init__("a", None, None, TrainConfig(**train), None, rank=1)
        self.b = torch.nn.Parameter(torch.zeros(1, 3))
        self.b.grad = torch.tensor([[3.0, 4.0, 0.0]])

    def trainable(self):
        return {"w.lora_B": self.b}


def test_gradients_beyond_the_rank_count_neither_in_the_norm_nor_in_a_step():
    client = OneFactor(clip_norm=1.0)
    client.clip_gradients()
    assert client.b.grad.tolist() == [[pytest.approx(1.0), 0, 0]]
    client = OneFactor(lr=0.5)
    client.optimizer().step()
    assert client.b.tolist() == [[-1.5, 0, 0]]


def test_frozen_factors_and_unequal_ranks(small):
    """With A frozen, the columns of B beyond the rank would have gradients."""
    run = small(
        "algorithm=ffa_lora", "tuning.rank=4", "capacity.rank=1", "train.momentum=0.9", "train.clip_norm=1"
    )
    columns = [v.abs().sum(0) for n, v in run.params.items() if n.endswith(".lora_B")]
    assert all(column[0] > 0 and not column[1:].any() for column in columns)


def test_compressed_changes_are_added_to_what_a_client_of_a_lower_rank_received(small):
    plain = small("tuning.rank=4", "capacity.rank=1", "rounds=2")
    run = small("tuning.rank=4", "capacity.rank=1", "channel=[fp16]", "rounds=2")
    assert run.history["bytes_up"].tolist() == [b / 2 for b in plain.history["bytes_up"]]
    for name, value in run.params.items():
        for axis in rank_axes(name):
            assert value.narrow(axis, 0, 1).any()
            assert not value.narrow(axis, 1, 3).any()


def test_traffic_is_that_of_the_ranks(small):
    plain = small("tuning.rank=4", "rounds=1")
    run = small("tuning.rank=4", "rounds=1", "capacity.rank=[4,1,4,2,4]")
    factors = 4 * sum(v.numel() for n, v in plain.params.items() if rank_axes(n))
    saved = factors * (3 + 2) // 4
    for way in ("bytes_up", "bytes_down"):
        assert run.history[way].tolist() == [plain.history[way].tolist()[0] - saved]
