"""Docstrings and pages are short enough to be read, and as plain as docs/readability.py measures."""

from docs import readability
from tests.conftest import ROOT

LIMITS = {
    "share of long sentences of docstrings": 0.02,
    "share of long sentences of pages": 0.02,
    "share of long sentences of both": 0.05,
    "docstrings that begin as a question": 0,
    "words of README.md": 900,
    "handwritten pages": 14,
    "words of handwritten pages": 21910,
}
"""The most that each count may be; they are lowered whenever a page becomes shorter.

The last one was raised by 400 for studies, until the older ways to many runs, which have own sections, are
studies too, by 220 for rules that draw clients, by 60 for how tensors lie in memory, by 50 for executors, by
180 for texts without pads, by 60 for what a stranger missed about studies and rules, by 80 for rings that no
import crosses, by 490 for nodes that are checked, trackers, configs of PEFT and tuned comparisons,
by 350 for how to read verdicts and intervals, which stand in the tables of the results, too,
by 150 for clients with different blocks and whole networks that share passes, by 90 for how a run ends, its
best round and the model of each round, by 75 for calls that are executed again, and by 55 for the methods
that noise refuses, and for equal work.
"""


def test_what_there_is_to_read_is_short():
    """`python -m docs.readability --long` lists what is too long."""
    assert readability.dialect() == []  # names file and word
    counts = readability.counts()
    assert {name: counts[name] for name, limit in LIMITS.items() if counts[name] > limit} == {}


def test_words_and_sentences_are_counted(tmp_path):
    text = """# A title

A sentence with `two words` of code, and [a link](page.md). Eq. 3 of Li et al. 2020 ends none
of them! Another?

- One bullet
- Two bullets. Three.

```bash
not counted. at all
```

    nor this

| a | one cell of five words. And a sentence |
"""
    found = [s for paragraph in readability.paragraphs(text) for s in readability.sentences(paragraph)]
    assert found == [
        "A title",
        "A sentence with CODE of code, and a link.",
        "Eq. 3 of Li et al. 2020 ends none of them!",
        "Another?",
        "One bullet",
        "Two bullets.",
        "Three.",
        "one cell of five words.",
        "And a sentence",
    ]
    assert readability.words("one - two, 3 |") == 3
    page = tmp_path / "page.md"
    page.write_text(text + "<!-- nor this -->")
    assert readability.length(page) == 45


def test_entries_of_a_docstring_are_counted_one_by_one():
    docstring = (
        "Does it.\n\n>>> f(1)\n2\n\n    a formula\n\nArgs:\n    a: First\n        one.\n    b: Second.\n"
    )
    assert [" ".join(entry.split()) for entry in readability.entries(docstring)] == [
        "Does it.",
        "a: First one.",
        "b: Second.",
    ]


def test_docstrings_of_modules_classes_functions_and_values_are_found(tmp_path, monkeypatch):
    (tmp_path / "rayfed").mkdir()
    (tmp_path / "rayfed" / "x.py").write_text(
        '"""One."""\nA = 1\n"""What A is."""\ndef f():\n    """Two."""\n'
    )
    monkeypatch.setattr(readability, "ROOT", tmp_path)
    assert {text for _, text in readability.docstrings()} == {"One.", "What A is.", "Two."}
    assert readability.riddles() == ["rayfed/x.py: What A is."]


def test_every_page_opens_with_what_its_reader_can_do_afterwards():
    for page in readability.handwritten():
        title, opening = page.read_text().split("\n\n")[:2]
        assert title.startswith("# "), page
        assert opening.startswith("After this page you "), page


def test_pages_that_programs_write_are_no_handwritten_pages():
    names = {page.relative_to(ROOT / "docs").as_posix() for page in readability.handwritten()}
    assert "figures.md" not in names
    assert "data.md" in names
