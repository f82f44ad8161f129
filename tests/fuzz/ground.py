"""What cases start from: a finished run, a folder of images, a partition, and a folder to be alone in."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import yaml

from rayfed import run
from tests.fuzz.outcomes import StartedError, tree_of
from tests.rayfed.data.folders import make_folder

BASE = (
    "algorithm=fedavg",
    "rounds=1",
    "data.limit=24",
    "model.options={depth: 2}",
    "model.pretrained=false",
    "tuning.rank=2",
    "cluster=inline",
    "data.cache=cache",
    "tensorboard=false",
)
"""The experiment of every case; its paths are relative, so that a damaged one stays in the case's folder."""


@dataclass(frozen=True)
class Ground:
    """Attributes: path: its folder. run: files of a finished run. tree: its config."""

    path: Path
    run: dict[str, bytes]
    tree: dict[str, Any]
    partition: bytes

    @contextlib.contextmanager
    def case(self) -> Iterator[Path]:
        """A folder of one case, which is gone afterwards; paths are relative to the ground."""
        folder = self.path / "case"
        before = Path.cwd()
        os.chdir(self.path)
        try:
            folder.mkdir()
            yield Path("case")
        finally:
            os.chdir(before)
            shutil.rmtree(folder, ignore_errors=True)


def prepare(path: Path) -> Ground:
    """Run the small experiment once."""
    before = Path.cwd()
    os.chdir(path)
    try:
        with without_figures():
            assert run.main([*BASE, "output=run", "--quiet"]) == 0
    finally:
        os.chdir(before)
    make_folder(path / "images", count=6, side=8)
    files = tree_of(path / "run")
    return Ground(path, files, yaml.safe_load(files["config.yaml"]), files["partition.parquet"])


def with_base(pairs: list[str]) -> list[str]:
    """The base with these overrides in front, which replace its own."""
    given = {text.partition("=")[0].strip() for text in pairs}
    return [*pairs, *(text for text in BASE if text.partition("=")[0] not in given)]


@contextlib.contextmanager
def stopping() -> Iterator[None]:
    """Stop where actors would start, and compose the groups once for all cases."""

    def started(*args: Any, **kwargs: Any) -> None:
        raise StartedError

    names = ("rayfed.engine.session.launch", "ray.init", "ray.remote")
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(mock.patch(name, started))
        yield


@contextlib.contextmanager
def without_figures() -> Iterator[None]:
    """Draw nothing, which takes most of the time of a case that runs to its end."""
    with mock.patch("rayfed.report.figures.draw_figures", return_value={}):
        yield
