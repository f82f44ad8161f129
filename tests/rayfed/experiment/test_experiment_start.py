"""The libraries that a small run in one process imports: what it does not use would delay its first batch."""

import subprocess
import sys

import pytest

from tests.conftest import ROOT

PROGRAM = """
import sys
import numpy as np
from torch import nn
import rayfed

ours = set(sys.modules)
rng = np.random.default_rng(0)
data = {f"c{i}": (rng.normal(size=(20, 16)).astype("float32"), rng.integers(0, 3, 20)) for i in range(3)}
net = lambda: nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))
run = rayfed.Experiment(model=net, data=data, tuning=sys.argv[1], rounds=2, cluster="inline").run(quiet=True)
assert run.accuracy >= 0
print(*sorted({name.partition(".")[0] for name in sys.modules} - {name.partition(".")[0] for name in ours}))
print("torch._dynamo" in sys.modules)
"""

USED = {"yaml", "pydantic", "pyarrow", "safetensors", "psutil", "cloudpickle", "rayfed", "algorithms"}
"""What a run uses: its config, its tables, its tensors, its functions, and the memory of the machine."""

THEIRS = {"annotated_types", "pydantic_core", "typing_inspection", "triton"}
"""What pydantic and the formulas of torch for operations import."""


@pytest.mark.parametrize("tuning", ["full", "lora"])
def test_a_small_run_imports_what_it_uses(tuning, tmp_path, monkeypatch):
    monkeypatch.setenv("RAYFED_CACHE", str(tmp_path))
    command = [sys.executable, "-c", PROGRAM, tuning]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    loaded, compiler = found.stdout.strip().splitlines()
    names = set(loaded.split()) - set(sys.stdlib_module_names)
    assert {name for name in names if not name.startswith("_")} <= USED | THEIRS
    assert compiler == "False"
