"""Writes the page about runs and its JSON file; a file that is no such page is never replaced."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rayfed.documents import check_own
from rayfed.errors import ConfigError
from rayfed.record.files import write_text
from rayfed.terminal.stages import stage

HTML, JSON = ".html", ".json"
NAME = f"report{HTML}"
"""The file in the folder of a run."""


def command(path: Path) -> str:
    """The command that writes the page about a folder, to be shown to the user."""
    import shlex

    return f"python -m rayfed.report {shlex.quote(str(path))}"


def page_file(runs: Sequence[Path], out: Path | None) -> Path:
    """The file that is written.

    Args:
        runs: The folders.
        out: What the user asked for; None: `report.html` in the folder, or here for several folders.

    Raises:
        ConfigError: It does not end in .html, or is in no folder.
    """
    if out is None:
        return runs[0] / NAME if len(runs) == 1 else Path(NAME)
    if out.suffix != HTML:
        raise ConfigError(f"--out: {str(out)!r} does not end in {HTML}, as the name of the page has to")
    if not out.parent.is_dir():
        raise ConfigError(f"--out: there is no folder {str(out.parent)!r}; make it first")
    return out


def write_report(runs: Sequence[Path], file: Path) -> None:
    """Write the page about the runs in these folders, and a JSON file with the same numbers beside it.

    Args:
        runs: Folders of runs, comparisons, folds, sweeps or reproduced tables.
        file: The page.

    Raises:
        ConfigError: A folder holds no run, or there is a file that is no page of RayFed.
        DamagedError: A file in a folder cannot be read.
        StorageError: A file cannot be written.
    """
    from rayfed.report.page.render import GENERATOR, html, json_text
    from rayfed.report.page.several import page_of

    twin = file.with_suffix(JSON)
    for each in (file, twin):
        check_own("--out", each, GENERATOR)
    stage("reading the runs")
    page = page_of(runs)
    stage("writing the page")
    numbers = json_text(page)
    write_text(file, html(page, numbers))
    write_text(twin, numbers)
