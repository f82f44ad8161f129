"""The folder of a sweep and the run folders of its trials, from which a killed sweep continues."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rayfed.config.schema import Config
from rayfed.engine.record_rounds import Keeping, Watch, record_rounds
from rayfed.engine.setup import Setup
from rayfed.experiment.single_run import begin
from rayfed.federation.executor import Executor
from rayfed.record.atomic_files import write_bytes
from rayfed.record.checkpoint import Checkpoints
from rayfed.record.claim import claim, claim_again, look
from rayfed.record.folder import digest_if_finished
from rayfed.record.history import History
from rayfed.record.readers import ROWS
from rayfed.record.recorded_run import RecordedRun
from rayfed.terminal.console import SLOWEST, SLOWEST_SECONDS
from rayfed.types import Row

RUNS = "runs"
ERROR = "error.txt"


def trial_folder(sweep: Path, number: int) -> Path:
    """Folder with the run folders of a trial, one per seed."""
    return sweep / RUNS / f"{number:04d}"


def rows_of(
    config: Config, setup: Setup, path: Path, executor: Executor, watch: Watch | None = None
) -> Iterator[Row]:
    """Rows of all rounds of a run, then one row with the SHA-256 digest of the final tensors.

    Rounds that are on disk are read; the run continues after its last checkpoint.
    """
    digest = digest_if_finished(path, config.rounds)
    if digest:
        yield from RecordedRun(path).rounds
        yield {"sha256": digest}
        return
    before = (path / "environment.json").exists() and (path / "config.yaml").exists()
    owner = "" if before else look(path, overwrite=True)
    with claim_again(path) if before else claim(path, owner, overwrite=True) as own:
        begin(config, setup, own, lambda _: None, before)
        history = History(path)
        keeping = Keeping.of(setup, config, path, resume=before, claim=own.token)
        checkpoints = Checkpoints(path, config.checkpoint.keep, keeping.basis)
        saved = checkpoints.load(setup.start, history.complete) if before else None
        if saved is not None:
            history.cut(saved.state.round + 1)
            yield from (entry["row"] for entry in history.entries())
        for row in record_rounds(setup.experiment, executor, setup.start, keeping, watch):
            yield {key: value for key, value in row.items() if key not in (SLOWEST, SLOWEST_SECONDS)}


def resumable(run: Path) -> list[Path]:
    """Files with which a run can continue in another folder: the last checkpoint and its history.

    Returns:
        Paths relative to the run folder.
    """
    last = sorted((run / "checkpoints").glob("round-*"))[-1:]
    folders = [*last, run / "checkpoints" / "stores", run / "history"]
    files = [file for folder in folders for file in sorted(folder.rglob("*")) if file.is_file()]
    files += [run / name for name in ("config.yaml", "environment.json", ROWS)]
    return [file.relative_to(run) for file in files if file.is_file()]


def restore(source: Path, run: Path) -> None:
    """Put a copy of what `resumable` names into a run folder, which then goes on from there."""
    with claim(run, look(run, overwrite=True), overwrite=True):
        for file in sorted(source.rglob("*")):
            if file.is_file():
                write_bytes(run / file.relative_to(source), file.read_bytes())
