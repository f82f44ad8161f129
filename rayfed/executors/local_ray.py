"""Ray on this machine: reachable from this machine and by this user only, with a watch on its processes."""

from __future__ import annotations

import math
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._private import ray_constants
from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

from rayfed.errors import ClusterError
from rayfed.terminal.supervisor import note_ending

LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Ray's switch, read when it is imported: 0 makes 127.0.0.1 the address of the node, as on Windows and macOS,
and then every process of Ray listens there only. `_node_ip_address="127.0.0.1"` does not do that: Ray
replaces it by the address of a network interface."""

GCS_START = "RAY_gcs_server_port_wait_time_s"
GCS_START_SECONDS = "20"
"""Ray's variable for the seconds in which the gcs_server must start, and our value. Python code, such as the
watch on Ray's processes, cannot run during this wait; Ray's own value is 30."""

POOLS = "MALLOC_ARENA_MAX"
FEW_POOLS = "2"
"""glibc's variable for the number of pools from which the threads of a process take memory, and our value. By
default each of the about 30 threads of a driver or a client actor has a pool of its own, up to 8 for each
core, and the holes in these pools grow over thousands of rounds."""

PILLARS = ("gcs_server", "raylet")  # processes without which Ray cannot continue
LOOK_EVERY = 0.25  # seconds between two checks of them
BY_RAY = re.compile(
    r"\s*(\[\d{4}-\d\d-\d\d [\d:,]+ [A-Z] \d+ \d+\]|\*\*\* |PC: @|@ +0x|\[failure_signal|/\S+\.so\S*[(\[])"
)
"""Matches lines of Ray's C++ log and of its stack dumps, which are also in the files of its session."""


@contextmanager
def loopback_only() -> Iterator[None]:
    """Make a Ray cluster that is started in the block listen on 127.0.0.1 only."""
    before = os.environ.get(LOOPBACK)
    allowed = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    os.environ[LOOPBACK] = "0"  # inherited by the processes of Ray
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = allowed
        if before is None:
            del os.environ[LOOPBACK]
        else:
            os.environ[LOOPBACK] = before


def require_token() -> None:
    """Make Ray require a token, which only this user can read.

    The token is that of RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH if one of them is set, else that of
    ~/.ray/auth_token, which is created if it is missing. If that file cannot be written, the token is set in
    the environment of this process, which its child processes inherit.
    """
    os.environ["RAY_AUTH_MODE"] = "token"
    Config.initialize("")  # Ray read the environment when it was imported
    if os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH"):
        return
    try:
        file = Path.home() / ".ray" / "auth_token"
        file.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(handle, "w") as stream:
                stream.write(secrets.token_hex(32))
        file.chmod(0o600)  # Ray itself makes it readable for everybody
        usable = bool(file.read_text().strip())
    except (OSError, RuntimeError):  # RuntimeError: no home
        usable = False
    if not usable:
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    AuthenticationTokenLoader.instance().reset_cache()


class Health:
    """Checks whether the gcs_server and the raylet that this process started are still running.

    Attributes:
        lost: Message about the one that ended; empty while both run, and for a cluster that was joined.
    """

    def __init__(self) -> None:
        self.lost = ""
        self._ended = threading.Event()
        self._seen: dict[int, tuple[str, psutil.Process]] = {}
        self._thread = threading.Thread(target=self._look, name="rayfed-health", daemon=True)
        self._before = {child.pid for child in psutil.Process().children()}

    def begin(self) -> None:
        """Begin the checks; for a cluster that this process has started."""
        self._thread.start()

    def end(self) -> None:
        """End the checks, before Ray is ended on purpose."""
        self._ended.set()

    def reason(self, otherwise: str) -> str:
        """Message for a failure: the end of a process, which is noticed a moment later, or `otherwise`."""
        if self._thread.is_alive():
            self._thread.join(4 * LOOK_EVERY)
        return self.lost or otherwise

    def wait(
        self, reference: Any, timeout: float = math.inf, ended: Callable[[], bool] = lambda: False
    ) -> None:
        """Wait until an object, or the next one of a streaming call, is ready.

        Args:
            reference: The object, or the streaming call.
            timeout: Largest number of seconds to wait.
            ended: Says whether to stop waiting before that.

        Raises:
            ClusterError: The gcs_server or the raylet of this Ray ended.
        """
        deadline = time.monotonic() + timeout
        while not ray.wait([reference], timeout=2 * LOOK_EVERY, fetch_local=False)[0]:
            if self.lost:
                raise ClusterError(self.lost)
            if time.monotonic() > deadline or ended():
                return

    def _look(self) -> None:
        while not self._ended.wait(LOOK_EVERY):
            gone = self._gone()
            if gone and not self._ended.is_set():
                self.lost = (
                    f"Ray's {gone} ended, without which nothing can go on (a raylet also ends when one "
                    f"of its agents does; `dmesg` says whether memory was short)"
                )
                note_ending(self.lost, lost=True)
                return

    def _gone(self) -> str:
        """Name of the first of these processes that has ended; empty if none has."""
        for child in psutil.Process().children() if len(self._seen) < len(PILLARS) else ():
            with suppress(psutil.Error):
                if child.pid not in {*self._before, *self._seen} and child.name() in PILLARS:
                    self._seen[child.pid] = child.name(), child
        for name, process in self._seen.values():
            with suppress(psutil.Error):
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    continue
            return name
        return ""


def quiet_ray() -> None:
    """Remove Ray's own log lines and stack dumps from the screen; output of client code is still shown."""
    worker: Any = ray._private.worker
    show = worker.print_worker_logs
    if getattr(show, "quiet", False):
        return

    def print_worker_logs(data: Mapping[str, Any], file: Any, ignore_prefix: bool = False) -> None:
        lines = without_rays(data["lines"]) if data.get("pid") not in ("raylet", "autoscaler") else []
        if lines:
            show({**data, "lines": lines}, file, ignore_prefix)

    print_worker_logs.quiet = True  # type: ignore[attr-defined]
    worker.print_worker_logs = print_worker_logs


def without_rays(lines: Sequence[str]) -> list[str]:
    """The lines that were not written by Ray itself.

    >>> without_rays(["loss 0.5", "[2026-11-21 23:04:17,377 C 18105 18148] core_worker.cc:515: Check failed"])
    ['loss 0.5']
    """
    kept = [line for line in lines if not BY_RAY.match(line)]
    return kept if any(line.strip() for line in kept) else []
