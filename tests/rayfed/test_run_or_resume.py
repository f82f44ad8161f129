"""One command that begins a run or goes on with it, for schedulers that repeat commands."""

import json
import shutil

import pytest

from rayfed.run import main
from tests.conftest import SMALL
from tests.rayfed.malformed import last_wins


def command(cache, path, *more):
    return last_wins(
        [*SMALL, f"data.cache={cache}", "cluster=inline", "--quiet", f"output={path}", "--or-resume", *more]
    )


def rows_of(path):
    return [json.loads(line) for line in (path / "rounds.jsonl").read_text().splitlines()]


def test_it_begins_a_run_goes_on_with_it_and_repeats_nothing(cache, tmp_path, capsys):
    path, whole = tmp_path / "run", tmp_path / "whole"
    assert main(command(cache, whole, "rounds=3")) == 0
    assert main(command(cache, path, "rounds=2")) == 0
    first = rows_of(path)
    assert main(command(cache, path, "rounds=3")) == 0
    assert rows_of(path)[:2] == first  # the seconds, too: nothing was run again
    assert len(rows_of(path)) == 3
    tensors = "model/params.safetensors"
    assert (path / tensors).read_bytes() == (whole / tensors).read_bytes()
    before = rows_of(path)
    assert main(command(cache, path, "rounds=3")) == 0
    assert rows_of(path) == before


def test_a_run_of_another_config_is_not_touched(cache, tmp_path, capsys):
    path = tmp_path / "run"
    assert main(command(cache, path)) == 0
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    assert main(command(cache, path, "train.lr=0.5")) == 2
    assert "train.lr: 0.5 would change the result" in capsys.readouterr().err
    after = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    assert {file for file in before if before[file] != after.get(file)} <= {path / ".rayfed-run.json"}


def test_a_run_that_ended_before_its_first_round_begins_again(cache, tmp_path):
    path = tmp_path / "run"
    assert main(command(cache, path)) == 0
    for part in ("checkpoints", "model", "rounds.jsonl", "history"):
        target = path / part
        shutil.rmtree(target) if target.is_dir() else target.unlink(missing_ok=True)
    assert main(command(cache, path)) == 0
    assert len(rows_of(path)) == 2


def test_a_study_goes_on_too(cache, tmp_path):
    path = tmp_path / "study"
    words = command(cache, path, "compare=[fedavg,fedprox]")
    assert main(words) == 0
    cells = {file: file.stat().st_mtime_ns for file in path.rglob("rounds.jsonl")}
    assert len(cells) == 2
    assert main(words) == 0
    assert {file: file.stat().st_mtime_ns for file in path.rglob("rounds.jsonl")} == cells


def test_it_needs_a_folder(capsys):
    assert main([*SMALL, "cluster=inline", "--or-resume"]) == 2
    assert "output: --or-resume needs the folder of the run" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["a file", "somebody else's folder"])
def test_what_is_no_run_is_refused_as_without_it(place, cache, tmp_path, capsys):
    path = tmp_path / "run"
    if place == "a file":
        path.touch()
    else:
        path.mkdir()
        (path / "mine.txt").touch()
    assert main(command(cache, path)) == 2
    assert capsys.readouterr().err.count("\n") == 1
