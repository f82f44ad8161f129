"""A run can be looked at from another shell, while it goes on and afterwards."""

import json
import shutil
import threading
import time

import pytest

from rayfed import view
from rayfed.record.folder import RunFolder
from rayfed.record.recorded_run import RecordedRun
from rayfed.report.final_table import final_table
from tests.rayfed.report.page import folders


@pytest.fixture
def run(small):
    return small("rounds=3").path


def test_a_finished_run_is_shown_whole_and_not_waited_for(run, capsys):
    assert view.main([str(run), "--follow"]) == 0
    out = capsys.readouterr().out
    assert [f"round {r}/3" in out for r in (1, 2, 3)] == [True] * 3
    assert out.endswith(final_table(RecordedRun(run)).text() + "\n")


def test_rounds_are_shown_as_they_finish(run, tmp_path, capsys, monkeypatch):
    """The folder of a run that goes on: its files arrive one round after the other, tables at the end."""
    monkeypatch.setattr(view, "PAUSE", 0.05)
    monkeypatch.setattr(view, "PATIENCE", 5.0)
    live = tmp_path / "live"
    (live / "model").mkdir(parents=True)
    for name in ("config.yaml", "partition.parquet", "environment.json"):
        shutil.copy(run / name, live)
    assert view.main([str(live)]) == 0  # nothing yet
    assert "0 of 3 rounds, and it is not running now" in capsys.readouterr().out
    lines = (run / "rounds.jsonl").read_text().splitlines(keepends=True)
    watcher = threading.Thread(target=view.view, args=(live, True))
    with RunFolder(live, {}).lock():
        watcher.start()
        for r in range(1, 3):
            (live / "history").mkdir(exist_ok=True)
            shutil.copy(run / "history" / f"{r:06d}.json.gz", live / "history")
            (live / "rounds.jsonl").write_text("".join(lines[:r]))
            deadline, shown = time.monotonic() + 120, ""
            while f"round {r}/3" not in shown and time.monotonic() < deadline:
                time.sleep(0.02)
                shown += capsys.readouterr().out
            assert f"round {r}/3" in shown
        assert view.is_running(live)
        assert view.main([str(live)]) == 0  # the table of the second round, from its history
        half = capsys.readouterr().out
        assert "2 of 3 rounds\n" in half
        worst = json.loads(lines[1])["worst_domain_accuracy"]
        assert f"{100 * worst:.1f}" in half
        for name in ("without.json", "rounds.jsonl", "clients.parquet", "model/params.safetensors"):
            shutil.copy(run / name, live / name)
        watcher.join(120)
    assert not watcher.is_alive()
    assert final_table(RecordedRun(run)).text() in capsys.readouterr().out


def test_a_run_that_nobody_continues_is_given_up(run, capsys, monkeypatch):
    monkeypatch.setattr(view, "PAUSE", 0.01)
    monkeypatch.setattr(view, "PATIENCE", 0.1)
    (run / "model" / "params.safetensors").unlink()
    assert view.main([str(run), "--follow"]) == 0
    assert "3 of 3 rounds, and it is not running now" in capsys.readouterr().out


@pytest.mark.parametrize("content", [None, "", "[1]", "rounds: many", "a: [", "rounds: 2"])
def test_a_folder_without_a_run(content, tmp_path, capsys):
    if content is not None:
        (tmp_path / "config.yaml").write_text(content)
        (tmp_path / "rounds.jsonl").write_text("{}\n")
    assert view.main([str(tmp_path), "--follow"]) == 2
    error = capsys.readouterr().err
    assert str(tmp_path) in error
    assert len(error.splitlines()) == 1


def test_json_is_the_rounds_and_nothing_else(run, capsys):
    assert view.main([str(run), "--json"]) == 0
    out = capsys.readouterr().out
    rows = [json.loads(line) for line in out.splitlines()]
    assert [(row["run"], row["round"]) for row in rows] == [(str(run), r) for r in (1, 2, 3)]
    (run / "model" / "params.safetensors").unlink()
    assert view.main([str(run), "--json"]) == 0
    again = capsys.readouterr()
    assert again.out == out
    assert "3 of 3 rounds" in again.err


def test_a_folder_that_does_not_exist_is_named_in_view(tmp_path, capsys):
    from rayfed.view import main

    assert main([str(tmp_path / "nowhere")]) == 2
    assert "nowhere: there is no such folder; give the folder of a run" in capsys.readouterr().err
    assert main([str(tmp_path)]) == 2
    assert f"{tmp_path}: holds no run (there is no config.yaml)" in capsys.readouterr().err
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.yaml").touch()
    for near in (tmp_path, tmp_path / "mine" / "report.md"):
        near.touch()
        assert main([str(near)]) == 2
        assert capsys.readouterr().err.endswith(f"; give the folder of a run, such as {tmp_path / 'mine'}\n")


def test_of_compared_methods_the_first_one_is_shown_and_of_a_protocol_a_run_is_asked_for(tmp_path, capsys):
    methods, parts = ["fedgcr", "fedavg"], ["shots-1", "shots-2"]
    folders.write_study(tmp_path / "two", "", methods, ["all"], rounds=lambda part: 2)
    assert view.main([str(tmp_path / "two")]) == 0
    shown = capsys.readouterr()
    assert "the others are in cells/fedavg-all-seed0" in shown.err
    assert "round 2/2" in shown.out
    folders.write_study(tmp_path / "few", "few_shot", methods[:1], parts, rounds=lambda part: 1)
    assert view.main([str(tmp_path / "few")]) == 2
    wanted = "holds several runs; give one, such as cells/fedgcr-shots-1-seed0; rayfed ps"
    assert wanted in capsys.readouterr().err
