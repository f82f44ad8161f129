"""A start counts as stuck when its process does nothing, not when a clock says so."""

import subprocess
import sys
import time

import psutil
import pytest

from rayfed.executors import startup
from rayfed.executors.startup import StartProgress, effort

TITLE = "#ray::ClientActor"
BUSY = f"while True: pass {TITLE}"
IDLE = f"import time; time.sleep(600) {TITLE}"
IMPORTING = "import time; held = [(time.sleep(0.1), bytes(b'1' * 500_000)) for _ in range(1000)]"
ANOTHER = "while True: pass"  # an idle worker has threads that use some CPU time


@pytest.fixture
def worker(monkeypatch, request):
    """A process that looks like a Ray worker which starts a client actor."""
    process = subprocess.Popen([sys.executable, "-c", request.param])
    monkeypatch.setattr(startup, "_workers", lambda: iter([psutil.Process(process.pid)]))
    monkeypatch.setattr(startup, "LOOK_EVERY", 0.2)
    time.sleep(0.5)  # for the start of the interpreter
    yield process.pid
    process.kill()
    process.wait()


def seconds_without_progress(up=()):
    progress, began = StartProgress(), time.monotonic()
    deadline = began + 3
    progress.since(began, up)
    while time.monotonic() < deadline:
        found = progress.since(began, up)
        time.sleep(0.1)
    return found


@pytest.mark.parametrize("worker", [BUSY, IMPORTING], indirect=True)
def test_a_process_that_gets_on_is_waited_for(worker):
    assert seconds_without_progress() < 2


@pytest.mark.parametrize("worker", [IDLE, ANOTHER], indirect=True)
def test_a_process_that_does_not_is_given_up(worker):
    assert seconds_without_progress() > 2


@pytest.mark.parametrize("worker", [BUSY], indirect=True)
def test_an_actor_that_is_up_is_no_start(worker):
    assert effort(set()).keys() == {worker}
    assert not effort({worker})
    assert seconds_without_progress(up=[worker]) > 2
