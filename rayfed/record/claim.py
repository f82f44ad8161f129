"""Decides whether a run may begin or continue in a folder, and locks the folder for it.

Nothing is created before the input has been checked, and nothing is removed that is not in the list of the
run's files (`rayfed.record.ownership`). A command first looks into the folder (`look`), prepares the
experiment, locks the folder, looks again, and only then writes. The marker of the folder holds a new token
for every command, so that a command finds out if another one has begun in the folder meanwhile.
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
from rayfed.record.clearing import (
    KEPT,
    clear,
    drop_temporaries,
    join,
    make_all,
    mark_of,
    parts,
    remove_empty,
    remove_kept,
)
from rayfed.record.folder import TENSORS
from rayfed.record.history import HISTORY
from rayfed.record.layout import FOLDERS, ROWS
from rayfed.record.lock import COMMAND, MOMENT, WRITER, locked
from rayfed.record.marker import MARKER, Mark, read_mark, write_mark
from rayfed.record.ownership import forget_names, make_folder, names_of, unlink_plain
from rayfed.record.readers import DamagedError

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
