"""The same work in RayFed, plain PyTorch, Flower, pfl and BlazeFL, one round after the other.

    python -m benchmarks.rivals [--rows cifar lenet vit text] [--rivals plain rayfed pfl flower blazefl]

Makes the environments of the libraries, writes the inputs and runs the rows; `--record` writes the page.
Measured rows are kept in the folder of `--folder`; a row that is measured again replaces the old one there.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.rivals import environments, table
from benchmarks.rivals.environments import ROOT, SIDES, Side
from benchmarks.rivals.equal_work import differences, digest, distance, final_loss
from benchmarks.rivals.inputs import write_inputs
from benchmarks.rivals.measuring import Program, ProgramError, Round
from benchmarks.rivals.workloads import START, WORK, Work, load, small

SHARED = ROOT.parent / "shared"
PAGE = ROOT / "benchmarks" / "results" / "rivals.md"
FIGURE = ROOT / "docs" / "images" / "rivals.svg"
CHECKED_ROUNDS = 3
RESULTS = "results.json"
Starts = Callable[[Side, Path, int, Path | None], Program]


def main(given: Sequence[str] | None = None) -> None:
    args = parsed(given)
    args.folder.mkdir(parents=True, exist_ok=True)
    pythons = {name: environments.install(SIDES[name], args.folder) for name in args.rivals}
    logs = args.folder / "logs"
    logs.mkdir(exist_ok=True)

    def start(side: Side, inputs: Path, rounds: int, state: Path | None) -> Program:
        line = environments.command(side, pythons[side.name], inputs, rounds, state)
        return Program(line, environments.variables(), logs / f"{side.name}.log")

    sides = [SIDES[name] for name in args.rivals]
    kept = args.folder / RESULTS
    results: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {"rows": {}}
    for name in args.rows:
        began = time.perf_counter()
        work = replace(WORK[name], rounds=2 + args.steady)
        row = measured(small(work) if args.small else work, sides, start, args)
        if name in args.checks:
            few = small(replace(work, rounds=CHECKED_ROUNDS))
            for side, found in checked(few, sides, start, args).items():
                row["sides"][side].update(found)
        results["rows"] = {k: v for k, v in {**results["rows"], name: row}.items() if k in WORK}
        results["facts"] = facts(pythons)
        row |= {"command": command_of(args), "commit": results["facts"]["commit"]}
        kept.write_text(json.dumps(results, indent=1))
        print(f"\n{WORK[name].title} ({time.perf_counter() - began:.0f} s)\n{table.table(row)}", flush=True)
        print(table.sentence(name, row), flush=True)
        for side, found in row["sides"].items():
            if "note" in found:
                print(f"{side} was not repeated and resumed: {found['note']}", flush=True)
            if found.get("problems"):
                print(f"the work of {side} differs: {'; '.join(found['problems'])}", flush=True)
    if args.record:
        PAGE.write_text(table.page(results))
        table.draw(results, FIGURE)


def parsed(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", nargs="+", choices=WORK, default=list(WORK))
    parser.add_argument("--rivals", nargs="+", choices=SIDES, default=list(SIDES))
    option = parser.add_argument
    option("--steady", type=int, default=3, help="measured rounds after the first two")
    option("--checks", nargs="*", choices=WORK, default=["lenet", "text"], help="rows to repeat and resume")
    option("--small", action="store_true", help="few clients and examples: a trial of the programs")
    option("--folder", type=Path, default=ROOT / "runs" / "rivals", help="environments and results")
    option("--texts", type=Path, default=SHARED / "data" / "text" / "banking77" / "train.csv")
    option("--model", type=Path, default=SHARED / "weights" / "minilm_l6", help="folder of MiniLM-L6")
    option("--record", action="store_true", help="write benchmarks/results/rivals.md and its figure")
    args = parser.parse_args(given)
    args.folder = args.folder.absolute()
    return args


def measured(work: Work, sides: Sequence[Side], start: Starts, args: argparse.Namespace) -> dict[str, Any]:
    """A row: all programs run the same rounds, one after the other.

    Returns:
        The numbers of the row, and in `sides` those of each program.
    """
    loads = [os.getloadavg()[0]]
    with tempfile.TemporaryDirectory(prefix="rivals-") as name:
        folder = Path(name) / "inputs"
        write_inputs(folder, work, args.texts, args.model)
        found: dict[str, Any] = {side.name: {"lines": table.lines_of(side), "rounds": []} for side in sides}
        programs: dict[str, Program] = {}
        values: dict[str, Mapping[str, Any]] = {}
        try:
            for i in range(work.rounds):
                for side in sides:
                    own = found[side.name]
                    if "failed" in own:
                        continue
                    try:
                        if not i:
                            programs[side.name] = start(side, folder, work.rounds, None)
                        own["rounds"].append(asdict(programs[side.name].round(weighs=i < 2)))
                        if i == work.rounds - 1:
                            values[side.name] = programs[side.name].values()
                    except ProgramError as err:
                        own["failed"] = str(err)
                loads.append(os.getloadavg()[0])
            for side, program in programs.items():
                found[side]["peak"] = program.peak
        finally:
            for program in programs.values():
                program.close()
        compare(folder, work, found, values)
    load = f"{min(loads):.1f} to {max(loads):.1f}"
    return {"steps": work.steps, "examples": work.rows, "load": load, "sides": found}


def compare(folder: Path, work: Work, found: dict[str, Any], values: Mapping[str, Mapping[str, Any]]) -> None:
    """Add to each side how far it is from the first one, and what of its work differs."""
    first = next(iter(values))
    loss, start = final_loss(folder, values[first]), load(folder / START)
    for side, own in values.items():
        rounds = [Round(**each) for each in found[side]["rounds"]]
        apart, its_loss = distance(own, values[first], start), final_loss(folder, own)
        found[side] |= {"apart": apart, "loss": its_loss}
        found[side]["problems"] = differences(work, rounds, apart, its_loss, loss)


def checked(work: Work, sides: Sequence[Side], start: Starts, args: argparse.Namespace) -> dict[str, Any]:
    """Whether a second run, and one that is killed and continued, give the digest of the first, by side."""
    found = {}
    with tempfile.TemporaryDirectory(prefix="rivals-") as name:
        folder = Path(name) / "inputs"
        write_inputs(folder, work, args.texts, args.model)

        def finished(side: Side, state: Path | None) -> str:
            program = start(side, folder, work.rounds, state)
            try:
                for _ in range(work.rounds - (1 if state else 0)):
                    program.round()
                return digest(program.values())
            finally:
                program.close()

        for side in sides:
            state = Path(name) / side.name
            state.mkdir()
            try:
                first = finished(side, None)
                twice = finished(side, None) == first
                killed = start(side, folder, work.rounds, state)
                killed.round()
                killed.close(at_once=True)
                found[side.name] = {
                    "twice": twice,
                    "resumes": resumed(side, folder, state, start, work) == first,
                }
            except ProgramError as err:
                found[side.name] = {"resumes": False, "note": str(err)}
                continue
    return found


def resumed(side: Side, folder: Path, state: Path, start: Starts, work: Work) -> str:
    """The digest after the last round of a killed program, which goes on from what it kept."""
    program = start(side, folder, work.rounds, state)
    last = ""
    try:
        for _ in range(work.rounds):
            program.round()
            last = digest(program.values())
    except ProgramError:
        if not last:
            raise
    finally:
        program.close()
    return last


def command_of(args: argparse.Namespace) -> str:
    """The command with the options that change what is measured."""
    words = ["python -m benchmarks.rivals"]
    usual = parsed([])
    for name in ("rows", "rivals", "steady", "checks"):
        if (value := getattr(args, name)) != getattr(usual, name):
            words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return f"`{' '.join([*words, *(['--small'] if args.small else [])])}`"


def facts(pythons: Mapping[str, Path]) -> dict[str, str]:
    """Commit, processor, date and versions."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short=7", "HEAD"], cwd=ROOT, capture_output=True, text=True
    )
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    processor = names[0].partition(": ")[2] if names else platform.processor()
    found: dict[str, str] = {}
    for name, python in pythons.items():
        for package, number in environments.versions(SIDES[name], python).items():
            found.setdefault(f"{package} ({name})" if package == "ray" else package, number)
    return {
        "commit": commit.stdout.strip() or "none",
        "processor": f"{processor}, {os.cpu_count()} cores",
        "date": datetime.now(UTC).date().isoformat(),
        "versions": ", ".join(
            [f"Python {platform.python_version()}", *(f"{k} {v}" for k, v in found.items())]
        ),
    }


if __name__ == "__main__":
    main()
