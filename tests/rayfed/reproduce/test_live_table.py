"""The table on a terminal, while cells run."""

import io
from dataclasses import replace

from rich.console import Console

from rayfed.experiment.study.run_cell import Outcome
from rayfed.reproduce.live_table import table_of
from rayfed.reproduce.run_table import TableProgress
from tests.rayfed.reproduce.tables import ablation, finished_as


def shown(progress):
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(table_of(progress))
    return console.export_text()


def test_it_fills_and_says_how_far_each_row_is(tmp_path):
    asked = replace(ablation(seeds=2), path=tmp_path)
    progress = TableProgress(asked)
    names = ("method", "setting", "seed")
    cells = {tuple(cell): replace(c, output=str(tmp_path / cell.row)) for cell, c in asked.configs.items()}
    progress.start(cells, names, {})
    running, failed = (cell for cell in asked.configs if cell.row in ("FedGC", "FedGCR") and cell.seed == 0)
    (tmp_path / running.row).mkdir()
    (tmp_path / running.row / "rounds.jsonl").write_text('{"round": 1}\n{"round": 2}\n')
    progress.finished |= finished_as(asked, {"none": [61.0, 62.0], "FedGR": [63.0]})
    progress.begin(tuple(running), 2)
    progress.begin(tuple(failed), 2)
    progress.end(tuple(failed), Outcome(failed="no weight is left"))
    progress.stage = "starting Ray"
    lines = {line.split("│")[2].strip(): line for line in shown(progress).splitlines() if line.count("│") > 5}
    assert "61.50 ± 0.71" in lines["none"]
    assert "2/2" in lines["none"]
    assert "1/2" in lines["FedGR"]
    assert "0/2, seed 0: round 2/50" in lines["FedGC"]
    assert "0/2, seed 0 failed" in lines["FedGCR"]
    assert "3 of 8 cells; " in shown(progress)
    assert "starting Ray" in shown(progress)
