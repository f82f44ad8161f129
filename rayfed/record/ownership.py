"""Records which files in a folder were written by a run, and which command may write there.

A marker says that the folder belongs to a run, and a list names the run's files. A name is added to the
list before its file is written, and an existing file that is not in the list is never overwritten. Every
file in the list may therefore be removed, and no other file.

The marker also says which command wrote in the folder last. At any time one command, and one process that
writes its rounds, may use the folder: a command holds the lock COMMAND until it ends. The process that
writes rounds (with Ray: the driver actor) holds the lock WRITER. A new command needs both, so it has to
wait for a driver that still writes after its command has ended.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath

from rayfed.errors import ConfigError, StorageError
from rayfed.record.readers import DamagedError, open_file, read_json
from rayfed.user_files import DocumentError, parse_json

MARKER = ".rayfed-run.json"
FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Mark:
    """The content of a marker.

    Attributes:
        kind: run, sweep or job.
        claim: Random text, new for every command that wrote into the folder.
        format: Version of the format of marker and list.
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
    """Write the marker, atomically."""
    replace_text(folder / MARKER, json.dumps(asdict(mark)) + "\n")


def replace_text(path: Path, text: str) -> None:
    """Write an ASCII file atomically, without adding it to the list of the run's files."""
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("w", encoding="ascii") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


NAMES = ".rayfed-files"
SAVED = "!checkpoint"
"""A line of the list that names no file: the folder has once had a complete checkpoint."""

LONG = 1_000_000
"""Bytes of a list that is not worth tidying during a run."""


class InTheWayError(ConfigError, StorageError):
    """A file that the run did not write has the name of one that it must write; it is left unchanged."""


_unowned: set[str] = set()
"""Files that this process wrote into folders without a marker."""


class FileList:
    """The list of one folder, with lines `+"file"`, `+"folder/"`, and `-"file"` for a removed file."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.path = root / NAMES
        self._known: dict[str, None] = {}
        self._read = 0  # bytes of the list that were read
        self._inode = -1

    def all(self) -> list[str]:
        """All names, in the order in which they were added; names of folders end with a slash."""
        try:
            with open_file(self.path) as file:
                facts = os.fstat(file.fileno())
                if facts.st_ino != self._inode or facts.st_size < self._read:
                    self._forget(facts.st_ino)
                file.seek(self._read)
                data = file.read()
        except OSError:
            self._forget(-1)
            return []
        whole = data.rfind(b"\n") + 1  # the rest is still being written, or was cut off by a crash
        self._read += whole
        for line in data[:whole].splitlines():
            self._take(line)
        return list(self._known)

    def _forget(self, inode: int) -> None:
        self._known = {}
        self._read = 0
        self._inode = inode

    def _take(self, line: bytes) -> None:
        name = SAVED if line.decode("ascii", "replace") == SAVED else ""
        with suppress(DocumentError):
            name = name or parse_json(line[1:])
        if not isinstance(name, str) or not _is_below(name):
            return
        if line[:1] == b"-":
            self._known.pop(name, None)
        else:
            self._known[name] = None

    def has(self, name: str) -> bool:
        return name in self._known or name in self.all()

    def add(self, name: str) -> None:
        self._append("+" + json.dumps(name))

    def drop(self, name: str) -> None:
        self._append("-" + json.dumps(name))

    def fact(self, line: str) -> None:
        self._append(line)

    def _append(self, line: str) -> None:
        # A line break on both sides: a line that a crash has cut off does not merge with the next one.
        _refuse_other(self.path)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        number = os.open(self.path, flags, 0o666)
        try:
            os.write(number, f"\n{line}\n".encode("ascii"))
        finally:
            os.close(number)
        self.all()

    def tidy(self) -> None:
        """Remove names of files that do not exist any more. The caller holds the locks of the folder."""
        there = [name for name in self.all() if name == SAVED or os.path.lexists(self.root / name)]
        replace_text(self.path, "".join(f"{n}\n" if n == SAVED else f"+{json.dumps(n)}\n" for n in there))
        self.all()

    def shrink(self) -> None:
        """Tidy a long list of which most lines are about removed files. The caller holds the locks."""
        if self._read > LONG and self._read > 4 * sum(map(len, self._known)):
            self.tidy()

    def clear(self) -> None:
        """Begin a new list."""
        replace_text(self.path, "")
        self.all()


def _is_below(name: str) -> bool:
    """Whether a name in a list denotes a path inside the folder."""
    parts = PurePosixPath(name).parts
    return bool(parts) and not name.startswith("/") and ".." not in parts and "\0" not in name


_lists: dict[Path, FileList] = {}
_lock = threading.Lock()


def names_of(root: Path) -> FileList:
    """The list of a folder that has a marker."""
    root = root.absolute()
    with _lock:
        return _lists.setdefault(root, FileList(root))


def forget_names(root: Path) -> None:
    """Read the list of a folder from disk at the next use: another command may have replaced the folder."""
    with _lock:
        _lists.pop(root.absolute(), None)


def owner(path: Path) -> Path | None:
    """The nearest parent folder with a marker; None if there is none."""
    return next((p for p in path.absolute().parents if os.path.lexists(p / MARKER)), None)


def note(path: Path) -> None:
    """Add a file that is about to be written to the list of its run.

    Raises:
        InTheWayError: The file exists and is not in the list, or a folder above it is a link.
        OSError: The list cannot be written.
    """
    root = owner(path)
    if root is None:
        _unowned.add(str(path.absolute()))
        return
    names = names_of(root)
    name = path.absolute().relative_to(root).as_posix()
    _refuse_links(root, path)
    _refuse_other(path)
    if names.has(name):
        return
    if os.path.lexists(path):
        raise InTheWayError(
            f"cannot write {path}: the file exists and was not written by this run; move it away"
        )
    names.add(name)


def _refuse_other(path: Path) -> None:
    """Raise InTheWayError where something is in the place of a file that is none."""
    if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
        what = "a link or a folder" if path.is_symlink() or path.is_dir() else "a pipe or a device"
        raise InTheWayError(f"cannot write {path}: {what} is in its place; move it away")


def make_folder(path: Path) -> None:
    """Create a folder and its parents, and add the new ones to the list of the run.

    Raises:
        InTheWayError: A folder above it within the run is a link.
        OSError: It cannot be created.
    """
    root = owner(path)
    if root is None:
        path.mkdir(parents=True, exist_ok=True)
        return
    _refuse_links(root, path / "file")
    names = names_of(root)
    below = path.absolute().relative_to(root)
    for part in [*reversed(below.parents), below][1:]:
        if not (root / part).is_dir():
            names.add(f"{part.as_posix()}/")
            (root / part).mkdir(exist_ok=True)


def remove(path: Path) -> None:
    """Remove a file if this run wrote it; any other file is left unchanged."""
    root = owner(path)
    if root is None:
        if str(path.absolute()) in _unowned:
            unlink_plain(path)
        return
    names = names_of(root)
    name = path.absolute().relative_to(root).as_posix()
    if names.has(name) and no_link_above(root, path) and unlink_plain(path):
        names.drop(name)


def remove_folder(path: Path) -> None:
    """Remove a folder of this run if it is empty."""
    root = owner(path)
    name = "" if root is None else f"{path.absolute().relative_to(root).as_posix()}/"
    if root is not None and not names_of(root).has(name):
        return
    with suppress(OSError):
        path.rmdir()
        if root is not None:
            names_of(root).drop(name)


def written_files(folder: Path) -> list[Path]:
    """Files that the run wrote directly into one of its folders."""
    root = owner(folder)
    if root is None:
        return [Path(name) for name in sorted(_unowned) if Path(name).parent == folder.absolute()]
    start = f"{folder.absolute().relative_to(root).as_posix()}/"
    names = (n for n in names_of(root).all() if n.startswith(start) and "/" not in n[len(start) :])
    return [root / name for name in names if name != start]


def temporary(path: Path, place: int = 0) -> Path:
    """Path of a temporary file that will be moved to `path`; in a run folder it is in its list.

    Args:
        path: The file to write.
        place: Number that no other file has that this thread is writing at the same time.
    """
    root = owner(path)
    if root is None:
        return path.with_name(f".{path.name}.{os.getpid()}.tmp")
    file = root / f".rayfed-{os.getpid()}-{threading.get_native_id()}{f'-{place}' if place else ''}.tmp"
    note(file)
    return file


def unlink_plain(path: Path) -> bool:
    """Remove a regular file, but no link or folder; returns whether the path does not exist any more."""
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            return False
        path.unlink()
    except (FileNotFoundError, NotADirectoryError):
        return True
    return True


def no_link_above(root: Path, path: Path) -> bool:
    """Whether no folder between the run folder and this path is a symbolic link."""
    root = root.absolute()
    above = path.absolute().relative_to(root).parents
    return not any((root / part).is_symlink() for part in above if part != Path())


def _refuse_links(root: Path, path: Path) -> None:
    if not no_link_above(root, path):
        raise InTheWayError(
            f"cannot write {path}: a folder above it is a symbolic link, and a run does not follow links"
        )


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
