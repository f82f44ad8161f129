"""Prepares, runs and reports one experiment."""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayfed.errors import ConfigError, RayFedError
from rayfed.terminal.console import follow, say, teller
from rayfed.terminal.guard import STOP

if TYPE_CHECKING:
    import pandas as pd

    from rayfed.config.schema import Config
    from rayfed.engine.setup import Setup
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

        from rayfed.report.table import read_rows

        return pd.DataFrame(read_rows(self.path))

    @property
    def metrics(self) -> dict[str, Any]:
        """The last round that was evaluated."""
        from rayfed.report.table import last_evaluated, read_rows

        return last_evaluated(read_rows(self.path))

    @property
    def params(self) -> Params:
        """The final trainable tensors by global name."""
        from safetensors.torch import load_file

        return dict(load_file(self.path / "model" / "params.safetensors"))


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


def execute(config: Config, quiet: bool = False, resume: bool = False, as_json: bool = False) -> Result:
    """Prepare, run and report one checked config.

    Args:
        config: The experiment; with `resume`, `output` is a folder that holds it already.
        quiet: Show nothing.
        resume: Go on from the last checkpoint in the folder; a finished run is only reported again.
        as_json: Write one JSON object a round to standard output, and all else to standard error.
    """
    from rayfed.config.place import check_own_folder
    from rayfed.config.variants import comparisons
    from rayfed.engine import preflight
    from rayfed.engine.setup import prepare
    from rayfed.record.folder import create, discard, finished
    from rayfed.record.tracking import check

    check(config.trackers)
    tell = teller(quiet, as_json)
    if resume:
        path = Path(str(config.output))
    else:
        path = Path(config.output) if config.output else _new_folder(config)
        check_own_folder(path)
        create(path, config.overwrite)
    if config.protocol == "leave_one_out":
        return _each_domain_out(config, path, quiet, resume, as_json)
    began = time.perf_counter()
    try:
        others = comparisons(config, path)
        setup = prepare(config)
        preflight.check(config.cluster, setup, path, config.checkpoint.keep + 1)
    except ConfigError:
        if not resume:
            discard(path)
        raise
    digest = finished(path, config.rounds) if resume else ""
    if not digest:
        record(config, setup, path, tell, resume)
        digest = _conduct(config, setup, path, quiet, resume, as_json)
    save = getattr(setup.world.tuning, "save", None)
    if save is not None:
        save(Result(path, digest).params, config.model.name, path / "model")
    for name, other in others.items():
        tell(f"\ncompare={name}")
        execute(other, quiet, resume and _is_run(other), as_json)
    _report(path, tell, tuple(others))
    tell(f"{path}: {time.perf_counter() - began:.0f} s, tensors sha256 {digest[:16]}")
    return Result(path, digest)


def _conduct(config: Config, setup: Setup, path: Path, quiet: bool, resume: bool, as_json: bool) -> str:
    """Run all rounds and show them; the digest of the final tensors."""
    from rayfed.engine.launch import launch
    from rayfed.record.folder import discard

    tell, digest = teller(quiet, as_json), ""
    shown = path if as_json else None
    try:
        for row in follow(launch(setup, config, path, tell, resume), config.rounds, quiet, shown):
            digest = row.get("sha256", digest)
            _look_for_stop()
    except ConfigError:
        if not resume and not (path / "result.json").exists():  # refused; the same output can be used again
            discard(path)
        raise
    except (RayFedError, KeyboardInterrupt):
        say(f"continue with: python -m rayfed.resume {path}", sys.stderr)
        raise
    return digest


def _look_for_stop() -> None:
    if STOP.is_set():
        raise KeyboardInterrupt


def _each_domain_out(config: Config, path: Path, quiet: bool, resume: bool, as_json: bool) -> Result:
    """Run protocol=leave_one_out; the digest is that of the digests of all runs."""
    import yaml

    from rayfed.config.schema import to_dict
    from rayfed.config.variants import folds
    from rayfed.engine.setup import prepare
    from rayfed.record.files import write_text
    from rayfed.record.folder import discard
    from rayfed.report.leave_one_out import table_of

    tell = teller(quiet, as_json)
    try:
        runs = folds(config, tuple(config.data.domains or prepare(config).dataset.domains), path)
    except ConfigError:
        if not resume:
            discard(path)
        raise
    write_text(path / "config.yaml", yaml.safe_dump(to_dict(config), sort_keys=False))
    done = {}
    for name, fold in runs.items():
        tell(f"\nheld out: {name}")
        done[name] = execute(fold, quiet, resume and _is_run(fold), as_json)
    table = table_of(config, {name: result.path for name, result in done.items()})
    write_text(path / "report.md", table.markdown())
    tell("\n" + table.text())
    return Result(path, hashlib.sha256("".join(r.sha256 for r in done.values()).encode()).hexdigest())


def _is_run(config: Config) -> bool:
    """Whether the folder of a config already holds a run."""
    return (Path(str(config.output)) / "config.yaml").exists()


def record(config: Config, setup: Setup, path: Path, tell: Callable[[str], None], resume: bool) -> None:
    """Write what will be run, and show who has what.

    Raises:
        ConfigError: The run that is continued had other data.
    """
    from rayfed.config.schema import to_dict
    from rayfed.data.partition.manifest import describe, save_manifest
    from rayfed.objective import objective
    from rayfed.record.folder import begun_with, describe_run

    partition, dataset = setup.partition, setup.dataset
    facts = {
        "data_digest": dataset.digest,
        "partition_digest": partition.digest,
        "bad_images_skipped": dataset.skipped,
        "task": dataset.task,
        "examples": objective(dataset.task).examples,
        "tensors_trained": len(setup.start),
        "numbers_trained": sum(v.numel() for v in setup.start.values()),
        "threads": config.cluster.threads,
    }
    if config.faults.trace:
        facts["trace_digest"] = hashlib.sha256(Path(config.faults.trace).read_bytes()).hexdigest()
    if resume:
        begun_with(path, facts)
    describe_run(path, to_dict(config), facts)
    save_manifest(partition, path / "partition.parquet", dataset)
    tell(describe(partition, dataset))
    if dataset.skipped:
        tell(f"{dataset.skipped} unreadable images were skipped (data.on_bad_image=skip)")


def _report(path: Path, tell: Callable[[str], None], others: tuple[str, ...] = ()) -> None:
    from rayfed.record.files import write_text
    from rayfed.report.comparison import with_others
    from rayfed.report.figures import draw
    from rayfed.report.table import final_table

    table = with_others(final_table(path), path, others)
    pictures = (f"\n![{title}](figures/{file.name})\n" for title, file in draw(path).items())
    write_text(path / "report.md", table.markdown() + "".join(pictures))
    tell("\n" + table.text())


def _new_folder(config: Config) -> Path:
    stamp = time.strftime("%Y%m%d-%H%M%S")
    name = f"{config.algorithm.replace(':', '.')}-{config.data.name}-seed{config.seed}-{stamp}"
    return Path("runs") / f"{name}-{os.getpid()}"
