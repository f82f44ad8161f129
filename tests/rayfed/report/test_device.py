"""Runs in one process, analyses of a run, and trials compute on the device that `cluster.device` names.

With `auto`, runs and trials of a small network stay on the CPU.
"""

from functools import partial

import pytest
import torch

from rayfed.engine import client_places
from rayfed.experiment.experiment import simulate
from rayfed.report import feature_map, landscape, slopes
from tests.conftest import SMALL
from tests.pretended import TYPE, pretended

BY_NAME = {"auto": torch.device(TYPE, 0)}
ANALYSES = {
    "landscape": partial(landscape.survey, points=3, images=2),
    "slopes": partial(slopes.survey, points=3),
    "feature map": partial(feature_map.features, images=10, by_class=True),
}
FEW = ("rounds=1", "model.options={depth: 2}", "data.limit=12", "data.val=0.2", "data.domains=[plain,fonts]")


@pytest.mark.parametrize("name", ANALYSES)
def test_an_analysis_computes_on_the_device(name, small, monkeypatch):
    run = small(*FEW, "data.partition.scheme=by_domain")
    monkeypatch.setattr("rayfed.report.reopen.chosen_device", BY_NAME.__getitem__)
    with pretended() as device:
        assert ANALYSES[name](run.path)
        assert device.counts.kernels > 0


@pytest.fixture
def gpu(monkeypatch):
    """A machine whose GPU is the pretended device, for runs and trials in one process."""
    monkeypatch.setattr(client_places, "chosen_device", lambda name: torch.device(TYPE, 0))
    with pretended() as device:
        yield device


def large(monkeypatch):
    """Let every network have enough work for a GPU."""
    monkeypatch.setattr(client_places, "WORTH", 0)


def test_a_run_in_one_process_computes_on_the_device(small, gpu, monkeypatch):
    large(monkeypatch)
    small(*FEW)
    assert gpu.counts.kernels > 0


def test_a_small_network_stays_on_the_cpu_in_one_process_too(gpu, cache, tmp_path, capsys):
    options = (*SMALL, *FEW, "cluster=inline", f"data.cache={cache}", f"output={tmp_path / 'run'}")
    simulate(options, quiet=False)
    assert gpu.counts.kernels == 0
    words = " ".join(capsys.readouterr().out.split())
    assert "clients run on the CPU, which is faster than a GPU with so little work" in words
    assert "cluster.device=cuda uses a GPU all the same" in words


def test_a_small_network_uses_the_device_that_is_named(small, gpu, monkeypatch):
    # There is no CUDA on this machine.
    monkeypatch.setattr("rayfed.executors.kinds.base.chosen_device", lambda name: None)
    small(*FEW, "cluster.device=cuda")
    assert gpu.counts.kernels > 0
