"""A list of runs and studies says how far each of them is."""

import json
import shutil

import pytest

import rayfed
from rayfed import ps
from rayfed.record.locks import COMMAND, hold_lock
from tests.rayfed.experiment.test_experiment import own


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, cache, no_figures):
    monkeypatch.setenv("RAYFED_CACHE", str(cache))


def rows(*arguments, capsys):
    assert ps.main([*map(str, arguments), "--json"]) == 0
    return {row.pop("folder"): row for row in map(json.loads, capsys.readouterr().out.splitlines())}


def test_runs_and_studies_are_listed_with_their_states(tmp_path, capsys):
    done = own(rounds=2).run(tmp_path / "deep" / "done", quiet=True)
    shutil.copytree(tmp_path / "deep" / "done", tmp_path / "half")
    lines = (tmp_path / "half" / "rounds.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "half" / "rounds.jsonl").write_text(lines[0])
    (tmp_path / "half" / "model" / "params.safetensors").unlink()
    shutil.copytree(tmp_path / "half", tmp_path / "bad")
    (tmp_path / "bad" / "rounds.jsonl").write_text("[]\n")
    (tmp_path / "notes").mkdir()
    study = rayfed.grid({"a": own(rounds=1)}, {}, seeds=2).run(tmp_path / "study", quiet=True)
    with hold_lock(tmp_path / "half", COMMAND):
        found = rows(tmp_path, capsys=capsys)
    assert list(found) == ["bad", "deep/done", "half", "study"]
    score = f"accuracy {100 * done.accuracy:.4g}%"
    assert found["deep/done"] == {
        "what": "fedavg on own_data",
        "state": "finished",
        "done": "2/2 rounds",
        "score": score,
    }
    assert (found["half"]["state"], found["half"]["done"]) == ("running", "1/2 rounds")
    assert found["bad"]["state"].startswith("damaged: ")
    assert found["study"] == {"what": "study", "state": "finished", "done": "2/2 cells", "score": ""}
    assert rows(tmp_path / "half", capsys=capsys)["."]["state"] == "not running"
    cells = rows(tmp_path / "study", capsys=capsys)
    assert [row["what"] for row in cells.values()] == ["a, seed=0", "a, seed=1"]
    assert cells["cells/a-seed1"]["score"] == f"accuracy {100 * study.runs['a', 1].accuracy:.4g}%"


def test_cells_of_a_search_have_the_score_by_which_it_compares(tmp_path, capsys):
    space = {"train.lr": [0.1, 0.3]}
    rayfed.sweep(own(rounds=1), space, trials=2, objective="loss", output=tmp_path / "search", quiet=True)
    found = [*rows(tmp_path / "search", capsys=capsys).values()]
    runs = [rayfed.load(path) for path in (tmp_path / "search" / "cells").iterdir()]
    assert sorted(row["score"] for row in found) == sorted(f"loss {run.metrics['loss']:.4g}" for run in runs)


def test_cells_that_wait_or_were_stopped_are_told_apart(tmp_path, capsys):
    study = rayfed.grid({"a": own(rounds=3)}, {}, seeds=2)
    study.run(tmp_path / "study", stop=lambda at, rows: at["seed"] == 0, quiet=True)
    shutil.rmtree(tmp_path / "study" / "cells" / "a-seed1")
    first, second = rows(tmp_path / "study", capsys=capsys).values()
    assert (first["state"], first["done"]) == ("stopped", "1/3 rounds")
    assert (second["state"], second["done"], second["score"]) == ("waiting", "0/3 rounds", "")


def test_a_folder_without_runs_is_refused_and_a_table_has_a_line_for_each(tmp_path, capsys):
    assert ps.main([str(tmp_path)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line == f"error: {tmp_path}: holds no runs and no studies; give a folder with some, such as runs"
    own(rounds=1).run(tmp_path / "one", quiet=True)
    assert ps.main([str(tmp_path)]) == 0
    title, _, head, _, line, _ = capsys.readouterr().out.splitlines()
    assert (title, head.split()) == (str(tmp_path), list(ps.COLUMNS))
    assert line.split()[0] == "one"
