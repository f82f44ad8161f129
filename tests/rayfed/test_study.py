"""The command `rayfed study`: a file of methods, values and seeds becomes a study that goes on."""

import pytest
import yaml

from rayfed.__main__ import main
from rayfed.study import study_of

CELLS = {
    "experiment": [
        "data=digits_five_mini",
        "data.limit=48",
        "data.val=4",
        "data.domains=[plain,street]",
        "model=vit_mini",
        "model.options={depth: 2}",
        "model.pretrained=false",
        "cluster=inline",
        "rounds=1",
    ],
    "methods": {"fedavg": [], "pulled": ["algorithm=fedprox", "local.mu=0.1"]},
    "grid": {"train.lr": [0.01, 0.1]},
}


def write(folder, **changes):
    file = folder / "rates.yaml"
    file.write_text(yaml.safe_dump({**CELLS, **changes}))
    return str(file)


def test_a_file_is_run_and_nothing_of_it_twice(tmp_path, cache, monkeypatch, capsys):
    monkeypatch.setenv("RAYFED_CACHE", str(cache))
    command = ["study", write(tmp_path), f"output={tmp_path / 'out'}"]
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert "4/4  pulled, train.lr=0.1, seed=0: finished" in shown
    assert "fedavg train.lr=0.01" in shown
    assert "verdict" in shown
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert "4 of 4 cells are finished" in shown
    assert main([*command, "against=pulled train.lr=0.1", "margin=0.03"]) == 0
    shown = capsys.readouterr().out
    assert "as good: within 3 points of 0" in shown
    assert shown.partition("accuracy: differences")[2].count(" pulled train.lr=0.1 ") == 3
    assert "1/4" not in shown
    assert main([*command[:1], write(tmp_path, grid={"train.lr": [0.01, 0.2]}), *command[2:]]) == 0
    changed = write(tmp_path, experiment=[*CELLS["experiment"], "train.epochs=2"])
    assert main(["study", changed, command[2]]) == 2
    assert "train.epochs: 2 would change the result of" in capsys.readouterr().err


def test_an_entry_that_is_named_like_a_method_is_that_method():
    methods = {"fedavg": [], "ditto": ["algorithm=fedprox"], "mine": ["local.mu=0.1"]}
    study = study_of({"experiment": ["algorithm=fedprox", "cluster=inline"], "methods": methods})
    assert {key[0]: cell.config().algorithm for key, cell in study.cells.items()} == {
        "fedavg": "fedavg",
        "ditto": "fedprox",
        "mine": "fedprox",
    }


@pytest.mark.parametrize(
    ("changes", "more", "message"),
    [
        ({"gird": {}}, [], "key: 'gird'"),
        ({"seeds": "three"}, [], "seeds: 'three' is neither a number nor a list of numbers"),
        ({"margin": -1}, [], "margin: -1 is no positive number"),
        ({"grid": [1]}, [], "grid: [1] is no mapping of names"),
        ({"methods": {"a": "rounds=5"}}, [], "methods.a: 'rounds=5' is no list of overrides"),
        ({"experiment": ["rouds=5"]}, [], "did you mean 'rounds'"),
        ({}, ["rounds=5"], "'rounds=5' is none of output=DIR, at_once=N, seeds=N, against=NAME and margin"),
        ({}, ["at_once=0"], "at_once: 0 is neither a number of 1 or more nor 'auto'"),
    ],
)
def test_what_is_wrong_in_a_file_is_one_line(changes, more, message, tmp_path, capsys):
    assert main(["study", write(tmp_path, **changes), f"output={tmp_path / 'out'}", *more]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1
