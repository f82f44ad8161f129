"""A trial in this process: its rows one by one, several seeds in turn, its end, and going on."""

from types import SimpleNamespace

import pytest

import rayfed
from rayfed.config.schema import load_config
from rayfed.errors import ConfigError
from tests.conftest import SMALL
from tests.tune.folders import rows
from tune import trial as trials
from tune.experiment import Base
from tune.mean_rows import mean_of
from tune.trial import Common, Rows, Trial

LR = 0.05


@pytest.fixture
def begin(cache, tmp_path, no_figures, monkeypatch):
    """Begins a trial with a learning rate, as Ray Tune does in a process of its own."""
    monkeypatch.chdir(tmp_path)  # where a trial goes, and from where this goes back

    def make(seeds=(0,), objectives=("accuracy",), pauses=(), rounds=3):
        base = Base((*SMALL, f"data.cache={cache}", "cluster=inline", f"rounds={rounds}"))
        common = Common(
            base=base,
            folder=tmp_path / "out",
            here=tmp_path,
            objectives=objectives,
            seeds=seeds,
            pauses=pauses,
        )
        trial = Trial.__new__(Trial)
        folders = [f"cells/seed{seed}" for seed in seeds]
        trial.setup({"number": 4, "values": {"train.lr": LR}, "folders": folders}, common)
        return trial

    return make


def lengths(trial):
    return [len(rows(folder)) if folder.exists() else 0 for folder in trial._folders]


def test_each_step_runs_one_round_and_the_last_one_says_so(begin, tmp_path):
    trial = begin()
    found = []
    for count in (1, 2, 3):
        found.append(trial.step())
        assert lengths(trial) == [count]
    trial.cleanup()
    assert [row["done"] for row in found] == [False, False, True]
    config = load_config([f"output={tmp_path / 'alone'}"], trial._folders[0] / "config.yaml")
    assert rayfed.simulate(config).sha256 == found[-1]["sha256"]


def test_seeds_take_turns_at_the_rounds_in_which_the_scheduler_decides(begin, tmp_path):
    """No seed is beyond the round of a decision; rows and tensors are those of runs without pauses."""
    trial = begin(seeds=(0, 1), pauses=(1,))
    found = [trial.step()]
    assert lengths(trial) == [1, 1]
    found += [trial.step()]
    assert lengths(trial) == [3, 2]
    found += [trial.step()]
    trial.cleanup()
    alone = []
    for folder in trial._folders:
        config = load_config([f"output={tmp_path / folder.name}"], folder / "config.yaml")
        alone.append(rayfed.simulate(config))
        assert rows(alone[-1].path) == rows(folder)
    assert found[-1]["sha256"] == alone[0].sha256
    for row, of_round in zip(found, zip(*(rows(run.path) for run in alone), strict=True), strict=True):
        assert row["accuracy"] == mean_of(of_round, ["accuracy"])["accuracy"]


def test_a_trial_that_is_ended_computes_nothing_more_and_can_go_on(begin):
    first = begin(seeds=(0, 1), pauses=(1, 2))
    assert [first.step()["round"] for _ in range(2)] == [1, 2]
    first.reset_config({"number": 5, "values": {"train.lr": 0.01}, "folders": ["cells/a", "cells/b"]})
    first.cleanup()
    again = begin(seeds=(0, 1))
    assert lengths(again) == [2, 2]
    assert [again.step()["round"] for _ in range(3)] == [1, 2, 3]  # those on disk come first
    again.cleanup()


def test_a_paused_trial_reports_no_row_twice(begin, tmp_path):
    first = begin()
    first.step()
    first.save_checkpoint(str(tmp_path))
    first.cleanup()
    again = begin()
    again.load_checkpoint(str(tmp_path))
    assert [again.step()["round"] for _ in range(2)] == [2, 3]
    again.cleanup()


def test_an_objective_that_no_round_has_is_named(begin):
    trial = begin(objectives=("acuracy",), rounds=1)
    with pytest.raises(ConfigError, match=r"objective: 'acuracy'.*did you mean 'accuracy'"):
        trial.step()
    trial.cleanup()


def test_rows_wait_for_the_next_one_to_be_wanted():
    seen = []

    def work(report):
        for number in range(3):
            seen.append(number)
            if not report({"round": number}):
                return
        raise ValueError("as it happens")

    rows = Rows(work)
    assert [rows.next(), seen] == [{"round": 0}, [0]]
    rows.close()
    assert seen == [0]
    rows = Rows(work)
    assert [rows.next()["round"] for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="as it happens"):
        rows.next()
    rows.close()
    Rows(work).close()  # it was never begun


def test_the_clients_of_a_trial_have_the_bundles_that_ray_reserved(begin, monkeypatch):
    group = SimpleNamespace(bundle_specs=[{}, {"CPU": 0.5, "GPU": 0.25}, {"CPU": 0.5, "GPU": 0.25}])
    monkeypatch.setattr(trials, "get_current_placement_group", lambda: group)
    trial = begin()
    cell = SimpleNamespace(config=load_config(["cluster.actors=2"]))
    part = trial._part(cell)
    assert (part.actors, part.cpus, part.gpus) == (2, 0.5, 0.25)
    assert trial._part(SimpleNamespace(config=load_config(["cluster=inline"]))) is None
