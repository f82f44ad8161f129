"""Whole sweeps on one Ray cluster: results, seeds, actors of a trial, early stopping, several objectives."""

import json
import shutil

import pandas as pd
import pytest
import yaml

import rayfed
import tune
from rayfed.config.schema import load_config
from rayfed.errors import ConfigError, ResourceError
from rayfed.experiment.listed import listed
from tests.conftest import SMALL
from tests.rayfed.executors.test_prometheus import scraping
from tests.rayfed.experiment.study.test_on_ray import client_actors
from tests.rayfed.record.trackers import logged
from tests.tune.folders import folders_of, rows

pytestmark = pytest.mark.ray
SPACE = {
    "tuning": {"choice": ["lora", "head"]},
    "tuning.rank": {"choice": [2, 8], "when": {"tuning": "lora"}},
    "train.lr": {"loguniform": [0.001, 0.1]},
}


@pytest.fixture(scope="module")
def swept(ray_cluster, cache, tmp_path_factory):
    """Four trials with two seeds each, every trial in one process."""
    path = tmp_path_factory.mktemp("sweep") / "out"
    small = [text for text in SMALL if not text.startswith("tuning.")]  # the tuning is searched
    overrides = [*small, f"data.cache={cache}", "cluster=inline", "rounds=2"]
    options = {"trials": 4, "seeds": 2, "seed": 3, "max_concurrent": 2, "loggers": ("tensorboard", "mlflow")}
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        study = tune.search(overrides, SPACE, objective="accuracy", output=str(path), **options)
    return path, study


@pytest.mark.slow
@pytest.mark.steady
def test_every_trial_is_in_the_table_and_the_papers_values_come_first(swept):
    path, study = swept
    table = pd.read_parquet(path / "trials.parquet")
    assert table["trial"].tolist() == [0, 1, 2, 3]
    assert set(table["state"]) == {"finished"}
    assert len(study.trials) == 4
    paper = table.iloc[0]
    assert (paper["tuning"], paper["tuning.rank"], paper["train.lr"]) == ("lora", 8, 0.02)
    assert table[table["tuning"] == "head"]["tuning.rank"].isna().all()
    assert study.trials["accuracy"].tolist() == table["accuracy"].tolist()


@pytest.mark.slow
@pytest.mark.steady
def test_a_sweep_is_a_study(swept):
    """Its cells are the trials by their values and seeds, with all that a study has."""
    path, study = swept
    opened = rayfed.load(path)
    pd.testing.assert_frame_equal(opened.trials, study.trials)
    pd.testing.assert_frame_equal(opened.results, study.results)
    assert opened.names == ("tuning", "tuning.rank", "train.lr", "seed")
    assert len(opened.finished) == 8
    table = pd.read_parquet(path / "trials.parquet").set_index("trial")
    best = table.loc[table["accuracy"].idxmax()]
    assert opened.best_run.sha256 == best["sha256"]
    assert opened.best_params["train.lr"] == best["train.lr"]
    assert opened.scores.mean().max() == pytest.approx(best["accuracy"])
    assert (opened.tests()["seeds"] == 2).all()
    assert len(opened.table) == 4
    assert len(opened.plot().axes) == 1
    assert {each.state for each in listed(path)} == {"finished"}


@pytest.mark.slow
@pytest.mark.steady
def test_the_objective_is_the_mean_over_seeds(swept):
    path, _ = swept
    table = pd.read_parquet(path / "trials.parquet").set_index("trial")
    rounds = pd.read_parquet(path / "rounds.parquet")
    assert rounds.groupby(["trial", "seed"])["round"].apply(list).tolist() == [[1, 2]] * 8
    last = rounds[rounds["round"] == 2].groupby("trial")["accuracy"]
    pd.testing.assert_series_equal(table["accuracy"], last.mean())
    assert table["accuracy_std"].tolist() == pytest.approx(last.std(ddof=0).tolist())
    assert set(rounds["seed"]) == {0, 1}


@pytest.mark.slow
@pytest.mark.steady
def test_the_best_config_repeats_the_best_trial(swept, tmp_path):
    path, _ = swept
    table = pd.read_parquet(path / "trials.parquet")
    best = table.loc[table["accuracy"].idxmax()]
    result = rayfed.simulate(load_config([f"output={tmp_path / 'again'}"], path / "best.yaml"))
    assert result.sha256 == best["sha256"]
    assert yaml.safe_load((path / "best.yaml").read_text())["train"]["lr"] == best["train.lr"]


@pytest.mark.slow
@pytest.mark.steady
def test_what_a_sweep_leaves_besides(swept):
    path, _ = swept
    table = pd.read_parquet(path / "trials.parquet").set_index("trial")
    of_last = folders_of(path, train__lr=table["train.lr"][3])
    assert [(folder / "clients.parquet").exists() for folder in of_last] == [True, True]  # whole run folders
    report = (path / "report.md").read_text()
    assert "(best" in report
    assert all(figure.name in report for figure in (path / "figures").glob("*.png"))
    assert list((path / "figures").glob("*.png"))
    logged = list((path / "tune").glob("0000-*/result.json"))
    assert [json.loads(line)["round"] for line in logged[0].read_text().splitlines()] == [1, 2]
    assert list((path / "tune").glob("0000-*/events.out.tfevents*"))
    with pytest.raises(ConfigError, match="already holds a sweep"):
        tune.search([], SPACE, output=str(path))


@pytest.mark.slow
@pytest.mark.steady
def test_mlflow_has_every_round_of_every_trial(swept):
    path, _ = swept
    runs = {run.name.split("-")[0]: run for run in logged(f"sqlite:///{path / 'mlflow.db'}", "sweep")}
    assert sorted(runs) == ["0000", "0001", "0002", "0003"]
    rounds = pd.read_parquet(path / "rounds.parquet").groupby(["trial", "round"])["accuracy"].mean()
    for number, run in runs.items():
        assert run.status == "FINISHED"
        found = {step: value for (key, step), value in run.metrics.items() if key == "accuracy"}
        assert found == pytest.approx(rounds[int(number)].to_dict())
    table = pd.read_parquet(path / "trials.parquet").set_index("trial")
    assert float(runs["0003"].params["values/train.lr"]) == table["train.lr"][3]


@pytest.mark.slow
@pytest.mark.steady
def test_resuming_a_finished_sweep_runs_nothing_again(swept):
    path, _ = swept
    before = {file: file.stat().st_mtime for file in path.glob("cells/*/model/params.safetensors")}
    assert len(before) == 8
    study = tune.resume(path)
    assert len(study.trials) == 4
    assert {file: file.stat().st_mtime for file in path.glob("cells/*/model/params.safetensors")} == before


@pytest.mark.slow
@pytest.mark.steady
def test_a_finished_sweep_gets_more_trials(swept, tmp_path):
    path, _ = swept
    more = tmp_path / "more"
    shutil.copytree(path, more)
    before = pd.read_parquet(path / "trials.parquet")
    written = {file.relative_to(more): file.stat().st_mtime for file in more.glob("cells/*/model/*")}
    assert len(tune.resume(more, trials=6).trials) == 6
    table = pd.read_parquet(more / "trials.parquet")
    pd.testing.assert_frame_equal(table.iloc[:4], before)
    assert set(table["state"]) == {"finished"}
    assert table["train.lr"].nunique() == 6  # a new searcher does not propose what was tried
    now = {file.relative_to(more): file.stat().st_mtime for file in more.glob("cells/*/model/*")}
    assert {file: time for file, time in now.items() if file in written} == written
    assert len(tune.resume(more).trials) == 6
    with pytest.raises(ConfigError, match="trials: 3 are fewer than the 6"):
        tune.resume(more, trials=3)


@pytest.mark.slow
@pytest.mark.steady
def test_trials_with_client_actors(ray_cluster, cache, tmp_path, small):
    """Two objectives; actors that go from seed to seed and from trial to trial give what one process gives.

    The third trial has the values of an earlier one, as there are two, and so its cells.
    """
    overrides = [*SMALL, f"data.cache={cache}", "algorithm=ditto", "cluster.actors=2"]
    config = load_config([*overrides, "cluster.cpus_per_actor=0.5"])  # its clients keep stores
    space = {"train.lr": {"choice": [0.02, 0.05]}}
    before = client_actors()
    with scraping() as seen:
        study = tune.search(
            config,
            space,
            trials=3,
            seeds=2,
            objective=["accuracy", "sigma_type"],
            searcher="nsga2",
            max_concurrent=1,
            loggers=(),
            output=str(tmp_path / "out"),
        )
    assert len(study.trials) == 3
    labels = [dict(labels) for name, labels in seen if name == "ray_rayfed_visit_seconds_count"]
    trials = {own["trial"] for own in labels if (own["run"], own["algorithm"]) == ("out", "ditto")}
    assert trials
    assert trials <= {f"{number:04d}-seed-{seed}" for number in range(3) for seed in range(2)}
    table = pd.read_parquet(tmp_path / "out" / "trials.parquet").set_index("trial")
    for number, seed in ((0, 0), (2, 1)):
        folder = folders_of(tmp_path / "out", train__lr=table["train.lr"][number], seed=seed)[0]
        overrides = [f"seed={seed}", "cluster=inline", f"output={tmp_path / f'again{number}'}"]
        saved = load_config(overrides, folder / "config.yaml")
        assert rows(rayfed.simulate(saved).path) == rows(folder)
    assert len(study.finished) == 4
    assert client_actors() - before == 2  # the same ones served every seed of every trial
    front = sorted(int(file.stem) for file in (tmp_path / "out" / "front").glob("*.yaml"))
    beaten = [
        n
        for n in table.index
        if any(
            (table["accuracy"][m] >= table["accuracy"][n])
            and (table["sigma_type"][m] <= table["sigma_type"][n])
            and (table["accuracy"][m], table["sigma_type"][m])
            != (table["accuracy"][n], table["sigma_type"][n])
            for m in table.index
        )
    ]
    assert front == [n for n in table.index if n not in beaten]


@pytest.mark.slow
@pytest.mark.steady
def test_asha_stops_what_cannot_win(ray_cluster, cache, tmp_path):
    """One learning rate learns, the others stand still: after the first round they must go."""
    overrides = [*SMALL, f"data.cache={cache}", "cluster=inline", "rounds=4", "train.lr=0.05"]
    overrides += ["model.pretrained=true", "model.options={}"]
    space = {"train.lr": {"loguniform": [1e-9, 0.1]}}
    tune.search(
        overrides,
        space,
        trials=4,
        points=[{"train.lr": lr} for lr in (1e-9, 1e-8, 1e-7)],
        objective="loss",
        scheduler={"name": "asha", "grace": 1, "reduction": 4},
        max_concurrent=1,
        output=str(tmp_path / "out"),
    )
    table = pd.read_parquet(tmp_path / "out" / "trials.parquet")
    assert table["state"].tolist() == ["finished", *["stopped early"] * 3]
    assert table["rounds"].tolist() == [4, 1, 1, 1]
    written = [len(rows(folder)) for folder in folders_of(tmp_path / "out")]
    assert written == [4, 1, 1, 1]  # no round was computed after the decision
    assert rayfed.load(tmp_path / "out").results["round"].tolist() == written
    more = tune.resume(tmp_path / "out", trials=5)  # the scheduler knows of those that ended
    assert more.trials["state"].tolist()[:4] == table["state"].tolist()
    assert [len(rows(folder)) for folder in folders_of(tmp_path / "out")][:4] == written


@pytest.mark.slow
def test_median_stopping_ends_what_is_below_the_others(ray_cluster, cache, tmp_path):
    """Two trials learn; the third stands still, and its first round is worse than the mean of theirs."""
    tune.search(
        [*SMALL, f"data.cache={cache}", "cluster=inline", "train.lr=0.1"],
        {"train.lr": {"loguniform": [1e-9, 0.1]}},
        trials=3,
        points=[{"train.lr": 0.09}, {"train.lr": 1e-9}],
        objective="loss",
        scheduler={"name": "median", "grace": 1, "least": 2},
        max_concurrent=1,
        loggers=(),
        output=str(tmp_path / "out"),
    )
    table = pd.read_parquet(tmp_path / "out" / "trials.parquet")
    assert table["state"].tolist() == ["finished", "finished", "stopped early"]
    assert table["rounds"].tolist() == [2, 2, 1]


@pytest.mark.slow
def test_trials_that_fail_are_told_apart(ray_cluster, cache, tmp_path):
    """A learning rate with which the loss is no number any more ends its trial, not the sweep."""
    overrides = [*SMALL, f"data.cache={cache}", "cluster=inline", "rounds=2"]
    space = {"train.lr": {"choice": [0.02, 1e30]}}
    tune.search(
        overrides,
        space,
        trials=2,
        points=[{"train.lr": 1e30}],
        objective="accuracy",
        output=str(tmp_path / "out"),
    )
    table = pd.read_parquet(tmp_path / "out" / "trials.parquet")
    assert table["state"].tolist() == ["finished", "failed"]
    assert "finite" in table["error"][1]
    assert yaml.safe_load((tmp_path / "out" / "best.yaml").read_text())["train"]["lr"] == 0.02


def test_a_trial_that_can_never_be_placed_is_refused_before_any_starts(ray_cluster, cache, tmp_path):
    overrides = [*SMALL, f"data.cache={cache}", "cluster.actors=2", "cluster.gpus_per_actor=0.0"]
    space = {"cluster.gpus_per_actor": {"choice": [0.0, 0.5]}}
    with pytest.raises(ResourceError, match=r"machine has no GPU; .*gpus_per_actor=0"):
        tune.search(overrides, space, objective="accuracy", output=str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_trackers_belong_to_single_runs(tmp_path):
    with pytest.raises(ConfigError, match=r"trackers: mlflow is for single runs; a sweep has loggers="):
        tune.search(["trackers=[mlflow]"], SPACE, output=str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
