"""The private parts of Ray that are used, in the one file that a new version of Ray can break."""

from __future__ import annotations

import os
import re
import secrets
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ray
from ray._private import ray_constants
from ray._raylet import (  # type: ignore[attr-defined]
    AuthenticationTokenLoader,
    Config,
    PlacementGroupID,
)
from ray.util.placement_group import PlacementGroup

LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Ray's switch, read when it is imported: 0 makes 127.0.0.1 the address of the node, as on Windows and macOS,
and then every process of Ray listens there only. `_node_ip_address="127.0.0.1"` does not do that: Ray
replaces it by the address of a network interface."""

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


@contextmanager
def own_sigterm_handler() -> Iterator[None]:
    """Keep the handler of SIGTERM of this process in a block that calls `ray.init`, and after it.

    Ray sets its own handler, which ends the process at once: without a message, with exit code 15, and
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


def placement_group_of(number: str) -> PlacementGroup:
    """The placement group with this id, in hexadecimal digits, as `placement_group_table` has it."""
    return PlacementGroup(PlacementGroupID.from_hex(number))
