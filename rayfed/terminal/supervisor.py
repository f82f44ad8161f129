"""Runs a command in a child process, so that its end is said and cleared up whatever ends it.

Ray ends the process that talks to it from C++ when its raylet or its gcs_server is gone, without an exception
and without a line. The command is therefore a small parent that imports nothing heavy: it forwards signals,
waits for the exit code of the child, says what happened where the child could not, and kills every process
that the child left behind.
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

END_PATIENCE = 15.0  # seconds the child has for its end after it said that the run is lost
EXIT_PATIENCE = 5.0  # seconds it has after it said its exit code
SWEEP_PATIENCE = 5.0  # seconds for what it left behind to die of SIGKILL
TICK = 0.2
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # of prctl(2)
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP, signal.SIGCONT)
_pipe: int | None = None  # the child's end


def note_advice(text: str) -> None:
    """Tell the supervisor what the user can do if this process ends without a word."""
    _send({"advice": text})


def note_ending(reason: str, code: int = 1) -> None:
    """Tell the supervisor that the run is over, and why; it ends this process if that takes too long."""
    _send({"reason": reason, "code": code})


def _send(message: dict[str, object]) -> None:
    if _pipe is not None:
        with suppress(OSError):  # the supervisor is gone; the kernel ends this process too
            os.write(_pipe, json.dumps(message).encode() + b"\n")


def supervised(main: Callable[[], int]) -> int:
    """The exit code of `main`, which runs in a child process.

    Args:
        main: The command; its exit code, or SystemExit as argparse raises it.
    """
    if not sys.platform.startswith("linux"):
        return main()
    read_end, write_end = os.pipe()
    errors = _open_log()
    _prctl(PR_SET_CHILD_SUBREAPER, 1)  # what loses its parent comes to us, so that we can end it
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        os.close(read_end)
        _work(main, parent, write_end, errors)
    os.close(write_end)
    supervision = _Supervision(child, read_end)
    before = {number: signal.signal(number, supervision.forward) for number in FORWARDED}
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
    """Do the work of the command in the child; ends the process."""
    global _pipe
    _pipe = pipe
    os.setpgid(0, 0)  # Ctrl-C reaches the parent only, which forwards it once
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    # Python writes to the screen; what C++ writes (Ray's stack dumps) goes to a file.
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
    """What the parent knows of its child."""

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
        """Wait for the child; the exit code, and the line to say where the child said none."""
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
        """Read what the child says; its exit code, once it is known."""
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
    """Collect processes that ended; the wait status of the child, once it is among them."""
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == child:
                return status
            if pid == 0:
                return None
    return 1 << 8  # somebody else collected it


def _how(status: int) -> str:
    """The end of a process in words.

    >>> _how(9), _how(256)
    ('signal 9 (Killed)', 'exit code 1, which is how Ray ends it when one of its own processes is gone')
    """
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        return f"signal {-code} ({signal.strsignal(-code)})"
    return f"exit code {code}, which is how Ray ends it when one of its own processes is gone"


def _sweep() -> None:
    """End every process that the child started and left."""
    import psutil

    left = psutil.Process().children(recursive=True)
    for process in left:
        with suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(left, timeout=SWEEP_PATIENCE)


def _open_log() -> Path | None:
    """A file for what C++ writes to standard error; none where no temporary file can be made."""
    try:
        handle, name = tempfile.mkstemp(prefix="rayfed-stderr-", suffix=".log")
    except OSError:
        return None
    os.close(handle)
    return Path(name)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)
