"""benchmarks/results: every file says by which command, commit and processor it was measured, and when."""

import re

import pytest

from docs.generate.hook import EVIDENCE
from tests.conftest import ROOT

FILES = sorted((ROOT / EVIDENCE).rglob("*.md"))
FACTS = {
    "Command": r"in each (row|part)|.*`.+`",
    "Commit": r".*\b[0-9a-f]{7}\b",
    "Processor": r".+",
    "Date": r".*\b\d{4}-\d\d-\d\d\b",
}


LINK = "](../benchmarks/results/"


def missing(text):
    lines = text.splitlines()[1:8]
    return [
        key for key, form in FACTS.items() if not any(re.match(f"- {key}: {form}", line) for line in lines)
    ]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_file_names_its_command_commit_processor_and_date(file):
    text = file.read_text()
    assert text.startswith("# ")
    assert missing(text) == []


def test_a_fact_that_is_missing_is_found():
    text = "# T\n\n- Command: `x`\n- Commit: 0123abc\n- Processor: y\n- Date: 2026-11-22\n"
    assert missing(text) == []
    assert missing(text.replace("0123abc", "the last one")) == ["Commit"]
    assert missing(text.replace("- Date: 2026", "- Date: in")) == ["Date"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_files_that_are_linked_exist(file):
    for target in re.findall(r"\]\(([^)#:]+)", file.read_text()):
        assert (file.parent / target).exists(), target


def test_every_row_of_the_page_of_results_links_its_evidence():
    """Nothing is claimed that has no file."""
    text = (ROOT / "docs" / "results.md").read_text()
    families, _, claims = text.partition("## What was reproduced")
    text = claims + families.partition("| family |")[2].partition("\n\n")[0].replace("| not compared |", LINK)
    rows = [row for row in text.splitlines() if row.startswith("| ") and not row.endswith("| evidence |")]
    rows = [row for row in rows if not row.endswith("| measured in |")]
    assert len(rows) > 35
    assert [row for row in rows if LINK not in row] == []


def test_every_measurement_is_cited_by_a_page():
    """What nothing cites, nobody finds."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *FILES]
    text = "".join(page.read_text() for page in pages)
    assert [file.name for file in FILES if f"{file.name})" not in text and f"{file.name}#" not in text] == []
