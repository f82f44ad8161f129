"""The file with what is used of Ray beside its public interface is the only one that uses such things."""

import re

from tests.conftest import ROOT


def test_private_parts_of_ray_are_used_in_one_file():
    used = re.compile(r"\bray\._(private|raylet)\b|\bfrom ray import _")
    found = {
        path.relative_to(ROOT).as_posix()
        for package in ("rayfed", "tune", "algorithms")
        for path in (ROOT / package).rglob("*.py")
        if used.search(path.read_text())
    }
    assert found == {"rayfed/executors/ray_private.py"}
