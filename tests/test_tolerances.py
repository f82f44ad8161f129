"""No test compares floating-point results within a limit that nobody derived; see tests/rounding.py.

`approx` without a limit is allowed: it takes a millionth of the expected number, which is eight roundings of
each of two ways in float32, and more than a thousand million in float64. It is for single numbers that were
worked out by hand or with a few operations, not for tensors.
"""

import ast
from pathlib import Path

import pytest

from tests.conftest import ROOT

WORDS = {"abs", "rel", "atol", "rtol", "tol", "within", "tolerance"}
AGREE = {"allclose", "assert_close", "assert_allclose", "isclose"}
"""Functions with their own limits that follow from nothing."""


def _is_small(node: ast.AST, constants: dict[str, float]) -> bool:
    """Whether a number in an expression, or a constant of the file, is above 0 and below 0.002."""
    for each in ast.walk(node):
        value = constants.get(each.id) if isinstance(each, ast.Name) else getattr(each, "value", None)
        if isinstance(value, float) and 0 < value < 0.002:
            return True
    return False


def _constants(tree: ast.Module) -> dict[str, float]:
    found = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            found |= {name.id: node.value.value for name in node.targets if isinstance(name, ast.Name)}
    return found


def _chosen(call: ast.Call, constants: dict[str, float]) -> bool:
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    given = [word.value for word in call.keywords if word.arg in WORDS]
    return name in AGREE or any(_is_small(value, constants) for value in given)


def _compared(node: ast.Compare, constants: dict[str, float]) -> bool:
    computed = any(isinstance(part, ast.Call) for part in ast.walk(node.left))
    below = isinstance(node.ops[-1], ast.Lt | ast.LtE)
    return below and computed and _is_small(node.comparators[-1], constants)


def _preset(node: ast.FunctionDef, constants: dict[str, float]) -> bool:
    named, defaults = node.args.args, node.args.defaults
    pairs = zip(named[len(named) - len(defaults) :], defaults, strict=True)
    return any(name.arg in WORDS and _is_small(value, constants) for name, value in pairs)


KINDS = {ast.Call: _chosen, ast.Compare: _compared, ast.FunctionDef: _preset}


def bare(text: str) -> list[int]:
    """Lines with a tolerance that is a number, or that a library chooses."""
    tree = ast.parse(text)
    constants = _constants(tree)
    nodes = [*ast.walk(tree)]
    differ = {id(node.operand) for node in nodes if isinstance(node, ast.UnaryOp)}  # `not allclose`
    found = [n for n in nodes if id(n) not in differ and type(n) in KINDS and KINDS[type(n)](n, constants)]
    return sorted({node.lineno for node in found})


@pytest.mark.parametrize(
    "line",
    [
        "assert (a - b).abs().max() < 1e-6",
        "assert x.norm() <= 5e-6 * y.norm()",
        "assert x == approx(y, abs=1e-4)",
        "NEAR = 2e-6\nassert x == approx(y, rel=NEAR)",
        "torch.testing.assert_close(a, b)",
        "assert torch.allclose(a, b, atol=1e-5)",
        "def agree(a, b, within=1e-5): pass",
    ],
)
def test_a_bare_tolerance_is_found(line):
    assert bare(line) == [line.count("\n") + 1]


@pytest.mark.parametrize(
    "line",
    [
        "near(a, b, 30)",
        "assert x == approx(y, abs=printed(4))",
        "assert not torch.allclose(a, b, atol=1e-3)",
        "assert rate == 1e-5",
        "assert 0 < count < 5",
    ],
)
def test_what_is_none_is_not(line):
    assert bare(line) == []


@pytest.mark.parametrize("file", sorted((ROOT / "tests").rglob("*.py")), ids=lambda file: file.stem)
def test_every_tolerance_is_derived(file: Path):
    lines = file.read_text().splitlines()
    found = [f"{file.name}:{n}: {lines[n - 1].strip()}" for n in bare(file.read_text())]
    assert not found, "\n".join(found)
