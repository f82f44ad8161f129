"""Answers of a language model in reports."""

import json
from dataclasses import asdict

import pytest

from rayfed.record.readers import DamagedError
from rayfed.report.answer_tables import FILE, WrittenAnswer, on_page, section


def answer(domain, **changes):
    texts = {"prompt": "Is it\nso?", "expected": "yes", "written": "`no`"}
    scores = {"exact_match": 0, "last_number": None, "rouge_l": 0.5}
    return WrittenAnswer(domain=domain, key="a/1", **{**texts, **scores, **changes})


def test_a_page_has_the_scores_and_all_texts_of_a_domain_that_is_chosen(tmp_path):
    assert on_page(tmp_path) == []
    rows = [answer("one"), answer("two", written="x" * 400, chosen="yes", choice=1)]
    (tmp_path / FILE).write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))
    scores, texts = on_page(tmp_path)
    assert [row[0] for row in scores.rows] == ["one", "two", "all"]
    assert texts.columns == ("domain", "text", "prompt", "expected", "written", "chosen")
    assert texts.rows[0] == ("one", "a/1", "Is it so?", "yes", "`no`", "")
    assert texts.rows[1][-2:] == (300 * "x" + "...", "yes")
    assert texts.filters == {"domain": "one"}
    (tmp_path / FILE).write_text("{}\n")
    with pytest.raises(DamagedError, match=FILE):
        on_page(tmp_path)


def test_a_report_shows_a_text_in_one_line_of_code():
    assert "- written: `'no'`\n" in section([answer("one")])
    assert "- written: (nothing)\n" in section([answer("one", written=" ")])
