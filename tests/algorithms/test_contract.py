"""What every file of algorithms/ promises. A new file is tested without writing a test."""

import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rayfed.config.schema import load_config
from rayfed.engine.loop import run
from rayfed.engine.recorded import Keeping, conduct
from rayfed.engine.setup import prepare
from rayfed.executors.inline import InlineExecutor
from rayfed.executors.wire import encode
from rayfed.federation.method import METHODS, check_compatible
from rayfed.federation.params import digest
from rayfed.heterogeneity.traces import Said
from rayfed.types import Broadcast
from tests.conftest import ROOT, SMALL

METHODS = METHODS.names()
CONTRACT = tuple(o for o in SMALL if not o.startswith("tuning."))  # a method brings its own scheme
CONTRACT += ("data.partition.scheme=by_domain", "data.limit=12", "data.val=2", "train.batch_size=4")
CONTRACT += ("data.domains=[plain,fonts,street]",)


def setup_of(name, cache, *overrides):
    return prepare(load_config([*CONTRACT, f"data.cache={cache}", f"algorithm={name}", *overrides]))


class Watching(InlineExecutor):
    """Checks after every call that nobody wrote into a message."""

    def map(self, calls):
        before = [(digest(call.sent.params), frozen(call.sent)) for call in calls]
        updates = super().map(calls)
        assert [(digest(call.sent.params), frozen(call.sent)) for call in calls] == before
        return updates


def frozen(sent: Broadcast) -> bytes:
    """Everything a method shares, to the bit."""
    return pickle.dumps(encode(dict(sent.shared)))


@pytest.mark.parametrize("name", METHODS)
def test_runs_leaves_messages_and_frozen_weights_alone_and_stays_finite(name, cache):
    setup = setup_of(name, cache)
    executor = Watching(setup.world, setup.weights)
    before = executor.worker.checksum()
    *_, last = run(setup.experiment, executor, setup.start)
    assert executor.worker.checksum() == before
    assert all(torch.isfinite(v).all() for v in last.state.params.values())
    assert last.row["round"] == 2
    assert 0 <= last.row["accuracy"] <= 1


@pytest.mark.parametrize("name", METHODS)
def test_is_repeatable_when_interrupted_and_with_missing_clients(name, cache, tmp_path):
    """Some drop out in the first round, everybody in the second one, one client in the last one.

    Everything a method carries from round to round is in a checkpoint.
    """
    setup = setup_of(name, cache, "rounds=3", "evaluation.every=3", "faults.dropout=0.4")
    ids = list(setup.experiment.clients)
    lost = {(1, cid): Said(dropout=True) for cid in ids}
    lost |= {(2, cid): Said(dropout=cid != ids[-1] and cid == ids[0]) for cid in ids}
    experiment = replace(setup.experiment, faults=replace(setup.experiment.faults, trace=lost))
    rows = {}
    for kind in ("whole", "interrupted"):
        keeping = Keeping(path=tmp_path / kind, domains={})
        keeping.path.mkdir()
        rounds = conduct(experiment, InlineExecutor(setup.world, setup.weights), setup.start, keeping)
        first = [next(rounds)] if kind == "interrupted" else []
        if first:
            rounds.close()
            again = InlineExecutor(setup.world, setup.weights)
            rounds = conduct(experiment, again, setup.start, replace(keeping, resume=True))
        rows[kind] = [
            {k: v for k, v in row.items() if not k.startswith(("seconds", "slowest"))}
            for row in [*first, *rounds]
        ]
    assert rows["whole"] == rows["interrupted"]
    *rounds, last = rows["whole"]
    params = load_file(tmp_path / "interrupted" / "model" / "params.safetensors")
    assert digest(params) == last["sha256"]
    assert all(torch.isfinite(v).all() for v in params.values())
    assert 0 <= rounds[-1]["accuracy"] <= 1
    if len(ids) > 1 and name != "zero_shot":  # it calls nobody
        missing = [row["missing"] for row in rounds]
        assert 0 < missing[0] < len(ids)
        assert missing[1:] == [len(ids), 1]


@pytest.mark.parametrize("name", METHODS)
def test_survives_a_client_with_one_example(name, cache):
    setup = setup_of(
        name, cache, "data.limit=13", "data.val=0", "data.test=1", "data.partition.clients_per_domain=6"
    )
    assert min(info.num_examples for info in setup.experiment.clients.values()) == 1 or name == "centralized"
    *_, last = run(setup.experiment, InlineExecutor(setup.world, setup.weights), setup.start)
    assert all(torch.isfinite(v).all() for v in last.state.params.values())


@pytest.mark.ray
@pytest.mark.parametrize("name", METHODS)
def test_same_tensors_on_actors(name, cache, pool_of_two):
    setup = setup_of(name, cache, "clients_per_round=1" if name == "centralized" else "clients_per_round=2")
    here = list(run(setup.experiment, InlineExecutor(setup.world, setup.weights), setup.start))[-1]
    there = list(run(setup.experiment, pool_of_two(setup), setup.start))[-1]
    assert digest(here.state.params) == digest(there.state.params)
    assert {k: v for k, v in here.row.items() if "seconds" not in k} == {
        k: v for k, v in there.row.items() if "seconds" not in k
    }


def test_fedprox_is_short_and_touches_no_engine_file():
    lines = (ROOT / "algorithms" / "fedprox.py").read_text().split('"""', 2)[2].splitlines()
    code = [
        line
        for line in lines
        if line.strip() and not line.lstrip().startswith(("#", "from", "import", '"""'))
    ]
    assert len(code) < 20


@pytest.mark.parametrize("name", METHODS)
def test_halves_fit_and_say_where_they_come_from(name):
    from rayfed.config.schema import build_parts

    parts = build_parts(load_config([f"algorithm={name}"]))
    check_compatible(parts.server, parts.local, parts.tuning)
    doc = __import__(f"algorithms.{name}", fromlist=["x"]).__doc__
    assert doc
    assert len(doc.strip().splitlines()[0]) > 20


def test_the_recipe_of_contributing_works_literally(tmp_path, cache, small, monkeypatch):
    """The code block of CONTRIBUTING.md, saved where it says, run as it says, with mu=0 reduced to FedAvg."""
    import importlib

    import algorithms

    text = (ROOT / "CONTRIBUTING.md").read_text()
    source = text.split("```python\n", 1)[1].split("```", 1)[0]
    command = text.split("```bash\n", 1)[1].split("```", 1)[0].strip()
    folder = tmp_path / "algorithms"
    folder.mkdir()
    (folder / "fedl1.py").write_text(source)
    monkeypatch.setattr(algorithms, "__path__", [*algorithms.__path__, str(folder)])
    importlib.invalidate_caches()
    assert "fedl1" in METHODS.names()
    program, *overrides = command.removeprefix("python -m ").split()
    assert program == "rayfed.run"
    steps = "train.epochs=2"  # the pull is zero in the first step of a round
    assert small("algorithm=fedl1", "local.mu=0", steps).sha256 == small(steps).sha256
    assert small(*overrides, "local.mu=5", steps).sha256 != small(steps).sha256
    assert METHODS.load("fedl1").local().mu == 0.001
    assert not (Path(algorithms.__path__[0]) / "fedl1.py").exists()
