"""No line of a training step waits for a GPU, except those that are named here with their reason.

The processor of a GPU's machine queues operations and goes on. It waits where it needs a value: `.item()`,
`float(tensor)`, `.tolist()`, `unique`, a boolean mask, a choice by the values of a tensor. One wait in each
batch leaves the GPU idle while the next operations are queued.

The functions `loss`, `step` and `forward` of methods, tunings and models are read, and what they call in the
same folders, however deep. What is a tensor cannot be seen in the text: a line that reads something else is
in `ALLOWED` too.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.conftest import ROOT

FOLDERS = ("algorithms", "rayfed/tuning", "rayfed/models", "rayfed/fast")
ROOTS = ("loss", "step", "forward", "loss_and_representation")
"""The last one goes over the batches of a client before it trains (FedGC, FedGCR, FedGR)."""

READS = {"item", "tolist", "numpy", "cpu", "nonzero", "argwhere", "masked_select", "equal", "allclose"}
READS |= {"unique", "unique_consecutive", "any", "all"}
"""Methods of a tensor, and functions of torch, that need its values; `any` and `all` where one decides."""

DECIDE = {"any", "all", "equal", "allclose"}
MASKS = {"bool", "isin", "isnan", "isfinite", "isinf", "logical_and", "logical_or", "logical_not", "eq", "ne"}
MASKS |= {"lt", "le", "gt", "ge"}

PYTHONS = ("len", "math.", "round", "sum(1", "range", "numel", ".shape", ".ndim", ".size(")
"""What a number is made from where it is none of a tensor."""

A, M = "algorithms", "rayfed/models"
ALLOWED = {
    f"{A}/_arrays.py:to_tensors:return tuple(torch.from_numpy(to_numpy(v)) for v in values), lambda result: "
    f"result.numpy()[()]": "for NumPy arrays only; tensors stay where they are",
    f"{A}/feddyn.py:alpha_of:alpha = float(sent.shared[FEDDYN_ALPHA])": "a number of Python in the message",
    f"{A}/feddyn.py:alpha_of:return alpha if mean is None else alpha * float(mean) / client.data.size("
    f'"train")': "a number of Python in the message",
    f"{A}/fedgc.py:group_customization_loss:own = cluster if isinstance(cluster, Tensor) else torch.full((), "
    f"int(cluster), device=rows.device)": "the number of the client's group, an int of the message",
    f"{A}/_grouping.py:client_representation:means = [rows[labels == label].mean(0) for label in "
    f"labels.unique()]": "one more wait than there are classes, once in a visit",
    f"{A}/hetlora.py:last_components:kept = max(1, int(self.gamma * rank))": "the rank is a number of Python",
    "rayfed/tuning/lora.py:_finds_sites:return bool(in_every_block(chosen_layers(model, self.sites, "
    "LAST)))": "a pattern of names of layers, made once for each model",
    "rayfed/fast/group.py:backward:keep = bool(self._waiting)": "a set of numbers of clients",
    "rayfed/fast/packed_texts.py:forward:if x.is_meta or not len(x) or not bool((x[:, 0] != PAD).all()):": (
        "on a CPU only; on a device texts are padded"
    ),
    "rayfed/fast/packed_texts.py:tokens_of:return np.diff(self._sums[np.cumsum([0, *sizes])]).tolist()": (
        "an array of NumPy"
    ),
    f"{M}/language.py:joined:if bool((there[:, 1:] & ~there[:, :-1]).any()):": (
        "in an exported network only, which its user calls"
    ),
    f"{M}/clip.py:token_width:return int(self._parts.token_embedding.embedding_dim)": "a shape",
    f"{M}/clip.py:_join:self._stops = (self.name_tokens.argmax(-1) - 1).tolist()": (
        "once for each model, in its first pass"
    ),
}
"""Reasons by `file:function:line without its indent`."""


@dataclass(frozen=True)
class Function:
    """A function, its file, whether it is a method, and where the names of its file come from."""

    file: str
    node: ast.FunctionDef
    is_method: bool
    imported: dict[str, str]


def functions() -> dict[str, list[Function]]:
    """Every function of the folders by its name."""
    found = defaultdict(list)
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            tree = ast.parse(path.read_text())
            file = path.relative_to(ROOT).as_posix()
            nodes = list(ast.walk(tree))
            imported = {
                alias.asname or alias.name: f"{node.module.replace('.', '/')}.py"
                for node in nodes
                if isinstance(node, ast.ImportFrom) and node.module
                for alias in node.names
            }
            methods = {id(part) for node in nodes if isinstance(node, ast.ClassDef) for part in node.body}
            for node in nodes:
                if isinstance(node, ast.FunctionDef):
                    found[node.name].append(Function(file, node, id(node) in methods, imported))
    return found


def called(function: Function, known: dict[str, list[Function]]) -> Iterator[Function]:
    """What a function calls, or names as a value.

    Functions of its file and imported ones; of itself, methods of its file and of files it imports from; of
    other objects, methods of models and tunings.
    """
    near = {function.file, *function.imported.values()}
    for node in ast.walk(function.node):
        if isinstance(node, ast.Name):
            file = function.imported.get(node.id, function.file)
            yield from (f for f in known.get(node.id, ()) if f.file == file and not f.is_method)
        elif isinstance(node, ast.Attribute):
            own = ast.unparse(node.value) in ("self", "super()")
            methods = (f for f in known.get(node.attr, ()) if f.is_method)
            yield from (f for f in methods if (f.file in near if own else f.file.startswith("rayfed/")))


def reached(known: dict[str, list[Function]]) -> list[Function]:
    """The functions of a step: the roots, and what they call."""
    found: dict[int, Function] = {}
    todo = [function for name in ROOTS for function in known[name]]
    while todo:
        function = todo.pop()
        if id(function.node) not in found:
            found[id(function.node)] = function
            todo += called(function, known)
    return list(found.values())


def waits(node: ast.FunctionDef) -> Iterator[ast.AST]:
    """The expressions of a function that may wait for the values of a tensor."""
    masks = {
        target.id
        for found in ast.walk(node)
        if isinstance(found, ast.Assign) and is_mask(found.value, set())
        for target in found.targets
        if isinstance(target, ast.Name)
    }
    decided = {
        id(part)
        for found in ast.walk(node)
        if isinstance(found, ast.If | ast.IfExp | ast.While | ast.Assert)
        for part in ast.walk(found.test)
    }
    for found in ast.walk(node):
        if isinstance(found, ast.Call):
            name = found.func.attr if isinstance(found.func, ast.Attribute) else None
            alone = name == "where" and len(found.args) == 1
            if alone or (name in READS and (name not in DECIDE or id(found) in decided)):
                yield found
            converts = isinstance(found.func, ast.Name) and found.func.id in ("float", "int", "bool")
            if converts and found.args and not is_python(found.args[0]):
                yield found
        elif isinstance(found, ast.Subscript) and is_mask(found.slice, masks):
            yield found


def is_mask(node: ast.AST, names: set[str]) -> bool:
    """Whether an index or a value is, as far as can be seen, a tensor of truth values."""
    if isinstance(node, ast.Tuple):
        return any(is_mask(part, names) for part in node.elts)
    if isinstance(node, ast.Name):
        return node.id in names
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.Invert)
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.BitAnd | ast.BitOr) and is_mask(node.left, names)
    if isinstance(node, ast.Compare):
        return not any(isinstance(op, ast.In | ast.NotIn | ast.Is | ast.IsNot) for op in node.ops)
    is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    return is_call and node.func.attr in MASKS


def is_python(node: ast.AST) -> bool:
    """Whether a number comes from Python: a constant, a length, a shape."""
    text = ast.unparse(node)
    return isinstance(node, ast.Constant) or any(word in text for word in PYTHONS)


def all_waits() -> set[str]:
    """What waits in a step, as `ALLOWED` names it."""
    found = set()
    for function in reached(functions()):
        lines = (ROOT / function.file).read_text().splitlines()
        for node in waits(function.node):
            found.add(f"{function.file}:{function.node.name}:{lines[node.lineno - 1].strip()}")
    return found


def test_no_line_of_a_step_waits_for_a_gpu():
    assert sorted(all_waits() - ALLOWED.keys()) == []


def test_every_allowed_line_is_there_and_has_a_reason():
    assert sorted(ALLOWED.keys() - all_waits()) == []
    assert all(re.search(r"\w+ \w+", reason) for reason in ALLOWED.values())


@pytest.mark.parametrize(
    "line",
    [
        "loss.item()",
        "float(loss)",
        "bool(loss < 1)",
        "int(labels.max())",
        "labels.tolist()",
        "labels.unique()",
        "torch.unique(labels)",
        "x[labels == 1]",
        "x[:, ~known]",
        "mask = labels.eq(1)\n    x[mask]",
        "torch.where(x)",
        "x.nonzero()",
        "x.cpu()",
        "if (x > 0).any():\n        pass",
    ],
)
def test_each_way_to_wait_is_found(line):
    (node,) = ast.parse(f"def loss(x, labels, known):\n    {line}").body
    assert list(waits(node))


@pytest.mark.parametrize(
    "line", ["float(len(x))", "int(x.shape[0])", "x[1:]", "x[index]", "(x > 0).any(-1)", "x == 1"]
)
def test_what_waits_for_nothing_is_let_through(line):
    (node,) = ast.parse(f"def loss(x, index):\n    {line}").body
    assert not list(waits(node))
