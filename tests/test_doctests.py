"""Every example in a docstring of rayfed, algorithms and tune gives what it shows."""

import doctest
import importlib

import pytest

from tests.conftest import ROOT

MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for package in ("rayfed", "algorithms", "tune")
    for path in (ROOT / package).rglob("*.py")
    if ">>> " in path.read_text()
)
"""Only these are imported: a module without examples cannot fail here."""


@pytest.mark.parametrize("name", MODULES)
def test_examples_give_what_they_show(name):
    found = doctest.testmod(importlib.import_module(name), report=True)
    assert found.attempted > 0
    assert found.failed == 0


def test_there_are_examples():
    assert {"rayfed.errors", "rayfed.types", "tune.space"} <= set(MODULES)
