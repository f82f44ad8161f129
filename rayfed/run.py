"""python -m rayfed.run: one experiment, from overrides to a table."""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayfed.errors import ConfigError, RayFedError, one_line
from rayfed.terminal.console import follow, say, teller

if TYPE_CHECKING:
    import pandas as pd

    from rayfed.config.schema import Config
    from rayfed.engine.setup import Setup
    from rayfed.types import Params

STOP = threading.Event()
"""Set when the process was asked to end."""

USAGE = """\
python -m rayfed.run [overrides] [--config FILE] [--quiet] [--json] [--debug]

Overrides are group=name (algorithm, data, model, tuning, cluster, experiment) and key=value, for example
  python -m rayfed.run algorithm=fedprox local.mu=0.1 data=pacs data.root=PACS rounds=5 output=runs/mine

python -m rayfed.doctor takes the same and says, without running it, whether it fits and how long it may take.
"""


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
    from rayfed.config.schema import comparisons
    from rayfed.engine import preflight
    from rayfed.engine.setup import prepare
    from rayfed.record.folder import create, discard, finished
    from rayfed.record.tracking import check

    check(config.trackers)
    tell = teller(quiet, as_json)
    if resume:
        path = Path(str(config.output))
    else:
        path = create(Path(config.output) if config.output else _new_folder(config), config.overwrite)
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
    from rayfed.engine.setup import prepare
    from rayfed.record.files import write_text
    from rayfed.record.folder import discard
    from rayfed.report.leave_one_out import folds, table_of

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
    from rayfed.data.partition.manifest import describe
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
    partition.save_manifest(path / "partition.parquet", dataset)
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


@contextmanager
def stoppable() -> Iterator[None]:
    """Let SIGTERM and Ctrl-C end a run: everything that was started is ended.

    An exception that a signal raises inside Ray's own code may be lost there, so the request is also noted
    and looked at after every round.
    """

    def stop(*_: object) -> None:
        STOP.set()
        raise KeyboardInterrupt

    STOP.clear()
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line. Exit code: 0 done, 1 failed, 2 bad input, 130 interrupted."""
    parser = argparse.ArgumentParser("rayfed.run", usage=USAGE, add_help=True)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--config", help="a resolved config to start from, such as a run's config.yaml")
    parser.add_argument("--quiet", action="store_true", help="show nothing but errors")
    parser.add_argument("--json", action="store_true", help="one JSON object a round on standard output")
    parser.add_argument("--list", action="store_true", help="show every algorithm, tuning, model and data")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    args = parser.parse_args(argv)

    def work() -> None:
        from rayfed.config.catalog import catalog
        from rayfed.config.schema import load_config

        if args.list:
            say(catalog())
        else:
            execute(load_config(args.overrides, args.config), args.quiet, as_json=args.json)

    return guarded(work, args.debug)


def guarded(work: Callable[[], object], debug: bool = False) -> int:
    """Do the work of a command; its exit code, with one line on standard error where it is not 0."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    # Two spinning threads on contended cores are slower than one.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        with stoppable():
            work()
    except RayFedError as err:
        if debug:
            traceback.print_exc()
        say(f"error: {one_line(err)}", sys.stderr)
        return 2 if isinstance(err, ConfigError) else 1
    except KeyboardInterrupt:
        say("interrupted; finished rounds are kept", sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
