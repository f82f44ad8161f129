"""Dropout on a device: which numbers a layer draws, alone, in a group, and when it is computed again."""

import pytest
import torch
from torch import nn

from rayfed.devices import CountedDraws, RepeatedDraws, count_for, counted, counting, same_draws
from rayfed.executors.worker import adjust_trunk
from rayfed.fast.dropout import CountedDropout, use_counted_dropout
from rayfed.fast.fast_passes import FastPasses
from rayfed.federation.train_config import TrainConfig
from rayfed.testing import small_setup
from tests.pretended import TYPE, pretended

ONES = torch.ones(2, 3, 40)


def layer(p=0.5):
    made = nn.Dropout(p)
    made.__class__ = CountedDropout
    made.number = 7
    return made.train()


def test_a_client_draws_the_same_alone_and_beside_others():
    drop = layer()
    seeds = (5, 6, 7)
    with counting([CountedDraws(seed) for seed in seeds]):
        first, second = (drop(ONES.repeat(3, 1, 1)).chunk(3) for _ in range(2))
    for k, seed in enumerate(seeds):
        with counting([CountedDraws(seed)]):
            assert torch.equal(drop(ONES), first[k])
            assert torch.equal(drop(ONES), second[k])
    assert not torch.equal(first[0], second[0])


def test_clients_that_drew_unequally_often_continue_where_they_are():
    drop = layer()
    mine, other = CountedDraws(5), CountedDraws(6)
    with counting([mine]):
        drop(ONES)
    with counting([mine, other]):
        found = drop(ONES.repeat(2, 1, 1)).chunk(2)
    with counting([CountedDraws(5)]):
        drop(ONES)
        assert torch.equal(drop(ONES), found[0])
    with counting([CountedDraws(6)]):
        assert torch.equal(drop(ONES), found[1])


def test_rows_that_are_not_those_of_clients_are_refused():
    drop = layer()
    with (
        counting([CountedDraws(5), CountedDraws(6)]),
        pytest.raises(NotImplementedError, match="which client"),
    ):
        drop(torch.ones(3, 4))


def test_the_gradient_has_the_mask_of_the_pass():
    drop = layer()
    x = ONES.clone().requires_grad_()
    with counting([CountedDraws(5)]):
        y = drop(x)
        drop(ONES)
    (found,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(found, y.detach())


def test_outside_of_a_call_and_in_evaluation_torch_decides():
    drop = layer()
    torch.manual_seed(1)
    wanted = nn.functional.dropout(ONES, 0.5)
    torch.manual_seed(1)
    assert torch.equal(drop(ONES), wanted)
    client = CountedDraws(5)
    with counting([client]):
        assert drop.eval()(ONES) is ONES
    assert client.state == {}


def test_what_is_repeated_draws_the_same_and_is_counted_once():
    drop = layer()
    client = CountedDraws(5)
    with counting([client]):
        again = RepeatedDraws()
        first = drop(ONES)
        count_for([])
        for _ in range(2):
            with again:
                assert torch.equal(drop(ONES), first)
        assert counted() == ()
        count_for([client])
        with same_draws(torch.device("cpu")):
            second = drop(ONES)
        assert torch.equal(drop(ONES), second)
        assert client.state == {7: 2}
    assert counted() == ()


OVERRIDES = ("algorithm=fedavg", "data.domains=[plain]", "tuning.dropout=0.5")


def gradients(checkpointing, passes):
    """Gradients of a model on the pretended device after several passes, and what was counted."""
    model = small_setup(*OVERRIDES).context.build()
    client = CountedDraws(3)
    with pretended() as device:
        model = model.to(device.name)
        train = TrainConfig(checkpointing=checkpointing, graphs=False)
        adjust_trunk(model, train, TYPE)
        FastPasses().prepare(model, train, TYPE)
        model.train()
        x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0)).to(device.name)
        with counting([client]):
            outputs = [model(x) for _ in range(passes)]
            sum(out.square().sum() for out in outputs).backward()
        found = [p.grad.inner.clone() for p in model.parameters() if p.grad is not None]
    return found, client.state


@pytest.mark.parametrize("passes", [1, 2])
def test_activations_that_are_computed_again_have_the_same_masks(passes):
    kept, counts = gradients(False, passes)
    again, others = gradients(True, passes)
    assert len(kept) > 2
    assert all(map(torch.equal, kept, again))
    assert counts == others
    assert set(counts.values()) == {passes}


def test_layers_have_fixed_numbers_and_a_library_that_repeats_passes_keeps_torchs():
    model = small_setup(*OVERRIDES).context.skeleton()
    use_counted_dropout(model, checkpointing=True)
    numbers = [m.number for m in model.modules() if isinstance(m, CountedDropout)]
    assert numbers == list(range(len(numbers)))
    assert len(numbers) > 3
    plain = small_setup(*OVERRIDES).context.skeleton()
    plain.net = nn.Sequential(
        nn.Dropout(0.5), nn.Linear(2, 2)
    )  # no blocks, so that its library checkpoints it
    plain.refresh()
    use_counted_dropout(plain, checkpointing=True)
    assert type(plain.net[0]) is nn.Dropout
    use_counted_dropout(plain, checkpointing=False)
    assert type(plain.net[0]) is CountedDropout
