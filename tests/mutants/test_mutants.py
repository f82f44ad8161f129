"""Every mutant can be applied, every method has some, and all of them are noticed (slow)."""

import re

import pytest
import yaml

from rayfed.federation.method_registry import METHODS
from tests.conftest import ROOT
from tests.mutants.kill import FOLDER, changed, main, mutants

EVERY = {name: change for name, _, change in mutants()}


@pytest.mark.parametrize("name", EVERY)
def test_a_mutant_changes_one_place(name):
    change = EVERY[name]
    text = (ROOT / change["file"]).read_text()
    assert changed(text, change) != text
    with pytest.raises(ValueError, match="occurs 0 times"):
        changed("", change)


def test_every_method_has_two_mutants_and_tests_that_exist():
    """Beside those that survived once, whose names begin with the finding, T1 to T6."""
    files = {file.stem: yaml.safe_load(file.read_text()) for file in FOLDER.glob("*.yaml")}
    assert {*METHODS.names()} <= {*files}
    for name, content in files.items():
        assert sum(not re.match(r"T\d_", mutant) for mutant in content["mutants"]) >= 2, name
        assert all((ROOT / test.partition("::")[0]).is_file() for test in content["tests"]), name


@pytest.mark.slow
def test_all_mutants_die():
    assert main(()) == 0
