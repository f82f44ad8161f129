"""Comparisons over seeds and searches."""

import re

import numpy as np
import pytest
import torch

import rayfed
from rayfed.engine.session import launch
from rayfed.errors import ConfigError
from rayfed.record.readers import read_json
from tests.rayfed.experiment.test_experiment import own


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, cache, no_figures):
    monkeypatch.setenv("RAYFED_CACHE", str(cache))


def test_a_comparison_has_a_row_for_each_experiment_and_a_run_for_each_seed(tmp_path, monkeypatch):
    monkeypatch.setattr("rayfed.report.page.charts.svg_of", lambda *_: "<svg></svg>")
    slow, fast = own(rounds=1), own(rounds=1, train={"lr": 0.3})
    both = {"slow": slow, "fast": fast}
    found = rayfed.compare(both, seeds=2, output=tmp_path / "both", quiet=True, margin=0.9)
    assert list(found.table.index) == ["slow", "fast"]
    assert found.table.loc["fast", "p_corrected"] == found.tests().loc["fast", "p"]  # one test
    assert (found.margin_of(), found.margin_of("loss")) == (0.9, None)
    assert rayfed.load(tmp_path / "both").margin_of() == 0.9
    assert found.margin_of("worst_client_accuracy") == 0.9  # of all columns of its metric
    assert found.scores.shape == (2, 2)
    assert found.scores.loc[1, "fast"] == fast.changed(seed=1).run(quiet=True).accuracy
    assert found.best in ("slow", "fast")
    assert {path.name for path in (tmp_path / "both" / "cells").iterdir()} == {
        f"{name}-seed{seed}" for name in ("slow", "fast") for seed in (0, 1)
    }
    assert "<table" in found._repr_html_()
    assert found.notes == []
    [axes] = found.plot().axes
    assert [line.get_label() for line in axes.lines] == ["slow", "fast"]
    assert len({(line.get_color(), line.get_marker()) for line in axes.lines}) == 2
    assert [line.get_ydata()[-1] for line in axes.lines] == pytest.approx([*100 * found.scores.mean()])
    assert found.report().name == "report.html"


@pytest.mark.parametrize("method", ["fedavg", "ditto", "local"])
def test_scores_without_prefix_are_those_of_the_deployed_model_everywhere(method):
    run = own(method=method, rounds=1, train={"lr": 0.3}, evaluation={"personal": True}).run(quiet=True)
    assert run.deployed == ("global" if method == "fedavg" else "personal")
    other = "personal" if method == "fedavg" else "global"
    for prefix in ("", f"{other}_"):
        column = run.clients[f"{prefix}accuracy"]
        assert column.mean() == pytest.approx(run.metrics[f"{prefix}accuracy"])
        assert column.min() == run.metrics[f"{prefix}worst_client_accuracy"]
        assert run.clients[f"{prefix}loss"].mean() == pytest.approx(run.metrics[f"{prefix}loss"])
    assert (run.clients["loss"] != run.clients[f"{other}_loss"]).all()


@pytest.mark.slow
@pytest.mark.steady
def test_a_comparison_says_whose_models_are_scored_where_methods_differ_in_it(tmp_path):
    named = {"mine": own(rounds=1, train={"lr": 0.3}), "theirs": own(method="ditto", rounds=1)}
    found = rayfed.compare(named, seeds=2, quiet=True)
    assert found.table["model"].to_dict() == {"mine": "global", "theirs": "personal"}
    assert found.scores["theirs"].tolist() == [run.clients["accuracy"].mean() for run in found.runs["theirs"]]
    page = found.report(tmp_path / "page.html")
    [pairs] = [
        part
        for section in read_json(page.with_suffix(".json"), dict)["sections"]
        for part in section["parts"]
        if part["title"] == "Paired comparisons"
    ]
    assert {(row[0], row[1]) for row in pairs["rows"]} == {("mine", "theirs")}
    assert "the clients' personal models of theirs, and the global model of the others" in pairs["caption"]
    [axes] = found.plot().axes
    assert [line.get_label() for line in axes.lines] == ["mine", "theirs"]
    assert axes.lines[1].get_ydata()[-1] == pytest.approx(100 * found.table.loc["theirs", "accuracy"])
    same = rayfed.compare([named["mine"], named["mine"].changed(rounds=2)], quiet=True)
    assert "model" not in same.table


def test_a_comparison_goes_on_where_it_was_left(tmp_path, monkeypatch):
    pair = {"slow": own(rounds=1), "fast": own(rounds=1, train={"lr": 0.3})}
    first = rayfed.compare(pair, output=tmp_path / "both", quiet=True)
    rounds = [path / "rounds.jsonl" for path in (tmp_path / "both" / "cells").iterdir()]
    before = [path.stat().st_mtime_ns for path in rounds]
    launched = []
    monkeypatch.setattr("rayfed.engine.session.launch", lambda *a, **k: launched.append(a) or launch(*a, **k))
    again = rayfed.compare(pair, seeds=2, output=tmp_path / "both", quiet=True)
    assert len(launched) == 2  # those of the second seed
    assert [path.stat().st_mtime_ns for path in rounds] == before
    assert again.scores.loc[0].equals(first.scores.loc[0])
    other = {**pair, "fast": own(rounds=1, train={"lr": 0.5})}
    with pytest.raises(ConfigError, match=r"train.lr: 0.5 would change the result of .*fast-seed0"):
        rayfed.compare(other, output=tmp_path / "both", quiet=True)


def test_a_comparison_notes_settings_of_methods_that_differ():
    pair = [own(method="fedprox", rounds=1), own(method="fedprox", rounds=1, local={"mu": 0.3})]
    [note] = rayfed.compare(pair, quiet=True).notes
    assert re.search(r"local\.mu is .* with fedprox, 0\.3 with fedprox local\.mu=0\.3", note)
    assert rayfed.compare([pair[0], pair[0].changed(rounds=2)], quiet=True).notes == []


def test_experiments_of_one_method_get_numbers_and_one_alone_is_refused():
    found = rayfed.compare([own(rounds=1), own(rounds=1, train={"lr": 0.3})], quiet=True)
    assert list(found.runs) == ["fedavg", "fedavg train.lr=0.3"]

    class Mine(rayfed.Local):
        pass

    mine = rayfed.compare([own(method=Mine, rounds=1)] * 2, quiet=True)
    assert list(mine.runs) == ["Mine", "Mine-2"]
    assert repr(mine.runs["Mine"][0]).startswith("<Run: Mine on own_data, ")
    with pytest.raises(ConfigError, match="there are 1 experiments and 1 seeds"):
        rayfed.compare([own()])


@pytest.mark.parametrize(
    ("several", "message"),
    [
        (
            {"method": "fedavg", "protocol": "base_to_new"},
            r"^protocol: 'base_to_new' makes several",
        ),
        ({"compare": ["fedavg", "fedprox"]}, r"^compare: \('fedavg', 'fedprox'\) makes several runs, and"),
    ],
)
def test_an_experiment_of_several_runs_is_refused_where_one_is_needed(
    several, message, monkeypatch, tmp_path
):
    from rayfed.engine import loop

    monkeypatch.setattr(loop, "run_rounds", lambda *_: pytest.fail("it trains"))
    rng = np.random.default_rng(0)
    data = {f"c{i}": (rng.normal(size=(40, 6)).astype("f4"), rng.integers(0, 3, 40)) for i in range(8)}
    one = rayfed.Experiment(
        model=lambda: torch.nn.Linear(6, 3),
        data=data,
        rounds=1,
        cluster="inline",
        **several,
    )
    needing_one = (
        lambda: list(one),
        lambda: rayfed.compare([one, one.changed(seed=1)]),
        lambda: rayfed.sweep(one, {"train.lr": [0.1, 0.2]}),
    )
    for start in needing_one if "compare" in several else needing_one[:1]:
        with pytest.raises(ConfigError, match=message):
            start()


def test_experiments_of_one_method_are_named_by_what_differs_and_latex_compiles():
    base = own(rounds=1)
    several = [
        base,
        base.changed(train={"lr": 0.3}),
        base.changed(tuning="head"),
        base.changed(method="fedsam"),
    ]
    found = rayfed.compare(several, seeds=2, quiet=True)
    first, rate, head, method = found.runs
    assert "train.lr=0.3" in rate
    assert "tuning=head" in head
    assert method == "fedsam"
    assert first != rate
    text = found.latex()
    assert not re.search(r"(?<!\\)[_%#]", text)
    assert text.count(r"\\") == 5
