"""Examination of a data set by rayfed.prepare, and the texts and the plot that it shows."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from PIL import UnidentifiedImageError

from rayfed.data.data_config import DataConfig, Resize
from rayfed.data.load_dataset import instead, with_tokens
from rayfed.data.preparation import cache_folder, prepare
from rayfed.data.published import PUBLISHED, Inventory, PublishedDataset, take_inventory
from rayfed.data.shards import open_dataset
from rayfed.data.source import BadImageError, Listing, Source, source_of, task_of
from rayfed.data.text import FLAWS, TYPE_BITS, Inputs, Targets
from rayfed.data.tokenizer import load_tokenizer
from rayfed.data.tokens import Tokenized
from rayfed.errors import ConfigError, one_line, printable
from rayfed.objective import SEGMENTATION, objective
from rayfed.terminal.console import say, size
from rayfed.terminal.table_formats import Table, terminal_width
from rayfed.user_files import check_own, nearby


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
        examples: What the examples are called, such as images.
    """

    name: str
    root: str | None
    inventory: Inventory
    unreadable: tuple[str, ...]
    shard: Path | None
    seconds: float
    examples: str = "images"

    @property
    def ok(self) -> bool:
        return self.shard is not None


def examine(
    name: str,
    config: DataConfig,
    image_size: int,
    resize: Resize = "squash",
    tokenizer: str | None = None,
) -> Findings:
    """Check a data set and prepare it if nothing is missing.

    Args:
        name: Name of the data set in `data=NAME`.
        image_size: Height and width of the prepared images in pixels.
        resize: How images become squares under `data.resize=auto`.
        tokenizer: Folder or name of the model whose tokenizer makes tokens of texts.

    Raises:
        ConfigError: The folder does not exist, holds no images, or has lists that cannot be read.
    """
    published = PUBLISHED.get(name)
    source = with_tokens(source_of(config, resize), config, tokenizer)
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
        examples=objective(task_of(source)).examples,
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
            unreadable.append(f"{printable(listing.keys[index])} ({_why_unreadable(error)})")

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


MAKER = "rayfed.prepare"
"""Name in the files of `--plot`, by which they are known."""
NAMED = 10
"""Largest number of unreadable files that are listed."""


def tell(
    findings: Findings, published: PublishedDataset | None, model: str, size_of_input: int, as_json: bool
) -> None:
    """Show the findings.

    Args:
        findings: What was found.
        published: What the authors published; None for other data sets.
        model: The model for which the data set was prepared; empty where the user gave a size.
        size_of_input: Side of the prepared images in pixels, or characters in a window.
        as_json: Write a JSON object instead of text.
    """
    if as_json:
        say(json.dumps(_as_json(findings), indent=1, allow_nan=False))
        return
    inventory = findings.inventory
    official = any(row.test for row in inventory.rows)
    columns = ("domain", "classes", findings.examples, *(["test"] if official else []), "published")
    rows = []
    for row in inventory.rows:
        known = "-" if row.published is None else f"{row.published:,}"
        test = [f"{row.test:,}"] if official else []
        rows.append((row.domain, str(row.classes), f"{row.images:,}", *test, known))
    total = f"{findings.name} in {findings.root}" if findings.root else findings.name
    say(Table(total, columns, tuple(rows), inventory.notes).text(terminal_width()))
    stream = sys.stdout if findings.ok else sys.stderr
    for line in _complaints(findings):
        say(line, stream)
    if published and (inventory.notes or not findings.ok):
        say(f"the whole data set: {published.source}", stream)
    if findings.shard:
        how = f"prepared in {findings.seconds:.1f} s" if findings.seconds else "prepared before"
        say(f"{how}: {findings.shard} ({size(findings.shard.stat().st_size)})")
        if model:
            say(f"for model={model}, with inputs of size {size_of_input}; for another model, add model=NAME")


LEARNED = ("‹", "›")
"""Marks before and behind tokens that a language model learns to write."""

TYPED = "|"
"""The mark where tokens of another type begin."""


def first_texts(shard: Path, config: DataConfig, tokenizer: str, count: int) -> Iterator[str]:
    """The first texts of a prepared data set, as the model reads them, each with a line about it before it.

    Args:
        shard: The file of the data set.
        tokenizer: Folder or name of the model whose tokenizer was used.
        count: Number of texts.
    """
    dataset, words = open_dataset(shard), load_tokenizer(tokenizer)
    source = with_tokens(source_of(config), config, tokenizer)
    inputs, targets = dataset.images, dataset.targets
    assert isinstance(inputs, Inputs)
    assert isinstance(source, Tokenized)
    owners = dataset.owners
    for row in range(min(count, len(dataset))):
        part = slice(int(inputs.starts[row]), int(inputs.starts[row + 1]))
        numbers = inputs.tokens[part]
        ids, types = (numbers & (1 << TYPE_BITS) - 1).tolist(), (numbers >> TYPE_BITS).tolist()
        learned = targets.learned[part].tolist() if isinstance(targets, Targets) else [0] * len(ids)
        facts = [source.place(row)]
        facts += [f"client {owners[row]}"] if owners else []
        if not isinstance(targets, Targets):
            scored = targets.dtype.kind == "f"
            facts += [f"score {targets[row]:g}" if scored else f"class {dataset.classes[int(targets[row])]}"]
        facts += [
            f"{len(ids)} tokens",
            *([f"{sum(learned)} learned"] if isinstance(targets, Targets) else []),
        ]
        bits = 0 if dataset.flaws is None else int(dataset.flaws[row])
        facts += [CUTS[flaw] for place, flaw in enumerate(FLAWS) if bits >> place & 1]
        text = "".join(_marked(words, ids, learned, types))
        lines = "\n".join(printable(line) for line in text.split("\n"))
        yield f"\n{printable(', '.join(facts))}:\n{lines}"


CUTS = {
    "answer": "answer cut",
    "prompt": "prompt cut",
    "text": "text cut",
    "empty": "empty answer",
    "endless": "an answer without an end that is learned",
}
"""Words for the flaws of a text."""


def _marked(tokenizer: Any, ids: list[int], learned: list[int], types: list[int]) -> Iterator[str]:
    """A text in parts, with marks where it begins or ends to be learned, and where types of tokens change."""
    shown, before, kind = "", 0, 0
    for place, (flag, own) in enumerate(zip([*learned, 0], [*types, types[-1] if types else 0], strict=True)):
        if place and flag == before and own == kind and place < len(ids):
            continue
        text = tokenizer.decode(ids[:place], clean_up_tokenization_spaces=False)
        yield text[len(shown) :]
        shown = text
        if flag != before:
            yield LEARNED[0] if flag else LEARNED[1]
        if own != kind:
            yield TYPED
        before, kind = flag, own


def _complaints(findings: Findings) -> Iterator[str]:
    for problem in findings.inventory.problems:
        yield f"problem: {problem}"
    if count := len(findings.unreadable):
        what = "left out" if findings.ok else "problem"
        yield f"{what}: {count} unreadable {'file' if count == 1 else 'files'}"
        for line in findings.unreadable[:NAMED]:
            yield f"  {line}"
        if count > NAMED:
            yield f"  ... and {count - NAMED} more"


def _as_json(findings: Findings) -> dict[str, Any]:
    return {
        "name": findings.name,
        "root": findings.root,
        "ok": findings.ok,
        "domains": [asdict(row) for row in findings.inventory.rows],
        "problems": list(findings.inventory.problems),
        "notes": list(findings.inventory.notes),
        "unreadable": list(findings.unreadable),
        "shard": str(findings.shard) if findings.shard else None,
        "seconds": round(findings.seconds, 3),
    }


def cleaning_text(count: int, num_bytes: int) -> str:
    return f"removed {count} prepared {'file' if count == 1 else 'files'}, {size(num_bytes)}"


def check_plot(path: Path) -> None:
    """Check that a picture can be written without replacing another file.

    Raises:
        ConfigError: The name does not end in .png, its folder does not exist, or another
            file has it.
    """
    if path.suffix != ".png":
        raise ConfigError(f"--plot: {str(path)!r} must end in .png")
    if not path.parent.is_dir():
        raise ConfigError(f"--plot: there is no folder {str(path.parent)!r}; make it first")
    check_own("--plot", path, MAKER)


def plot(
    config: DataConfig, seed: int, shard: Path, path: Path, resize: Resize, tokenizer: str | None
) -> None:
    from rayfed.data.load_dataset import load
    from rayfed.data.partition.make import make_partition
    from rayfed.data.partition.manifest import to_table
    from rayfed.report.method_figures import draw_partition

    dataset = load(config, open_dataset(shard).size, resize=resize, tokenizer=tokenizer)
    partition = make_partition(dataset.labels, dataset.domain, dataset.test, dataset.domains, config, seed)
    drawing = draw_partition(
        to_table(partition, dataset), dataset.classes, dataset.name, dataset.task != SEGMENTATION
    )
    if drawing:
        drawing.write(path, MAKER)
