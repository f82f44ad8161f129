"""python -m tune.run in separate processes: killed and resumed, interrupted, refused, on declared GPUs."""

import json
import os
import signal
import subprocess
import sys
import time

import pandas as pd
import pytest
import yaml

import rayfed
from rayfed.config.schema import load_config
from tests.conftest import ROOT, SMALL
from tests.rayfed.malformed import last_wins
from tests.tune.folders import cells, folders_of, rows
from tune.run import main

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_preload_python_modules": "torch,timm"}
COMMON = (*SMALL, "cluster.dashboard=false", "objective=accuracy")


@pytest.fixture
def sweep_file(tmp_path):
    """A sweep over one learning rate, each trial in one process."""
    path = tmp_path / "mine.yaml"
    path.write_text(
        "experiment: [algorithm=fedavg, cluster=inline]\n"
        "space: {train.lr: {loguniform: [0.001, 0.1]}}\n"
        "default: {train.lr: 0.02}\n"
    )
    return f"sweep={path}"


def start(*arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "tune.run", *last_wins(arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=ENVIRONMENT,
    )


def lengths(path):
    """How many rounds of each cell are on disk, the largest number first."""
    files = path.glob("cells/*/rounds.jsonl")
    return sorted((len(file.read_text().splitlines()) for file in files), reverse=True)


def wait_until(ready, process, seconds=240):
    until = time.monotonic() + seconds
    while not ready():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.ray
def test_a_sweep_killed_with_9_loses_no_round_and_repeats_no_trial(sweep_file, cache, tmp_path):
    path = tmp_path / "out"
    rounds = 6
    arguments = [sweep_file, *COMMON, f"data.cache={cache}", f"rounds={rounds}", "trials=3"]
    process = start(*arguments, f"output={path}", "max_concurrent=1", "cluster.num_cpus=1")
    wait_until(lambda: (found := lengths(path))[:1] == [rounds] and found[1:2] >= [2], process)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    before = {file: file.read_text() for file in sorted(path.glob("cells/*/rounds.jsonl"))}
    final = folders_of(path, train__lr=0.02)[0] / "model" / "params.safetensors"
    written = final.stat().st_mtime_ns

    again = start(f"resume={path}", "--json")
    out, err = again.communicate(timeout=400)
    assert again.returncode == 0, err
    table = pd.read_parquet(path / "trials.parquet")
    assert table["trial"].tolist() == [0, 1, 2]
    assert set(table["state"]) == {"finished"}
    assert final.stat().st_mtime_ns == written  # the finished trial was not touched
    every = pd.read_parquet(path / "rounds.parquet")
    assert every.groupby("trial")["round"].apply(list).tolist() == [list(range(1, rounds + 1))] * 3
    for file, text in before.items():  # seconds included: what was on disk was not computed again
        assert file.read_text().startswith(text)
    summary = json.loads(out)
    assert summary["default"]["values"] == {"train.lr": 0.02}
    assert [t["trial"] for t in summary["trials"]] == [0, 1, 2]
    best = load_config([f"output={tmp_path / 'best'}"], path / "best.yaml")
    result = rayfed.simulate(best)
    assert result.sha256 == summary["best"]["sha256"]
    study = rayfed.load(path)
    assert study.best_run.sha256 == result.sha256
    assert rows(result.path) == rows(study.best_run.path)
    assert [cell["sha256"] for cell in cells(path)] == [each["sha256"] for each in summary["trials"]]


@pytest.mark.slow
@pytest.mark.ray
def test_an_interrupt_ends_a_sweep_that_can_go_on(sweep_file, cache, tmp_path):
    import psutil

    path = tmp_path / "out"
    process = start(sweep_file, *COMMON, f"data.cache={cache}", "rounds=400", "trials=2", f"output={path}")
    wait_until(lambda: lengths(path) >= [2], process)
    started = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 130, err
    assert f"resume={path}" in err
    _, alive = psutil.wait_procs(started, timeout=120)
    assert not alive
    assert "unfinished" in set(pd.read_parquet(path / "trials.parquet")["state"])


@pytest.mark.slow
@pytest.mark.ray
def test_a_sweep_over_shares_of_declared_gpus(cache, tmp_path):
    """Two GPUs: a trial with two actors of a quarter beside, or before, one with two whole GPUs."""
    path = tmp_path / "gpus.yaml"
    path.write_text(
        "experiment: [algorithm=fedavg, cluster.actors=2, cluster.cpus_per_actor=0.5]\n"
        "space: {cluster.gpus_per_actor: {choice: [0.25, 1.0]}}\n"
        "default: {cluster.gpus_per_actor: 0.25}\n"
        "points: [{cluster.gpus_per_actor: 1.0}]\n"
    )
    arguments = [f"sweep={path}", *COMMON, f"data.cache={cache}", "rounds=1", "trials=2"]
    arguments += ["cluster.num_cpus=4", "cluster.num_gpus=2", f"output={tmp_path / 'out'}"]
    process = start(*arguments)
    out, err = process.communicate(timeout=500)
    assert process.returncode == 0, err
    assert "2 trials at a time, each: 2 client actors with 0.5 CPU and 0.25 GPU each" in out
    table = pd.read_parquet(tmp_path / "out" / "trials.parquet")
    assert table["cluster.gpus_per_actor"].tolist() == [0.25, 1.0]
    assert table["sha256"].nunique() == 1  # placement changes nothing


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["sweep=fedgrc"], 2, "did you mean 'fedgcr'"),
        (["sweep=fedgcr", "local.muu=1"], 2, "no such key"),
        (["resume=nowhere"], 2, "holds no sweep"),
        (["resume=a", "seeds=3"], 2, "no other override than trials=N"),
        (["sweep=fedgcr", "data=pacs", "data.root=/nowhere"], 2, "data.root"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, code, words, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == code
    err = capsys.readouterr().err
    assert words in err
    assert len(err.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())  # nothing was begun


@pytest.mark.parametrize(
    ("trials", "words"),
    [
        ("3", "trials: 3 are fewer than the 4"),
        ("many", "trials: 'many'"),
    ],
)
def test_more_trials_are_refused_in_one_line(trials, words, tmp_path, capsys):
    folder = tmp_path / "sweep"
    folder.mkdir()
    sweep = {"space": {"train.lr": {"loguniform": [0.01, 0.1]}}, "trials": 4, "scheduler": "asha"}
    tree = {"sweep": sweep, "overrides": [], "file": None, "here": str(tmp_path)}
    (folder / "sweep.yaml").write_text(yaml.safe_dump(tree))
    assert main([f"resume={folder}", f"trials={trials}"]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert len(err.strip().splitlines()) == 1


def test_the_sweeps_are_listed(capsys):
    assert main(["--list"]) == 0
    assert "fedgcr" in capsys.readouterr().out.split()
    assert yaml.safe_load((ROOT / "configs" / "sweep" / "fedgcr.yaml").read_text())["space"]
