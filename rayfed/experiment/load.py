"""Opens what earlier commands and programs left in a folder: a finished run, or a study."""

from __future__ import annotations

from pathlib import Path

from rayfed.errors import ConfigError
from rayfed.experiment.finished_run import Run
from rayfed.experiment.study.cells import Study
from rayfed.experiment.study.study_folder import Manifest
from rayfed.experiment.study.trials import Searched
from rayfed.record.readers import STUDY


def load(path: str | Path) -> Run | Study:
    """Open a finished run, such as one of the command line, or a study.

    Args:
        path: Its folder. That of `rayfed run compare=...` or `rayfed run protocol=...` is that of a study.

    Returns:
        The run; or the study, with the cells that have begun: those that are finished are in its results. The
        study of a search has `trials`, `best_params` and `best_run`, too.

    Raises:
        ConfigError: There is no run and no study, or the run is not finished.
    """
    from rayfed.config.schema import load_run
    from rayfed.record.folder import digest_if_finished, how_to_go_on

    folder = Path(path).expanduser()
    if (folder / STUDY).exists():
        kind = Study if Manifest.read(folder).search is None else Searched
        return kind.opened(folder)
    config = load_run(folder).alone()
    digest = digest_if_finished(folder, config.rounds)
    if not digest:
        raise ConfigError(f"load: the run in {str(folder)!r} is not finished; {how_to_go_on(folder)}")
    return Run(folder, digest, config)
