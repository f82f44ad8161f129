"""Decides whether a run may begin or continue in a folder, and locks the folder for it.

Nothing is created before the input has been checked. A command first looks into the folder (`look`),
prepares the experiment, locks the folder, looks again, and only then writes. The marker of the folder holds a
new token for every command, so that a command finds out if another one has begun in the folder meanwhile.

A run that is replaced keeps its files: those in its list (`rayfed.record.ownership`) are moved to
NAME.before-1, or the next free number (`set_aside`). Other files stay where they are. Removed are only the
files of runs without a finished round, of refused runs, and of parts that are computed again; folders that a
command creates for a run (`make_all`) are removed with it (`remove_empty`).

The root, the home and the current folder are refused as output, and a folder that Ray will remove.
"""

from __future__ import annotations

import os
import shutil
import stat
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count, pairwise
from pathlib import Path

from rayfed.errors import ConfigError, StorageError
from rayfed.record.folder import TENSORS, way_to_continue
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
    hold_lock,
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
    own = [name for name in names.all() if name != SAVED and no_link_above(root, root / name)]
    for name in own:
        if not name.endswith("/"):
            unlink_plain(root / name)
    remove_empty([root / name for name in sorted(own) if name.endswith("/")])
    names.clear()


def set_aside(root: Path) -> Path:
    """Move a run and its parts into a new folder; files of others stay, and no link is followed.

    Returns:
        The new folder: NAME.before-1, or the next number that is free.

    Raises:
        ConfigError: The new folder cannot be made.
        OSError: A file cannot be moved; those before it are in the new folder then.
    """
    numbered = (root.with_name(f"{root.name}.before-{number}") for number in count(1))
    aside = next(path for path in numbered if not os.path.lexists(path))
    try:
        aside.mkdir()
    except OSError as err:
        raise ConfigError(
            f"output: {str(aside)!r}, which would keep the earlier run, cannot be made: {err.strerror}; "
            f"choose another folder"
        ) from err
    drop_temporaries(root)
    move_run(root, aside)
    return aside


def move_run(root: Path, to: Path) -> None:
    """Move the files in the lists of a run and its parts, and copies of their markers and lists, to a folder.

    Args:
        root: Folder of the run, whose list is empty afterwards.
        to: An existing folder.

    Raises:
        OSError: A file cannot be moved.
    """
    for part in parts(root):
        below = to / part.relative_to(root)
        below.mkdir(parents=True, exist_ok=True)
        move_run(part, below)
        remove_kept(part)
    names = names_of(root)
    own = [name for name in names.all() if name != SAVED and no_link_above(root, root / name)]
    for name in (MARKER, NAMES):
        if (root / name).is_file():
            shutil.copyfile(root / name, to / name)
    for name in own:
        if not name.endswith("/") and is_plain(root / name):
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.move(root / name, to / name)  # also to another disk
    remove_empty([root / name for name in sorted(own) if name.endswith("/")])
    forget_names(to)
    names.clear()


def is_plain(path: Path) -> bool:
    """Whether a path is a regular file, and no link to one."""
    return os.path.lexists(path) and stat.S_ISREG(path.lstat().st_mode)


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
        earlier: Folder to which the run that was in this one was moved; None: there was none to keep.
        writers: Locks for writing rounds. They are held until the marker has the token; then the process that
            writes rounds takes them.
    """

    path: Path
    kind: str
    token: str = field(default_factory=lambda: uuid.uuid4().hex)
    made: Sequence[Path] = ()
    begun: bool = False
    earlier: Path | None = None
    writers: ExitStack = field(default_factory=ExitStack)

    def begin(self, part_of: Path | None = None) -> None:
        """Move the earlier run in the folder away, and write the marker. The caller holds all locks.

        The files of a run without a finished round, or of a part that is computed again, are removed.
        """
        with _saying(self.path):
            forget_names(self.path)
            mark = mark_of(self.path)
            if mark is not None and part_of is None and not _is_unbegun(self.path, mark):
                self.earlier = set_aside(self.path)
            write_mark(self.path, Mark(kind=self.kind, claim=self.token))
            clear(self.path)
            if part_of is not None:
                join(part_of, self.path)
        self.begun = True
        self.writers.close()

    def take_over(self) -> None:
        """Continue the run in the folder.

        Raises:
            ConfigError: The folder cannot be written.
        """
        with _saying(self.path):
            forget_names(self.path)
            write_mark(self.path, Mark(kind=self.kind, claim=self.token))
            drop_temporaries(self.path)
            names_of(self.path).tidy()
        self.writers.close()

    def discard(self) -> None:
        """Remove the files of a run that ran no round, and put the run back that was moved away for it."""
        if not self.begun:
            return
        clear(self.path)
        if self.earlier is not None:
            with _saying(self.path):
                move_run(self.earlier, self.path)
                forget_names(self.path)
                remove_kept(self.earlier)
                remove_empty([self.earlier])
            self.earlier = None
            return
        remove_kept(self.path)
        remove_empty(self.made)


def look(path: Path, overwrite: bool = False, kind: str = "run") -> str:
    """Check, without changing anything, whether a run may begin in a folder.

    A run without a finished round is replaced, because nothing of it is of use.

    Returns:
        Token of the run in the folder, which will be replaced; empty if there is none.

    Raises:
        ConfigError: The folder holds other files or a run that may not be overwritten, or Ray removes it.
    """
    _check_lasts(path)
    try:
        _check_above(path)
        strangers = sorted(_strangers(path))
        mark = read_mark(path)
    except DamagedError as err:
        raise ConfigError(f"output: {err}; move the folder away, or choose another one") from err
    except OSError as err:
        raise ConfigError(f"output: cannot write to {str(path)!r}: {err.strerror}") from err
    if mark is None and not strangers:
        return ""
    if mark is None:
        raise ConfigError(
            f"output: {str(path)!r} is not empty and holds no {kind} ({_few(strangers)}); choose another "
            "folder, or move these files away"
        )
    if not overwrite and not (kind == "run" and _is_unbegun(path, mark)):
        raise ConfigError(_already_held(path, mark.kind))
    _check_list(path, mark.kind)
    if mark.kind != kind:
        raise ConfigError(f"output: {str(path)!r} holds a {mark.kind}, not a {kind}; choose another folder")
    return mark.claim


UPLOADED = ("runtime_resources", "working_dir_files")
"""Folders of a session of Ray, one in the other, that hold the working folders of its jobs."""


def _check_lasts(path: Path) -> None:
    """Raise ConfigError if a folder is in the working folder of a Ray job, which Ray removes later."""
    if UPLOADED in pairwise(path.absolute().parts):
        raise ConfigError(
            f"output: {str(path)!r} is in the working folder of this Ray job, which Ray removes after the "
            f"job; write an absolute path on storage that stays, such as output=/data/runs/mine"
        )


def _check_list(path: Path, kind: str) -> None:
    """Raise ConfigError if a folder with a marker has no list of the files of its run."""
    if not is_plain(path / NAMES):
        raise ConfigError(
            f"{path / NAMES}: the list of the files of this {kind} is missing; put it back, or move the "
            f"folder away"
        )


def _already_held(path: Path, kind: str) -> str:
    """Message: the folder holds a run or a sweep, and what can be done."""
    ways = ["choose another folder"]
    if kind == "run":
        ways.append("set overwrite=true")
        if any(path.glob("checkpoints/round-*")) or any(path.glob("*/checkpoints/round-*")):
            ways.append(f"continue it with {way_to_continue(path)}")
    elif kind == "sweep":
        ways.append(f"continue it with python -m tune.run resume={path}")
    else:
        ways.append("continue it with the command that began it")
    return f"output: {str(path)!r} already holds a {kind}; {', '.join(ways[:-1])} or {ways[-1]}"


def _is_unbegun(path: Path, mark: Mark | None) -> bool:
    """Whether a folder holds a run without a finished round, also in its parts: nothing of it is of use."""
    made = (path / ROWS, path / HISTORY, path / "checkpoints", path / TENSORS)
    if mark is None or mark.kind != "run" or any(map(os.path.lexists, made)):
        return False
    return all(_is_unbegun(part, mark_of(part)) for part in parts(path))


@contextmanager
def claim(
    path: Path, owner: str, overwrite: bool = False, part_of: Path | None = None, kind: str = "run"
) -> Iterator[Claim]:
    """Lock a folder and begin a run in it.

    Args:
        path: The folder, which need not exist.
        owner: Result of `look` when the command started.
        overwrite: Replace the run that is in the folder.
        part_of: Folder of the run or sweep that this one is a part of, and with which it is removed.
        kind: run, sweep or job.

    Raises:
        ConfigError: Another process holds the folder or has begun in it since `look`, or the folder cannot be
            written. Nothing in it was changed then.
    """
    with _saying(path):
        if part_of is not None:
            make_folder(path.parent)
        claimed = Claim(path=path, kind=kind, made=make_all(path))
    with ExitStack() as held, claimed.writers:
        try:
            _lock(path, held, claimed.writers, MOMENT)
            _look_again(path, owner, overwrite, kind)
            for part in parts(path):
                _lock(part, claimed.writers, claimed.writers, MOMENT)
            claimed.begin(part_of)
        except ConfigError:
            remove_empty(claimed.made)
            raise
        yield claimed


@contextmanager
def claim_again(path: Path, kind: str = "run", patience: float | None = None) -> Iterator[Claim]:
    """Lock a folder that holds a run, to continue it after `Claim.take_over`.

    Args:
        path: The folder.
        kind: run, sweep or job.
        patience: Seconds to wait until another process releases the locks; None: as long as a killed driver
            may need to end.

    Raises:
        ConfigError: The folder holds no run, a link is in place of a folder in it, another process writes
            to it, or Ray will remove it.
    """
    _check_lasts(path)
    _check_run(path, kind)
    claimed = Claim(path=path, kind=kind)
    with ExitStack() as held, claimed.writers:
        _lock(path, held, claimed.writers, patience)
        _check_run(path, kind)
        yield claimed


def _lock(path: Path, commands: ExitStack, writers: ExitStack, patience: float | None) -> None:
    commands.enter_context(hold_lock(path, COMMAND, patience))
    writers.enter_context(hold_lock(path, WRITER, patience))


def _look_again(path: Path, owner: str, overwrite: bool, kind: str) -> None:
    """Call `look` again with the locks held; if the folder is refused, remove the new lock files."""
    try:
        now = look(path, overwrite, kind)
    except ConfigError:
        if not os.path.lexists(path / MARKER):
            for name in (WRITER, COMMAND):
                unlink_plain(path / name)
        raise
    if now != owner:
        raise ConfigError(
            f"output: another command has begun a {kind} in {str(path)!r} since this one was started; choose "
            f"another folder"
        )


def _check_run(path: Path, kind: str) -> None:
    if not os.path.lexists(path):
        raise ConfigError(f"{path}: there is no such folder; give the folder of a {kind}")
    mark = read_mark(path)
    if mark is None or mark.kind != kind:
        raise ConfigError(
            f"{path}: holds {f'a {mark.kind}' if mark else 'nothing'} and no {kind} to continue"
        )
    _check_list(path, kind)
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
    if not os.statvfs(above).f_blocks:  # such as /proc, where root seems to be allowed to write
        raise OSError(95, "its file system holds no files of users")


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


def check_own_folder(path: Path) -> None:
    """Refuse the root, the home folder and the current folder, and those that these are in, as that of a run.

    Raises:
        ConfigError: It is one of these; the message says which.
    """
    lexical = Path(os.path.normpath(path.absolute()))
    for place in dict.fromkeys((lexical, _real(lexical))):
        if what := _owner(place):
            raise ConfigError(
                f"output: {str(path)!r} is {what}; a run needs its own folder, such as runs/mine"
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
