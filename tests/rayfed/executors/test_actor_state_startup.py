"""A start counts as stuck when its process does nothing, not when a clock says so."""

import subprocess
import sys
import time

import psutil
import pytest

from rayfed.executors import actor_state
from rayfed.executors.actor_state import StartProgress, effort

TITLE = "#ray::ClientActor"
READY = "print(flush=True)"
BUSY = f"{READY}\nwhile True: pass {TITLE}"
IDLE = f"{READY}; import time; time.sleep(600) {TITLE}"
IMPORTING = f"{READY}; import time; held = [(time.sleep(0.1), bytes(b'1' * 500_000)) for _ in range(1000)]"
ANOTHER = f"{READY}\nwhile True: pass"  # an idle worker has threads that use some CPU time


@pytest.fixture
def worker(monkeypatch, request):
    """A process that looks like a Ray worker which starts a client actor."""
    process = subprocess.Popen([sys.executable, "-c", request.param], stdout=subprocess.PIPE)
    process.stdout.readline()  # the interpreter has started
    monkeypatch.setattr(actor_state, "_workers", lambda: iter([psutil.Process(process.pid)]))
    monkeypatch.setattr(actor_state, "LOOK_EVERY", 0.1)
    yield process.pid
    process.kill()
    process.communicate()


def is_seen(event):
    """Whether something happens within two minutes."""
    until = time.monotonic() + 120
    while not (happened := event()) and time.monotonic() < until:
        time.sleep(0.1)
    return happened


def is_given_up(up=()):
    """Whether seconds go by without progress."""
    progress, began = StartProgress(), time.monotonic()
    return is_seen(lambda: progress.since(began, up) > 1)


def gets_on(up=()):
    """Whether progress is noticed again and again."""
    progress, began, times = StartProgress(), time.monotonic(), set()

    def noticed():
        progress.since(began, up)
        times.add(progress.last)
        return len(times) > 5

    return is_seen(noticed)


@pytest.mark.parametrize("worker", [BUSY, IMPORTING], indirect=True)
def test_a_process_that_gets_on_is_waited_for(worker):
    assert gets_on()


@pytest.mark.parametrize("worker", [IDLE, ANOTHER], indirect=True)
def test_a_process_that_does_not_is_given_up(worker):
    assert is_given_up()


@pytest.mark.parametrize("worker", [BUSY], indirect=True)
def test_an_actor_that_is_up_is_no_start(worker):
    assert effort(set()).keys() == {worker}
    assert not effort({worker})
    assert is_given_up(up=[worker])
