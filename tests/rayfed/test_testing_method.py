"""Every contract test of methods fails for a method that breaks what it is about."""

from dataclasses import dataclass

import pytest
import torch

from rayfed import Local, Method, Server
from rayfed import testing as checks
from rayfed.errors import ConfigError, RayFedError, ServerError
from rayfed.testing import METHOD_CHECKS, check_method

COUNT = []


@dataclass(frozen=True)
class WritesIntoMessages(Local):
    def train(self, client, sent):
        next(iter(sent.params.values())).add_(1)
        return super().train(client, sent)


@dataclass(frozen=True)
class WritesIntoShared(Server):
    def start(self, params):
        return super().start(params).share(count=torch.zeros(1))


@dataclass(frozen=True)
class Counts(Local):
    def train(self, client, sent):
        sent.shared["count"].add_(1)
        return super().train(client, sent)


@dataclass(frozen=True)
class ChangesFrozenWeights(Local):
    def train(self, client, sent):
        with torch.no_grad():
            next(p for p in client.model.parameters() if not p.requires_grad).add_(1)
        return super().train(client, sent)


@dataclass(frozen=True)
class DividesByZero(Server):
    def aggregate(self, state, cohort, updates):
        state = super().aggregate(state, cohort, updates)
        if state.round == cohort.rounds - 1:
            state.params["head.bias"] = state.params["head.bias"] / 0
        return state


@dataclass(frozen=True)
class NeedsTwoExamples(Local):
    def loss(self, client, sent, batch):
        if len(batch[1]) < 2:
            raise ValueError("one example only")
        return super().loss(client, sent, batch)


@dataclass(frozen=True)
class KeepsStateInAGlobal(Server):
    def aggregate(self, state, cohort, updates):
        COUNT.append(0)
        state = super().aggregate(state, cohort, updates)
        return self.average(state, updates, [1.0 + len(COUNT) * i for i in range(len(updates))])


@dataclass(frozen=True)
class NeedsEverybody(Server):
    def aggregate(self, state, cohort, updates):
        if len(updates) < len(cohort.ids):
            raise ValueError("somebody is missing")
        return super().aggregate(state, cohort, updates)


@dataclass(frozen=True)
class NeedsWhatNobodyOffers(Local):
    needs = frozenset({"moon"})


WRITES = Method(local=WritesIntoMessages)
COUNTS = Method(server=WritesIntoShared, local=Counts)
FROZEN = Method(local=ChangesFrozenWeights)
INFINITE = Method(server=DividesByZero)
PAIRS = Method(local=NeedsTwoExamples)
GLOBAL = Method(server=KeepsStateInAGlobal)
ALL = Method(server=NeedsEverybody)
LACKS = Method(local=NeedsWhatNobodyOffers)


@pytest.mark.parametrize(
    ("name", "check", "error", "message"),
    [
        ("WRITES", checks.leaves_messages_and_frozen_weights_alone, AssertionError, "messages are read-only"),
        ("COUNTS", checks.leaves_messages_and_frozen_weights_alone, AssertionError, "messages are read-only"),
        ("FROZEN", checks.leaves_messages_and_frozen_weights_alone, RayFedError, "frozen weight"),
        (
            "INFINITE",
            checks.leaves_messages_and_frozen_weights_alone,
            AssertionError,
            "head.bias is NaN",
        ),
        ("PAIRS", checks.survives_a_client_with_one_example, RayFedError, "one example only"),
        ("GLOBAL", checks.repeats_itself_after_an_interruption, AssertionError, "state.memory"),
        ("ALL", checks.repeats_itself_after_an_interruption, ServerError, "somebody is missing"),
        ("LACKS", checks.says_what_it_is, ConfigError, "needs moon"),
    ],
)
def test_a_broken_method_is_found(name, check, error, message, cache):
    with pytest.raises(error, match=message):
        check(f"{__name__}:{name}", [f"data.cache={cache}"])


def test_a_method_without_a_docstring_is_found(tmp_path, monkeypatch):
    (tmp_path / "silent_method.py").write_text("from rayfed import Method\n\nMETHOD = Method()\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(AssertionError, match="begin the file with a docstring"):
        checks.says_what_it_is("silent_method:METHOD")


def test_check_method_runs_every_check_and_passes_the_overrides_on(monkeypatch):
    seen = []
    fakes = tuple(lambda name, overrides, i=i: seen.append((i, name, overrides)) for i in range(2))
    monkeypatch.setattr(checks, "METHOD_CHECKS", fakes)
    monkeypatch.setattr(checks, "same_tensors_on_actors", lambda *args: seen.append(("actors", *args)))
    check_method("m:M", ["a=1"])
    assert seen == [(0, "m:M", ["a=1"]), (1, "m:M", ["a=1"])]
    check_method("m:M", ["a=1"], actors=True)
    assert seen[-1] == ("actors", "m:M", ["a=1"])
    assert len(METHOD_CHECKS) == 4


@dataclass(frozen=True)
class KnowsItsProcess(Local):
    """Answers with something that depends on where it runs."""

    def train(self, client, sent):
        import os

        update = super().train(client, sent)
        update.params["head.bias"] = update.params["head.bias"] + float(os.getpid() % 97)
        return update


PROCESS = Method(local=KnowsItsProcess)


@pytest.mark.slow
@pytest.mark.ray
def test_two_actors_of_our_own(cache):
    """On a cluster that the check starts and ends, as in a test file of somebody else's."""
    options = [f"data.cache={cache}"]
    checks.same_tensors_on_actors("scaffold", options)
    with pytest.raises(AssertionError, match="actors give other tensors"):
        checks.same_tensors_on_actors(f"{__name__}:PROCESS", options)
