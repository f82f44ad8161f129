"""Clients that never train are scored with the global model and after a few local steps from it."""

from dataclasses import replace
from functools import partial
from statistics import fmean

import pytest

from rayfed.engine.loop import TAG, run_rounds
from rayfed.errors import ConfigError
from rayfed.executors.inline import InlineExecutor
from rayfed.federation.client_tasks import adapt, fit
from rayfed.federation.params import digest
from rayfed.testing import small_setup, without_times
from tests.cohorts import make_cohort

FEW = ("data.domains=[plain,street]", "data.partition.clients_per_domain=2", "model.options={depth: 1}")


def play(*overrides, watch=None):
    """The setup, its rounds, and the executor after them; `watch` receives every call."""
    setup = small_setup("algorithm=fedavg", *FEW, *overrides)
    executor = InlineExecutor(setup.context, setup.weights)
    inner = executor.map
    executor.map = lambda calls: (watch.extend(calls) if watch is not None else None) or inner(calls)
    return setup, list(run_rounds(setup.experiment, executor, setup.start)), executor


def test_without_unseen_clients_nothing_changes():
    runs = [play(*more)[1] for more in (("rounds=1",), ("rounds=1", "data.unseen_clients=0"))]
    assert [[without_times(done.row) for done in run] for run in runs[:1]] == [
        [without_times(done.row) for done in run] for run in runs[1:]
    ]
    assert len({digest(run[-1].state.params) for run in runs}) == 1


def test_unseen_clients_never_train_and_are_scored_beside_the_others():
    calls = []
    setup, rounds, _ = play("data.unseen_clients=0.5", "data.test=0.3", watch=calls)
    unseen = setup.partition.unseen
    assert len(unseen) == 2
    assert not unseen & {call.client for call in calls if call.tag == "fit"}
    scores = rounds[-1].scores["global"]
    assert set(scores.unseen) == unseen
    assert not unseen & set(scores.clients)
    row = rounds[-1].row
    assert row["unseen_accuracy"] == pytest.approx(fmean(score.value for score in scores.unseen.values()))
    assert row["unseen_worst_accuracy"] == min(score.value for score in scores.unseen.values())
    assert row["accuracy"] == pytest.approx(fmean(score.value for score in scores.clients.values()))
    assert "adapted" not in rounds[-1].scores
    _, again, _ = play("data.unseen_clients=0.5", "data.test=0.3", "evaluation.local_steps=2")
    assert digest(again[-1].state.params) == digest(rounds[-1].state.params)
    assert row.items() - without_times(again[-1].row).items() <= {(k, row[k]) for k in row if "seconds" in k}


def test_an_adapted_score_is_that_of_a_visit_with_so_many_steps():
    """The client trains in a visit of a round, with the batches of the exchange in which it is scored."""
    setup, rounds, _ = play(
        *("data.unseen_clients=1", "data.test=0.3", "data.limit=40"),
        *("evaluation.local_steps=3", "train.lr=0.5"),
    )
    (name,) = setup.partition.unseen
    last = rounds[-1]
    context = replace(setup.context, train=replace(setup.context.train, local_steps=3), personal_every=1)
    other = InlineExecutor(context, setup.weights)
    cohort = replace(make_cohort(setup.experiment, other, 1), ids=(name,))
    (answer,) = cohort.run(partial(fit, local=setup.experiment.local), last.state.broadcast(), tag=TAG)
    assert last.row["adapted_unseen_accuracy"] == answer.metrics["personal/accuracy"]
    assert last.scores["adapted"].unseen[name].loss == answer.metrics["personal/loss"]
    assert last.scores["adapted"].unseen[name].loss != last.scores["global"].unseen[name].loss
    assert set(last.scores["adapted"].clients) == set()


@pytest.mark.parametrize(
    "overrides", [("algorithm=fedper",), ("algorithm=ditto", "train.keep_optimizer=true")]
)
def test_an_unseen_client_keeps_nothing(overrides):
    setup, rounds, executor = play(
        "data.unseen_clients=1", "data.test=0.3", "evaluation.local_steps=2", *overrides
    )
    (name,) = setup.partition.unseen
    stores = executor.stores()
    assert name not in stores or not stores[name].value
    assert all(stores[client].value for client in setup.experiment.clients)
    assert {"unseen_accuracy", "adapted_unseen_accuracy"} <= rounds[-1].row.keys()
    last = rounds[-1]
    cohort = make_cohort(setup.experiment, executor, 1).for_reporting((name,))
    task = partial(adapt, local=setup.experiment.local, steps=2)
    again = [cohort.run(task, last.state.broadcast(), tag=TAG)[0].metrics["loss"] for _ in range(2)]
    assert again == [last.scores["adapted"].unseen[name].loss] * 2


def test_the_unseen_clients_are_those_of_every_method():
    kinds = [small_setup(f"algorithm={name}", *FEW, "data.unseen_clients=2") for name in ("fedavg", "afl")]
    assert len({setup.partition.unseen for setup in kinds}) == 1


def test_a_method_that_trains_nothing_is_not_adapted():
    setup, rounds, _ = play(
        *("data.unseen_clients=1", "evaluation.local_steps=2", "algorithm=zero_shot", "rounds=1"),
        *("model.options={}", "model.pretrained=true"),
    )
    assert setup.experiment.adapting is None
    assert "unseen_accuracy" in rounds[-1].row
    assert "adapted_unseen_accuracy" not in rounds[-1].row


def test_steps_for_nobody_are_refused():
    with pytest.raises(ConfigError, match=r"evaluation\.local_steps: 3 has no effect"):
        small_setup("algorithm=fedavg", *FEW, "evaluation.local_steps=3")
