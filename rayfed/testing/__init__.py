"""Contract tests for methods, tuning schemes and readers of your own.

In a test file of your own:

    from rayfed.testing import check_method

    def test_my_method():
        check_method("mypackage.fedprox:METHOD")

The three `check_` functions raise AssertionError, or the error of the code under test, and need no test
framework. `play` runs one experiment on any device of torch and returns its result.
"""

from rayfed.testing.contracts import (
    METHOD_CHECKS,
    READER_CHECKS,
    TUNING_CHECKS,
    check_method,
    check_reader,
    check_tuning,
    play,
)

__all__ = [
    "METHOD_CHECKS",
    "READER_CHECKS",
    "TUNING_CHECKS",
    "check_method",
    "check_reader",
    "check_tuning",
    "play",
]
