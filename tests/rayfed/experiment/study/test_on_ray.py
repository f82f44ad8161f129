"""Cells side by side on Ray: the bits of one process, own objects, a rule, and going on after kill -9."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pandas as pd
import pytest
import ray

import rayfed
from rayfed.engine.weight_store import WeightStore
from tests.conftest import ROOT
from tests.rayfed.experiment.study.test_cells import on_images
from tests.rayfed.experiment.test_experiment import Pull


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, cache, no_figures):
    monkeypatch.setenv("RAYFED_CACHE", str(cache))


ON_RAY = {"executor": "ray", "num_cpus": 2, "connect_timeout": 60}


def study(cluster):
    """Two methods, each with two domains held out: a network, data and a method that no library has."""
    methods = {"pull": on_images(Pull, local={"mu": 0.5}), "fedavg": on_images("fedavg")}
    return rayfed.grid({name: each.changed(cluster=cluster) for name, each in methods.items()}, {})


@pytest.mark.slow
@pytest.mark.steady
def test_cells_side_by_side_on_ray_have_the_bits_of_one_process(tmp_path, monkeypatch, ray_cluster):
    """Their weights are stored once, and a rule that only this process knows ends the cells of a method.

    The actors of a cell that it ended serve the next one.
    """
    put, stores = WeightStore.put, []
    monkeypatch.setattr(WeightStore, "put", lambda self, weights: stores.append(self) or put(self, weights))
    lock = threading.Lock()  # cannot be sent to another process

    def stop(at, rows):
        with lock:
            return at["method"] == "pull"

    before = client_actors()
    beside = study(ON_RAY).run(tmp_path / "ray", at_once=2, stop=stop, quiet=True)
    assert client_actors() - before == 4  # two for each of the two lanes
    alone = study("inline").run(tmp_path / "one", stop=stop, quiet=True)
    assert [len(run.history) for run in beside.finished.values()] == [1, 1, 2, 2]
    pd.testing.assert_frame_equal(beside.results, alone.results)
    assert len(stores) == 4
    assert len(set(map(id, stores))) == 1
    assert [run.sha256 for run in beside.finished.values()] == [run.sha256 for run in alone.finished.values()]


def client_actors():
    """Number of client actors that Ray has ever started."""
    return sum(each["ActorClassName"] == "ClientActor" for each in ray._private.state.actors().values())


PROGRAM = """
import sys
from tests.rayfed.experiment.study.test_on_ray import ON_RAY, study
study(ON_RAY).run(sys.argv[1], at_once=2, quiet=True).results.to_csv(sys.argv[2], index=False)
"""


@pytest.mark.slow
def test_a_study_on_ray_that_was_killed_goes_on_to_the_same_frame(tmp_path, cache):
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "killed"), str(tmp_path / "frame.csv")]
    environment = {**os.environ, "RAYFED_CACHE": str(cache), "PYTHONPATH": str(ROOT)}
    first = subprocess.Popen(command, env=environment, cwd=ROOT)
    while not list(tmp_path.glob("killed/cells/*/model/params.safetensors")):
        assert first.poll() is None
        time.sleep(0.02)
    first.send_signal(signal.SIGKILL)
    first.wait()
    finished = len(list(tmp_path.glob("killed/cells/*/model/params.safetensors")))
    assert finished < 4
    subprocess.run(command, env=environment, cwd=ROOT, check=True)
    whole = study("inline").run(tmp_path / "whole", quiet=True)
    whole.results.to_csv(tmp_path / "whole.csv", index=False)
    assert (tmp_path / "frame.csv").read_text() == (tmp_path / "whole.csv").read_text()
    manifest = json.loads((tmp_path / "killed" / "study.json").read_text())
    assert [cell["sha256"] for cell in manifest["cells"]] == [run.sha256 for run in whole.finished.values()]
