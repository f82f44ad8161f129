"""Who may write in a folder: one command at a time, and with it the process that it lets write the rounds.

A command holds COMMAND until its end. The process that writes rounds, which with Ray is another one, holds
WRITER. Whoever wants the folder needs both, so a driver that outlives its command protects what it writes.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rayfed.errors import ConfigError

COMMAND, WRITER = ".lock", ".writer"
LOCK_PATIENCE, LOCK_PAUSE = 20.0, 0.05  # seconds
MOMENT = 1.0  # seconds for which somebody who only asks whether the folder is locked may hold a lock


@contextmanager
def locked(folder: Path, name: str, patience: float | None = None) -> Iterator[None]:
    """Hold a lock of a folder as long as this lasts.

    Args:
        folder: An existing folder.
        name: COMMAND or WRITER.
        patience: Seconds to wait for whoever holds it; None: as long as a killed driver may need to end.

    Raises:
        ConfigError: Another process holds it, or it cannot be locked.
    """
    number = _acquire(folder, name, LOCK_PATIENCE if patience is None else patience)
    try:
        yield
    finally:
        os.close(number)


def _acquire(folder: Path, name: str, patience: float) -> int:
    until = time.monotonic() + patience
    while True:
        try:
            number = _try(folder / name)
        except FileNotFoundError:
            raise ConfigError(f"output: {str(folder)!r} was removed by another process; run again") from None
        except OSError as err:
            raise ConfigError(
                f"output: {folder / name} cannot be locked: {err.strerror}; if it is not yours, remove it"
            ) from err
        if number is not None:
            return number
        if time.monotonic() > until:
            raise ConfigError(f"output: another process is running in {str(folder)!r}; wait or stop it")
        time.sleep(LOCK_PAUSE)


def _try(path: Path) -> int | None:
    """Lock a file, which is made if it is not there; None where somebody else has the lock."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    number, held = os.open(path, flags, 0o666), False
    try:
        if not stat.S_ISREG(os.fstat(number).st_mode):
            raise OSError(errno.EINVAL, "it is not a file")
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # A run that is refused removes its new folder and the lock with it; then this one protects nothing.
        held = os.path.samestat(os.fstat(number), path.lstat())
    except (BlockingIOError, FileNotFoundError):
        return None
    finally:
        if not held:
            os.close(number)
    return number if held else None


def is_locked(folder: Path) -> bool:
    """Whether a process of this machine works in a folder."""
    return any(_is_held(folder / name) for name in (COMMAND, WRITER))


def _is_held(path: Path) -> bool:
    try:
        number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(number, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(number)
    return False
