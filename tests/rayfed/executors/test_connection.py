"""Ray is started or joined: SIGTERM meanwhile, for which Ray has its own handler, and the folder used."""

import os
import signal
import sys

import pytest
import ray

from rayfed.errors import ClusterError, ConfigError, UnreachableError
from rayfed.executors.connection import (
    LONGEST_FOLDER,
    SHORT_FOLDER,
    _start,
    connection,
    session_folder,
)
from rayfed.executors.ray_private import own_sigterm_handler
from rayfed.terminal.exit_code import stoppable


@pytest.fixture(autouse=True)
def handler():
    """What is to be done at SIGTERM after the test is what was to be done before it."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def rays(number, frame):
    sys.exit(number)


def set_rays():
    """What `ray.init` does first."""
    ray._private.utils.set_sigterm_handler(rays)


def without_ray(monkeypatch, init):
    """Begin as a process that uses no Ray yet, which other tests may do in this one."""
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)


@pytest.mark.parametrize("address", ["local", "auto"])
def test_a_sigterm_while_ray_starts_interrupts_the_command(address, monkeypatch):
    def init(**options):
        set_rays()
        os.kill(os.getpid(), signal.SIGTERM)

    without_ray(monkeypatch, init)
    with pytest.raises(KeyboardInterrupt), stoppable(), connection(address):
        raise AssertionError("the signal was lost")


def test_the_handler_is_the_same_after_ray_was_started(monkeypatch):
    def init(**options):
        set_rays()
        raise RuntimeError("no Ray in this test")

    without_ray(monkeypatch, init)
    with stoppable():
        before = signal.getsignal(signal.SIGTERM)
        with pytest.raises(ClusterError, match="no Ray in this test"), connection("local"):
            pass
        assert signal.getsignal(signal.SIGTERM) is before
    set_rays()
    assert signal.getsignal(signal.SIGTERM) is rays  # other users of Ray in this process get its handler


def test_without_a_handler_rays_own_is_there_until_ray_has_started():
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with own_sigterm_handler():
        set_rays()
        assert signal.getsignal(signal.SIGTERM) is rays
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.parametrize(
    ("where", "raised", "error", "told"),
    [
        ("10.0.0.1:6379", ConnectionError("Failed to connect to Ray cluster at x"), ConfigError, True),
        ("10.0.0.1:6379", RuntimeError("Version mismatch: Python 3.12"), ConfigError, False),
        ("auto", ConnectionError("Could not find any running Ray instance"), UnreachableError, False),
    ],
)
def test_a_cluster_that_answers_and_cannot_be_joined_may_have_another_token(
    where, raised, error, told, monkeypatch
):
    def init(**options):
        raise raised

    without_ray(monkeypatch, init)
    monkeypatch.setattr("rayfed.executors.connection.probe", lambda *_: None)
    with pytest.raises(error) as failed, connection(where):
        pass
    assert failed.type is error
    assert str(raised) in str(failed.value)
    assert ("it answers, so RAY_AUTH_MODE or the token" in str(failed.value)) is told


def test_a_number_of_cpus_that_a_joined_cluster_does_not_take_is_named(monkeypatch, caplog):
    def init(**options):
        raise RuntimeError("no Ray in this test")

    without_ray(monkeypatch, init)
    monkeypatch.setattr("rayfed.executors.connection.probe", lambda *_: None)
    with pytest.raises(ConfigError), connection("10.0.0.1:6379", num_cpus=2):
        pass
    assert caplog.messages == [
        "cluster.num_cpus=2 is for a Ray that is started here; the one at 10.0.0.1:6379 keeps its own number"
    ]


@pytest.mark.parametrize("name", ["TMPDIR", "RAY_TMPDIR"])
def test_ray_has_short_names_for_its_sockets_where_the_temporary_folder_is_long(name, monkeypatch):
    for each in ("TMPDIR", "RAY_TMPDIR"):
        monkeypatch.delenv(each, raising=False)
    assert session_folder() is None
    monkeypatch.setenv(name, "/" + "x" * (LONGEST_FOLDER - 1))
    assert session_folder() is None
    monkeypatch.setenv(name, "/" + "x" * LONGEST_FOLDER)
    assert session_folder() == SHORT_FOLDER
    socket = f"{session_folder()}/session_2026-01-31_23-59-59_123456_4194304/sockets/plasma_store"
    assert len(socket) <= 107


def test_ray_is_started_in_that_folder(monkeypatch):
    asked = {}
    monkeypatch.setenv("TMPDIR", "/" + "x" * 80)
    monkeypatch.setattr("ray.init", lambda **settings: asked.update(settings))
    _start(1, 0, False, None)
    assert asked["_temp_dir"] == SHORT_FOLDER
