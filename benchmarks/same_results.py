"""Whether results moved between two checkouts: digests of two rounds of every method, tuning and modality.

    git worktree add ../before 7d22d02
    python benchmarks/same_results.py --checkout ../before --save before.json
    python benchmarks/same_results.py --against before.json

Each case is one run of `python -m rayfed.run` in its own process, which imports the package of the
checkout. Compared are the sha256 of the final tensors of every run that a case writes, every column of
rounds.jsonl but the wall-clock times, and the scores of every client. The exit code is 1 if any of these
differs, if a case fails or is gone, or if nothing could be compared. A method that the saved file does not
name is shown as new.

With `--same-training` each case gets the optimizer, its rate and its other options from the config of its
saved run, because tuning schemes brought others later.

Floating-point sums depend on the processor and on the version of torch, so digests are comparable on one kind
of machine only; a saved file says on which kind it was made. `benchmarks/same_results_7d22d02.json` is the
table of commit 7d22d02. Cases on PACS, digits and Shakespeare read the folder $RAYFED_SHARED, by default
`../shared`, and are skipped where it is absent. All cases take about 9 minutes on one core.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatch
from importlib import metadata
from pathlib import Path
from typing import Any, TypeAlias

import yaml

Digests: TypeAlias = dict[str, Any]
"""Of one case: `tensors`, `clients`, and `rows` by column."""
Case: TypeAlias = dict[str, str]
"""Options of the command line by their keys."""

ROOT = Path(__file__).resolve().parent.parent
TENSORS = "model/params.safetensors"
ROWS = ("rounds.jsonl", "result.json")
SHARED = Path(os.environ.get("RAYFED_SHARED", ROOT.parent / "shared")).resolve()
PACKAGES = ("torch", "numpy", "scikit-learn", "timm", "peft", "open_clip_torch")
TRAINING = ("optimizer", "lr", "momentum", "weight_decay", "betas", "eps", "schedule", "clip_norm")
PATIENCE = 900  # seconds for one case
CASES = Path(__file__).with_name("same_results_cases.yaml")


class CaseError(Exception):
    """A case did not run, or left nothing to compare."""


def cases(checkout: Path) -> dict[str, Case]:
    """Every case by name: those of the YAML file, and one for each method that the checkout has."""
    listed = yaml.safe_load(CASES.read_text())
    small = f"{listed['all_cases']} {listed['embedded_digits']}"
    methods = sorted(file.stem for file in (checkout / "algorithms").glob("[!_]*.py"))
    found = {}
    for name in (*methods, *listed["presets"]):
        found[f"method/{name}"] = split(name, f"{small} {listed['methods'].get(name, '')}")
    for group, known in (("on_embedded_digits", small), ("on_other_data", listed["all_cases"])):
        for name, text in listed[group].items():
            algorithm, _, options = text.partition(" ")
            found[name] = split(algorithm, f"{known} {options}")
    return found


def split(algorithm: str, options: str) -> Case:
    """Options by key, with the folder of shared data filled in; of a key given twice, the last one."""
    words = shlex.split(f"algorithm={algorithm} {options}")
    return {word.partition("=")[0]: word.replace("$RAYFED_SHARED", str(SHARED)) for word in words}


def run(checkout: Path, command: Sequence[str], folder: Path) -> str:
    """Standard output of a Python command that imports the packages of a checkout.

    Raises:
        CaseError: It failed or took too long.
    """
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    env |= {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1", "RAYFED_CACHE": str(folder / "cache")}
    try:
        done = subprocess.run(
            [sys.executable, *command],
            cwd=checkout,
            env=env,
            text=True,
            capture_output=True,
            timeout=PATIENCE,
        )
    except subprocess.TimeoutExpired as err:
        raise CaseError(f"not finished after {PATIENCE} s") from err
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["nothing on standard error"]
        raise CaseError(f"exit code {done.returncode}: {lines[-1]}")
    return done.stdout


def digests(output: Path) -> Digests:
    """Results of the runs below a folder.

    Returns:
        `tensors`: names, shapes, types and bytes of the final tensors. `clients`: scores of the clients.
        `rows`: the columns of the result rows without wall-clock times, each with 12 digits of its sha256.

    Raises:
        CaseError: There are no tensors or no rows.
    """
    runs = sorted(file.parent.parent for file in output.rglob(TENSORS))
    rows = [row for folder in runs for row in read_rows(folder)]
    if not runs or not rows:
        raise CaseError(f"the run wrote no {TENSORS} or no {ROWS[0]}")
    return {
        "tensors": sha256(part for folder in runs for part in tensor_bytes(folder / TENSORS)),
        "clients": sha256(line.encode() for folder in runs for line in client_lines(folder)),
        "rows": {
            name: sha256([json.dumps([row.get(name) for row in rows]).encode()])[:12]
            for name in dict.fromkeys(name for row in rows for name in row)
            if "seconds" not in name or name.startswith("virtual")
        },
    }


def sha256(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def tensor_bytes(file: Path) -> Iterable[bytes]:
    """Name, type, shape and content of every tensor of a safetensors file, by name."""
    content = file.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    for name in sorted(header.keys() - {"__metadata__"}):
        begin, end = header[name]["data_offsets"]
        yield f"{name} {header[name]['dtype']} {header[name]['shape']}".encode()
        yield content[start + begin : start + end]


def read_rows(folder: Path) -> list[dict[str, Any]]:
    files = [folder / name for name in ROWS if (folder / name).exists()]
    return [json.loads(line) for file in files[:1] for line in file.read_text().splitlines()]


def client_lines(folder: Path) -> list[str]:
    """Scores in clients.parquet, without the name of the exchange they came with, which may be renamed."""
    import pyarrow.parquet as pq

    if not (folder / "clients.parquet").exists():
        return []
    columns = ["round", "client", "model", "metric", "value"]
    table = pq.read_table(folder / "clients.parquet", columns=columns).to_pylist()
    return sorted(json.dumps(list(row.values())) for row in table)


def differences(before: Digests, after: Digests) -> list[str]:
    """Differences by name; columns that are only in `after` do not count."""
    found = [name for name in ("tensors", "clients") if before[name] != after[name]]
    return found + [name for name, digest in before["rows"].items() if after["rows"].get(name) != digest]


def machine() -> dict[str, str]:
    """Facts on which digests depend besides the code."""
    import torch

    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    about = dict(line.replace("\t", "").partition(":")[::2] for line in reversed(lines))
    names = (about.get(key, "").strip() for key in ("model name", "cpu family", "model"))
    versions = {name: metadata.version(name) for name in PACKAGES}
    return {
        "processor": " / ".join(names) if about else platform.processor(),
        "vector instructions": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        **versions,
    }


def measure(checkout: Path, case: Case, folder: Path) -> Digests:
    """Run a case in its own folder, which is removed again.

    Raises:
        CaseError: It failed.
    """
    with tempfile.TemporaryDirectory(dir=folder) as output:
        run(checkout, ["-m", "rayfed.run", *case.values(), f"output={output}/run", "--quiet"], folder)
        return {**digests(Path(output)), "training": training(Path(output))}


def training(output: Path) -> dict[str, Any]:
    """Options of the optimizer in the config of the first run below a folder; empty without a config."""
    for file in sorted(output.rglob("config.yaml"))[:1]:
        section = yaml.safe_load(file.read_text()).get("train", {})
        return {key: section[key] for key in TRAINING if key in section}
    return {}


def with_training(case: Case, values: Mapping[str, Any]) -> Case:
    """The case with these options of the optimizer."""
    return {**case, **{f"train.{key}": f"train.{key}={json.dumps(value)}" for key, value in values.items()}}


def absent(case: Case) -> str:
    """The first file or folder of shared data that a case names and that does not exist."""
    named = (option.partition("=")[2] for option in case.values() if str(SHARED) in option)
    return next((path for path in named if not Path(path).exists()), "")


def outcome(
    checkout: Path, case: Case | None, before: Digests | None, folder: Path
) -> tuple[Digests | None, str]:
    """Digests of a case, if it runs, and whether they are those of before, as a cell of the table."""
    if case is None:
        return None, "GONE: this checkout has no such case"
    if path := absent(case):
        return None, f"skipped: {path} does not exist; set RAYFED_SHARED"
    try:
        after = measure(checkout, case, folder)
    except CaseError as err:
        return None, f"FAILED: {err}"
    if before is None:
        return after, "new"
    changed = differences(before, after)
    return after, f"NO: {', '.join(changed)}" if changed else "yes"


def show(
    checkout: Path, names: Sequence[str], before: Mapping[str, Digests], folder: Path, same_training: bool
) -> tuple[dict[str, Digests], list[str]]:
    """Run the named cases and print a line for each.

    Returns:
        The digests of the cases that ran, by name, and the cells `same` of all.
    """
    todo, found, cells = cases(checkout), {}, []
    print("| case | before | after | same |\n|---|---|---|---|")
    for name in names:
        old = before.get(name)
        case = todo.get(name)
        if case and old and same_training:
            case = with_training(case, old.get("training", {}))
        new, cell = outcome(checkout, case, old, folder)
        short = [each["tensors"][:12] if each else "" for each in (old, new)]
        print(f"| {name} | {' | '.join(short)} | {cell} |", flush=True)
        cells.append(cell)
        if new:
            found[name] = new
    return found, cells


def save(file: Path, checkout: Path, found: Mapping[str, Digests]) -> None:
    """Write a table of digests, with one line for each case."""
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    commit = subprocess.run(command, text=True, capture_output=True).stdout.strip()
    about = {
        "note": "Digests of benchmarks/same_results.py; comparable on one kind of machine only.",
        "commit": commit,
        "machine": machine(),
    }
    head = ",\n".join(f" {json.dumps(key)}: {json.dumps(value)}" for key, value in about.items())
    body = ",\n".join(f"  {json.dumps(name)}: {json.dumps(each)}" for name, each in found.items())
    file.write_text(f'{{\n{head},\n "cases": {{\n{body}\n }}\n}}\n')


def selected(parser: argparse.ArgumentParser, names: Iterable[str], wanted: Sequence[str]) -> list[str]:
    """The names that match one of the patterns; without patterns, all."""
    found = [name for name in names if not wanted or any(fnmatch(name, pattern) for pattern in wanted)]
    if not found:
        parser.error(f"--only: no case is called {' or '.join(wanted)}; such as method/fedavg or 'tuning/*'")
    return found


def saved_digests(file: Path | None) -> dict[str, Digests]:
    """The cases of a saved table; says if it was made on another kind of machine."""
    if file is None:
        return {}
    table = json.loads(file.read_text())
    other = [name for name, value in machine().items() if table["machine"].get(name) != value]
    if other:
        print(f"warning: {file} was made with another {', '.join(other)}, which changes digests too\n")
    return dict(table["cases"])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkout", type=Path, default=ROOT, help="folder of the code that runs (this one)")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the digests; replaces the file")
    parser.add_argument("--against", type=Path, metavar="FILE", help="compare with these saved digests")
    parser.add_argument("--same-training", action="store_true", help="use the optimizers of the saved runs")
    parser.add_argument("--only", nargs="+", default=[], metavar="CASE", help="for example 'text/*'")
    args = parser.parse_args(argv)
    checkout, before = args.checkout.resolve(), saved_digests(args.against)
    names = selected(parser, dict.fromkeys([*cases(checkout), *before]), args.only)
    with tempfile.TemporaryDirectory() as folder:
        package = run(checkout, ["-c", "import rayfed; print(rayfed.__file__)"], Path(folder)).strip()
        if not Path(package).is_relative_to(checkout):
            parser.error(f"--checkout: {checkout} was given, but Python imports {package}")
        found, cells = show(checkout, names, before, Path(folder), args.same_training)
    if args.save:
        save(args.save, checkout, found)
    kinds = [cell.partition(":")[0] for cell in cells]
    print("\n" + ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds)))
    failed = {"NO", "FAILED", "GONE"}.intersection(kinds) or not found
    return 1 if failed or (args.against and "yes" not in kinds) else 0


if __name__ == "__main__":
    sys.exit(main())
