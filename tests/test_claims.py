"""benchmarks/results/claims: every table is what its scores by seed give, for five seeds or three."""

import csv
import json
import re

import pytest

from docs import claim_tables
from rayfed.config.compose import folder
from rayfed.config.papers import tables
from tests.conftest import ROOT

PAGES = sorted(claim_tables.FOLDER.glob("*.md"))
CLAIMS = [name.removeprefix("claims/") for name in tables(folder()) if name.startswith("claims/")]
TABLES = sorted(file.stem for file in claim_tables.FOLDER.glob("*.csv"))
COMPARISONS = ("worth_tuning", "worth_tuning_pacs", "lora_methods", "text_lora", "text_personal")
"""Comparisons of many rows, with three seeds."""
SCORES = """setting,row,seed,measure,value
a,one,0,m,4
a,one,1,m,8
a,two,0,m,1
a,two,1,m,4
b,one,0,m,5
b,one,1,m,8
b,two,0,m,1
b,two,1,m,1
"""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_tables_are_those_of_the_scores(page):
    """Run `python -m docs.claim_tables` where this fails."""
    assert claim_tables.page(page.read_text()) == page.read_text()


def test_every_experiment_of_a_claim_is_in_a_page_with_its_command():
    text = "".join(page.read_text() for page in PAGES)
    assert {name for _, name, *_ in claim_tables.TABLE.findall(text)} == {*CLAIMS}
    for name in CLAIMS:
        assert f"python -m rayfed.reproduce claims/{name} " in text


@pytest.mark.parametrize("name", TABLES)
def test_scores_are_those_of_every_cell_and_seed(name):
    scores = claim_tables.read(name)
    table = tables(folder())[f"claims/{name}"]
    assert {row for row, _ in scores} == {*table.rows}
    for by_setting in scores.values():
        assert {*by_setting} <= {*table.settings}
        assert all(sorted(seeds) == list(table.seeds) for seeds in by_setting.values())
    assert len(table.seeds) >= (3 if name in COMPARISONS else 5)


def test_results_say_what_became_of_each_claim():
    text = (ROOT / "docs" / "results.md").read_text()
    assert [page.stem for page in PAGES if f"results/claims/{page.stem}.md)" not in text] == []


def test_differences_quotients_and_their_tests(tmp_path, monkeypatch):
    """Worked out by hand: differences 3 and 4, t = 7 with one degree of freedom, for a family of one test."""
    monkeypatch.setattr(claim_tables, "FOLDER", tmp_path)
    (tmp_path / "x.csv").write_text(SCORES)
    text = "<!-- table x, m: one; one - two -->\nold\n<!-- /table -->\n"
    alone = "\n".join(line for line in SCORES.splitlines() if not line.startswith("b,")) + "\n"
    (tmp_path / "y.csv").write_text(alone)
    assert claim_tables.page(text.replace("table x", "table y")).splitlines()[1:-1] == [
        "| | one | one - two |",
        "|---|---:|---:|",
        "| a | 6.00 ± 2.83 | +3.50 (open, -2.85 to +9.85, 2 of 2) |",
        "",
        "- 2 seeds resolve differences of 6.35 or more here",
    ]
    text = "<!-- table x, m: one; one - two; one / two; one - 6 | b - a -->\nold\n<!-- /table -->\n"
    head, _, *rows = (line for line in claim_tables.page(text).splitlines()[1:-1] if line.startswith("|"))
    assert head == "| | one | one - two | one / two | one - 6 |"
    cell = r" ([+\d.-]+) \(open, [+\d.-]+ to [+\d.-]+, (\d) of 2\) \|"
    found = [re.findall(cell, row) for row in rows]
    assert found == [
        [("+3.50", "2"), ("2.83", "2"), ("+0.00", "1")],
        [("+5.50", "2"), ("6.32", "2"), ("+0.50", "1")],
        [("+0.50", "1"), ("+2.00", "2"), ("2.24", "2"), ("+0.50", "1")],
    ]


def test_of_a_measure_of_which_less_is_better_a_lower_row_is_better(tmp_path, monkeypatch):
    monkeypatch.setattr(claim_tables, "FOLDER", tmp_path)
    lines = [
        f"a,{row},{seed},loss,{value + seed}" for row, value in (("one", 1), ("two", 9)) for seed in range(12)
    ]
    lines = [line.replace(",one,0,loss,1", ",one,0,loss,1.5") for line in lines]
    (tmp_path / "x.csv").write_text("setting,row,seed,measure,value\n" + "\n".join(lines))
    text = claim_tables.page("<!-- table x, loss: one - two -->\n<!-- /table -->\n")
    assert re.search(r"-7\.96 \(better, -8\.0\d to -7\.8\d, 0 of 12\)", text)


def test_a_row_that_was_not_run_in_a_setting_is_a_dash(tmp_path, monkeypatch):
    monkeypatch.setattr(claim_tables, "FOLDER", tmp_path)
    (tmp_path / "x.csv").write_text(SCORES.replace("b,one,0,m,5\nb,one,1,m,8\n", ""))
    text = claim_tables.page("<!-- table x, m: one; two; one - two -->\n<!-- /table -->\n")
    assert "| b | - | 1.00 ± 0.00 | - |" in text


def test_a_sentence_says_what_the_adapters_add(tmp_path, monkeypatch):
    monkeypatch.setattr(claim_tables, "FOLDER", tmp_path)
    bare = SCORES.splitlines()[1:]
    bare = [f"{line.rsplit(',', 2)[0]},without adapters,{float(line.rsplit(',')[-1]) - 9}" for line in bare]
    (tmp_path / "x.csv").write_text(SCORES + "".join(f"{line}\n" for line in bare))
    text = claim_tables.page("<!-- table x, m: one; two; one - two -->\n<!-- /table -->\n")
    words = "one; two: the adapters add 9.0 ± 0.0 points (mean and deviation over the rows), less than the "
    assert f"\n- a: {words}" in text
    assert ": this setting does not test the adapters; the rows differ by up to 3.5 points" in text
    other = claim_tables.page("<!-- table x, without adapters: one; two -->\n<!-- /table -->\n")
    assert "differ" not in other


def test_scores_come_from_a_finished_job(tmp_path, monkeypatch):
    monkeypatch.setattr(claim_tables, "FOLDER", tmp_path)
    cell = {"setting": "a", "scores": {"m": 1 / 3}}
    cells = [{**cell, "row": row, "seed": seed} for row in ("two", "one") for seed in (1, 0)]
    cells += [{**cells[0], "setting": "b"}, {"row": "one", "seed": 1, "setting": "b", "scores": {}}]
    job = {"experiment": "claims/x", "settings": ["a", "b"], "rows": ["one", "two"], "cells": cells}
    (tmp_path / "reproduction.json").write_text(json.dumps(job))
    with claim_tables.collect(tmp_path).open() as stream:
        found = [tuple(line.values()) for line in csv.DictReader(stream)]
    assert found == [("a", row, seed, "m", "0.333333") for row in ("one", "two") for seed in ("0", "1")]
    job["settings"] = ["b"]  # another command of the same table leaves the first one's scores
    job["cells"] = [cell | {"setting": "b"} for cell in cells[:4]]
    (tmp_path / "reproduction.json").write_text(json.dumps(job))
    with claim_tables.collect(tmp_path).open() as stream:
        assert [line["setting"] for line in csv.DictReader(stream)] == ["a"] * 4 + ["b"] * 4
    job["cells"] = [{**cell, "setting": "b", "row": "three"}]  # and other rows of the same setting
    job["cells"][0]["seed"] = 0
    job["rows"] = ["three"]
    (tmp_path / "reproduction.json").write_text(json.dumps(job))
    with claim_tables.collect(tmp_path).open() as stream:
        rows = [line["row"] for line in csv.DictReader(stream) if line["setting"] == "b"]
    assert rows == ["one", "one", "two", "two", "three"]
