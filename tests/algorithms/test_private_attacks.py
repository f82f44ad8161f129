"""Whose labels a client has cannot be told from the models of a run with noise more often than epsilon says.

Everything between the data and the released model is real: every method that is allowed trains, with noise
at the server and at the client. Where its check is switched off, TERM tells all data apart by the size of the
change of the model, at an epsilon that allows little more than guessing.
"""

import functools
import math
import re
from dataclasses import replace

import pytest
from scipy.stats import binom

from rayfed.errors import ConfigError
from rayfed.executors.inline import InlineExecutor
from rayfed.federation import privacy_accountant
from rayfed.federation.attacks import with_attack
from rayfed.federation.method_registry import METHODS
from rayfed.federation.privacy_accountant import Privacy
from rayfed.testing import DOMAINS, small_setup
from tests.cohorts import make_cohort
from tests.conftest import ROOT, STEADY

NOISE, DELTA, ROUNDS = 40.0, 1e-5, 2
COMMON = (
    *(f"channel=[{{clip: 0.5}},{{noise: {NOISE}}}]", "clients_per_round=all", "server.weighting=uniform"),
    *("train.batch_norm=local", DOMAINS),
)
NEEDED = {"fed_sb": ("tuning.core_start=random",)}
"""What a method needs besides, to be allowed with noise."""
PILOT, TRIALS = 4, 12
"""Runs with each data set that choose the attack, and runs with each that it is tried on."""
SURE = 1e-4
"""Probability with which an attack on a private method may have so many right answers by chance."""
PLACES = ("server", "client")
QUICK = (("fedavg", "server"), ("fedra", "client"))


def setup_of(name, place, cache, *more):
    own = (f"algorithm={name}", *COMMON, f"privacy.noise_at={place}", *NEEDED.get(name, ()), *more)
    return small_setup(*own, f"data.cache={cache}")


class Relabelled(InlineExecutor):
    """Runs calls in this process; `differs` says whether the first client has other labels in all of them."""

    differs = False

    def map(self, calls):
        first = min(call.client for call in calls)
        return super().map([self._of(call) if call.client == first else call for call in calls])

    def _of(self, call):
        return replace(call, task=with_attack(call.task, "labels", 1.0)[0]) if self.differs else call


def sizes(setup, executor, differs, seed):
    """Sums of the squared changes of the released model in each round of a run."""
    executor.differs = differs
    executor.forget()
    executor.worker.context = replace(setup.context, seed=seed)
    plan = setup.experiment
    plan = replace(plan, seed=seed, channel=replace(plan.channel, seed=seed))
    state = plan.server.start(setup.start)
    found = []
    for round in range(ROUNDS):
        cohort = make_cohort(plan, executor, round)
        after = plan.server.round(replace(state, round=round), cohort, plan.local)
        moves = [(after.params[name] - state.params[name]).double() for name in setup.start]
        found.append(sum(float(move.square().sum()) for move in moves))
        state = after
    return found


def right_answers(setup):
    """How often the best test of the pilot runs tells in which of 2 * TRIALS other runs labels differ."""
    executor = Relabelled(setup.context, setup.weights)
    runs = {
        differs: [sizes(setup, executor, differs, seed + 1000 * differs) for seed in range(PILOT + TRIALS)]
        for differs in (False, True)
    }
    tests = []
    for round in range(ROUNDS):
        plain, other = (sorted(run[round] for run in runs[differs][:PILOT]) for differs in (False, True))
        sign = 1 if sum(other) >= sum(plain) else -1
        cut = (sum(plain) + sum(other)) / (2 * PILOT)
        known = sum(sign * v <= sign * cut for v in plain) + sum(sign * v > sign * cut for v in other)
        tests.append((known, -round, sign, cut))
    _, at, sign, cut = max(tests)
    told = {differs: [sign * run[-at] > sign * cut for run in runs[differs][PILOT:]] for differs in runs}
    return sum(told[True]) + TRIALS - sum(told[False])


def most_right(place):
    """The most right answers of 2 * TRIALS that the epsilon of these runs allows, but for SURE.

    Other data of a client are one client less and another one more: with noise at the server the distance
    is 2 x clip, too.
    """
    epsilon = Privacy(NOISE / 2, 1.0, DELTA).epsilon(ROUNDS)
    each = (math.exp(epsilon) + DELTA) / (1 + math.exp(epsilon))
    return int(binom.ppf(1 - SURE, 2 * TRIALS, each))


def parameters():
    every = [(name, place) for name in METHODS.names() for place in PLACES]
    return [pair if pair in QUICK else pytest.param(*pair, marks=STEADY) for pair in every]


@pytest.mark.parametrize(("name", "place"), parameters())
def test_no_attack_on_an_allowed_method_tells_more_than_epsilon(name, place, cache):
    if name in refused_in_docs(place):
        with pytest.raises(ConfigError) as caught:
            setup_of(name, place, cache)
        assert "\n" not in str(caught.value)
        return
    assert right_answers(setup_of(name, place, cache)) <= most_right(place) < 2 * TRIALS


@pytest.mark.parametrize(
    ("name", "place", "setting"), [("term", "client", "server.t=20"), ("qffl", "server", "server.q=20")]
)
def test_the_attack_succeeds_where_a_check_is_switched_off(name, place, setting, cache, monkeypatch):
    """Otherwise the test above could not fail."""
    with pytest.raises(ConfigError, match="noise"):
        setup_of(name, place, cache, setting)
    check = {"client": "_check_answers", "server": "_check_server"}[place]
    monkeypatch.setattr(privacy_accountant, check, lambda server: None)
    assert right_answers(setup_of(name, place, cache, setting)) > most_right(place)


@functools.cache
def refused_in_docs(place):
    """Names of the methods that docs/realism.md says to be refused with noise at a place."""
    page = (ROOT / "docs" / "realism.md").read_text()
    found = re.search(r"^- at both places, methods(.+?);\n- at the server also(.+?);", page, re.M | re.S)
    everywhere, of_server = (set(re.findall(r"`(\w+)`", part)) for part in found.groups())
    return everywhere | (of_server if place == "server" else set())
