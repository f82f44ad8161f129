"""Comparisons over seeds and searches."""

import pytest

import rayfed
from rayfed.engine.session import launch
from rayfed.errors import ConfigError
from tests.rayfed.experiment.test_experiment import own


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, cache):
    monkeypatch.setenv("RAYFED_CACHE", str(cache))


def test_a_comparison_has_a_row_for_each_experiment_and_a_run_for_each_seed(tmp_path):
    slow, fast = own(rounds=1), own(rounds=1, train={"lr": 0.3})
    found = rayfed.compare({"slow": slow, "fast": fast}, seeds=2, output=tmp_path / "both", quiet=True)
    assert list(found.table.index) == ["slow", "fast"]
    assert found.scores.shape == (2, 2)
    assert found.scores.loc[1, "fast"] == fast.changed(seed=1).run(quiet=True).accuracy
    assert found.best in ("slow", "fast")
    assert {path.name for path in (tmp_path / "both").iterdir()} == {
        f"{name}-seed{seed}" for name in ("slow", "fast") for seed in (0, 1)
    }
    assert "<table" in found._repr_html_()
    assert found.report().name == "report.html"


def test_a_comparison_goes_on_where_it_was_left(tmp_path, monkeypatch):
    pair = {"slow": own(rounds=1), "fast": own(rounds=1, train={"lr": 0.3})}
    first = rayfed.compare(pair, output=tmp_path / "both", quiet=True)
    rounds = [path / "rounds.jsonl" for path in (tmp_path / "both").iterdir()]
    before = [path.stat().st_mtime_ns for path in rounds]
    launched = []
    monkeypatch.setattr("rayfed.engine.session.launch", lambda *a, **k: launched.append(a) or launch(*a, **k))
    again = rayfed.compare(pair, seeds=2, output=tmp_path / "both", quiet=True)
    assert len(launched) == 2  # those of the second seed
    assert [path.stat().st_mtime_ns for path in rounds] == before
    assert again.scores.loc[0].equals(first.scores.loc[0])
    other = {**pair, "fast": own(rounds=1, train={"lr": 0.5})}
    with pytest.raises(ConfigError, match=r"train.lr: 0.5 would change the result of .*fast-seed0"):
        rayfed.compare(other, output=tmp_path / "both", quiet=True)


def test_experiments_of_one_method_get_numbers_and_one_alone_is_refused():
    found = rayfed.compare([own(rounds=1), own(rounds=1, train={"lr": 0.3})], quiet=True)
    assert list(found.runs) == ["fedavg", "fedavg-2"]
    with pytest.raises(ConfigError, match="there are 1 experiments and 1 seeds"):
        rayfed.compare([own()])


def test_a_sweep_finds_the_best_of_its_trials():
    found = rayfed.sweep(own(rounds=1), {"train.lr": (0.001, 1.0), "train.batch_size": [4, 8]}, trials=3)
    scores = [run.accuracy for _, run in found.trials]
    assert found.run.accuracy == max(scores) == found.table["accuracy"].iloc[0]
    assert set(found.best) == {"train.lr", "train.batch_size"}
    with pytest.raises(ConfigError, match=r"train.lr: \(1, 0.1\) is neither a list of values nor a pair"):
        rayfed.sweep(own(), {"train.lr": (1, 0.1)})
