"""The command python -m rayfed.study: runs a study, a grid of experiments that a file describes."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rayfed.errors import ConfigError, shown, unknown
from rayfed.terminal.arguments import parser_of
from rayfed.terminal.console import say
from rayfed.terminal.exit_code import run_guarded
from rayfed.terminal.supervisor import run_supervised
from rayfed.user_files import read_file

if TYPE_CHECKING:
    from rayfed.experiment.study.cells import Study

USAGE = """\
python -m rayfed.study FILE.yaml [output=DIR] [at_once=N] [seeds=N]
    [against=NAME] [margin=NUMBER] [--quiet]

Runs every method with every value and seed of FILE.yaml, and shows the table
and the tests. What is finished is not repeated; started again after Ctrl-C, a
crash or kill -9, it goes on. The keys of the file:
  experiment: [data=digits_five_mini, cluster=inline, rounds=5]   for all cells
  methods: {fedavg: [], pulled: [algorithm=fedprox, local.mu=0.1]}   overrides;
                                     the name of a method chooses that method
  grid: {train.lr: [0.01, 0.1]}      values by key
  seeds: 3                           or a list of seeds
  margin: 0.01                       difference that counts as equally good
  against: fedavg                    the row that others are compared with
  equal: examples                    what all methods have as much of: steps,
                                     examples, flops or bytes
  tuned: {trials: 8}                 tune each method first, all with
                                     as many trials; also its seeds, and
                                     knobs: {pulled: [local.mu, 0.01, 10]}
  output: runs/rates                 by default runs/ and the name of the file
  at_once: 2                         cells side by side, or auto
A protocol is an override of the experiment: protocol=leave_one_out. For example
  python -m rayfed.study rates.yaml at_once=2
"""

KEYS = ("experiment", "methods", "grid", "seeds", "margin", "against", "equal", "tuned", "output", "at_once")
"""Keys of the file."""

TUNED_KEYS = ("trials", "seeds", "knobs")
"""Keys of the section `tuned`."""

OVERRIDES = ("output", "at_once", "seeds", "against", "margin")
"""Keys that the command line may give."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line. Exit code: 0 finished, 1 failed, 2 bad input, 130 interrupted."""
    parser = parser_of("rayfed.study", USAGE)
    parser.add_argument("file", type=Path, metavar="FILE.yaml", help="the file that describes the study")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="output=DIR, at_once=N")
    parser.add_argument("--quiet", action="store_true", help="show only errors")
    args = parser.parse_args(argv)

    def work() -> None:
        tree = keys_of(args.file, args.overrides)
        folder = Path(str(tree.get("output", Path("runs") / args.file.stem))).expanduser()
        if tree.get("tuned") is None:
            study = study_of(tree).run(folder, at_once=number_at_once(tree), quiet=args.quiet)
        else:
            study = tuned_study(tree, folder, args.quiet)
        if not args.quiet:
            say("\n" + study.table("text"))
            if len(study.labels) > 1:
                say("\n" + study.tests(against=tree.get("against"))("text"))
            say(f"everything on one page: python -m rayfed.report {folder}")

    return run_guarded(work, args.debug, "what is finished is kept; start the command again to continue")


def keys_of(file: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """The keys of a file, with those of the command line.

    Raises:
        ConfigError: The file cannot be read, or has another key.
    """
    tree = dict(read_file(file, "study"))
    for text in overrides:
        key, sign, value = text.partition("=")
        if not sign or key not in OVERRIDES:
            raise ConfigError(
                f"study: {text!r} is none of output=DIR, at_once=N, seeds=N, against=NAME and margin=NUMBER; "
                f"write it into {file}"
            )
        tree[key] = number_or_text(value)
    for key in tree:
        if key not in KEYS:
            raise ConfigError(unknown(f"{file}: key", str(key), KEYS))
    return tree


def number_or_text(text: str) -> Any:
    """A value of the command line.

    >>> number_or_text("3"), number_or_text("0.02"), number_or_text("auto")
    (3, 0.02, 'auto')
    """
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def number_at_once(tree: Mapping[str, Any]) -> int | Literal["auto"]:
    """The number of cells side by side; `Study.run` refuses what is none."""
    value: int | Literal["auto"] = tree.get("at_once", 1)
    return value


def study_of(tree: Mapping[str, Any]) -> Study:
    """The study that the keys of a file describe; it is not run.

    Raises:
        ConfigError: A key has a value of the wrong kind, or an experiment is wrong.
    """
    from rayfed.experiment.compare_and_sweep import grid
    from rayfed.experiment.experiment import Experiment

    methods, space, seeds = _methods(tree), _mapping("grid", tree.get("grid")), _seeds(tree)
    margin, equal = tree.get("margin"), tree.get("equal")
    named: Any = methods or Experiment.from_overrides(_overrides("experiment", tree.get("experiment", [])))
    return grid(named, space, seeds, margin, equal)


def tuned_study(tree: Mapping[str, Any], folder: Path, quiet: bool) -> Study:
    """The study of the methods of a file, each of which was tuned before.

    Args:
        folder: Folder of the study.
        quiet: Show only errors.

    Raises:
        ConfigError: As of `study_of`, or as of `rayfed.tuned`.
    """
    from rayfed.experiment.tuned import tuned

    if tree.get("grid"):
        raise ConfigError("study: tuned chooses values, and grid compares them; leave one of them out")
    section = {"trials": tree["tuned"]} if type(tree["tuned"]) is int else tree["tuned"]
    options: dict[str, Any] = dict(_mapping("tuned", section))
    for key in options:
        if key not in TUNED_KEYS:
            raise ConfigError(unknown("study: tuned: key", str(key), TUNED_KEYS))
    if type(options.get("trials", 1)) is not int:
        raise ConfigError(f"study: tuned.trials: {shown(options['trials'])} is no number of trials")
    if not (methods := _methods(tree)):
        raise ConfigError("study: tuned: there are no methods; list them, such as methods: {fedavg: []}")
    if "seeds" in options:
        options["tuning_seeds"] = _seeds(options)
        del options["seeds"]
    options["knobs"] = _mapping("tuned.knobs", options.get("knobs"))
    options |= {"margin": tree.get("margin"), "equal": tree.get("equal")}
    at_once = number_at_once(tree)
    return tuned(methods, seeds=_seeds(tree), output=folder, at_once=at_once, quiet=quiet, **options)


def _methods(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The experiments that a file names; empty: it names none.

    Raises:
        ConfigError: They are no mapping, or one is wrong.
    """
    from rayfed.experiment.experiment import Experiment

    common = _overrides("experiment", tree.get("experiment", []))
    return {
        str(name): Experiment.from_overrides([*common, *_of_method(str(name), own)])
        for name, own in _mapping("methods", tree.get("methods")).items()
    }


def _mapping(key: str, value: Any) -> Mapping[str, Any]:
    """A section of names, which may be left out.

    Raises:
        ConfigError: It is none.
    """
    if not isinstance(value or {}, Mapping):
        raise ConfigError(f"study: {key}: {shown(value)} is no mapping of names")
    return value or {}


def _seeds(tree: Mapping[str, Any]) -> Any:
    """The seeds, or their number.

    Raises:
        ConfigError: They are neither.
    """
    seeds = tree.get("seeds", 1)
    every = seeds if isinstance(seeds, list) else [seeds]
    if not every or not all(type(each) is int for each in every):
        raise ConfigError(f"study: seeds: {shown(seeds)} is neither a number nor a list of numbers")
    return seeds


def _of_method(name: str, value: Any) -> list[str]:
    """The overrides of an entry of `methods`; one named like a method that chooses none is that method.

    Raises:
        ConfigError: They are no list of texts.
    """
    from rayfed.federation.method_registry import METHODS

    own = _overrides(f"methods.{name}", value)
    chooses = any(text.startswith(("algorithm=", "experiment=")) for text in own)
    return own if chooses or name not in METHODS.names() else [f"algorithm={name}", *own]


def _overrides(key: str, value: Any) -> list[str]:
    """Overrides of the command line in a file.

    Raises:
        ConfigError: It is no list of texts.
    """
    listed = [] if value is None else value
    if not isinstance(listed, list) or not all(isinstance(each, str) for each in listed):
        raise ConfigError(f"study: {key}: {shown(value)} is no list of overrides, such as [rounds=5]")
    return listed


if __name__ == "__main__":
    sys.exit(run_supervised(main))
