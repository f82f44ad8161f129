"""Lists runs and studies in a folder, or the cells of a study, and how far each of them is."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from rayfed.columns import metric_in, share_of
from rayfed.errors import ConfigError, RayFedError, one_line
from rayfed.experiment.study.coordinates import Key, in_words
from rayfed.experiment.study.study_folder import Manifest
from rayfed.record.claim import mark_of
from rayfed.record.locks import is_locked
from rayfed.record.readers import STUDY
from rayfed.record.recorded_run import RecordedRun


@dataclass(frozen=True, kw_only=True)
class Listed:
    """A run, a study or a cell of a study.

    Attributes:
        folder: Its folder, relative to the one that is looked at; a point: that folder itself.
        what: Method and data set of a run, or the coordinates of a cell.
        state: `running`, `finished`, `stopped` by a rule, `waiting`, or `not running` before its end.
        done: Finished rounds or cells, and how many are planned.
        score: Column and value of the reported round: the metric of the run, of a cell the one by which its
            study or its search compares; empty: there is none.
    """

    folder: str
    what: str
    state: str
    done: str
    score: str = ""


def listed(root: Path) -> list[Listed]:
    """The cells of the study in a folder; else the run in it, or the runs and studies below it.

    Raises:
        ConfigError: There are none.
        DamagedError: The manifest of the study cannot be read.
    """
    if (root / STUDY).exists():
        return _cells(root)
    found = [_listed(folder, root) for folder in _folders(root)]
    if not found:
        raise ConfigError(f"{root}: holds no runs and no studies; give a folder with some, such as runs")
    return found


def _folders(root: Path) -> Iterator[Path]:
    """Folders of runs and studies that are not inside another one."""
    for folder, names, _ in os.walk(root):
        names.sort()
        if mark_of(Path(folder)) is not None:
            names.clear()
            yield Path(folder)


def _listed(folder: Path, root: Path) -> Listed:
    mark, name = mark_of(folder), folder.relative_to(root).as_posix()
    assert mark is not None  # `_folders` looked for it
    try:
        if mark.kind == "run":
            return _run(folder, name)
        if mark.kind == "study":
            entries = Manifest.read(folder).entries.values()
            ended = sum(bool(entry.sha256 or entry.stopped) for entry in entries)
            state = _state(folder, ended == len(entries))
            return Listed(folder=name, what="study", state=state, done=f"{ended}/{len(entries)} cells")
    except RayFedError as err:
        return Listed(folder=name, what=mark.kind, state=f"damaged: {one_line(err)}", done="")
    return Listed(folder=name, what=mark.kind, state=_state(folder, ended=False), done="")


def _run(folder: Path, name: str, what: str = "", column: str | None = None) -> Listed:
    run = RecordedRun(folder)
    config = run.config
    planned = run.planned if config else 0
    column = column if column in run.reported else run.metric
    value = run.reported.get(column)
    share = share_of(run.metric if column == run.metric else metric_in(column) or "")
    shown = "" if value is None else f"{column} {value * share:.4g}"
    return Listed(
        folder=name,
        what=what or (f"{config['algorithm']} on {config['data']['name']}" if config else "run"),
        state=_state(folder, bool(config) and run.is_finished),
        done=f"{len(run.rounds)}/{planned} rounds" if planned else "",
        score=f"{shown}%" if shown and share != 1 else shown,
    )


def _state(folder: Path, ended: bool) -> str:
    if is_locked(folder):
        return "running"
    return "finished" if ended else "not running"


def _cells(root: Path) -> list[Listed]:
    manifest = Manifest.read(root)
    return [_cell(manifest, key) for key in manifest.entries]


def _compared(manifest: Manifest) -> str | None:
    """The column by which a search, or a study, compares its cells; None: the metric of the runs."""
    objectives: Iterable[str] = (manifest.search or {}).get("objectives", ())
    return next(iter(objectives), manifest.score)


def _cell(manifest: Manifest, key: Key) -> Listed:
    entry, what = manifest.entries[key], in_words(key, manifest.names)
    if not (manifest.place(key) / "config.yaml").exists():
        return Listed(folder=entry.folder, what=what, state="waiting", done=f"0/{entry.rounds} rounds")
    try:
        found = _run(manifest.place(key), entry.folder, what, _compared(manifest))
    except RayFedError as err:
        return Listed(folder=entry.folder, what=what, state=f"damaged: {one_line(err)}", done="")
    if entry.stopped and found.state == "not running":
        return replace(found, state="stopped")
    return found
