"""The kernels of CUDA: compared with the plain forms in Triton's interpreter, and compiled without a GPU."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")

COMPARE = """
from benchmarks.gpu_check import forms
from rayfed.devices import HOST
rows = list(forms(HOST))
assert len(rows) >= 8, rows
assert not [row for row in rows if "bad" in row], rows
"""

COMPILE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from rayfed.fast import triton_kernels

POINTERS = {
    "_dropout": {"x": "*bf16", "y": "*bf16", "seeds": "*i64", "counts": "*i64"},
    "_add_norm": {"normed": "*bf16", "branch": "*bf16"},
    "_add_norm_backward": {"grad": "*bf16", "of_branch": "*bf16"},
}
NUMBERS = {"threshold": "i64", "scale": "fp32", "eps": "fp32"}
WHOLE = ("total", "quads", "width", "positions", "rows", "layer", "call")
FIXED = {"COUNTED": True, "ADD": True, "PASSES": True, "BLOCK": 1024}
for name, pointers in POINTERS.items():
    kernel = getattr(triton_kernels, name)
    kinds = dict(pointers)
    for argument in kernel.arg_names:
        if argument in FIXED:
            kinds[argument] = "constexpr"
        elif argument not in kinds:
            whole = argument in WHOLE and not (argument == "total" and name != "_dropout")
            kinds[argument] = NUMBERS.get(argument, "i32" if whole else "*fp32")
    places = {(i,): FIXED[a] for i, a in enumerate(kernel.arg_names) if a in FIXED}
    signature = {argument: kinds[argument] for argument in kernel.arg_names}
    made = compile(ASTSource(kernel, signature, places), target=GPUTarget("cuda", 90, 32))
    assert made.asm["cubin"], name
"""


def run(code, folder, **variables):
    variables = {**os.environ, "TRITON_CACHE_DIR": str(folder), "PYTHONWARNINGS": "ignore", **variables}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=variables, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.steady
def test_the_interpreter_gives_the_bits_of_the_plain_form(tmp_path):
    run(COMPARE, tmp_path, TRITON_INTERPRET="1")


@pytest.mark.slow
@pytest.mark.steady
def test_every_kernel_compiles_for_a_gpu(tmp_path):
    run(COMPILE, tmp_path)
