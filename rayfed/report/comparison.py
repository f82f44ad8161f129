"""Other algorithms beside the main one in the final table of a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rayfed.record.layout import COMPARE
from rayfed.report.table import Table, final_table


def with_others(table: Table, folder: Path, names: tuple[str, ...]) -> Table:
    """The table with the score columns and statistics, or the rows, of the runs in `compare/<name>`.

    Args:
        table: Of the main run.
        folder: Of the main run.
        names: Algorithms to show.
    """
    if table.columns[0] != "domain":
        found = (final_table(folder / COMPARE / name) for name in names)
        return replace(table, rows=table.rows + tuple(row for other in found for row in other.rows))
    columns, rows, notes = list(table.columns), [list(row) for row in table.rows], list(table.notes)
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
