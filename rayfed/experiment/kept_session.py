"""The screen and the Ray that the runs of a Python process have in common."""

from __future__ import annotations

import atexit
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from rayfed.executors.kinds.base import kind_of
from rayfed.terminal.console import screen_of, use_screen

if TYPE_CHECKING:
    from rayfed.config.schema import Config
    from rayfed.engine.session import Session

QUIETLY = {"figures": False, "tensorboard": False}
"""Keys of what a run leaves out if its folder is temporary."""


class Shown:
    """Shows what is done in the block; gives whether nothing is shown."""

    def __init__(self, quiet: bool | None) -> None:
        is_shown = sys.stdout.isatty() or "ipykernel" in sys.modules
        self._quiet = not is_shown if quiet is None else quiet
        self._shown = use_screen(screen_of(self._quiet))

    def __enter__(self) -> bool:
        self._shown.__enter__()
        return self._quiet

    def __exit__(self, *error: Any) -> None:
        self._shown.__exit__(*error)
        if isinstance(error[1], KeyboardInterrupt):  # its traceback has dozens of lines of RayFed
            short = KeyboardInterrupt(*error[1].args)
            for note in getattr(error[1], "__notes__", ()):
                short.add_note(note)
            raise short from None


_kept: dict[str, Any] = {}
"""The session of this process, and the keys of `cluster` that its Ray was started with."""


def session_of(config: Config) -> Session:
    """The session whose Ray and actors the runs of this process use one after the other.

    It ends with the process, or when a run asks for another Ray.
    """
    from rayfed.engine.session import Session

    cluster = config.cluster
    if not kind_of(cluster).needs_cluster:
        return Session()
    wanted = (cluster.address, cluster.num_cpus, cluster.num_gpus, cluster.dashboard)
    old = _kept.get("session")
    if old is not None and (_kept["of"] != wanted or old.lost):
        end_session()
    if "session" not in _kept:
        stack = ExitStack()
        _kept.update(of=wanted, stack=stack, session=stack.enter_context(Session()))
        if not _kept.get("watched"):
            _kept["watched"] = True
            import ray  # noqa: F401 - registers its own end first, so that ours comes before it

            atexit.register(end_session)
    return _kept["session"]


def end_session() -> None:
    """End the Ray that this process started for its runs, if there is one."""
    stack = _kept.pop("stack", None)
    _kept.pop("session", None)
    if stack is not None:
        stack.close()
