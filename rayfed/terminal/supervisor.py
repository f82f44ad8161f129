"""Runs a command so that every end of it is reported and all its processes are ended.

A command consists of three processes, each the child of the one before: the command that the user started,
the supervisor, and the worker process, which does the work and uses Ray. If its raylet or its gcs_server
ends, Ray ends the worker from C++, without an exception or a message. The supervisor therefore forwards
signals, waits for the exit code of the worker, reports the reason if the worker could not, and kills all
processes that the worker has left. It does the same if the command is killed; if the supervisor is killed,
the command kills what is left. Both become the parent of all orphans among their descendants, so that they
find every process that was started for the run, and none of another one.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import select
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from rayfed.terminal.console import say

END_PATIENCE = 15.0  # seconds in which the child must end after it reported why the run ends
LOST_PATIENCE = 5.0  # the same if Ray is gone, so that there is nothing left to end in order
EXIT_PATIENCE = 5.0  # seconds in which it must end after it sent its exit code
SWEEP_PATIENCE = 5.0  # seconds to wait for the end of killed processes
ADVICE_BYTES = 4096  # largest length of an advice
TICK = 0.2
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # of prctl(2)
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP, signal.SIGCONT)
_pipe: int | None = None  # the end of the pipe in the worker process
_shared: mmap.mmap | None = None  # memory that command, supervisor and worker share: the advice


def note_advice(text: str) -> None:
    """Keep an advice for the user, for the case that this process ends without a message."""
    if _shared is not None:
        _shared[:] = text.encode()[:ADVICE_BYTES].ljust(ADVICE_BYTES, b"\0")


def _error(text: str) -> str:
    """An error line with the last advice."""
    advice = "" if _shared is None else _shared[:].rstrip(b"\0").decode(errors="ignore")
    return "error: " + "; ".join(part for part in (text, advice) if part)


def note_ending(reason: str, code: int = 1, lost: bool = False) -> None:
    """Send the supervisor the reason why the run ends; it kills this process if that takes too long.

    Args:
        reason: The error line, without `error:`.
        code: Exit code.
        lost: Ray is gone; this process is killed after LOST_PATIENCE, not END_PATIENCE.
    """
    _send({"reason": reason, "code": code, "patience": LOST_PATIENCE if lost else END_PATIENCE})


def _send(message: dict[str, object]) -> None:
    if _pipe is not None:
        with suppress(OSError):  # the supervisor is gone; the kernel ends this process too
            os.write(_pipe, json.dumps(message).encode() + b"\n")


def run_supervised(main: Callable[[], int]) -> int:
    """Run a command below a supervisor; returns its exit code.

    Args:
        main: The command; returns its exit code or raises SystemExit.
    """
    if not sys.platform.startswith("linux"):
        return main()
    global _shared
    _shared = mmap.mmap(-1, ADVICE_BYTES)
    command = os.getpid()
    _prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans among the descendants become children of this process
    # A signal that comes before this process can forward it waits; it would end this process alone.
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    supervisor = os.fork()
    if supervisor == 0:
        os.setpgid(0, 0)  # Ctrl-C reaches the command only, which forwards it once
        sys.exit(_supervise(main, command))
    _forward_to(supervisor)
    _, status = os.waitpid(supervisor, 0)
    _sweep()
    if os.WIFSIGNALED(status):
        say(_error(f"the supervisor of the run ended: {_how(status)}"), sys.stderr)
        return 1
    return os.waitstatus_to_exitcode(status)


def _forward_to(child: int) -> None:
    """Forward signals to a child from now on; also those that came since they were blocked."""

    def forward(number: int, _: object) -> None:
        with suppress(ProcessLookupError):
            os.kill(child, number)
        if number == signal.SIGTSTP:  # Ctrl-Z: all stop, and `fg` wakes all
            os.kill(os.getpid(), signal.SIGSTOP)

    for number in FORWARDED:
        signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)


def _supervise(main: Callable[[], int], command: int) -> int:
    """Run the worker process of the command with this process id; returns the exit code."""
    read_end, write_end = os.pipe()
    errors = _open_log()
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        os.close(read_end)
        _work(main, parent, write_end, errors)
    os.close(write_end)
    supervision = _Supervision(command, child, read_end)
    _forward_to(child)
    code, line = supervision.wait()
    _sweep()
    wrote = errors is not None and supervision.was_silent and errors.stat().st_size > 0
    if line:
        say(f"{line} (what it wrote last: {errors})" if wrote else line, sys.stderr)
    if errors is not None and not wrote:
        errors.unlink(missing_ok=True)
    return code


def _work(main: Callable[[], int], parent: int, pipe: int, errors: Path | None) -> NoReturn:
    """Do the work of the command in the worker process, send its exit code, and end the process."""
    global _pipe
    _pipe = pipe
    os.setpgid(0, 0)
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    # Python keeps writing to the screen; output of C++ (stack dumps of Ray) goes to a file.
    sys.stderr = os.fdopen(
        os.dup(2), "w", buffering=1, encoding=sys.stderr.encoding, errors="backslashreplace"
    )
    target = os.open(errors or os.devnull, os.O_WRONLY | os.O_APPEND)
    os.dup2(target, 2)
    code = 1
    try:
        code = main()
    except SystemExit as err:  # argparse
        code = err.code if isinstance(err.code, int) else 0 if err.code is None else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
    _send({"exit": code})
    sys.exit(code)


@dataclass
class _Supervision:
    """State of the worker process, as the supervisor knows it."""

    command: int
    child: int
    pipe: int
    reason: str = ""
    code: int | None = None
    was_silent: bool = False
    deadline: float = float("inf")
    unread: bytes = b""

    def wait(self) -> tuple[int, str]:
        """Wait for the end of the worker; returns its exit code, and an error line if it showed none.

        The worker is killed if it takes too long to end, or if the command was killed.
        """
        exited: int | None = None
        status: int | None = None
        while status is None:
            status = _reap(self.child)
            exited = self._hear(0.0 if status is not None else TICK, exited)
            orphaned = os.getppid() != self.command
            if status is None and (orphaned or time.monotonic() > self.deadline):
                with suppress(ProcessLookupError):
                    os.kill(self.child, signal.SIGKILL)
        if exited is not None or orphaned:
            return exited or 0, ""
        if self.reason:
            return self.code or 1, _error(self.reason)
        self.was_silent = True
        return 1, _error(f"the process of the run ended without an exception: {_how(status)}")

    def _hear(self, timeout: float, exited: int | None) -> int | None:
        """Read the messages of the child; returns its exit code once it has sent one."""
        ready, _, _ = select.select([self.pipe], [], [], timeout)
        data = os.read(self.pipe, 65536) if ready else b""
        if ready and not data:
            time.sleep(TICK)  # the child closed its end, and will be reaped at once
        *lines, self.unread = (self.unread + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "reason" in message:
                if not self.reason:
                    self.reason, self.code = message["reason"], message["code"]
                    self.deadline = time.monotonic() + message["patience"]
            else:
                exited = int(message["exit"])
                self.deadline = time.monotonic() + (0.5 if self.reason else EXIT_PATIENCE)
        return exited


def _reap(child: int) -> int | None:
    """Wait for ended processes without blocking; returns the wait status of the child if it has ended."""
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == child:
                return status
            if pid == 0:
                return None
    return 1 << 8  # another part of the program has already waited for it


def _how(status: int) -> str:
    """Description of the end of a process.

    >>> _how(9), _how(256)
    ('signal 9 (Killed)', "exit code 1, which is how Ray ends it when one of Ray's processes is gone")
    """
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        return f"signal {-code} ({signal.strsignal(-code)})"
    return f"exit code {code}, which is how Ray ends it when one of Ray's processes is gone"


def _sweep() -> None:
    """Kill all processes below this one, until there are none."""
    deadline = time.monotonic() + SWEEP_PATIENCE
    while _has_children() and time.monotonic() < deadline:
        import psutil

        remaining = psutil.Process().children(recursive=True)
        for process in remaining:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(remaining, timeout=1.0)


def _has_children() -> bool:
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return False
    return True


def _open_log() -> Path | None:
    """A file for output of C++ on standard error; None if no temporary file can be created."""
    try:
        handle, name = tempfile.mkstemp(prefix="rayfed-stderr-", suffix=".log")
    except OSError:
        return None
    os.close(handle)
    return Path(name)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)
