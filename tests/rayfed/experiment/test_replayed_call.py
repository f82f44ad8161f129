"""Calls of clients that are executed again: the same bits as in the run, for every method."""

import io
import json
import os
import random
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import rayfed
from rayfed.errors import ConfigError, RayFedError
from rayfed.executors.inline import InlineExecutor
from rayfed.experiment.experiment import end_session
from rayfed.experiment.replayed_call import replay
from rayfed.federation.method_registry import METHODS
from rayfed.record.recorded_run import RecordedRun
from rayfed.replay import main, table
from tests.conftest import quickly
from tests.matrix import TINY
from tests.rounding import near


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, cache, no_figures):
    monkeypatch.setenv("RAYFED_CACHE", str(cache))


@pytest.fixture
def calls(monkeypatch):
    """Every call of a run in this process with its answer, in order."""
    seen, whole = [], InlineExecutor.map

    def noted(self, calls):
        answers = whole(self, calls)
        if type(self) is InlineExecutor:
            seen.extend(zip(calls, answers, strict=True))
        return answers

    monkeypatch.setattr(InlineExecutor, "map", noted)
    return seen


def same(a, b):
    """Whether two nested values have the same bits."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def check(path, call, answer, **options):
    done = replay(path, call.sent.round + 1, call.client, exchange=call.tag, **options)
    for what in ("params", "extra", "metrics", "num_examples", "steps"):
        assert same(getattr(done.update, what), getattr(answer, what)), what
    assert same(dict(done.sent.params), dict(call.sent.params))
    return done


def clients(count=4, examples=20, seed=0):
    rng = np.random.default_rng(seed)
    rows = {f"c {i}": rng.normal(0, 1, (examples + i, 6)).astype(np.float32) for i in range(count)}
    return {name: (x, x[:, :3].argmax(1)) for name, x in rows.items()}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def own(**changes):
    values = {"model": net(), "data": clients(), "tuning": "full", "rounds": 4, "cluster": "inline"}
    return rayfed.Experiment(**{**values, "train": {"lr": 0.1, "batch_size": 8}, **changes})


WITHOUT_BACKWARD = ("fedkseed",)


@pytest.mark.parametrize("name", quickly(METHODS.names()))
def test_a_call_of_every_method_has_the_same_bits(name, calls, tmp_path):
    given = [*TINY, f"algorithm={name}", "cluster=inline", f"output={tmp_path / 'run'}", "figures=false"]
    rayfed.simulate(given)
    first = {(call.sent.round, call.tag, call.client): (call, answer) for call, answer in reversed(calls)}
    drawn = random.Random(name).sample([*first.values()], min(3, len(first)))  # always the same
    for call, answer in drawn:
        done = check(tmp_path / "run", call, answer)
        assert done.is_as_recorded in (True, None)
        if call.tag == "fit" and answer.steps:
            assert bool(len(done.steps)) == (name not in WITHOUT_BACKWARD)


@pytest.mark.parametrize("group", [1, 2, 3])
def test_a_client_of_a_group_has_the_bits_of_its_group(group, calls, tmp_path):
    data = {"name": "digits_five_mini", "limit": 24, "partition": {"scheme": "by_domain"}}
    model = {"name": "vit_mini", "options": {"depth": 1}, "pretrained": False}
    given = {"method": "fedavg", "data": data, "model": model, "tuning": "lora", "cluster": "inline"}
    rayfed.Experiment(**given, rounds=2, train={"group": group, "batch_size": 4}).run(tmp_path / "run")
    trained = [(call, answer) for call, answer in calls if call.tag == "fit" and call.sent.round == 1]
    assert len(trained) == 5
    alone = [check(tmp_path / "run", call, answer).alone for call, answer in trained]
    assert sum(alone) == {1: 5, 2: 1, 3: 0}[group]


def test_the_steps_are_the_batches_and_losses_of_the_client(calls, tmp_path):
    run = own(train={"lr": 0.1, "batch_size": 8, "epochs": 2}).run(tmp_path / "run")
    call, answer = next(
        (c, a) for c, a in calls if c.tag == "fit" and c.sent.round == 2 and c.client.endswith("2")
    )
    done = check(run.path, call, answer)
    number = run.recorded.partition_rows("client", "split", "index")
    held = [row["index"] for row in number if row["client"] == call.client and row["split"] == "train"]
    per_epoch = len(done.steps) // 2
    for epoch in (done.steps.iloc[:per_epoch], done.steps.iloc[per_epoch:]):
        assert sorted(row for rows in epoch["rows"] for row in rows) == sorted(held)
    every = np.concatenate([x for x, _ in clients().values()])
    targets = np.concatenate([y for _, y in clients().values()])
    network = net()
    network.load_state_dict(dict(zip(network.state_dict(), call.sent.params.values(), strict=True)))
    rows = done.steps["rows"][0]
    loss = nn.functional.cross_entropy(
        network(torch.from_numpy(every[rows])), torch.from_numpy(targets[rows])
    )
    near(torch.tensor(done.steps["loss"][0]), loss.detach(), 2 * 6 + 2 * 8 + 3 * 8)


def test_a_changed_value_is_for_this_call_only(calls, tmp_path):
    run = own(method="fedprox", local={"mu": 0.01}).run(tmp_path / "run")
    before = {file: file.read_bytes() for file in sorted(run.path.rglob("*")) if file.is_file()}
    call, answer = [pair for pair in calls if pair[0].tag == "fit"][-1]
    done = replay(run.path, 4, call.client, changes={"local.mu": 5.0})
    assert same(dict(done.sent.params), dict(call.sent.params))  # what led to it is as it was
    assert not same(done.update.params, answer.params)
    assert done.changes == {"local.mu": 5.0}
    assert same(
        run.replay(round=4, client="c 3", changes={"local.mu": 5.0}).update.params, done.update.params
    )
    assert same(run.replay(round=4, client="c 3").update.params, answer.params)
    other = own(method="fedprox", local={"mu": 5.0}, rounds=1).run(tmp_path / "other")
    first = replay(run.path, 1, call.client, changes={"local.mu": 5.0})
    assert same(first.update.params, replay(other.path, 1, call.client).update.params)
    assert before == {file: file.read_bytes() for file in sorted(run.path.rglob("*")) if file.is_file()}


@pytest.mark.parametrize("keep", [1, 9])
def test_it_starts_from_the_nearest_checkpoint(keep, calls, tmp_path):
    run = own(method="scaffold", checkpoint={"keep": keep}).run(tmp_path / "run")
    told = []
    call, answer = next(pair for pair in calls if pair[0].tag == "fit" and pair[0].sent.round == 2)
    check(run.path, call, answer, tell=told.append)
    assert told == (
        ["running rounds 1 to 2 again, as no checkpoint is nearer (checkpoint.keep)"] if keep == 1 else []
    )


class Fails(rayfed.Local):
    def loss(self, client, sent, batch):
        if sent.round == 2 and client.id.endswith("1"):
            raise ValueError("no such luck")
        return super().loss(client, sent, batch)


def test_the_call_that_failed_fails_again(tmp_path):
    experiment = own(method=Fails, failures={"retries": 0})
    with pytest.raises(RayFedError, match="no such luck"):
        experiment.run(tmp_path / "run")
    config = experiment.config(output=str(tmp_path / "run")).alone()
    with pytest.raises(RayFedError, match="no such luck"):
        replay(tmp_path / "run", 3, _id(tmp_path / "run", "1"), config=config)
    assert replay(tmp_path / "run", 3, _id(tmp_path / "run", "0"), config=config).update.steps


def _id(path, end):
    names = {row["client"] for row in RecordedRun(path).partition_rows("client")}
    return next(name for name in names if name.endswith(end))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"round": 0}, r"round: 0 is not one of the rounds 1 to 4"),
        ({"round": 5}, r"round: 5 is not one of the rounds 1 to 4"),
        ({"client": "nobody"}, r"client: 'nobody' does not exist"),
        ({"exchange": "fitt"}, r"exchange: 'fitt' does not exist; did you mean 'fit'"),
        (
            {"changes": {"server.lr": 1}},
            r"set: 'server\.lr' is not of the client; change a key of local or train",
        ),
        (
            {"changes": {"train.lrr": 1}},
            r"train\.lrr: .*did you mean 'lr'|train\.lrr: no such key; did you mean",
        ),
    ],
)
def test_what_is_not_there_is_one_line(options, message, tmp_path_factory, cache, monkeypatch):
    path = tmp_path_factory.getbasetemp() / "one_line"
    if not path.exists():
        own().run(path)
    name = options.pop("client", _id(path, "0"))
    with pytest.raises(ConfigError, match=message):
        replay(path, options.pop("round", 2), name, **options)


def test_the_command(tmp_path, capsys, monkeypatch):
    path = tmp_path / "run"
    given = [
        "algorithm=fedprox",
        "data.limit=24",
        "rounds=2",
        "cluster=inline",
        f"output={path}",
        "figures=false",
    ]
    rayfed.simulate(given)
    assert (
        main([str(path), "--round", "2", "--client", "c3", "--save", str(tmp_path / "answer.safetensors")])
        == 0
    )
    text = capsys.readouterr().out
    assert "c3-street in round 2, exchange fit" in text
    digest = re.search("sha256 ([0-9a-f]{16})", text)[1]
    assert main([str(path), "--round", "2", "--client", "c3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["sha256"].startswith(digest)
    assert found["steps"][0]["loss"] > 0
    assert rayfed.federation.params.digest(load_file(tmp_path / "answer.safetensors")) == found["sha256"]
    assert main([str(path), "--round", "2", "--client", "c3", "--set", "train.lr=0.5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sha256"] != found["sha256"]
    assert main([str(path), "--round", "2", "--client", "c3", "--set", "local.mu"]) == 2
    assert "no KEY=VALUE" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdin", io.StringIO("p client.id, self.mu\ncontinue\n"))
    assert main([str(path), "--round", "2", "--client", "c3", "--pdb"]) == 0
    text = capsys.readouterr().out
    assert "fedprox.py" in text
    assert "('c3-street', 0.01)" in text


@pytest.mark.slow
@pytest.mark.steady
def test_a_run_of_actors_that_was_killed(tmp_path, request):
    """The command of the run is killed; the calls of its rounds are those of a run in one process."""
    request.addfinalizer(end_session)
    given = [*(each for each in TINY if each != "rounds=2"), "algorithm=fedgcr"]
    code = "import sys, rayfed.run; sys.exit(rayfed.run.main(sys.argv[1:]))"
    killed = [*given, "cluster.actors=2", f"output={tmp_path / 'killed'}", "rounds=400"]
    running = subprocess.Popen(
        [sys.executable, "-c", code, *killed], env=os.environ, stdout=subprocess.DEVNULL
    )
    try:
        while not (tmp_path / "killed" / "checkpoints" / "round-000003" / "checkpoint.json").exists():
            assert running.poll() is None
    finally:
        running.kill()
        running.wait()
    rayfed.simulate([*given, "cluster=inline", f"output={tmp_path / 'whole'}", "rounds=3"])
    name = sorted(rayfed.load(tmp_path / "whole").clients.index)[0]
    here, there = (replay(tmp_path / run, 2, name) for run in ("whole", "killed"))
    assert same(here.update.params, there.update.params)
    assert same(here.update.extra, there.update.extra)


def test_rounds_that_come_out_otherwise_are_told(calls, tmp_path, capsys):
    run = own(method="scaffold", checkpoint={"keep": 1}).run(tmp_path / "run")
    call, answer = next(pair for pair in calls if pair[0].tag == "fit" and pair[0].sent.round == 2)
    assert (first := check(run.path, call, answer)).other_round == 0
    assert first.is_as_recorded is True
    last, of_last = next(pair for pair in calls if pair[0].tag == "fit" and pair[0].sent.round == 0)
    assert (
        check(run.path, last, of_last).is_as_recorded is None
    )  # no round is run again, and it has no metrics
    lines = (run.path / "rounds.jsonl").read_text().splitlines()
    changed = json.loads(lines[1])
    changed["loss"] += 1e-7
    lines[1] = json.dumps(changed)
    (run.path / "rounds.jsonl").write_text("".join(f"{line}\n" for line in lines))
    done = check(run.path, call, answer)
    assert (done.other_round, done.is_as_recorded) == (2, False)
    assert any(
        "round 2, which was run again, is NOT as the run recorded it" in note for note in table(done).notes
    )
