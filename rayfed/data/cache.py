"""The folder of prepared data sets: its location, and the removal of files from it."""

from __future__ import annotations

import fcntl
import os
import re
import tempfile
from pathlib import Path

from rayfed.data.config import DataConfig
from rayfed.documents import user_path
from rayfed.errors import ConfigError


def cache_folder(config: DataConfig) -> Path:
    """The folder of prepared data sets, which is created if it does not exist.

    It is `data.cache`, else $RAYFED_CACHE, else ~/.cache/rayfed.

    Raises:
        ConfigError: The folder cannot be created or written to.
    """
    chosen = config.cache or os.environ.get("RAYFED_CACHE") or "~/.cache/rayfed"
    folder = user_path(chosen, "data.cache").absolute()
    advice = "set data.cache (or RAYFED_CACHE) to a folder you can write to"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as err:
        raise ConfigError(f"data.cache: cannot make {folder} ({err.strerror}); {advice}") from err
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"data.cache: cannot write to {folder}; {advice}")
    try:  # file systems like /proc say that they can be written
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise ConfigError(f"data.cache: cannot write to {folder} ({error.strerror}); {advice}") from error


def clean(cache: Path, keep: Path | None = None) -> tuple[int, int]:
    """Remove prepared data sets, and no other file, except those that are being prepared at the moment.

    Files that were prepared from an earlier state of the data, or with another version of the decoder, are
    not used again; only this function removes them. Lock files stay, because another process may wait for
    one.

    Args:
        cache: Folder of the prepared data sets.
        keep: A prepared data set to keep. Then only files for the same name and image size are removed, which
            are from other states of the same data. None removes all prepared data sets.

    Returns:
        Number of removed files, and the sum of their sizes in bytes.
    """
    count = 0
    num_bytes = 0
    for path in sorted(path.with_suffix(".arrow") for path in cache.glob("*-*.lock") if _is_ours(path)):
        if keep is not None and (path == keep or _subject(path) != _subject(keep)):
            continue
        with path.with_suffix(".lock").open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            for file in (path, *temporaries(path)):
                if file.is_file() and not file.is_symlink():
                    count += 1
                    num_bytes += file.stat().st_size
                    file.unlink()
    return count, num_bytes


SHARD = re.compile(r"[A-Za-z0-9_-]*-\d+-[0-9a-f]{20}")


def _is_ours(lock: Path) -> bool:
    """Whether a lock is that of a shard: an empty file with such a name."""
    return (
        bool(SHARD.fullmatch(lock.stem))
        and not lock.is_symlink()
        and lock.is_file()
        and not lock.stat().st_size
    )


def temporaries(shard: Path) -> list[Path]:
    """What processes have written of a shard that is not complete."""
    pattern = re.compile(re.escape(shard.stem) + r"\.\d+\.tmp")
    return [path for path in shard.parent.glob(f"{shard.stem}.*.tmp") if pattern.fullmatch(path.name)]


def _subject(path: Path) -> str:
    """The name of the data set and the image size, as they begin the file name of a prepared data set."""
    return path.stem.rpartition("-")[0]
