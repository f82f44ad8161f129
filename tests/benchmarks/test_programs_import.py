"""Every program in benchmarks/ has what it imports: they are run by hand, long after a name has moved."""

import os
import subprocess
import sys

from tests.conftest import ROOT

IMPORT_ALL = """
import importlib, sys
for name in sys.argv[1:]:
    try:
        importlib.import_module(f"benchmarks.{name}")
    except ImportError as err:
        print(f"{name}: {err}")
"""


def test_every_program_imports():
    names = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py") if path.stem != "__init__")
    assert "same_results" in names
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, *names],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert (done.stdout, done.returncode) == ("", 0), done.stderr[-500:]
