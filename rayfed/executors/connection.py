"""Joins a Ray cluster, or starts one on this machine."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import ray

from rayfed.errors import ClusterError, ConfigError, one_line
from rayfed.executors.local_ray import (
    FEW_POOLS,
    GCS_START,
    GCS_START_SECONDS,
    POOLS,
    Health,
    loopback_only,
    quiet_ray,
    require_token,
)
from rayfed.terminal.stages import stage
from rayfed.terminal.supervisor import note_ending

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
        ConfigError: No cluster answers at the address within `timeout` seconds.
        ClusterError: Ray could not be started.
    """
    where = address_of(address)
    health = Health()
    joined = ray.is_initialized()
    if where != "local" and (address or not joined):
        probe(where, timeout)
    if joined:
        yield Connection(str(getattr(ray.get_runtime_context(), "dashboard_url", "") or ""), health)
        return
    stage("starting Ray on this machine" if where == "local" else f"joining Ray at {where}")
    quiet_ray()
    with own_sigterm_handler():
        if where == "local":
            health.begin()
            context = _start(num_cpus, num_gpus, dashboard, health)
        else:
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


@contextmanager
def own_sigterm_handler() -> Iterator[None]:
    """Keep the handler of SIGTERM of this process in a block that calls `ray.init`, and after it.

    Ray sets a handler of its own, which ends the process at once: without a message, with exit code 15, and
    in the middle of a round. Where this process has none, Ray's handler stays during the block, because it
    also ends the processes that Ray has started.
    """
    utils: Any = ray._private.utils
    set_handler, before = utils.set_sigterm_handler, signal.getsignal(signal.SIGTERM)
    if callable(before):
        utils.set_sigterm_handler = lambda handler: None
    try:
        yield
    finally:
        utils.set_sigterm_handler = set_handler
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def _ending(err: BaseException) -> tuple[str, int]:
    """The message and the exit code of a command that ends with this error, as in `guarded`."""
    if isinstance(err, KeyboardInterrupt | GeneratorExit):
        return "interrupted", 130
    return one_line(err) or type(err).__name__, 2 if isinstance(err, ConfigError) else 1


def _join(where: str) -> Any:
    try:
        return ray.init(address=where, logging_level=QUIET)
    except (ConnectionError, RuntimeError, ValueError) as err:
        reason = str(err).strip().splitlines()[0]
        raise ConfigError(f"cluster.address: cannot join {where!r}: {reason}") from err


def _start(num_cpus: int | None, num_gpus: int | None, dashboard: bool, health: Health) -> Any:
    require_token()
    os.environ.setdefault(GCS_START, GCS_START_SECONDS)
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


def probe(address: str, timeout: float) -> None:
    """Raise ConfigError unless a gRPC server, such as Ray's, answers within `timeout` seconds.

    Ray itself would wait for minutes for a server that accepts connections and never answers.
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
        raise ConfigError(
            f"cluster.address: no Ray cluster answers at {address!r} ({reason}); start a head node there "
            f"with `ray start --head --port={port}`, or leave cluster.address out"
        )
