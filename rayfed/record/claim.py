"""Decides whether a run may begin or continue in a folder, and locks the folder for it.

Nothing is created before the input has been checked, and nothing is removed that is not in the list of the
run's files (`rayfed.record.ownership`). A command first looks into the folder (`look`), prepares the
experiment, locks the folder, looks again, and only then writes. The marker of the folder holds a new token
for every command, so that a command finds out if another one has begun in the folder meanwhile.

Only files in the list of a run are removed, by a caller that holds the locks. Folders that a command
creates for a run (`make_all`) are removed with it (`remove_empty`).

System folders, the home and the current folder are refused as output.
"""

from __future__ import annotations

import os
import stat
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from rayfed.errors import ConfigError, StorageError
from rayfed.record import earlier
from rayfed.record.folder import TENSORS
from rayfed.record.history import HISTORY
from rayfed.record.ownership import (
    COMMAND,
    MARKER,
    MOMENT,
    NAMES,
    SAVED,
    WRITER,
    Mark,
    forget_names,
    locked,
    make_folder,
    names_of,
    no_link_above,
    read_mark,
    unlink_plain,
    write_mark,
)
from rayfed.record.readers import FOLDERS, ROWS, DamagedError

KEPT = (COMMAND, WRITER, MARKER, NAMES, f"{MARKER}.tmp", f"{NAMES}.tmp")
"""Files of RayFed in a run folder that are not in its list."""


def mark_of(path: Path) -> Mark | None:
    """The marker of a folder; None if there is none or it is damaged."""
    try:
        return read_mark(path)
    except DamagedError:
        return None


def clear(root: Path) -> None:
    """Remove all files in the lists of a folder and its parts; follows no links. Begins a new list."""
    for part in parts(root):
        clear(part)
        remove_kept(part)
    names = names_of(root)
    found = [name for name in names.all() if name != SAVED and no_link_above(root, root / name)]
    for name in found:
        if not name.endswith("/"):
            unlink_plain(root / name)
    remove_empty([root / name for name in sorted(found) if name.endswith("/")])
    names.clear()


def parts(root: Path) -> list[Path]:
    """Folders of the runs that are part of this one, such as those of `compare`."""
    folders = [root / name for name in names_of(root).all() if name.endswith("/")]
    return [
        path
        for path in folders
        if no_link_above(root, path / MARKER) and mark_of(path) is not None and path.is_dir()
    ]


def join(whole: Path, part: Path) -> None:
    """Add a folder to the list of the run that it is a part of."""
    name = f"{part.absolute().relative_to(whole.absolute()).as_posix()}/"
    if mark_of(whole) is not None and not names_of(whole.absolute()).has(name):
        names_of(whole.absolute()).add(name)


def remove_kept(path: Path) -> None:
    """Remove marker, list and locks from a folder that holds nothing else."""
    if {found.name for found in path.iterdir()} <= set(KEPT):
        for name in (f"{NAMES}.tmp", NAMES, f"{MARKER}.tmp", MARKER, WRITER, COMMAND):
            unlink_plain(path / name)
        forget_names(path)


def make_all(path: Path) -> list[Path]:
    """Create a folder and its parents; returns those that did not exist, outermost first.

    Raises:
        OSError: A folder cannot be created, or something else is in its place.
    """
    made = []
    for part in [*reversed(path.parents), path]:
        with suppress(FileExistsError):
            part.mkdir()
            made.append(part)
    if not path.is_dir():
        raise NotADirectoryError(20, os.strerror(20))
    return made


def remove_empty(folders: Sequence[Path]) -> None:
    """Remove the empty ones of these folders, in reverse order."""
    for path in reversed(folders):
        with suppress(OSError):
            path.rmdir()


def drop_temporaries(root: Path) -> None:
    """Remove the temporary files of processes that were killed while writing."""
    names = names_of(root)
    for name in names.all():
        if "/" not in name and name.startswith(".rayfed-") and name.endswith(".tmp"):
            unlink_plain(root / name)


MOST_NAMED = 3  # largest number of foreign files that a message names


@dataclass
class Claim:
    """The right to write into a folder, valid while its locks are held.

    Attributes:
        path: The folder.
        kind: run, sweep or job.
        token: Random text in the marker of the folder, new for every command.
        made: Folders that were created for it, outermost first.
        begun: Whether all files in the list were written under this claim.
        writers: Locks for writing rounds. They are held until the marker has the token; then the process that
            writes rounds takes them.
    """

    path: Path
    kind: str
    token: str = field(default_factory=lambda: uuid.uuid4().hex)
    made: Sequence[Path] = ()
    begun: bool = False
    writers: ExitStack = field(default_factory=ExitStack)

    def begin(self, part_of: Path | None = None) -> None:
        """Write the marker and remove the earlier run in the folder. The caller holds all locks."""
        with _saying(self.path):
            write_mark(self.path, Mark(kind=self.kind, claim=self.token))
            forget_names(self.path)
            clear(self.path)
            if part_of is not None:
                join(part_of, self.path)
        self.begun = True
        self.writers.close()

    def take_over(self) -> None:
        """Continue the run in the folder; if its marker or its list is missing, write a new one.

        Raises:
            ConfigError: The folder cannot be written.
        """
        with _saying(self.path):
            mark = mark_of(self.path)
            forget_names(self.path)
            names = names_of(self.path)
            always = (*earlier.ALWAYS, ROWS)
            lost = mark is None or any((self.path / n).exists() and not names.has(n) for n in always)
            if lost:
                names.adopt(earlier.names(self.path))
            adopted = lost or (mark is not None and mark.adopted)
            write_mark(self.path, Mark(kind=self.kind, claim=self.token, adopted=adopted))
            drop_temporaries(self.path)
            names.tidy()
        self.writers.close()

    def discard(self) -> None:
        """Remove the files of a run that ran no round, and the folders that were created for it."""
        if self.begun:
            clear(self.path)
            remove_kept(self.path)
            remove_empty(self.made)


def look(path: Path, overwrite: bool = False, kind: str = "run") -> str:
    """Check, without changing anything, whether a run may begin in a folder.

    A run without a finished round is overwritten, because nothing of it is of use.

    Returns:
        Token of the run in the folder, which will be overwritten; empty if there is none.

    Raises:
        ConfigError: The folder holds other files, or a run that may not be overwritten.
    """
    try:
        _check_above(path)
        found = sorted(_strangers(path))
        mark = read_mark(path)
    except DamagedError as err:
        raise ConfigError(f"output: {err}; move the folder away, or choose another one") from err
    except OSError as err:
        raise ConfigError(f"output: cannot write to {str(path)!r}: {err.strerror}") from err
    if mark is None and not found:
        return ""
    if mark is None and not earlier.is_run(path):
        raise ConfigError(
            f"output: {str(path)!r} is not empty and holds no {kind} ({_few(found)}); choose another folder, "
            f"or move these files away"
        )
    if not overwrite and not (kind == "run" and _is_unbegun(path, mark)):
        raise ConfigError(_already_held(path, mark.kind if mark else "run"))
    if mark is None or mark.adopted:
        raise ConfigError(
            f"output: {str(path)!r} holds a run of an earlier version, which kept no list of its files, so "
            f"overwrite=true does not remove it; move the folder away, or choose another one"
        )
    if mark.kind != kind:
        raise ConfigError(f"output: {str(path)!r} holds a {mark.kind}, not a {kind}; choose another folder")
    return mark.claim


def _already_held(path: Path, kind: str) -> str:
    """Message: the folder holds a run or a sweep, and what can be done."""
    ways = ["choose another folder"]
    if kind == "run":
        ways.append("set overwrite=true")
        if any(path.glob("checkpoints/round-*")) or any(path.glob("*/checkpoints/round-*")):
            ways.append(f"continue it with python -m rayfed.resume {path}")
    elif kind == "sweep":
        ways.append(f"continue it with python -m tune.run resume={path}")
    else:
        ways.append("continue it with the command that began it")
    return f"output: {str(path)!r} already holds a {kind}; {', '.join(ways[:-1])} or {ways[-1]}"


def _is_unbegun(path: Path, mark: Mark | None) -> bool:
    """Whether a folder holds a run without a finished round, also in its parts: nothing of it is of use."""
    made = (path / ROWS, path / HISTORY, path / "checkpoints", path / TENSORS)
    if mark is None or mark.adopted or mark.kind != "run" or any(map(os.path.lexists, made)):
        return False
    return all(_is_unbegun(part, mark_of(part)) for part in parts(path))


@contextmanager
def claim(
    path: Path, seen: str, overwrite: bool = False, part_of: Path | None = None, kind: str = "run"
) -> Iterator[Claim]:
    """Lock a folder and begin a run in it.

    Args:
        path: The folder, which need not exist.
        seen: Result of `look` when the command started.
        overwrite: Remove the run that is in the folder.
        part_of: Folder of the run or sweep that this one is a part of, and with which it is removed.
        kind: run, sweep or job.

    Raises:
        ConfigError: Another process holds the folder or has begun in it since `look`, or the folder cannot be
            written. Nothing in it was changed then.
    """
    with _saying(path):
        if part_of is not None:
            make_folder(path.parent)
        found = Claim(path=path, kind=kind, made=make_all(path))
    with ExitStack() as held, found.writers:
        try:
            _lock(path, held, found.writers, MOMENT)
            _look_again(path, seen, overwrite, kind)
            for part in parts(path):
                _lock(part, found.writers, found.writers, MOMENT)
            found.begin(part_of)
        except ConfigError:
            remove_empty(found.made)
            raise
        yield found


@contextmanager
def claim_again(path: Path, kind: str = "run", patience: float | None = None) -> Iterator[Claim]:
    """Lock a folder that holds a run, to continue it after `Claim.take_over`.

    Args:
        path: The folder.
        kind: run, sweep or job.
        patience: Seconds to wait until another process releases the locks; None: as long as a killed driver
            may need to end.

    Raises:
        ConfigError: The folder holds no run, a link is in place of a folder in it, or another process writes
            to it.
    """
    _check_run(path, kind)
    found = Claim(path=path, kind=kind)
    with ExitStack() as held, found.writers:
        _lock(path, held, found.writers, patience)
        _check_run(path, kind)
        yield found


def _lock(path: Path, commands: ExitStack, writers: ExitStack, patience: float | None) -> None:
    commands.enter_context(locked(path, COMMAND, patience))
    writers.enter_context(locked(path, WRITER, patience))


def _look_again(path: Path, seen: str, overwrite: bool, kind: str) -> None:
    """Call `look` again with the locks held; if the folder is refused, remove the new lock files."""
    try:
        now = look(path, overwrite, kind)
    except ConfigError:
        if not os.path.lexists(path / MARKER) and not earlier.is_run(path):
            for name in (WRITER, COMMAND):
                unlink_plain(path / name)
        raise
    if now != seen:
        raise ConfigError(
            f"output: another command has begun a {kind} in {str(path)!r} since this one was started; choose "
            f"another folder"
        )


def _check_run(path: Path, kind: str) -> None:
    if not os.path.lexists(path):
        raise ConfigError(f"{path}: there is no such folder; give the folder of a {kind}")
    mark = mark_of(path)
    if mark is None and kind == "run":
        earlier.check_run(path)
    elif mark is None or mark.kind != kind:
        raise ConfigError(
            f"{path}: holds {f'a {mark.kind}' if mark else 'nothing'} and no {kind} to continue"
        )
    for name in FOLDERS:
        if (path / name).is_symlink():
            raise ConfigError(
                f"{path / name} is a link, and a {kind} does not follow links; put the folder itself there"
            )


def _check_above(path: Path) -> None:
    """Raise OSError if no folder can be created or written at this path."""
    above = next(p for p in (path.absolute(), *path.absolute().parents) if _exists(p))
    if not above.is_dir():
        raise NotADirectoryError(20, os.strerror(20))
    if not os.access(above, os.W_OK | os.X_OK):
        raise PermissionError(13, os.strerror(13))


def _exists(path: Path) -> bool:
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _strangers(path: Path) -> Iterator[str]:
    """Names of the files in a folder that are not a marker, a list or a lock of RayFed."""
    with suppress(FileNotFoundError):
        for entry in os.scandir(path):
            facts = entry.stat(follow_symlinks=False)
            plain = stat.S_ISREG(facts.st_mode)
            if not (plain and entry.name in KEPT) or (entry.name in (COMMAND, WRITER) and facts.st_size):
                yield entry.name


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more


@contextmanager
def _saying(path: Path) -> Iterator[None]:
    try:
        yield
    except StorageError as err:
        raise ConfigError(f"output: {err}") from err
    except OSError as err:
        why = os.strerror(err.errno) if err.errno else str(err)
        raise ConfigError(f"output: cannot write to {str(path)!r}: {why}") from err


SHARED = (
    *(
        "/bin",
        "/boot",
        "/dev",
        "/etc",
        "/home",
        "/lib",
        "/lib32",
        "/lib64",
        "/media",
        "/mnt",
        "/opt",
        "/proc",
    ),
    *("/root", "/run", "/sbin", "/srv", "/sys", "/tmp", "/usr", "/var", "/Applications", "/Library"),
    *("/System", "/Users", "/private", "/private/tmp", "/private/var", "/var/tmp", "/dev/shm"),
)
"""Folders with files of others; a folder inside them may be used for a run."""

SYSTEM = (
    *("/bin", "/boot", "/etc", "/lib", "/lib32", "/lib64", "/proc", "/sbin", "/sys", "/System"),
    *("/usr/bin", "/usr/include", "/usr/lib", "/usr/lib64", "/usr/libexec", "/usr/sbin", "/private/etc"),
)
"""Folders of the operating system, in which no folder may be used either."""


def check_own_folder(path: Path) -> None:
    """Refuse the root, a system folder, the home folder and the current folder as the folder of a run.

    Raises:
        ConfigError: It is one of these; the message says which.
    """
    lexical = Path(os.path.normpath(path.absolute()))
    for place in dict.fromkeys((lexical, _real(lexical))):
        if what := _owner(place):
            raise ConfigError(
                f"output: {str(path)!r} is {what}; a run needs a folder of its own, such as runs/mine"
            )


def _owner(place: Path) -> str:
    """Description of the folder if it may not be used for a run; else empty."""
    here = Path.cwd()
    home = _home()
    if place == Path(place.anchor):
        return "the root of the file system"
    if place == here:
        return "the current folder"
    if home is not None and place == home:
        return "your home folder"
    if place in here.parents or (home is not None and place in home.parents):
        return "a folder that the current folder or your home folder is in"
    if str(place) in SHARED or any(place.is_relative_to(folder) for folder in SYSTEM):
        return "a folder of the system"
    return ""


def _home() -> Path | None:
    try:
        return Path.home()
    except RuntimeError:
        return None


def _real(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError):
        return path
