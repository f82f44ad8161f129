"""Writes report.md and the figures of a finished run, and shows its table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rayfed.record.files import write_text
from rayfed.record.readers import reading

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
    from rayfed.report.run_tables import RunTables
    from rayfed.report.table import final_table

    with reading(path):
        # The main method of a comparison may have failed in its first round.
        tables = [final_table(path)] if RunTables(path).rounds or not others else []
        if others:
            tables.insert(0, table_of_methods([path, *(path / COMPARE / name for name in others)]))
        pictures = _pictures(path) if figures else ""
    write_text(path / "report.md", "\n".join(table.markdown() for table in tables) + pictures)
    tell("\n" + tables[0].text())


def report_folds(config: Config, path: Path, folds: Mapping[str, Path], tell: Tell) -> None:
    """The same for the finished folds of protocol=leave_one_out.

    Args:
        config: The experiment of all folds.
        path: Folder of the whole run.
        folds: Folders of the finished folds by held-out domain.
        tell: Called with the tables as text.
    """
    from rayfed.report.leave_one_out import table_of

    with reading(path):
        table = table_of(config, folds)
        pictures = _pictures(path) if config.figures else ""
    write_text(path / "report.md", table.markdown() + pictures)
    tell("\n" + table.text())


def _pictures(path: Path) -> str:
    """Draw the figures of a run; returns the lines of report.md that show them."""
    from rayfed.report.figures import draw_figures

    drawn = draw_figures(path).items()
    return "".join(f"\n![{title}](figures/{file.name})\n" for title, file in drawn)
