"""Prepares, runs and reports one experiment."""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayfed.errors import ConfigError, RayFedError
from rayfed.terminal.console import follow, teller
from rayfed.terminal.guard import STOP
from rayfed.terminal.supervisor import note_advice

if TYPE_CHECKING:
    import pandas as pd

    from rayfed.config.schema import Config
    from rayfed.engine.setup import Setup
    from rayfed.record.claim import Claim
    from rayfed.types import Params


@dataclass(frozen=True)
class Result:
    """A finished run, read from its folder.

    Attributes:
        path: Folder of the run.
        sha256: SHA-256 digest of the final tensors.
    """

    path: Path
    sha256: str

    @property
    def history(self) -> pd.DataFrame:
        """One row per round: the lines of rounds.jsonl."""
        import pandas as pd

        from rayfed.record.readers import read_rows

        return pd.DataFrame(read_rows(self.path))

    @property
    def metrics(self) -> dict[str, Any]:
        """The row of the last round in which models were scored."""
        from rayfed.record.readers import read_rows
        from rayfed.report.table import last_evaluated

        return last_evaluated(read_rows(self.path))

    @property
    def params(self) -> Params:
        """The final trainable tensors by global name."""
        from rayfed.record.readers import read_tensors

        return read_tensors(self.path / "model" / "params.safetensors")


def simulate(
    config: Sequence[str] | Config = (),
    quiet: bool = True,
    *,
    as_json: bool = False,
    claim: Claim | None = None,
    part_of: Path | None = None,
) -> Result:
    """Run one experiment, and write its tables, figures and report.

    Args:
        config: Overrides as on the command line, or a checked config. With `claim`, `output` is the folder of
            the run that is continued.
        quiet: Show nothing.
        as_json: Write one JSON object per round to standard output, and everything else to standard error.
        claim: The right to write into the folder of an earlier run, which is continued after its last
            checkpoint; for a finished one only tables and report are written again. None: start a new run.
        part_of: Folder of the run that this one is a part of, for the runs of `compare` and of
            protocol=leave_one_out.

    Returns:
        The finished run.

    Raises:
        ConfigError: Something in the input is wrong, or the folder holds files of others; found before any
            actor starts.
        ClientError: A client failed.
    """
    from rayfed.config.place import check_own_folder
    from rayfed.config.schema import Config, load_config
    from rayfed.record import claim as folders
    from rayfed.record.tracking import check_trackers

    config = config if isinstance(config, Config) else load_config(config)
    check_trackers(config.trackers)
    show = Show(quiet, as_json)
    if claim is not None:
        return _run(config, claim, _plan(config, claim.path), show, resume=True)
    path = Path(config.output) if config.output else _new_folder(config)
    check_own_folder(path)
    seen = folders.look(path, config.overwrite)
    plan = _plan(config, path, replaces=bool(seen))
    with folders.claim(path, seen, config.overwrite, part_of) as own:
        return _run(config, own, plan, show, resume=False)


@dataclass(frozen=True)
class Show:
    """How much is shown: nothing (`quiet`), text, or JSON objects."""

    quiet: bool
    as_json: bool

    @property
    def tell(self) -> Callable[[str], None]:
        return teller(self.quiet, self.as_json)


@dataclass(frozen=True)
class Plan:
    """A checked experiment.

    Attributes:
        setup: The prepared experiment; None for protocol=leave_one_out, which consists of its folds only.
        others: Configs of the folds, or of the algorithms that it is compared with, by name.
    """

    setup: Setup | None
    others: Mapping[str, Config]


def _plan(config: Config, path: Path, replaces: bool = False) -> Plan:
    """Prepare an experiment, and check all others that it runs; nothing is written to `path`.

    Args:
        config: The config of the run.
        path: Its folder.
        replaces: A run in the folder will be removed, so that the cluster must accept this one before.

    Raises:
        ConfigError: One of the experiments cannot be run.
    """
    from rayfed.config.variants import comparisons, folds
    from rayfed.engine.preflight import check_cluster, check_resources
    from rayfed.engine.setup import prepare

    if config.protocol == "leave_one_out":
        runs = folds(config, tuple(config.data.domains or prepare(config).dataset.domains), path)
        for run in runs.values():
            _plan(run, Path(str(run.output)), replaces)
        return Plan(None, runs)
    others = comparisons(config, path)
    for other in others.values():
        prepare(other)
    setup = prepare(config)
    check_resources(config.cluster, setup, path, config.checkpoint.keep + 1)
    if replaces:
        check_cluster(config.cluster, setup)
    return Plan(setup, others)


def _run(config: Config, claim: Claim, plan: Plan, show: Show, resume: bool) -> Result:
    """Run a checked experiment in a folder that this process may write to."""
    from rayfed.experiment.begin import begin, check_continuable
    from rayfed.record.folder import finished

    if plan.setup is None:
        return _leave_one_out(config, claim, plan.others, show, resume)
    path = claim.path
    began = time.perf_counter()
    digest = finished(path, config.rounds) if resume else ""
    if digest:
        check_continuable(config, plan.setup, path)
        claim.take_over()
    else:
        begin(config, plan.setup, claim, show.tell, resume)
        digest = _launch(config, plan.setup, claim, show, resume)
    _save_adapters(config, plan.setup, Result(path, digest))
    for name, other in plan.others.items():
        show.tell(f"\ncompare={name}")
        _run_part(other, path, show, resume)
    _report(path, show.tell, tuple(plan.others), config.figures)
    show.tell(f"{path}: {time.perf_counter() - began:.0f} s, tensors sha256 {digest[:16]}")
    return Result(path, digest)


def _run_part(config: Config, whole: Path, show: Show, resume: bool) -> Result:
    """Run an experiment that is part of the run in the folder `whole`, or continue it."""
    from rayfed.record.claim import claim_again

    path = Path(str(config.output))
    if resume and (path / "config.yaml").exists():
        with claim_again(path) as own:
            return simulate(config, show.quiet, as_json=show.as_json, claim=own)
    return simulate(config, show.quiet, as_json=show.as_json, part_of=whole)


def _save_adapters(config: Config, setup: Setup, result: Result) -> None:
    """Also write the adapters in the format of other libraries, if the tuning scheme has a method `save`."""
    from rayfed.record.files import write_bytes

    save = getattr(setup.world.tuning, "save", None)
    if save is None:
        return
    with tempfile.TemporaryDirectory() as folder:  # the library does not list its files as those of the run
        save(result.params, config.model.name, Path(folder))
        for file in sorted(Path(folder).iterdir()):
            write_bytes(result.path / "model" / file.name, file.read_bytes())


def _launch(config: Config, setup: Setup, claim: Claim, show: Show, resume: bool) -> str:
    """Launch the experiment and show its rounds; returns the digest of the final tensors."""
    from rayfed.engine.launch import launch
    from rayfed.record.folder import how_to_go_on
    from rayfed.record.layout import rows_file

    path = claim.path
    digest = ""
    shown = path if show.as_json else None
    note_advice(how_to_go_on(path))
    try:
        rounds = launch(setup, config, path, show.tell, resume, claim.token)
        for row in follow(rounds, config.rounds, show.quiet, shown):
            digest = row.get("sha256", digest)
            note_advice(how_to_go_on(path))
            _raise_if_asked_to_stop()
    except ConfigError:
        if not rows_file(path).exists():  # nothing ran, so the same output can be used again
            claim.discard()
        raise
    except (RayFedError, KeyboardInterrupt) as err:
        err.add_note(how_to_go_on(path))  # the end of the line that the user sees
        raise
    return digest


def _raise_if_asked_to_stop() -> None:
    if STOP.is_set():
        raise KeyboardInterrupt


def _leave_one_out(
    config: Config, claim: Claim, runs: Mapping[str, Config], show: Show, resume: bool
) -> Result:
    """Run protocol=leave_one_out: one run for each held-out domain. The digest combines those of all runs."""
    import yaml

    from rayfed.config.schema import to_dict
    from rayfed.record.files import write_text
    from rayfed.record.readers import reading
    from rayfed.report.leave_one_out import table_of

    path = claim.path
    if resume:
        claim.take_over()
    write_text(path / "config.yaml", yaml.safe_dump(to_dict(config), sort_keys=False))
    done = {}
    for name, fold in runs.items():
        show.tell(f"\nheld out: {name}")
        done[name] = _run_part(fold, path, show, resume)
    with reading(path):
        table = table_of(config, {name: result.path for name, result in done.items()})
    write_text(path / "report.md", table.markdown())
    show.tell("\n" + table.text())
    return Result(path, hashlib.sha256("".join(r.sha256 for r in done.values()).encode()).hexdigest())


def _report(path: Path, tell: Callable[[str], None], others: tuple[str, ...], figures: bool) -> None:
    from rayfed.record.files import write_text
    from rayfed.record.readers import reading
    from rayfed.report.comparison import with_others
    from rayfed.report.document import document
    from rayfed.report.figures import draw_figures
    from rayfed.report.table import final_table

    with reading(path):
        table = with_others(final_table(path), path, others)
        text = document(path, table, draw_figures(path) if figures else {})
    write_text(path / "report.md", text)
    tell("\n" + table.text())


def _new_folder(config: Config) -> Path:
    stamp = time.strftime("%Y%m%d-%H%M%S")
    name = f"{config.algorithm.replace(':', '.')}-{config.data.name}-seed{config.seed}-{stamp}"
    return Path("runs") / f"{name}-{os.getpid()}"
