"""Methods that are tuned with as many trials each, and compared on other seeds."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

import rayfed
from rayfed.__main__ import main
from rayfed.engine.session import launch
from rayfed.errors import ConfigError
from rayfed.experiment.study.halving import TrialPoint
from rayfed.experiment.tuned import _further, _plan_of, rates
from tests.conftest import ROOT
from tests.rayfed.experiment.test_experiment import Pull, clients, own


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, cache, no_figures):
    monkeypatch.setenv("RAYFED_CACHE", str(cache))


def with_validation():
    """Clients with more validation examples than others have, so that trials have different scores."""
    return {
        name: {"train": (x[:20], y[:20]), "val": (x[20:40], y[20:40]), "test": (x[40:], y[40:])}
        for name, (x, y) in clients(2, 50).items()
    }


def two(rounds=4, lr=0.05, **changes):
    values = {"rounds": rounds, "data": with_validation(), "train": {"lr": lr, "batch_size": 10}, **changes}
    return {"fedavg": own(method="fedavg", **values), "pulled": own(method="fedprox", **values)}


def rows_of(folder):
    """The rounds of each trial: by method, rate and value of the hyperparameter."""
    found = {}
    for cell in json.loads((folder / "study.json").read_text())["cells"]:
        at = cell["coordinates"]
        text = (folder / cell["folder"] / "rounds.jsonl").read_text()
        found[at["method"], at["train.lr"], at["knob"]] = [json.loads(row) for row in text.splitlines()]
    return found


def test_each_method_has_as_many_trials_and_the_best_is_compared_on_other_seeds(tmp_path):
    study = rayfed.tuned(two(), 4, 2, tmp_path / "s", tuning_seeds=1, quiet=True)
    trials = rows_of(tmp_path / "s-trials")
    for method, values in study.tuned.methods.items():
        mine = {at: rows for at, rows in trials.items() if at[0] == method}
        assert len(mine) == values.trials == 4
        # Of four and then two with the best one, some trials end after one and two of four rounds.
        assert sorted({len(rows) for rows in mine.values()}) == [1, 2, 4]
        whole = {at: rows[-1]["val_accuracy"] for at, rows in mine.items() if len(rows) == 4}
        assert values.score == max(whole.values())
        best = {rate for (_, rate, _), score in whole.items() if score == values.score}
        assert values.values["train.lr"] in best
        ended = [rows for rows in mine.values() if len(rows) == 1]
        assert max(rows[0]["val_accuracy"] for rows in ended) <= max(
            rows[0]["val_accuracy"] for rows in mine.values() if len(rows) > 1
        )
    assert study.seeds == [0, 1]
    assert study.tuned.seeds == [1000]
    chosen = study.tuned.methods["pulled"].values
    assert set(chosen) == {"train.lr", "local.mu"}
    alone = two()["pulled"].changed(**chosen, seed=1).run(quiet=True)
    assert study.runs["pulled", 1].sha256 == alone.sha256
    assert "tuned with 4 trials for each method, by val_accuracy on the seeds 1000," in study.notes[0]
    rate = study.tuned.methods["fedavg"].values["train.lr"]
    assert study.notes[1].startswith(f"chosen: fedavg: train.lr={rate}; pulled: train.lr=")
    opened = rayfed.load(tmp_path / "s")
    assert opened.tuned == study.tuned
    assert opened.notes[:2] == study.notes[:2]
    page = study.report().read_text()
    assert "Tuning" in page
    assert "it has no hyperparameter" in page


@pytest.mark.slow
@pytest.mark.steady
def test_what_was_interrupted_goes_on_to_the_same_frame(tmp_path, monkeypatch):
    """It is interrupted in the first trials, in later ones, and in the comparison."""

    def run(name):
        return rayfed.tuned(two()["pulled"], 3, 2, tmp_path / name, tuning_seeds=1, quiet=True)

    whole = run("whole")
    begun = []

    def interrupted(*args, **rest):
        begun.append(Path(args[1]).name)
        if len(begun) in (2, 6, 9):
            raise KeyboardInterrupt
        return launch(*args, **rest)

    monkeypatch.setattr("rayfed.engine.session.launch", interrupted)
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            run("s")
    again = run("s")
    assert again.results.to_csv() == whole.results.to_csv()
    assert again.tuned == whole.tuned
    assert rows_numbers(tmp_path / "s-trials") == rows_numbers(tmp_path / "whole-trials")
    before = len(begun)
    run("s")
    assert len(begun) == before


def rows_numbers(folder):
    return {at: len(rows) for at, rows in rows_of(folder).items()}


PROGRAM = """
import sys
import rayfed
from tests.rayfed.experiment.test_tuned import two
study = rayfed.tuned(two(rounds=8), 4, 2, sys.argv[1], tuning_seeds=2, quiet=True)
study.results.to_csv(sys.argv[2], index=False)
"""


@pytest.mark.slow
def test_a_killed_tuning_goes_on_to_the_same_frame(tmp_path, cache):
    command = [sys.executable, "-c", PROGRAM]
    environment = {**os.environ, "RAYFED_CACHE": str(cache), "PYTHONPATH": str(ROOT)}
    killed = [*command, str(tmp_path / "killed"), str(tmp_path / "killed.csv")]
    first = subprocess.Popen(killed, env=environment, cwd=ROOT)
    while len(list(tmp_path.glob("killed-trials/cells/*/rounds.jsonl"))) < 7:
        assert first.poll() is None
        time.sleep(0.1)
    first.send_signal(signal.SIGKILL)
    first.wait()
    subprocess.run(killed, env=environment, cwd=ROOT, check=True)
    whole = [*command, str(tmp_path / "whole"), str(tmp_path / "whole.csv")]
    subprocess.run(whole, env=environment, cwd=ROOT, check=True)
    assert (tmp_path / "killed.csv").read_text() == (tmp_path / "whole.csv").read_text()


def test_a_best_rate_at_the_end_is_followed_and_trials_are_as_many_for_all():
    """Without a hyperparameter the remaining trials have rates between."""
    plans = {name: _plan_of(name, each, {}) for name, each in two(lr=0.1).items()}
    first = [TrialPoint(rate) for rate in rates(0.1, 8)]
    assert [point.rate for point in first] == [0.1, 0.3, 0.0333, 0.9, 0.0111]

    def later(name, best):
        found = _further(best, first, plans[name], 8)
        return [next(found) for _ in range(3)]

    assert later("pulled", TrialPoint(0.1)) == [
        TrialPoint(0.1, 0.001),
        TrialPoint(0.1, 0.0316),
        TrialPoint(0.1, 1.0),
    ]
    assert later("pulled", TrialPoint(0.9)) == [TrialPoint(2.7), TrialPoint(0.9, 0.001), TrialPoint(0.9, 1.0)]
    assert later("fedavg", TrialPoint(0.0111)) == [
        TrialPoint(0.0037),
        TrialPoint(0.0192),
        TrialPoint(0.00641),
    ]
    assert later("fedavg", TrialPoint(0.1)) == [TrialPoint(0.173), TrialPoint(0.0577), TrialPoint(0.132)]


def test_a_value_at_the_end_of_its_range_is_named(tmp_path):
    """All rates are far too small, so that the largest one is best, and there is no better one inside."""
    study = rayfed.tuned(two(lr=1e-4)["fedavg"], 3, 1, tuning_seeds=1, quiet=True)
    found = study.tuned.methods["fedavg"]
    assert found.ends == (["train.lr"] if found.values["train.lr"] in found.ranges["train.lr"] else [])
    study.tuned.methods["fedavg"].ends[:] = ["train.lr"]
    assert study.notes[2].startswith("at the end of what was tried, so that more may be better: fedavg train")


def test_methods_that_do_not_train_and_other_hyperparameters():
    values = {"data": with_validation(), "train": {"lr": 0.1, "batch_size": 10}}
    still = _plan_of("a", own(method="zero_shot", **values), {})
    assert (still.trains, still.untuned) == (False, "it trains nothing")
    mine = own(method=Pull, **values)
    assert _plan_of("a", mine, {}).untuned == "the method names none"
    assert _plan_of("a", mine, {"a": ("local.mu", 0.1, 10.0)}).base.knob == "local.mu"
    swapped = own(method="fedprox", local={"name": "fedavg"}, **values)
    assert _plan_of("a", swapped, {}).untuned == "the local half has no mu"
    assert _plan_of("a", own(method="fedprox", **values), {"a": None}).knob is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seeds": [0, 1000], "tuning_seeds": [1000]}, "the seed 1000 is in seeds and in tuning_seeds"),
        ({"trials": 0}, "give at least one of each"),
        ({"seeds": 0}, "0 seeds and 2 tuning_seeds"),
        ({"knobs": {"fedporx": None}}, "tuned: knobs: 'fedporx'"),
        ({"knobs": {"pulled": ("local.nu", 0.1, 1.0)}}, "tuned: knobs: pulled: 'local.nu'"),
        ({"knobs": {"pulled": "local.mu"}}, "is not a key with its range"),
        ({"margin": -1}, "margin: -1 is no positive number"),
    ],
)
def test_what_is_wrong_is_found_before_the_first_trial(changes, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        rayfed.tuned(two(), output=tmp_path / "s", quiet=True, **changes)
    assert not list(tmp_path.iterdir())


def test_what_has_no_validation_examples_is_refused(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="mine"):
        rayfed.tuned(two(), output=tmp_path / "mine", quiet=True)
    bare = {name: {"train": d["train"], "test": d["test"]} for name, d in with_validation().items()}
    with pytest.raises(ConfigError, match=r"no validation score in round 1, .* set data.val"):
        rayfed.tuned(two(data=bare, rounds=1)["fedavg"], 1, 1, tuning_seeds=1, quiet=True)


def test_the_command_tunes_what_a_file_describes(tmp_path, capsys):
    tree = {
        "experiment": [
            *("data=digits_five_mini", "data.limit=48", "data.val=4", "data.domains=[plain]"),
            *("model=vit_mini", "model.options={depth: 1}", "model.pretrained=false"),
            *("cluster=inline", "rounds=1", "evaluation.without_parts=false"),
        ],
        "methods": {"pulled": ["algorithm=fedprox"]},
        "tuned": {"trials": 1, "seeds": [7], "knobs": {"pulled": ["local.mu", 0.1, 1.0]}},
    }
    file = tmp_path / "rates.yaml"
    command = ["study", str(file), f"output={tmp_path / 'out'}"]
    file.write_text(yaml.safe_dump(tree))
    assert main(command) == 0
    assert "tuned with 1 trial for each method, by val_accuracy on the seeds 7," in capsys.readouterr().out
    for changes, message in (
        ({"grid": {"train.lr": [0.1]}}, "tuned chooses values, and grid compares them"),
        ({"tuned": {"trails": 2}}, "study: tuned: key: 'trails'"),
        ({"tuned": {"trials": "two"}}, "tuned.trials: 'two' is no number of trials"),
        ({"methods": {}}, "tuned: there are no methods"),
    ):
        file.write_text(yaml.safe_dump({**tree, **changes}))
        assert main(command) == 2
        assert message in capsys.readouterr().err
