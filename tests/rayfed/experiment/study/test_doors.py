"""Every way to many runs can do what the others can: the table of doors.

Going on after kill -9: `test_cells.py`, `test_search.py`, `test_on_ray.py`, and `test_main.py` of reproduce;
side by side on Ray: `test_on_ray.py`. A table of a paper refuses a rule that stops cells.
"""

import pandas as pd
import pytest

import rayfed
from tests.rayfed.experiment.test_experiment import Pull, own


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, cache, no_figures):
    monkeypatch.setenv("RAYFED_CACHE", str(cache))


def methods():
    """A network, data and a method of one's own, and two tunings."""
    return {"fedavg": own(rounds=2), "pull": own(method=Pull, rounds=2, tuning="head", local={"mu": 0.5})}


def grid(folder, **how):
    return rayfed.grid(methods(), {"train.lr": [0.1, 0.3]}, seeds=2).run(folder, quiet=True, **how)


def compare(folder, **how):
    return rayfed.compare(methods(), seeds=2, output=folder, quiet=True, **how)


def protocol(folder, **how):
    shots = {
        name: each.changed(protocol="few_shot", **{"data.shots": [1, 2]}) for name, each in methods().items()
    }
    return rayfed.compare(shots, seeds=2, output=folder, quiet=True, **how)


def sweep(folder, **how):
    kinds = {"tuning": ["full", "head"], "train.lr": [0.1, 0.3]}
    return rayfed.sweep(own(method=Pull, rounds=2), kinds, seeds=2, output=folder, **how)


@pytest.mark.slow
@pytest.mark.steady
@pytest.mark.parametrize("door", [grid, compare, protocol, sweep])
def test_seeds_tests_early_stop_going_on_and_side_by_side_hold_together(door, tmp_path):
    whole = door(None)
    assert set(whole.results["seed"]) == {0, 1}
    assert (whole.tests()["seeds"] == 2).all()
    assert whole.results["round"].eq(2).all()
    stopped = door(tmp_path / "study", stop=lambda at, rows: at["seed"] == 1)
    assert stopped.results.groupby("seed")["round"].unique().map(list).to_dict() == {0: [2], 1: [1]}
    beside = door(tmp_path / "study", at_once=2)
    pd.testing.assert_frame_equal(beside.results, whole.results)
    pd.testing.assert_frame_equal(rayfed.load(tmp_path / "study").results, whole.results)
    assert [run.sha256 for run in beside.finished.values()] == [run.sha256 for run in whole.finished.values()]
