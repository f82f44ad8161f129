"""The command, its supervisor and the worker: whatever ends, the others say it and end what was started."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import psutil
import pytest

from tests.conftest import ROOT, quickly

PROGRAM = """
import os, signal, subprocess, sys, time
from rayfed.terminal.supervisor import note_advice, note_ending, run_supervised

def main():
    note_advice("continue with: this")
{body}

import rayfed.terminal.supervisor as supervisor
supervisor.END_PATIENCE = supervisor.LOST_PATIENCE = 1.0
sys.exit(run_supervised(main))
"""


def start(body):
    program = PROGRAM.format(body=textwrap.indent(textwrap.dedent(body), "    "))
    return subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def ended(body):
    """Exit code, standard output and standard error of a command."""
    command = start(body)
    out, err = command.communicate(timeout=300)
    return command.returncode, out, err


@pytest.mark.parametrize("code", quickly([0, 1, 2, 130], [130]))
def test_an_exit_code_passes_through(code):
    assert ended(f"print('done'); return {code}") == (code, "done\n", "")
    assert ended(f"raise SystemExit({code})")[0] == code


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("os._exit(1)", "exit code 1, which is how Ray ends it"),  # what Ray does when its raylet is gone
        ("os.kill(os.getpid(), signal.SIGKILL)", "signal 9 (Killed)"),
        ("os.abort()", "signal 6 (Aborted)"),
    ],
)
def test_a_child_that_ends_without_a_word_is_one_line(body, words):
    code, out, err = ended(body)
    assert (code, out) == (1, "")
    (line,) = err.splitlines()
    assert line.startswith("error: the process of the run ended without an exception: ")
    assert words in line
    assert line.endswith("; continue with: this")


def test_what_c_writes_is_kept_in_a_file_and_not_on_the_screen(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    code, _, err = ended("os.write(2, b'*** StackTrace Information ***\\n'); os._exit(1)")
    assert code == 1
    (file,) = tmp_path.iterdir()
    assert len(err.splitlines()) == 1
    assert f"(what it wrote last: {file})" in err
    assert "StackTrace" in file.read_text()
    assert "StackTrace" not in err
    assert ended("os.write(2, b'noise'); print('loud', file=sys.stderr); return 0")[2] == "loud\n"
    assert list(tmp_path.iterdir()) == [file]  # a run that ended well leaves none


@pytest.mark.parametrize(("lost", "other"), [(True, "END_PATIENCE"), (False, "LOST_PATIENCE")])
def test_a_child_that_does_not_end_after_its_reason_is_ended(lost, other):
    body = f"supervisor.{other} = 6000.0; note_ending('its cluster is gone', lost={lost}); time.sleep(6000)"
    code, _, err = ended(body)
    assert (code, err) == (1, "error: its cluster is gone; continue with: this\n")


def test_what_the_child_started_ends_with_it():
    body = """
        orphan = "import subprocess; print(subprocess.Popen(['sleep', '600'], start_new_session=True).pid)"
        subprocess.run([sys.executable, "-c", orphan])
        return 3
    """
    code, out, _ = ended(body)
    assert code == 3
    assert not psutil.pid_exists(int(out.split()[0]))


LEAVING = """
    print(os.getppid(), os.getpid(), flush=True)
    first = subprocess.Popen(["sleep", "600"], start_new_session=True)
    orphan = "import subprocess; print(subprocess.Popen(['sleep', '600'], start_new_session=True).pid)"
    subprocess.run([sys.executable, "-c", orphan])
    print(first.pid, flush=True)
    time.sleep(600)
"""
"""Starts what Ray starts: processes of their own sessions, some of them without their parent."""


@pytest.mark.parametrize("killed", ["the command", "the supervisor", "the worker"])
def test_all_processes_end_when_one_of_the_three_is_killed(killed):
    command = start(LEAVING)
    pids = " ".join(command.stdout.readline() for _ in range(3)).split()
    processes = [psutil.Process(int(pid)) for pid in pids]
    three = {"the command": command, "the supervisor": processes[0], "the worker": processes[1]}
    assert len({command.pid, *(process.pid for process in processes)}) == 5
    three[killed].kill()
    _, alive = psutil.wait_procs(processes, timeout=120)
    assert not alive
    _, err = command.communicate(timeout=120)
    if killed == "the command":
        assert err == ""
    else:
        assert command.returncode == 1
        assert err.startswith("error: the ")
        assert err.endswith("signal 9 (Killed); continue with: this\n")


@pytest.mark.parametrize("number", quickly([signal.SIGINT, signal.SIGTERM], [signal.SIGTERM]))
def test_a_signal_reaches_the_child_once(number):
    body = """
        seen = []
        signal.signal(signal.SIGINT, lambda n, _: seen.append(n))
        signal.signal(signal.SIGTERM, lambda n, _: seen.append(n))
        print("ready", flush=True)
        while not seen:
            time.sleep(0.05)
        time.sleep(1)
        print([int(n) for n in seen])
        return 130
    """
    command = start(body)
    assert command.stdout.readline() == "ready\n"
    os.killpg(command.pid, number)  # as a terminal does with Ctrl-C: to the whole group
    out, _ = command.communicate(timeout=300)
    assert (command.returncode, out) == (130, f"[{int(number)}]\n")


def test_ctrl_z_stops_all_and_fg_wakes_all(tmp_path):
    body = f"""
        print(os.getppid(), os.getpid(), flush=True)
        while not os.path.exists({str(tmp_path / "woken")!r}):
            time.sleep(0.05)
        return 0
    """
    command = start(body)
    pids = [command.pid, *map(int, command.stdout.readline().split())]
    command.send_signal(signal.SIGTSTP)
    deadline = time.monotonic() + 120
    while {psutil.Process(pid).status() for pid in pids} != {psutil.STATUS_STOPPED}:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    (tmp_path / "woken").touch()
    command.send_signal(signal.SIGCONT)
    assert command.wait(120) == 0
