"""A study that a command line describes: `rayfed run` with methods to compare or a protocol.

Its folder has, besides the files of a study, config.yaml with what was asked for, so that `rayfed.resume`
continues it and `rayfed.run --config` repeats it, and report.md with the tables of all runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import yaml

from rayfed.config.schema import Config, Request, to_dict
from rayfed.config.variants import PROTOCOLS, comparisons
from rayfed.data.partition.groups import partition_of
from rayfed.data.partition.manifest import describe, never_train
from rayfed.data.partition.partition import ClientSplit
from rayfed.engine.setup import Setup
from rayfed.errors import ConfigError, PartsFailedError, adding, count_of
from rayfed.experiment.kept_session import QUIETLY, end_session, session_of
from rayfed.experiment.plan import make_plan
from rayfed.experiment.runner import check_cluster, new_folder_name
from rayfed.experiment.single_run import Show, last_words
from rayfed.experiment.study.cells import Study
from rayfed.experiment.study.coordinates import PART, Key
from rayfed.experiment.study.equal_cells import METHOD
from rayfed.experiment.study.methods import in_words, methods_study
from rayfed.experiment.study.run_cell import CommonParts
from rayfed.experiment.study.study_folder import KIND, Manifest, held, new_folder
from rayfed.record import claim as folders
from rayfed.record.atomic_files import write_text
from rayfed.record.folder import way_to_continue
from rayfed.record.readers import reading
from rayfed.record.recorded_run import RecordedRun
from rayfed.record.trackers.tracker import check_trackers
from rayfed.terminal.table_formats import fit_width, terminal_width


def makes_study(config: Request) -> bool:
    """Whether a command makes several runs: of methods that are compared, or of a protocol."""
    return config.protocol in PROTOCOLS or bool(comparisons(config)) or config.equal is not None


def check(config: Request) -> None:
    """Check all runs as before their start: config, data, models and folder; nothing is started or written.

    Raises:
        ConfigError: Something in the input is wrong, or the folder holds an earlier run or files of others.
        RayFedError: A client that was tried for `equal` failed.
    """
    _checked(config)


def begin(config: Request, show: Show) -> Study:
    """Run all methods and parts in a new folder, one after the other, and write their tables and report.

    Args:
        config: The checked config of the command.
        show: What is shown.

    Raises:
        ConfigError: Something in the input is wrong, or the folder holds files of others; found before any
            actor starts.
        PartsFailedError: Some of the runs failed; the others are finished.
    """
    path, owner, study, cells, common = _checked(config, joins=True)
    for _, setup in cells.values() if owner else ():
        session_of(config).check(config.cluster, setup)  # before the earlier run is moved
    with new_folder(path, owner, study.names, config.overwrite) as manifest:
        if manifest.earlier is not None:
            show.tell(f"the run that was in {path} is in {manifest.earlier} now")
        study.path = path
        _run(config, study, manifest, cells, common, show)
    return study


def go_on(path: Path, config: Request, show: Show) -> Study:
    """Continue the runs in the folder of an earlier command; what is finished is not repeated.

    Args:
        config: The config with which they are continued, such as with more rounds.
        show: What is shown.

    Raises:
        ConfigError: The folder holds something else, or something in the input is wrong.
        PartsFailedError: Some of the runs failed; the others are finished.
    """
    check_trackers(config.trackers)
    check_cluster(config)
    common = CommonParts()
    study = methods_study(config, QUIETLY)
    configs = study._configs(path, common)
    cells = _prepared(study, configs, common)
    with held(path, study.names) as manifest:
        study.path = path
        _run(config, study, manifest, cells, common, show)
    return study


Cells = Mapping[Key, tuple[Config, Setup]]
"""The config of each cell, and what was prepared from it."""


def _checked(config: Request, joins: bool = False) -> tuple[Path, str, Study, Cells, CommonParts]:
    """Folder of a new study, token of what is in it, the study, and its prepared cells."""
    check_trackers(config.trackers)
    path = Path(config.output) if config.output else new_folder_name(config)
    folders.check_own_folder(path)
    owner = folders.look(path, config.overwrite, KIND)
    if joins:
        check_cluster(config)  # before data and models are loaded
    common = CommonParts()
    study = methods_study(config, QUIETLY)
    configs = study._configs(path, common)
    return path, owner, study, _prepared(study, configs, common), common


def _prepared(study: Study, configs: Mapping[Key, Config], common: CommonParts) -> Cells:
    """Prepare every cell.

    Raises:
        ConfigError: One of them cannot be run; names it, unless it is the first one.
    """
    cells: dict[Key, tuple[Config, Setup]] = {}
    for key, config in configs.items():
        with adding(f" (the run of {name_of(study, key)})" if cells else ""):
            setup = make_plan(config, Path(str(config.output)), common.of(config)).setup
        cells[key] = config, setup
    return cells


def name_of(study: Study, key: Key) -> str:
    """The name of a cell of the study of one command: its method, its part, or both."""
    at = dict(zip(study.names, key, strict=True))
    several = len({each[study.names.index(METHOD)] for each in study.cells}) > 1
    names = [name for name in (METHOD, PART) if name in at and (name == PART or several or PART not in at)]
    return ", ".join(str(at[name]) for name in names)


def _run(
    config: Request, study: Study, manifest: Manifest, cells: Cells, common: CommonParts, show: Show
) -> None:
    """Run the cells that are not finished, and write the tables and the report of all."""
    began = time.perf_counter()
    path = manifest.path
    show = replace(show, resume_command=f"python -m rayfed.resume {path}")
    write_text(path / "config.yaml", yaml.safe_dump(to_dict(config), sort_keys=False))
    _tell(config, study, cells, show)
    configs = {key: each for key, (each, _) in cells.items()}
    with _advising(path):
        try:
            failed = study._run_cells(manifest, configs, common, show)
        finally:
            end_session()  # before the folder is released
        report(path, show.tell, config.figures)
        last_words(path, show.tell, config.report)
        what = "run" if config.protocol in PROTOCOLS else "method"
        show.tell(f"{path}: {time.perf_counter() - began:.0f} s, {count_of(len(cells), what)}")
        _raise_failures({name_of(study, key): why for key, why in failed.items()}, what, len(cells), path)


def _raise_failures(failed: Mapping[str, str], what: str, count: int, path: Path) -> None:
    """Raise an error that names every run that failed, and why.

    Raises:
        PartsFailedError: There is one.
    """
    if failed:
        reasons = "; ".join(f"{name}: {why}" for name, why in failed.items())
        error = PartsFailedError(f"{len(failed)} of {count} {what}s failed: {reasons}")
        error.add_note(f"what is finished is kept; continue with: {way_to_continue(path)}")
        raise error


@contextmanager
def _advising(path: Path) -> Iterator[None]:
    """Add advice about a study to an interruption that has none, as after the rounds."""
    try:
        yield
    except KeyboardInterrupt as err:
        if not getattr(err, "__notes__", ()):
            err.add_note(f"what is finished is kept; continue with: {way_to_continue(path)}")
        raise


def _tell(config: Request, study: Study, cells: Cells, show: Show) -> None:
    """Say what will be run, and with a protocol which clients there are."""
    at_part = study.names.index(PART) if PART in study.names else None
    first = next(iter(cells))
    methods = [each for key, (each, _) in cells.items() if at_part is None or key[at_part] == first[at_part]]
    words = in_words(config, methods)
    if at_part is None:
        show.tell(f"comparing {words}")
        return
    parts = {str(key[at_part]): setup for key, (_, setup) in reversed(list(cells.items()))}
    parts = {name: parts[name] for name in reversed(parts)}
    show.tell(f"{PROTOCOLS[config.protocol].doing.format(names=', '.join(parts))}: {words}")
    _tell_clients(config, parts, show)


def _tell_clients(config: Config, parts: Mapping[str, Setup], show: Show) -> None:
    """Show one table of the clients of all parts, where a client has the same examples in each of them.

    Where some clients never train, a line names them for each part, as they may be others in each.

    Args:
        config: The experiment of all parts.
        parts: What was prepared of the first method, by the name of the part.
        show: Gets the table, and notes that it need not be shown again.
    """
    setups = list(parts.values())
    if len(setups) == 1 or len({setup.dataset.digest for setup in setups}) > 1:
        return
    data = replace(config.data, held_out=None, shots=None, unseen_clients=None)
    try:
        whole = partition_of(setups[0].dataset, data, config.seed)
    except ConfigError:
        return
    if whole.drawn is not None:
        return
    known = {_examples(client) for client in whole.clients}
    if not all(_examples(client) in known for setup in setups for client in setup.partition.clients):
        return
    show.tell(describe(whole, setups[0].dataset, terminal_width()))
    names = {client.id for client in whole.clients}
    if any(client.id not in names for setup in setups for client in setup.partition.clients):
        show.tell("in each fold, the clients of the other domains are numbered anew")
    for name, setup in parts.items():
        if setup.partition.unseen:
            show.tell(fit_width(f"{name}: {never_train(setup.partition)}", terminal_width()))
    show.described.update(setup.partition.digest for setup in setups)


def _examples(client: ClientSplit) -> tuple[object, ...]:
    """Domain and examples of a client, to find it under another id."""
    return client.domain, *(tuple(getattr(client, split)) for split in ("train", "val", "test"))


def report(path: Path, tell: Callable[[str], None], figures: bool) -> None:
    """Write report.md with the tables and the figures of all runs of a study, and show the tables.

    Args:
        path: Folder of the study, with config.yaml.
        tell: Called with the tables as text.
        figures: Draw the figures.
    """
    from rayfed.report.comparison import table_of_methods
    from rayfed.report.figures import draw_study_figures
    from rayfed.report.method_runs import runs_in
    from rayfed.report.protocols import TABLES, Tables
    from rayfed.report.report_md import document

    with reading(path):
        study = runs_in(path)
        runs = study.seeds[0]
        if study.protocol:
            runs = runs.finished()
            tables = TABLES[study.protocol](runs) if runs.folders else Tables(())
        else:
            recorded = list(map(RecordedRun, runs.folders.values()))
            tables = Tables((table_of_methods(recorded, Manifest.read(path).equal),))
        setting = PROTOCOLS[study.protocol].setting if study.protocol else "{name}"
        inside = {
            folder.relative_to(path).as_posix(): f"the run of {method}"
            + (f" with {setting.format(name=part)}" if part else "")
            for part, method, folder in study.seeds[0].each()
        }
        pictures = draw_study_figures(path, study) if figures else {}
        text = document(RecordedRun(path), tables.parts, pictures, inside)
    write_text(path / "report.md", text)
    if tables.parts:
        tell("\n" + tables.text(terminal_width()))
