"""LoRA-A2: scores, choice and mean of components by hand, and its reduction to RoLoRA."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from algorithms.lora_a2 import (
    PLACES,
    VALUES,
    AlternatingSelection,
    SparseMean,
    keep_only,
    mask_of,
    scores,
    select,
)
from rayfed.types import Broadcast, ServerState, Update
from tests.rounding import near

A, B = "w.lora_A", "w.lora_B"


def test_scores_by_hand():
    """Changes of B: columns (3, 4) and (0, 2); rows of A: (1, 0) and (6, 8). Scores 5 x 1 and 2 x 10."""
    a = torch.tensor([[1.0, 0.0], [6.0, 8.0]])
    before = {A: a, B: torch.tensor([[1.0, 0.0], [1.0, 1.0]])}
    after = {A: a, B: torch.tensor([[4.0, 0.0], [5.0, 3.0]])}
    assert scores(B, before, after).tolist() == [5, 20]
    product = (after[B] - before[B])[:, 1:] @ a[1:]
    assert torch.linalg.norm(product) == 20
    # A moves by (0, 2) and (3, 4); columns of B before: (1, 1) and (0, 1).
    moved = {A: a + torch.tensor([[0.0, 2.0], [3.0, 4.0]]), B: before[B]}
    assert scores(A, before, moved).tolist() == pytest.approx([2 * 2**0.5, 5])


def test_components_are_chosen_among_all_adapters_and_the_first_of_equal_ones():
    found = {"one": torch.tensor([1.0, 7.0, 7.0]), "two": torch.tensor([2.0, 7.0, 9.0])}
    chosen = select(found, 3)
    assert {name: rows.tolist() for name, rows in chosen.items()} == {"one": [1, 2], "two": [2]}


def test_components_that_are_not_chosen_get_other_values():
    b = torch.arange(6.0).reshape(2, 3)
    keep_only(b, mask_of(B, b, torch.tensor([1])), torch.full((2, 3), 9.0))
    assert b.tolist() == [[9, 1, 9], [9, 4, 9]]
    assert mask_of(A, torch.zeros(3, 2), torch.tensor([0, 2])).tolist() == [[True], [False], [True]]


def test_a_step_by_hand():
    """Rate 1/2, decay 1: the chosen 2 with slope 1 becomes 2 - (1 + 2) / 2; the 3 and A stay as they are."""
    live = {B: nn.Parameter(torch.tensor([[3.0, 2.0]])), A: nn.Parameter(torch.ones(2, 1))}
    before = {name: value.detach().clone() for name, value in live.items()}

    def backward(loss, batch):
        (live[B].sum() + live[A].sum()).backward()

    client = SimpleNamespace(trainable=lambda: live, backward=backward, clip_gradients=lambda: None)
    optimizer = torch.optim.SGD(live.values(), lr=0.5, weight_decay=1.0)
    masks = {B: mask_of(B, before[B], torch.tensor([1]))}
    sent = Broadcast(round=0, params={})
    AlternatingSelection().masked_step(client, sent, None, optimizer, before, masks)
    assert live[B].tolist() == [[3.0, 0.5]]
    assert live[A].tolist() == [[1.0], [1.0]]


def test_the_pass_for_trial_is_undone(short):
    """After one step of plain descent the chosen columns of B are those of RoLoRA, which chooses all."""
    settings = (
        "tuning.rank=4",
        "tuning.dropout=0",
        "data.domains=[plain]",
        "rounds=1",
        "train.batch_size=64",
    )
    methods = (("lora_a2", "local.budget=1", "local.b_rate=1"), ("rolora",))
    found, whole = (short(*each, *settings).params for each in methods)
    for name in (name for name in found if name.endswith("lora_B")):
        chosen = found[name].abs().sum(0) > 0
        expected = whole[name][:, chosen]
        # The rows of the batch come in another order: sums over 40 pictures of 17 tokens of width 64.
        near(found[name][:, chosen], expected, 40 * 17 * 64, size=float(whole[name].abs().max()))


def test_the_mean_of_sparse_answers_by_hand():
    """B was (1, 2); one client, weight 1/4, sends column 0 as 5, the other one column 1 as 6."""
    start = ServerState(round=0, params={B: torch.tensor([[1.0, 2.0]]), "head": torch.tensor(0.0)})
    answers = [
        Update(
            client=cid,
            params={"head": torch.tensor(head)},
            extra={PLACES: {B: torch.tensor([column])}, VALUES: {B: torch.tensor([[value]])}},
        )
        for cid, column, value, head in (("a", 0, 5.0, 4.0), ("b", 1, 6.0, 8.0))
    ]
    after = SparseMean().average(start, answers, [0.25, 0.75]).params
    assert after[B].tolist() == [[1 + 0.25 * 4, 2 + 0.75 * 4]]
    assert after["head"] == 0.25 * 4 + 0.75 * 8


def test_with_a_budget_of_the_rank_it_is_rolora(short):
    settings = ("rounds=3", "tuning.rank=4", "train.momentum=0.9", "train.weight_decay=0.01")
    assert (
        short("lora_a2", "local.budget=4", "local.b_rate=1", *settings).sha256
        == short("rolora", *settings).sha256
    )


@pytest.mark.parametrize("factor", [5.0, 0.5])
def test_b_has_another_rate_than_a_and_the_head(factor):
    """With slopes of 1 a step of SGD is as long as the rate; two steps with momentum 1/2 have 2.5 of it."""
    names = ("w.lora_A", "w.lora_B", "v.lora_B", "head.weight")
    live = {name: nn.Parameter(torch.zeros(2, 2)) for name in names}
    made = torch.optim.SGD(live.values(), lr=0.25, momentum=0.5)
    client = SimpleNamespace(trainable=lambda: live, optimizer=lambda: made)
    optimizer = AlternatingSelection(b_rate=factor).optimizer(client)
    for _ in range(2):
        for value in live.values():
            value.grad = torch.ones(2, 2)
        optimizer.step()
    moved = {name: value[0, 0].item() for name, value in live.items()}
    assert moved == {name: -0.25 * 2.5 * (factor if "lora_B" in name else 1.0) for name in names}


def test_a_budget_lowers_the_bytes_and_the_number_of_components_that_move(short):
    settings = (
        "tuning.rank=4",
        "train.weight_decay=0.01",
        "data.domains=[plain]",
        "model.options={depth: 2}",
    )
    runs = [short("lora_a2", "local.budget=1", f"rounds={n}", *settings) for n in (1, 2)]
    b = [name for name in runs[0].params if name.endswith("lora_B")]
    moved = sum(int((runs[0].params[name].abs().sum(0) > 0).sum()) for name in b)
    assert moved == 1 * len(b)  # one client chose; B starts as zero
    assert all(torch.equal(runs[0].params[name], runs[1].params[name]) for name in b)
    dense = short("rolora", "rounds=1", *settings)
    up = [run.history["bytes_up"].tolist()[0] for run in (runs[0], dense)]
    assert up[0] < up[1]
