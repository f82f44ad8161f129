"""Says which command may write in the folder of a run: a marker with its token, and two locks.

The folder belongs to the run whose marker is in it, with all that it holds. At any time one command, and one
process that writes its rounds, may use it: a command holds the lock COMMAND until it ends. The process that
writes rounds (with Ray: the driver actor) holds the lock WRITER. A new command needs both, so it has to wait
for a driver that still writes after its command has ended. The marker holds the token of the command that
wrote in the folder last.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from rayfed.errors import ConfigError
from rayfed.record.readers import DamagedError, read_json

MARKER = ".rayfed-run.json"
FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Mark:
    """The content of a marker.

    Attributes:
        kind: run or study.
        claim: Random text, new for every command that wrote into the folder.
        format: Version of the format of the marker.
    """

    kind: str
    claim: str
    format: int = FORMAT


def read_mark(folder: Path) -> Mark | None:
    """The marker of a folder; None if there is none.

    Raises:
        DamagedError: The marker was changed or has an unknown format.
    """
    path = folder / MARKER
    if not os.path.lexists(path):
        return None
    tree = read_json(path, dict)
    types = {"kind": str, "claim": str, "format": int}
    if set(tree) != set(types) or any(type(tree[key]) is not kind for key, kind in types.items()):
        raise DamagedError(f"{path} cannot be read: it is not the marker of a run")
    if tree["format"] != FORMAT:
        raise DamagedError(f"{path}: format {tree['format']}, and this version reads {FORMAT}")
    return Mark(**tree)


def write_mark(folder: Path, mark: Mark) -> None:
    """Write the marker, atomically, and onto the disk."""
    temporary = folder / f"{MARKER}.tmp"
    with temporary.open("w", encoding="ascii") as file:
        file.write(json.dumps(asdict(mark)) + "\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(folder / MARKER)


COMMAND, WRITER = ".lock", ".writer"
LOCK_PATIENCE = 20.0  # seconds to wait for a lock
LOCK_PAUSE = 0.05  # seconds between two attempts
MOMENT = 1.0  # seconds to wait where only `is_locked` of another process can hold a lock


@contextmanager
def hold_lock(folder: Path, name: str, patience: float | None = None) -> Iterator[None]:
    """Hold a lock of a folder while the block runs.

    Args:
        folder: An existing folder.
        name: COMMAND or WRITER.
        patience: Seconds to wait for another process; None: as long as a killed driver may need to end.

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
                f"output: {folder / name} cannot be locked: {err.strerror}; choose another folder"
            ) from err
        if number is not None:
            return number
        if time.monotonic() > until:
            raise ConfigError(f"output: another process is running in {str(folder)!r}; wait or stop it")
        time.sleep(LOCK_PAUSE)


def _try(path: Path) -> int | None:
    """Lock a file, created if needed; its descriptor, or None if another process holds the lock."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    number = os.open(path, flags, 0o666)
    held = False
    try:
        if not stat.S_ISREG(os.fstat(number).st_mode):
            raise OSError(errno.EINVAL, "it is not a file")
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # A refused run removes its new folder and the lock file; a lock on that file protects nothing.
        held = os.path.samestat(os.fstat(number), path.lstat())
    except (BlockingIOError, FileNotFoundError):
        return None
    finally:
        if not held:
            os.close(number)
    return number if held else None


def is_locked(folder: Path) -> bool:
    """Whether a process of this machine holds a lock of the folder."""
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
