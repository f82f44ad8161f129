"""Writes report.md and the figures of a finished run, and shows its table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rayfed.config.variants import PROTOCOLS
from rayfed.record.files import write_text
from rayfed.record.readers import reading
from rayfed.terminal.fitting import terminal_width

if TYPE_CHECKING:
    from rayfed.config.schema import Config

Tell = Callable[[str], None]


def report(path: Path, tell: Tell, others: tuple[str, ...], figures: bool) -> None:
    """Write report.md with tables and figures, and show the first table.

    Args:
        path: Folder of the run.
        tell: Called with the table as text.
        others: Algorithms whose runs are in `compare/<name>`; then the first table is that of all methods.
        figures: Draw the figures.
    """
    from rayfed.record.layout import COMPARE
    from rayfed.report.comparison import table_of_methods
    from rayfed.report.document import document
    from rayfed.report.run_tables import RunTables
    from rayfed.report.table import final_table

    inside = {f"{COMPARE}/{name}": f"the run of {name}" for name in others}
    with reading(path):
        # The main method of a comparison may have failed in its first round.
        tables = [final_table(path)] if RunTables(path).rounds or not others else []
        if others:
            tables.insert(0, table_of_methods([path, *(path / name for name in inside)]))
        text = document(path, tables, _drawn(path, figures), inside)
    write_text(path / "report.md", text)
    tell("\n" + tables[0].text(terminal_width()))


def report_folds(config: Config, path: Path, folds: Mapping[str, Path], tell: Tell) -> None:
    """The same for the finished runs of a protocol.

    Args:
        config: The experiment of all runs.
        path: Folder of the whole run.
        folds: Folders of the finished runs, such as folds by held-out domain.
        tell: Called with the tables as text.
    """
    from rayfed.report.document import document
    from rayfed.report.protocols import TABLES

    setting = PROTOCOLS[config.protocol].setting
    inside = {fold.name: f"the run with {setting.format(name=name)}" for name, fold in folds.items()}
    with reading(path):
        tables = TABLES[config.protocol](config, folds)
        text = document(path, tables.parts, _drawn(path, config.figures), inside)
    write_text(path / "report.md", text)
    tell("\n" + tables.text(terminal_width()))


def last_words(path: Path, tell: Tell, write: bool) -> None:
    """Say which command shows everything on one page; with `write` (report=true), write that page.

    Args:
        path: Folder of the run.
        tell: Called with a sentence.
        write: Write the page.

    Raises:
        ConfigError: There is a file of somebody else with the name of the page.
    """
    from rayfed.report.page.write import NAME, command, write_report

    if write:
        write_report([path], path / NAME)
        tell(f"everything on one page: {path / NAME}")
    else:
        tell(f"everything on one page: {command(path)}")


def _drawn(path: Path, figures: bool) -> Mapping[str, Path]:
    """Draw the figures of a run if they are wanted; returns their files by title."""
    from rayfed.report.figures import draw_figures

    return draw_figures(path) if figures else {}
