"""The main hyperparameter that each method names, and the values of it that are tried."""

import pytest

from rayfed.config.schema import load_config
from rayfed.errors import ConfigError
from rayfed.federation.knob import Knob
from rayfed.federation.local import Local
from rayfed.federation.method_registry import METHODS, Method


class Pull(Local):
    mu: float = 0.1


@pytest.mark.parametrize("name", METHODS.names())
def test_every_method_names_a_hyperparameter_with_its_range_or_says_why_not(name):
    knob = METHODS.load(name).knob
    if isinstance(knob, str):
        assert len(knob.split()) >= 3
        return
    assert isinstance(knob, Knob)
    half, _, key = knob.key.partition(".")
    own = getattr(load_config([f"algorithm={name}"]), half)[key]
    assert own is None or knob.low <= own <= knob.high
    assert own is None or isinstance(own, int) == knob.is_whole
    for end in (knob.low, knob.high):
        assert getattr(load_config([f"algorithm={name}", f"{knob.key}={end}"]), half)[key] == end


def test_values_have_equal_ratios_and_whole_numbers_stay_whole():
    assert Knob("local.mu", 0.001, 1.0).values(4) == [0.001, 0.01, 0.1, 1.0]
    assert Knob("local.mu", 0.01, 1.0).values(1) == [0.1]
    assert Knob("local.n", 1, 3).values(6) == [1, 2, 3]
    assert all(isinstance(value, int) for value in Knob("local.n", 1, 50).values(4))


def test_an_end_is_told_from_what_is_inside():
    knob = Knob("local.mu", 0.01, 1.0)
    assert [knob.is_end(value) for value in (0.001, 0.01, 0.0101, 0.99, 1.0, 2, None)] == [
        *(True, True, False, False, True, True, False)
    ]


@pytest.mark.parametrize(("low", "high"), [(1.0, 0.1), (0.0, 1.0), (-1.0, 1.0), (1, float("inf"))])
def test_a_range_without_positive_numbers_is_refused(low, high):
    with pytest.raises(ConfigError, match=r"knob: local.mu: .* is no range of positive numbers"):
        Knob("local.mu", low, high)


@pytest.mark.parametrize("key", ["local.nu", "server.mu", "mu", "train.lr"])
def test_a_hyperparameter_of_neither_half_is_refused(key):
    with pytest.raises(ConfigError, match=f"knob: '{key}' is no hyperparameter of"):
        Method(local=Pull, knob=Knob(key, 0.1, 1.0))
    assert Method(local=Pull, knob=Knob("local.mu", 0.1, 1.0)).knob.key == "local.mu"
