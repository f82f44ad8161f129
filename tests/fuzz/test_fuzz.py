"""Whatever a user hands over: success, or exit code 2 or 1 with one line, within ten seconds.

Always the same cases, because hypothesis derives them from the test's source; what fails is shown as the
smallest example that still fails.
"""

from __future__ import annotations

import logging
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings

from tests.conftest import STEADY
from tests.fuzz import ground as grounds
from tests.fuzz.cases import KINDS, kinds
from tests.fuzz.outcomes import COUNTS, attempt, judge, table

QUICK, STEADY_TOO, LONG = 2, 3, 4


@pytest.fixture(scope="module")
def ground(tmp_path_factory):
    return grounds.prepare(tmp_path_factory.mktemp("ground"))


def examine(ground, kind, record_property, which, monkeypatch):
    """Draw the cases of a kind and try each; the counts go into the report."""
    for name in ("RAY_ADDRESS", "RAYFED_CACHE"):
        monkeypatch.delenv(name, raising=False)
    strategy, check, *_ = found = kinds(ground)[kind]
    COUNTS.clear()

    @settings(
        max_examples=found[which],
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def every_case(case):
        check(ground, case)

    every_case()
    record_property("fuzz", [(*key, number) for key, number in COUNTS.items()])
    assert sum(COUNTS.values()) >= found[which] * 0.9


@pytest.mark.parametrize("which", [QUICK, pytest.param(STEADY_TOO, marks=STEADY)])
@pytest.mark.parametrize("kind", KINDS)
def test_some_cases(kind, which, ground, record_property, monkeypatch):
    examine(ground, kind, record_property, which, monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", KINDS)
def test_many_cases(kind, ground, record_property, monkeypatch):
    examine(ground, kind, record_property, LONG, monkeypatch)


def test_there_are_as_many_cases_as_said(ground):
    counts = [found[2:] for found in kinds(ground).values()]
    assert [sum(column) for column in zip(*counts, strict=True)] == [48, 97, 5000]


@pytest.mark.parametrize(
    ("code", "out", "err", "seconds"),
    [
        (2, "", "", 0.1),
        (2, "", "error: a\nerror: b\n", 0.1),
        (2, "", "error: a\nthat goes on\n", 0.1),
        (3, "", "error: a\n", 0.1),
        (0, "", "error: a\n", 0.1),
        (0, "Traceback (most recent call last)", "", 0.1),
        (0, "", "", 11.0),
    ],
)
def test_the_judge_sees_what_is_wrong(code, out, err, seconds):
    assert judge(code, out, err, seconds, [], False) not in table(Counter())


def test_the_judge_sees_tracebacks_in_the_log():
    record = logging.LogRecord("x", 30, "", 0, "m", (), (ValueError, ValueError(), None))
    assert judge(0, "", "", 0.1, [record]) == "a traceback was shown"


def test_an_exception_is_a_traceback():
    def broken(arguments):
        raise ValueError("lost")

    with pytest.raises(AssertionError, match="lost"):
        attempt("x", broken, [])
