"""The command python -m rayfed.prepare: checks a data set, decodes it, draws its partition."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rayfed.errors import ConfigError, shown
from rayfed.terminal.arguments import Arguments, parser_of
from rayfed.terminal.console import say, screen_of, use_screen
from rayfed.terminal.exit_code import run_guarded
from rayfed.user_files import is_folder, user_folder

if TYPE_CHECKING:
    from rayfed.data.published import PublishedDataset

USAGE = """\
python -m rayfed.prepare NAME --root DIR
    [model=NAME | --image-size N] [--cache DIR] [--plot FILE] [--json]
    [--show N] [--clean] [overrides] [--debug]
python -m rayfed.prepare --clean

Compares domains, classes and images of a data set with those that its authors
published, decodes all images once into the cache, in the size that the model
takes, and says what is missing and where to download it. Overrides are those
of python -m rayfed.run:
  python -m rayfed.prepare pacs --root PACS model=vit_base_patch16_224
  python -m rayfed.prepare pacs --root PACS --plot clients.png seed=1
  python -m rayfed.prepare image_folder --root MY_IMAGES
With --show N it prints the first N texts as the model reads them, and the
tokens that a language model learns to write between ‹ and ›:
  python -m rayfed.prepare jsonl --root chats.jsonl model=hf/NAME --show 3
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line. Exit code: 0 prepared, 1 failed, 2 data missing or bad, 130 interrupted."""
    args = _parser().parse_args(argv)
    # Unreadable images are in the result; what a reader says about the folder is not.
    levels = {"rayfed.data": logging.ERROR, "rayfed.data.readers": logging.WARNING}
    before = {name: logging.getLogger(name).level for name in levels}
    try:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
        return run_guarded(lambda: work(args), args.debug, "no incomplete file is left in the cache")
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)


def _parser() -> Arguments:
    parser = parser_of("rayfed.prepare", USAGE)
    parser.add_argument("name", nargs="?", help="a data set; rayfed list data shows all")
    parser.add_argument("overrides", nargs="*", default=[], help="key=value, as for rayfed.run")
    parser.add_argument("--root", type=user_folder, help="folder of the data set, or file of a table")
    parser.add_argument("--image-size", type=int, help="side of the images, instead of the model's")
    parser.add_argument("--cache", type=user_folder, help="folder of prepared data sets")
    parser.add_argument("--plot", type=user_folder, metavar="FILE", help="draw the labels of each client")
    parser.add_argument("--show", type=int, metavar="N", help="print the first N texts with learned tokens")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    parser.add_argument(
        "--clean", action="store_true", help="remove prepared data sets: stale ones of NAME, or all"
    )
    return parser


def work(args: argparse.Namespace) -> int:
    """Check and prepare a data set, or clear the cache; returns the exit code.

    Raises:
        ConfigError: The input is wrong, or there is no data set to check.
    """
    from rayfed.data.published import PUBLISHED

    if args.name is None:
        return _clean_all(args)
    if "=" in args.name:
        raise ConfigError(
            f"NAME: {shown(args.name)} is an override; write the name of a data set first, such as pacs, and "
            "its folder as --root DIR"
        )
    if args.image_size is not None and not 1 <= args.image_size <= 4096:
        raise ConfigError(f"--image-size: {args.image_size} is not a side of 1..4096 pixels")
    if args.show is not None and args.show < 1:
        raise ConfigError(f"--show: {args.show} is not a number of texts from 1")
    return _prepare(args, PUBLISHED.get(args.name))


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _clean_all(args: argparse.Namespace) -> int:
    from rayfed.data.data_config import DataConfig
    from rayfed.data.preparation import cache_folder, clean
    from rayfed.prepare.examination import cleaning_text

    if not args.clean:
        raise ConfigError("NAME: missing; write the name of a data set first; rayfed list data shows all")
    say(cleaning_text(*clean(cache_folder(DataConfig(name="", reader="", cache=_text(args.cache))))))
    return 0


def _prepare(args: argparse.Namespace, published: PublishedDataset | None) -> int:
    from rayfed.config.look_up import design_of
    from rayfed.config.schema import load_config
    from rayfed.data.preparation import clean
    from rayfed.engine.setup import without_values
    from rayfed.prepare import examination
    from rayfed.prepare.examination import examine

    _check(args)
    whole = load_config([f"data={args.name}", *args.overrides])
    config = whole.data
    config = replace(config, root=_text(args.root) or config.root, cache=_text(args.cache) or config.cache)
    model = without_values(design_of(replace(whole, data=config)))
    if args.show and model.tokenizer is None:
        raise ConfigError(f"--show: shows texts, and {args.name!r} has none; leave it out")
    size = args.image_size or model.size
    with use_screen(screen_of(quiet=args.json)):
        findings = examine(args.name, config, size, model.resize, model.tokenizer)
    name = "" if args.image_size else whole.model.name
    examination.tell(findings, published, name, size, as_json=args.json)
    if findings.shard is None:
        return 2
    tell: Callable[[str], None] = (lambda _: None) if args.json else say
    if args.show:
        for text in examination.first_texts(findings.shard, config, str(model.tokenizer), args.show):
            tell(text)
    if args.plot:
        examination.plot(config, whole.seed, findings.shard, args.plot, model.resize, model.tokenizer)
        tell(f"clients: {args.plot}")
    if args.clean:
        tell(examination.cleaning_text(*clean(findings.shard.parent, keep=findings.shard)))
    return 0


def _check(args: argparse.Namespace) -> None:
    """Raise ConfigError for a picture that cannot be written, or a folder in place of a name."""
    from rayfed.config.compose import choices
    from rayfed.prepare.examination import check_plot

    if args.plot:
        check_plot(args.plot)
    if is_folder(args.name) and args.name not in choices("data"):
        raise ConfigError(
            f"{args.name!r} is a folder, and no name of a data set; for your own images write "
            f"python -m rayfed.prepare image_folder --root {args.name}"
        )


if __name__ == "__main__":
    sys.exit(main())
