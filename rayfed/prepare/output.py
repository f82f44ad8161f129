"""Shows the result of preparing a data set as a table or as JSON, and draws the partition."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rayfed.data.config import DataConfig, Resize
from rayfed.data.published import PublishedDataset
from rayfed.data.shards import open_dataset
from rayfed.documents import check_own
from rayfed.errors import ConfigError
from rayfed.objective import SEGMENTATION
from rayfed.prepare.examination import Findings
from rayfed.report.table import Table
from rayfed.terminal.console import say, size
from rayfed.terminal.fitting import terminal_width

MAKER = "rayfed.prepare"
"""Name in the files of `--plot`, by which they are known."""
NAMED = 10
"""Largest number of unreadable files that are listed."""


def tell(
    found: Findings, published: PublishedDataset | None, model: str, size_of_input: int, as_json: bool
) -> None:
    """Show the findings.

    Args:
        found: What was found.
        published: What the authors published; None for other data sets.
        model: The model for which the data set was prepared; empty where the user gave a size.
        size_of_input: Side of the prepared images in pixels, or characters in a window.
        as_json: Write a JSON object instead of text.
    """
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
    say(Table(total, columns, tuple(rows), inventory.notes).text(terminal_width()))
    stream = sys.stdout if found.ok else sys.stderr
    for line in _complaints(found):
        say(line, stream)
    if published and (inventory.notes or not found.ok):
        say(f"the whole data set: {published.source}", stream)
    if found.shard:
        how = f"prepared in {found.seconds:.1f} s" if found.seconds else "prepared before"
        say(f"{how}: {found.shard} ({size(found.shard.stat().st_size)})")
        if model:
            say(f"for model={model}, with inputs of size {size_of_input}; for another model, add model=NAME")


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


def cleaned(count: int, num_bytes: int) -> str:
    return f"removed {count} prepared {'file' if count == 1 else 'files'}, {size(num_bytes)}"


def check_plot(path: Path) -> None:
    """Check that a picture can be written without replacing another file.

    Raises:
        ConfigError: The name does not end in .png, its folder does not exist, or somebody else's file has it.
    """
    if path.suffix != ".png":
        raise ConfigError(f"--plot: {str(path)!r} does not end in .png, as the name of the picture has to")
    if not path.parent.is_dir():
        raise ConfigError(f"--plot: there is no folder {str(path.parent)!r}; make it first")
    check_own("--plot", path, MAKER)


def plot(config: DataConfig, seed: int, shard: Path, path: Path, resize: Resize) -> None:
    from rayfed.data import load
    from rayfed.data.partition.make import make_partition
    from rayfed.data.partition.manifest import to_table
    from rayfed.report.method_figures import draw_partition

    dataset = load(config, open_dataset(shard).size, resize=resize)
    partition = make_partition(dataset.labels, dataset.domain, dataset.test, dataset.domains, config, seed)
    drawing = draw_partition(
        to_table(partition, dataset), dataset.classes, dataset.name, dataset.task != SEGMENTATION
    )
    if drawing:
        drawing.write(path, MAKER)
