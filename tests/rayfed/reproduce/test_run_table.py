"""Running a table: it goes on without repeating a finished cell, and touches nothing of others."""

import json

import pytest

import rayfed
from rayfed.engine import setup
from rayfed.errors import ConfigError, PartsFailedError
from rayfed.reproduce.run_table import RESULT, TableProgress, reproduce
from rayfed.reproduce.table_study import table_study
from rayfed.run import main as run
from tests.rayfed.reproduce.tables import SMALL_TABLE

FILES = ("claims.csv", "table.csv", "table.html", "table.md", "table.tex", RESULT)
TWO = ("none", "FedGR")


@pytest.fixture
def table(tmp_path, cache):
    def make(rows=TWO, seeds=1, *overrides):
        place = [f"data.cache={cache}", f"output={tmp_path / 'table'}"]
        return table_study("fedgcr/table5", "mini", seeds, rows, [*SMALL_TABLE, *place, *overrides])

    return make


def run_and_tell(asked, told):
    return reproduce(asked, TableProgress(asked, told.append))


def tables(path):
    return {name: (path / name).read_bytes() for name in FILES}


def rounds(path):
    return {file: file.stat().st_mtime_ns for file in path.rglob("rounds.jsonl")}


def test_a_table_that_is_continued_repeats_nothing_and_ends_the_same(table, monkeypatch):
    whole = table()
    told = []
    loaded = []
    load = setup.load
    monkeypatch.setattr(setup, "load", lambda *given: loaded.append(given) or load(*given))
    found = run_and_tell(whole, told)
    assert len(loaded) == 1  # the two cells share their data
    assert [line.split("  ")[:2] for line in told] == [
        ["1/2", "none, dif10, seed 0"],
        ["2/2", "FedGR, dif10, seed 0"],
    ]
    assert found.value("dif10", "none", "Avg").mean is not None
    first = tables(whole.path)
    ran = rounds(whole.path)
    assert json.loads(first[RESULT]) == json.loads(json.dumps(found.as_dict()))
    assert rayfed.load(whole.path).results["method"].tolist() == ["none", "FedGR"]

    # As after a kill: one cell is not noted, and its last checkpoint is that of the first round.
    cell = whole.path / found.cells[1]["path"]
    manifest = json.loads((whole.path / "study.json").read_text())
    manifest["cells"][1]["sha256"] = ""
    (whole.path / "study.json").write_text(json.dumps(manifest))
    (cell / "model" / "params.safetensors").unlink()
    for file in (cell / "checkpoints" / "round-000002").glob("*"):
        file.unlink()
    told.clear()
    again = run_and_tell(table(), told)
    assert len(told) == 1
    assert tables(whole.path) == first
    assert again == found
    changed = {file.parent for file, when in rounds(whole.path).items() if ran[file] != when}
    assert changed == {cell}

    more = run_and_tell(table(("none",), 2), told)  # a second seed is added
    assert len(told) == 2
    assert more.value("dif10", "none", "Avg").seeds == 2
    assert more.cells[0] == found.cells[0]


def test_a_cell_that_fails_is_named_and_the_others_are_finished(table, monkeypatch):
    from algorithms.fedgr import METHOD

    def fail(*_):
        raise ZeroDivisionError("no weight is left")

    monkeypatch.setattr(METHOD.server, "aggregate", fail)
    whole = table(("FedGR", "none"))
    with pytest.raises(
        PartsFailedError, match=r"1 of 2 cells failed: FedGR, dif10, seed=0: .*no weight is left"
    ):
        reproduce(whole)
    result = json.loads((whole.path / RESULT).read_text())
    assert {cell["row"]: cell["sha256"] is not None for cell in result["cells"]} == {
        "none": True,
        "FedGR": False,
    }
    monkeypatch.undo()
    assert reproduce(table(("FedGR", "none"))).value("dif10", "FedGR", "Avg").seeds == 1


def test_a_folder_of_another_table_or_of_a_run_or_with_files_is_refused_and_stays(table, tmp_path):
    whole = table(("none",))
    reproduce(whole)
    before = tables(whole.path)
    with pytest.raises(
        ConfigError, match=r"train\.lr: 0\.5 would change the result of .*; choose another folder"
    ):
        reproduce(table(("none",), 1, "train.lr=0.5"))
    other = table_study("fedgcr/table1", "mini", 1, ["FedAvg@dif10"], [f"output={whole.path}"])
    with pytest.raises(ConfigError, match="holds fedgcr/table5 at mini scale"):
        reproduce(other)
    assert run([*SMALL_TABLE[:2], f"output={whole.path}", "cluster=inline"]) == 2
    assert tables(whole.path) == before

    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "table.md").write_text("my own")
    with pytest.raises(ConfigError, match=r"is not empty and holds no study \(table\.md\)"):
        reproduce(table_study("fedgcr/table5", "mini", 1, ["none"], [*SMALL_TABLE, f"output={mine}"]))
    assert [file.read_text() for file in mine.iterdir()] == ["my own"]


def test_a_cell_that_cannot_run_is_refused_before_anything_is_written(table):
    whole = table(TWO, 1, "data.val=0.99")
    with pytest.raises(ConfigError):
        reproduce(whole)
    assert not whole.path.exists()


@pytest.mark.slow
@pytest.mark.steady
def test_held_out_domains_side_by_side_are_one_cell_of_the_table(table, tmp_path):
    """Each domain is a run of its own; the table is that of one run after the other."""
    folds = ["protocol=leave_one_out", "data.domains=[plain,fonts]", "data.val=0.2", "data.test=0.2"]

    def found(name, *overrides):
        asked = table(("none",), 1, *folds, "rounds=1", *overrides, f"output={tmp_path / name}")
        return reproduce(asked), tables(asked.path)

    alone, files = found("one")
    beside, others = found("two", "at_once=2")
    assert alone.cells[0]["parts"].keys() == {"plain", "fonts"}
    assert (beside.cells, others) == (alone.cells, files)
