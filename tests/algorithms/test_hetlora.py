"""HetLoRA: the weights of the mean and the pruning by hand, and its reduction to FedIT."""

from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
import torch

from algorithms.hetlora import NormWeighted, SelfPruning, product_norm
from rayfed.types import ServerState, Update
from tests.rounding import near


def adapter(client, b, a, **others):
    return Update(client=client, params={"w.lora_B": b, "w.lora_A": a, **others}, num_examples=1)


def test_the_mean_by_hand():
    """Products [[3], [4]] and [[0], [10]] (padded): norms 5 and 10, so the weights are 1/3 and 2/3."""
    one = adapter("a", torch.tensor([[3.0, 0], [4, 0]]), torch.tensor([[1.0], [0]]), head=torch.tensor(1.0))
    two = adapter("b", torch.tensor([[0.0, 0], [4, 2]]), torch.tensor([[2.0], [1]]), head=torch.tensor(3.0))
    assert product_norm(one.params["w.lora_B"], one.params["w.lora_A"]) == pytest.approx(5)
    after = NormWeighted().average(ServerState(round=0, params=one.params), [one, two], [0.5, 0.5]).params
    near(after["w.lora_A"], torch.tensor([[5.0], [2]]) / 3, 12)
    near(after["w.lora_B"], torch.tensor([[3.0, 0], [12, 4]]) / 3, 12)
    assert after["head"] == 2


def test_products_of_zero_are_averaged_as_usual():
    zero = adapter("a", torch.zeros(2, 1), torch.ones(1, 2))
    after = NormWeighted().average(ServerState(round=0, params=zero.params), [zero, zero], [0.5, 0.5]).params
    assert torch.equal(after["w.lora_A"], torch.ones(1, 2))


@pytest.mark.parametrize(("gamma", "norm"), [(0.5, 5 * 2), (0.99, 3 * 1), (1.0, 0)])
def test_the_penalty_of_what_would_be_given_up_by_hand(gamma, norm):
    """Rank 4. Gamma 0.5: rows (4, 3) of A times the last two columns of B; 0.99: only the last ones."""
    a = torch.tensor([[9.0], [9.0], [4.0], [3.0]])
    b = torch.tensor([[9.0, 9.0, 3**0.5, 1.0]])
    client = SimpleNamespace(rank=4, device="cpu", trainable=lambda: {"w.lora_A": a, "w.lora_B": b})
    assert SelfPruning(gamma=gamma).last_components(client).item() == pytest.approx(norm)


def test_one_client_without_penalty_and_pruning_is_fedit(short):
    alone = ("data.domains=[plain]", "rounds=2")
    fixed = ("local.lam=0", "local.gamma=1")
    assert short("hetlora", *alone, *fixed).sha256 == short("fedit", *alone).sha256
    assert short("hetlora", *alone, "local.lam=1").sha256 != short("fedit", *alone).sha256


def test_a_strong_penalty_lowers_the_ranks_and_the_traffic(short):
    settings = ("tuning.rank=4", "capacity.rank=[4,2,4,1,3]", "local.gamma=0.5", "local.lam=300", "rounds=4")
    run = short("hetlora", *settings, "train.lr=0.005")
    table = pq.read_table(run.path / "clients.parquet").to_pandas()
    ranks = table[table.metric == "rank"].pivot(index="client", columns="round", values="value")
    assert ranks[1].tolist() == [4, 2, 4, 1, 3]
    assert (ranks[4] < ranks[1]).any()
    assert (ranks.diff(axis=1).fillna(0) <= 0).all().all()
    traffic = run.history["bytes_up"].tolist()
    assert traffic[3] < traffic[0]
