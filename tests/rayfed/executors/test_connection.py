"""Ray is started or joined: SIGTERM meanwhile, for which Ray has its own handler, and the folder used."""

import contextlib
import os
import shutil
import signal
import socket
import ssl
import stat
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray

from rayfed.errors import ClusterError, ConfigError, UnreachableError
from rayfed.executors.connection import (
    LONGEST_FOLDER,
    SHORT_FOLDER,
    Health,
    _limited_memory,
    _listens,
    _start,
    connection,
    probe,
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
    assert ("it answers, so either this machine is no node of it" in str(failed.value)) is told
    assert ("RAY_AUTH_MODE or the token" in str(failed.value)) is told


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


@pytest.fixture
def short():
    """A temporary folder whose name is short."""
    folder = Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize("name", ["TMPDIR", "RAY_TMPDIR"])
def test_ray_has_short_names_for_its_sockets_where_the_temporary_folder_is_long(name, short, monkeypatch):
    for each in ("TMPDIR", "RAY_TMPDIR"):
        monkeypatch.delenv(each, raising=False)
    own = f"rayfed-{os.getuid()}/r"
    assert session_folder() == f"{SHORT_FOLDER}/{own}"
    longest = short / ("x" * (LONGEST_FOLDER - len(f"{short}/")))
    monkeypatch.setenv(name, str(longest))
    assert session_folder() == f"{longest}/{own}"
    socket = f"{session_folder()}/session_2026-01-31_23-59-59_123456_4194304/sockets/plasma_store"
    assert len(socket) <= 107
    monkeypatch.setenv(name, f"{longest}x")
    assert session_folder() == f"{SHORT_FOLDER}/{own}"


def test_nobody_else_can_enter_the_folder_of_a_ray_that_is_started_here(short, monkeypatch):
    monkeypatch.setenv("RAY_TMPDIR", str(short))
    private = Path(session_folder()).parent
    assert private == short / f"rayfed-{os.getuid()}"
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    private.chmod(0o777)
    session_folder()
    assert stat.S_IMODE(private.stat().st_mode) == 0o700


def test_a_temporary_folder_in_which_nothing_can_be_made_is_named(short, monkeypatch):
    (short / "file").touch()
    monkeypatch.setenv("RAY_TMPDIR", str(short / "file"))
    with pytest.raises(ClusterError, match=r"cannot make a folder in .*file.*; set RAY_TMPDIR"):
        _start(1, 0, False, Health())


@pytest.mark.parametrize("taken", ["a link", "a file", "another user's folder"])
def test_a_name_that_is_taken_is_not_used(taken, short, monkeypatch):
    monkeypatch.setenv("RAY_TMPDIR", str(short))
    usual = short / f"rayfed-{os.getuid()}"
    elsewhere = short / "elsewhere"
    elsewhere.mkdir(mode=0o777)
    if taken == "a link":
        usual.symlink_to(elsewhere)
    elif taken == "a file":
        usual.touch()
    else:
        usual.mkdir()
        monkeypatch.setattr(os, "getuid", lambda: 12345)
        usual.rename(short / "rayfed-12345")
    private = Path(session_folder()).parent
    assert private.parent == short
    assert private not in (usual, short / "rayfed-12345", elsewhere)
    assert stat.S_IMODE(private.stat().st_mode) == 0o700


def test_ray_is_started_in_that_folder(monkeypatch):
    asked = {}
    monkeypatch.setenv("TMPDIR", "/" + "x" * 80)
    monkeypatch.setattr("ray.init", lambda **settings: asked.update(settings))
    _start(1, 0, False, None)
    assert asked["_temp_dir"] == f"{SHORT_FOLDER}/rayfed-{os.getuid()}/r"


class Server:
    """A server on the loopback address that answers the first bytes of each connection."""

    def __init__(self, context=None):
        self._context = context
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        with contextlib.suppress(OSError):
            while True:
                stream, _ = self._socket.accept()
                with contextlib.suppress(OSError), stream:
                    if self._context:
                        stream = self._context.wrap_socket(stream, server_side=True)
                    if stream.recv(100):
                        stream.sendall(b"hello")

    def close(self):
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def certificates(folder):
    """An authority and a certificate of it."""
    for command in (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=authority -keyout ca.key -out ca.pem",
        "openssl req -newkey rsa:2048 -nodes -subj /CN=node -keyout node.key -out node.csr",
        "openssl x509 -req -in node.csr -days 2 -CA ca.pem -CAkey ca.key -CAcreateserial -out node.pem",
    ):
        subprocess.run(command.split(), cwd=folder, check=True, capture_output=True)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificates with openssl")
def test_a_cluster_with_tls_answers_where_tls_is_on(tmp_path, monkeypatch):
    certificates(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "node.pem", tmp_path / "node.key")
    context.load_verify_locations(tmp_path / "ca.pem")
    context.verify_mode = ssl.CERT_REQUIRED  # as Ray's servers: clients show a certificate, too
    server = Server(context)
    with pytest.raises(UnreachableError):
        probe(server.address, 5)
    monkeypatch.setenv("RAY_USE_TLS", "1")
    for name, file in (("CA_CERT", "ca.pem"), ("SERVER_CERT", "node.pem"), ("SERVER_KEY", "node.key")):
        monkeypatch.setenv(f"RAY_TLS_{name}", str(tmp_path / file))
    probe(server.address, 5)
    server.close()
    plain = Server()
    with pytest.raises(UnreachableError):
        probe(plain.address, 5)
    monkeypatch.setenv("RAY_TLS_SERVER_KEY", str(tmp_path / "missing"))
    with pytest.raises(ConfigError, match="RAY_USE_TLS is on, but its certificates cannot be read"):
        probe(plain.address, 5)
    plain.close()


def test_a_head_that_does_not_answer_any_more_is_lost(monkeypatch):
    monkeypatch.setattr("rayfed.executors.connection.PROBE_EVERY", 0.05)
    told = []
    monkeypatch.setattr("rayfed.executors.connection.note_ending", lambda text, **_: told.append(text))
    server = Server()
    health = Health()
    health.begin_joined(server.address)
    time.sleep(0.5)
    assert not health.lost
    server.close()
    deadline = time.monotonic() + 20
    while not health.lost:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert f"the head of the Ray cluster at {server.address} has not answered" in health.lost
    assert told == [health.lost]


def test_a_head_is_not_watched_after_the_end(monkeypatch):
    monkeypatch.setattr("rayfed.executors.connection.PROBE_EVERY", 0.05)
    server = Server()
    health = Health()
    health.begin_joined(server.address)
    health.end()
    server.close()
    time.sleep(0.5)
    assert not health.lost


def test_a_full_disk_is_named_before_ray_starts_and_where_it_ends(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=5_000_000))
    with pytest.raises(ClusterError, match=r"the disk of its folder .* has only 5 MB free; free some"):
        _start(1, 0, False, Health())


def test_ray_is_told_of_a_limit_that_it_does_not_see(monkeypatch):
    monkeypatch.setattr("rayfed.executors.connection.machine_memory", lambda: 16e9)
    monkeypatch.setattr("rayfed.executors.connection.free_memory", lambda: 15e9)
    assert _limited_memory() == {}
    monkeypatch.setattr("rayfed.executors.connection.free_memory", lambda: 1e9)
    assert _limited_memory() == {"_memory": 700_000_000, "object_store_memory": 300_000_000}


def test_the_dashboard_is_named_only_where_it_answers():
    server = Server()
    assert _listens(server.address)
    server.close()
    assert not _listens(server.address)
    assert not _listens("")
