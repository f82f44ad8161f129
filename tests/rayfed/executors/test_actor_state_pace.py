"""The longest calls are started first: by the estimate, then by what earlier calls of this exchange took."""

import numpy as np
import pytest

from rayfed.executors.actor_state import ENOUGH, Pace
from rayfed.federation.executor import Call, units
from rayfed.types import Broadcast

SENT = Broadcast(round=0, params={})


def call(name, examples, share=1.0, tag="fit", group=1):
    return Call(name, print, tag, SENT, examples, share, group=group)


def names(pace, calls):
    return ["".join(calls[i].client for i in unit) for unit in pace.longest_first(calls, units(calls))]


def test_at_first_the_estimate_decides():
    calls = [call("a", 10), call("b", 40, 0.5), call("c", 30), call("d", 40, 0.1)]
    assert names(Pace(), calls) == ["c", "b", "a", "d"]
    assert Pace().longest_first([], []) == []


def test_measured_seconds_replace_it_for_their_exchange_only():
    pace = Pace()
    rng = np.random.default_rng(0)
    for n in rng.integers(1, 100, ENOUGH):  # a few blocks cost as much as many: the network is small
        one = call("x", int(n), float(rng.uniform(0.1, 1)))
        pace.learn([one], [[0]], {0: 0.2 + 0.01 * one.examples})
    calls = [call("a", 10), call("b", 40, 0.5), call("c", 30), call("d", 41, 0.1)]
    assert names(pace, calls) == ["d", "b", "c", "a"]
    assert (pace.measured("fit"), pace.measured("report")) == (ENOUGH, 0)
    assert names(pace, [call(c.client, c.examples, c.share, "report") for c in calls]) == ["c", "b", "a", "d"]


def test_the_size_of_a_group_counts():
    """A pass costs nearly nothing by client: a group of three small clients is slower than one large one."""
    pace = Pace()
    for n in range(1, 6):
        for k in (1, 2, 4):
            group = [call(f"{i}", 2 * n) for i in range(k)]
            pace.learn(group, [list(range(k))], dict.fromkeys(range(k), (1.0 + 0.5 * k + 0.001 * n) / k))
    calls = [call("a", 100), call("b", 3), call("c", 2), call("d", 1)]
    order = pace.longest_first(calls, [[0], [1, 2, 3]])
    assert order == [[1, 2, 3], [0]]


def test_units_do_not_depend_on_what_was_measured():
    calls = [call(name, n, group=2) for name, n in zip("abcde", (5, 1, 4, 2, 3), strict=True)]
    pace = Pace()
    for _ in range(ENOUGH):
        pace.learn(calls, units(calls), {i: 1.0 / one.examples for i, one in enumerate(calls)})
    learned = pace.longest_first(calls, units(calls))
    assert learned != units(calls)
    assert sorted(learned) == sorted(units(calls)) == [[0, 2], [1], [4, 3]]


@pytest.mark.parametrize("examples", [0, 7])
def test_equal_or_empty_clients_keep_their_order(examples):
    pace = Pace()
    calls = [call(name, examples) for name in "abcdefghij"]
    pace.learn(calls, units(calls), dict.fromkeys(range(10), 0.5))
    assert names(pace, calls) == list("abcdefghij")


def test_a_unit_of_which_a_client_failed_teaches_nothing():
    pace = Pace()
    calls = [call("a", 1, group=2), call("b", 9, group=2), call("c", 5, group=2)]
    for _ in range(ENOUGH):
        pace.learn(calls, [[0, 1]], {0: 100.0})
    assert pace.measured("fit") == 0
    assert names(pace, [call("a", 1), call("b", 9)]) == ["b", "a"]


def test_late_visits_count_more_than_first_ones():
    pace = Pace()
    calls = [call(f"{n}", n) for n in range(1, 11)]
    for seconds in (lambda n: 100.0 - n, *[lambda n: 0.1 * n] * 60):
        pace.longest_first(calls, units(calls))
        pace.learn(calls, units(calls), {i: seconds(one.examples) for i, one in enumerate(calls)})
    assert names(pace, calls)[0] == "10"
