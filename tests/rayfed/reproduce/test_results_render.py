"""The table in its forms: which numbers are marked, what is escaped, what a page loads."""

import csv
import io
import re
from dataclasses import replace

import pytest

from rayfed.reproduce import results
from rayfed.reproduce.results import compare
from tests.rayfed.reproduce.tables import ablation, finished_as


@pytest.fixture(scope="module")
def found():
    asked = ablation(seeds=2)
    ours = {"none": [60.0, 62.0], "FedGR": [64.0, 64.0], "FedGC": [63.0, 63.0]}
    return compare(asked, finished_as(asked, ours))


def test_best_and_second_best_are_marked_by_the_direction_of_the_measure(found):
    avg, sigma, _ = found.measures
    assert results.ranks(found, "dif10", avg) == {"FedGR": 1, "FedGC": 2}
    assert results.ranks(found, "dif10", sigma) == {"none": 1, "FedGC": 2}
    tie = replace(found, values=tuple(replace(v, mean=50.0) for v in found.values))
    assert results.ranks(tie, "dif10", avg) == {}  # nothing is better than anything


def test_markdown_has_ours_the_papers_the_difference_and_the_verdicts(found):
    text = results.markdown(found)
    line = next(line for line in text.splitlines() if line.startswith("| FedGR |"))
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[:5] == ["FedGR", "2", "**64.00 ± 0.00**", "63.01", "+0.99"]
    assert cells[5] == "64.00 ± 0.00"
    assert "<u>63.00 ± 0.00</u>" in text
    assert "| FedGCR | 0 | - | 82.74 |  |" in text
    assert re.search(
        r"\| FedGC before FedGR \| \+16\.48 \| -1\.00 \| .* \| 2 \| [\d.]+ \| open \| \d* \|", text
    )
    counts = r"\d+ better, \d+ worse, \d+ as good, \d+ open"
    assert re.search(rf"^The row that is better in the paper is here: {counts}\.$", text, re.MULTILINE)
    assert "- round of a run: the last evaluated round; the paper: the last round" in text
    assert "- 6 of 8 cells are finished" in text


def test_csv_has_a_line_for_each_number_and_each_ordering(found):
    lines = list(csv.DictReader(io.StringIO(results.csv_values(found))))
    assert len(lines) == 4 * 3
    (line,) = [x for x in lines if (x["row"], x["measure"]) == ("none", "Avg")]
    assert (line["mean"], line["paper"], line["seeds"]) == ("61.0", "60.62", "2")
    assert line["selection"] == "the last evaluated round"
    claims = list(csv.DictReader(io.StringIO(results.csv_claims(found))))
    assert len(claims) == len(found.claims) == 15
    assert {x["verdict"] for x in claims} <= {"better", "worse", "as good", "open"}


def test_latex_marks_and_escapes(found):
    text = results.latex(found)
    assert r"FedGR & \textbf{64.00 $\pm$ 0.00} & 63.01 &" in text
    assert r"\underline{63.00 $\pm$ 0.00}" in text
    assert r"sigma\_type & paper" in text
    table, orderings = text.split(r"\end{tabular}")[:2]
    assert table.count("\\\\") == 1 + 4  # the head and four rows
    assert orderings.count("\\\\") == 1 + len(found.claims)
    assert f"% orderings in the paper's numbers; {results.verdicts(found)}" in orderings
    assert orderings.count("& open &") >= sum(claim.verdict == "open" for claim in found.claims) > 0
    assert text.count(r"\begin{tabular}") == text.count(r"\end{tabular}") == 2


def test_the_page_is_whole_escaped_and_loads_nothing(found):
    bad = replace(
        found,
        notes=("a <script> & more",),
        rows=("x<y",),
        values=tuple(replace(v, row="x<y") for v in found.values),
    )
    page = results.page(bad)
    assert "<script" not in page
    assert "a &lt;script&gt; &amp; more" in page
    assert '<th scope="row">x&lt;y</th>' in page
    assert not re.search(r"(src|href|url)\s*[=(]", page)
    whole = results.page(found)
    assert whole.count("<tr>") == 2 + 4 + len(found.claims)
    assert "<b>64.00 ± 0.00</b>" in whole
    assert "<u>63.00 ± 0.00</u>" in whole


def test_a_terminal_sees_the_same_numbers(found):
    text = results.text(found)
    assert "64.00 ± 0.00" in text
    assert "FedGC before FedGR" in text
