"""FedKSeed: rounds by hand in NumPy, the model from K numbers, bytes, and clients with parts of the model."""

import numpy as np
import pytest
import torch

from algorithms.fedkseed import METHOD, Replay, ZerothOrder, direction, moved_by, rebuild
from rayfed.seeds import derive, use_seed
from tests.algorithms.tiny import RATE, START, TRAIN, play, shares, task
from tests.rounding import near

EPS, POOL = 0.01, 5


def z(seed, number):
    """The direction of a seed of the pool, written down anew."""
    drawn = torch.Generator().manual_seed(derive(seed, "fedkseed", number, "w"))
    return torch.randn(2, generator=drawn).double().numpy()


def steps_of(client, number, w, seed):
    """Seeds and steps of a client in a round: one batch with all its examples in each of two passes."""
    found = []
    with use_seed(derive(seed, "fit", number, client)) as rng:
        for _ in range(2):
            torch.randperm(len(TRAIN[client]), generator=rng)
            drawn = int(torch.randint(POOL, (), generator=rng))
            towards = z(seed, drawn)
            rows = TRAIN[client]
            slope = (task(w + EPS * towards, rows) - task(w - EPS * towards, rows)) / (2 * EPS)
            found.append((drawn, -RATE * slope))
            w = w - RATE * slope * towards
    return found


def test_three_rounds_by_hand():
    seed, w = 3, START.copy()
    rounds = play(Replay(pool=POOL), ZerothOrder(eps=EPS), rounds=3, seed=seed, epochs=2)
    for number, (found, ledger) in enumerate(rounds):
        change = 0
        for client, share in zip(TRAIN, shares(), strict=True):
            change = change + share * sum(
                length * z(seed, drawn) for drawn, length in steps_of(client, number, w, seed)
            )
        w = w + change
        # Steps travel in float32: at most 6 of them, of at most 1, in each of the rounds.
        near(found, w, 3 * 6 * 4, size=4, precision=torch.float32)
        assert [row["down"] for row in ledger.transfers] == [4 * POOL] * 3
        assert [row["up"] for row in ledger.transfers] == [2 * (8 + 4)] * 3
    assert not np.allclose(w, START, atol=0.01)


def test_directions_depend_on_seed_number_and_name_only():
    names = {"a": torch.zeros(3), "b": torch.zeros(3)}
    one = direction(0, 7, names)
    assert torch.equal(one["a"], direction(0, 7, {"a": names["a"]})["a"])
    others = [one["b"], direction(0, 8, names)["a"], direction(1, 7, names)["a"]]
    assert not any(torch.equal(one["a"], other) for other in others)


def test_nothing_moves_beyond_the_rank_of_a_client():
    start = {"w.lora_A": torch.zeros(3, 2), "w.lora_B": torch.zeros(2, 3)}
    now = moved_by(start, 0, {4: 1.0}, rank=1)
    assert now["w.lora_A"][0].abs().min() > 0
    assert now["w.lora_B"][:, 0].abs().min() > 0
    assert not now["w.lora_A"][1:].any()
    assert not now["w.lora_B"][:, 1:].any()


def test_the_model_is_rebuilt_from_the_sums():
    start = {"w": torch.zeros(2)}
    sums = torch.zeros(POOL)
    sums[2], sums[4] = 0.5, -2.0
    expected = 0.5 * direction(1, 2, start)["w"] - 2 * direction(1, 4, start)["w"]
    near(rebuild(start, 1, sums)["w"], expected, 4, size=8)


def test_clients_with_parts_of_the_model_get_whole_tensors_from_the_second_round_on(short):
    settings = ("tuning=lora", "tuning.rank=2", "train.lr=0.001", "server.pool=64")
    whole = short("fedkseed", *settings)
    assert whole.history["bytes_down"].tolist() == [4 * 64 * 5] * 3
    parts = short("fedkseed", "capacity.blocks=[1,2,2,2,2]", *settings)
    first, *later = parts.history["bytes_down"].tolist()
    assert first == 4 * 64 * 5
    assert min(later) > first


def test_a_batch_is_not_cut_into_parts():
    assert not METHOD.local().averages_rows
    with pytest.raises(Exception, match=r"server\.lora_agg"):
        Replay(lora_agg="product_svd")
