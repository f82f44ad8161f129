"""The programs of `notebooks/programs`: short, and the same tensors in one process and on Ray."""

import runpy

import pytest
from torch import nn

from rayfed.engine.loop import run_rounds
from rayfed.executors.inline import InlineExecutor
from rayfed.experiment.experiment import end_session
from rayfed.experiment.plan import prepared
from rayfed.federation.params import digest
from tests.conftest import ROOT, STEADY

PROGRAMS = {path.stem: path for path in sorted((ROOT / "notebooks" / "programs").glob("*.py"))}
QUICK = ("lstm_regression", "own_method", "tabular_multilabel", "transformer_fedra", "unet_masks")
"""Programs that `make test` runs; the others take longer to import."""

MOST_LINES = 25


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, cache):
    monkeypatch.setenv("RAYFED_CACHE", str(cache))


def experiment(name, **changes):
    """The experiment of a program, whose classes no other process can import."""
    return runpy.run_path(str(PROGRAMS[name]), run_name="program")["experiment"].changed(rounds=2, **changes)


def chosen(names):
    return [name if name in QUICK else pytest.param(name, marks=STEADY) for name in names]


def test_there_are_eleven_and_each_is_short():
    assert len(PROGRAMS) == 11
    for name, path in PROGRAMS.items():
        assert len(path.read_text().splitlines()) < MOST_LINES, name


@pytest.mark.parametrize("name", chosen(PROGRAMS))
def test_it_runs_in_one_process(name):
    run = experiment(name, cluster="inline").run(quiet=True)
    assert run.path is None
    assert len(run.history) == 2
    assert run.metrics[run.metric] >= 0
    assert run.clients[run.metric].notna().any()
    assert isinstance(run.model(), nn.Module)


@pytest.mark.ray
@pytest.mark.parametrize("name", chosen(PROGRAMS))
def test_actors_give_the_tensors_of_one_process(name, pool_of_two):
    """The functions and classes of the program travel by value."""
    setup = prepared(experiment(name).config())
    *_, here = run_rounds(setup.experiment, InlineExecutor(setup.context, setup.weights), setup.start)
    *_, there = run_rounds(setup.experiment, pool_of_two(setup), setup.start)
    assert digest(here.state.params) == digest(there.state.params)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.steady
def test_whole_runs_on_ray_give_the_digest_of_one_process_and_use_its_actors_again(ray_cluster):
    try:
        here = experiment("own_method", cluster="inline").run(quiet=True).sha256
        cluster = {"actors": 2, "cpus_per_actor": 0.5}
        assert [experiment("own_method", cluster=cluster).run(quiet=True).sha256 for _ in range(2)] == [
            here,
            here,
        ]
    finally:
        end_session()
