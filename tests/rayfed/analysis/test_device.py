"""Runs in one process, analyses of a run, and trials compute on the device that `cluster.device` names."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from rayfed.analysis import feature_map, landscape, slopes
from rayfed.config.schema import load_config
from rayfed.testing.small import small_setup
from tests.conftest import SMALL
from tests.pretended import TYPE, pretended
from tune.trial import Trial

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
    monkeypatch.setattr("rayfed.analysis.reopen.chosen_device", BY_NAME.__getitem__)
    with pretended() as device:
        assert ANALYSES[name](run.path)
        assert device.counts.kernels > 0


def test_a_run_in_one_process_computes_on_the_device(small, monkeypatch):
    monkeypatch.setattr("rayfed.engine.launch.chosen_device", BY_NAME.__getitem__)
    with pretended() as device:
        small(*FEW)
        assert device.counts.kernels > 0


def test_a_trial_in_one_process_computes_on_the_device(monkeypatch):
    monkeypatch.setattr("tune.trial.chosen_device", BY_NAME.__getitem__)
    trial = Trial.__new__(Trial)  # without Ray, which makes it in another process
    trial._common = SimpleNamespace(frozen=SimpleNamespace(of=lambda world: None))
    with pretended() as device:
        (executor,) = trial._executors(load_config([*SMALL, "cluster=inline"]), [small_setup()])
        assert str(executor.worker.device) == device.name
