"""What the command estimates before it runs anything, and what it shows of a table that it runs."""

import json

import pytest
import torch

from rayfed.engine import measure_client
from rayfed.engine.measure_client import largest_client
from rayfed.record.readers import read_rows
from rayfed.reproduce.__main__ import main
from rayfed.terminal.console import size
from tests.rayfed.reproduce.tables import SMALL_TABLE


def test_the_command_shows_its_plan_and_runs_nothing(tmp_path, cache, capsys, monkeypatch):
    """One client is measured, here without a new process, which takes seconds to start."""
    here = torch.device("cpu")
    monkeypatch.setattr(measure_client, "measure", lambda *given, **_: largest_client(*given[:2], here))
    place = [*SMALL_TABLE, f"data.cache={cache}", f"output={tmp_path / 'table'}"]
    assert (
        main(["fedgcr/table5", "--scale", "mini", "--seeds", "1", "--cells", "none", "--dry-run", *place])
        == 0
    )
    assert "to run: 1 cells; 1 at a time" in capsys.readouterr().out
    assert not (tmp_path / "table").exists()
    assert main(["fedgcr/table5", "row=none"]) == 2


@pytest.mark.slow
@pytest.mark.steady
def test_the_command_shows_the_table_and_its_plan(tmp_path, cache, capsys):
    place = [*SMALL_TABLE, f"data.cache={cache}", f"output={tmp_path / 'table'}"]
    words = ["fedgcr/table5", "--scale", "mini", "--seeds", "1", "--cells", "none"]
    assert main([*words, "--dry-run", *place]) == 0
    plan = capsys.readouterr().out
    assert "finished: 0 of 1 cells" in plan
    assert "CPU-hours" in plan
    assert "to run: 1 cells; 1 at a time" in plan
    assert not (tmp_path / "table").exists()
    assert main([*words, *place]) == 0
    shown = capsys.readouterr().out
    assert "1/1  none, dif10, seed 0  Avg " in shown
    assert f"python -m rayfed.report {tmp_path / 'table'}" in shown
    rows = read_rows(next((tmp_path / "table" / "cells").glob("*/")))
    sent = sum(row["bytes_up"] + row["bytes_down"] for row in rows)
    assert f"{size(sent)} sent to clients and back" in plan
    assert "orderings in the paper's numbers" not in shown  # one row has no order
    assert main([*words, "--json", *place, "report=true"]) == 0
    assert json.loads(capsys.readouterr().out)["experiment"] == "fedgcr/table5"
    assert "Ablation" in (tmp_path / "table" / "report.html").read_text()
    assert main(["fedgcr/table5", "row=none"]) == 2
