"""Keys that may change when a run is continued."""

import re

from rayfed.config.schema import BINDING, HARMLESS, changes
from tests.conftest import ROOT


def test_the_page_names_the_keys_that_may_change():
    page = (ROOT / "docs" / "recovery.md").read_text()
    (item,) = re.findall(r"^- Keys that would change the result.*?(?=^- )", page, re.DOTALL | re.MULTILINE)
    assert sorted(re.findall("`(.+?)`", item)) == sorted([*HARMLESS, *BINDING, "rounds"])


def test_only_keys_that_would_change_the_result_are_named():
    old = {"cluster": {"actors": 2, "threads": 1}, "trackers": [], "data": {"root": "a", "val": 0.1}}
    new = {"cluster": {"actors": 4, "threads": 2}, "trackers": ["mlflow"], "data": {"root": "b", "val": 0.2}}
    found = [key for key, _, _ in changes(old, new)]
    assert found == ["cluster.threads", "data.val"]
