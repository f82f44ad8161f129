"""Groups of clients on a device: the updates of single clients there, and what a lack of memory does."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from rayfed.errors import DeviceError, ResourceError
from rayfed.fast.graphs import graphs_in
from rayfed.fast.group import Rows
from rayfed.federation.params import digest
from rayfed.models.backbone import Backbone
from tests.conftest import STEADY
from tests.pretended import pretended
from tests.pretended_autocast import mixed_precision
from tests.pretended_graphs import recording
from tests.pretended_memory import memory
from tests.rayfed.fast.test_group import (
    UNEVEN,
    Answers,
    ExactAnswers,
    moved,
    played,
    prepared,
)
from tests.rounding import equally_near, exact_numbers, exact_setup

UNEQUAL = ("data.limit=40", UNEVEN)
OWN_LOOP = "train.clip_norm=100"
"""Lets each client of a group have its own loop; for the other one see test_training.py."""

ADAM = "train.optimizer=adam train.eps=1.0e-4"
CASES = [
    f"algorithm=fedavg tuning.dropout=0.5 {OWN_LOOP}",
    *(
        pytest.param(case, marks=STEADY)
        for case in (
            "algorithm=fedgcr",
            f"algorithm=fedavg tuning=bitfit {OWN_LOOP}",
            f"algorithm=fedavg tuning=bitfit {ADAM} train.keep_optimizer=true {OWN_LOOP}",
            "algorithm=fedavg train.local_steps=2 train.clip_norm=0.5",
            "algorithm=fedsam tuning.dropout=0.5",
            "algorithm=ditto tuning.dropout=0.5",
        )
    ),
]


def judge(setup, device):
    """Computes in float64 on the device; a tensor there cannot change its type in place."""
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        executor = ExactAnswers(setup, device=device)
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(before)
    executor.worker.model.mixed = False
    return executor


def agree(setup, mixed=False, group=3):
    """Assert that groups on the device are as near to float64 as single clients, with the same draws.

    Args:
        setup: An experiment with one client more than the group has.
        mixed: Whether the device computes in bf16.
        group: Clients that share their passes; the last one is a group of one.
    """
    with pretended() as device, mixed_precision() if mixed else nullcontext():
        alone, _ = played(setup, 1, executor=Answers(setup, device=device.name))
        kernels = device.counts.kernels
        grouped, _ = played(setup, group, executor=Answers(setup, device=device.name))
        assert device.counts.kernels - kernels < kernels
        with exact_numbers():
            exact, _ = played(exact_setup(setup), 1, executor=judge(setup, device.name))
    assert grouped.together == group
    counts = [
        [(a.client, a.steps, a.rows, a.tokens, a.learned) for _, a in each.seen] for each in (alone, grouped)
    ]
    assert counts[0] == counts[1]
    equally_near(*([moved(*pair) for pair in each.seen] for each in (alone, grouped, exact)))


@pytest.mark.parametrize("overrides", CASES)
def test_groups_on_a_device_give_the_updates_of_single_clients(overrides):
    agree(prepared(*overrides.split(), *UNEQUAL))


def test_the_mean_of_a_client_leaves_out_the_rows_that_fill_its_place():
    each = torch.tensor([1.0, 2.0, 6.0, 4.0, 9.0, 11.0], requires_grad=True)
    found = Rows([0, 1], [3, 1]).means(each)
    assert found.tolist() == [3, 4]
    found.sum().backward()
    assert torch.equal(each.grad, torch.tensor([1 / 3, 1 / 3, 1 / 3, 1, 0, 0]))
    assert Rows([0, 1], [3, 3]).means(each).tolist() == [3, 8]


@pytest.mark.slow
@pytest.mark.steady
@pytest.mark.parametrize("overrides", ["tuning.dropout=0.5", "tuning=bitfit", "tuning=adapter"])
def test_groups_in_bf16_give_the_updates_of_single_clients(overrides):
    setup = prepared("algorithm=fedavg", overrides, *UNEQUAL, "train.precision=bf16", "train.group=3")
    agree(setup, mixed=True)


def short_of_memory(monkeypatch, when, error):
    """Let the passes with gradients that are numbered in `when` fail, and note how many rows each has."""
    rows = []
    forward = Backbone.forward

    def scarce(self, x, *args, **kwargs):
        if torch.is_grad_enabled():
            rows.append(len(x))
            if len(rows) in when:
                raise error
        return forward(self, x, *args, **kwargs)

    monkeypatch.setattr(Backbone, "forward", scarce)
    return rows


def test_a_group_that_was_short_of_memory_is_run_once_more_with_the_same_result(monkeypatch):
    setup = prepared("algorithm=fedavg", "tuning.dropout=0.5")
    full = torch.OutOfMemoryError("CUDA out of memory")
    with pretended() as device, memory(10**9) as its:
        _, whole = played(setup, 4, executor=Answers(setup, device=device.name))
        emptied = its.emptied
        rows = short_of_memory(monkeypatch, {1}, full)
        again, params = played(setup, 4, executor=Answers(setup, device=device.name))
        assert its.emptied > emptied
    assert again.together == 4
    assert digest(params) == digest(whole)
    assert len(set(rows)) == 1  # never fewer clients at once, which would round differently


def test_a_group_that_does_not_fit_ends_the_run_and_says_what_would(monkeypatch):
    setup = prepared("algorithm=fedavg", "train.batch_size=8", "data.limit=40")
    rows = short_of_memory(monkeypatch, {1, 2}, torch.OutOfMemoryError("CUDA out of memory. Tried 2 GiB"))
    with pretended() as device, memory(10**9) as its:
        executor = Answers(setup, device=device.name)
        rest = its.live
        with pytest.raises(ResourceError) as caught:
            played(setup, 4, executor=executor)
        assert its.live == rest  # while the error is held
    assert str(caught.value) == (
        "train.group: 4 clients at once: CUDA out of memory. Tried 2 GiB; what needs less: train.group=2, "
        "train.batch_size=4"
    )
    assert len(rows) == 2


def test_a_graph_that_does_not_fit_ends_the_run_and_says_what_would():
    setup = prepared("algorithm=fedavg", "train.batch_size=4", "data.limit=24", "train.graphs=true")
    full = torch.OutOfMemoryError("CUDA out of memory. Tried 2 GiB")
    with pretended() as device, memory(10**9) as its, recording({1: full, 2: full}) as recorders:
        executor = Answers(setup, device=device.name)
        rest = its.live
        with pytest.raises(ResourceError, match=r"train.group=2, train.graphs=false, train.batch_size=2$"):
            played(setup, 4, rounds=2, executor=executor)
        assert its.live == rest
    assert recorders[0].records == 0


@pytest.mark.parametrize("group", [1, 4])
def test_graphs_that_do_not_fit_are_given_up_by_default(group):
    setup = prepared("algorithm=fedavg", "train.batch_size=4", "data.limit=24")
    assert setup.context.train.graphs == "auto"
    plain = replace(setup, context=replace(setup.context, train=replace(setup.context.train, graphs=False)))
    full = torch.OutOfMemoryError("CUDA out of memory. Tried 2 GiB")
    with pretended() as device, memory(10**9), recording({1: full}) as recorders:
        _, known = played(plain, group, rounds=2, executor=Answers(plain, device=device.name))
        executor = Answers(setup, device=device.name)
        _, found = played(setup, group, rounds=2, executor=executor)
    assert [recorder.records for recorder in recorders] == [0]
    assert graphs_in(executor.worker.model) is None
    assert digest(known) == digest(found)


def test_a_device_that_fails_in_a_group_runs_no_other_call(monkeypatch):
    setup = prepared("algorithm=fedavg")
    fault = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    rows = short_of_memory(monkeypatch, {1}, fault)
    with pretended() as device, memory(10**9):
        executor = Answers(setup, device=device.name)
        events = []
        executor.on_event = events.append
        with pytest.raises(DeviceError, match="illegal memory access"):
            played(setup, 4, executor=executor)
    assert len(rows) == 1
    assert [(event.kind, event.action) for event in events] == [("device_failed", "raise")]
