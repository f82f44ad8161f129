"""Small test sets share batches without a change of their scores, and a sample of clients is drawn once."""

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch

from rayfed.data.partition.partition import ClientSplit, Partition
from rayfed.engine.loop import run_rounds
from rayfed.evaluation import test_sets
from rayfed.evaluation.test_sets import EvaluationSet, evaluation_sets, pack_splits, packs
from rayfed.executors.inline import InlineExecutor
from rayfed.testing import small_setup
from tests.conftest import STEADY
from tests.rounding import Exact, equally_near, exact_numbers, exact_setup, limit


def splits(*sizes):
    ends = np.cumsum(sizes)
    return {
        f"c{i}": {"test": np.arange(end - n, end)} for i, (n, end) in enumerate(zip(sizes, ends, strict=True))
    }


def test_small_sets_fill_packs_in_their_order(monkeypatch):
    monkeypatch.setattr(test_sets, "MANY", 4)
    known = splits(3, 3, 40, 2, 0, 5, 1)
    assert packs(list(known)[:5], known, "test", 8) == ()  # too few of them
    made = packs(known, known, "test", 8)
    assert [dict(pack.sizes) for pack in made] == [{"c0": 3, "c1": 3, "c3": 2}, {"c5": 5, "c6": 1}]
    assert [pack.id for pack in made] == ["pack:test:0", "pack:test:1"]
    rows = pack_splits(made, known)["pack:test:0"]["test"]
    assert rows.tolist() == [0, 1, 2, 3, 4, 5, 46, 47]
    assert packs(known, known, "val", 8) == ()


@pytest.mark.parametrize("overrides", ["algorithm=fedavg", pytest.param("algorithm=depthfl", marks=STEADY)])
def test_scores_of_packed_sets_are_those_of_single_sets(monkeypatch, overrides):
    def rows(many, kind=InlineExecutor):
        monkeypatch.setattr(test_sets, "MANY", many)
        setup = small_setup(
            overrides, "data.partition.clients_per_domain=2", "data.limit=40", "data.test=0.3", "rounds=1",
            "evaluation.validation=true", "train.group=1", "train.eval_batch_size=16",
        )  # fmt: skip
        tags = []
        executor = kind(setup.context, setup.weights)
        play = executor.map
        executor.map = lambda calls: tags.extend(call.client for call in calls) or play(calls)
        precise = kind is Exact
        start = exact_setup(setup).start if precise else setup.start
        with exact_numbers() if precise else nullcontext():
            (done,) = run_rounds(setup.experiment, executor, start)
        return done, [name for name in tags if name.startswith("pack:")]

    alone, none = rows(1000)
    packed, called = rows(2)
    assert (none, {name.split(":")[1] for name in called}) == ([], {"test", "val"})
    assert len(called) < len(alone.scores["global"].clients)
    exact, _ = rows(1000, Exact)
    for name, score in alone.scores["global"].clients.items():
        other = packed.scores["global"].clients[name]
        assert (other.num, other.value) == (score.num, score.value)
    three = [[s.loss for s in done.scores["global"].clients.values()] for done in (alone, packed, exact)]
    equally_near(*([torch.tensor(losses).double()] for losses in three))
    apart = max(abs(one - other) for one, other in zip(*three[:2], strict=True))
    for name, value in alone.row.items():
        if "loss" in name:  # means of losses of clients
            assert abs(packed.row[name] - value) <= apart + limit(len(three[0]), value, torch.float64)
        elif not name.startswith("seconds"):
            assert packed.row[name] == value, name


def test_a_subset_of_the_sets_is_scored_alone(monkeypatch):
    monkeypatch.setattr(test_sets, "MANY", 2)
    setup = small_setup("algorithm=fedavg", "data.limit=40", "data.test=0.3", "rounds=1")
    assert setup.experiment.packs
    one = setup.experiment.sets[1]
    chosen = replace(setup.experiment, sets=(one,))
    (done,) = run_rounds(chosen, InlineExecutor(setup.context, setup.weights), setup.start)
    assert list(done.scores["global"].clients) == list(one.clients)


def test_methods_with_a_view_of_their_own_are_not_packed(monkeypatch):
    monkeypatch.setattr(test_sets, "MANY", 2)
    assert small_setup("algorithm=harmofl", "data.limit=40").experiment.packs == ()


def test_the_clients_that_are_scored_are_drawn_once_by_the_seed():
    none = np.empty(0, dtype=np.int64)
    own = [ClientSplit(id=f"c{i:02d}", domain="a", train=none, val=none, test=none) for i in range(50)]
    partition = Partition(clients=tuple(own), held_out={"b": none}, official_test=False, pooled=False)

    def ids(wanted, seed):
        *clients, last = evaluation_sets(partition, False, wanted, seed)
        assert last == EvaluationSet(id="domain:b", domain="b", clients=())
        assert all(one.clients == (one.id,) for one in clients)
        return [one.id for one in clients]

    drawn = ids(7, 3)
    assert (len(drawn), drawn) == (7, sorted(drawn))
    assert drawn == ids(7, 3) != ids(7, 4)
    assert ids("all", 3) == [client.id for client in own] == ids(50, 3)


def test_the_table_says_how_many_clients_were_scored(small):
    result = small("evaluation.clients=2", "data.limit=60", "data.test=0.3")
    assert "models scored on 2 clients (evaluation.clients)" in (result.path / "report.md").read_text()
    assert result.metrics["worst_domain"]
