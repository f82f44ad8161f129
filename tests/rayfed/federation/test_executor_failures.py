"""Failures that really happen to actors: each has a defined outcome, and a record of it."""

import os
import random
import signal
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from rayfed.config.schema import load_config
from rayfed.engine.loop import run_rounds
from rayfed.errors import ClientError, ClusterError, StoppedError
from rayfed.executors.inline import InlineExecutor
from rayfed.experiment.plan import prepared
from rayfed.federation.executor import Call, Policy
from rayfed.federation.params import digest
from rayfed.types import Broadcast, Update
from tests.conftest import SMALL, STEADY, quickly

VICTIM = "c1-plain"
pytestmark = pytest.mark.ray


def answer(client, sent):
    """A draw of the client's own stream, so that a repeated call can be told from another one."""
    client.store["calls"] = client.store.get("calls", 0) + 1
    drawn = float(torch.rand(1, generator=client.rng))
    return Update(client=client.id, num_examples=1, metrics={"drawn": drawn, "calls": client.store["calls"]})


def trouble(client, sent, what, marker=None):
    """Fail in one way: always, or only while there is no marker."""
    client.store["spoiled"] = True  # must not survive the failure
    if client.id == VICTIM and not (marker and Path(marker).exists()):
        if marker:
            Path(marker).touch()
        fail(what)
        return Update(client=client.id, num_examples=1, params=NONSENSE[what](sent))
    del client.store["spoiled"]
    return answer(client, sent)


def fail(what):
    if what == "raise":
        raise ZeroDivisionError("boom")
    if what == "fault":
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "sleep":
        time.sleep(600)


NONSENSE = {
    "nan": lambda sent: {n: v * float("nan") for n, v in sent.params.items()},
    "shape": lambda sent: {n: v[:1] for n, v in sent.params.items()},
    "stranger": lambda sent: {"no.such.tensor": torch.zeros(1)},
}
SAYS = {
    "raise": ("error", "ZeroDivisionError: boom"),
    "nan": ("nonfinite", "is not finite"),
    "shape": ("error", "has shape"),
    "stranger": ("error", "no.such.tensor"),
    "fault": ("device_failed", "illegal memory access"),
    "sleep": ("timeout", "no answer within client_timeout=10 s"),
    "kill": ("actor_lost", "its actor was lost"),
}


@pytest.fixture(scope="module")
def setup(cache):
    return prepared(
        load_config([*SMALL, f"data.cache={cache}", "data.partition.clients_per_domain=2", "rounds=10"])
    )


@pytest.fixture
def pool(setup, pool_of_two):
    pool, events = pool_of_two(setup), []
    usual = pool.on_event
    pool.on_event, pool.events = events.append, events
    yield pool
    pool.policy, pool.on_event = Policy(), usual
    pool.stopped.clear()


def ask(pool, setup, task, **policy):
    if policy.get("client_timeout"):
        pool.map([Call(cid, answer, "warm", sent(setup)) for cid in setup.experiment.clients])
        pool.forget()
    pool.policy = Policy(**policy)
    return pool.map([Call(cid, task, "fit", sent(setup)) for cid in setup.experiment.clients])


def sent(setup):
    return Broadcast(round=4, params=setup.start)


def metrics(updates):
    return [update and dict(update.metrics) for update in updates]


@pytest.fixture(scope="module")
def undisturbed(setup):
    inline = InlineExecutor(setup.context, setup.weights)
    return metrics(ask(inline, setup, answer))


def limit(what):
    return {"client_timeout": 10.0} if what == "sleep" else {}


@pytest.mark.parametrize("what", quickly(SAYS, ("raise",)))
def test_drop_leaves_out_one_client_and_nobody_else(what, setup, pool, undisturbed):
    policy = {"on_client_error": "drop", "retries": 0, **limit(what)}
    found = metrics(ask(pool, setup, partial(trouble, what=what), **policy))
    victim = list(setup.experiment.clients).index(VICTIM)
    lost = [i for i, (a, b) in enumerate(zip(found, undisturbed, strict=True)) if a != b]
    if what == "kill":  # whoever shared its chunk is lost with it
        assert victim in lost
    else:
        assert lost == [victim]
    assert all(found[i] is None for i in lost)
    event = next(e for e in pool.events if e.client == VICTIM)
    assert (event.kind, event.action, event.round, event.exchange) == (SAYS[what][0], "drop", 4, "fit")
    assert SAYS[what][1] in event.message
    assert VICTIM not in pool.stores()


@pytest.mark.parametrize("what", quickly(SAYS, ("kill",)))
def test_retry_gives_what_would_have_come_without_the_failure(what, setup, pool, undisturbed, tmp_path):
    task = partial(trouble, what=what, marker=str(tmp_path / "once"))
    found = metrics(ask(pool, setup, task, on_client_error="retry", **limit(what)))
    assert found == undisturbed
    event = next(e for e in pool.events if e.client == VICTIM)
    assert (event.kind, event.action, event.attempt) == (SAYS[what][0], "retry", 1)


@pytest.mark.slow
@pytest.mark.steady
def test_a_process_whose_device_failed_runs_no_other_call(setup, pool, undisturbed, tmp_path):
    pool.wait_until_up()
    before = [lane.actor for lane in pool.lanes]
    marker = str(tmp_path / "once")
    found = metrics(ask(pool, setup, partial(trouble, what="fault", marker=marker)))
    assert found == undisturbed  # the call is repeated by another process, whatever the policy says
    assert [e.action for e in pool.events] == ["retry"]
    assert sum(lane.actor is not actor for lane, actor in zip(pool.lanes, before, strict=True)) == 1


@pytest.mark.parametrize(
    "what", ["raise", pytest.param("sleep", marks=STEADY), pytest.param("kill", marks=pytest.mark.slow)]
)
def test_what_always_fails_ends_the_run_after_the_retries(what, setup, pool):
    with pytest.raises(ClientError, match=SAYS[what][1]) as err:
        ask(pool, setup, partial(trouble, what=what), on_client_error="retry", retries=1, **limit(what))
    assert (err.value.client, err.value.round) == (VICTIM, 4) or what == "kill"
    assert [e.action for e in pool.events if e.client == err.value.client] == ["retry", "raise"]


def test_the_first_failure_ends_the_run_with_its_traceback(setup, pool):
    with pytest.raises(ClientError, match="boom"):
        ask(pool, setup, partial(trouble, what="raise"))
    (event,) = pool.events
    assert event.action == "raise"
    assert 'raise ZeroDivisionError("boom")' in event.trace


@pytest.mark.parametrize("action", ["raise", "retry", "drop"])
def test_the_same_policies_inline(action, setup, undisturbed, tmp_path):
    inline = InlineExecutor(setup.context, setup.weights)
    events = []
    inline.on_event = events.append
    task = partial(trouble, what="raise", marker=str(tmp_path / "once") if action == "retry" else None)
    if action == "raise":
        with pytest.raises(ClientError, match="boom"):
            ask(inline, setup, task, on_client_error=action)
    else:
        found = metrics(ask(inline, setup, task, on_client_error=action))
        assert [a for a, b in zip(found, undisturbed, strict=True) if a != b] == [None] * (action == "drop")
    assert [(e.client, e.action) for e in events] == [(VICTIM, action)]


@pytest.mark.slow
@pytest.mark.steady
def test_the_watchdog_names_who_is_waited_for_and_what_it_does(setup, pool, caplog):
    task = partial(trouble, what="sleep")
    ask(pool, setup, task, on_client_error="drop", client_timeout=8.0, watchdog=1.0)
    event = next(e for e in pool.events if e.kind == "silence")
    assert f"waiting for {VICTIM} on " in event.message
    assert "in round 5, exchange 'fit'" in event.message
    assert "pid " in event.message
    assert "trouble" in event.trace  # the function in which it hangs
    assert event.message.split("; ")[0] in caplog.text


@pytest.mark.slow
@pytest.mark.steady
def test_a_request_to_stop_ends_the_exchange_under_way(setup, pool):
    threading.Timer(1.5, pool.stop).start()
    with pytest.raises(StoppedError):  # without it, the test ends by its own time limit
        ask(pool, setup, partial(trouble, what="sleep"))
    for lane in list(pool.lanes):  # what hangs is still hanging
        import ray

        ray.kill(lane.actor)
        pool.replace(lane)


@pytest.mark.slow
def test_actors_that_never_come_up_again_are_given_up(setup, ray_cluster):
    import ray

    from rayfed.executors.actor_pool import RayExecutor

    names, options = ["a", "b"], [{"num_cpus": 0}, {"num_cpus": 0}]
    pool = RayExecutor(ray.put(setup.context), ray.put(dict(setup.weights)), names, options)
    events = []
    pool.on_event = events.append
    try:
        pool.wait_until_up()
        whole = metrics(ask(pool, setup, answer))
        pool.forget()
        gone = pool.lanes[0]
        gone.options["num_cpus"] = 1000  # as if its node were gone: Ray waits for one in silence
        os.kill(gone.place["pid"], signal.SIGKILL)
        assert metrics(ask(pool, setup, partial(slow), patience=8.0, retries=1)) == whole
        assert [lane.name for lane in pool.lanes] == ["b"]
        assert "lane_lost" in {e.kind for e in events}
        gone.options["num_cpus"] = 0  # as if its node returned
        pool.replace(gone)
        ray.get(gone.starting)
        pool.forget()
        assert metrics(ask(pool, setup, answer)) == whole
        assert [lane.name for lane in pool.lanes] == ["b", "a"]
        pool.retire(gone)
        pool.lanes[0].options["num_cpus"] = 1000
        os.kill(pool.lanes[0].place["pid"], signal.SIGKILL)
        for _ in range(2):  # whoever asks again hears it again
            with pytest.raises(ClusterError, match="no client actor is left"):
                ask(pool, setup, answer, patience=2.0, retries=9)
    finally:
        pool.close()


def slow(client, sent):
    time.sleep(1.2)  # long enough for the other lane to be given up
    return answer(client, sent)


class Killer:
    """Kills the process of a random actor a moment after an exchange began."""

    def __init__(self, pool, tags=None, times=1, seed=0):
        self.pool, self.tags, self.left, self.rng = pool, tags, times, random.Random(seed)
        self.map, self.seen = pool.map, set()

    def __call__(self, calls):
        tag, round = calls[0].tag, calls[0].sent.round
        if self.left and (self.tags is None or tag in self.tags) and round not in self.seen:
            self.seen.add(round)
            self.left -= 1
            threading.Timer(self.rng.uniform(0.0, 0.15), self.kill).start()
        return self.map(calls)

    def kill(self):
        up = [lane.place["pid"] for lane in self.pool.lanes if lane.starting is None]
        if up:
            os.kill(self.rng.choice(up), signal.SIGKILL)


@pytest.mark.slow
def test_an_actor_killed_in_every_round_changes_nothing(setup, pool, monkeypatch):
    """Ten rounds; every replacement imports torch anew, which is what takes the time."""
    *_, here = run_rounds(setup.experiment, InlineExecutor(setup.context, setup.weights), setup.start)
    killer = Killer(pool, times=10)
    monkeypatch.setattr(pool, "map", killer)
    before = pool.replaced
    *_, there = run_rounds(setup.experiment, pool, setup.start)
    assert killer.left == 0
    assert pool.replaced - before >= 8  # one may be killed twice before it is missed
    assert digest(there.state.params) == digest(here.state.params)
    assert there.scores == here.scores


PHASES = {  # of the round
    "summarise": ("fedgcr", "samples"),
    "fit": ("ditto", "fit"),
    "prepare": ("harmofl", "amplitude"),
    "evaluate": ("ga", "gap"),
    "report": ("fedavg", "report"),
}


@pytest.mark.slow
@pytest.mark.steady
@pytest.mark.parametrize("phase", PHASES)
def test_an_actor_killed_in_any_phase_changes_nothing(phase, cache, pool_of_two, monkeypatch):
    name, tag = PHASES[phase]
    base = (o for o in SMALL if not o.startswith("tuning."))
    options = [*base, f"data.cache={cache}", f"algorithm={name}", "data.partition.scheme=by_domain"]
    small = prepared(load_config([*options, "data.val=3"]))
    *_, here = run_rounds(small.experiment, InlineExecutor(small.context, small.weights), small.start)
    pool = pool_of_two(small)
    killer = Killer(pool, tags={tag})
    monkeypatch.setattr(pool, "map", killer)
    *_, there = run_rounds(small.experiment, pool, small.start)
    assert killer.left == 0
    assert digest(there.state.params) == digest(here.state.params)
    assert there.scores == here.scores
