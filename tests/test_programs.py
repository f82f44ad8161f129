"""The programs of `notebooks/programs`: short, and the same tensors in one process and on Ray."""

import runpy

import pytest

import rayfed
from tests.conftest import ROOT, STEADY

PROGRAMS = sorted((ROOT / "notebooks" / "programs").glob("*.py"))
QUICK = ("lstm_regression", "tabular_multilabel", "transformer_fedra", "unet_masks")
"""Programs that `make test` runs in one process; the others take longer to import."""

MOST_LINES = 25


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("RAYFED_CACHE", str(tmp_path))


def experiment(path):
    """The experiment of a program, whose classes no other process can import."""
    return runpy.run_path(str(path), run_name="program")["experiment"]


def test_there_are_ten_and_each_is_short():
    assert len(PROGRAMS) == 10
    for path in PROGRAMS:
        assert len(path.read_text().splitlines()) < MOST_LINES, path.name


@pytest.mark.parametrize("name", QUICK)
def test_it_runs_in_one_process(name):
    path = next(path for path in PROGRAMS if path.stem == name)
    run = experiment(path).changed(cluster="inline", rounds=2).run(quiet=True)
    assert run.path is None
    assert len(run.history) == 2
    assert run.metrics[run.metric] >= 0
    assert len(run.sha256) == 64
    assert run.clients[run.metric].notna().all()
    assert isinstance(run.model(), rayfed.models.own.nn.Module)


@pytest.mark.ray
@pytest.mark.parametrize("path", [pytest.param(path, marks=STEADY, id=path.stem) for path in PROGRAMS])
def test_actors_give_the_tensors_of_one_process(path, cluster):
    """The functions and classes of the program travel by value."""
    here = experiment(path).changed(cluster="inline", rounds=2).run(quiet=True)
    there = experiment(path).changed(cluster={"actors": 2}, rounds=2)
    assert there.run(quiet=True).sha256 == here.sha256
