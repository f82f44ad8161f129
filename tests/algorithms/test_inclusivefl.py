from dataclasses import replace

import pytest
import torch

from algorithms.inclusivefl import InclusiveServer, inject, size_moves
from rayfed import simulate
from rayfed.errors import ConfigError
from rayfed.testing import SGD
from rayfed.types import ServerState
from tests.algorithms.depth import block, cohort, numbers, scalars, update
from tests.vectors import vector

V6 = vector("fedra", "V6")
START = V6.inputs["round_start"]
BETA = V6.inputs["beta"]
ROUND1, ROUND2 = (
    {int(size): moves for size, moves in V6.inputs[name].items()} for name in ("delta_round1", "delta_round2")
)
SIZES = {f"c{size}": size for size in V6.inputs["sizes"]}


def play(server, state, moves, round):
    context = cohort(SIZES, depth=5, round=round)
    state = server.plan(state, context)
    updates = [
        update(cid, {j: state.params[block(j)].item() + d for j, d in enumerate(moves[size])})
        for cid, size in SIZES.items()
    ]
    return server.aggregate(state, context, updates)


def start():
    return ServerState(round=0, params=scalars(dict(enumerate(START))))


@pytest.mark.parametrize("span", ["exclusive", "inclusive"])
def test_v6_momentum_distillation_by_hand(span):
    server = InclusiveServer(range=span)
    one = play(server, start(), ROUND1, 0)
    V6.matches(numbers(one.params, 5), V6.expected["after_round1"])
    V6.matches(numbers(play(server, one, ROUND2, 1).params, 5), V6.expected[span]["after_round2"])


def test_v6_without_distillation_it_is_prefix_averaging():
    server = InclusiveServer(md=False)
    one = play(server, start(), ROUND1, 0)
    V6.matches(numbers(one.params, 5), V6.expected["after_round1"])
    V6.matches(numbers(play(server, one, ROUND2, 1).params, 5), V6.expected["after_round2_plain"])


@pytest.mark.parametrize("span", ["exclusive", "inclusive"])
def test_v6_only_the_last_block_of_the_smaller_sizes_is_changed(span):
    expected = V6.expected[span]
    moves = {size: scalars(dict(enumerate(d))) for size, d in ROUND2.items()}
    memory = {str(size): scalars(dict(enumerate(d))) for size, d in ROUND1.items()}
    changed = inject(moves, memory, BETA, span == "inclusive")
    for size in (2, 3):
        value = changed[size][block(size - 1)].item()
        V6.matches(value, expected["last_block_delta"][str(size)])
        own = (1 - BETA) * ROUND2[size][-1]
        V6.matches((value - own) / BETA, expected["momentum"][str(size)])
        assert all(changed[size][block(j)] == moves[size][block(j)] for j in range(size - 1))
    assert changed[5] == moves[5]


@pytest.mark.parametrize(("memory", "key"), [("injected", "memory_after_injection"), ("raw", "memory_raw")])
def test_v6_what_is_remembered(memory, key):
    server = InclusiveServer(memory=memory)
    two = play(server, play(server, start(), ROUND1, 0), ROUND2, 1)
    V6.matches(two.memory["moves"]["3"][block(2)].item(), V6.expected["round3_momentum_for_size2"][key])


def test_a_size_that_was_absent_gives_no_momentum():
    moves = {size: scalars(dict(enumerate(d))) for size, d in ROUND2.items()}
    changed = inject(moves, {"2": scalars({0: 1.0, 1: 1.0})}, 0.2, inclusive=False)
    assert changed == moves


def test_two_clients_of_one_size_count_by_weight():
    updates = [update("a", {0: 1.0}), update("b", {0: 4.0})]
    moves = size_moves(scalars({0: 0.0}), updates, [2.0, 1.0], [1, 1])
    assert moves[1][block(0)].item() == pytest.approx(2.0)


def test_refactored_coordinates_cannot_be_remembered():
    with pytest.raises(ConfigError, match="lora_agg"):
        InclusiveServer(lora_agg="product_svd")
    assert InclusiveServer(lora_agg="product_svd", md=False).lora_agg == "product_svd"


@pytest.mark.slow
@pytest.mark.steady
def test_a_run(tmp_path):
    common = ["cluster=inline", "rounds=2", "data.limit=40", "capacity=[12,10,8,6,3]", "evaluation.every=2"]
    common += ["model.pretrained=false", "figures=false", *SGD]  # Adam's small steps depend on rounding
    runs = {
        name: simulate([*common, f"output={tmp_path}/{name}", *overrides])
        for name, overrides in {
            "plain": ["algorithm=fedavg"],
            "off": ["algorithm=inclusivefl", "server.md=false"],
            "on": ["algorithm=inclusivefl"],
        }.items()
    }
    assert runs["plain"].sha256 == runs["off"].sha256
    on = runs["on"].params
    off = runs["off"].params
    changed = {name for name in on if not torch.allclose(on[name], off[name], atol=1e-6)}
    assert changed
    assert {int(name.split(".")[1]) for name in changed} <= {2, 5, 7, 9}  # last blocks of the smaller sizes


def test_private_tops_stay_with_their_size():
    """Block 1 of size 2 and block 2 of size 3 are their own: 0.6 + 0.2 and 0.7 + 0.4.

    The others share: block 0 moves by (0.1 + 0.3 + 0.05) / 3, block 1 by (-0.1 + 0.15) / 2, block 2 by -0.2.
    """
    server = InclusiveServer(private_top=True, md=False)
    state = play(server, start(), ROUND1, 0)
    assert numbers(state.params, 5) == pytest.approx([0.65, 0.625, 0.5, 1.4, 1.9])
    sent = server.send(server.plan(state, cohort(SIZES, depth=5, round=1)), cohort(SIZES, depth=5, round=1))
    assert sent["c2"].params[block(1)].item() == pytest.approx(0.8)
    assert sent["c3"].params[block(2)].item() == pytest.approx(1.1)
    assert sent["c3"].params[block(1)].item() == pytest.approx(0.625)
    assert sent["c5"].params[block(1)].item() == pytest.approx(0.625)


@pytest.mark.slow
@pytest.mark.steady
def test_private_tops_run(tmp_path):
    overrides = ["algorithm=inclusivefl", "server.private_top=true", "capacity=[12,9,6,3,3]", "data.limit=20"]
    result = simulate(
        [*overrides, "rounds=2", "figures=false", "cluster=inline", f"output={tmp_path / 'run'}"]
    )
    assert result.metrics["round"] == 2


def test_the_private_top_of_the_largest_clients_is_the_global_one():
    """Sizes 2 and 3 of 5 blocks: block 2 and the head are those of size 3, which is the largest."""
    sizes = {"c2": 2, "c3": 3}
    server = InclusiveServer(private_top=True, md=False)
    params = {**scalars(dict.fromkeys(range(5), 0.0)), "head.weight": torch.zeros(1)}
    context = cohort(sizes, depth=5)
    state = server.plan(ServerState(round=0, params=params), context)
    updates = []
    for cid, moved in (("c2", 1.0), ("c3", 3.0)):
        own = update(cid, dict.fromkeys(range(sizes[cid]), moved))
        updates.append(replace(own, params={**own.params, "head.weight": torch.tensor([moved])}))
    after = server.aggregate(state, context, updates)
    assert after.params["head.weight"].item() == 3
    assert numbers(after.params, 5) == [2, 3, 3, 0, 0]
    again = cohort(sizes, depth=5, round=1)
    sent = server.send(server.plan(after, again), again)
    assert [sent[cid].params["head.weight"].item() for cid in sizes] == [1, 3]


def test_distillation_leaves_running_statistics_alone():
    moves = {
        s: {"blocks.0.n.running_var": torch.tensor([1.0]), "blocks.0.w": torch.tensor([1.0])} for s in (1, 2)
    }
    moves[2] |= {"blocks.1.n.running_var": torch.tensor([5.0]), "blocks.1.w": torch.tensor([5.0])}
    changed = inject(moves, {"2": moves[2]}, 0.2, inclusive=False)
    assert changed[1]["blocks.0.n.running_var"].item() == 1
    assert changed[1]["blocks.0.w"].item() == pytest.approx(1.8)
