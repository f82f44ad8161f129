"""A part of the cases of tests that have many, so that CI takes its turn on all of them: `--part 2/3`."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import TypeVar

import pytest

MANY = 8
"""Steady cases of a test from which on a part of them is run."""

Case = TypeVar("Case")


def part_of(text: str) -> tuple[int, int]:
    """The number of a part, from 1, and the number of parts.

    Raises:
        pytest.UsageError: The text says neither.

    >>> part_of("2/3")
    (2, 3)
    """
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    number, parts = map(int, found.groups()) if found else (0, 0)
    if not 1 <= number <= parts:
        raise pytest.UsageError(f"--part {text!r} is no part such as 2/3")
    return number, parts


def left_out(cases: Sequence[tuple[str, Case]], number: int, parts: int) -> list[Case]:
    """The cases of other parts.

    Args:
        cases: The id of the test, without its parameters, and the case, in the order of the collection.
        number: The part that is run, from 1.
        parts: Number of parts, which together have all cases; tests with few cases are in each of them.
    """
    of_test: dict[str, list[Case]] = defaultdict(list)
    for test, case in cases:
        of_test[test].append(case)
    return [
        case
        for own in of_test.values()
        if len(own) >= MANY
        for place, case in enumerate(own)
        if place % parts != number - 1
    ]
