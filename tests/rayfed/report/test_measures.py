"""Measures of finished runs against the results of the runs themselves."""

import importlib
import shutil

import pytest

import rayfed
from rayfed.record.recorded_run import RecordedRun
from rayfed.report import measures, slopes
from rayfed.report.measures import measures_of, over_rounds, rows_of
from tests.conftest import SMALL


@pytest.fixture(scope="module")
def finished(tmp_path_factory, cache):
    output = tmp_path_factory.mktemp("measured") / "street"
    place = [f"output={output}", f"data.cache={cache}", "cluster=inline", "data.held_out=street"]
    split = ["data.val=0.2", "data.test=0.2", "data.partition.scheme=by_domain", "evaluation.validation=true"]
    return rayfed.simulate([*SMALL, *place, *split, "algorithm=fedavg", "tuning=lora", "rounds=1"])


def test_measures_are_those_of_the_result(finished):
    found = measures_of([finished.path])
    assert found["generalization"] == pytest.approx(100 * finished.metrics["held_out_accuracy"])
    assert found["clients"] == pytest.approx(100 * finished.metrics["accuracy"])
    assert found["parameters"] == sum(value.numel() for value in finished.params.values())


@pytest.fixture(scope="module")
def study(tmp_path_factory, cache):
    """Two methods with each of two domains held out."""
    place = [
        f"output={tmp_path_factory.mktemp('measured') / 'study'}",
        f"data.cache={cache}",
        "cluster=inline",
    ]
    several = ["algorithm=fedavg", "compare=[local]", "protocol=leave_one_out", "data.domains=[plain,street]"]
    return rayfed.simulate([*SMALL, *place, *several, "data.val=4", "rounds=2"])


def test_a_study_has_a_bar_and_a_curve_for_each_method_the_mean_of_its_parts(study, capsys):
    rows = rows_of(study.path)
    assert {name: len(runs) for name, runs in rows.items()} == {"fedavg": 2, "local": 2}
    for name, runs in rows.items():
        each = [measures_of([run]) for run in runs]
        whole = measures_of(runs)
        assert whole["clients"] == pytest.approx(sum(one["clients"] for one in each) / 2)
        assert {RecordedRun(run).method for run in runs} == {name}
    losses = dict(over_rounds(rows, ["loss"])["loss"]["local"])
    mean = [sum(RecordedRun(run).rounds[k]["loss"] for run in rows["local"]) / 2 for k in range(2)]
    assert losses == pytest.approx({1.0: mean[0], 2.0: mean[1]})
    assert measures.main([str(study.path), "--show", "clients"]) == 0
    assert measures.main([str(study.path), "--names", "ours"]) == 2
    assert "--names: ours; give each of the 2 runs its own" in capsys.readouterr().err


@pytest.mark.parametrize("tool", ["landscape", "feature_map", "slopes", "answers"])
def test_a_tool_for_one_run_names_the_runs_of_a_study(tool, study, capsys):
    assert importlib.import_module(f"rayfed.report.{tool}").main([str(study.path)]) == 2
    said = f"it is a study of several runs; give the folder of one, such as {study.path}/cells/fedavg-plain"
    assert said in capsys.readouterr().err


def test_pictures_and_refusals(finished, tmp_path, capsys):
    run = str(finished.path)
    other = str(shutil.copytree(finished.path, tmp_path / "other"))
    for more in (
        ["--show", "parameters,generalization"],
        ["--over", "parameters", "--show", "generalization"],
        ["--over", "rounds", "--show", "loss"],
    ):
        assert measures.main([run, other, *more]) == 0
        assert capsys.readouterr().out.strip().endswith("measures.png")
    for wrong, message in (
        ([run, "--show", "speed"], "--show: 'speed'"),
        ([run, "--show", "personal"], "--show: 'personal' is not in"),
        ([run, other, "--names", "a"], "--names: a; give each of the 2 runs its own"),
        ([run, "--over", "rounds"], "cannot be drawn over the rounds"),
        ([str(tmp_path)], "holds no run"),
    ):
        assert measures.main(wrong) == 2
        assert message in capsys.readouterr().err


def test_gaps_of_a_finished_run(finished, capsys):
    """At change 0 the mean is FedAvg's; the gaps of all clients are in the table and in the picture."""
    assert slopes.main([str(finished.path), "--points", "3"]) == 0
    rows = RecordedRun(finished.path).rows("slopes")
    clients = [cid for cid, domain in RecordedRun(finished.path).owners.items() if domain != "street"]
    assert list(dict.fromkeys(row["client"] for row in rows)) == clients
    assert {row["change"] for row in rows} <= {-0.2, 0.0, 0.2}
    assert all(row["gap_change"] == 0 for row in rows if row["change"] == 0)
    assert "](figures/slopes.png)" in (finished.path / "report.md").read_text()
    assert slopes.main([str(finished.path), "--points", "4"]) == 2
    assert "--points: 4" in capsys.readouterr().err
