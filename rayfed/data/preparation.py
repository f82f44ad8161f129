"""Prepare a data set: decode its inputs once and write them into an Arrow file in the cache folder.

What cannot fit into memory is refused before the first input is decoded.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import numpy as np
import psutil

from rayfed.data import arrow_file
from rayfed.data.data_config import DataConfig
from rayfed.data.shards import open_dataset
from rayfed.data.source import BadImageError, Decoded, Listing, Source, task_of
from rayfed.data.text import Text, Tokens, flaw_bits
from rayfed.errors import ConfigError, DataError, ResourceError
from rayfed.objective import objective
from rayfed.terminal.console import count_up
from rayfed.user_files import user_path


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
    """Temporary files of processes that write a shard, or did not complete it."""
    pattern = re.compile(re.escape(shard.stem) + r"\.\d+\.tmp")
    return [path for path in shard.parent.glob(f"{shard.stem}.*.tmp") if pattern.fullmatch(path.name)]


def _subject(path: Path) -> str:
    """The name of the data set and the image size, as they begin the file name of a prepared data set."""
    return path.stem.rpartition("-")[0]


MOST_BYTES = 2**31 - 1
"""Largest example that NumPy describes as one record."""


def check_memory(task: str, size: int, at_once: int) -> None:
    """Refuse a size of examples that cannot be prepared on this machine.

    Args:
        task: What the data are for.
        size: Side of an image in pixels, or characters in a window.
        at_once: Examples that are in memory at the same time.

    Raises:
        ResourceError: Says what they need and what there is.
    """
    one = 3 * size**2 if objective(task).pixels else 4 * size
    need, free = one * at_once, psutil.virtual_memory().available
    if one > MOST_BYTES or need > free:
        raise ResourceError(
            f"model.size: {size} needs about {need / 1e9:.1f} GB of memory to prepare examples of that size, "
            f"{free / 1e9:.1f} GB are free; choose a smaller one"
        )


FORMAT = 2
"""Version of the file format; must be raised when the same data give another file."""

MAX_NAMED = 5
"""Number of skipped images that are named in the log as warnings."""

OnBadImage = Literal["stop", "skip"]

Watch = Callable[[int, BadImageError | None], None]
"""Called for every image in order, with its index in the listing and the error if it cannot be decoded."""

log = logging.getLogger(__name__)


def prepare(
    source: Source,
    size: int,
    cache: Path,
    on_bad_image: OnBadImage = "stop",
    check: Callable[[Listing], None] = lambda listing: None,
    watch: Watch | None = None,
) -> Path:
    """Decode a data set into an Arrow file, unless the file exists already.

    Two processes may call this for the same data at the same time: one decodes, the other waits and uses the
    result. A process that is killed leaves a temporary file only, which the next one deletes.

    Args:
        size: Height and width of the images in pixels, or characters in a window.
        cache: Folder of the prepared data sets.
        on_bad_image: `stop` raises on the first image that cannot be decoded, `skip` leaves such images out.
        check: Called with the listing before the first image is decoded; raises an error if the listing
            cannot be used. Not called if the file exists.
        watch: Called after each decoded image. With it, `stop` decodes all images before it raises.

    Returns:
        Path of the Arrow file.

    Raises:
        DataError: An image (`stop`) or every image cannot be decoded, or the data changed while being read.
        ConfigError: The cache has too little space or cannot be written.
    """
    check_memory(task_of(source), size, 8 * _threads() + 1)
    fingerprint = source.fingerprint()
    path = _path(source, fingerprint, size, cache, on_bad_image)
    if _is_whole(path):
        return path
    with _lock(path.with_suffix(".lock")):
        if not _is_whole(path):
            if path.exists():
                log.warning("%s is damaged and is prepared again", path)
            # Only the process with the lock writes these files, so they are left from one that was killed.
            for stale in temporaries(path):
                stale.unlink(missing_ok=True)
            listing = source.scan()
            check(listing)
            if listing.fingerprint != fingerprint:
                raise DataError(f"data set {source.name!r} is being changed; run again when it is complete")
            _Preparation(source, listing, size, on_bad_image, watch).build(path)
    return path


def _path(source: Source, fingerprint: str, size: int, cache: Path, on_bad_image: str) -> Path:
    decoder = f"pillow {metadata.version('pillow')}"  # another version may decode other pixels
    squashed = getattr(source, "resize", "squash") == "squash"
    how = [] if squashed else ["crop"]  # so that files from before there was a choice keep their name
    how += ["flaws"] if objective(task_of(source)).tokens else []  # files that say what was cut of a text
    identity = json.dumps([FORMAT, decoder, source.name, fingerprint, size, on_bad_image, *how])
    safe_name = re.sub(r"[^A-Za-z0-9_-]+", "-", source.name)
    return cache / f"{safe_name}-{size}-{hashlib.sha256(identity.encode()).hexdigest()[:20]}.arrow"


def _is_whole(path: Path) -> bool:
    if not path.exists():
        return False
    try:
        open_dataset(path)
    except DataError:
        return False
    return True


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file; the system releases it when the process ends, however it ends."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("another process prepares the same data; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@dataclass(frozen=True)
class _Preparation:
    """Decodes the images of a listing and writes the file; fields as the arguments of `prepare`."""

    source: Source
    listing: Listing
    size: int
    on_bad_image: OnBadImage
    watch: Watch | None

    def build(self, path: Path) -> None:
        """Write a temporary file and rename it to `path` when it is complete."""
        name = self.source.name
        num_images = len(self.listing.labels)
        began = time.monotonic()
        if not objective(task_of(self.source)).tokens:
            _check_room(path.parent, num_images * self.layout.itemsize)
        log.info("preparing %s: %d images of %d pixels into %s", name, num_images, self.size, path)
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        try:
            self.write(temporary)
            # Images were read after the fingerprint was taken, so one of them may have been replaced since.
            if self.listing.fingerprint != self.source.fingerprint():
                raise DataError(f"data set {name!r} changed while it was being prepared; run again")
            temporary.replace(path)
        except OSError as err:
            raise ConfigError(
                f"data.cache: cannot write {path} ({err.strerror}); free some room, or set another data.cache"
            ) from err
        finally:
            temporary.unlink(missing_ok=True)
        log.info("prepared %s in %.1f s", name, time.monotonic() - began)

    def write(self, path: Path) -> None:
        """Write the images as they are decoded, then the columns and metadata around them."""
        if objective(task_of(self.source)).tokens:
            self.write_tokens(path)
            return
        layout = self.layout
        about = self.about()
        # The text has the same length with any digest and count, because the images follow it in the file.
        placeholder = _text(about, "0" * 64, 0)
        own = self.listing.owners is not None, self.listing.splits is not None
        start = arrow_file.image_start(arrow_file.make_schema(layout.itemsize, placeholder, *own))
        content = hashlib.sha256()
        kept: list[int] = []
        with path.open("wb") as file:
            file.seek(start)
            for indices, rows in self.packed():
                file.write(rows)
                content.update(rows)
                kept.extend(indices)
            self.check_kept(len(kept))
            columns = self.columns(kept)
            _add_columns(content, about, columns)
            file.flush()
            text = _text(about, content.hexdigest(), len(self.listing.labels) - len(kept))
            arrow_file.finish(path, arrow_file.make_schema(layout.itemsize, text, *own), columns)
            os.fsync(file.fileno())

    @property
    def layout(self) -> np.dtype[Any]:
        """Data type of a stored example: that of the reader, if it has one, else that of the task."""
        own = getattr(self.source, "layout", None)
        layout: np.dtype[Any] = (own or objective(task_of(self.source)).layout)(self.size)
        return layout

    def packed(self) -> Iterator[tuple[Sequence[int], Any]]:
        """Indices and bytes of the examples that can be stored, in order, one by one or in large parts."""
        rows = getattr(self.source, "rows", None)
        if rows is None or self.source.stores_images:  # type: ignore[attr-defined]  # it has `rows`
            layout = self.layout
            for index, decoded in self.decoded():
                assert not isinstance(decoded, Text | Tokens)
                yield (index,), arrow_file.pack_row(decoded, layout)
            return
        first = 0
        for part in rows(self.size):
            yield range(first, first + len(part)), part.view(np.uint8).data
            first += len(part)

    def write_tokens(self, path: Path) -> None:
        """Write texts as tokens, which are in memory until all are there, in order and by one thread."""
        what = f"preparing {self.source.name}, texts made tokens"
        rows: list[Any] = []
        with count_up(what, len(self.listing.labels)) as advance:
            for index in range(len(self.listing.labels)):
                advance()
                rows.append(self.source.decode(self.listing, index, self.size))
                if self.watch:
                    self.watch(index, None)
        self.check_kept(len(rows))
        parts = arrow_file.join_texts(rows)
        about, columns = self.about(), self.columns(list(range(len(rows))))
        columns["flaws"] = np.array([flaw_bits(row.flaws) for row in rows], dtype=np.uint8)
        content = hashlib.sha256()
        for name in sorted(parts):
            content.update(parts[name].tobytes())
        _add_columns(content, about, columns)
        arrow_file.write(path, _text(about, content.hexdigest(), 0), parts, columns)

    def columns(self, kept: list[int]) -> dict[str, Any]:
        """Values of the columns next to the inputs, of the samples that are kept."""
        listing = self.listing
        return {
            "label": listing.labels[kept],
            "domain": listing.domain[kept],
            "test": listing.test[kept].astype(np.uint8),
            "key": [listing.keys[index] for index in kept],
            **({} if listing.splits is None else {"split": listing.splits[kept]}),
            **({} if listing.owners is None else {"owner": [listing.owners[index] for index in kept]}),
        }

    def about(self) -> dict[str, Any]:
        """The metadata of the data set that the file holds, without its digest."""
        return {
            "name": self.source.name,
            "classes": self.listing.classes,
            "domains": self.listing.domains,
            "size": self.size,
            "fingerprint": self.listing.fingerprint,
            "task": task_of(self.source),
            "grouped": self.listing.grouped,
            **({"said": said} if (said := getattr(self.source, "said", "")) else {}),
            **({"test_name": self.listing.test_name} if self.listing.test_name else {}),
            **({"layout": _describe(self.layout)} if hasattr(self.source, "layout") else {}),
        }

    def check_kept(self, num_kept: int) -> None:
        """Raise DataError if no image was decoded, or under `stop` not every image."""
        total = len(self.listing.labels)
        if not num_kept:
            raise DataError(f"none of the {total} images of {self.source.name!r} can be decoded")
        if self.on_bad_image == "stop" and num_kept < total:
            bad = total - num_kept
            raise DataError(f"{bad} of the {total} images of {self.source.name!r} cannot be decoded")

    def decoded(self) -> Iterator[tuple[int, Decoded]]:
        """Index and arrays of each image that can be decoded, in order."""
        skipped = 0
        what = f"preparing {self.source.name}, {objective(task_of(self.source)).examples} decoded"
        counting = count_up(what, len(self.listing.labels))
        with contextlib.closing(self.decoding()) as pending, counting as advance:
            for index, future in pending:
                advance()
                try:
                    yield index, future.result()
                    if self.watch:
                        self.watch(index, None)
                except BadImageError as err:
                    if self.watch:
                        self.watch(index, err)
                        continue
                    if self.on_bad_image == "stop":
                        raise
                    skipped += 1
                    log.log(logging.WARNING if skipped <= MAX_NAMED else logging.DEBUG, "left out: %s", err)

    def decoding(self) -> Generator[tuple[int, Future[Decoded]], None, None]:
        """Index and future of each image, in order; threads decode up to 8 images each in advance.

        Threads help because Pillow releases the interpreter lock while it decodes.
        """
        threads = _threads()
        total = len(self.listing.labels)
        ahead: deque[Future[Decoded]] = deque()
        with ThreadPoolExecutor(threads, thread_name_prefix="decode") as pool:
            try:
                for index in range(total + 8 * threads):
                    if index < total:
                        ahead.append(pool.submit(self.source.decode, self.listing, index, self.size))
                    if 0 <= (done := index - 8 * threads) < total:
                        yield done, ahead.popleft()
            finally:
                pool.shutdown(cancel_futures=True)


def _check_room(folder: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if num_bytes > free:
        need = f"needs {num_bytes / 1e9:.1f} GB for decoded images, {free / 1e9:.1f} GB are free"
        raise ConfigError(f"data.cache: {folder} {need}; set data.cache to a larger disk")


def _text(about: dict[str, Any], digest: str, skipped: int) -> str:
    return json.dumps(about | {"digest": digest, "skipped": f"{skipped:012d}"})


def _add_columns(content: Any, about: dict[str, Any], columns: dict[str, Any]) -> None:
    """Add keys, labels, domains and test flags to the hash of the images."""
    names = [about["classes"], about["domains"], about["size"], columns["key"]]
    content.update(json.dumps(names).encode())
    for name in ("label", "domain", "test"):
        content.update(columns[name].tobytes())
    if "owner" in columns:
        content.update(json.dumps(columns["owner"]).encode())
    if "split" in columns:
        content.update(columns["split"].tobytes())
    if "layout" in about:
        content.update(json.dumps(about["layout"]).encode())


def _describe(layout: np.dtype[Any]) -> list[list[Any]]:
    """A structured type as JSON: name, type and shape of each field."""
    assert layout.names is not None
    assert layout.fields is not None
    fields = {name: layout.fields[name][0] for name in layout.names}
    return [[name, kind.base.str, list(kind.shape)] for name, kind in fields.items()]


def _threads() -> int:
    """Threads that decode images: one per processor core, at most 8."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(8, cores)
