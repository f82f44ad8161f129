"""A person opens reports: headless Chromium, from file://, without a network, on a screen and on a phone.

Reports of a FedGCR, a FedRA, an FFT-GP leave-one-out run, a sweep and a reproduced table are opened, and
those of 100 and of 10,000 clients, whose size and time to open are bounded. With RAYFED_SHOTS=FOLDER,
pictures of the reports are written there; those of docs/watching.md come from here.
"""

import os
from pathlib import Path

import pytest

from rayfed import run
from rayfed.report.__main__ import main
from tests.rayfed.report.page import folders
from tests.rayfed.report.page.chromium import binary, browsing

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        binary() is None, reason="there is no Chromium on this machine (apt-get install chromium)"
    ),
]
SHORT = ("cluster=inline", "data.limit=100", "figures=false", "tensorboard=false", "--quiet")
FOLDS = ("protocol=leave_one_out", "data.val=10", "data.domains=[plain,street,fonts]", "rounds=3")
SCREENS = ((1280, 900), (390, 844))


@pytest.fixture(scope="module")
def runs(tmp_path_factory, cache):
    """Folders with results of every kind, by name."""
    home = tmp_path_factory.mktemp("reports")

    def made(name, *overrides):
        assert run.main([*SHORT, *overrides, f"data.cache={cache}", f"output={home / name}"]) == 0
        return home / name

    split = ("data.partition.split_test=true", "data.test=0.3")
    found = {
        "fedgcr": made("fedgcr", "algorithm=fedgcr", "rounds=6", *split),
        "fedra": made("fedra", "algorithm=fedra", "rounds=6", "capacity=[4,3,2,2,1]"),
        "fft_gp": made("fft_gp", "algorithm=fft_gp_clip", "compare=[fedavg]", *FOLDS),
    }
    found["sweep"] = swept(home / "sweep", cache)
    cells = [("FedGCR", "mini", 0, found["fedgcr"]), ("FedRA", "mini", 0, found["fedra"])]
    found["reproduced"] = folders.write_job(home / "reproduced", cells)
    return found


def swept(path, cache):
    from tune.run import main as sweep

    short = ("trials=3", "seeds=2", "rounds=2", "data.limit=60", "tensorboard=false", "--quiet")
    assert sweep(["sweep=fedgcr", *short, f"data.cache={cache}", f"output={path}"]) == 0
    return path


@pytest.fixture(scope="module")
def tab():
    with browsing() as opened:
        yield opened


@pytest.fixture
def opened(runs, tab, tmp_path):
    """Opens the report of a folder; afterwards nothing may have been asked for or complained of."""

    def open_it(name, size):
        page = tmp_path / f"{name}.html"
        if not page.exists():
            assert main([str(runs[name]), "--out", str(page)]) == 0
        tab.open(page, *size)
        tab.run("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
        return page

    tab.complaints.clear()
    yield open_it
    assert tab.complaints == []
    assert tab.requests == []


HIDDEN = """[...document.querySelectorAll('figure')].map((figure) => {
  const picture = figure.querySelector('.picture svg, .picture img');
  const box = picture.getBoundingClientRect();
  const inside = box.left >= 0 && box.right <= innerWidth + 1;
  const some = (what) => [...picture.querySelectorAll(what)].some((each) => each.getBBox().width > 0);
  const drawn = picture.tagName === 'IMG' ? picture.naturalWidth > 0 : some('.line') || some('image');
  const seen = box.width > 250 && box.height > 60 && inside && drawn;
  return seen ? '' : figure.querySelector('h3, h5').textContent;
}).filter((title) => title)"""
"""Titles of figures that are empty, too small, or not on the screen."""
CROSSING = """[...document.querySelectorAll('.picture svg')].filter((svg) => {
  const whole = svg.getBoundingClientRect();
  const boxes = [...svg.querySelectorAll('text')].map((text) => text.getBoundingClientRect());
  const across = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left);
  const down = (a, b) => Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
  const left = boxes.some((b) => across(b, whole) < b.width - 1 || down(b, whole) < b.height - 1);
  const meet = (a, i) => boxes.slice(i + 1).some((b) => across(a, b) > 2 && down(a, b) > 3);
  return left || boxes.some(meet);
}).map((svg) => svg.getAttribute('aria-label').slice(0, 80))"""
"""Figures with words that leave the picture or cover each other."""
CLOSE = "document.querySelectorAll('details').forEach((each) => { each.open = false; })"


@pytest.mark.parametrize("size", SCREENS, ids=["screen", "phone"])
@pytest.mark.parametrize("name", ["fedgcr", "fedra", "fft_gp", "sweep", "reproduced"])
def test_every_figure_is_seen(name, size, opened, tab):
    opened(name, size)
    assert tab.run("document.querySelectorAll('figure').length") > 8
    assert tab.run(HIDDEN) == []
    assert tab.run(CROSSING) == []
    assert tab.run("document.documentElement.scrollWidth") <= size[0]
    if shots := os.environ.get("RAYFED_SHOTS"):
        tab.run(CLOSE)
        tab.size(size[0], 1700)
        tab.shot(Path(shots) / f"{name}-{size[0]}.png")


ROWS = "[...document.querySelectorAll('#chosen tbody tr')].filter((row) => !row.hidden)"
CHOOSE = """(() => {{ const control = document.querySelector('#chosen {}');
  control.value = '{}'; control.dispatchEvent(new Event('input')); }})()"""


def visible(tab):
    return tab.run(f"{ROWS}.map((row) => row.innerText)")


def with_seeds(tab):
    """Give the table of all runs the id `chosen`; returns the place of its column `score`."""
    find = "[...document.querySelectorAll('.grid')].find((g) => g.querySelector('select[data-column=seed]'))"
    tab.run(f"{find}.id = 'chosen'")
    names = tab.run("[...document.querySelectorAll('#chosen th')].map((head) => head.dataset.name)")
    return names.index("score")


@pytest.mark.parametrize("name", ["fft_gp", "sweep", "reproduced"])
def test_tables_are_sorted_and_filtered(name, opened, tab):
    opened(name, SCREENS[0])
    column = with_seeds(tab)
    before = visible(tab)
    assert len(before) >= 2
    assert all("mean over domains" in row for row in before)
    head = "document.querySelector('#chosen th[data-name=score]')"
    for descending in (False, True):
        tab.run(f"{head}.querySelector('button').click()")
        shown = tab.run(f"{ROWS}.map((row) => Number(row.cells[{column}].dataset.value))")
        assert shown == sorted(shown, reverse=descending)
        assert tab.run(f"{head}.getAttribute('aria-sort')") == ("descending" if descending else "ascending")
    tab.run(CHOOSE.format("select[data-column=domain]", "plain"))
    assert visible(tab)
    assert all("plain" in row and "mean over domains" not in row for row in visible(tab))
    tab.run(CHOOSE.format("select[data-column=domain]", ""))
    everything = len(visible(tab))
    assert everything > len(before)
    tab.run(CHOOSE.format("input", "street"))
    assert 0 < len(visible(tab)) < everything
    assert f"of {everything} rows" in tab.run("document.querySelector('#chosen output').textContent")


def test_lines_tell_their_numbers_and_can_be_switched_off(opened, tab):
    opened("fedgcr", SCREENS[0])
    at = tab.run(
        """(() => { scrollTo({top: 0, behavior: 'instant'});
        const figure = document.querySelector('section:nth-of-type(2) figure'); figure.id = 'line';
        figure.scrollIntoView({behavior: 'instant', block: 'center'});
        const box = figure.querySelector('.picture svg').getBoundingClientRect();
        return [box.left + box.width * 0.6, box.top + box.height * 0.4]; })()"""
    )
    tab.move(*at)
    shown = tab.run("document.getElementById('tip').innerText").splitlines()
    assert shown[0].startswith("round ")
    assert len(shown) == 6
    tab.run("document.querySelector('#line .legend button').click()")
    tab.move(at[0] + 1, at[1])
    assert len(tab.run("document.getElementById('tip').innerText").splitlines()) == 5
    assert tab.run("getComputedStyle(document.querySelector('#line g[data-series=\"0\"]')).display") == "none"


def test_colours_follow_the_button_and_paper_is_white(opened, tab):
    opened("fedgcr", SCREENS[0])
    paper = "getComputedStyle(document.body).backgroundColor"
    found = [tab.run(paper)]
    for _ in range(2):
        tab.run("document.getElementById('theme').click()")
        found.append(tab.run(paper))
    assert found[1:] == ["rgb(255, 255, 255)", "rgb(20, 23, 26)"]
    tab.call("Emulation.setEmulatedMedia", media="print")
    assert tab.run(paper) == "rgb(255, 255, 255)"
    assert tab.run("getComputedStyle(document.querySelector('nav')).display") == "none"
    tab.call("Emulation.setEmulatedMedia", media="")


@pytest.mark.timeout(3000)  # writing the folder of 10,000 clients takes minutes
@pytest.mark.parametrize(("clients", "every", "most"), [(100, 1, 5e6), (10_000, 20, 8e6)])
def test_large_runs_have_small_pages_that_open_at_once(clients, every, most, tab, tmp_path):
    folders.write(tmp_path / "run", clients=clients, rounds=200, every=every, each=20)
    page = tmp_path / "page.html"
    assert main([str(tmp_path / "run"), "--out", str(page)]) == 0
    size = page.stat().st_size
    seconds = min(tab.open(page) for _ in range(3))
    assert size < most
    print(f"{clients} clients: {size / 1e6:.2f} MB, opened in {seconds:.2f} s")
