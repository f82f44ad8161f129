"""python -m rayfed.prepare: check a download, prepare it, show who would get what, clear the cache."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from PIL import UnidentifiedImageError

from rayfed.config.check import parse
from rayfed.config.compose import compose
from rayfed.config.schema import spelled_out
from rayfed.data.cache import cache_folder, clean
from rayfed.data.config import DataConfig
from rayfed.data.download_check import Inventory, take
from rayfed.data.published import PUBLISHED, Published
from rayfed.data.shards import open_dataset, prepare
from rayfed.data.source import BadImageError, Listing, Source, make_source
from rayfed.errors import ConfigError, RayFedError, one_line, shown
from rayfed.report.table import Table
from rayfed.terminal.arguments import Arguments, user_folder
from rayfed.terminal.console import say, size

NAMED = 10
"""Unreadable files that are listed; of the others, the number."""

USAGE = """\
python -m rayfed.prepare NAME --root DIR [--image-size N] [--cache DIR] [--plot FILE] [--json] [--clean]
                             [overrides]
python -m rayfed.prepare --clean

Checks the domains, classes and images of a data set against what its authors published, decodes all images
once into the cache, and says what is missing and where to get it. Overrides are those of rayfed.run:
  python -m rayfed.prepare pacs --root PACS --plot clients.png data.partition.scheme=dirichlet seed=1
"""


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What there is to say about a data set.

    Attributes:
        name: Name of the config group.
        root: Its folder.
        inventory: What the listing holds.
        unreadable: Why each image that cannot be decoded cannot.
        shard: The prepared data set; None if it was not prepared.
        seconds: What preparing took; 0 if it had been done before.
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


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line. Exit code: 0 all well, 1 failed, 2 data missing or bad, 130 interrupted."""
    args = _parser().read(argv)
    logging.basicConfig(level=logging.ERROR, format="%(levelname)s %(name)s: %(message)s")
    try:
        if args.name is None:
            if not args.clean:
                raise ConfigError(f"no data set named; give one of: {', '.join(sorted(PUBLISHED))}")
            cache = cache_folder(DataConfig(name="", reader="", cache=_text(args.cache)))
            say(_cleaned(*clean(cache)))
            return 0
        return _run(args)
    except RayFedError as error:
        say(f"error: {one_line(error)}", sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        say("interrupted; nothing half-made is left in the cache", sys.stderr)
        return 130


def _parser() -> Arguments:
    parser = Arguments("rayfed.prepare", usage=USAGE)
    parser.add_argument("name", nargs="?", help="a data set: a file name in configs/data")
    parser.add_argument("overrides", nargs="*", help="key=value, as for rayfed.run")
    parser.add_argument("--root", type=user_folder, help="folder of the data set")
    parser.add_argument("--image-size", type=int, default=224, help="side of the prepared images (224)")
    parser.add_argument("--cache", type=user_folder, help="folder of prepared data sets")
    parser.add_argument("--plot", type=user_folder, metavar="FILE", help="draw who has which labels")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    parser.add_argument(
        "--clean", action="store_true", help="remove prepared data sets: stale ones of NAME, or all"
    )
    return parser


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _run(args: argparse.Namespace) -> int:
    if not 1 <= args.image_size <= 4096:
        raise ConfigError(f"--image-size: {args.image_size} is not a side of 1..4096 pixels")
    tree = spelled_out(compose([f"data={args.name}", *args.overrides]))
    config = parse(DataConfig, tree["data"], "data")
    config = replace(config, root=_text(args.root) or config.root, cache=_text(args.cache) or config.cache)
    found = examine(args.name, config, args.image_size, quiet=args.json)
    _tell(found, PUBLISHED.get(args.name), as_json=args.json)
    if found.shard is None:
        return 2
    if args.plot:
        _plot(config, _seed(tree), found.shard, args.plot)
        if not args.json:
            say(f"clients: {args.plot}")
    if args.clean:
        removed = clean(found.shard.parent, keep=found.shard)
        if not args.json:
            say(_cleaned(*removed))
    return 0


def _seed(tree: Mapping[str, Any]) -> int:
    seed = tree.get("seed", 0)
    if type(seed) is not int or seed < 0:
        raise ConfigError(f"seed: {shown(seed)} is not a whole number >= 0")
    return seed


def examine(name: str, config: DataConfig, image_size: int, quiet: bool = False) -> Findings:
    """Check a data set and prepare it if nothing is missing.

    Raises:
        ConfigError: There is nothing to check: no such folder, no images, lists that cannot be read.
    """
    published = PUBLISHED.get(name)
    source = make_source(config)
    try:
        listing = source.scan()
    except ConfigError as error:
        raise ConfigError(f"{error}{_hint(config.root, published)}") from error
    inventory = take(listing, published)
    if published and not set(published.domains) & set(listing.domains):
        raise ConfigError(
            f"data.root: {config.root} has none of the domains {', '.join(published.domains)}, but "
            f"{', '.join(listing.domains[:5])}{_hint(config.root, published)}"
        )
    unreadable: list[str] = []
    shard, seconds = None, 0.0
    if not inventory.problems:
        shard, seconds = _prepare(source, listing, image_size, config, unreadable, quiet)
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
    quiet: bool,
) -> tuple[Path | None, float]:
    """The shard, None if there are unreadable images, which are noted; and the seconds it took to decode."""
    began, decoded = time.perf_counter(), False
    with _progress(f"preparing {listing.name}", len(listing.keys), quiet) as advance:

        def watch(index: int, error: BadImageError | None) -> None:
            nonlocal decoded
            decoded = True
            advance()
            if error:
                unreadable.append(f"{listing.keys[index]} ({why_unreadable(error)})")

        try:
            path = prepare(source, image_size, cache_folder(config), config.on_bad_image, watch=watch)
        except ConfigError:
            if not unreadable:
                raise
            return None, time.perf_counter() - began
    return path, time.perf_counter() - began if decoded else 0.0


def why_unreadable(error: BadImageError) -> str:
    """The cause, without the name of the file, which stands beside it."""
    cause = error.__cause__ or error
    if isinstance(cause, FileNotFoundError):
        return "no such file"
    return "no image format that is known" if isinstance(cause, UnidentifiedImageError) else one_line(cause)


@contextlib.contextmanager
def _progress(what: str, total: int, quiet: bool) -> Iterator[Callable[[], None]]:
    """A bar on a terminal, a line every tenth elsewhere."""
    if quiet:
        yield lambda: None
    elif sys.stdout.isatty():
        from rich.progress import Progress

        with Progress(transient=True) as bar:
            task = bar.add_task(what, total=total)
            yield lambda: bar.advance(task)
    else:
        done = 0

        def advance() -> None:
            nonlocal done
            done += 1
            if done * 10 // total > (done - 1) * 10 // total:
                say(f"{what}: {done:,} of {total:,} images")

        yield advance


def _hint(root: str | None, published: Published | None) -> str:
    """Where the data might be: one folder deeper, or at its authors."""
    if published is None:
        return ""
    folder = Path(root).expanduser() if root else Path()
    for deeper in sorted(folder.iterdir()) if root and folder.is_dir() else ():
        if all((deeper / name).is_dir() for name in published.domains):
            return f"; they are in {deeper}: use --root {deeper}"
    return f". Get it from {published.source}"


def _tell(found: Findings, published: Published | None, as_json: bool) -> None:
    if as_json:
        say(json.dumps(_as_json(found), indent=1, allow_nan=False))
        return
    inventory = found.inventory
    official = any(row.test for row in inventory.rows)
    columns = ("domain", "classes", "images", *(["test"] if official else []), "published")
    rows = []
    for row in inventory.rows:
        known = "-" if row.published is None else f"{row.published:,}"
        test = [f"{row.test:,}"] if official else []
        rows.append((row.domain, str(row.classes), f"{row.images:,}", *test, known))
    total = f"{found.name} in {found.root}" if found.root else found.name
    say(Table(total, columns, tuple(rows), inventory.notes).text())
    stream = sys.stdout if found.ok else sys.stderr
    for line in _complaints(found):
        say(line, stream)
    if published and (inventory.notes or not found.ok):
        say(f"the whole data set: {published.source}", stream)
    if found.shard:
        how = f"prepared in {found.seconds:.1f} s" if found.seconds else "prepared before"
        say(f"{how}: {found.shard} ({size(found.shard.stat().st_size)})")


def _complaints(found: Findings) -> Iterator[str]:
    for problem in found.inventory.problems:
        yield f"problem: {problem}"
    if count := len(found.unreadable):
        what = "left out" if found.ok else "problem"
        yield f"{what}: {count} unreadable {'file' if count == 1 else 'files'}"
        for line in found.unreadable[:NAMED]:
            yield f"  {line}"
        if count > NAMED:
            yield f"  ... and {count - NAMED} more"


def _as_json(found: Findings) -> dict[str, Any]:
    return {
        "name": found.name,
        "root": found.root,
        "ok": found.ok,
        "domains": [asdict(row) for row in found.inventory.rows],
        "problems": list(found.inventory.problems),
        "notes": list(found.inventory.notes),
        "unreadable": list(found.unreadable),
        "shard": str(found.shard) if found.shard else None,
        "seconds": round(found.seconds, 3),
    }


def _cleaned(count: int, num_bytes: int) -> str:
    return f"removed {count} prepared {'file' if count == 1 else 'files'}, {size(num_bytes)}"


def _plot(config: DataConfig, seed: int, shard: Path, path: Path) -> None:
    from rayfed.data import load
    from rayfed.data.partition.make import make_partition
    from rayfed.data.partition.manifest import to_table
    from rayfed.report.partition_figure import draw

    dataset = load(config, open_dataset(shard).size)
    partition = make_partition(dataset.labels, dataset.domain, dataset.test, dataset.domains, config, seed)
    draw(to_table(partition, dataset), dataset.classes, path)


if __name__ == "__main__":
    sys.exit(main())
