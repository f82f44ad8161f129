"""Groups of 4 and 32 against single clients: every tuning, optimizer and precision, on both devices."""

from contextlib import ExitStack

import pytest

from rayfed.config.schema import load_config
from tests.conftest import STEADY
from tests.pretended import pretended
from tests.pretended_autocast import mixed_precision
from tests.rayfed.fast.test_group import (
    TUNINGS,
    Answers,
    ExactAnswers,
    moved,
    played,
    prepared,
)
from tests.rayfed.fast.test_group_device import judge
from tests.rounding import equally_near, exact_numbers, exact_setup

# With train.eps above the rounding of gradients in bfloat16: docs/performance.md says why.
OPTIMIZERS = {
    "sgd": "train.optimizer=sgd train.lr=0.02",
    "adam": "train.optimizer=adam train.lr=0.001 train.eps=1e-2",
}
FAR = ("tuning=gc_prompt", "tuning=residual_adapter")
"""Tunings of whose updates bfloat16 changes over 2 %, alone too; a group changes them less than that."""

QUICK = [("tuning=lora", "adam", "bf16", True), ("tuning=lora", "sgd", "bf16", False)]
WAYS = [
    (tuning, optimizer, precision, on_device)
    for tuning in TUNINGS
    if "optimizer" not in tuning
    for optimizer, precision in (("sgd", "bf16"), ("adam", "bf16"), ("adam", "fp32"))
    for on_device in (False, True)
]


def agree(overrides, on_device, groups, clients, precision="bf16"):
    """Assert that groups of these sizes are as near to float64 as single clients."""
    drops = ["tuning.dropout=0.3"] * ("dropout" in load_config(overrides).tuning)
    count = f"data.partition.clients_per_domain={clients // 2}"
    setup = prepared(
        *overrides,
        *drops,
        count,
        f"data.limit={6 * clients}",
        "train.local_steps=2",
        f"train.group={groups[-1]}",
    )
    with ExitStack() as stack:
        device = stack.enter_context(pretended()).name if on_device else "cpu"
        if on_device:
            stack.enter_context(mixed_precision())
        alone, _ = played(setup, 1, executor=Answers(setup, device=device))
        grouped = [played(setup, group, executor=Answers(setup, device=device))[0] for group in groups]
        with exact_numbers():
            one = judge(exact_setup(setup), device) if on_device else ExactAnswers(exact_setup(setup))
            one.worker.model.mixed = False
            exact, _ = played(exact_setup(setup), 1, executor=one)
    assert [each.together for each in grouped] == [clients] * len(groups)
    if precision == "bf16" and overrides[1] in FAR:
        for each in grouped:
            moves = ([moved(*pair) for pair in run.seen] for run in (alone, each, exact))
            for mine, theirs, wanted in zip(*moves, strict=True):
                assert (mine - theirs).norm() < (mine - wanted).norm()
        return
    for each in grouped:
        equally_near(*([moved(*pair) for pair in run.seen] for run in (alone, each, exact)))


@pytest.mark.parametrize(
    ("tuning", "optimizer", "precision", "on_device"),
    [pytest.param(*way, marks=STEADY if way in QUICK else pytest.mark.slow) for way in WAYS],
)
def test_a_group_of_four_agrees(tuning, optimizer, precision, on_device):
    overrides = f"algorithm=fedavg {tuning} {OPTIMIZERS[optimizer]} train.precision={precision}"
    agree(overrides.split(), on_device, groups=(4,), clients=4, precision=precision)


@pytest.mark.slow
@pytest.mark.parametrize("on_device", [False, True])
def test_groups_of_four_and_of_thirty_two_agree(on_device):
    overrides = f"algorithm=fedavg tuning=lora {OPTIMIZERS['adam']} train.precision=bf16 train.batch_size=2"
    agree(overrides.split(), on_device, groups=(4, 32), clients=32)
