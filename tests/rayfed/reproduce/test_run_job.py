"""Running a job: it goes on without repeating a finished cell, and touches nothing of others."""

import json

import pytest
import torch
import yaml

from rayfed.engine import measure_client, setup
from rayfed.engine.measure_client import largest_client
from rayfed.engine.weight_store import WeightStore
from rayfed.errors import ConfigError, PartsFailedError
from rayfed.record.readers import read_rows
from rayfed.reproduce.__main__ import main
from rayfed.reproduce.job import make_job
from rayfed.reproduce.run_job import RESULT, reproduce
from rayfed.run import main as run
from rayfed.terminal.console import size
from tests.rayfed.reproduce.jobs import SMALL_TABLE

FILES = ("claims.csv", "table.csv", "table.html", "table.md", "table.tex", RESULT)
TWO = ("none", "FedGR")


@pytest.fixture
def job(tmp_path, cache):
    def make(rows=TWO, seeds=1, *overrides):
        place = [f"data.cache={cache}", f"output={tmp_path / 'job'}"]
        return make_job("fedgcr/table5", "mini", seeds, rows, [*SMALL_TABLE, *place, *overrides])

    return make


def tables(path):
    return {name: (path / name).read_bytes() for name in FILES}


def rounds(path):
    return {file: file.stat().st_mtime_ns for file in path.rglob("rounds.jsonl")}


def test_a_job_that_is_continued_repeats_nothing_and_ends_in_the_same_table(job, tmp_path, monkeypatch):
    whole = job()
    told = []
    loaded = []
    load = setup.load
    monkeypatch.setattr(setup, "load", lambda *given: loaded.append(given) or load(*given))
    found = reproduce(whole, told.append)
    assert len(loaded) == 1  # the two cells share their data
    assert [line.split("  ")[0] for line in told] == ["1/2", "2/2"]
    assert found.value("dif10", "none", "Avg").mean is not None
    first = tables(whole.path)
    ran = rounds(whole.path)
    assert json.loads(first[RESULT]) == json.loads(json.dumps(found.as_dict()))

    # As after a kill: one cell has no record, and its last checkpoint is that of the first round.
    cell = whole.cells[1]
    cell.record.unlink()
    (cell.path / "model" / "params.safetensors").unlink()
    for file in (cell.path / "checkpoints" / "round-000002").glob("*"):
        file.unlink()
    told.clear()
    again = reproduce(job(), told.append)
    assert len(told) == 1
    assert tables(whole.path) == first
    assert again == found
    changed = {file.parent.name for file, when in rounds(whole.path).items() if ran[file] != when}
    assert changed == {cell.name}

    more = reproduce(job(("none",), 2), told.append)  # a second seed is added
    assert len(told) == 2
    assert more.value("dif10", "none", "Avg").seeds == 2
    assert more.cells[0] == found.cells[0]


def test_a_cell_that_fails_is_named_and_the_others_are_finished(job, monkeypatch):
    from algorithms.fedgr import METHOD

    def fail(*_):
        raise ZeroDivisionError("no weight is left")

    monkeypatch.setattr(METHOD.server, "aggregate", fail)
    whole = job(("FedGR", "none"))
    with pytest.raises(
        PartsFailedError, match=r"1 of 2 cells failed: dif10-fedgr-seed0: .*no weight is left"
    ):
        reproduce(whole)
    result = json.loads((whole.path / RESULT).read_text())
    assert {cell["row"]: cell["sha256"] is not None for cell in result["cells"]} == {
        "none": True,
        "FedGR": False,
    }
    monkeypatch.undo()
    assert reproduce(job(("FedGR", "none"))).value("dif10", "FedGR", "Avg").seeds == 1


def test_cells_of_a_version_with_fewer_keys_are_kept(job):
    whole = job(("none",))
    reproduce(whole)
    (file,) = whole.path.glob("cells/*/config.yaml")
    tree = yaml.safe_load(file.read_text())
    del tree["compare_options"]
    file.write_text(yaml.safe_dump(tree))
    assert reproduce(job(("none",))).value("dif10", "none", "Avg").seeds == 1


def test_a_folder_of_another_job_or_of_a_run_or_with_files_is_refused_and_stays(job, tmp_path):
    whole = job(("none",))
    reproduce(whole)
    before = tables(whole.path)
    with pytest.raises(
        ConfigError, match=r"train\.lr: 0\.5 would change the result of .*; choose another output"
    ):
        reproduce(job(("none",), 1, "train.lr=0.5"))
    other = make_job("fedgcr/table1", "mini", 1, ["FedAvg@dif10"], [f"output={whole.path}"])
    with pytest.raises(ConfigError, match="holds the job of fedgcr/table5 at mini scale"):
        reproduce(other)
    assert run([*SMALL_TABLE[:2], f"output={whole.path}", "overwrite=true", "cluster=inline"]) == 2
    assert tables(whole.path) == before

    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "table.md").write_text("my own")
    with pytest.raises(ConfigError, match=r"is not empty and holds no job \(table\.md\)"):
        reproduce(make_job("fedgcr/table5", "mini", 1, ["none"], [*SMALL_TABLE, f"output={mine}"]))
    assert [file.read_text() for file in mine.iterdir()] == ["my own"]


def test_a_cell_that_cannot_run_is_refused_before_anything_is_written(job):
    whole = job(TWO, 1, "data.val=0.99")
    with pytest.raises(ConfigError):
        reproduce(whole)
    assert not whole.path.exists()


@pytest.mark.slow
@pytest.mark.steady
def test_cells_on_ray_run_side_by_side_and_give_the_same_tensors(job, tmp_path, monkeypatch, ray_cluster):
    put = WeightStore.put
    stored = []
    monkeypatch.setattr(
        WeightStore, "put", lambda self, weights: stored.append((self, weights)) or put(self, weights)
    )
    one = [text for text in job().overrides if not text.startswith(("cluster", "rounds"))] + ["rounds=1"]
    inline = reproduce(
        make_job("fedgcr/table5", "mini", 1, TWO, [*one, "cluster=inline", f"output={tmp_path / 'one'}"])
    )
    ray = ["cluster.actors=1", f"output={tmp_path / 'ray'}"]
    on_ray = make_job("fedgcr/table5", "mini", 1, TWO, [*one, *ray])
    found = reproduce(on_ray)
    assert [cell["sha256"] for cell in found.cells] == [cell["sha256"] for cell in inline.cells]
    assert found.values == inline.values
    stores, weights = zip(*stored, strict=True)
    assert stores[0] is stores[1]
    assert len(stores[0]) <= len(weights[0])  # both cells have the same initial tensors


def test_the_command_shows_its_plan_and_runs_nothing(tmp_path, cache, capsys, monkeypatch):
    """One client is measured, here without a new process, which takes seconds to start."""
    here = torch.device("cpu")
    monkeypatch.setattr(measure_client, "measure", lambda *given, **_: largest_client(*given[:2], here))
    place = [*SMALL_TABLE, f"data.cache={cache}", f"output={tmp_path / 'job'}"]
    assert (
        main(["fedgcr/table5", "--scale", "mini", "--seeds", "1", "--cells", "none", "--dry-run", *place])
        == 0
    )
    assert "to run: 1 cells; 1 at a time" in capsys.readouterr().out
    assert not (tmp_path / "job").exists()
    assert main(["fedgcr/table5", "row=none"]) == 2


@pytest.mark.slow
@pytest.mark.steady
def test_the_command_shows_the_table_and_its_plan(job, tmp_path, cache, capsys):
    place = [*SMALL_TABLE, f"data.cache={cache}", f"output={tmp_path / 'job'}"]
    words = ["fedgcr/table5", "--scale", "mini", "--seeds", "1", "--cells", "none"]
    assert main([*words, "--dry-run", *place]) == 0
    plan = capsys.readouterr().out
    assert "finished: 0 of 1 cells" in plan
    assert "CPU-hours" in plan
    assert "to run: 1 cells; 1 at a time" in plan
    assert not (tmp_path / "job").exists()
    assert main([*words, *place]) == 0
    shown = capsys.readouterr().out
    assert "1/1  none, dif10, seed 0  Avg " in shown
    assert f"python -m rayfed.report {tmp_path / 'job'}" in shown
    rows = read_rows(next((tmp_path / "job" / "cells").glob("*/")))
    sent = sum(row["bytes_up"] + row["bytes_down"] for row in rows)
    assert f"{size(sent)} sent to clients and back" in plan
    assert "orderings in the paper's numbers" not in shown  # one row has no order
    assert main([*words, "--json", *place, "report=true"]) == 0
    assert json.loads(capsys.readouterr().out)["experiment"] == "fedgcr/table5"
    assert "Ablation" in (tmp_path / "job" / "report.html").read_text()
    assert main(["fedgcr/table5", "row=none"]) == 2
