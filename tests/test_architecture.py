"""docs/architecture.md describes the packages as they are."""

import importlib.util
import re

from tests.conftest import ROOT

spec = importlib.util.spec_from_file_location("layers", ROOT / "docs" / "layers.py")
layers = importlib.util.module_from_spec(spec)
spec.loader.exec_module(layers)


def test_the_table_and_the_picture_are_those_of_the_tree():
    """Run `python docs/layers.py` where this fails."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    assert text == layers.page(text)
    assert layers.PICTURE.read_text() == layers.picture()


def test_every_module_and_package_has_a_row():
    folder = ROOT / "rayfed"
    modules = {path.stem for path in folder.glob("*.py") if path.stem != "__init__"}
    packages = {path.parent.name for path in folder.glob("*/__init__.py")}
    rows = re.findall(r"^\| `(\w+)` \|", layers.table(), flags=re.MULTILINE)
    assert sorted(rows) == sorted(modules | packages)


def test_the_steps_of_a_run_are_functions_of_the_files_named():
    text = (ROOT / "docs" / "architecture.md").read_text()
    steps = re.findall(r"^(\w+) +(rayfed/[\w/]+\.py) ", text, flags=re.MULTILINE)
    assert "run_rounds" in dict(steps)
    assert [step for step in steps if f"def {step[0]}(" not in (ROOT / step[1]).read_text()] == []


def test_every_path_that_the_page_names_exists():
    text = (ROOT / "docs" / "architecture.md").read_text()
    paths = re.findall(r"`((?:rayfed|tests|docs|algorithms|tune|configs)/[\w/.]*)`", text)
    assert paths
    assert [path for path in paths if not (ROOT / path).exists()] == []
