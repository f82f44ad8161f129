"""Runs every method that fits on four settings, and writes benchmarks/results/which_method.json.

    python -m benchmarks.which_method --pacs PACS --weights FILE --text BANKING77 [--seeds 3]
        [--setting NAME ...] [--method NAME ...] [--folder runs/which_method] [overrides]

The same command again continues where it stopped. A setting is written after each of its seeds that is
finished for all methods; overrides, such as `rounds=5`, hold for every run. `docs.generate.results` makes the
tables of docs/results.md from the file, with differences to FedAvg and their tests.
"""

from __future__ import annotations

import argparse
import datetime
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rayfed.config.catalog import choices_of
from rayfed.config.papers import PAPER, PaperTable
from rayfed.config.schema import Config, compatible_parts, load_config
from rayfed.doctor import machine
from rayfed.errors import ConfigError, one_line
from rayfed.federation.method_registry import METHODS
from rayfed.record.atomic_files import write_text
from rayfed.record.readers import read_json, read_rows
from rayfed.reproduce.job import JobCell, Plans, TableJob
from rayfed.reproduce.run_job import reproduce
from rayfed.user_files import to_json

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "benchmarks" / "results" / "which_method.json"
COMMON = (
    *("tensorboard=false", "figures=false", "cluster=inline", "evaluation.every=1000"),
    *("evaluation.without_parts=false", "rounds=10"),
)
SETTINGS = {
    "unequal devices": (
        *("data=digits_five_mini", "model=vit_mini", "tuning=lora", "data.partition.scheme=by_domain"),
        *("data.limit=200", "data.test=80", "capacity=[12,10,8,6,3]"),
    ),
    "label skew": (
        *("data=digits_five_mini", "model=vit_mini", "tuning=residual_adapter"),
        *(
            "data.partition.scheme=dirichlet",
            "data.partition.alpha=0.3",
            "data.partition.clients_per_domain=2",
        ),
    ),
    "photographs and drawings": (
        *("data=pacs", "data.root={pacs}", "model=timm", "model.name=mobilenetv2_100", "model.size=96"),
        *("model.weights={weights}", "model.options={{pad_type: same}}", "tuning=residual_adapter"),
        *("data.partition.scheme=by_domain", "data.test=0.4", "data.val=0.1"),
    ),
    "texts": (
        *("data=banking77", "data.root={text}", "model=text_mini", "tuning=lora", "data.limit=2000"),
        *(
            "data.partition.scheme=dirichlet",
            "data.partition.alpha=0.5",
            "data.partition.clients_per_domain=5",
        ),
    ),
}
"""Overrides of each setting; a word in braces is a path from the command line."""

SCORES = {"mean": "accuracy", "worst client": "worst_client_accuracy", "spread": "sigma_client"}
"""Columns of the last round that are kept: over the clients, of the models that the method deploys."""


def configs(
    setting: str, methods: Sequence[str], given: Mapping[str, str], overrides: Sequence[str]
) -> tuple[dict[str, Config], dict[str, str]]:
    """The config of each method that fits a setting, and the reason of each one that does not.

    Args:
        setting: Name of the setting.
        methods: Names of methods.
        given: Paths by the words that `SETTINGS` has in braces.
        overrides: Overrides of every run.
    """
    fixed = [text.format(**given) for text in SETTINGS[setting]]
    found, refused = {}, {}
    plans = Plans()
    own = {each.name: each.brings["tuning"] for each in choices_of("algorithm") if "tuning" in each.brings}
    for name in methods:
        try:
            config = load_config([*COMMON, *fixed, f"algorithm={name}", *overrides])
            _check_own(name, own.get(name), config)
            compatible_parts(config)
            plans.of(_cell(name, setting, 0, config, Path("unused")))
            found[name] = config
        except ConfigError as err:
            refused[name] = one_line(err)
    return found, refused


def _check_own(name: str, own: str | None, config: Config) -> None:
    """Refuse a method that trains nothing, or whose own tuning, if any, is another one."""
    if not METHODS.load(name).server.trains:
        raise ConfigError(f"algorithm: {name} trains nothing")
    if own not in (None, config.tuning["name"]):
        raise ConfigError(f"tuning: {name} is made for tuning={own}")


def job_of(setting: str, found: Mapping[str, Config], seeds: int, folder: Path) -> TableJob:
    """The job of a setting: one run for each method and seed, all methods of the first seed first."""
    path = folder / setting.replace(" ", "_")
    table = PaperTable(
        name=f"which_method/{path.name}",
        reference="",
        where="",
        title=f"Every method that fits: {setting}",
        measures=tuple(SCORES),
        scores=SCORES,
        common={},
        rows={name: {"algorithm": name} for name in found},
        settings={setting: {}},
        small={},
        numbers={},
    )
    return TableJob(
        table=table,
        scale=PAPER,
        overrides=(),
        path=path,
        rows=tuple(found),
        settings=(setting,),
        seeds=tuple(range(seeds)),
        cells=tuple(
            _cell(name, setting, seed, config, path)
            for seed in range(seeds)
            for name, config in found.items()
        ),
    )


def _cell(name: str, setting: str, seed: int, config: Config, path: Path) -> JobCell:
    folder = path / "cells" / f"{name}-seed{seed}"
    config = replace(config, seed=seed, output=str(folder), overwrite=False, compare=())
    return JobCell(row=name, setting=setting, seed=seed, name=folder.name, path=folder, config=config)


def rows_of(job: TableJob) -> Iterator[dict[str, Any]]:
    """Scores and cost of every finished run: fractions, bytes in both directions, steps, and seconds."""
    for cell in job.cells:
        if not cell.record.exists():
            continue
        history = read_rows(cell.path)
        last = next(row for row in reversed(history) if SCORES["mean"] in row)
        yield {
            "method": cell.row,
            "seed": cell.seed,
            **{name: last[column] for name, column in SCORES.items()},
            "bytes": sum(row["bytes_up"] + row["bytes_down"] for row in history),
            "steps": sum(row["local_steps"] for row in history),
            "seconds": read_json(cell.record, dict)["seconds"],
        }


def facts(job: TableJob, overrides: Sequence[str], refused: Mapping[str, str]) -> dict[str, Any]:
    """Everything needed to run a setting again, and its results, without seeds that some methods lack.

    Args:
        job: The job of the setting.
        overrides: Overrides of every run, without paths.
        refused: Why other methods do not fit.
    """
    rows = list(rows_of(job))
    whole = [
        seed for seed in job.seeds if {row["method"] for row in rows if row["seed"] == seed} == {*job.rows}
    ]
    git = ["git", "-C", str(ROOT), "rev-parse", "--short=7", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    words = " ".join(["python -m benchmarks.which_method", f'--setting "{job.settings[0]}"', *overrides])
    return {
        "command": words,
        "commit": commit,
        "processor": _processor(),
        "date": datetime.date.today().isoformat(),
        "rounds": job.cells[0].config.rounds,
        "clients": _clients(job),
        "overrides": [text for text in SETTINGS[job.settings[0]] if "{" not in text.replace("{{", "")],
        "refused": dict(refused),
        "seeds": whole,
        "rows": [row for row in rows if row["seed"] in whole],
    }


def _processor() -> str:
    """The processor of this machine and its number of cores."""
    line = next(line for line in machine().splitlines() if "processor" in line)
    return line.partition("processor")[2].strip(" |:`*")


def _clients(job: TableJob) -> int:
    plan = Plans().of(job.cells[0])
    return len(plan.setups[0].experiment.clients)


def write(setting: str, found: Mapping[str, Any], file: Path = FILE) -> None:
    """Write the results of a setting into the file, which keeps those of the others."""
    every = read_json(file, dict) if file.exists() else {}
    every[setting] = found
    write_text(file, to_json({name: every[name] for name in SETTINGS if name in every}, indent=1) + "\n")


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--setting", action="append", choices=SETTINGS, metavar="NAME")
    parser.add_argument("--method", action="append", choices=METHODS.names(), metavar="NAME")
    parser.add_argument("--folder", type=Path, default=Path("runs/which_method"))
    parser.add_argument("--file", type=Path, default=FILE)
    for name in ("pacs", "weights", "text"):
        parser.add_argument(f"--{name}", default="")
    args, overrides = parser.parse_known_args(argv)
    given = {name: getattr(args, name) for name in ("pacs", "weights", "text")}
    for setting in args.setting or SETTINGS:
        found, refused = configs(setting, args.method or METHODS.names(), given, overrides)
        if not found:
            parser.error(f"{setting}: no method fits; {'; '.join(sorted(set(refused.values())))}")
        for seeds in range(1, args.seeds + 1):  # all methods of a seed before the next seed
            job = job_of(setting, found, seeds, args.folder)
            reproduce(job, lambda line: sys.stdout.write(f"{line}\n"))
            write(setting, facts(job, overrides, refused), args.file)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(sys.argv[1:])
