"""Measures of finished runs against the results of the runs themselves."""

import shutil

import pytest

import rayfed
from rayfed.record.recorded_run import RecordedRun
from rayfed.report import measures, slopes
from rayfed.report.measures import measures_of
from tests.conftest import SMALL


@pytest.fixture(scope="module")
def finished(tmp_path_factory, cache):
    output = tmp_path_factory.mktemp("measured") / "street"
    place = [f"output={output}", f"data.cache={cache}", "cluster=inline", "data.held_out=street"]
    split = ["data.val=0.2", "data.test=0.2", "data.partition.scheme=by_domain", "evaluation.validation=true"]
    return rayfed.simulate([*SMALL, *place, *split, "algorithm=fedavg", "tuning=lora", "rounds=1"])


def test_measures_are_those_of_the_result(finished):
    found = measures_of(finished.path)
    assert found["generalization"] == pytest.approx(100 * finished.metrics["held_out_accuracy"])
    assert found["clients"] == pytest.approx(100 * finished.metrics["accuracy"])
    assert found["parameters"] == sum(value.numel() for value in finished.params.values())
    assert measures_of(finished.path.parent) == pytest.approx(found)  # the mean over one fold


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
