"""Whether the daemon of NVIDIA's multi-process service runs is told by its folder and its process."""

import shutil
import socket
import subprocess
import time

import pytest

from rayfed.mps import CONTROL, DAEMON, FOLDER, mps_runs

pytestmark = pytest.mark.xdist_group("mps")  # the daemon of one test would be seen by the other


def test_the_daemon_is_found_while_it_runs(tmp_path, monkeypatch):
    pipes = tmp_path / "pipes"
    monkeypatch.setenv(FOLDER, str(pipes))
    program = tmp_path / DAEMON
    shutil.copy(shutil.which("sleep") or pytest.fail("no sleep"), program)
    with subprocess.Popen([program, "600"]) as daemon:
        assert not mps_runs()  # it serves another folder
        pipes.mkdir()
        for _ in range(6000):
            if mps_runs():
                break
            time.sleep(0.02)
        assert mps_runs()
        daemon.kill()
    assert not mps_runs()


def test_a_daemon_outside_of_the_container_answers_in_its_folder(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER, str(tmp_path))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as daemon:
        daemon.bind(str(tmp_path / CONTROL))
        assert not mps_runs()  # nobody listens
        daemon.listen()
        assert mps_runs()
    assert not mps_runs()  # it left its socket behind
