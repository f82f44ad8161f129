"""An actor that cannot start for a lasting reason is not tried again; wrong input ends the run first."""

import pytest
import ray
from ray import exceptions

from rayfed.errors import ClusterError, ConfigError, DataError, ResourceError
from rayfed.executors.actor_pool import Exchange, SentTensors
from rayfed.executors.actor_state import ActorHandle, Pace
from rayfed.federation.executor import Call, Policy
from rayfed.types import Broadcast


class Pool:
    """Lanes that note what is done with them."""

    def __init__(self, count):
        self.lanes = [ActorHandle(f"lane{i}", {}, starting=object()) for i in range(count)]
        self.policy, self.pace, self.home, self.sent = Policy(), Pace(), {}, SentTensors()
        self.retired, self.replaced, self.events = [], [], []
        self.on_event = self.events.append

    def retire(self, lane):
        self.lanes.remove(lane)
        self.retired.append(lane.name)

    def replace(self, lane):
        self.replaced.append(lane.name)


def of_constructor(text):
    """What Ray raises where a constructor raised."""
    return exceptions.ActorDiedError(
        exceptions.RayTaskError(
            "__init__", f"Traceback ...\n  File x\n{text}", ValueError(text), actor_id="a"
        )
    )


def arrives(monkeypatch, pool, error, calls=()):
    """The exchange hears of its first lane, which raises this."""

    def get(_):
        raise error

    monkeypatch.setattr(ray, "get", get)
    Exchange(list(calls), pool)._arrive(pool.lanes[0])


CALL = Call("c", lambda client, sent: None, "fit", Broadcast(round=0, params={}))


def test_an_error_of_the_constructor_is_not_tried_again(monkeypatch):
    pool = Pool(2)
    arrives(monkeypatch, pool, of_constructor("ModuleNotFoundError: No module named 'own'"))
    assert (pool.retired, pool.replaced) == (["lane0"], [])
    assert "No module named 'own'" in pool.events[0].message
    with pytest.raises(ClusterError, match=r"no client actor is left.*No module named 'own'"):
        arrives(monkeypatch, pool, of_constructor("ModuleNotFoundError: No module named 'own'"))


def test_a_process_that_died_is_tried_again(monkeypatch):
    pool = Pool(2)
    for _ in range(pool.policy.retries):
        arrives(monkeypatch, pool, exceptions.WorkerCrashedError())
    assert pool.replaced == ["lane0"] * pool.policy.retries
    arrives(monkeypatch, pool, exceptions.WorkerCrashedError())
    assert pool.retired == ["lane0"]


@pytest.mark.parametrize("cause", [DataError("data.cache: not there"), ResourceError("too small")])
def test_wrong_input_at_a_node_ends_the_run_before_its_first_round(cause, monkeypatch):
    error = exceptions.RayTaskError("where", "Traceback", cause).as_instanceof_cause()
    pool = Pool(2)
    with pytest.raises(exceptions.RayTaskError) as found:
        arrives(monkeypatch, pool, error)
    assert isinstance(found.value.cause, ConfigError)
    assert (pool.retired, pool.replaced) == ([], [])


def test_later_the_others_go_on_without_it(monkeypatch):
    error = exceptions.RayTaskError("where", "T", DataError("data.cache: not there")).as_instanceof_cause()
    pool = Pool(2)
    arrives(monkeypatch, pool, error, [CALL])
    assert pool.retired == ["lane0"]
    assert "data.cache: not there" in pool.events[0].message
    with pytest.raises(exceptions.RayTaskError):
        arrives(monkeypatch, pool, error, [CALL])  # it was the last one
    assert len(pool.lanes) == 1
