"""The HTML of a page: well-formed, complete for a screen reader, and without any request."""

import json
import re
from html.parser import HTMLParser
from itertools import pairwise

import pytest

from rayfed.report.page import render
from rayfed.report.page.parts import Figure, Page, Section, Sentences
from rayfed.terminal.table_formats import Column, Table, sort_key

EMPTY = {"area", "br", "col", "hr", "img", "input", "link", "meta", "source", "wbr"}


class Document(HTMLParser):
    """Elements of a document in order, each with its attributes, its ancestors and its text."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.elements = []
        self.faults = []
        self._open = []
        self.feed(text)
        self.faults += [f"{tag} is not closed" for tag, _ in self._open]

    def handle_starttag(self, tag, attributes):
        element = {"tag": tag, **dict(attributes), "text": "", "in": [each["tag"] for _, each in self._open]}
        self.elements.append(element)
        if tag not in EMPTY:
            self._open.append((tag, element))

    def handle_startendtag(self, tag, attributes):
        self.elements.append({"tag": tag, **dict(attributes), "text": "", "in": []})

    def handle_endtag(self, tag):
        if not self._open or self._open[-1][0] != tag:
            self.faults.append(f"</{tag}> closes {self._open[-1:]}")
        else:
            self._open.pop()

    def handle_data(self, data):
        for _, element in self._open:
            element["text"] += data

    def all(self, *tags):
        return [element for element in self.elements if element["tag"] in tags]


pytestmark = pytest.mark.xdist_group("page")  # with test_several.py, so that `methods_page` is made once


@pytest.fixture(scope="session", params=["run_page", "methods_page"])
def made(request):
    page = request.getfixturevalue(request.param)
    return page, Document(render.html(page))


def test_it_is_well_formed_and_every_id_is_there_once(made):
    _, document = made
    assert not document.faults
    ids = [element["id"] for element in document.elements if "id" in element]
    assert len(ids) == len(set(ids))
    targets = [a["href"].removeprefix("#") for a in document.all("a")]
    assert len(targets) > 8
    assert set(targets) <= set(ids)


def test_nothing_is_loaded(made):
    _, document = made
    policy = next(m["content"] for m in document.all("meta") if "http-equiv" in m)
    assert policy.startswith("default-src 'none'; img-src data: blob:;")
    for element in document.elements:
        for key in ("src", "href", "xlink:href", "srcset", "action", "poster"):
            assert re.match(r"#|data:", element.get(key, "#")), element
    assert "@import" not in render.html(made[0])
    assert not re.search(r"url\((?!data:)", "".join(style["text"] for style in document.all("style")))


def test_headings_leave_out_no_level(made):
    levels = [int(h["tag"][1]) for h in made[1].all("h1", "h2", "h3", "h4", "h5")]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))


def test_every_figure_has_words_and_its_numbers(made):
    _, document = made
    pictures = [svg for svg in document.all("svg") if "aria-hidden" not in svg]
    figures = document.all("figure")
    assert len(pictures) == len(figures) > 5
    assert all(svg["role"] == "img" and len(svg["aria-label"]) > 30 for svg in pictures)
    assert all("Numbers of this figure" in figure["text"] for figure in figures)
    tables = document.all("table")
    captions = [c for c in document.all("caption") if c["text"].strip()]
    assert len(tables) == len(captions)
    assert all(th["scope"] in ("row", "col") for th in document.all("th"))


def test_every_control_has_a_name(made):
    _, document = made
    assert all(b["text"].strip() or b.get("aria-label") for b in document.all("button"))
    assert all("label" in control["in"] for control in document.all("select", "input"))


def test_the_page_holds_the_numbers_of_its_json(made):
    page, document = made
    twin = json.loads(render.json_text(page))
    held = next(s["text"] for s in document.all("script") if s.get("id") == "twin")
    assert json.loads(held) == twin
    assert twin["runs"][0]["config"]["seed"] == 0
    parts = {
        part["id"] for each in (twin, *twin["chapters"]) for s in each["sections"] for part in s["parts"]
    }
    ids = {element.get("id") for element in document.elements}
    assert parts <= ids
    hover = json.loads(next(s["text"] for s in document.all("script") if s.get("id") == "hover"))
    assert set(hover) == {figure["id"] for figure in document.all("figure")} <= parts


def test_what_users_wrote_stays_text():
    nasty = "</script><script>alert(1)</script>&\"'"
    grid = Table(title=nasty, columns=[Column(nasty)], rows=[[nasty], ["b"]], filters={nasty: ""})
    page = Page(title=nasty, subtitle=nasty, sections=[Section(nasty, [grid, Sentences(code=[nasty])])])
    text = render.html(page)
    document = Document(text)
    assert not document.faults
    assert len(document.all("script")) == 3
    assert nasty in [code["text"] for code in document.all("code")]
    held = json.loads(next(s["text"] for s in document.all("script") if s.get("id") == "twin"))
    assert held["sections"][0]["parts"][0]["rows"] == [[nasty], ["b"]]


def test_the_table_behind_a_large_figure_is_thinned_and_says_so():
    columns = [Column("round", "count"), *(Column(str(i)) for i in range(100))]
    rows = [[r, *range(100)] for r in range(1000)]
    figure = Figure(title="t", svg="<svg/>", summary="s", columns=columns, rows=rows)
    table = render.behind(figure)
    assert (len(table.columns), len(table.rows)) == (1 + render.MOST_COLUMNS, render.MOST_ROWS)
    assert (table.rows[0][0], table.rows[-1][0], table.heads[-1].name) == (0, 999, "99")
    page = Page(title="t", subtitle="", sections=[Section("s", [figure])])
    assert "the JSON has all 1000 rows" in render.html(page)
    assert len(render.twin(page)["sections"][0]["parts"][0]["rows"]) == 1000


def test_cells_without_a_number_are_sorted_last():
    assert [sort_key(v) for v in (None, float("nan"), 0.5, 12, "a")] == ["", "", "0.5", "12", "a"]


def test_numbers_that_are_not_finite_are_null_in_the_json():
    grid = Table(title="t", columns=[Column("x", "number")], rows=[[float("nan")], [float("inf")], [1 / 3]])
    held = json.loads(render.json_text(Page(title="", subtitle="", sections=[Section("s", [grid])])))
    assert held["sections"][0]["parts"][0]["rows"] == [[None], [None], [0.333333]]
