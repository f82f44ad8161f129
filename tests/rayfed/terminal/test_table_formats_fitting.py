"""Tables and sentences in narrow terminals, and without a limit where nobody looks at a terminal."""

import io
import re

import pytest

from rayfed import run, view
from rayfed.config.catalog import catalog
from rayfed.report.matrix import matrix_of
from rayfed.terminal.table_formats import fit_width, table_blocks, terminal_width
from tests.conftest import SMALL

ROWS = [
    ["method", "round", "art_painting", "a cell of several words", "worst"],
    ["fedavg", "3", "91.2", "trained with sgd 0.1 momentum 0.9 and 50 rounds of one epoch", "plain 7.0"],
    ["a method with a long name, personal models", "12", "1.0", "-", ""],
]


def words(blocks):
    return sorted(word for block in blocks for row in block for word in row.split())


@pytest.mark.parametrize("width", [40, 60, 80])
def test_a_table_is_as_wide_as_the_terminal_and_keeps_every_cell(width):
    blocks = table_blocks(ROWS, width=width)
    assert max(len(line) for block in blocks for row in block for line in row.split("\n")) <= width
    assert [len(block) for block in blocks] == [len(ROWS)] * len(blocks)
    assert all(block[0].startswith("method") for block in blocks)
    again = sorted(word for row in ROWS for word in " ".join(row[:1] * (len(blocks) - 1)).split())
    assert words(blocks) == sorted([*again, *(word for row in ROWS for cell in row for word in cell.split())])
    heads = [word for block in blocks for word in block[0].split()]
    assert [word for word in heads if word in ROWS[0][1:]] == ["round", "art_painting", "worst"]


def test_without_a_terminal_a_row_is_one_line():
    (block,) = table_blocks([["a", "bb"], ["x", "1"], ["long" * 50, "22"]])
    assert block == ["a" + " " * 201 + "bb", "x" + " " * 202 + "1", "long" * 50 + "  22"]
    (block,) = table_blocks([["a", "b"], ["1", "2"]], left=(1,), width=20)
    assert block == ["a  b", "1  2"]


def test_a_sentence_is_wrapped_between_words_and_a_command_is_not():
    sentence = "  mean over clients 91.2, over domains 88.0; sigma_type 9.9"
    command = "everything on one page: python -m rayfed.report runs/mine --out page.html"
    assert fit_width(f"{sentence}\n{command}", None) == f"{sentence}\n{command}"
    *lines, last = fit_width(f"{sentence}\n{command}", 30).split("\n")
    assert last == command
    assert max(map(len, lines)) <= 30
    assert all(line.startswith("    ") for line in lines[1:])
    assert " ".join(" ".join(lines).split()) == sentence.strip()


def test_only_a_terminal_has_a_width(monkeypatch):
    monkeypatch.setenv("COLUMNS", "61")
    stream = io.StringIO()
    assert terminal_width(stream) is None
    stream.isatty = lambda: True
    assert terminal_width(stream) == 61


def test_a_run_and_its_view_fit_a_narrow_terminal(cache, tmp_path, monkeypatch):
    """Lines with a command or the folder of the run may be longer, so that they can be copied."""
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "45")
    monkeypatch.chdir(tmp_path)
    assert run.main([*SMALL, f"data.cache={cache}", "cluster=inline", "output=a"]) == 0
    assert view.main(["a"]) == 0
    lines = re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue()))
    assert [line for line in lines if len(line) > 45 and "python -m" not in line] == []
    assert sum(line.startswith("round 1/2  accuracy") for line in lines) >= 2
    for head, tables in (("client ", 1), ("domain ", 2)):
        assert sum(line.startswith(head) for line in lines) >= 2 * tables  # in two blocks or more


def test_lists_and_plans_fit_a_narrow_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    for text in (catalog(80), matrix_of(["experiment=fedra/table1/mini"])):
        assert [line for line in text.split("\n") if len(line) > 80 and "python -m" not in line] == []
