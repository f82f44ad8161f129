"""Runs that a rule ends early, the model of the best round, and the model inside the loop over the rounds."""

import json

import numpy as np
import pytest
import torch
from torch import nn

import rayfed
from rayfed.errors import ConfigError
from rayfed.experiment.experiment import end_session
from rayfed.record.checkpoint import Checkpoints, from_file
from rayfed.report.final_table import final_table
from rayfed.report.page.render import write_report
from rayfed.resume import main as resume
from rayfed.run import main as run_command

VALIDATED = {"evaluation": {"validation": True}}
NOISY = {"lr": 0.9, "batch_size": 4, "optimizer": "sgd"}
"""A rate at which the loss goes up and down, so that the best round is not the last one."""


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, cache, no_figures):
    monkeypatch.setenv("RAYFED_CACHE", str(cache))


def clients(count=3, examples=30, seed=0):
    rng = np.random.default_rng(seed)
    rows = {f"c {i}": rng.normal(0, 1, (examples, 6)).astype(np.float32) for i in range(count)}
    return {name: (x, rng.integers(0, 3, len(x))) for name, x in rows.items()}  # labels by chance


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def own(**changes):
    values = {"model": net(), "data": clients(), "tuning": "full", "rounds": 8, "cluster": "inline"}
    return rayfed.Experiment(**{**values, "train": NOISY, **VALIDATED, **changes})


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, cache):
    """A run without a rule, whose checkpoints are all kept."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAYFED_CACHE", str(cache))
        return own(checkpoint={"keep": 20}).run(tmp_path_factory.mktemp("whole") / "run", quiet=True)


def best_of(run):
    losses = run.history["val_loss"]
    return int(losses.idxmin()) + 1


def tensors_after(run, number):
    path = run.path / "checkpoints" / f"round-{number:06d}" / "state.safetensors"
    return from_file(path)["params"]


def test_the_example_has_a_best_round_before_its_last(whole):
    assert 1 <= best_of(whole) <= 6


@pytest.mark.parametrize("every", [1, 0])
def test_the_final_model_is_that_of_the_best_round(whole, tmp_path, every):
    run = own(checkpoint={"best": "val_loss", "keep": 1, "every": every}).run(tmp_path / "run")
    number = best_of(whole)
    assert same(run.params, tensors_after(whole, number))
    assert run.metrics["round"] == number
    assert run.accuracy == whole.history["accuracy"][number - 1]
    assert run.sha256 != whole.sha256
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("round-*"))
    assert kept == [f"round-{n:06d}" for n in (number, 8)]
    table = final_table(run.recorded)
    assert f"round {number}" in table.title
    assert any(f"reported: round {number}, the first with the best val_loss" in note for note in table.notes)
    write_report([run.path], tmp_path / "page.html")
    assert f"after round {number}, the first with the best val_loss" in (tmp_path / "page.html").read_text()


def test_it_is_scored_without_its_parts_as_that_round(tmp_path):
    given = {"model": {"name": "vit_mini", "options": {"depth": 1}, "pretrained": False}, "tuning": "lora"}
    data = {"name": "digits_five_mini", "limit": 24}
    scored = {"evaluation": {"validation": True, "without_parts": True}}
    run = rayfed.Experiment(
        **given,
        data=data,
        method="fedavg",
        rounds=3,
        cluster="inline",
        train={"lr": 0.5},
        checkpoint={"best": "val_loss"},
        **scored,
    ).run(tmp_path / "run")
    number = int(run.history["val_loss"].idxmin()) + 1
    assert number < 3
    assert run.metrics["round"] == number
    assert set(run.recorded.without) == {"adapters", "head"}


def test_a_run_ends_when_it_does_not_get_better(whole, tmp_path):
    run = own(stop={"metric": "val_loss", "patience": 2}, checkpoint={"every": 0}).run(tmp_path / "run")
    losses = list(whole.history["val_loss"])
    ends = next(n for n in range(3, 9) if min(losses[n - 2 : n]) >= min(losses[: n - 2]))
    assert ends < 8
    assert list(run.history["val_loss"]) == losses[:ends]
    assert same(run.params, tensors_after(whole, ends))
    assert run.recorded.is_finished
    assert rayfed.load(run.path).sha256 == run.sha256
    assert Checkpoints(run.path).newest() == ends
    assert any(f"ended after round {ends} of 8" in note for note in final_table(run.recorded).notes)
    write_report([run.path], tmp_path / "page.html")
    assert f"ended after round {ends} of 8" in (tmp_path / "page.html").read_text()


def test_a_continued_run_is_that_of_a_later_rule(whole, tmp_path):
    rule = {"metric": "val_loss", "patience": 2}
    early = own(stop=rule, checkpoint={"best": "val_loss"}).run(tmp_path / "run")
    assert len(early.history) < 8
    again = own(stop=rule, checkpoint={"best": "val_loss"}).resume(tmp_path / "run")
    assert again.sha256 == early.sha256  # it is finished
    later = own(checkpoint={"best": "val_loss"}).resume(tmp_path / "run")
    assert len(later.history) == 8
    assert same(later.params, tensors_after(whole, best_of(whole)))
    with pytest.raises(ConfigError, match=r"stop: val_loss has its best value, .* has 8 rounds"):
        own(stop=rule, checkpoint={"best": "val_loss"}).resume(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"checkpoint\.best"):
        own(checkpoint={"best": "val_accuracy"}).resume(tmp_path / "run")


def test_the_last_round_of_a_clock_is_scored(tmp_path):
    clock = {"seconds_per_example": 1.0}
    every = {"evaluation": {"every": 3}}
    run = own(stop={"virtual_seconds": 30}, faults=clock, **every).run(tmp_path / "run")
    assert 1 < len(run.history) < 8
    assert len(run.history) % 3  # else it is scored in any case
    assert run.history["virtual_time"].iloc[-2] < 30 <= run.history["virtual_time"].iloc[-1]
    assert run.metrics["round"] == len(run.history)


def test_personal_models_are_those_of_the_best_round(tmp_path):
    ditto = {"method": "ditto", "checkpoint": {"best": "val_loss"}}
    run = own(**ditto).run(tmp_path / "run")
    number = run.metrics["round"]
    assert number < 8
    cut = own(method="ditto", rounds=number).run(tmp_path / "cut")
    for name in cut.clients.index:
        assert same(run.personal(name).state_dict(), cut.personal(name).state_dict())


NOISE = {"channel": [{"clip": 1.0}, {"noise": 1.0}], "server": {"weighting": "uniform"}}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"stop": {"patience": 2}, "evaluation": {}},
            r"stop\.patience: 2 needs validation .*validation=true",
        ),
        (
            {"stop": {"target": 0.5}, "evaluation": {}},
            r"stop\.target: 0\.5 needs validation .*validation=true",
        ),
        (
            {"stop": {"metric": "accuracy", "patience": 2}},
            r"stop\.metric: 'accuracy' is of test .*val_accuracy",
        ),
        ({"stop": {"metric": "val_f1", "target": 2}}, r"stop\.metric: 'val_f1' does not exist"),
        ({"stop": {"metric": "foo", "patience": 2}}, r"stop\.metric: 'foo' does not exist.*val_accuracy"),
        (
            {"stop": {"metric": "beta", "target": 2}},
            r"stop\.metric: 'beta' does not exist.* of test examples",
        ),
        ({"stop": {"target": 90}}, r"stop\.target: 90 is more than 1, .*write 0\.9 for 90 %"),
        ({"stop": {"virtual_seconds": 9}}, r"stop\.virtual_seconds: 9 needs .*faults\.seconds_per_example"),
        ({"stop": {"patience": 0}}, r"stop\.patience: 0"),
        ({"checkpoint": {"best": "accuracy"}}, r"checkpoint\.best: 'accuracy' is of test examples"),
        ({"checkpoint": {"best": "foo"}}, r"checkpoint\.best: 'foo' does not exist"),
        (
            {"checkpoint": {"best": "val_loss"}, "evaluation": {}},
            r"checkpoint\.best: val_loss needs validation",
        ),
        ({"stop": {"patience": 2}, **NOISE}, r"stop\.patience: 2 looks at .*epsilon"),
    ],
)
def test_rules_that_cannot_be_are_one_line(given, message):
    with pytest.raises(ConfigError, match=message):
        own(**given).run()


def test_a_rule_that_ends_nothing_is_a_sentence_of_the_header():
    from rayfed.experiment.plan import prepared

    assert any("stop ends nothing" in note for note in prepared(own(stop={"min_delta": 0.1}).config()).notes)
    assert not any("stop" in note for note in prepared(own(stop={"patience": 2}).config()).notes)


def test_a_target_may_be_of_test_examples(whole):
    reached = whole.history["accuracy"].max()
    run = own(stop={"metric": "accuracy", "target": float(reached)}).run()
    assert len(run.history) == int(whole.history["accuracy"].idxmax()) + 1


def test_the_command_stops_and_goes_on(tmp_path, capsys):
    path = tmp_path / "run"
    given = ["algorithm=fedavg", "data.limit=24", "rounds=5", "cluster=inline", "evaluation.validation=true"]
    stop = ["stop.metric=val_loss", "stop.target=100", "checkpoint.best=auto"]
    assert run_command([*given, *stop, f"output={path}", "report=true"]) == 0
    assert len((path / "rounds.jsonl").read_text().splitlines()) == 1
    assert "ended after round 1 of 5" in capsys.readouterr().out
    assert resume([str(path)]) == 0
    assert "stop ended it after round 1: val_loss is" in "".join(capsys.readouterr())
    assert resume([str(path), "stop.target=null", "--quiet"]) == 0
    rows = [json.loads(line) for line in (path / "rounds.jsonl").read_text().splitlines()]
    assert len(rows) == 5
    assert resume([str(path), "checkpoint.best=val_loss"]) == 2


def test_the_model_is_in_the_loop(whole):
    experiment, rows = own(), []
    x = torch.from_numpy(clients()["c 0"][0])
    for row in experiment:
        wanted = net().eval()
        wanted.load_state_dict(
            dict(zip(wanted.state_dict(), tensors_after(whole, row.round).values(), strict=True))
        )
        assert same(row.params, tensors_after(whole, row.round))
        assert torch.equal(row.model()(x), wanted(x))
        rows.append(row)
        if row.round == 4:
            break
    left = experiment.last
    assert same(left.params, tensors_after(whole, 4))
    assert (left.metrics["round"], left.path, len(left.history)) == (4, None, 4)
    assert left.accuracy == row.accuracy
    with pytest.raises(ConfigError, match=r"round 1: its model is not there .* before the next round begins"):
        rows[0].model()


def test_a_loop_with_a_folder_can_be_continued(whole, tmp_path):
    experiment = own(output=str(tmp_path / "run"))
    for row in experiment:
        if row.round == 2:
            break
    assert experiment.last.path == tmp_path / "run"
    assert own().resume(tmp_path / "run").sha256 == whole.sha256
    with pytest.raises(ConfigError, match="already holds"):
        next(iter(experiment))
    assert own(output=str(tmp_path / "other"), rounds=1).run().path == tmp_path / "other"


def test_adapters_of_a_loop_that_was_left(tmp_path):
    given = {"model": {"name": "vit_mini", "options": {"depth": 1}, "pretrained": False}, "tuning": "lora"}
    data = {"name": "digits_five_mini", "limit": 24}
    experiment = rayfed.Experiment(**given, data=data, method="fedavg", rounds=3, cluster="inline")
    for _ in experiment:
        break
    whole = experiment.changed(rounds=1).run()
    a, b = experiment.last.adapter(tmp_path / "a"), whole.adapter(tmp_path / "b")
    assert {f.name: f.read_bytes() for f in a.iterdir()} == {f.name: f.read_bytes() for f in b.iterdir()}


@pytest.mark.slow
@pytest.mark.steady
def test_on_ray_the_same(whole, tmp_path, request):
    request.addfinalizer(end_session)
    ray = {"cluster": {"actors": 2}, "checkpoint": {"best": "val_loss"}}
    stop = {"metric": "val_loss", "patience": 2}
    here = own(stop=stop, checkpoint={"best": "val_loss"}).run()
    assert own(stop=stop, **ray).run(tmp_path / "run").sha256 == here.sha256
    experiment = own(cluster={"actors": 2})
    for row in experiment:
        assert same(row.params, tensors_after(whole, row.round))
        if row.round == 3:
            break
    assert same(experiment.last.params, tensors_after(whole, 3))
