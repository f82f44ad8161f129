"""Stores of clients: small ones beyond the budget of the driver are put into the object store."""

import pytest

from rayfed.executors import actor_pool
from rayfed.executors.actor_pool import SMALL, Stores


def put_again(reference):
    return f"{reference}, put"


@pytest.fixture
def kept(monkeypatch):
    monkeypatch.setattr(actor_pool, "BUDGET", 250)
    found = Stores(put_again)
    for client in "abc":
        found.keep(client, client.upper(), 100)
    return found


def test_the_oldest_small_stores_leave_the_driver(kept):
    assert [kept.reference(c) for c in "abcd"] == ["A, put", "B", "C", None]
    kept.keep("b", "B2", 100)
    kept.keep("d", "D", 100)
    assert [kept.reference(c) for c in "abcd"] == ["A, put", "B2", "C, put", "D"]
    kept.keep("a", "A2", 60)
    assert [kept.reference(c) for c in "abcd"] == ["A2", "B2, put", "C, put", "D"]


def test_a_store_that_moves_is_not_saved_again(kept):
    serials = {client: one.serial for client, one in kept.all().items()}
    kept.keep("d", "D", 100)
    moved = {client: one.serial for client, one in kept.all().items()}
    assert {client: moved[client] for client in serials} == serials
    assert len(set(moved.values())) == 4


def test_what_is_in_the_object_store_already_does_not_count(kept):
    kept.keep("e", "E", SMALL)
    kept.keep("f", "F")
    assert [kept.reference(c) for c in "bcef"] == ["B", "C", "E", "F"]


def test_clients_that_keep_nothing_make_room(kept):
    kept.keep("b", None)
    kept.keep("d", "D", 100)
    assert [kept.reference(c) for c in "abcd"] == ["A, put", None, "C", "D"]
    kept.clear()
    assert kept.all() == {}
    for client in "abc":
        kept.keep(client, client, 100)
    assert kept.reference("a") == "a, put"


@pytest.mark.slow
@pytest.mark.steady
@pytest.mark.ray
def test_stores_beyond_the_budget_are_those_of_a_driver_that_keeps_all(ray_cluster, monkeypatch):
    import ray

    from algorithms.ditto import OWN
    from rayfed.engine.loop import run_rounds
    from rayfed.executors.actor_pool import RayExecutor
    from rayfed.executors.inline import InlineExecutor
    from rayfed.federation.params import digest
    from rayfed.testing import small_setup

    monkeypatch.setattr(actor_pool, "BUDGET", 0)
    setup = small_setup("algorithm=ditto", "data.domains=[plain,street]", "evaluation.every=0")
    pool = RayExecutor(ray.put(setup.context), ray.put(dict(setup.weights)), ["s"], [{"num_cpus": 0}])
    inline = InlineExecutor(setup.context, setup.weights)
    try:
        here, there = ([*run_rounds(setup.experiment, e, setup.start)][-1] for e in (inline, pool))
        assert digest(here.state.params) == digest(there.state.params)
        units = setup.experiment.rounds * -(-len(setup.experiment.clients) // setup.experiment.group)
        assert pool.pace.measured("fit") == units
        one, other = ({c: e.fetch(c, k) for c, k in e.stores().items()} for e in (inline, pool))
    finally:
        pool.close()
    assert one.keys() == other.keys() == setup.experiment.clients.keys()
    for client in one:
        assert digest(one[client][OWN]) == digest(other[client][OWN])
