"""The gallery page shows every figure that a run can have."""

import re

from rayfed.report.figures import FIGURES, OF_FOLDS
from tests.conftest import ROOT


def test_the_page_has_one_picture_of_every_figure():
    page = (ROOT / "docs" / "figures.md").read_text()
    pictures = dict(re.findall(r"!\[(.+)\]\((.+)\)", page))
    assert {*FIGURES, *OF_FOLDS} < set(pictures)
    assert all((ROOT / "docs" / path).read_bytes().startswith(b"\x89PNG") for path in pictures.values())
    shown = {path.rsplit("/", 1)[1] for path in pictures.values()}
    assert shown == {path.name for path in (ROOT / "docs" / "images" / "figures").iterdir()}
