"""Studies: cells by coordinates, going on, side by side, own objects, protocols, and what is read."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import rayfed
from rayfed.engine.session import launch
from rayfed.errors import ConfigError, PartsFailedError
from tests.conftest import ROOT
from tests.rayfed.experiment.test_experiment import Pull, clients, own


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, cache, no_figures):
    monkeypatch.setenv("RAYFED_CACHE", str(cache))


def launched_in(monkeypatch):
    """The folders of the runs that begin from now on."""
    folders = []
    monkeypatch.setattr(
        "rayfed.engine.session.launch",
        lambda *args, **rest: folders.append(Path(args[1]).name) or launch(*args, **rest),
    )
    return folders


def pair(seeds=2, **changes):
    values = {"rounds": 1, "train": {"lr": 0.3}, **changes}
    return {
        (method, seed): own(method=method, seed=seed, **values)
        for seed in range(seeds)
        for method in ("fedavg", "fedprox")
    }


def test_a_study_has_one_frame_one_table_and_all_its_runs(tmp_path):
    study = rayfed.Study(pair())
    assert repr(study) == "<Study of 4 cells over 2 seeds, not run>"
    with pytest.raises(ConfigError, match=r"no cell is finished; call study\.run"):
        _ = study.scores
    assert study.run(tmp_path / "s", quiet=True) is study
    assert study.results[["method", "seed"]].values.tolist() == [list(key) for key in study.cells]
    assert {"round", "accuracy", "loss", "clients_scored"} <= set(study.results)
    assert not [name for name in study.results if name.startswith("seconds")]
    run = study.runs["fedprox", 1]
    assert run.sha256 == study.runs[{"seed": 1, "method": "fedprox"}].sha256
    assert run.sha256 == study.runs["fedprox"][1].sha256 == study.cells["fedprox", 1].run(quiet=True).sha256
    assert run.path == tmp_path / "s" / "cells" / "fedprox-seed1"
    with pytest.raises(KeyError, match="is no cell of the study"):
        _ = study.runs["fedprox", 7]
    for form, mark in {"text": "---", "markdown": "| ---", "latex": r"\toprule", "html": "<table"}.items():
        assert mark in study.table(form)
    assert study.table("csv").startswith('row,"accuracy, %"')
    with pytest.raises(ConfigError, match="format: 'word'"):
        study.table("word")
    assert "<table" in study._repr_html_()
    assert list(study.tests().index) == ["fedprox"]
    assert study.tests(against="fedprox").loc["fedavg", "against"] == "fedprox"
    assert "same bytes as fedavg in every run" in study.tests()()
    with pytest.raises(ConfigError, match=r"against: 'fedporx'.* did you mean 'fedprox'"):
        study.tests(against="fedporx")
    with pytest.raises(ConfigError, match=r"score: 'acuracy'.* did you mean 'accuracy'"):
        study.tests(score="acuracy")
    opened = rayfed.load(tmp_path / "s")
    assert isinstance(opened, rayfed.Study)
    pd.testing.assert_frame_equal(opened.results, study.results)
    assert str(opened.tests()) == str(study.tests())


def test_finished_cells_are_not_repeated_and_other_descriptions_are_named(tmp_path, monkeypatch):
    rayfed.Study(pair(1)).run(tmp_path / "s", quiet=True)
    folders = launched_in(monkeypatch)
    study = rayfed.Study(pair(2)).run(tmp_path / "s", quiet=True)
    assert folders == ["fedavg-seed1", "fedprox-seed1"]
    assert len(study.results) == 4
    more = rayfed.Study(pair(1, rounds=2)).run(tmp_path / "s", quiet=True)
    assert folders[2:] == ["fedavg-seed0", "fedprox-seed0"]
    assert more.results["round"].tolist() == [2, 2]
    wanted = r"train\.lr: 0\.5 would change the result of .*the cell fedavg, seed=0\), which began with 0\.3"
    with pytest.raises(ConfigError, match=wanted):
        rayfed.Study(pair(1, rounds=2, train={"lr": 0.5})).run(tmp_path / "s", quiet=True)
    with pytest.raises(ConfigError, match="rounds: 1 would change"):
        rayfed.Study(pair(1)).run(tmp_path / "s", quiet=True)
    renamed = {("a", "b", 0): own()}
    with pytest.raises(ConfigError, match="has cells with the coordinates method, seed"):
        rayfed.Study(renamed).run(tmp_path / "s", quiet=True)
    assert len(folders) == 4
    assert len(rayfed.load(tmp_path / "s").results) == 4


def test_a_class_whose_source_changed_is_named(tmp_path):
    def method(number):
        space = {"Local": rayfed.Local}
        exec(f"class Mine(Local):\n    mu: float = {number}", space)
        return space["Mine"]

    def run(number):
        cells = {("mine", 0): own(method=method(number), rounds=1, seed=0)}
        return rayfed.Study(cells).run(tmp_path / "s", quiet=True)

    run(0.1)
    with pytest.raises(ConfigError, match=r"(Mine|mu).*the cell mine, seed=0"):
        run(0.2)


def test_a_network_that_is_made_anew_is_named_with_what_to_hand_over(tmp_path):
    def run(seed):
        torch.manual_seed(seed)
        cells = {("fedavg", 0): own(model=nn.Linear(6, 3), rounds=1, seed=0)}
        return rayfed.Study(cells).run(tmp_path / "s", quiet=True)

    run(1)
    with pytest.raises(ConfigError, match=r"^model\.name: .*other start values.*model=Net, or call torch\."):
        run(2)


def test_a_run_is_shown_where_its_objects_are_not_known(tmp_path, monkeypatch):
    class Mine(rayfed.Local):
        pass

    run = own(method=Mine, rounds=1).run(tmp_path / "run", quiet=True)
    monkeypatch.setattr("rayfed.user_objects._KNOWN", {})
    again = rayfed.Run(run.path, run.sha256)
    assert repr(again) == repr(run)
    assert "Mine on own_data" in repr(again)
    assert "Mine on own_data" in again._repr_html_()


def test_a_folder_of_something_else_is_refused_and_stays(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"is not empty and holds no study \(mine\.txt\)"):
        rayfed.Study(pair(1)).run(tmp_path, quiet=True)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


@dataclass(frozen=True)
class Failing(rayfed.Local):
    """Fails where there is a file, as a program does that is mended later."""

    file: str = ""

    def loss(self, client, sent, batch):
        if Path(self.file).exists():
            raise ArithmeticError("as it happens")
        return super().loss(client, sent, batch)


@pytest.mark.parametrize("at_once", [1, pytest.param(2, marks=[pytest.mark.slow, pytest.mark.steady])])
def test_a_failed_cell_stops_only_those_that_wait_for_it(at_once, tmp_path, monkeypatch):
    broken = tmp_path / "broken"
    broken.touch()
    cells = pair(1) | {
        ("failing", 0): own(method=Failing(file=str(broken)), rounds=1, seed=0),
        ("waits", 0): own(rounds=1, seed=0),
    }
    study = rayfed.Study(cells, after={("waits", 0): ("failing", 0), ("fedavg", 0): [("fedprox", 0)]})
    with pytest.raises(PartsFailedError) as caught:
        study.run(tmp_path / "s", at_once=at_once, quiet=True)
    assert str(caught.value).startswith("2 of 4 cells failed: failing, seed=0: ")
    assert "ArithmeticError: as it happens" in str(caught.value)
    assert "waits, seed=0: it waits for failing, seed=0, which failed" in str(caught.value)
    assert study.results["method"].tolist() == ["fedavg", "fedprox"]
    assert "2 of 4 cells are not finished" in study.notes
    broken.unlink()
    folders = launched_in(monkeypatch)
    assert len(study.run(tmp_path / "s", quiet=True).results) == 4
    assert folders == ["failing-seed0", "waits-seed0"]


@pytest.mark.parametrize(
    ("after", "message"),
    [
        ({("fedavg", 0): ("x", 0)}, "x, seed=0 is no cell"),
        ({("fedavg", 0): ("fedprox", 0), ("fedprox", 0): ("fedavg", 0)}, "waits for itself"),
    ],
)
def test_cells_wait_for_cells_and_not_in_circles(after, message):
    with pytest.raises(ConfigError, match=f"after: .*{message}"):
        rayfed.Study(pair(1), after=after)


def test_the_seed_of_a_cell_is_that_of_its_experiment():
    with pytest.raises(ConfigError, match=r"cell fedavg, seed=3 has seed=0; give it the seed"):
        rayfed.Study({("fedavg", 3): own(rounds=1)}).run(quiet=True)


def test_a_rule_ends_cells_early_and_a_call_without_it_goes_on(tmp_path, monkeypatch):
    asked = []

    def stop(at, rows):
        asked.append((at["method"], len(rows), rows[-1].accuracy))
        return at["method"] == "fedprox"

    cells = pair(1, rounds=3)
    study = rayfed.Study(cells).run(tmp_path / "s", stop=stop, quiet=True)
    assert [each[:2] for each in asked] == [("fedavg", 1), ("fedavg", 2), ("fedprox", 1)]
    assert study.results["round"].tolist() == [3, 1]
    assert "a rule stopped 1 of 2 cells early" in study.notes
    folders = launched_in(monkeypatch)
    rayfed.Study(cells).run(tmp_path / "s", stop=stop, quiet=True)
    assert folders == []
    whole = rayfed.Study(cells).run(tmp_path / "s", quiet=True)
    assert folders == ["fedprox-seed0"]
    assert whole.runs["fedprox", 0].sha256 == cells["fedprox", 0].run(quiet=True).sha256


def test_a_grid_has_a_cell_for_each_method_value_and_seed_and_builds_common_parts_once(monkeypatch):
    from rayfed.engine import setup

    built, build = [], setup._build
    monkeypatch.setattr(setup, "_build", lambda *args: built.append(1) or build(*args))
    study = rayfed.grid({"a": own(rounds=1), "b": own(rounds=1, method=Pull)}, {"train.lr": [0.1, 0.3]}, 2)
    assert study.names == ("method", "train.lr", "seed")
    assert len(study) == 8
    study.run(quiet=True)
    assert len(built) == 2  # one for each seed
    assert list(study.table.index) == ["a train.lr=0.1", "a train.lr=0.3", "b train.lr=0.1", "b train.lr=0.3"]
    tests = study.tests(against="a")
    assert tests["against"].to_dict() == {
        "b train.lr=0.1": "a train.lr=0.1",
        "b train.lr=0.3": "a train.lr=0.3",
    }
    at_rate = study.tests(against={"train.lr": 0.1})["against"].to_dict()
    assert at_rate == {"a train.lr=0.3": "a train.lr=0.1", "b train.lr=0.3": "b train.lr=0.1"}
    assert len(study.tests(against="a train.lr=0.1")) == 3
    assert len(rayfed.grid({"a": own(rounds=1), "b": own(rounds=2)}, seeds=2)) == 4
    alone = rayfed.grid(own(rounds=1), {"tuning": {"all": "full", "last": "head"}})
    assert alone.names == ("tuning", "seed")
    assert list(alone.labels.values()) == ["tuning=all", "tuning=last"]
    for space, message in (
        ({"train.lr": []}, "is no list of values"),
        ({"seed": [1]}, "seed cannot be a key"),
    ):
        with pytest.raises(ConfigError, match=f"grid: .*{message}"):
            rayfed.grid(own(), space)
    with pytest.raises(ConfigError, match="objects without a name; give a dict of them"):
        rayfed.grid(own(), {"method": [Pull]})


def test_equals_have_no_verdict_and_a_planted_difference_is_found():
    """The third row does not learn; the second one is the first one again."""
    good = own(data=clients(3, 80), rounds=3, train={"lr": 0.5})
    study = rayfed.grid({"a": good, "again": good, "frozen": good.changed(train={"lr": 1e-9})}, {}, 5)
    found = study.run(quiet=True).tests()
    assert found["verdict"].to_dict() == {"again": "same", "frozen": "worse"}
    assert found.attrs["intervals"] == "paired t-test"  # the same bytes are not tested
    assert found.loc["frozen", "high"] < 0 == found.loc["again", "difference"]
    assert "again: the same bytes as a in every run, not tested" in found.attrs["notes"]
    assert any("5 seeds resolve differences of" in note for note in found.attrs["notes"])
    assert study.table["verdict"].to_dict() == {"a": "", "again": "same", "frozen": "worse"}
    assert study.tests(margin=0.99).loc["frozen", "verdict"] == "worse"  # it is shown to be
    assert "frozen" in study.table("latex")


class Net(nn.Module):
    """A network for images of 8 x 8 pixels that no library has."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.last = nn.Linear(8, 3)

    def forward(self, x):
        return self.last(torch.relu(self.first(x)).mean((2, 3)))


def images(domains=("art", "photo"), each=30):
    """A table of images whose brightest colour is their class, which domains show more or less brightly."""
    rng = np.random.default_rng(0)
    rows = []
    for number, domain in enumerate(domains):
        for i in range(each):
            y = int(rng.integers(3))
            x = rng.normal(90 + 8 * number, 40, (8, 8, 3))
            x[..., y] += 60
            pixels = np.clip(x, 0, 255).astype(np.uint8)
            rows.append({"image": pixels, "label": "abc"[y], "domain": domain, "client": f"{domain}{i % 2}"})
    return pd.DataFrame(rows)


def on_images(method, protocol="leave_one_out", **changes):
    values = {"model": Net(), "data": images(), "rounds": 2, "cluster": "inline", "train": {"batch_size": 8}}
    columns = {"input": "image", "target": "label", "domain": "domain", "client": "client"}
    return rayfed.Experiment(method=method, protocol=protocol, columns=columns, **{**values, **changes})


def test_a_protocol_gives_a_study_whose_cells_are_all_there(tmp_path):
    study = on_images("fedavg", rounds=1).run(tmp_path / "s", quiet=True)
    assert isinstance(study, rayfed.Study)
    assert study.names == ("method", "part", "seed")
    assert study.results["part"].tolist() == ["art", "photo"]
    assert study.score == "held_out_accuracy"
    run = study.runs["fedavg", "art", 0]
    assert run.config.data.held_out == ["art"] or run.config.data.held_out == "art"
    assert study.scores.loc[0, "fedavg"] == study.results["held_out_accuracy"].mean()
    with pytest.raises(ConfigError, match="overwrite: a study is never replaced"):
        on_images("fedavg").run(tmp_path / "s", quiet=True, overwrite=True)


def test_methods_under_a_protocol_are_compared_on_seeds(tmp_path, monkeypatch):
    monkeypatch.setattr("rayfed.report.page.charts.svg_of", lambda *_: "<svg></svg>")
    study = rayfed.compare(
        {
            "a": on_images("fedavg", "unseen_clients", rounds=1, **{"data.unseen_clients": [1]}),
            "b": on_images(Pull, "unseen_clients", rounds=1, **{"data.unseen_clients": [1]}),
        },
        seeds=2,
        output=tmp_path / "s",
        quiet=True,
    )
    assert study.names == ("method", "part", "seed")
    assert study.score == "unseen_accuracy"
    assert study.results["part"].tolist() == ["unseen-1"] * 4
    assert list(study.table.index) == ["a", "b"]
    assert study.report().name == "report.html"
    assert len(study.plot().axes) == 1


def the_question(folder, at_once, rates=(0.01, 0.1)):
    """Two methods, two rates, two seeds, each of two domains held out, with own objects."""
    methods = {"fedavg": on_images("fedavg"), "pull": on_images(Pull, local={"mu": 0.5})}
    return rayfed.grid(methods, {"train.lr": list(rates)}, seeds=2).run(folder, at_once=at_once, quiet=True)


@pytest.mark.slow
@pytest.mark.steady
def test_the_question_side_by_side_has_the_bits_of_one_after_the_other(tmp_path):
    alone, beside = the_question(tmp_path / "one", 1), the_question(tmp_path / "two", 2)
    assert len(alone.results) == 16
    pd.testing.assert_frame_equal(alone.results, beside.results)
    assert [run.sha256 for run in alone.finished.values()] == [run.sha256 for run in beside.finished.values()]
    assert len(beside.tests(against="fedavg")) == 2


PROGRAM = """
import sys
from tests.rayfed.experiment.study.test_cells import the_question
the_question(sys.argv[1], 2).results.to_csv(sys.argv[2], index=False)
"""


@pytest.mark.slow
@pytest.mark.steady
def test_a_killed_study_goes_on_to_the_same_frame(tmp_path, cache):
    """Two cells at once; the processes beside it end with it, so that nothing writes when it goes on."""
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "killed"), str(tmp_path / "frame.csv")]
    environment = {**os.environ, "RAYFED_CACHE": str(cache), "PYTHONPATH": str(ROOT)}
    first = subprocess.Popen(command, env=environment, cwd=ROOT)
    while len(list(tmp_path.glob("killed/cells/*/model/params.safetensors"))) < 5:
        assert first.poll() is None
        time.sleep(0.1)
    first.send_signal(signal.SIGKILL)
    first.wait()
    done = {
        path: path.stat().st_mtime_ns for path in tmp_path.glob("killed/cells/*/model/params.safetensors")
    }
    assert 5 <= len(done) < 16
    subprocess.run(command, env=environment, cwd=ROOT, check=True)
    manifest = json.loads((tmp_path / "killed" / "study.json").read_text())
    noted = [
        tmp_path / "killed" / cell["folder"] / "model" / "params.safetensors" for cell in manifest["cells"]
    ]
    assert sum(path.stat().st_mtime_ns == done.get(path) for path in noted) >= 4  # finished: not repeated
    whole = the_question(tmp_path / "whole", 1)
    whole.results.to_csv(tmp_path / "whole.csv", index=False)
    assert (tmp_path / "frame.csv").read_text() == (tmp_path / "whole.csv").read_text()
    assert [cell["sha256"] for cell in manifest["cells"]] == [run.sha256 for run in whole.finished.values()]


def test_what_cannot_run_side_by_side_says_why(tmp_path):
    cells = {("a", 0): own(seed=0, cluster="local"), ("a", 1): own(seed=1, cluster="inline")}
    wanted = "at_once: 2 is impossible: cluster.executor is ray in one cell and inline in another one"
    with pytest.raises(ConfigError, match=wanted):
        rayfed.Study(cells).run(tmp_path / "s", at_once=2, quiet=True)
    assert not (tmp_path / "s").exists()
    with pytest.raises(ConfigError, match="at_once: 0 is neither a number of 1 or more nor 'auto'"):
        rayfed.Study(pair(1)).run(at_once=0, quiet=True)
    lock = threading.Lock()
    with pytest.raises(ConfigError, match="stop cannot be sent to another process"):
        rayfed.Study(pair(1)).run(at_once=2, stop=lambda at, rows: lock.locked(), quiet=True)


def test_a_seed_without_one_of_its_parts_has_no_score(tmp_path):
    """Its mean would be over other parts than those of the other rows."""
    from rayfed.experiment.study.scores import by_seed

    columns = ["method", "part", "seed", "score"]
    rows = [("a", "x", 0, 1.0), ("a", "y", 0, 3.0), ("b", "x", 0, 5.0), ("a", "none", 0, np.nan)]
    results = pd.DataFrame(rows, columns=columns)
    labels = {("a",): "a", ("b",): "b"}
    found = by_seed(results, "score", ("method", "part", "seed"), labels, ["x", "y", "none"])
    assert found["a"].tolist() == [2.0]
    assert found["b"].isna().all()
    waiting = by_seed(results, "score", ("method", "part", "seed"), labels, ["x", "y", "none", "waits"])
    assert waiting.isna().all(axis=None)


def test_the_page_has_the_margin_of_the_study(tmp_path, caplog):
    pair = {"a": own(rounds=1), "b": own(rounds=1, train={"lr": 0.3})}
    study = rayfed.grid(pair, seeds=2, margin=0.25).run(tmp_path / "study", quiet=True)
    assert study.margin_of("worst_domain_accuracy") == study.margin_of() == 0.25
    assert study.margin_of("loss") is None
    with pytest.raises(
        ConfigError, match=r"margin: 2 is 200 points of accuracy; .* write 0\.02 for 2 points"
    ):
        study.tests(margin=2)
    with pytest.raises(ConfigError, match="margin: True is no positive number"):
        rayfed.grid(pair, seeds=2, margin=True)
    again = rayfed.grid(pair, seeds=2, margin=0.3).run(tmp_path / "study", quiet=True)
    assert "margin: 0.3 instead of 0.25, with which cells were finished" in caplog.text
    assert again.margin_of() == 0.3
    study = rayfed.grid(pair, seeds=2, margin=0.25).run(tmp_path / "study", quiet=True)
    assert "within 25 points of 0" in study.report().with_suffix(".json").read_text()
    plain = rayfed.grid(pair, seeds=2).run(tmp_path / "plain", quiet=True)
    assert "within 1 point of 0" in plain.report().with_suffix(".json").read_text()
