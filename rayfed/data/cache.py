"""The folder of prepared data sets: where it is, and how to empty it."""

from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path

from rayfed.data.config import DataConfig
from rayfed.documents import user_path
from rayfed.errors import ConfigError


def cache_folder(config: DataConfig) -> Path:
    """Where shards are kept: data.cache, else $RAYFED_CACHE, else ~/.cache/rayfed; made if it is not there.

    Raises:
        ConfigError: It cannot be made or written to.
    """
    chosen = config.cache or os.environ.get("RAYFED_CACHE") or "~/.cache/rayfed"
    folder = user_path(chosen, "data.cache").absolute()
    advice = "set data.cache (or RAYFED_CACHE) to a folder you can write to"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"data.cache: cannot make {folder} ({error.strerror}); {advice}") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"data.cache: cannot write to {folder}; {advice}")
    try:  # file systems like /proc say that they can be written
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise ConfigError(f"data.cache: cannot write to {folder} ({error.strerror}); {advice}") from error


def clean(cache: Path, keep: Path | None = None) -> tuple[int, int]:
    """Remove prepared data sets; one that is being prepared right now is left alone.

    Nothing else removes them: what was prepared from an earlier state of the data, or with another version of
    the decoder, is never opened again but stays. Their empty lock files stay, for whoever waits for one.

    Args:
        cache: Folder of shards.
        keep: Remove only what stands for another state of the data of this shard: those of its name and size.
            Without it, all are removed.

    Returns:
        Number of files removed, and bytes freed.
    """
    count, num_bytes = 0, 0
    for path in sorted(path.with_suffix(".arrow") for path in cache.glob("*-*.lock")):
        if keep is not None and (path == keep or _subject(path) != _subject(keep)):
            continue
        with path.with_suffix(".lock").open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            for file in (path, *cache.glob(f"{path.stem}.*.tmp")):
                if file.exists():
                    count, num_bytes = count + 1, num_bytes + file.stat().st_size
                    file.unlink()
    return count, num_bytes


def _subject(path: Path) -> str:
    """Name and size in the file name of a shard."""
    return path.stem.rpartition("-")[0]
