"""The table on a terminal, while cells run."""

import io
from dataclasses import replace

from rich.console import Console

from rayfed.reproduce.run_job import JobProgress, table_of
from tests.rayfed.reproduce.jobs import ablation, finished_as


def shown(progress):
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(table_of(progress))
    return console.export_text()


def test_it_fills_and_says_how_far_each_row_is(tmp_path):
    job = ablation(seeds=2)
    running, failed = (c for c in job.cells if c.row in ("FedGC", "FedGCR") and c.seed == 0)
    cells = tuple(replace(c, path=tmp_path / c.name) for c in job.cells)
    (tmp_path / running.name).mkdir()
    (tmp_path / running.name / "rounds.jsonl").write_text('{"round": 1}\n{"round": 2}\n')
    progress = JobProgress(replace(job, path=tmp_path, cells=cells))
    progress.finished |= finished_as(job, {"none": [61.0, 62.0], "FedGR": [63.0]})
    progress.running.add(running.name)
    progress.failed[failed.name] = "no weight is left"
    progress.stage = "starting Ray"
    lines = {line.split("│")[2].strip(): line for line in shown(progress).splitlines() if line.count("│") > 5}
    assert "61.50 ± 0.71" in lines["none"]
    assert "2/2" in lines["none"]
    assert "1/2" in lines["FedGR"]
    assert "0/2, seed 0: round 2/50" in lines["FedGC"]
    assert "0/2, seed 0 failed" in lines["FedGCR"]
    assert "3 of 8 cells; " in shown(progress)
    assert "starting Ray" in shown(progress)
