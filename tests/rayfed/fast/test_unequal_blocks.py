"""Clients of a group that hold different blocks: their updates as alone, and how many passes they take."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from benchmarks.step_operations import Case
from rayfed.fast import group
from rayfed.fast.stacked import Stacked
from rayfed.fast.steps import HeldStacks
from rayfed.fast.training import train_all
from rayfed.fast.unequal_blocks import Holders, RowsOfHolders, put_values_of, values_of
from rayfed.federation.train_config import TrainConfig
from rayfed.models.backbone import Backbone
from rayfed.models.blocks import BlockStack
from rayfed.models.named_tensors import NamedTensor, bound
from tests.conftest import STEADY
from tests.rayfed.fast.test_group import check_agreement, played, prepared
from tests.rayfed.fast.test_group_device import OWN_LOOP
from tests.rayfed.fast.test_group_device import agree as agree_on_device
from tests.rayfed.fast.test_group_matrix import OPTIMIZERS, agree
from tests.rayfed.fast.test_steps import SETTINGS, SHAPES, Clients
from tests.rayfed.fast.test_training import UNEQUAL

FEDRA = ("algorithm=fedra", "tuning=lora", "capacity=[4,2,3,1]")
RANKS = "capacity={blocks: {2: 0.5, 4: 0.5}, rank: {2: 0.5, 4: 0.5}}"
DEPTH = "model.options={depth: 4}"


@pytest.fixture
def passes(monkeypatch):
    """Active blocks of each pass of the network with gradients."""
    seen = []
    forward = Backbone.forward

    def noted(self, *args, **kwargs):
        if torch.is_grad_enabled():
            seen.append(self.active)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(Backbone, "forward", noted)
    return seen


@pytest.mark.parametrize(
    "overrides",
    [
        "algorithm=fedra tuning.dropout=0.3",
        "algorithm=fedra tuning.dropout=0",
        *(
            pytest.param(case, marks=STEADY)
            for case in (
                "algorithm=inclusivefl tuning.dropout=0",
                "algorithm=fedavg tuning.dropout=0",
                "algorithm=fedra tuning=bitfit",
                "algorithm=fedra tuning=visual_prompt",
                "algorithm=fedra tuning=adapter",
                "algorithm=fedra tuning.stem=true tuning.dropout=0",
                "algorithm=fedra model=clip_mini model.options={}",
                "algorithm=fedra model=mixer_mini model.options={}",
            )
        ),
    ],
)
def test_updates_of_clients_with_different_blocks_are_those_of_clients_alone(overrides):
    capacity = "capacity=[1,2,2,1]" if "model=" in overrides else FEDRA[2]
    depth = () if "model=" in overrides else (DEPTH,)
    check_agreement(prepared(FEDRA[1], capacity, *depth, "data.limit=40", *overrides.split()))


@pytest.mark.parametrize(
    "overrides",
    [
        (*FEDRA, "tuning.dropout=0.5", OWN_LOOP),
        *(
            pytest.param(case, marks=STEADY)
            for case in (
                (*FEDRA, "tuning.dropout=0", OWN_LOOP),
                (*FEDRA, "train.optimizer=adam", "train.eps=1.0e-4", "train.keep_optimizer=true"),
            )
        ),
    ],
)
def test_clients_with_their_own_loops_on_a_device_have_the_updates_of_single_clients(overrides):
    agree_on_device(prepared(DEPTH, "data.limit=40", *overrides))


@pytest.mark.parametrize(
    "overrides",
    [
        ("algorithm=fedra", "tuning.dropout=0.5", "capacity=[4,2,3,1,2,4]"),
        # With this seed a holder of a block has a larger rank than the client whose number is its place.
        ("algorithm=ffa_lora", "server.name=fedra", "tuning.rank=4", RANKS, "seed=3"),
        pytest.param(("algorithm=inclusivefl", "capacity=[4,2,3,1,2,4]", "train.momentum=0.9"), marks=STEADY),
    ],
)
def test_clients_of_different_sizes_and_blocks_train_in_one_loop(overrides, monkeypatch):
    done = []
    monkeypatch.setattr(group, "train_all", lambda *parts: done.append(train_all(*parts)) or done[-1])
    agree_on_device(prepared(DEPTH, *UNEQUAL, *overrides), group=5)
    assert done == [True]


@pytest.mark.parametrize("on_device", [False, True])
def test_a_group_of_four_agrees(on_device):
    overrides = (*FEDRA, DEPTH, *OPTIMIZERS["adam"].split(), "train.precision=fp32")
    agree(overrides, on_device, groups=(4,), clients=4, precision="fp32")


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("on_device", [False, True])
def test_groups_of_four_and_of_thirty_two_agree(on_device, precision):
    overrides = (*FEDRA[:2], "capacity=dynamic", DEPTH, *OPTIMIZERS["adam"].split(), "train.batch_size=2")
    agree((*overrides, f"train.precision={precision}"), on_device, (4, 32), 32, precision)


def test_a_group_runs_the_network_once_for_all_blocks(passes):
    setup = prepared(*FEDRA, DEPTH, "train.local_steps=1", "data.limit=16")
    passes.clear()  # those that count the operations of a step, if no test before did
    played(setup, 4)
    assert len(passes) == 1
    played(setup, 1)
    assert len(passes) == 5
    assert {*passes[0]} == {block for own in passes[1:] for block in own}
    assert len({*passes[1:]}) > 1


@pytest.mark.steady
def test_eight_clients_with_different_blocks_take_hardly_more_launches_than_one_with_all():
    shared, _ = Case("FedRA", "fp32", 8).counts()
    alone, _ = Case("LoRA", "fp32", 1).counts()
    assert shared.kernels < 1.1 * alone.kernels


class Scale(nn.Module):
    """A block with one number, for each client where it is `Stacked`."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x):
        own = self.weight
        return x * (
            own.value.repeat_interleave(len(x) // len(own.value))[:, None]
            if isinstance(own, Stacked)
            else own
        )


BLOCKS = [(0, 2), (1, 2, 3), (2,), (0, 3)]
VALUES = torch.arange(2.0, 18.0).view(4, 4)
"""The number of each client, in a row, for each block."""


@pytest.mark.parametrize("apart", [False, True])
def test_each_row_meets_the_blocks_of_its_client_with_the_values_of_its_client(apart):
    stack = BlockStack(*(Scale() for _ in range(4)))
    holders = Holders(BLOCKS)
    entries = {j: [NamedTensor(stack._modules[str(j)], "weight", j, False, "")] for j in range(4)}
    leaves = {j: VALUES[holders.of(j), j].clone().requires_grad_() for j in range(4)}
    x = torch.arange(1.0, 9.0).view(8, 1)
    change = RowsOfHolders(stack, holders, lambda _: nullcontext(), entries if apart else None)
    with (
        bound([entries[j][0] for j in range(4)], [Stacked(leaves[j]) for j in range(4)]),
        stack.use_change(change),
    ):
        found = stack(x)
    expected = [x[2 * k : 2 * k + 2] * VALUES[k, list(own)].prod() for k, own in enumerate(BLOCKS)]
    assert torch.equal(found, torch.cat(expected))
    found.sum().backward()
    for j, leaf in leaves.items():
        sums = [x[2 * k : 2 * k + 2].sum() * VALUES[k, list(BLOCKS[k])].prod() for k in holders.of(j)]
        assert torch.equal(leaf.grad, torch.stack(sums) / leaf.detach())


def test_rows_that_have_met_no_trained_tensor_run_apart_on_the_cpu():
    stack = BlockStack(*(Scale() for _ in range(4)))
    sizes = []
    for block in stack._modules.values():
        block.register_forward_pre_hook(
            lambda _, given: sizes.append((len(given[0]), given[0].requires_grad))
        )
    for apart in (None, {}):
        with stack.use_change(RowsOfHolders(stack, Holders(BLOCKS), lambda _: nullcontext(), apart)):
            stack(torch.ones(4, 1))
    assert sizes == [
        *((2, False), (1, False), (3, True), (2, True)),
        *((2, False), (1, False), (2, True), (1, False), (2, True)),
    ]


def test_a_network_that_changes_rows_between_unequal_blocks_is_refused():
    stack = BlockStack(*(Scale() for _ in range(4)))
    change = RowsOfHolders(stack, Holders(BLOCKS), lambda _: nullcontext())
    x = torch.ones(4, 1)
    with stack.use_change(change), pytest.raises(NotImplementedError, match="changes rows between blocks"):
        for block in stack:
            x = block(x) + 1


def test_values_of_holders_are_copies_that_can_be_written_back():
    stacks = {"a": torch.arange(4.0), "b": torch.arange(8.0).view(4, 2)}
    places = {"a": [1, 3], "b": [0, 1, 2, 3]}
    values = values_of(stacks, places)
    assert values["a"].tolist() == [1, 3]
    assert torch.equal(values["b"], stacks["b"])
    for value in values.values():
        value.add_(10)
    assert stacks["a"].tolist() == [0, 1, 2, 3]
    put_values_of(stacks, places, values)
    assert stacks["a"].tolist() == [0, 11, 2, 13]
    assert stacks["b"][3].tolist() == [16, 17]


HELD = {"weight": [0, 2], "bias": [0, 1, 2]}


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: "-".join(map(str, s.values())))
def test_steps_of_holders_are_those_of_single_clients_of_whom_some_stop_early(settings):
    train = TrainConfig(lr=0.1, **settings)
    alone, together = Clients(train, False), Clients(train, True)
    for each in (alone, together):
        (group_of_one,) = each.optimizers[1].param_groups
        group_of_one["params"] = [each.values[1]["bias"]]
    stacks = values_of(together.stacks, HELD)
    held = HeldStacks([stacks[name] for name in SHAPES], [HELD[name] for name in SHAPES])
    taken = together.joint.of_all(together.optimizers, list(SHAPES), True, held)
    for clients in (3, 3, 2, 1):
        alone.step(range(clients))
        taken.take(clients, [torch.stack([alone.values[k][n].grad for k in HELD[n]]) for n in SHAPES])
    taken.end()
    put_values_of(together.stacks, HELD, stacks)
    together.agree(alone)
    assert together.optimizers[1].state.keys() <= {together.values[1]["bias"]}


def test_optimizers_with_states_or_of_other_tensors_take_no_steps_as_holders():
    train = TrainConfig(lr=0.1, optimizer="adam")
    clients = Clients(train, True)
    stacks = values_of(clients.stacks, HELD)
    held = HeldStacks([stacks[name] for name in SHAPES], [HELD[name] for name in SHAPES])
    assert clients.joint.of_all(clients.optimizers, list(SHAPES), False, held) is None
    clients.optimizers[1].param_groups[0]["params"] = [clients.values[1]["bias"]]
    assert clients.joint.of_all(clients.optimizers, list(SHAPES), False, held) is not None
    clients.step([1])
    for own in clients.values:
        for value in own.values():
            value.grad = None
    assert clients.joint.of_all(clients.optimizers, list(SHAPES), False, held) is None
