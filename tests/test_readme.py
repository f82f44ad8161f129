"""The README says what is there."""

import re

import pytest

from rayfed.config.catalog import algorithms, catalog, markdown, tunings
from rayfed.config.schema import load_config
from tests.conftest import ROOT

README = (ROOT / "README.md").read_text()


def section(name):
    return README.split(f"<!-- {name} -->", 1)[1].split(f"<!-- /{name} -->", 1)[0].strip()


@pytest.mark.parametrize(("name", "rows"), [("algorithms", algorithms()), ("tunings", tunings())])
def test_tables_are_the_files_own_first_lines(name, rows):
    assert section(name) == markdown(rows), f"write rayfed.config.catalog.markdown({name}()) into README.md"


def test_every_file_and_target_it_names_exists():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"(?:`|^)make ([a-z-]+)", README, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_the_transcript_is_of_the_default_run():
    shown = section("transcript")
    config = load_config([])
    assert f"{config.algorithm} on {config.data.name}, {config.model.name}, {config.tuning['name']}" in shown
    assert f"/{config.rounds} " in shown


def test_the_catalogue_lists_everything():
    text = catalog()
    assert all(name in text for name, _ in [*algorithms(), *tunings()])
    assert "digits_five_mini" in text
