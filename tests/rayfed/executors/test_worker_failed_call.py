"""A lack of memory on a device is its own error, which names what would need less memory."""

import re
from dataclasses import replace

import pytest
import torch

from rayfed.engine.loop import run_rounds
from rayfed.errors import ClientError, DeviceMemoryError, NonFiniteClientError
from rayfed.executors.inline import InlineExecutor
from rayfed.models.backbone import Backbone
from rayfed.testing import small_setup

SAID = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 310.00 "
    "MiB is free. Including non-PyTorch memory, this process has 19.5 GiB memory in use."
)


def failing(monkeypatch, error, when, *overrides, share=1.0):
    """The error of a run whose network raises `error` for the inputs for which `when` holds."""
    forward = Backbone.forward

    def raising(self, x, *args, **kwargs):
        if when(x):
            raise error
        return forward(self, x, *args, **kwargs)

    common = ("rounds=1", "data.domains=[plain]", "data.limit=40", "train.batch_size=32", "train.group=1")
    setup = small_setup(*common, *overrides)
    executor = InlineExecutor(setup.context, setup.weights)
    executor.worker.share = share
    with monkeypatch.context() as patch, pytest.raises(ClientError) as caught:
        patch.setattr(Backbone, "forward", raising)
        list(run_rounds(setup.experiment, executor, setup.start))
    return caught.value


def test_a_client_that_needs_too_much_says_what_needs_less(monkeypatch):
    no_room = torch.OutOfMemoryError(SAID)
    error = failing(monkeypatch, no_room, lambda x: True, "algorithm=fedprox", "tuning=lora", share=0.25)
    assert isinstance(error, DeviceMemoryError)
    assert error.kind == "device_memory"
    assert str(error).endswith(
        "running 'fit': CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 "
        "GiB of which 310.00 MiB is free; what needs less: cluster.gpus_per_actor=0.5 (now 0.25), "
        "train.micro_batch=14, train.checkpointing=true, train.batch_size=14"
    )
    assert "OutOfMemoryError" in error.trace


@pytest.mark.parametrize(
    ("overrides", "advice"),
    [
        (["algorithm=fedmix", "tuning=full"], "train.checkpointing=true, train.batch_size=14"),
        (["algorithm=fedavg", "tuning=head"], "train.micro_batch=14, train.batch_size=14"),
        (
            ["algorithm=fedavg", "train.micro_batch=4", "train.checkpointing=true", "data.limit=20"],
            "train.micro_batch=2, train.batch_size=6",
        ),
        (
            ["algorithm=fedavg", "model=test_resnet", "model.options={}", "model.size=64", "tuning=full"],
            "train.batch_size=14",
        ),
    ],
)
def test_only_what_method_and_model_allow_is_named(monkeypatch, overrides, advice):
    error = failing(monkeypatch, torch.OutOfMemoryError(SAID), lambda x: True, *overrides)
    assert str(error).endswith(f"free; what needs less: {advice}")


def test_scoring_names_the_batch_of_scoring(monkeypatch):
    scored = failing(
        monkeypatch, torch.OutOfMemoryError("none"), lambda x: not torch.is_grad_enabled(), "algorithm=fedavg"
    )
    assert "running 'report': none; what needs less" in str(scored)
    assert str(scored).endswith("train.eval_batch_size=128")


def test_other_failures_are_what_they_were(monkeypatch):
    error = failing(monkeypatch, ValueError("odd"), lambda x: True, "algorithm=fedavg")
    assert type(error) is ClientError
    assert re.fullmatch(r"ValueError: odd \(test_worker_failed_call\.py, line \d+\)", error.cause)
    error = failing(monkeypatch, FloatingPointError("nan"), lambda x: True, "algorithm=fedavg")
    assert type(error) is NonFiniteClientError


def test_the_changes_go_down_to_one():
    setup = small_setup("algorithm=fedavg", "train.batch_size=6", "train.eval_batch_size=1", "data.limit=8")
    found = setup.context.smaller.changes(5)
    assert [train.micro_batch for train in found["micro_batch"]] == [2, 1]
    assert [train.batch_size for train in found["batch_size"]] == [2, 1]
    assert "eval_batch_size" not in found
    assert replace(found["batch_size"][0], batch_size=6) == setup.context.train
