"""Joins a Ray cluster, or starts one on this machine.

Ray on this machine: reachable from this machine and by this user only, with a watch on its processes.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import socket
import ssl
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import ray

from rayfed.errors import ClusterError, ConfigError, RayFedError, UnreachableError, one_line
from rayfed.executors.memory_limits import OWN_MEMORY, free_memory, machine_memory
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

PROBE_EVERY = 5.0
"""Seconds between two checks of the head of a cluster that was joined."""
PROBE_PATIENCE = 3.0
"""Seconds in which it must answer."""
PROBES = 3
"""Checks one after the other without an answer, after which it is lost: after at most 24 seconds."""


class Health:
    """Checks whether the gcs_server and the raylet that were started here, or the head joined, still run.

    Attributes:
        lost: Message about the one that ended; empty while they run.
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

    def begin_joined(self, head: str) -> None:
        """Begin the checks of the head of a cluster that was joined. Args: head: its address, host:port."""
        self._thread = threading.Thread(
            target=self._look_at_head, args=(head,), name="rayfed-health", daemon=True
        )
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
                    f"of its agents does; `dmesg` says whether memory was short){_full(session_folder())}"
                )
                note_ending(self.lost, lost=True)
                return

    def _look_at_head(self, head: str) -> None:
        failed = 0
        while failed < PROBES and not self._ended.wait(PROBE_EVERY):
            try:
                probe(head, PROBE_PATIENCE)
                failed = 0
            except ConfigError:
                failed += 1
        if not self._ended.is_set():
            self.lost = (
                f"the head of the Ray cluster at {head} has not answered for "
                f"{PROBES * PROBE_EVERY:g} s, without which nothing can go on"
            )
            note_ending(self.lost, lost=True)

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


FULL = 100_000_000  # free bytes of a disk below which processes of Ray end because they cannot write


def _full(folder: str) -> str:
    """A part of a message: that the disk of Ray's folder is full; empty: it is not."""
    there = next(path for path in (Path(folder), *Path(folder).parents) if path.exists())
    free = shutil.disk_usage(there).free
    return f"; the disk of its folder {there} has only {free / 1e6:.0f} MB free" if free < FULL else ""


# The first bytes of an HTTP/2 connection (preface and empty settings), to which every server replies.
HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
QUIET = logging.CRITICAL  # level of Ray's log on the screen; its session folder has the whole log
SHORT_FOLDER = "/tmp"
LONGEST_FOLDER = 107 - len(
    f"/rayfed-{os.getuid()}/r/session_2026-01-31_23-59-59_123456_4194304/sockets/plasma_store"
)
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
            health.begin_joined(ray.get_runtime_context().gcs_address)
    url = str(context.dashboard_url or "")
    try:
        yield Connection(url if where == "local" or _listens(url) else "", health)
    except BaseException as err:
        note_ending(*_ending(err))
        raise
    finally:
        health.end()
        if not health.lost:  # otherwise Ray waits a minute for the lost process, then ends this one
            ray.shutdown()


def _listens(url: str) -> bool:
    """Whether a dashboard answers here; Ray names 127.0.0.1 on all nodes, where it is that of the head."""
    host, _, port = url.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=PROBE_PATIENCE):
            return True
    except (OSError, ValueError):
        return False


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
            f"{said}; it answers, so either this machine is no node of it (run the command on a node, or "
            f"send it with `ray job submit`), or RAY_AUTH_MODE or the token (RAY_AUTH_TOKEN, "
            f"RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token) differs from the cluster's"
        ) from err


def _start(num_cpus: int | None, num_gpus: int | None, dashboard: bool, health: Health) -> Any:
    require_token()
    folder = session_folder()
    if full := _full(folder):
        raise ClusterError(f"Ray could not be started on this machine{full}; free some, or set RAY_TMPDIR")
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
                _temp_dir=folder,
                **_limited_memory(),
            )
    except Exception as err:  # Ray raises errors of several classes here
        cause = f"{type(err).__name__}: {one_line(err)}"
        raise ClusterError(health.reason(f"Ray could not be started on this machine: {cause}")) from err


LEAST_STORE = 80_000_000
"""Bytes that Ray wants at least for its object store."""


def _limited_memory() -> dict[str, Any]:
    """Memory of a Ray that is started here where a limit holds that Ray does not see, such as one of Slurm.

    Ray looks at the memory of the machine and of the outermost control group only.
    """
    free = free_memory()
    if free > 0.9 * machine_memory():  # no limit of which Ray does not know
        return {}
    store = max(int((1 - OWN_MEMORY) * free), LEAST_STORE)
    return {"_memory": max(int(free) - store, 0), "object_store_memory": store}


def session_folder() -> str:
    """Folder of a Ray that is started here, below a folder that only this user can enter.

    Ray lets everybody write into its folders, so that others could change the code of a job there. It is
    below RAY_TMPDIR or TMPDIR, unless their names are too long for sockets.

    Raises:
        ClusterError: No folder can be made there.
    """
    chosen = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or SHORT_FOLDER
    base = SHORT_FOLDER if len(os.fsencode(chosen)) > LONGEST_FOLDER else chosen
    private = Path(base, f"rayfed-{os.getuid()}")
    try:
        with suppress(FileExistsError):
            private.mkdir(mode=0o700, parents=True)
        found = private.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():  # somebody else took the name
            private = Path(tempfile.mkdtemp(prefix="rayfed-", dir=base))
        private.chmod(0o700)
    except OSError as err:
        raise ClusterError(
            f"Ray could not be started here: cannot make a folder in {base!r} ({err.strerror}); set "
            f"RAY_TMPDIR to a folder that you can write to"
        ) from err
    return str(private / "r")


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
        with (
            socket.create_connection((host, port), timeout=min(timeout, 10.0)) as plain,
            secured(plain) as stream,
        ):
            stream.sendall(HTTP2_HELLO)
            reason = "" if stream.recv(1) else "the connection was closed"
    except OSError as err:  # ssl.SSLError is one
        reason = str(err)
    if reason:
        raise UnreachableError(
            f"cluster.address: no Ray cluster answers at {address!r} ({reason}); start a head node there "
            f"with `ray start --head --port={port}`, or set cluster.address=null"
        )


@contextmanager
def secured(plain: socket.socket) -> Iterator[socket.socket]:
    """The connection with TLS, as Ray's own are, where RAY_USE_TLS is on; else as it is.

    Raises:
        ConfigError: A file of Ray's certificates cannot be read.
    """
    if os.environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
        yield plain
        return
    context = ssl.create_default_context()
    context.check_hostname = False  # Ray's certificates name no address of a node
    context.set_alpn_protocols(["h2"])
    names = ("RAY_TLS_CA_CERT", "RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY")
    files = {name: os.environ.get(name, "") for name in names}
    try:
        context.load_verify_locations(files[names[0]])
        context.load_cert_chain(files[names[1]], files[names[2]])
    except OSError as err:
        given = ", ".join(f"{name}={path}" for name, path in files.items())
        raise ConfigError(f"RAY_USE_TLS is on, but its certificates cannot be read ({err}): {given}") from err
    with context.wrap_socket(plain) as stream:
        yield stream
