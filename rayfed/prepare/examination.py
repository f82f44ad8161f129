"""Compares a data set on disk with what its authors published, and decodes it once into the cache."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from PIL import UnidentifiedImageError

from rayfed.data import instead
from rayfed.data.config import DataConfig, Resize
from rayfed.data.preparation import cache_folder, prepare
from rayfed.data.published import PUBLISHED, Inventory, PublishedDataset, nearby, take_inventory
from rayfed.data.source import BadImageError, Listing, Source, source_of
from rayfed.errors import ConfigError, one_line


@dataclass(frozen=True, kw_only=True)
class Findings:
    """Result of the check of a data set.

    Attributes:
        name: Name of the data set in `data=NAME`.
        root: Its folder.
        inventory: Numbers of classes and images per domain, and problems.
        unreadable: Key and reason for each image that cannot be decoded.
        shard: File of the prepared data set; None if it was not prepared.
        seconds: Seconds of preparing; 0 if it was prepared before.
    """

    name: str
    root: str | None
    inventory: Inventory
    unreadable: tuple[str, ...]
    shard: Path | None
    seconds: float

    @property
    def ok(self) -> bool:
        return self.shard is not None


def examine(name: str, config: DataConfig, image_size: int, resize: Resize = "squash") -> Findings:
    """Check a data set and prepare it if nothing is missing.

    Args:
        name: Name of the data set in `data=NAME`.
        config: The config section `data`.
        image_size: Height and width of the prepared images in pixels.
        resize: How images become squares under `data.resize=auto`.

    Raises:
        ConfigError: The folder does not exist, holds no images, or has lists that cannot be read.
    """
    published = PUBLISHED.get(name)
    source = source_of(config, resize)
    try:
        listing = source.scan()
    except ConfigError as error:
        raise ConfigError(f"{error}{_hint(config.root, published)}") from error
    inventory = take_inventory(listing, published)
    if published and not set(published.domains) & set(listing.domains):
        raise ConfigError(
            f"data.root: {config.root} has none of the domains {', '.join(published.domains)}"
            f"{instead(listing.domains)}{_hint(config.root, published)}"
        )
    unreadable: list[str] = []
    shard: Path | None = None
    seconds = 0.0
    if not inventory.problems:
        shard, seconds = _prepare(source, listing, image_size, config, unreadable)
    return Findings(
        name=name,
        root=config.root,
        inventory=inventory,
        unreadable=tuple(unreadable),
        shard=shard,
        seconds=seconds,
    )


def _prepare(
    source: Source,
    listing: Listing,
    image_size: int,
    config: DataConfig,
    unreadable: list[str],
) -> tuple[Path | None, float]:
    """Prepare the data set; add unreadable images to `unreadable`.

    Returns:
        The prepared file, or None if images are unreadable; and the seconds of decoding.
    """
    began = time.perf_counter()
    decoded = False

    def watch(index: int, error: BadImageError | None) -> None:
        nonlocal decoded
        decoded = True
        if error:
            unreadable.append(f"{listing.keys[index]} ({_why_unreadable(error)})")

    try:
        path = prepare(source, image_size, cache_folder(config), config.on_bad_image, watch=watch)
    except ConfigError:
        if not unreadable:
            raise
        return None, time.perf_counter() - began
    return path, time.perf_counter() - began if decoded else 0.0


def _why_unreadable(error: BadImageError) -> str:
    """The cause of an error, without the name of the file."""
    cause = error.__cause__ or error
    if isinstance(cause, FileNotFoundError):
        return "no such file"
    return "unknown image format" if isinstance(cause, UnidentifiedImageError) else one_line(cause)


def _hint(root: str | None, published: PublishedDataset | None) -> str:
    """A hint at the data: a folder near `root`, or the address of the authors."""
    if published is None:
        return ""
    if place := nearby(root, published.domains):
        return f"; they are in {place}: use --root {place}"
    return f". Get it from {published.source}"
