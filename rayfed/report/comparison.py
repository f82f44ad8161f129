"""The final table of a run, with columns or rows for the algorithms it is compared with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rayfed.record.layout import COMPARE
from rayfed.report.table import Table, final_table


def with_others(table: Table, folder: Path, names: tuple[str, ...]) -> Table:
    """The table of a run, extended by the scores of the runs in `compare/<name>`.

    A table by domain gets their score columns and notes; a table by model gets their rows.

    Args:
        table: Final table of the main run.
        folder: Folder of the main run.
        names: Algorithms to add.
    """
    if table.columns[0] != "domain":
        others = (final_table(folder / COMPARE / name) for name in names)
        return replace(table, rows=table.rows + tuple(row for other in others for row in other.rows))
    columns = list(table.columns)
    rows = [list(row) for row in table.rows]
    notes = list(table.notes)
    width = len(table.columns)
    for name in names:
        other = final_table(folder / COMPARE / name)
        cells = {row[0]: row[4:] for row in other.rows}
        columns += [f"{name}: {column}" for column in other.columns[4:]]
        rows = [[*row, *cells.get(row[0], [""] * len(other.columns[4:]))] for row in rows]
        notes += [f"{name}: {note}" for note in other.notes]
    changed = len(columns) > width
    return (
        replace(table, columns=tuple(columns), rows=tuple(map(tuple, rows)), notes=tuple(notes))
        if changed
        else table
    )
