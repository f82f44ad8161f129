"""Every method, and every tuning on every kind of model, takes its steps on torch's `cuda`, without a GPU.

CUDA's own rules decide which operations there are, and which devices they take. Nothing is computed, and no
backward pass is made: for that see `tests/rayfed/test_testing_play.py`.
"""

from pathlib import Path

import pytest
import torch

from rayfed.errors import ClientError
from rayfed.federation.local import Local
from rayfed.federation.method_registry import METHODS
from rayfed.testing import play
from tests.conftest import STEADY, quickly
from tests.fake_cuda import fake_cuda
from tests.matrix import TINY, fitting, of_kind

READS = {
    "rayfed/devices.py:numbers": "the answer, in one copy",
    "algorithms/bgp.py:train": "two numbers for the report of a visit, at its end",
    "algorithms/fedkseed.py:rebuild": "the sums of all steps, in one copy, at the beginning of a visit",
    "algorithms/hetlora.py:train": "the rank that is kept, at the end of a visit",
}
"""Functions that read values of a device, and why they may."""

QUICK = {("lstm", "full")}
"""A text tower with prompts, and symbols."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for all tests of the file, which keeps them in one process: the tool takes seconds to load."""
    return tmp_path_factory.mktemp("fake_cuda")


def step(overrides, folder, cache):
    """Play one round; assert that it computed on the device, and read there only what it may."""
    settings = [*overrides, "rounds=1", "train.graphs=false", f"data.cache={cache}"]
    with fake_cuda() as noted:
        play(settings, "cuda:0")
    assert noted.operations > 100
    assert noted.reads <= READS.keys()


LONGEST = pytest.param("fedkseed", marks=pytest.mark.slow)  # two minutes; passed on 2026-11-28


@pytest.mark.parametrize(
    "name", [*quickly((name for name in METHODS.names() if name != "fedkseed"), ["scaffold"]), LONGEST]
)
def test_a_method_takes_its_steps_on_cuda(name, folder, cache):
    step([*TINY, f"algorithm={name}"], folder, cache)


@pytest.mark.parametrize(
    ("kind", "name"), [case if case in QUICK else pytest.param(*case, marks=STEADY) for case in fitting()]
)
def test_a_tuning_takes_its_steps_on_cuda(kind, name, folder, cache):
    step(of_kind(kind, name, folder), folder, cache)


def test_a_tensor_of_the_cpu_in_a_step_is_found(folder, cache, monkeypatch):
    loss = Local.loss

    def mixed(self, *args):
        return loss(self, *args) + torch.zeros(1)

    monkeypatch.setattr(Local, "loss", mixed)
    with pytest.raises(ClientError, match="two devices, cuda:0 and cpu"):
        step([*TINY, "algorithm=fedavg"], folder, cache)


def test_an_optimizer_on_two_devices_is_found(folder):
    with fake_cuda(), pytest.raises(RuntimeError, match=r"on cuda, and found \['cpu', 'cuda'\]"):
        weight = torch.nn.Parameter(torch.ones(2, device="cuda"))
        weight.grad = torch.zeros(2, device="cuda")
        optimizer = torch.optim.SGD([weight], momentum=0.9, fused=True)
        optimizer.state[weight]["momentum_buffer"] = torch.zeros(2)
        optimizer.step()
