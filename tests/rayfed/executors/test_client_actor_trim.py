"""Free memory goes back to the machine, at most every few seconds."""

import atexit
import gc
import subprocess
import sys
import threading
import weakref
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from rayfed.engine import session
from rayfed.executors import client_actor
from rayfed.executors.client_actor import ClientActor, Trim


def test_it_is_done_once_in_a_while(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(client_actor.time, "monotonic", lambda: clock[0])
    calls = []
    own = Trim()
    own._malloc_trim = calls.append
    assert not own.now_and_then()
    for clock[0] in (109.0, 110.0, 111.0, 119.0, 120.0):
        own.now_and_then()
    assert calls == [0, 0]


def test_an_actor_does_it_once_it_has_grown(monkeypatch):
    clock, calls = [100.0], []
    monkeypatch.setattr(client_actor.time, "monotonic", lambda: clock[0])
    own = Trim(slack=50)
    own._malloc_trim = lambda pad: calls.append(clock[0])
    sizes = {110: 900, 120: 700, 130: 740, 140: 690, 150: 740, 160: 741, 170: 800, 180: 850, 190: 851}
    own._process = SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=sizes[clock[0]]))
    for clock[0] in sizes:
        own.now_and_then()
    # What it needs: 700, then 690, and 800 after the second time.
    assert calls == [110, 160, 190]


def test_another_c_library_is_left_alone(monkeypatch):
    monkeypatch.setattr(client_actor.ctypes, "CDLL", lambda name: object())
    monkeypatch.setattr(client_actor, "PAUSE", 0.0)
    assert Trim().now_and_then()


def test_holes_between_blocks_that_stay_are_given_back(monkeypatch):
    own = Trim()
    monkeypatch.setattr(client_actor, "PAUSE", 0.0)
    blocks = [np.ones(8_000) for _ in range(1000)]  # 64 kB each, which glibc does not map one by one
    kept = blocks[::2]
    before = psutil.Process().memory_full_info().uss
    del blocks
    own.now_and_then()
    assert before - psutil.Process().memory_full_info().uss > 15_000_000
    assert len(kept) == 500


@pytest.fixture
def collection(all_objects):
    """Garbage collection as it was, after the test."""
    threshold = gc.get_threshold()
    yield
    gc.set_threshold(*threshold)
    atexit.unregister(gc.unfreeze)


class Circle:
    def __init__(self):
        self.me = self


def test_collections_leave_out_what_exists_and_not_what_is_dropped_later(collection):
    model, later = Circle(), Circle()
    gone, kept = weakref.ref(model), weakref.ref(later)
    client_actor.leave_out_of_garbage_collection()
    assert gc.get_freeze_count() > 10_000
    del model, later
    gc.collect()
    assert gone() is not None  # it was left out
    client_actor.leave_out_of_garbage_collection()  # as after a change to another experiment
    assert (gone(), kept()) == (None, None)


def test_an_actor_frees_the_model_of_the_former_experiment(collection, monkeypatch):
    frozen = []
    monkeypatch.setattr(
        "rayfed.executors.client_actor.leave_out_of_garbage_collection", lambda: frozen.append(1)
    )
    monkeypatch.setattr("rayfed.executors.client_actor.Worker", lambda *_: object())
    actor = ClientActor.__new__(ClientActor)
    actor._device, actor._share = "cpu", 1.0
    actor._hold(None, None, None)
    monkeypatch.setattr(actor, "where", dict, raising=False)
    actor.change(None, None)
    assert frozen == [1, 1]


PASSES = """
import resource, sys
import numpy as np
from rayfed.executors.client_actor import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()
for _ in range(5):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [np.ones(250_000) for _ in range(20)]
    del blocks
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.slow
@pytest.mark.steady
def test_client_actors_keep_the_memory_of_a_pass_for_the_next_one():
    def faults(how):
        done = subprocess.run([sys.executable, "-c", PASSES, how], capture_output=True, text=True, check=True)
        return int(done.stdout)

    assert faults("kept") < 100 < faults("not")


def test_client_actors_and_the_driver_do_it_while_they_run(monkeypatch):
    done = []
    monkeypatch.setattr(client_actor.Trim, "now_and_then", lambda self: done.append(1))
    actor = ClientActor.__new__(ClientActor)
    actor._trim = Trim()
    actor._memory = None
    assert actor.run([]) == ([],)
    assert done == [1]
    one = session.DriverActor("run")
    one._executor = one._experiment = one._watch = SimpleNamespace()
    one._ended = threading.Event()
    monkeypatch.setattr(session, "record_rounds", lambda *args: iter([{"round": 1}, {"round": 2}]))
    monkeypatch.setattr("rayfed.executors.wire.unpack", lambda packed: {})
    assert len(list(one.rounds(None, None, waits=False))) == 2
    assert done == [1, 1, 1]
