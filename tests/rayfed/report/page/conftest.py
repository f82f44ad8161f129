"""Pages of runs, made once for each test process."""

import pytest

from rayfed.report.page.several import page_of
from tests.rayfed.report.page import folders

EVENTS = (
    {"kind": "error", "action": "drop", "round": 1, "client": "c00001", "message": "first line\nsecond line"},
    {"kind": "timeout", "action": "retry", "round": 2, "client": "c00002", "message": "</script><b>"},
)


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "run"
    folders.write(path, held_out="fonts", events=EVENTS)
    return path


@pytest.fixture(scope="session")
def run_page(run_folder):
    return page_of([run_folder])


@pytest.fixture(scope="session")
def methods(tmp_path_factory):
    """Folders of two methods with three seeds each, with the clients' scores after the last round."""
    found = {}
    for method in ("fedgcr", "fedavg"):
        for seed in range(3):
            path = tmp_path_factory.mktemp("methods") / f"{method}-{seed}"
            found[path] = folders.write(path, method=method, seed=seed, rounds=2)[-1]
    return found


@pytest.fixture(scope="session")
def methods_page(methods):
    return page_of(list(methods))


@pytest.fixture
def no_pictures(monkeypatch):
    """Leave the pictures out of a page, which take most of its time; `test_charts_svg.py` looks at them."""
    monkeypatch.setattr("rayfed.report.page.charts.svg_of", lambda drawing, summary, more="": "<svg></svg>")


@pytest.fixture
def tables_alone(monkeypatch, no_pictures):
    """Leave the details of each run out of a page about several runs, of which only tables are read."""
    monkeypatch.setattr("rayfed.report.page.several.MOST_CHAPTERS", 0)


def part_of(page, title):
    """The figure or table with this title."""
    return next(p for s in page.sections for p in s.parts if getattr(p, "title", "") == title)


def table_of(page, title):
    """The rows of a figure or table as dicts."""
    part = part_of(page, title)
    return [dict(zip([c.name for c in part.columns], row, strict=True)) for row in part.rows]
