"""Runs a command in a child process, so that every end of it is reported and all its processes are ended.

If its raylet or its gcs_server ends, Ray ends the process that uses it from C++, without an exception or a
message. A small parent process therefore forwards signals, waits for the exit code of the child, reports the
reason if the child could not, and kills all processes that the child has left.
"""

from __future__ import annotations

import ctypes
import json
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

END_PATIENCE = 15.0  # seconds in which the child must end after it reported that the run is lost
EXIT_PATIENCE = 5.0  # seconds in which it must end after it sent its exit code
SWEEP_PATIENCE = 5.0  # seconds to wait for the end of killed processes
TICK = 0.2
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # of prctl(2)
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP, signal.SIGCONT)
_pipe: int | None = None  # the end of the pipe in the child


def note_advice(text: str) -> None:
    """Send the supervisor an advice for the user, for the case that this process ends without a message."""
    _send({"advice": text})


def note_ending(reason: str, code: int = 1) -> None:
    """Send the supervisor the reason why the run ends; it kills this process if that takes too long."""
    _send({"reason": reason, "code": code})


def _send(message: dict[str, object]) -> None:
    if _pipe is not None:
        with suppress(OSError):  # the supervisor is gone; the kernel ends this process too
            os.write(_pipe, json.dumps(message).encode() + b"\n")


def supervised(main: Callable[[], int]) -> int:
    """Run a command in a child process; returns its exit code.

    Args:
        main: The command; returns its exit code or raises SystemExit.
    """
    if not sys.platform.startswith("linux"):
        return main()
    read_end, write_end = os.pipe()
    errors = _open_log()
    _prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans of the child become children of this process
    parent = os.getpid()
    # A signal that comes before the parent can forward it waits; it would end the parent alone.
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        os.close(read_end)
        _work(main, parent, write_end, errors)
    os.close(write_end)
    supervision = _Supervision(child, read_end)
    before = {number: signal.signal(number, supervision.forward) for number in FORWARDED}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    try:
        code, line = supervision.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _sweep()
        os.close(read_end)
    wrote = errors is not None and supervision.was_silent and errors.stat().st_size > 0
    if line:
        say(f"{line} (what it wrote last: {errors})" if wrote else line, sys.stderr)
    if errors is not None and not wrote:
        errors.unlink(missing_ok=True)
    return code


def _work(main: Callable[[], int], parent: int, pipe: int, errors: Path | None) -> NoReturn:
    """Run the command in the child process, send its exit code, and end the process."""
    global _pipe
    _pipe = pipe
    os.setpgid(0, 0)  # Ctrl-C reaches the parent only, which forwards it once
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
    """State of the child, as the parent knows it."""

    child: int
    pipe: int
    advice: str = ""
    reason: str = ""
    code: int | None = None
    was_silent: bool = False
    deadline: float = float("inf")
    unread: bytes = b""

    def forward(self, number: int, _: object) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.child, signal.SIGSTOP if number == signal.SIGTSTP else number)
        if number == signal.SIGTSTP:  # Ctrl-Z: both stop, and `fg` wakes both
            os.kill(os.getpid(), signal.SIGSTOP)

    def wait(self) -> tuple[int, str]:
        """Wait for the end of the child; returns its exit code, and an error line if it showed none."""
        exited: int | None = None
        status: int | None = None
        while status is None:
            status = _reap(self.child)
            exited = self._hear(0.0 if status is not None else TICK, exited)
            if status is None and time.monotonic() > self.deadline:
                with suppress(ProcessLookupError):
                    os.kill(self.child, signal.SIGKILL)
        if exited is not None:
            return exited, ""
        if self.reason:
            return self.code or 1, self._line(self.reason)
        self.was_silent = True
        return 1, self._line(f"the process of the run ended without an exception: {_how(status)}")

    def _line(self, text: str) -> str:
        return "error: " + "; ".join(part for part in (text, self.advice) if part)

    def _hear(self, timeout: float, exited: int | None) -> int | None:
        """Read the messages of the child; returns its exit code once it has sent one."""
        ready, _, _ = select.select([self.pipe], [], [], timeout)
        data = os.read(self.pipe, 65536) if ready else b""
        if ready and not data:
            time.sleep(TICK)  # the child closed its end, and will be reaped at once
        *lines, self.unread = (self.unread + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "advice" in message:
                self.advice = message["advice"]
            elif "reason" in message:
                if not self.reason:
                    self.reason, self.code = message["reason"], message["code"]
                    self.deadline = time.monotonic() + END_PATIENCE
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
    ('signal 9 (Killed)', 'exit code 1, which is how Ray ends it when one of its own processes is gone')
    """
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        return f"signal {-code} ({signal.strsignal(-code)})"
    return f"exit code {code}, which is how Ray ends it when one of its own processes is gone"


def _sweep() -> None:
    """Kill all processes that the child has started and left."""
    import psutil

    left = psutil.Process().children(recursive=True)
    for process in left:
        with suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(left, timeout=SWEEP_PATIENCE)


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
