"""docs/gpu.md: the table that it links is what the pretended accelerator counts, and its paths exist."""

import re

import pytest

from benchmarks import device_counts
from rayfed.federation.method_registry import METHODS
from tests.conftest import QUICK, ROOT

TEXT = device_counts.PAGE.read_text()


def test_the_table_has_every_method():
    assert re.findall(r"^\| `(\w+)` \| \d+ \|", TEXT, flags=re.MULTILINE) == list(METHODS.names())


@pytest.mark.slow
@pytest.mark.steady
@pytest.mark.parametrize("name", QUICK)
def test_the_row_of_a_method_is_what_is_counted(name, cache, monkeypatch):
    """Run `python -m benchmarks.device_counts` where this fails."""
    monkeypatch.setenv("RAYFED_CACHE", str(cache))
    assert device_counts.row(name) in TEXT.splitlines()


@pytest.mark.slow
def test_the_table_is_what_is_counted():
    """All rows; several minutes, so not in CI."""
    assert device_counts.page(TEXT) == TEXT


def test_every_path_that_the_page_names_exists():
    text = (ROOT / "docs" / "gpu.md").read_text()
    paths = re.findall(r"`((?:rayfed|tests|docs|algorithms|tune|configs)/[\w/.]*)`", text)
    assert paths
    assert [path for path in paths if not (ROOT / path).exists()] == []
