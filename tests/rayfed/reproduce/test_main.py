"""The acceptance of the command: a table on two cores, killed halfway and started again."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from rayfed.errors import ConfigError
from rayfed.reproduce.__main__ import main, small_scale_named
from rayfed.reproduce.run_table import reproduce
from rayfed.reproduce.table_study import table_study
from tests.conftest import ROOT
from tests.rayfed.reproduce.tables import SMALL_TABLE

FILES = ("reproduction.json", "table.csv", "claims.csv", "table.md", "table.tex", "table.html")


def start(output, cache, *overrides):
    place = [f"output={output}", f"data.cache={cache}"]
    words = ["-m", "rayfed.reproduce", "fedgcr/table5", "--scale", "mini", "--seeds", "1", *place, *overrides]
    return subprocess.Popen([sys.executable, *words], cwd=ROOT, start_new_session=True)


def finished(output):
    return sorted(output.glob("cells/*/model/params.safetensors"))


def ended(command, output, cells, by):
    """Send a signal when so many cells are finished; returns the exit code."""
    while len(finished(output)) < cells:
        assert command.poll() is None
        time.sleep(0.1)
    os.kill(command.pid, by)
    return command.wait(120)


@pytest.mark.parametrize(
    ("scale", "message", "notes"),
    [
        ("paper", "data.root: not set", ["--scale mini runs the table on data that ship with RayFed"]),
        ("paper", "train.lr: 'x' is not a number", []),
        ("mini", "data.root: not set", []),
    ],
)
def test_missing_data_of_a_paper_are_answered_with_the_scale_that_needs_none(scale, message, notes):
    with pytest.raises(ConfigError) as caught, small_scale_named(table_study("fedgcr/table5", scale)):
        raise ConfigError(message)
    assert getattr(caught.value, "__notes__", []) == notes


def test_an_interruption_gives_its_advice_once(tmp_path, cache, monkeypatch, capsys):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("rayfed.experiment.study.lanes.run_cell", stop)
    place = [f"output={tmp_path / 'table'}", f"data.cache={cache}", "--cells", "none"]
    assert main(["fedgcr/table5", "--scale", "mini", "--quiet", *SMALL_TABLE, *place]) == 130
    said = capsys.readouterr().err
    assert said.count("what is finished is kept; continue with: ") == 1
    assert said.count("\n") == 1


@pytest.mark.slow
@pytest.mark.steady
def test_cells_on_ray_that_were_killed_end_in_the_table_of_one_process(tmp_path, cache):
    """Two cells at once."""
    few = [text for text in SMALL_TABLE if not text.startswith("cluster")]
    rows = ["--cells", "none", "--cells", "FedGR"]
    on_ray = [*few, "cluster.num_cpus=2", "at_once=2", *rows]
    killed = tmp_path / "killed"
    assert ended(start(killed, cache, *on_ray), killed, 1, signal.SIGKILL) == -signal.SIGKILL
    done = {file: file.stat().st_mtime_ns for file in finished(killed)}
    assert start(killed, cache, *on_ray).wait(300) == 0
    assert {file: file.stat().st_mtime_ns for file in done} == done
    inline = [*few, "cluster=inline", f"data.cache={cache}", f"output={tmp_path / 'whole'}"]
    reproduce(table_study("fedgcr/table5", "mini", 1, ["none", "FedGR"], inline))
    found, whole = (json.loads((tmp_path / name / FILES[0]).read_text()) for name in ("killed", "whole"))
    changed = [text for text in found.pop("overrides") if not text.startswith("cluster")]
    assert changed == [text for text in whole.pop("overrides") if not text.startswith("cluster")]
    assert found == whole


@pytest.mark.slow
@pytest.mark.timeout(4000)
def test_a_table_ends_and_after_a_kill_is_the_same(tmp_path, cache):
    whole = tmp_path / "whole"
    assert start(whole, cache).wait(2000) == 0

    killed = tmp_path / "killed"
    assert ended(start(killed, cache), killed, 1, signal.SIGINT) == 130
    assert ended(start(killed, cache), killed, 2, signal.SIGKILL) == -signal.SIGKILL
    done = {file: file.stat().st_mtime_ns for file in finished(killed)}
    assert 2 <= len(done) < 4
    assert start(killed, cache).wait(2000) == 0
    assert {file: file.stat().st_mtime_ns for file in done} == done
    for name in FILES:
        assert (killed / name).read_bytes() == (whole / name).read_bytes()
    assert all(cell["sha256"] for cell in json.loads((killed / FILES[0]).read_text())["cells"])
