"""Searches: studies that grow by the trials that Optuna proposes."""

import os
import subprocess
import sys
import time
from dataclasses import dataclass

import pytest
import torch

import rayfed
from rayfed.engine.session import launch
from rayfed.errors import ConfigError, PartsFailedError
from tests.conftest import ROOT
from tests.rayfed.experiment.test_experiment import clients, own


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, cache, no_figures):
    monkeypatch.setenv("RAYFED_CACHE", str(cache))


def with_validation():
    """Clients with their own splits."""
    return {
        name: {"train": (x[:12], y[:12]), "val": (x[12:15], y[12:15]), "test": (x[15:], y[15:])}
        for name, (x, y) in clients().items()
    }


def test_the_best_trial_is_that_of_the_validation_splits():
    """The first trial has the experiment's own values, and the test splits choose nothing."""
    base = own(rounds=1, data=with_validation(), train={"lr": 0.25, "batch_size": 8, "momentum": 0.5})
    space = {"train.lr": (0.001, 1.0), "train.batch_size": [4, 8], "train.momentum": (0.0, 0.9)}
    found = rayfed.sweep(base, space, trials=3)
    scores = [run.metrics["val_accuracy"] for run in found.finished.values()]
    assert found.score == "val_accuracy"
    assert found.trials["val_accuracy"].tolist() == scores
    assert found.best_run.metrics["val_accuracy"] == max(scores)
    assert found.trials.loc[0, list(space)].tolist() == [0.25, 8, 0.5]
    assert [*found.trials.loc[found.trials["val_accuracy"].idxmax(), list(space)]] == [
        *found.best_params.values()
    ]
    with pytest.raises(ConfigError, match=r"train.lr: \(1, 0.1\) is neither a list of values nor a pair"):
        rayfed.sweep(own(), {"train.lr": (1, 0.1)})
    for wrong, trials in (({}, 3), ({"train.lr": [0.1]}, 0)):
        with pytest.raises(ConfigError, match="give at least one of each"):
            rayfed.sweep(own(), wrong, trials=trials)
    with pytest.raises(ConfigError, match="seed cannot be searched"):
        rayfed.sweep(own(), {"seed": [0, 1]})


def test_own_values_that_the_space_does_not_have_are_not_tried():
    """A rate beyond its range is none of the space, so that the search chooses the first trial."""
    for lr, first in ((0.5, False), (0.05, True)):
        space = {"train.lr": (0.01, 0.1), "train.batch_size": (4, 16)}
        found = rayfed.sweep(own(rounds=1, train={"lr": lr, "batch_size": 6}), space, trials=1)
        assert (found.trials.loc[0, list(space)].tolist() == [lr, 6]) is first


def test_lists_repeat_no_combination_and_take_objects_by_name():
    base = own(rounds=1, train={"lr": 0.2})
    space = {"train.lr": [0.1, 0.2], "model": {"small": small, "large": large}}
    found = rayfed.sweep(base, space, trials=6)
    tried = [tuple(row) for row in found.trials[list(space)].itertuples(index=False)]
    assert sorted(tried) == [(0.1, "large"), (0.1, "small"), (0.2, "large"), (0.2, "small")]
    assert found.best_params["model"] in ("small", "large")
    assert len(found.runs[0.1, "small", 0].params) == 2


def small():
    return torch.nn.Linear(6, 3)


def large():
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))


def test_each_trial_has_its_seeds_and_their_mean_decides():
    found = rayfed.sweep(own(rounds=1), {"train.lr": (0.01, 1.0)}, trials=2, seeds=2)
    column = found.score
    for number, trial in found.trials.iterrows():
        runs = [found.runs[trial["train.lr"], seed] for seed in (0, 1)]
        assert trial[column] == pytest.approx(sum(run.metrics[column] for run in runs) / 2), number
    assert len(found.table) == 2
    assert found.tests()["seeds"].tolist() == [2]
    one = rayfed.sweep(own(rounds=1, seed=7), {"train.lr": [0.1]}, trials=1)
    assert [*one.finished] == [(0.1, 7)]


def test_a_search_goes_on_where_it_was_left_with_the_same_proposals(tmp_path, monkeypatch):
    space = {"train.lr": (0.01, 1.0), "train.batch_size": (4, 16)}
    whole = rayfed.sweep(own(rounds=1), space, trials=8)
    part = rayfed.sweep(own(rounds=1), space, trials=5, output=tmp_path / "search")
    launched = []
    monkeypatch.setattr("rayfed.engine.session.launch", lambda *a, **k: launched.append(a) or launch(*a, **k))
    again = rayfed.sweep(own(rounds=1), space, trials=8, output=tmp_path / "search")
    assert len(launched) == 3
    assert again.trials.equals(whole.trials)
    assert part.trials.equals(whole.trials[:5])
    opened = rayfed.load(tmp_path / "search")
    assert opened.results.equals(again.results)
    assert opened.score == again.score
    assert opened.trials.equals(again.trials)
    assert opened.trials["state"].eq("finished").all()
    assert opened.best_params == again.best_params
    assert opened.best_run.sha256 == again.best_run.sha256


def test_trials_that_are_proposed_together_run_side_by_side_to_the_same_scores(tmp_path):
    space = {"train.lr": (0.01, 1.0)}
    alone = rayfed.sweep(own(rounds=1), space, trials=4, together=2)
    beside = rayfed.sweep(own(rounds=1), space, trials=4, together=2, at_once=2)
    assert beside.trials.equals(alone.trials)
    with pytest.raises(ConfigError, match=r"at_once: 2 cells cannot run .* where 1 are .*give together=2"):
        rayfed.sweep(own(rounds=1), space, trials=4, at_once=2, output=tmp_path / "search")
    assert not (tmp_path / "search").exists()


def test_a_trial_that_fails_is_named_and_the_others_are_run(tmp_path):
    @dataclass(frozen=True)
    class Fails(rayfed.Local):
        speed: float = 0.1

        def loss(self, client, params, batch):
            if self.speed > 0.3:
                raise ValueError("too fast")
            return super().loss(client, params, batch)

    space = {"local.speed": [0.1, 0.5, 0.2]}
    with pytest.raises(PartsFailedError, match=r"1 of 3 cells failed: local.speed=0.5, seed=0: .*too fast"):
        rayfed.sweep(own(method=Fails, rounds=1), space, output=tmp_path / "search")
    opened = rayfed.load(tmp_path / "search")
    assert opened.trials.set_index("local.speed")["state"].to_dict() == {
        0.1: "finished",
        0.2: "finished",
        0.5: "failed",
    }
    assert "too fast" in next(each.error for each in opened.searched.trials if each.error)
    assert opened.best_params["local.speed"] in (0.1, 0.2)
    with pytest.raises(PartsFailedError, match=r"3 of 3 cells failed"):
        rayfed.sweep(own(method=Fails, rounds=1), {"local.speed": (0.4, 0.5)}, trials=3)


def test_a_rule_ends_trials_early_and_a_protocol_gives_each_its_parts():
    space = {"train.lr": [0.1, 0.3]}
    found = rayfed.sweep(own(rounds=3), space, stop=lambda at, rows: at["train.lr"] == 0.3 and len(rows) > 1)
    assert found.results.set_index("train.lr")["round"].to_dict() == {0.1: 3, 0.3: 2}
    assert found.trials.set_index("train.lr")["state"].to_dict() == {0.1: "finished", 0.3: "stopped early"}
    shots = rayfed.sweep(own(rounds=1, protocol="few_shot", **{"data.shots": [1, 2]}), space)
    assert shots.names == ("train.lr", "part", "seed")
    assert len(shots.finished) == 4
    assert shots.trials[shots.score].notna().all()
    assert len(shots.runs_of(shots.searched.trials[0])) == 2
    assert shots.best_run.config.train.lr == shots.best_params["train.lr"]


PROGRAM = """
import sys

import rayfed
from tests.rayfed.experiment.test_experiment import own

found = rayfed.sweep(
    own(rounds=30), {"train.lr": (0.01, 1.0)}, trials=4, seeds=2, output=sys.argv[1], at_once=2
)
found.trials.to_csv(sys.argv[2])
"""


@pytest.mark.slow
def test_after_kill_9_the_same_program_ends_with_the_same_trials(tmp_path):
    def start(name, table):
        return subprocess.Popen(
            [sys.executable, "-c", PROGRAM, tmp_path / name, tmp_path / table],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        )

    assert start("whole", "whole.csv").wait(300) == 0
    killed = start("killed", "killed.csv")
    until = time.monotonic() + 300
    while len(list((tmp_path / "killed").glob("cells/*/rounds.jsonl"))) < 3:
        assert killed.poll() is None
        assert time.monotonic() < until
        time.sleep(0.05)
    killed.kill()
    killed.wait()
    assert start("killed", "killed.csv").wait(300) == 0
    assert (tmp_path / "killed.csv").read_text() == (tmp_path / "whole.csv").read_text()
