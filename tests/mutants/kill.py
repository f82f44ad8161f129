"""Applies every mutant to a copy of the tree, and checks that the tests of its method fail.

    make mutants                                          all of them
    python -m tests.mutants.kill fedgcr faa               those of two methods
    python -m tests.mutants.kill fedgcr:T1_gmm_by_position  one of them

A mutant changes what a method passes on: which model, which split, which sign, which weights. `tests/mutants`
has one file for each method, with its tests and its mutants by name. Each mutant runs in a forked process
that has the heavy libraries loaded already, with `-x`: what counts is that one test fails. The tests must
pass without a mutant, or nothing is shown.
"""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent
HEAVY = (
    "torch",
    "torchvision",
    "timm",
    "sklearn.mixture",
    "pandas",
    "pyarrow.parquet",
)
ARGUMENTS = ("-x", "-q", "-p", "no:cacheprovider", "-m", "not slow or steady")
# Plugins are loaded before the fork, so that pytest cannot rewrite their assertions.
ARGUMENTS += ("-W", "ignore::pytest.PytestAssertRewriteWarning")
FAILED = 1
"""Exit code of pytest where a test failed; others mean that the tests could not be run."""


def mutants(wanted: Sequence[str] = ()) -> Iterator[tuple[str, list[str], dict[str, str]]]:
    """Name, tests and change of each mutant; those of some methods, or `method:name`, if any are wanted."""
    for file in sorted(FOLDER.glob("*.yaml")):
        content: dict[str, Any] = yaml.safe_load(file.read_text())
        for name, change in content["mutants"].items():
            full = f"{file.stem}:{name}"
            if not wanted or file.stem in wanted or full in wanted:
                yield full, content["tests"], change


def changed(text: str, change: dict[str, str]) -> str:
    """The text of a file with the change in it.

    Raises:
        ValueError: The line to change is not there once, or the change is none.
    """
    if text.count(change["old"]) != 1 or change["old"] == change["new"]:
        raise ValueError(f"{change['file']}: {change['old']!r} occurs {text.count(change['old'])} times")
    return text.replace(change["old"], change["new"])


def copy_tree(folder: Path) -> Path:
    """A copy of the files of the tree that tests need."""
    tree = folder / "tree"
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    return tree


def exit_code(tests: Sequence[str], change: dict[str, str] | None) -> tuple[int, str]:
    """Run tests in a changed copy of the tree, in a forked process; its exit code and what it printed."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        tree = copy_tree(Path(folder))
        if change is not None:
            file = tree / change["file"]
            file.write_text(changed(file.read_text(), change))
        output = Path(folder) / "output.txt"
        child = os.fork()
        if child == 0:
            run_here(tree, tests, output)
        _, status = os.waitpid(child, 0)
        return os.waitstatus_to_exitcode(status), output.read_text(errors="replace")


def run_here(tree: Path, tests: Sequence[str], output: Path) -> None:
    """Turn this process into a run of pytest in the copy; it ends with the exit code."""
    code = 3
    try:
        with output.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            os.chdir(tree)
            sys.path[:] = [str(tree), *(path for path in sys.path if Path(path or ".").resolve() != ROOT)]
            for name in [
                n for n in sys.modules if n.split(".")[0] in ("tests", "rayfed", "algorithms", "tune")
            ]:
                del sys.modules[name]
            importlib.invalidate_caches()
            os.environ["PYTHONPATH"] = str(tree)
            import pytest

            code = int(pytest.main([*ARGUMENTS, *tests]))
    except BaseException:  # the parent reads what is printed
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main(wanted: Sequence[str]) -> int:
    """Apply the mutants; exit code 1 if one survives or its tests cannot be run."""
    for name in HEAVY:
        importlib.import_module(name)
    import torch

    torch.set_num_threads(1)
    found = list(mutants(wanted))
    if not found:
        print(f"no mutant is called {', '.join(wanted)}")
        return 1
    bad = []
    files = {tuple(tests) for _, tests, _ in found}
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2)) as pool:
        for tests, (code, text) in zip(files, pool.map(lambda t: exit_code(t, None), files), strict=True):
            print(f"{'fail    ' if code else 'pass    '}  {' '.join(tests)}, unchanged", flush=True)
            if code:
                bad.append(f"{' '.join(tests)} fail without a mutant (exit code {code})\n{text[-2000:]}")
        for (name, _, _), (code, text) in zip(
            found, pool.map(lambda each: exit_code(each[1], each[2]), found), strict=True
        ):
            print(f"{'dies    ' if code == FAILED else 'SURVIVES'}  {name}", flush=True)
            if code != FAILED:
                bad.append(f"{name}: exit code {code}\n{text[-1500:] if code else ''}")
    print(f"{len(found)} mutants, {len(bad)} problems")
    print("\n".join(bad))
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
