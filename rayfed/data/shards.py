"""Decoded inputs, mostly images, in one Arrow file: made once, memory-mapped by every process."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rayfed.data.formats import arrow_file
from rayfed.data.memory import check_memory
from rayfed.data.source import BadImageError, Decoded, Listing, Source, task_of
from rayfed.errors import ConfigError, DataError
from rayfed.objective import CLASSIFICATION, objective

FORMAT = 1
"""Goes up when the content of a shard changes for the same data."""

MAX_NAMED = 5
"""Skipped images that are named in the log."""

OnBadImage = Literal["stop", "skip"]

Watch = Callable[[int, BadImageError | None], None]
"""Is told of every image in order: its index in the listing, and why it cannot be decoded if so."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, eq=False)
class Dataset:
    """A prepared data set. Pickles as its path, so sending one to another process of the node costs nothing.

    Attributes:
        name: Name of the data set.
        classes: Class names; a label is an index into them.
        domains: Domain names.
        images: The inputs, a read-only view of the memory map: RGB, uint8, shape (N, size, size, 3), or what
            the layout of the task says.
        labels: int64, shape (N,), read-only.
        domain: Index into `domains`, int64, shape (N,), read-only.
        test: Whether the sample is in the data set's own test split, bool, shape (N,), read-only.
        digest: sha256 of images, keys, labels, domains, test flags: the same for the same content anywhere.
        skipped: Images left out because they could not be decoded.
        size: Side of the images in pixels.
        path: The shard.
        key_column: The keys as Arrow array.
        masks: Targets that the task has beside the inputs, shape (N, ...); None: the labels say it all.
        task: What the data are for (`rayfed.objective`).
        grouped: See `Listing`.
    """

    name: str
    classes: tuple[str, ...]
    domains: tuple[str, ...]
    images: NDArray[np.uint8]
    labels: NDArray[np.int64]
    domain: NDArray[np.int64]
    test: NDArray[np.bool_]
    digest: str
    skipped: int
    size: int
    path: Path
    key_column: Any
    masks: NDArray[Any] | None = None
    task: str = CLASSIFICATION
    grouped: bool = False

    @cached_property
    def keys(self) -> list[str]:
        """One name per sample, `domain/class/file`."""
        return self.key_column.to_pylist()

    @property
    def targets(self) -> NDArray[Any]:
        """What a model shall answer: masks, or labels."""
        return self.labels if self.masks is None else self.masks

    def __len__(self) -> int:
        return len(self.labels)

    def __reduce__(self) -> tuple[Any, ...]:
        return open_dataset, (self.path,)


def shard_path(source: Source, size: int, cache: Path, on_bad_image: OnBadImage) -> Path:
    """Where the shard of this data is, or would be. Another state of the data has another path."""
    return _path(source.name, source.fingerprint(), size, cache, on_bad_image)


def prepare(
    source: Source,
    size: int,
    cache: Path,
    on_bad_image: OnBadImage = "stop",
    check: Callable[[Listing], None] = lambda listing: None,
    watch: Watch | None = None,
) -> Path:
    """Decode a data set once into an Arrow file; do nothing if that has been done.

    Two processes may call this at once: one works, the other waits and uses the result. One that is killed
    leaves nothing that is mistaken for a shard.

    Args:
        source: The reader.
        size: Side of the square images in pixels.
        cache: Folder of shards.
        on_bad_image: `stop` raises on the first image that cannot be decoded, `skip` leaves such images out.
        check: Called before the first image is decoded, if any will be; raises if the listing will not do.
        watch: Follows the work, if any is done. With it, `stop` goes through all images before it raises.

    Raises:
        DataError: An image is bad (`stop`), all are, or the data changed meanwhile.
        ConfigError: There is no room in the cache.
    """
    check_memory(task_of(source), size, 8 * _threads() + 1)
    fingerprint = source.fingerprint()
    path = _path(source.name, fingerprint, size, cache, on_bad_image)
    if _is_whole(path):
        return path
    with _lock(path.with_suffix(".lock")):
        if not _is_whole(path):
            # Only who holds the lock writes these, so they are from a process that was killed.
            for stale in path.parent.glob(f"{path.stem}.*.tmp"):
                stale.unlink(missing_ok=True)
            listing = source.scan()
            check(listing)
            if listing.fingerprint != fingerprint:
                raise DataError(f"data set {source.name!r} is being changed; run again when it is complete")
            _build(source, listing, size, path, on_bad_image, watch)
    return path


def open_dataset(path: Path) -> Dataset:
    """Map a prepared data set; reads no images.

    Raises:
        DataError: There is no whole shard at the path.
    """
    import pyarrow as pa

    try:
        reader = pa.ipc.open_file(pa.memory_map(str(path)))
        about = json.loads(reader.schema.metadata[arrow_file.META])
        batch = reader.get_batch(0)
        _check_batch(batch, about)
        return _dataset(path, about, batch)
    except (OSError, pa.ArrowException, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path} is not a prepared data set ({error}); delete it and run again") from error


def _check_batch(batch: Any, about: dict[str, Any]) -> None:
    """Raise ValueError for columns that would be read past their end, or point at nothing."""
    if not len(batch):
        raise ValueError("it holds no image")
    batch.validate()
    batch.column("key").validate(full=True)
    labels = [("label", "classes")] if about.get("task", CLASSIFICATION) == CLASSIFICATION else []
    for column, names in (*labels, ("domain", "domains")):
        values = batch.column(column).to_numpy()
        if values.min() < 0 or values.max() >= len(about[names]):
            raise ValueError(f"a {column} is outside of its {len(about[names])} {names}")
    if batch.column("test").to_numpy().max() > 1:
        raise ValueError("a test flag is neither 0 nor 1")


def _dataset(path: Path, about: dict[str, Any], batch: Any) -> Dataset:
    task = about.get("task", CLASSIFICATION)
    rows = arrow_file.rows_of(batch, objective(task).layout(about["size"]))
    return Dataset(
        name=about["name"],
        classes=tuple(about["classes"]),
        domains=tuple(about["domains"]),
        images=rows["input"],
        labels=batch.column("label").to_numpy(),
        domain=batch.column("domain").to_numpy(),
        test=batch.column("test").to_numpy().view(np.bool_),
        digest=about["digest"],
        skipped=int(about["skipped"]),
        size=about["size"],
        path=path,
        key_column=batch.column("key"),
        masks=rows["target"] if "target" in (rows.dtype.names or ()) else None,
        task=task,
        grouped=bool(about.get("grouped")),
    )


def _path(name: str, fingerprint: str, size: int, cache: Path, on_bad_image: str) -> Path:
    decoder = f"pillow {metadata.version('pillow')}"  # another one may give other pixels
    identity = json.dumps([FORMAT, decoder, name, fingerprint, size, on_bad_image])
    safe_name = re.sub(r"[^A-Za-z0-9_-]+", "-", name)
    return cache / f"{safe_name}-{size}-{hashlib.sha256(identity.encode()).hexdigest()[:20]}.arrow"


def _is_whole(path: Path) -> bool:
    if not path.exists():
        return False
    try:
        open_dataset(path)
    except DataError as error:
        logger.warning("preparing the data again: %s", error)
        return False
    return True


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """One process at a time; the system lets go of the lock when its holder dies."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("another process prepares the same data; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(
    source: Source, listing: Listing, size: int, path: Path, on_bad_image: OnBadImage, watch: Watch | None
) -> None:
    began = time.monotonic()
    _check_room(path.parent, len(listing.labels) * objective(task_of(source)).layout(size).itemsize)
    logger.info("preparing %s: %d images of %d pixels into %s", source.name, len(listing.labels), size, path)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        _write(source, listing, size, temporary, on_bad_image, watch)
        # Images were read after the fingerprint; one replaced meanwhile must not hide behind the old one.
        if listing.fingerprint != source.fingerprint():
            raise DataError(f"data set {source.name!r} changed while it was being prepared; run again")
        temporary.replace(path)
    except OSError as error:
        raise ConfigError(
            f"data.cache: cannot write {path} ({error.strerror}); free some room, or set another data.cache"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)
    logger.info("prepared %s in %.1f s", source.name, time.monotonic() - began)


def _threads() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(8, cores)


def _check_room(folder: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if num_bytes > free:
        need = f"needs {num_bytes / 1e9:.1f} GB for decoded images, {free / 1e9:.1f} GB are free"
        raise ConfigError(f"data.cache: {folder} {need}; set data.cache to a larger disk")


def _write(
    source: Source, listing: Listing, size: int, path: Path, on_bad_image: OnBadImage, watch: Watch | None
) -> None:
    layout = objective(task_of(source)).layout(size)
    width = layout.itemsize
    about = {
        "name": source.name,
        "classes": listing.classes,
        "domains": listing.domains,
        "size": size,
        "fingerprint": listing.fingerprint,
        "task": task_of(source),
        "grouped": listing.grouped,
    }
    # Of fixed length, because the place of the images depends on the length of the text.
    start = arrow_file.image_start(arrow_file.make_schema(width, _text(about, "0" * 64, 0)))
    content, kept = hashlib.sha256(), []
    with path.open("wb") as file:
        file.seek(start)
        for index, decoded in _decoded(source, listing, size, on_bad_image, watch):
            row = arrow_file.packed(decoded, layout)
            file.write(row)
            content.update(row)
            kept.append(index)
        if not kept:
            raise DataError(f"none of the {len(listing.labels)} images of {source.name!r} can be decoded")
        if on_bad_image == "stop" and (bad := len(listing.labels) - len(kept)):
            raise DataError(f"{bad} of the {len(listing.labels)} images of {source.name!r} cannot be decoded")
        columns = {
            "label": listing.labels[kept],
            "domain": listing.domain[kept],
            "test": listing.test[kept].astype(np.uint8),
            "key": [listing.keys[index] for index in kept],
        }
        _add_to(content, about, columns)
        file.flush()
        text = _text(about, content.hexdigest(), len(listing.labels) - len(kept))
        arrow_file.finish(path, arrow_file.make_schema(width, text), columns)
        os.fsync(file.fileno())


def _text(about: dict[str, Any], digest: str, skipped: int) -> str:
    return json.dumps(about | {"digest": digest, "skipped": f"{skipped:012d}"})


def _add_to(content: Any, about: dict[str, Any], columns: dict[str, Any]) -> None:
    known = [about["classes"], about["domains"], about["size"], columns["key"]]
    content.update(json.dumps(known).encode())
    for name in ("label", "domain", "test"):
        content.update(columns[name].tobytes())


def _decoded(
    source: Source, listing: Listing, size: int, on_bad_image: OnBadImage, watch: Watch | None
) -> Iterator[tuple[int, Decoded]]:
    """Index and image in order, decoded a little ahead by threads (Pillow lets go of the interpreter)."""
    threads = _threads()
    ahead: deque[Future[Decoded]] = deque()
    total, skipped = len(listing.labels), 0
    with ThreadPoolExecutor(threads, thread_name_prefix="decode") as pool:
        try:
            for index in range(total + 8 * threads):
                if index < total:
                    ahead.append(pool.submit(source.decode, listing, index, size))
                done = index - 8 * threads
                if not 0 <= done < total:
                    continue
                try:
                    yield done, ahead.popleft().result()
                    if watch:
                        watch(done, None)
                except BadImageError as error:
                    if watch:
                        watch(done, error)
                        continue
                    if on_bad_image == "stop":
                        raise
                    skipped += 1
                    logger.log(
                        logging.WARNING if skipped <= MAX_NAMED else logging.DEBUG, "skipped: %s", error
                    )
        finally:
            pool.shutdown(cancel_futures=True)
