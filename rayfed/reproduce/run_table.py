"""Runs the study of a paper's table, and writes the table after every cell."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rayfed.errors import ConfigError
from rayfed.experiment.study.coordinates import Key
from rayfed.experiment.study.progress import Progress
from rayfed.experiment.study.run_cell import Outcome
from rayfed.experiment.study.study_folder import Manifest, is_finished
from rayfed.record.atomic_files import write_text
from rayfed.record.readers import STUDY, read_json
from rayfed.reproduce import results
from rayfed.reproduce.cell_scores import (
    EXAMPLES,
    STEPS,
    Folders,
    read_half,
    read_scores,
    read_steps,
    read_without,
)
from rayfed.reproduce.results import FinishedCell, Reproduction, compare, measures_of
from rayfed.reproduce.table_study import TableCell, TableStudy, cell_of, part_of
from rayfed.user_files import to_json

if TYPE_CHECKING:
    from rayfed.config.schema import Config

RESULT = "reproduction.json"

Tell = Callable[[str], None]


class TableProgress(Progress):
    """The state of a table while its study runs; writes the table after every cell.

    Attributes:
        asked: The table.
        folders: Folders of the runs of each cell, by held-out domain.
        finished: The finished cells.
        running: The cells of which a run runs now.
        failed: Reasons by cell.
        stage: What is done now, such as "starting Ray".
        on_change: Called after every change, and every moment.
    """

    def __init__(self, asked: TableStudy, tell: Tell = lambda _: None) -> None:
        """Begin with nothing.

        Args:
            tell: Called with a line of text about each finished cell.
        """
        super().__init__(tell)
        self.asked = asked
        self.folders: dict[TableCell, dict[str, Path]] = {}
        self.finished: dict[TableCell, FinishedCell] = {}
        self.running: set[TableCell] = set()
        self.failed: dict[TableCell, str] = {}
        self.stage = ""
        self.on_change: Callable[[TableProgress], None] = lambda _: None
        self._digests: dict[TableCell, dict[str, str]] = {}
        self._seconds: dict[TableCell, float] = {}
        self._begun: dict[Key, float] = {}

    def start(self, cells: Mapping[Key, Config], names: Sequence[str], finished: Mapping[Key, str]) -> None:
        """Read the scores of the cells that were finished before, and write the table."""
        self.cells, self._names = cells, names
        for key, config in cells.items():
            cell = cell_of(key, names)
            self.folders.setdefault(cell, {})[part_of(key, names)] = Path(str(config.output))
        for key, digest in finished.items():
            self._note(key, digest)
        self._write()

    def begin(self, key: Key, size: int) -> None:
        """A run begins."""
        self._begun[key] = time.perf_counter()
        self.running.add(cell_of(key, self._names))
        self.on_change(self)

    def end(self, key: Key, outcome: Outcome) -> None:
        """A run ended; writes the table, if it was the last one of its cell."""
        cell = cell_of(key, self._names)
        spent = time.perf_counter() - self._begun[key]
        self._seconds[cell] = self._seconds.get(cell, 0.0) + spent
        self.running.discard(cell)
        if outcome.failed:
            self.failed[cell] = outcome.failed
        elif self._note(key, outcome.sha256):
            self._write()
            self.tell(self._line(cell))
        self.on_change(self)

    def look(self) -> None:
        """A moment passed."""
        self.on_change(self)

    @property
    def table(self) -> Reproduction:
        """The table as it is now."""
        return compare(self.asked, self.finished, self.folders)

    def _note(self, key: Key, digest: str) -> bool:
        """Note a finished run; whether all runs of its cell are finished with it."""
        cell = cell_of(key, self._names)
        digests = self._digests.setdefault(cell, {})
        digests[part_of(key, self._names)] = digest
        folders = self.folders[cell]
        if not all(digests.get(part) for part in folders):
            return False
        self.finished[cell] = _finished(self.asked, cell, folders, [digests[part] for part in folders])
        return True

    def _write(self) -> None:
        write_tables(self.table, self.asked.path)

    def _line(self, cell: TableCell) -> str:
        """A line about a finished cell."""
        scores = self.finished[cell].scores
        shown = {name: f"{value:,.0f}" for name, value in scores.items() if name in (STEPS, EXAMPLES)}
        numbers = "  ".join(
            f"{name} {shown.get(name) or results.number(value)}" for name, value in scores.items()
        )
        done = f"{len(self.finished)}/{len(self.asked.configs)}"
        where = f"{cell.row}, {cell.setting}, seed {cell.seed}"
        return f"{done}  {where}  {numbers}  {self._seconds[cell]:.0f} s"


def reproduce(asked: TableStudy, progress: TableProgress | None = None) -> Reproduction:
    """Run every cell of a table that is not finished, and write the table.

    A cell that was interrupted continues after its last checkpoint.

    Args:
        progress: Receives the state of the table; None: it is not shown.

    Returns:
        The table.

    Raises:
        ConfigError: The folder holds something else, or a cell cannot be run; found before any actor starts.
        PartsFailedError: Some cells failed; the others are finished.
        ClusterError: Ray was lost.
    """
    progress = progress or TableProgress(asked)
    check_folder(asked)
    asked.study.run(asked.path, asked.at_once, progress=progress)
    return progress.table


def check_folder(asked: TableStudy) -> None:
    """Check that a folder does not belong to another table.

    Raises:
        ConfigError: It does.
    """
    if not (asked.path / RESULT).exists():
        return
    before = read_json(asked.path / RESULT, dict)
    if (before.get("experiment"), before.get("scale")) != (asked.table.name, asked.scale):
        raise ConfigError(
            f"output: {str(asked.path)!r} holds {before.get('experiment')} at {before.get('scale')} scale; "
            f"choose another folder"
        )


def finished_before(asked: TableStudy) -> set[TableCell]:
    """The cells that earlier commands finished."""
    if not (asked.path / STUDY).exists():
        return set()
    manifest = Manifest.read(asked.path)
    done: dict[TableCell, bool] = {}
    for key, entry in manifest.entries.items():
        cell = cell_of(key, manifest.names)
        if cell in asked.configs:
            digest = is_finished(entry, asked.configs[cell].rounds, manifest.place(key))
            done[cell] = bool(digest) and done.get(cell, True)
    return {cell for cell, whole in done.items() if whole}


def _finished(asked: TableStudy, cell: TableCell, folders: Folders, digests: Sequence[str]) -> FinishedCell:
    """A cell with its scores: by measure, without adapters and head, and how often its clients trained."""
    whole = digests[0] if "" in folders else hashlib.sha256("".join(digests).encode()).hexdigest()
    names = {measure.name: measure.score for measure in measures_of(asked) if measure.score}
    columns = asked.table.columns.get(cell.setting, ())
    found = read_scores(folders, asked.configs[cell], names.values(), columns)
    scores = {name: found[score] for name, score in names.items() if score in found}
    for read in (read_half, read_without, read_steps):
        scores |= read(folders)
    return FinishedCell(sha256=whole, scores=scores)


def write_tables(found: Reproduction, path: Path) -> None:
    """Write the table in all its forms."""
    write_text(path / RESULT, to_json(found.as_dict(), indent=1) + "\n")
    write_text(path / "table.md", results.markdown(found))
    write_text(path / "table.csv", results.csv_values(found))
    write_text(path / "claims.csv", results.csv_claims(found))
    write_text(path / "table.tex", results.latex(found))
    write_text(path / "table.html", results.page(found))
