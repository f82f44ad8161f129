"""What is seen while a run goes on: lines, JSON, a progress bar; and by whom."""

import io
import json

import pandas as pd
import pytest
import rich

from rayfed import resume, run
from rayfed.engine.record_rounds import slowest
from rayfed.federation.executor import CallTiming
from rayfed.terminal.console import headline, line, showing
from tests.conftest import SMALL, STEADY

ROW = {
    "round": 3,
    "accuracy": 0.5,
    "worst_domain": "street",
    "worst_domain_accuracy": 0.25,
    "loss": 1.0,
    "bytes_up": 1500,
    "bytes_down": 500,
    "seconds": 2.0,
    "slowest_client": "c3-plain",
    "slowest_seconds": 1.25,
}


def objects(text):
    return [json.loads(text) for text in text.splitlines()]


@pytest.mark.parametrize("quiet", [False, pytest.param(True, marks=STEADY)])
def test_json_has_an_object_a_round_and_nothing_else_on_standard_output(quiet, cache, tmp_path, capsys):
    path = tmp_path / "mine"
    extra = ["--quiet"] if quiet else []
    options = [*SMALL, f"data.cache={cache}", "cluster=inline", f"output={path}"]
    assert run.main([*options, "--json", *extra]) == 0
    out, err = capsys.readouterr()
    *rows, last = objects(out)
    kept = objects((path / "rounds.jsonl").read_text())
    assert {row.pop("run") for row in rows} == {last["run"]} == {str(path)}
    assert all(row.pop("slowest_seconds") > 0 for row in rows)
    clients = pd.read_parquet(path / "partition.parquet")["client"]
    assert {row.pop("slowest_client") for row in rows} <= {*clients} - {""}
    assert rows == kept
    assert len(last["sha256"]) == 64
    assert ("round 1/2" in err) is not quiet
    assert resume.main([str(path), "rounds=+1", "--json", *extra]) == 0
    out, err = capsys.readouterr()
    assert [row.get("round") for row in objects(out)] == [3, None]
    assert ("round 3/3" in err) is not quiet


def test_a_line_and_the_progress_bar_name_the_worst_and_the_slowest(monkeypatch):
    assert "slowest c3-plain 1.2 s" in line(ROW, 9)
    assert headline(ROW, 9) == "round 3/9  accuracy 50.0, street worst  c3-plain slowest  2.0 kB"
    bare = {"round": 3, "bytes_up": 0, "bytes_down": 0, "seconds": 0.5}  # a round without a score
    assert headline(bare, 9) == "round 3/9  0 B"
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    rich.get_console()  # made before, when the terminal was narrower
    monkeypatch.setenv("COLUMNS", "150")
    with showing(9) as show:
        show(ROW)
        show({"sha256": "x"})
    assert line(ROW, 9) in terminal.getvalue()
    assert headline(ROW, 9) in terminal.getvalue()


def test_a_line_leaves_out_from_the_right_what_a_terminal_has_no_room_for():
    full = line(ROW, 9)
    assert line(ROW, 9, len(full)) == full
    assert line(ROW, 9, len(full) - 1) == full.partition("  slowest")[0]
    assert line(ROW, 9, 60).endswith("(street)  loss 1.000")
    assert line(ROW, 9, 5) == "round 3/9"


def test_the_slowest_is_who_worked_longest_in_all_exchanges_together():
    visits = [CallTiming("a", "fit", 2.0), CallTiming("b", "probe", 1.5), CallTiming("b", "fit", 1.0, 9.0)]
    assert slowest(visits) == {"slowest_client": "b", "slowest_seconds": 2.5}
    assert slowest([]) == {}
