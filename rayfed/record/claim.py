"""Decides whether a run may begin or continue in a folder, and locks the folder for it.

Nothing is created before the input has been checked. A command first looks into the folder (`look`),
prepares the experiment, locks the folder, looks again, and only then writes. The marker of the folder holds a
new token for every command, so that a command finds out if another one has begun in the folder meanwhile.

A folder with a marker belongs to its run, with all that is in it; any other folder that is not empty is
refused. A run that is replaced is not deleted: its whole folder is renamed to NAME.before-1, or the next free
number. Removed are only files that a command wrote before the first round of its run, and the empty folders
that it made.

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
from rayfed.record.atomic_files import drop_temporaries
from rayfed.record.folder import EVENTS, TENSORS, way_to_continue
from rayfed.record.history import HISTORY
from rayfed.record.locks import (
    COMMAND,
    MARKER,
    MOMENT,
    WRITER,
    Mark,
    hold_lock,
    read_mark,
    write_mark,
)
from rayfed.record.readers import ROWS, STUDY, SWEEP, DamagedError

KEPT = (COMMAND, WRITER, MARKER, f"{MARKER}.tmp")
"""Files of RayFed in the folder of a run that say whose it is."""

BEFORE_ROUNDS = (
    STUDY,
    "config.yaml",
    "environment.json",
    "partition.parquet",
    EVENTS,
    "trackers.json",
    "tensorboard",
)
"""Files and folders that a run writes before its first round ends."""

WITHOUT_RUNS = ("checkpoints", "figures", HISTORY, "model", "tensorboard")
"""Folders of a run in which there are no other runs."""


def mark_of(path: Path) -> Mark | None:
    """The marker of a folder; None if there is none or it is damaged."""
    try:
        return read_mark(path)
    except DamagedError:
        return None


def set_aside(root: Path) -> Path:
    """Rename the folder of a run.

    Returns:
        Its new place: NAME.before-1, or the next number that is free.

    Raises:
        ConfigError: It cannot be renamed.
    """
    place = root.resolve()  # where a link is in its place, the link stays
    numbered = (place.with_name(f"{place.name}.before-{number}") for number in count(1))
    aside = next(path for path in numbered if not os.path.lexists(path))
    try:
        place.rename(aside)
    except OSError as err:
        raise ConfigError(
            f"output: the earlier run in {str(root)!r} cannot be renamed to {aside.name!r}: {err.strerror}; "
            f"choose another folder"
        ) from err
    return aside if root.is_symlink() else root.with_name(aside.name)


def runs_below(root: Path) -> Iterator[Path]:
    """Folders of runs that are in the folder of another run or of a study."""
    for folder, names, files in os.walk(root):
        if MARKER in files and Path(folder) != root:
            yield Path(folder)
        names[:] = [name for name in names if name not in WITHOUT_RUNS]


def empty(root: Path) -> None:
    """Remove what a run wrote into its folder before its first round ended, and in the runs below it."""
    for folder in (*runs_below(root), root):
        for path in (folder / name for name in BEFORE_ROUNDS):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        drop_temporaries(folder)
        if folder != root:
            remove_kept(folder)


def remove_kept(path: Path) -> None:
    """Remove marker and locks from a folder that holds nothing else."""
    if {found.name for found in path.iterdir()} <= set(KEPT):
        for name in (f"{MARKER}.tmp", MARKER, WRITER, COMMAND):
            (path / name).unlink(missing_ok=True)


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


RUNS = ("run", "study")
"""Kinds of folders that `rayfed run` makes: of one run, or of several. Each may replace the other."""


def _is_of_run(path: Path, kind: str) -> bool:
    """Whether `rayfed run` made a folder; a study of a program or of a paper's table has no config.yaml."""
    return kind == "run" or (kind == "study" and (path / "config.yaml").exists())


MOST_NAMED = 3  # largest number of foreign files that a message names


@dataclass
class Claim:
    """The right to write into a folder, valid while its locks are held.

    Attributes:
        path: The folder.
        kind: run or study.
        token: Random text in the marker of the folder, new for every command.
        made: Folders that were created for it, outermost first.
        begun: Whether all files in the folder were written under this claim.
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

    def begin(self) -> None:
        """Write the marker, in a folder that holds nothing that has to stay. The caller holds all locks."""
        with output_errors(self.path):
            empty(self.path)
            write_mark(self.path, Mark(kind=self.kind, claim=self.token))
        self.begun = True
        self.writers.close()

    def take_over(self) -> None:
        """Continue the run in the folder.

        Raises:
            ConfigError: The folder cannot be written.
        """
        with output_errors(self.path):
            write_mark(self.path, Mark(kind=self.kind, claim=self.token))
            drop_temporaries(self.path)
        self.writers.close()

    def discard(self) -> None:
        """Remove the files of a run that ran no round, and put the run back that was moved away for it."""
        if not self.begun:
            return
        with output_errors(self.path):
            empty(self.path)
            remove_kept(self.path)
            remove_empty(self.made)
            self.put_back()

    def put_back(self) -> None:
        """Rename the earlier run back, if nothing is in its place."""
        place = self.path.resolve()
        if self.earlier is not None and not os.path.lexists(place):
            self.earlier.rename(place)
            self.earlier = None


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
    if not overwrite and not (kind in RUNS and _is_unbegun(path, mark)):
        raise ConfigError(_already_held(path, mark.kind))
    if mark.kind != kind and not (kind in RUNS and _is_of_run(path, mark.kind)):
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


def _already_held(path: Path, kind: str) -> str:
    """Message: the folder holds a run or a sweep, and what can be done."""
    ways = ["choose another folder"]
    if _is_of_run(path, kind):
        ways.append("set overwrite=true")
        if any(path.glob("checkpoints/round-*")) or any(path.glob("cells/*/checkpoints/round-*")):
            ways.append(f"continue it with {way_to_continue(path)}")
    elif (path / SWEEP).exists():
        kind = "sweep"
        ways.append(f"continue it with python -m tune.run resume={path}")
    else:
        ways.append("continue it with the command that began it")
    return f"output: {str(path)!r} already holds a {kind}; {', '.join(ways[:-1])} or {ways[-1]}"


def _is_unbegun(path: Path, mark: Mark | None) -> bool:
    """Whether a folder holds a run without a finished round, also below it: nothing of it is of use."""
    made = (path / ROWS, path / HISTORY, path / "checkpoints", path / TENSORS)
    if mark is None or mark.kind not in RUNS or any(map(os.path.lexists, made)):
        return False
    return all(_is_unbegun(run, mark_of(run)) for run in runs_below(path))


def _holds_more(path: Path) -> bool:
    """Whether the folder of a run without a finished round holds something that no run wrote."""
    runs = {path, *runs_below(path)}
    above = {folder for run in runs for folder in run.parents}
    every = (file for run in runs for file in run.iterdir())
    return any(f.name not in (*KEPT, *BEFORE_ROUNDS) and f not in runs and f not in above for f in every)


@contextmanager
def claim(path: Path, owner: str, overwrite: bool = False, kind: str = "run") -> Iterator[Claim]:
    """Lock a folder and begin a run in it. An earlier run in it is moved away; `Claim.earlier` says where to.

    Args:
        path: The folder, which need not exist.
        owner: Result of `look` when the command started.
        overwrite: Replace the run that is in the folder.
        kind: run or study.

    Raises:
        ConfigError: Another process holds the folder or has begun in it since `look`, or the folder cannot be
            written. Nothing in it was changed then.
    """
    with output_errors(path):
        claimed = Claim(path=path, kind=kind, made=make_all(path))
    with ExitStack() as held, claimed.writers:
        try:
            _lock(path, held, claimed.writers, MOMENT)
            _look_again(path, owner, overwrite, kind)
            mark = mark_of(path)
            if mark is not None and not (_is_unbegun(path, mark) and not _holds_more(path)):
                _move_away(claimed, held)
            claimed.begin()
        except ConfigError:
            remove_empty(claimed.made)
            with suppress(OSError):
                claimed.put_back()
            raise
        yield claimed


def _move_away(claimed: Claim, held: ExitStack) -> None:
    """Rename the folder, whose locks are held, and make and lock a new one in its place.

    Raises:
        ConfigError: A process writes in a run below it, it cannot be renamed, or another command was faster.
    """
    path = claimed.path
    with ExitStack() as below:
        for run in runs_below(path):
            _lock(run, below, below, MOMENT)
        claimed.earlier = set_aside(path)
    # The locks were renamed with the folder, which another command may continue from now on.
    held.close()
    claimed.writers.close()
    with output_errors(path):
        claimed.made = make_all(path.resolve())
    _lock(path, held, claimed.writers, MOMENT)
    _look_again(path, "", overwrite=False, kind=claimed.kind)


@contextmanager
def claim_again(path: Path, kind: str = "run", patience: float | None = None) -> Iterator[Claim]:
    """Lock a folder that holds a run, to continue it after `Claim.take_over`.

    Args:
        kind: run or study.
        patience: Seconds to wait until another process releases the locks; None: as long as a killed driver
            may need to end.

    Raises:
        ConfigError: The folder holds no run, another process writes to it, or Ray will remove it.
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
                (path / name).unlink(missing_ok=True)
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
    """Names of the files in a folder that are not a marker or a lock of RayFed."""
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
def output_errors(path: Path) -> Iterator[None]:
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
