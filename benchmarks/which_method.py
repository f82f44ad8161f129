"""Runs every method that fits on four settings, and writes benchmarks/results/which_method.json.

    python -m benchmarks.which_method --pacs PACS --weights FILE --text BANKING77 [--seeds 3]
        [--setting NAME ...] [--method NAME ...] [--folder runs/which_method] [--time] [overrides]

All methods of a setting have the same optimizer and rate, that of the tuning or the setting, and train on as
many batches. Those that are defined for plain SGD have that, and are compared with FedAvg with plain SGD,
which is the row `fedavg_sgd`.

The same command again continues where it stopped, and with other methods adds these. The file has the methods
whose seeds are all finished, and names the others; overrides, such as `rounds=5`, hold for every run.
With `--time` nothing is compared: four rounds of each method are run once more, and the file gets the
processor seconds of a round's training, which other jobs of the machine change little.

`docs.generate.results` makes the tables of docs/results.md from the file.
"""

from __future__ import annotations

import argparse
import datetime
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import rayfed
from rayfed.config.catalog import choices_of
from rayfed.config.schema import Config, compatible_parts, load_config
from rayfed.doctor import machine
from rayfed.engine.measure_work import work_of_rounds
from rayfed.engine.setup import Setup
from rayfed.errors import ConfigError, one_line
from rayfed.experiment.plan import prepared
from rayfed.experiment.study.cells import Study
from rayfed.experiment.study.described import Fixed
from rayfed.experiment.study.progress import Progress
from rayfed.experiment.study.run_cell import CommonParts
from rayfed.federation.method_registry import METHODS
from rayfed.record.atomic_files import write_text
from rayfed.record.readers import read_json, read_rows
from rayfed.terminal.console import say
from rayfed.user_files import to_json

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "benchmarks" / "results" / "which_method.json"
COMMON = (
    *("tensorboard=false", "figures=false", "cluster=inline", "evaluation.without_parts=false"),
    "train.epochs=1",
)
SETTINGS = {
    "unequal devices": (
        *("data=digits_five_mini", "model=vit_mini", "tuning=lora", "data.partition.scheme=by_domain"),
        *("data.limit=100", "data.test=60", "capacity=[12,10,8,6,3]"),
        *("rounds=8", "train.batch_size=8", "train.lr=0.003"),
    ),
    "label skew": (
        *("data=digits_five_mini", "model=vit_mini", "tuning=residual_adapter"),
        *(
            "data.partition.scheme=dirichlet",
            "data.partition.alpha=0.3",
            "data.partition.clients_per_domain=2",
        ),
        "rounds=10",
    ),
    "photographs and drawings": (
        *("data=pacs", "data.root={pacs}", "model=timm", "model.name=mobilenetv2_100", "model.size=96"),
        *("model.weights={weights}", "model.options={{pad_type: same}}", "tuning=residual_adapter"),
        *("tuning.multiplier=0.1", "data.partition.scheme=by_domain", "data.limit=150", "data.test=0.4"),
        *("data.val=0.1", "rounds=6"),
    ),
    "texts": (
        *("data=banking77", "data.root={text}", "data.classes=10", "model=text_mini", "model.size=32"),
        *("tuning=lora", "data.limit=500", "data.test=0.4"),
        *(
            "data.partition.scheme=dirichlet",
            "data.partition.alpha=0.5",
            "data.partition.clients_per_domain=5",
        ),
        *("rounds=6", "train.batch_size=8", "train.lr=0.003"),
    ),
}
"""Overrides of each setting; a word in braces is a path from the command line."""

SCORES = {"mean": "accuracy", "worst client": "worst_client_accuracy", "spread": "sigma_client"}
"""Columns of the last round that are kept: over the clients, of the models that the method deploys."""

SGD = ("train.optimizer=sgd", "train.momentum=0", "train.lr=0.1")
"""Training of the methods that are defined for plain SGD; the rate was not tuned."""
PLAIN = "fedavg_sgd"
"""Name of the row of FedAvg with `SGD`."""
BASES = dict.fromkeys(("fednova", "perfedavg", "qffl", "scaffold"), PLAIN)
"""Rows that are not compared with FedAvg, and with which one instead: they are defined for plain SGD."""
INSTALLED = ("server.frozen_cache=preinstalled",)
"""For methods that send frozen blocks: clients have them, as with all others. Bytes alone change."""
OWN = {"fedbuff": ("server.buffer=3",), "fedrep": ("local.head_passes=1",)}
"""Overrides of single methods: fewer answers than clients, and two batches a step as others."""
NAMES = tuple(sorted((*METHODS.names(), PLAIN)))
"""All rows."""
LEFT_OUT = {"fedkseed": "algorithm: fedkseed needs thousands of steps, and a rate for each setting"}
ROUNDING = 1e-6
BATCHES = 2
"""Batches on which a client trains for each of its steps in a pass, by every method."""


def configs(
    setting: str, methods: Sequence[str], given: Mapping[str, str], overrides: Sequence[str]
) -> tuple[dict[str, Config], dict[str, str]]:
    """The config of each method that fits a setting, and the reason of each one that does not.

    Args:
        setting: Name of the setting.
        methods: Names of methods, or of the row `PLAIN`.
        given: Paths by the words that `SETTINGS` has in braces.
        overrides: Overrides of every run.
    """
    fixed = [*COMMON, *(text.format(**given) for text in SETTINGS[setting])]
    found = {}
    refused = {name: LEFT_OUT[name] for name in methods if name in LEFT_OUT}
    common_parts = CommonParts()
    own = {each.name: each.brings["tuning"] for each in choices_of("algorithm") if "tuning" in each.brings}
    common = load_config([*fixed, "algorithm=fedavg", *overrides])
    for row in methods:
        name = "fedavg" if row == PLAIN else row
        plain = SGD if row == PLAIN or row in BASES else ()
        try:
            if row in refused:
                continue
            config = load_config([*fixed, f"algorithm={name}", *plain, *own_options(name), *overrides])
            if not plain:
                config = replace(config, train=common.train)
            _check_own(name, own.get(name), config)
            compatible_parts(config)
            setup = prepared(replace(config, compare=()), shared=common_parts.of(config))
            config = with_answers(config, setup)
            config = replace(config, evaluation=replace(config.evaluation, every=max(1, config.rounds // 2)))
            found[row] = with_passes(config, _factor(row, batches_a_step(setup)))
        except ConfigError as err:
            refused[row] = one_line(err)
    return found, refused


def own_options(name: str) -> tuple[str, ...]:
    """The overrides of a method alone."""
    keys = {each.name for each in fields(METHODS.load(name).server)}
    return (*OWN.get(name, ()), *(INSTALLED if "frozen_cache" in keys else ()))


def batches_a_step(setup: Setup) -> float:
    """Training batches that a client takes for each step of `train`, in a round after the first."""
    experiment = setup.experiment
    sizes = [info.num_examples for info in experiment.clients.values()]
    steps = statistics.fmean(map(setup.context.train.steps, sizes))
    _, later = work_of_rounds(setup)
    return later.steps / (experiment.server.answers(experiment.clients_per_round) * steps)


def with_answers(config: Config, setup: Setup) -> Config:
    """The config with as many more rounds as fewer clients answer in each than in one of FedAvg."""
    clients = setup.experiment.clients_per_round
    return replace(config, rounds=round(config.rounds * clients / setup.experiment.server.answers(clients)))


def with_passes(config: Config, factor: int) -> Config:
    """The config with so many times as many passes in each visit of a client."""
    return replace(config, train=replace(config.train, epochs=config.train.epochs * factor))


def _factor(name: str, batches: float) -> int:
    """By what the passes of a method are multiplied, which trains on so many batches for a step.

    Raises:
        ConfigError: No whole number of passes makes its batches those of the others.
    """
    factor = round(BATCHES / batches) if batches else 1
    if batches and abs(factor * batches - BATCHES) > ROUNDING:
        raise ConfigError(
            f"algorithm: {name} trains on {batches:g} batches for a step, of which no number of passes makes "
            f"{BATCHES}"
        )
    return factor


def _check_own(name: str, own: str | None, config: Config) -> None:
    """Refuse a method that trains nothing, or whose own tuning, if any, is another one."""
    if not METHODS.load(name).server.trains:
        raise ConfigError(f"algorithm: {name} trains nothing")
    if own not in (None, config.tuning["name"]):
        raise ConfigError(f"tuning: {name} is made for tuning={own}")


def study_of(found: Mapping[str, Config], seeds: int) -> Study:
    """The study of a setting: one run for each method and seed, all methods of the first seed first."""
    given = dict.fromkeys(("figures", "tensorboard"))
    return Study(
        ((name, seed), Fixed(replace(config, seed=seed, compare=()), given))
        for seed in range(seeds)
        for name, config in found.items()
    )


def rows_of(study: Study) -> Iterator[dict[str, Any]]:
    """Scores and cost of every finished run: fractions, bytes in both directions, and steps.

    `half` is the mean after half of the rounds.
    """
    for (method, seed), run in study.finished.items():
        history = read_rows(Path(str(run.path)))
        scored = [row for row in history if SCORES["mean"] in row]
        last = scored[-1]
        yield {
            "method": method,
            "seed": seed,
            **{name: last[column] for name, column in SCORES.items()},
            "half": scored[0][SCORES["mean"]],
            "bytes": sum(row["bytes_up"] + row["bytes_down"] for row in history),
            "steps": sum(row["local_steps"] for row in history),
        }


def facts(setting: str, study: Study, overrides: Sequence[str], refused: Mapping[str, str]) -> dict[str, Any]:
    """Everything needed to run a setting again, and the results of the methods that have all seeds.

    Args:
        setting: Its name.
        study: Its study, which has run.
        overrides: Overrides of every run, without paths.
        refused: Why other methods do not fit.
    """
    rows = list(rows_of(study))
    methods = dict.fromkeys(method for method, _ in study.cells)
    whole = [
        name for name in methods if {row["seed"] for row in rows if row["method"] == name} == {*study.seeds}
    ]
    config = next(iter(study.cells.values())).config()
    git = ["git", "-C", str(ROOT), "rev-parse", "--short=7", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    words = " ".join(["python -m benchmarks.which_method", f'--setting "{setting}"', *overrides])
    return {
        "command": words,
        "commit": commit,
        "processor": _processor(),
        "date": datetime.date.today().isoformat(),
        "rounds": config.rounds,
        "clients": len(prepared(config).experiment.clients),
        "overrides": [text for text in SETTINGS[setting] if "{" not in text.replace("{{", "")],
        "bases": BASES,
        "refused": dict(refused),
        "seeds": study.seeds,
        "rows": [row for row in rows if row["method"] in whole],
    }


def _processor() -> str:
    """The processor of this machine and its number of cores."""
    line = next(line for line in machine().splitlines() if "processor" in line)
    return line.partition("processor")[2].strip(" |:`*")


def write(setting: str, found: Mapping[str, Any], file: Path = FILE) -> None:
    """Write the results of a setting into the file, which keeps those of the other settings.

    Other methods of the setting are kept too, unless the runs had another config. `unfinished` has the
    methods of which neither results nor a reason are known.
    """
    every = read_json(file, dict) if file.exists() else {}
    before = every.get(setting, {})
    if all(before.get(key) == found[key] for key in ("overrides", "rounds", "seeds", "clients")):
        new = {*found["refused"], *(row["method"] for row in found["rows"])}
        rows = [row for row in before["rows"] if row["method"] not in new]
        refused = {name: why for name, why in before["refused"].items() if name not in new}
        found = {**found, "rows": [*rows, *found["rows"]], "refused": {**refused, **found["refused"]}}
    known = {*found["refused"], *(row["method"] for row in found["rows"])}
    found = {**found, "seconds": before.get("seconds", {})}
    every[setting] = {**found, "unfinished": [name for name in NAMES if name not in known]}
    write_text(file, to_json({name: every[name] for name in SETTINGS if name in every}, indent=1) + "\n")


def seconds_of(found: Mapping[str, Config]) -> dict[str, float]:
    """Processor seconds of a round's training of each method: the median of its second to fourth round."""
    spent = {}
    for name, config in found.items():
        evaluation = replace(config.evaluation, every=0)
        short = replace(config, rounds=4, evaluation=evaluation, seed=0, compare=())
        with (
            tempfile.TemporaryDirectory() as folder,
            patch("rayfed.engine.loop.time.perf_counter", time.process_time),
        ):
            history = rayfed.simulate(replace(short, output=f"{folder}/run")).history
        spent[name] = round(statistics.median(history["seconds_training"][1:]), 4)
    return spent


def write_seconds(setting: str, seconds: Mapping[str, float], file: Path = FILE) -> None:
    """Add processor seconds by method to a setting of the file."""
    every = read_json(file, dict)
    every[setting]["seconds"] = {**every[setting].get("seconds", {}), **seconds}
    write_text(file, to_json(every, indent=1) + "\n")


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--setting", action="append", choices=SETTINGS, metavar="NAME")
    parser.add_argument("--method", action="append", choices=NAMES, metavar="NAME")
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--folder", type=Path, default=Path("runs/which_method"))
    parser.add_argument("--file", type=Path, default=FILE)
    for name in ("pacs", "weights", "text"):
        parser.add_argument(f"--{name}", default="")
    args, overrides = parser.parse_known_args(argv)
    given = {name: getattr(args, name) for name in ("pacs", "weights", "text")}
    for setting in args.setting or SETTINGS:
        found, refused = configs(setting, args.method or NAMES, given, overrides)
        if not found:
            parser.error(f"{setting}: no method fits; {'; '.join(sorted(set(refused.values())))}")
        if args.time:
            write_seconds(setting, seconds_of(found), args.file)
            continue
        study = study_of(found, args.seeds)
        told = Progress(say)
        study.run(args.folder / setting.replace(" ", "_"), progress=told)
        write(setting, facts(setting, study, overrides, refused), args.file)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(sys.argv[1:])
