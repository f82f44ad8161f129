"""Which files below a folder a run wrote: a marker says that the folder is ours, a list names the files.

A name is added to the list before its file is written, and a file that was there before and is not on the
list is never written over, so whatever the list names may be removed, and nothing else.
"""

from __future__ import annotations

import json
import os
import stat
import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath

from rayfed.documents import DocumentError, parse_json
from rayfed.errors import ConfigError, StorageError
from rayfed.record.readers import DamagedError, read_json

MARKER = ".rayfed-run.json"
NAMES = ".rayfed-files"
FORMAT = 1
SAVED = "!checkpoint"
"""A line of the list that is no file: a checkpoint has been complete in this folder."""


class InTheWayError(ConfigError, StorageError):
    """Something that is not of the run is where the run must write; it stays as it is."""


_unowned: set[str] = set()
"""What this process wrote where there is no marker."""


@dataclass(frozen=True, kw_only=True)
class Mark:
    """The content of a marker.

    Attributes:
        kind: run or sweep.
        claim: Another text for every command that wrote here.
        adopted: The run was begun by a version that kept no list; its folder is never cleared.
        format: Of marker and list.
    """

    kind: str
    claim: str
    adopted: bool = False
    format: int = FORMAT


def read_mark(folder: Path) -> Mark | None:
    """The marker of a folder; None where there is none.

    Raises:
        DamagedError: It is not what was written.
    """
    path = folder / MARKER
    if not os.path.lexists(path):
        return None
    tree = read_json(path, dict)
    types = {"kind": str, "claim": str, "adopted": bool, "format": int}
    if set(tree) != set(types) or any(type(tree[key]) is not kind for key, kind in types.items()):
        raise DamagedError(f"{path} cannot be read: it is not the marker of a run")
    if tree["format"] != FORMAT:
        raise DamagedError(f"{path}: format {tree['format']}, and this version reads {FORMAT}")
    return Mark(**tree)


def write_mark(folder: Path, mark: Mark) -> None:
    """Write the marker whole or not at all."""
    _replace(folder / MARKER, json.dumps(asdict(mark)) + "\n")


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("w", encoding="ascii") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


class Names:
    """The list of one folder: lines `+"file"`, `+"folder/"`, and `-"file"` for what was removed again."""

    def __init__(self, root: Path) -> None:
        self.root, self.path = root, root / NAMES
        self._known: dict[str, None] = {}
        self._read, self._inode = 0, -1

    def all(self) -> list[str]:
        """Every name, in the order in which they were added; folders end with a slash."""
        try:
            with self.path.open("rb") as file:
                facts = os.fstat(file.fileno())
                if facts.st_ino != self._inode or facts.st_size < self._read:
                    self._known, self._read, self._inode = {}, 0, facts.st_ino
                file.seek(self._read)
                data = file.read()
        except OSError:
            self._known, self._read, self._inode = {}, 0, -1
            return []
        whole = data.rfind(b"\n") + 1  # what follows is being written, or was cut off by a crash
        self._read += whole
        for line in data[:whole].splitlines():
            self._take(line)
        return list(self._known)

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
        # A line break on both sides: what a crash has cut off does not swallow the next line.
        number = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            os.write(number, f"\n{line}\n".encode("ascii"))
        finally:
            os.close(number)
        self.all()

    def tidy(self) -> None:
        """Forget names of what is not there any more; only for whoever holds the locks of the folder."""
        there = [name for name in self.all() if name == SAVED or os.path.lexists(self.root / name)]
        _replace(self.path, "".join(f"{n}\n" if n == SAVED else f"+{json.dumps(n)}\n" for n in there))
        self.all()

    def clear(self) -> None:
        """Begin a new list."""
        _replace(self.path, "")
        self.all()

    def adopt(self, names: Iterable[str]) -> None:
        """Begin a list for a run that was written without one; it may have had checkpoints."""
        _replace(self.path, "".join(f"+{json.dumps(n)}\n" for n in names) + f"{SAVED}\n")
        self.all()


def _is_below(name: str) -> bool:
    """Whether a name in a list stays within its folder."""
    parts = PurePosixPath(name).parts
    return bool(parts) and not name.startswith("/") and ".." not in parts and "\0" not in name


_lists: dict[Path, Names] = {}
_lock = threading.Lock()


def names_of(root: Path) -> Names:
    """The list of a folder that has a marker."""
    root = root.absolute()
    with _lock:
        return _lists.setdefault(root, Names(root))


def forget_names(root: Path) -> None:
    """Read the list of a folder from disk again: another command may have made the folder anew."""
    with _lock:
        _lists.pop(root.absolute(), None)


def owner(path: Path) -> Path | None:
    """The nearest folder above that has a marker."""
    return next((p for p in path.absolute().parents if os.path.lexists(p / MARKER)), None)


def note(path: Path) -> None:
    """Add a file that is about to be written to the list of its run.

    Raises:
        InTheWayError: The file was there before and is not of this run, or a folder above it is a link.
        OSError: The list cannot be written.
    """
    root = owner(path)
    if root is None:
        _unowned.add(str(path.absolute()))
        return
    names, name = names_of(root), path.absolute().relative_to(root).as_posix()
    _refuse_links(root, path)
    if path.is_symlink() or path.is_dir():
        raise InTheWayError(f"cannot write {path}: a link or a folder is in its place; move it away")
    if names.has(name):
        return
    if os.path.lexists(path) and not _is_adopted(root):
        raise InTheWayError(f"cannot write {path}: it was there before and is not of this run; move it away")
    names.add(name)


def make_folder(path: Path) -> None:
    """Make a folder and those above it, and add those that were not there to the list of the run.

    Raises:
        InTheWayError: A folder above it within the run is a link.
        OSError: It cannot be made.
    """
    root = owner(path)
    if root is None:
        path.mkdir(parents=True, exist_ok=True)
        return
    _refuse_links(root, path / "file")
    names, below = names_of(root), path.absolute().relative_to(root)
    for part in [*reversed(below.parents), below][1:]:
        if not (root / part).is_dir():
            names.add(f"{part.as_posix()}/")
            (root / part).mkdir(exist_ok=True)


def remove(path: Path) -> None:
    """Remove a file, if it is one that this run wrote; anything else stays."""
    root = owner(path)
    if root is None:
        if str(path.absolute()) in _unowned:
            unlink_plain(path)
        return
    names, name = names_of(root), path.absolute().relative_to(root).as_posix()
    if names.has(name) and no_link_above(root, path) and unlink_plain(path):
        names.drop(name)


def remove_folder(path: Path) -> None:
    """Remove a folder of this run, if nothing is in it."""
    root = owner(path)
    if root is not None and not names_of(root).has(f"{path.absolute().relative_to(root).as_posix()}/"):
        return
    with suppress(OSError):
        path.rmdir()


def written(folder: Path) -> list[Path]:
    """Files of the run directly within one of its folders."""
    root = owner(folder)
    if root is None:
        return [Path(name) for name in sorted(_unowned) if Path(name).parent == folder.absolute()]
    start = f"{folder.absolute().relative_to(root).as_posix()}/"
    found = (n for n in names_of(root).all() if n.startswith(start) and "/" not in n[len(start) :])
    return [root / name for name in found if name != start]


def temporary(path: Path) -> Path:
    """Where to write what becomes `path`: one place for each thread in a run, which its list names."""
    root = owner(path)
    if root is None:
        return path.with_name(f".{path.name}.{os.getpid()}.tmp")
    found = root / f".rayfed-{os.getpid()}-{threading.get_native_id()}.tmp"
    note(found)
    return found


def unlink_plain(path: Path) -> bool:
    """Remove a regular file; whether there is none any more. A link and anything else stay."""
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            return False
        path.unlink()
    except (FileNotFoundError, NotADirectoryError):
        return True
    return True


def no_link_above(root: Path, path: Path) -> bool:
    """Whether every folder between a run's folder and this path is one, and not a link to one."""
    root = root.absolute()
    above = path.absolute().relative_to(root).parents
    return not any((root / part).is_symlink() for part in above if part != Path())


def _refuse_links(root: Path, path: Path) -> None:
    if not no_link_above(root, path):
        raise InTheWayError(f"cannot write {path}: a folder above it is a link, and a run follows none")


def _is_adopted(root: Path) -> bool:
    try:
        mark = read_mark(root)
    except DamagedError:
        return False
    return mark is not None and mark.adopted
