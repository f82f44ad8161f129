"""Joins a Ray cluster, or starts one on this machine.

Ray on this machine: reachable from this machine and by this user only, with a watch on its processes.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import psutil
import ray

from rayfed.errors import ClusterError, ConfigError, RayFedError, UnreachableError, one_line
from rayfed.executors.ray_private import loopback_only, own_sigterm_handler, quiet_ray, require_token
from rayfed.terminal.console import stage
from rayfed.terminal.supervisor import note_ending

log = logging.getLogger(__name__)

GCS_START = "RAY_gcs_server_port_wait_time_s"
GCS_START_SECONDS = "20"
"""Ray's variable for the seconds in which the gcs_server must start, and our value. Python code, such as the
watch on Ray's processes, cannot run during this wait; Ray's own value is 30."""

NICE = "RAY_worker_niceness"
AS_THE_COMMAND = "0"
"""Ray's variable for what is added to the niceness of its workers, and our value: clients have the priority
of the command. Ray's own value is 15, with which they get what other programs of a shared machine leave."""

POOLS = "MALLOC_ARENA_MAX"
FEW_POOLS = "2"
"""glibc's variable for the number of pools from which the threads of a process take memory, and our value. By
default each of the about 30 threads of a driver or a client actor has its own pool, up to 8 for each
core, and the holes in these pools grow over thousands of rounds."""

PILLARS = ("gcs_server", "raylet")  # processes without which Ray cannot continue
LOOK_EVERY = 0.25  # seconds between two checks of them


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
            gone = self._ended_process()
            if gone and not self._ended.is_set():
                self.lost = (
                    f"Ray's {gone} ended, without which nothing can go on (a raylet also ends when one "
                    f"of its agents does; `dmesg` says whether memory was short)"
                )
                note_ending(self.lost, lost=True)
                return

    def _ended_process(self) -> str:
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


# The first bytes of an HTTP/2 connection (preface and empty settings), to which every server replies.
HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
QUIET = logging.CRITICAL  # level of Ray's log on the screen; its session folder has the whole log
SHORT_FOLDER = "/tmp/ray"
LONGEST_FOLDER = 107 - len("/ray/session_2026-01-31_23-59-59_123456_4194304/sockets/plasma_store")
"""Bytes of a temporary folder in which Ray's sockets have names of at most 107 bytes, as Linux asks."""


def address_of(address: str | None) -> str:
    """Address of the cluster for `cluster.address`; `local`: none is given, so Ray is started here."""
    return address or os.environ.get("RAY_ADDRESS") or "local"


def is_our_own(address: str | None) -> bool:
    """Whether `connection` would start Ray on this machine."""
    return address_of(address) == "local" and not ray.is_initialized()


@dataclass(frozen=True)
class Connection:
    """A Ray cluster to which this process is connected.

    Attributes:
        url: Address of the dashboard; empty if there is none.
        health: Watches the processes of a cluster that was started here.
    """

    url: str
    health: Health


@contextmanager
def connection(
    address: str | None,
    num_cpus: int | None = None,
    num_gpus: int | None = None,
    dashboard: bool = True,
    timeout: float = 30.0,
) -> Iterator[Connection]:
    """Join the cluster at `address` or RAY_ADDRESS, or else start one on this machine.

    A cluster that is started here listens on the loopback address only, requires a token, and is ended after
    the block. One that was joined keeps running.

    Raises:
        UnreachableError: No cluster answers at the address within `timeout` seconds.
        ConfigError: The address is none, or the cluster cannot be joined.
        ClusterError: Ray could not be started.
    """
    where = address_of(address)
    health = Health()
    check_address(address, timeout)
    if ray.is_initialized():
        yield Connection(str(getattr(ray.get_runtime_context(), "dashboard_url", "") or ""), health)
        return
    stage("starting Ray on this machine" if where == "local" else f"joining Ray at {where}")
    quiet_ray()
    with own_sigterm_handler():
        if where == "local":
            health.begin()
            context = _start(num_cpus, num_gpus, dashboard, health)
        else:
            for key, number in (("num_cpus", num_cpus), ("num_gpus", num_gpus)):
                if number is not None:
                    log.warning(
                        "cluster.%s=%s is for a Ray that is started here; the one at %s keeps its own number",
                        *(key, number, where),
                    )
            context = _join(where)
    try:
        yield Connection(str(context.dashboard_url or ""), health)
    except BaseException as err:
        note_ending(*_ending(err))
        raise
    finally:
        health.end()
        if not health.lost:  # otherwise Ray waits a minute for the lost process, then ends this one
            ray.shutdown()


def _ending(err: BaseException) -> tuple[str, int]:
    """The message and the exit code of a command that ends with this error, as in `run_guarded`."""
    if isinstance(err, KeyboardInterrupt | GeneratorExit):
        return "interrupted", 130
    return one_line(err) or type(err).__name__, err.exit_code if isinstance(err, RayFedError) else 1


def _join(where: str) -> Any:
    try:
        return ray.init(address=where, logging_level=QUIET)
    except (ConnectionError, RuntimeError, ValueError) as err:
        reason = str(err).strip().splitlines()[0]
        said = f"cluster.address: cannot join {where!r}: {reason}"
        if not isinstance(err, ConnectionError):  # such as other versions of Ray or Python
            raise ConfigError(said) from err
        if where == "auto":
            raise UnreachableError(said) from err
        raise ConfigError(  # `probe` had an answer
            f"{said}; it answers, so RAY_AUTH_MODE or the token (RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or "
            f"~/.ray/auth_token) may differ from the cluster's"
        ) from err


def _start(num_cpus: int | None, num_gpus: int | None, dashboard: bool, health: Health) -> Any:
    require_token()
    os.environ.setdefault(GCS_START, GCS_START_SECONDS)
    os.environ.setdefault(NICE, AS_THE_COMMAND)
    os.environ.setdefault(POOLS, FEW_POOLS)  # inherited by the processes of Ray
    try:
        with loopback_only():
            return ray.init(
                address="local",
                num_cpus=num_cpus,
                num_gpus=num_gpus,
                include_dashboard=dashboard,
                logging_level=QUIET,
                _temp_dir=session_folder(),
            )
    except Exception as err:  # Ray raises errors of several classes here
        cause = f"{type(err).__name__}: {one_line(err)}"
        raise ClusterError(health.reason(f"Ray could not be started on this machine: {cause}")) from err


def session_folder() -> str | None:
    """Folder of a Ray that is started here, if the temporary folder is too long; None: Ray chooses."""
    chosen = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or ""
    return SHORT_FOLDER if len(os.fsencode(chosen)) > LONGEST_FOLDER else None


def check_address(address: str | None, timeout: float) -> None:
    """Check that a cluster answers that `connection` would join; nothing is started or joined.

    Args:
        address: `cluster.address`; None: that of RAY_ADDRESS, or no cluster is joined.
        timeout: Seconds to wait for it.

    Raises:
        UnreachableError: None answers.
        ConfigError: The address is none.
    """
    where = address_of(address)
    if where != "local" and (address or not ray.is_initialized()):
        probe(where, timeout)


def probe(address: str, timeout: float) -> None:
    """Check that a gRPC server, such as Ray's, answers within `timeout` seconds.

    Ray itself would wait for minutes for a server that accepts connections and never answers.

    Raises:
        UnreachableError: None does.
        ConfigError: The address is not host:port.
    """
    if address == "auto":
        return
    parts = urlsplit(address if "://" in address else f"//{address}")
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or not port:
        raise ConfigError(f"cluster.address: {address!r} is not host:port")
    try:
        with socket.create_connection((host, port), timeout=min(timeout, 10.0)) as stream:
            stream.sendall(HTTP2_HELLO)
            reason = "" if stream.recv(1) else "the connection was closed"
    except OSError as err:
        reason = str(err)
    if reason:
        raise UnreachableError(
            f"cluster.address: no Ray cluster answers at {address!r} ({reason}); start a head node there "
            f"with `ray start --head --port={port}`, or set cluster.address=null"
        )
