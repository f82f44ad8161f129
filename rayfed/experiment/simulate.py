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
        path: The folder.
        sha256: Digest of the final tensors.
    """

    path: Path
    sha256: str

    @property
    def history(self) -> pd.DataFrame:
        """One row a round: the lines of result.json."""
        import pandas as pd

        from rayfed.record.readers import read_rows

        return pd.DataFrame(read_rows(self.path))

    @property
    def metrics(self) -> dict[str, Any]:
        """The last round that was evaluated."""
        from rayfed.record.readers import read_rows
        from rayfed.report.table import last_evaluated

        return last_evaluated(read_rows(self.path))

    @property
    def params(self) -> Params:
        """The final trainable tensors by global name."""
        from rayfed.record.readers import read_tensors

        return read_tensors(self.path / "model" / "params.safetensors")


def simulate(config: Sequence[str] | Config = (), quiet: bool = True) -> Result:
    """Run one experiment.

    Args:
        config: Overrides as on the command line, or a checked config.
        quiet: Show nothing.

    Returns:
        The finished run.

    Raises:
        ConfigError: Something in the input is wrong; found before any actor starts.
        ClientError: A client failed.
    """
    from rayfed.config.schema import Config, load_config

    checked = config if isinstance(config, Config) else load_config(config)
    return execute(checked, quiet)


def execute(
    config: Config,
    quiet: bool = False,
    as_json: bool = False,
    claim: Claim | None = None,
    part_of: Path | None = None,
) -> Result:
    """Prepare, run and report one checked config.

    Args:
        config: The experiment; with `claim`, `output` is a folder that holds it already.
        quiet: Show nothing.
        as_json: Write one JSON object a round to standard output, and all else to standard error.
        claim: Of the folder of a run, which goes on from its last checkpoint; a finished one is only reported
            again. None: a new run begins.
        part_of: Folder of the run that this one is a part of.

    Raises:
        ConfigError: Something in the input is wrong, or the folder is not ours to write to.
    """
    from rayfed.config.place import check_own_folder
    from rayfed.record import claim as folders
    from rayfed.record.tracking import check

    check(config.trackers)
    show = Show(quiet, as_json)
    if claim is not None:
        return _work(config, claim, _plan(config, claim.path), show, resume=True)
    path = Path(config.output) if config.output else _new_folder(config)
    check_own_folder(path)
    seen = folders.look(path, config.overwrite)
    plan = _plan(config, path)
    with folders.claim(path, seen, config.overwrite, part_of) as own:
        return _work(config, own, plan, show, resume=False)


@dataclass(frozen=True)
class Show:
    """What the user sees: nothing, text, or JSON objects."""

    quiet: bool
    as_json: bool

    @property
    def tell(self) -> Callable[[str], None]:
        return teller(self.quiet, self.as_json)


@dataclass(frozen=True)
class Plan:
    """A checked experiment.

    Attributes:
        setup: It prepared; None for protocol=leave_one_out, which is nothing but its folds.
        others: The folds, or the runs that it is compared with, by name.
    """

    setup: Setup | None
    others: Mapping[str, Config]


def _plan(config: Config, path: Path) -> Plan:
    """Prepare an experiment, and once all that belong to it to be sure of them; `path` is not touched.

    Raises:
        ConfigError: One of them cannot be run.
    """
    from rayfed.config.variants import comparisons, folds
    from rayfed.engine import preflight
    from rayfed.engine.setup import prepare

    if config.protocol == "leave_one_out":
        runs = folds(config, tuple(config.data.domains or prepare(config).dataset.domains), path)
        for run in runs.values():
            _plan(run, Path(str(run.output)))
        return Plan(None, runs)
    others = comparisons(config, path)
    for other in others.values():
        prepare(other)
    setup = prepare(config)
    preflight.check(config.cluster, setup, path, config.checkpoint.keep + 1)
    return Plan(setup, others)


def _work(config: Config, claim: Claim, plan: Plan, show: Show, resume: bool) -> Result:
    """Run what was checked, in a folder that is ours."""
    from rayfed.experiment.begin import begin
    from rayfed.record.folder import finished

    if plan.setup is None:
        return _each_domain_out(config, claim, plan.others, show, resume)
    path, began = claim.path, time.perf_counter()
    digest = finished(path, config.rounds) if resume else ""
    if digest:
        claim.take_over()
    else:
        begin(config, plan.setup, claim, show.tell, resume)
        digest = _conduct(config, plan.setup, claim, show, resume)
    _save_adapters(config, plan.setup, Result(path, digest))
    for name, other in plan.others.items():
        show.tell(f"\ncompare={name}")
        _part(other, path, show, resume)
    _report(path, show.tell, tuple(plan.others))
    show.tell(f"{path}: {time.perf_counter() - began:.0f} s, tensors sha256 {digest[:16]}")
    return Result(path, digest)


def _part(config: Config, whole: Path, show: Show, resume: bool) -> Result:
    """Run an experiment that belongs to another one, or go on with it."""
    from rayfed.record.claim import claim_again

    path = Path(str(config.output))
    if resume and (path / "config.yaml").exists():
        with claim_again(path) as own:
            return execute(config, show.quiet, show.as_json, claim=own)
    return execute(config, show.quiet, show.as_json, part_of=whole)


def _save_adapters(config: Config, setup: Setup, result: Result) -> None:
    """Write the adapters beside the tensors as other libraries read them, where the tuning can do so."""
    from rayfed.record.files import write_bytes

    save = getattr(setup.world.tuning, "save", None)
    if save is None:
        return
    with tempfile.TemporaryDirectory() as folder:  # a library writes them, which does not know what is ours
        save(result.params, config.model.name, Path(folder))
        for file in sorted(Path(folder).iterdir()):
            write_bytes(result.path / "model" / file.name, file.read_bytes())


def _conduct(config: Config, setup: Setup, claim: Claim, show: Show, resume: bool) -> str:
    """Run all rounds and show them; the digest of the final tensors."""
    from rayfed.engine.launch import launch

    path, digest = claim.path, ""
    shown = path if show.as_json else None
    advice = f"continue with: python -m rayfed.resume {path}"
    note_advice(advice)
    try:
        rounds = launch(setup, config, path, show.tell, resume, claim.token)
        for row in follow(rounds, config.rounds, show.quiet, shown):
            digest = row.get("sha256", digest)
            _look_for_stop()
    except ConfigError:
        if not (path / "result.json").exists():  # refused; the same output can be used again
            claim.discard()
        raise
    except (RayFedError, KeyboardInterrupt) as err:
        err.add_note(advice)  # the line of the error ends with it
        raise
    return digest


def _look_for_stop() -> None:
    if STOP.is_set():
        raise KeyboardInterrupt


def _each_domain_out(
    config: Config, claim: Claim, runs: Mapping[str, Config], show: Show, resume: bool
) -> Result:
    """Run protocol=leave_one_out; the digest is that of the digests of all runs."""
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
        done[name] = _part(fold, path, show, resume)
    with reading(path):
        table = table_of(config, {name: result.path for name, result in done.items()})
    write_text(path / "report.md", table.markdown())
    show.tell("\n" + table.text())
    return Result(path, hashlib.sha256("".join(r.sha256 for r in done.values()).encode()).hexdigest())


def _report(path: Path, tell: Callable[[str], None], others: tuple[str, ...] = ()) -> None:
    from rayfed.record.files import write_text
    from rayfed.record.readers import reading
    from rayfed.report.comparison import with_others
    from rayfed.report.figures import draw_figures
    from rayfed.report.table import final_table

    with reading(path):
        table = with_others(final_table(path), path, others)
        pictures = [f"\n![{title}](figures/{file.name})\n" for title, file in draw_figures(path).items()]
    write_text(path / "report.md", table.markdown() + "".join(pictures))
    tell("\n" + table.text())


def _new_folder(config: Config) -> Path:
    stamp = time.strftime("%Y%m%d-%H%M%S")
    name = f"{config.algorithm.replace(':', '.')}-{config.data.name}-seed{config.seed}-{stamp}"
    return Path("runs") / f"{name}-{os.getpid()}"
