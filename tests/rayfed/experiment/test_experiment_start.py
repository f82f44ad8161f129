"""The libraries that a small run in one process imports: what it does not use would delay its first batch."""

import importlib
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
for tuning in ("full", "lora"):
    given = {"model": net, "data": data, "tuning": tuning, "rounds": 2, "cluster": "inline"}
    assert rayfed.Experiment(**given).run(quiet=True).accuracy >= 0
import rayfed.models.build, rayfed.models.shared_weights, rayfed.tuning.visual_prompt
print(*sorted({name.partition(".")[0] for name in sys.modules} - {name.partition(".")[0] for name in ours}))
print(*({"peft", "timm", "torchvision", "ray", "torch._dynamo"} & {*sys.modules}))
import torch
from rayfed.models.networks import without_compiler

disable = torch.compiler.disable
with without_compiler():
    import timm
print(*({"timm", "torchvision", "torch._dynamo", "torch._dynamo.utils", "sympy"} & {*sys.modules}))
print(torch.compiler.disable is disable)
"""

USED = {
    "yaml",
    "pydantic",
    "pyarrow",
    "safetensors",
    "psutil",
    "threadpoolctl",
    "cloudpickle",
    "rayfed",
    "algorithms",
}
"""What a run uses: its config, tables, tensors and functions, and the memory and threads of the machine."""

THEIRS = {"annotated_types", "pydantic_core", "typing_inspection", "triton"}
"""What pydantic and the formulas of torch for operations import."""


@pytest.mark.slow
@pytest.mark.steady
def test_small_runs_import_what_they_use(cache, monkeypatch):
    """The modules that build, share and prompt a network need none of the heavy libraries either."""
    monkeypatch.setenv("RAYFED_CACHE", str(cache))
    command = [sys.executable, "-c", PROGRAM]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    loaded, heavy, with_timm, restored, *_ = found.stdout.split("\n")
    names = set(loaded.split()) - set(sys.stdlib_module_names)
    assert {name for name in names if not name.startswith("_")} <= USED | THEIRS
    assert heavy == ""
    assert set(with_timm.split()) == {"timm", "torchvision"}
    assert restored == "True"


@pytest.mark.slow
@pytest.mark.steady
def test_what_stands_for_the_compiler_is_the_compiler_once_it_is_used():
    from rayfed.models import networks

    later = networks._LaterCompiler(networks.COMPILER)
    with pytest.raises(AttributeError):
        later.__path__  # noqa: B018
    assert later.is_compile_supported("cpu")
    assert later.counters is importlib.import_module(networks.COMPILER).counters
    for own in (networks._disable_later, networks._disable_later(recursive=False)):
        twice = own(lambda x: 2 * x)
        assert (twice(3), twice(4)) == (6, 8)
