"""Shows the table of a paper on a terminal while it fills."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rayfed.errors import RayFedError
from rayfed.record.recorded_run import RecordedRun
from rayfed.reproduce import results
from rayfed.reproduce.cell_scores import Folders
from rayfed.reproduce.run_table import TableProgress
from rayfed.terminal.console import Screen, erase, use_screen

if TYPE_CHECKING:
    from rich.table import Table


def table_of(progress: TableProgress) -> Table:
    """The table as it is now: our means, the paper's numbers, and how far each row is."""
    from rich.table import Table

    asked, found = progress.asked, progress.table
    done = f"{len(progress.finished)} of {len(asked.configs)} cells"
    parts = (done, results.verdicts(found), progress.stage)
    table = Table(title=results.title_of(found), caption="; ".join(filter(None, parts)))
    table.add_column("setting")
    table.add_column("row")
    for measure in found.measures:
        table.add_column(measure.name, justify="right")
        table.add_column("paper", justify="right", style="dim")
    table.add_column("cells")
    for setting in asked.settings:
        for row, values in results.ranked_rows(found, setting):
            cells = [text for value, _ in values for text in (results.ours(value), results.paper(value))]
            table.add_row(setting, row, *cells, _state(progress, setting, row))
    return table


def _state(progress: TableProgress, setting: str, row: str) -> str:
    """Number of finished cells of a row, and the progress of those that run."""
    mine = [cell for cell in progress.asked.configs if (cell.setting, cell.row) == (setting, row)]
    words = [f"{sum(cell in progress.finished for cell in mine)}/{len(mine)}"]
    for cell in mine:
        if cell in progress.failed:
            words.append(f"seed {cell.seed} failed")
        elif cell in progress.running:
            rounds = progress.asked.configs[cell].rounds
            words.append(f"seed {cell.seed}{_rounds_of(progress.folders[cell], rounds)}")
    return ", ".join(words)


def _rounds_of(folders: Folders, rounds: int) -> str:
    """The finished rounds of a cell, of all its runs."""
    try:
        done = sum(len(RecordedRun(folder).rounds) for folder in folders.values())
    except RayFedError:
        return ""
    return f": round {done}/{rounds * len(folders)}"


@contextmanager
def live_table(progress: TableProgress) -> Iterator[None]:
    """Show the table on the terminal while the block runs, below the lines about finished cells."""
    from rich.console import Console
    from rich.live import Live

    erase()
    console = Console()
    shown = 0.0
    with Live(table_of(progress), console=console, transient=True, auto_refresh=False) as live:

        def change(now: TableProgress) -> None:
            nonlocal shown
            if time.monotonic() - shown > 1.0:
                shown = time.monotonic()
                live.update(table_of(now), refresh=True)

        def say_stage(text: str) -> None:
            progress.stage = text
            change(progress)

        progress.on_change = change
        progress.tell = lambda text: console.print(text, highlight=False)
        with use_screen(Screen(say_stage, live=True)):
            yield
