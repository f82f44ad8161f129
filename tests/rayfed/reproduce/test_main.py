"""The acceptance of the command: a whole table on two cores, killed halfway and started again."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from rayfed.errors import ConfigError
from rayfed.reproduce.__main__ import main, small_scale_named
from rayfed.reproduce.job import make_job
from tests.conftest import ROOT


def start(output, cache):
    place = [f"output={output}", f"data.cache={cache}"]
    words = ["-m", "rayfed.reproduce", "fedgcr/table5", "--scale", "mini", "--seeds", "1", *place]
    return subprocess.Popen([sys.executable, *words], cwd=ROOT, start_new_session=True)


def ended(job, output, cells, by):
    """Send a signal when so many cells are finished; returns the exit code."""
    while len(list(output.glob("cells/*.json"))) < cells:
        assert job.poll() is None
        time.sleep(0.5)
    os.kill(job.pid, by)
    return job.wait(120)


@pytest.mark.parametrize(
    ("scale", "message", "notes"),
    [
        ("paper", "data.root: not set", ["--scale mini runs the table on data that ship with RayFed"]),
        ("paper", "train.lr: 'x' is not a number", []),
        ("mini", "data.root: not set", []),
    ],
)
def test_missing_data_of_a_paper_are_answered_with_the_scale_that_needs_none(scale, message, notes):
    with pytest.raises(ConfigError) as caught, small_scale_named(make_job("fedgcr/table5", scale)):
        raise ConfigError(message)
    assert getattr(caught.value, "__notes__", []) == notes


def test_an_interruption_gives_its_advice_once(tmp_path, cache, monkeypatch, capsys):
    def stop(job, tell, progress):
        err = KeyboardInterrupt()
        err.add_note(progress.advice)  # as a cell does that runs in this process
        raise err

    monkeypatch.setattr("rayfed.reproduce.run_job.reproduce", stop)
    table = [
        "fedsa_lora/glue",
        "--scale",
        "mini",
        "--quiet",
        f"output={tmp_path / 'job'}",
        f"data.cache={cache}",
    ]
    assert main(table) == 130
    assert capsys.readouterr().err.count("what is finished is kept") == 1


@pytest.mark.slow
@pytest.mark.timeout(4000)
def test_a_table_ends_and_after_a_kill_is_the_same(tmp_path, cache):
    whole = tmp_path / "whole"
    assert start(whole, cache).wait(2000) == 0

    killed = tmp_path / "killed"
    assert ended(start(killed, cache), killed, 1, signal.SIGINT) == 130
    assert ended(start(killed, cache), killed, 2, signal.SIGKILL) == -signal.SIGKILL
    done = {file: file.stat().st_mtime_ns for file in killed.glob("cells/*.json")}
    ran = {file: (file.with_suffix("") / "rounds.jsonl").stat().st_mtime_ns for file in done}
    assert 2 <= len(done) < 4
    assert start(killed, cache).wait(2000) == 0
    assert {file: file.stat().st_mtime_ns for file in done} == done
    assert {file: (file.with_suffix("") / "rounds.jsonl").stat().st_mtime_ns for file in done} == ran
    for name in ("reproduction.json", "table.csv", "claims.csv", "table.md", "table.tex", "table.html"):
        assert (killed / name).read_bytes() == (whole / name).read_bytes()
    assert all(cell["sha256"] for cell in json.loads((killed / "reproduction.json").read_text())["cells"])
