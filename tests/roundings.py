"""The numeric tests under other roundings: those that one machine can imitate of other processors.

    make test-roundings                                  all of them, one after the other
    python -m tests.roundings MKL-COMPATIBLE 4-threads   some of them
    python -m tests.roundings --list

An imitation sets variables of the environment that torch, MKL or oneDNN read when they start: which
instructions they use, in which order they add, and in how many threads. It runs the tests with the mark
`numeric` that are not slow, and the largest share that a difference took of its derived limit
(`tests/rounding.py`) goes into the table; above 1 a test fails. One that has no effect on this processor is
not run, and the table says so.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.rounding import FILE

ROOT = Path(__file__).parents[1]


def _threads(count: int) -> dict[str, str]:
    many = str(count)
    return {"OMP_NUM_THREADS": many, "MKL_NUM_THREADS": many, "MKL_DYNAMIC": "FALSE", "OMP_DYNAMIC": "FALSE"}


IMITATIONS: dict[str, Mapping[str, str]] = {
    "as-it-is": {},
    **{f"torch-{level}": {"ATEN_CPU_CAPABILITY": level} for level in ("default", "avx2", "avx512")},
    **{
        f"MKL-{mode}": {"MKL_CBWR": mode}
        for mode in ("COMPATIBLE", "SSE2", "SSE4_2", "AVX", "AVX2", "AVX2,STRICT", "AVX512", "AVX512,STRICT")
    },
    **{
        f"oneDNN-{level}": {"ONEDNN_MAX_CPU_ISA": level}
        for level in ("SSE41", "AVX", "AVX2", "AVX512_CORE", "AVX512_CORE_VNNI")
    },
    "2-threads": _threads(2),
    "4-threads": _threads(4),
    "oldest": {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "SSE41"},
}
"""Variables of each imitation by its name; `oldest` sets all libraries to their oldest instructions."""

PROBE = """
import os, torch
import tests.conftest
torch.set_num_threads(1)  # as an experiment does
a = torch.ones(64, 64)
a @ a
torch.ops.mkldnn._linear_pointwise(a, a, None, "none", [], "")
print("torch", torch.backends.cpu.get_cpu_capability(), "threads", torch.get_num_threads())
"""


def dispatch(variables: Mapping[str, str]) -> dict[str, str]:
    """What torch, MKL and oneDNN say they use in a process with these variables, and in how many threads."""
    told = {"MKL_VERBOSE": "1", "ONEDNN_VERBOSE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROBE],
        cwd=ROOT,
        env=surroundings(variables) | told,
        capture_output=True,
        text=True,
        check=True,
    )
    patterns = {
        "torch": r"^torch (\S+)",
        "threads": r"threads (\d+)$",
        "MKL": r"CNR:(\S+)",
        "oneDNN": r"isa:(.*)$",
    }
    found = {name: re.search(pattern, done.stdout, re.M) for name, pattern in patterns.items()}
    return {name: "" if match is None else match[1].strip() for name, match in found.items()}


def surroundings(variables: Mapping[str, str]) -> dict[str, str]:
    """The environment of an imitation: one thread, unless it says another number."""
    ours = {name for each in IMITATIONS.values() for name in each}
    own = {name: value for name, value in os.environ.items() if name not in ours}
    return own | {"OMP_NUM_THREADS": "1"} | dict(variables)


def why_not(variables: Mapping[str, str], seen: Mapping[str, str], usual: Mapping[str, str]) -> str:
    """Why these variables imitate nothing on this machine; empty: they have the effect that they name."""
    level = variables.get("ATEN_CPU_CAPABILITY")
    if level and seen["torch"].lower() != level:
        return f"torch uses {seen['torch']}"
    if variables.get("OMP_NUM_THREADS", "1") != seen["threads"]:
        return f"torch uses {seen['threads']} threads"
    if "ONEDNN_MAX_CPU_ISA" in variables and seen["oneDNN"] == usual["oneDNN"]:
        return f"oneDNN uses {seen['oneDNN']} as ever"
    mode = variables.get("MKL_CBWR")
    if mode and seen["MKL"] == usual["MKL"]:
        return f"MKL's mode stays {usual['MKL']}"
    return ""


def run(variables: Mapping[str, str], tests: Sequence[str]) -> dict[str, str]:
    """A row of the table: the result of the numeric tests, the largest share of a limit, where it was."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "shares"
        command = [sys.executable, "-m", "pytest", "-m", "numeric and not slow"]
        command += ["-p", "no:cacheprovider", "-n", "2", "--dist", "loadgroup"]
        began = time.perf_counter()
        done = subprocess.run(
            [*command, *tests],
            cwd=ROOT,
            env=surroundings(variables) | {FILE: str(file)},
            capture_output=True,
            text=True,
        )
        seconds = time.perf_counter() - began
        rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    worst = max(rows, key=lambda row: row["share"], default={"share": 0.0, "test": ""})
    if done.returncode:
        print(done.stdout[-4000:], done.stderr[-2000:], flush=True)
    return {
        "result": done.stdout.strip().splitlines()[-1].partition(" in ")[0] if done.stdout else "no output",
        "failed": str(done.returncode),
        "comparisons": str(len(rows)),
        "largest share": f"{worst['share']:.2f}",
        "in": worst["test"].rpartition("/")[2],
        "seconds": f"{seconds:.0f}",
    }


def main(arguments: Sequence[str]) -> int:
    """Run imitations; exit code 1 if a test failed, or if one that was asked for has no effect."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", choices=[[], *IMITATIONS])
    parser.add_argument("--list", action="store_true", help="print the imitations and their variables")
    parser.add_argument("--tests", nargs="+", default=["tests"], metavar="PATH", help="files to look in")
    given = parser.parse_args(arguments)
    if given.list:
        for name, variables in IMITATIONS.items():
            print(name, *(f"{key}={value}" for key, value in variables.items()))
        return 0
    usual, failed = dispatch({}), []
    print(f"processor: {platform.processor() or platform.machine()}; {usual}", flush=True)
    print("| imitation | tests | comparisons | largest share of a limit | in | seconds |")
    print("|---|---|---:|---:|---|---:|", flush=True)
    for name in given.names or IMITATIONS:
        if reason := why_not(IMITATIONS[name], dispatch(IMITATIONS[name]), usual):
            print(f"| {name} | not run: {reason} | | | | |", flush=True)
            failed += [name] if name in given.names else []
            continue
        row = run(IMITATIONS[name], given.tests)
        failed += [name] if row.pop("failed") != "0" or row["comparisons"] == "0" else []
        print(f"| {name} | {' | '.join(row.values())} |", flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
