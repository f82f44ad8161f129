"""Commands and the folder they are given: nobody loses files, and one command at a time writes a run."""

import os
import subprocess
import sys
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rayfed.resume import main as resume_main
from rayfed.run import main
from rayfed.view import is_running
from tests.conftest import ROOT
from tests.rayfed.record.claims import TREES, pictured, plant, unchanged

BAD = (
    "capacity={}",
    "capacity=13",
    "rouds=3",
    "clients_per_round=9",
    "data.held_out=stret",
    "data.val=-1",
    "compare=fedprx",
    "compare=[fedavg, nothing]",
    "tuning=loar",
    "train.lr=-1",
    "tuning.sites=[attn.nothing]",
    "trackers=[nobody]",
    "protocol=leave_one_out; data.held_out=street",
)
TINY = ("algorithm=fedavg", "data.limit=24", "model.options={depth: 2}", "model.pretrained=false")
TINY = (*TINY, "figures=false", "cluster=inline")


def command(output, cache, *overrides):
    return main([*TINY, f"output={output}", f"data.cache={cache}", *overrides])


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(around_it=TREES, inside=TREES, bad=st.sampled_from(BAD), overwrite=st.booleans())
def test_a_refused_command_changes_nothing(around_it, inside, bad, overwrite, tmp_path_factory, cache):
    around = tmp_path_factory.mktemp("case") / "around"
    around.mkdir()
    plant(around, {name: kind for name, kind in around_it.items() if not name.startswith("x")})
    plant(around / "x" / "output", inside)
    replaces = f"overwrite={str(overwrite).lower()}"
    with unchanged(around.parent):
        assert command(around / "x" / "output", cache, *bad.split("; "), replaces) == 2


@pytest.mark.parametrize("output", [("output=runs/mine",), ()])
def test_a_folder_that_ray_removes_after_a_job_is_refused(output, cache, tmp_path, capsys, monkeypatch):
    """A relative output of `ray job submit --working-dir .` would be in Ray's copy of that folder."""
    job = tmp_path / "session_1" / "runtime_resources" / "working_dir_files" / "_ray_pkg_1"
    job.mkdir(parents=True)
    monkeypatch.chdir(job)
    with unchanged(tmp_path):
        assert main([*TINY, *output, f"data.cache={cache}", "--dry-run"]) == 2
        assert main([*TINY, *output, f"data.cache={cache}"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    for error in (first, second):
        assert "Ray removes after the job; write an absolute path on storage that stays" in error
    assert main([*TINY, f"output={tmp_path / 'run'}", f"data.cache={cache}", "rounds=1"]) == 0
    assert str(tmp_path / "run") in capsys.readouterr().out.splitlines()[-1]
    (tmp_path / "run").rename(job / "run")
    assert resume_main(["run", "rounds=+1"]) == 2
    assert "'run' is in the working folder of this Ray job" in capsys.readouterr().err


@pytest.mark.parametrize("overwrite", ["true", "false"])
def test_files_of_somebody_else_are_never_cleared(overwrite, cache, tmp_path, capsys):
    """Also where one of them is called as a run's file is."""
    foreign = ["model/weights.bin", "figures/thesis.png", "my_results.parquet", "config.yaml"]
    plant(tmp_path / "mine", dict.fromkeys(foreign, "file"))
    with unchanged(tmp_path):
        assert command(tmp_path / "mine", cache, "rounds=1", f"overwrite={overwrite}") == 2
    error = capsys.readouterr().err
    assert "output: " in error
    assert "config.yaml" in error
    assert len(error.strip().splitlines()) == 1


def test_overwrite_renames_the_folder_which_can_be_continued(cache, tmp_path, capsys):
    run, before = tmp_path / "run", tmp_path / "run.before-1"
    assert command(run, cache, "rounds=3", "--quiet") == 0
    plant(run, dict.fromkeys(["model/mine.bin", "history/000099.json.gz", "report.old"], "file"))
    mine = pictured(run)
    assert command(run, cache, "rounds=1", "overwrite=true") == 0
    assert f"the run that was in {run} is in {before} now" in capsys.readouterr().out
    assert pictured(before) == mine
    assert resume_main([str(before), "rounds=+1", "--quiet"]) == 0
    assert len((before / "rounds.jsonl").read_text().splitlines()) == 4
    assert (before / "model" / "mine.bin").read_text() == "foreign model/mine.bin"
    assert len((run / "rounds.jsonl").read_text().splitlines()) == 1
    assert not (run / "checkpoints" / "round-000003").exists()


def test_overwrite_renames_the_folder_of_a_study_too_and_each_kind_replaces_the_other(
    cache, tmp_path, capsys
):
    run, before = tmp_path / "run", tmp_path / "run.before-1"
    assert command(run, cache, "rounds=1", "compare=local", "--quiet") == 0
    assert command(run, cache, "rounds=1", "overwrite=true") == 0
    assert f"the run that was in {run} is in {before} now" in capsys.readouterr().out
    assert resume_main([str(before), "rounds=+1", "--quiet"]) == 0
    for name in ("fedavg", "local"):
        rows = (before / "cells" / f"{name}-seed0" / "rounds.jsonl").read_text()
        assert len(rows.splitlines()) == 2
    assert not (run / "study.json").exists()
    assert command(run, cache, "rounds=1", "compare=local", "overwrite=true", "--quiet") == 0
    assert (tmp_path / "run.before-2" / "rounds.jsonl").exists()
    assert not (run / "rounds.jsonl").exists()


def test_a_run_that_is_refused_late_takes_back_its_folders(cache, tmp_path, capsys, monkeypatch):
    from rayfed.errors import ConfigError

    def refuse(*args):
        raise ConfigError("cluster.address: does not answer")

    monkeypatch.setattr("rayfed.engine.session.launch", refuse)
    assert command(tmp_path / "a" / "b" / "run", cache) == 2
    assert not (tmp_path / "a").exists()
    (tmp_path / "empty").mkdir()
    assert command(tmp_path / "empty", cache) == 2
    assert list((tmp_path / "empty").iterdir()) == []


def replaced(output, cache, *overrides):
    """The exit code of a run on Ray that would replace another one."""
    keys = (f"output={output}", f"data.cache={cache}", "cluster=local", "overwrite=true")
    return main([*TINY[:-1], *keys, *overrides])


@pytest.mark.parametrize("also", [(), ("protocol=leave_one_out", "data.domains=[plain,street]")])
def test_overwrite_keeps_the_run_if_no_cluster_answers(also, cache, tmp_path, capsys):
    command(tmp_path / "run", cache, "rounds=1")
    with unchanged(tmp_path):
        assert replaced(tmp_path / "run", cache, "cluster.address=127.0.0.1:1", *also) == 75
    assert capsys.readouterr().err.startswith(
        "error: cluster.address: no Ray cluster answers at '127.0.0.1:1'"
    )


def test_overwrite_keeps_the_run_if_ray_does_not_start_here(cache, tmp_path, capsys, monkeypatch):
    from rayfed.errors import ClusterError

    def refuse(*args):
        raise ClusterError("Ray could not be started on this machine")

    command(tmp_path / "run", cache, "rounds=1")
    monkeypatch.setattr("rayfed.executors.connection.ray.is_initialized", lambda: False)
    monkeypatch.setattr("rayfed.executors.connection._start", refuse)
    with unchanged(tmp_path):
        assert replaced(tmp_path / "run", cache) == 1
    assert "Ray could not be started" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("key", "words", "code"),
    [
        ("gpus_per_actor=1", "no GPU", 2),
        ("actors=1000", "do not fit", 2),
        ("cpus_per_actor=3", "were not placed within 1 s (cluster.connect_timeout)", 75),
    ],
)
def test_overwrite_keeps_the_run_if_the_cluster_has_no_room(
    key, words, code, cache, tmp_path, ray_cluster, capsys
):
    import ray

    command(tmp_path / "run", cache, "rounds=1")
    busy = ray.util.placement_group([{"CPU": 2}])
    ray.get(busy.ready())
    try:
        with unchanged(tmp_path):
            assert replaced(tmp_path / "run", cache, "cluster.connect_timeout=1", f"cluster.{key}") == code
    finally:
        ray.util.remove_placement_group(busy)
    assert words in capsys.readouterr().err


def started(output, cache, *overrides):
    arguments = [*TINY, f"output={output}", f"data.cache={cache}", "rounds=4000", *overrides]
    return subprocess.Popen(
        [sys.executable, "-m", "rayfed.run", *arguments, "--quiet"],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )


@pytest.mark.slow
@pytest.mark.steady
def test_of_commands_that_start_at_once_one_writes_the_run(cache, tmp_path):
    """Two may overwrite and one may not; races of threads: tests/rayfed/record/test_locks.py."""
    overwrites = (True, True, False)
    run = tmp_path / "run"
    assert command(run, cache, "rounds=1", "--quiet") == 0
    plant(run.parent, {"model": "file"})
    processes = [started(run, cache, f"overwrite={str(o).lower()}") for o in overwrites]
    until = time.monotonic() + 300
    while sum(process.poll() is None for process in processes) > 1:
        assert time.monotonic() < until
        time.sleep(0.1)
    (winner,) = [process for process in processes if process.poll() is None]
    for process in processes:
        if process is not winner:
            error = process.communicate()[1].strip()
            assert (process.returncode, len(error.splitlines())) == (2, 1), error
            assert error.startswith("error: output: ")
    while len(list(run.glob("history/*.json.gz"))) < 2:
        assert winner.poll() is None
        assert time.monotonic() < until
        time.sleep(0.1)
    winner.terminate()
    assert winner.communicate()[1].count("error:") == 0
    assert winner.returncode == 130
    done = len((run / "rounds.jsonl").read_text().splitlines())
    assert len(list((run / "history").iterdir())) == done
    assert (run / "checkpoints" / f"round-{done:06d}" / "checkpoint.json").is_file()
    assert (tmp_path / "model").read_text() == "foreign model"


@pytest.mark.slow
@pytest.mark.steady
def test_overwrite_never_clears_a_folder_that_is_being_written(cache, tmp_path, capsys):
    run = tmp_path / "run"
    process = started(run, cache)
    until = time.monotonic() + 300
    while not (run / "rounds.jsonl").exists():
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.02)
    assert is_running(run)
    assert command(run, cache, "overwrite=true") == 2
    assert "another process is running" in capsys.readouterr().err
    assert process.poll() is None
    process.kill()
    process.communicate()
    assert not is_running(run)
    assert command(run, cache, "overwrite=true", "rounds=1", "--quiet") == 0
    left = [p.name for p in run.rglob("*") if p.name.endswith(".tmp")]
    assert left == []


def test_a_cache_keeps_what_is_not_a_prepared_data_set(tmp_path):
    from rayfed.prepare.__main__ import main as prepare_main

    foreign = ["my-data.arrow", "my-data.lock", "my-data.1.tmp", "a-224-0123.arrow", "a-224-0123.lock"]
    name = f"a-224-{'0' * 20}"
    foreign += [f"{name}.notes.tmp", f"{name}.txt"]
    plant(tmp_path / "cache", dict.fromkeys(foreign, "file"))
    before = pictured(tmp_path)
    (tmp_path / "cache" / f"{name}.lock").touch()
    (tmp_path / "cache" / f"{name}.arrow").write_text("prepared")
    (tmp_path / "cache" / f"{name}.17.tmp").write_text("half")
    assert prepare_main(["--clean", "--cache", str(tmp_path / "cache")]) == 0
    assert pictured(tmp_path) == {**before, f"cache/{name}.lock": b""}
