"""Whose folder the output of a run is: what may be begun in it, continued in it, and removed from it.

Nothing is made before the input is known to be right, and nothing is removed that the list of the run's files
(`rayfed.record.ownership`) does not name. A command looks into the folder, prepares, locks it, looks again,
and only then writes; the marker holds another text for every command, so that one that was overtaken notices.
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
    mark_of,
    parts,
    remove_empty,
    remove_kept,
)
from rayfed.record.lock import COMMAND, MOMENT, WRITER, locked
from rayfed.record.ownership import (
    MARKER,
    Mark,
    forget_names,
    make_folder,
    names_of,
    read_mark,
    unlink_plain,
    write_mark,
)
from rayfed.record.readers import DamagedError

MOST_NAMED = 3  # files of somebody else, in a message


@dataclass
class Claim:
    """The right to write in a folder, as long as its locks are held.

    Attributes:
        path: The folder.
        kind: run or sweep.
        token: In its marker; another one for every command.
        made: Folders that were made for it, outermost first.
        begun: Whether all that is on the list was written for this claim.
        writers: Held until the marker has the token; then the process that writes rounds may lock the folder.
    """

    path: Path
    kind: str
    token: str = field(default_factory=lambda: uuid.uuid4().hex)
    made: Sequence[Path] = ()
    begun: bool = False
    writers: ExitStack = field(default_factory=ExitStack)

    def begin(self, part_of: Path | None = None) -> None:
        """Mark the folder as ours and remove the run that was in it; all locks are held."""
        with _saying(self.path):
            write_mark(self.path, Mark(kind=self.kind, claim=self.token))
            forget_names(self.path)
            clear(self.path)
            if part_of is not None:
                join(part_of, self.path)
        self.begun = True
        self.writers.close()

    def take_over(self) -> None:
        """Go on with what is there; a run without a marker, or whose list was lost, gets a new one.

        Raises:
            ConfigError: It cannot be written.
        """
        with _saying(self.path):
            mark = mark_of(self.path)
            forget_names(self.path)
            names = names_of(self.path)
            lost = mark is None or any(
                (self.path / name).exists() and not names.has(name) for name in earlier.ALWAYS
            )
            if lost:
                names.adopt(earlier.names(self.path))
            adopted = lost or (mark is not None and mark.adopted)
            write_mark(self.path, Mark(kind=self.kind, claim=self.token, adopted=adopted))
            drop_temporaries(self.path)
            names.tidy()
        self.writers.close()

    def discard(self) -> None:
        """Remove what a run that never began has written, and the folders that were made for it."""
        if self.begun:
            clear(self.path)
            remove_kept(self.path)
            remove_empty(self.made)


def look(path: Path, overwrite: bool = False, kind: str = "run") -> str:
    """Find out, without touching anything, whether a run may begin in a folder.

    Returns:
        What the marker of the run says that will be overwritten; empty where there is none.

    Raises:
        ConfigError: Something else is there, or a run that may not be overwritten.
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
    if not overwrite:
        held = mark.kind if mark else "run"
        again = {"run": "set overwrite=true, or continue it with python -m rayfed.resume "}
        raise ConfigError(
            f"output: {str(path)!r} already holds a {held}; choose another folder, "
            f"{again.get(held, 'or continue it with python -m tune.run resume=')}{path}"
        )
    if mark is None or mark.adopted:
        raise ConfigError(
            f"output: {str(path)!r} holds a run of an earlier version, which kept no list of its files, so "
            f"overwrite=true does not remove it; move the folder away, or choose another one"
        )
    if mark.kind != kind:
        raise ConfigError(f"output: {str(path)!r} holds a {mark.kind}, not a {kind}; choose another folder")
    return mark.claim


@contextmanager
def claim(
    path: Path, seen: str, overwrite: bool = False, part_of: Path | None = None, kind: str = "run"
) -> Iterator[Claim]:
    """Be the only one that writes in a folder, and begin a run in it.

    Args:
        path: The folder, which need not exist.
        seen: What `look` said about it when the command started.
        overwrite: Remove the run that is there.
        part_of: Folder of the run or sweep that this one is a part of, and is removed with.
        kind: run or sweep.

    Raises:
        ConfigError: Another process has the folder or had it since `look`, or it cannot be written; nothing
            in it was touched then.
    """
    with _saying(path):
        if part_of is not None:
            make_folder(path.parent)
        found = Claim(path=path, kind=kind, made=_make(path))
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
    """Be the only one that writes in a folder that holds a run; `Claim.take_over` makes it ours.

    Args:
        path: The folder.
        kind: run or sweep.
        patience: Seconds to wait for whoever writes there; None: as long as a killed driver may need to end.

    Raises:
        ConfigError: There is no run, or another process writes it.
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
    """Look with the locks held; they go again from a folder that somebody else has filled meanwhile."""
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
    mark = mark_of(path)
    if mark is None and kind == "run":
        earlier.check_run(path)
    elif mark is None or mark.kind != kind:
        raise ConfigError(
            f"{path}: holds {f'a {mark.kind}' if mark else 'nothing'} and no {kind} to continue"
        )


def _make(path: Path) -> list[Path]:
    """Make a folder and those above it; the ones that were not there."""
    made = []
    for part in [*reversed(path.parents), path]:
        with suppress(FileExistsError):
            part.mkdir()
            made.append(part)
    if not path.is_dir():
        raise NotADirectoryError(20, os.strerror(20))
    return made


def _check_above(path: Path) -> None:
    """Raise OSError where no folder can be made or written."""
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
    """What is in a folder beside marker, list and locks."""
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
