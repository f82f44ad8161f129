"""Clients that do not answer: what methods, scores and tables make of those that do."""

import numpy as np
import pytest
import torch

from rayfed.client_facts import ByClient
from rayfed.engine.loop import run_rounds
from rayfed.executors.inline import InlineExecutor
from rayfed.federation.aggregation import mean_by_name
from rayfed.federation.params import digest
from rayfed.heterogeneity.faults import Faults, Profile
from rayfed.heterogeneity.traces import TraceEntry
from tests.conftest import quickly
from tests.rayfed.heterogeneity.test_faults import rounds_of, setup_of


def traced(setup, said, **changes):
    """Faults of a set-up experiment whose only fault is a trace."""
    clients = setup.experiment.clients
    nothing = Profile(availability=1.0, dropout=0.0, speed=1.0, bandwidth=None)
    work = ByClient(clients.names, clients.sizes.tolist(), range(len(clients)))
    return Faults(seed=0, profiles=ByClient.same(clients.names, nothing), work=work, trace=said, **changes)


@pytest.mark.parametrize(
    "algorithm", quickly(["fedavg", "ditto", "fedgcr", "feddyn", "afl", "fft_gp"], ["fedavg", "feddyn"])
)
def test_who_drops_out_might_as_well_not_have_been_drawn(cache, algorithm):
    """Weights are those of the survivors, and private states stay as they were: to the bit."""
    setup = setup_of(
        cache, f"algorithm={algorithm}", "data.partition.scheme=by_domain", "data.val=2", "evaluation.every=2"
    )
    first, *_, last = setup.experiment.clients
    gone = ((0, first), (1, last))
    dropped = rounds_of(setup, faults=traced(setup, {key: TraceEntry(dropout=True) for key in gone}))
    absent = rounds_of(setup, faults=traced(setup, {key: TraceEntry(available=False) for key in gone}))
    assert digest(dropped[-1].state.params) == digest(absent[-1].state.params)
    assert digest(dropped[-1].state.params) != digest(rounds_of(setup, faults=None)[-1].state.params)
    assert [d.ledger.missing for d in dropped] == [[first], [last]]
    assert [a.ledger.missing for a in absent] == [[], []]
    assert [d.row["clients"] - a.row["clients"] for d, a in zip(dropped, absent, strict=True)] == [1, 1]
    assert dropped[0].row["bytes_up"] == absent[0].row["bytes_up"]
    assert dropped[0].row["bytes_down"] > absent[0].row["bytes_down"]  # it has downloaded
    assert dropped[0].ledger.tables["missing"][0] == {"client": first, "exchange": "fit", "cause": "dropout"}


class RecordSettings(InlineExecutor):
    """Remembers the answers; drops, as for an error, those whom `failing` names."""

    failing: tuple[str, ...] = ()

    def map(self, calls):
        self.seen = {c.client: a for c, a in zip(calls, super().map(calls), strict=True)} if calls else {}
        self.asked = [*getattr(self, "asked", []), *((c.tag, c.client) for c in calls)]
        return [None if c.client in self.failing else self.seen[c.client] for c in calls]


def test_weights_are_renormalised_over_those_that_answered(cache):
    setup = setup_of(cache, "evaluation.every=0", "rounds=1", "data.partition.scheme=by_domain")
    executor = RecordSettings(setup.context, setup.weights)
    first, *others = setup.experiment.clients
    executor.failing = (first,)
    (done,) = run_rounds(setup.experiment, executor, setup.start)
    survivors = [executor.seen[cid] for cid in others]
    mean = mean_by_name(survivors, [u.num_examples for u in survivors])
    assert all(torch.equal(done.state.params[n], v) for n, v in mean.items())
    assert sum(row["weight"] for row in done.ledger.tables["aggregation"]) == pytest.approx(1)
    assert (done.row["missing"], done.ledger.missing) == (1, [first])
    assert done.ledger.tables["missing"] == [{"client": first, "exchange": "fit", "cause": "error"}]
    assert [r["up"] > 0 for r in done.ledger.transfers] == [False] + [True] * len(others)


def test_a_missing_client_is_not_called_again_in_its_round(cache):
    setup = setup_of(cache, "algorithm=fft_gp", "data.val=2", "evaluation.every=0", "rounds=1")
    executor = RecordSettings(setup.context, setup.weights)
    first, *others = setup.experiment.clients
    executor.failing = (first,)
    (done,) = run_rounds(setup.experiment, executor, setup.start)
    assert ("fit", first) in executor.asked
    assert [tag for tag, cid in executor.asked if cid == first] == ["fit"]
    assert [tag for tag, cid in executor.asked if cid == others[0]] == ["fit", "gap", "gap_ga"]
    assert done.ledger.missing == [first]


def test_whoever_fails_when_looked_at_leaves_the_others_scores(cache):
    setup = setup_of(cache, "rounds=1")
    executor = RecordSettings(setup.context, setup.weights)
    *_, done = run_rounds(setup.experiment, executor, setup.start)
    broken = RecordSettings(setup.context, setup.weights)
    broken.map = lambda calls: [
        None if c.tag == "report" and c.client == first else a
        for c, a in zip(calls, RecordSettings.map(broken, calls), strict=True)
    ]
    first = setup.experiment.sets[0].id
    *_, less = run_rounds(setup.experiment, broken, setup.start)
    gone = setup.experiment.sets[0].clients
    left = {cid: score for cid, score in done.scores["global"].clients.items() if cid not in gone}
    assert less.scores["global"].clients == left
    assert less.row["report_missing"] == 1
    assert "missing" not in less.row
    broken.map = lambda calls: [
        None if c.tag == "report" else a
        for c, a in zip(calls, RecordSettings.map(broken, calls), strict=True)
    ]
    *_, nothing = run_rounds(setup.experiment, broken, setup.start)
    assert "accuracy" not in nothing.row
    assert digest(nothing.state.params) == digest(done.state.params)


def test_answers_of_a_second_exchange_are_paired_by_client(cache):
    setup = setup_of(cache, "algorithm=ga", "data.val=2", "evaluation.every=0", "rounds=1")
    first = next(iter(setup.experiment.clients))

    def gaps(lost):
        executor = RecordSettings(setup.context, setup.weights)
        executor.map = lambda calls: [
            None if c.tag == "gap" and c.client in lost else a
            for c, a in zip(calls, RecordSettings.map(executor, calls), strict=True)
        ]
        (done,) = run_rounds(setup.experiment, executor, setup.start)
        return {row["client"]: row["gap"] for row in done.ledger.tables["gaps"]}, done

    whole, done = gaps(())
    less, _ = gaps((first,))
    assert np.isnan(less.pop(first))
    assert less == {cid: gap for cid, gap in whole.items() if cid != first}
    nobody, trained = gaps(tuple(whole))
    assert all(np.isnan(gap) for gap in nobody.values())
    assert digest(trained.state.params) == digest(done.state.params)  # what was trained is kept
