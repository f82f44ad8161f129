"""Every vector has a source and its digits, and tests use every number of it."""

import ast
from collections import defaultdict
from functools import cache

import pytest

from tests.conftest import ROOT
from tests.vectors import FOLDER, entries

SPECIFICATIONS = sorted(path.stem for path in FOLDER.glob("*.json"))
EVERY = [(name, number) for name in SPECIFICATIONS for number in entries(name)]


@cache
def words_of_tests() -> dict[tuple[str, str], set[str]]:
    """Strings in the test files that load a vector, by specification and number."""
    found: dict[tuple[str, str], set[str]] = defaultdict(set)
    for path in (ROOT / "tests").rglob("test_*.py"):
        text = path.read_text()
        tree = ast.parse(text if "vector(" in text else "")
        loaded = {
            tuple(a.value for a in node.args if isinstance(a, ast.Constant))
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "vector"
        }
        words = {
            node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        for each in loaded:
            found[each] |= words
    return found


def test_there_are_three_specifications():
    assert SPECIFICATIONS == ["fedclip_fftgp", "fedgcr", "fedra"]


@pytest.mark.parametrize(("name", "number"), EVERY, ids="-".join)
def test_a_vector_is_used_with_all_it_expects(name, number):
    entry = entries(name)[number]
    assert entry.keys() == {"name", "source", "digits", "inputs", "expected"}
    assert number in entry["source"]["specification"]
    assert entry["source"]["paper"]
    assert entry["digits"] in (6, None)
    unused = (entry["inputs"].keys() | entry["expected"].keys()) - words_of_tests().get((name, number), set())
    assert not unused


def test_no_test_asks_for_a_vector_that_is_not_there():
    assert set(words_of_tests()) <= {*EVERY}
