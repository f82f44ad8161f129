"""Hyperparameters of the methods of one comparison."""

import pytest

from rayfed.config.schema import load_config, resolve, to_dict
from rayfed.config.variants import comparisons, differing_values
from rayfed.errors import ConfigError
from rayfed.experiment.experiment import Experiment


def halves(config):
    """The sections of the two halves of all methods of a comparison, by method."""
    every = {config.algorithm: config, **comparisons(config)}
    return {name: {**each.server, **each.local} for name, each in every.items()}


def loaded(*overrides):
    return load_config(["data.cache=CACHE", "rounds=2", *overrides])


def test_what_is_written_for_a_half_is_applied_to_every_method_that_has_the_key():
    written = ("server.weighting=uniform", "local.stays=[head]", "local.mu=0.3")
    for choice in (["compare=[fedavg,fedprox]"], ["algorithm=fedavg", "compare=fedprox"]):
        config = loaded(*choice, *written)
        found = halves(config)
        assert list(found) == ["fedavg", "fedprox"]
        for values in found.values():
            assert (values["weighting"], list(values["stays"])) == ("uniform", ["head"])
        assert found["fedprox"]["mu"] == 0.3  # a key that the first method lacks
        assert "mu" not in found["fedavg"]
        again = resolve(to_dict(config))  # as a run is continued, or repeated from its config.yaml
        assert halves(again) == found
    assert loaded("algorithm=fedprox", *written).compare_options == {}


def test_a_value_that_is_the_default_of_the_first_method_counts_for_the_others():
    found = halves(loaded("compare=[scaffold,fedavg]", "server.weighting=uniform", "tuning=head"))
    assert found["fedavg"]["weighting"] == "uniform"
    assert halves(loaded("compare=[scaffold,fedavg]", "tuning=head"))["fedavg"]["weighting"] == ("data_size")


def test_a_half_of_another_method_is_chosen_for_the_first_one_alone():
    config = loaded("algorithm=fedprox", "server.name=fedavg", "server.weighting=uniform", "compare=afl")
    (other,) = comparisons(config).values()
    assert (other.server["name"], config.server["name"]) == ("afl", "fedavg")


def test_a_key_that_no_compared_method_has_is_refused():
    for choice in (["compare=[fedavg,afl]"], ["algorithm=fedavg", "compare=afl"]):
        with pytest.raises(ConfigError, match=r"^local\.mu: no such key with algorithm=fedavg"):
            loaded(*choice, "local.mu=0.1")


def test_a_value_that_a_compared_method_cannot_have_names_the_method():
    for choice in (["compare=[fedavg,fedprox]"], ["algorithm=fedavg", "compare=fedprox"]):
        with pytest.raises(ConfigError, match=r"^local\.mu: -1 .*\(compared method fedprox\)$"):
            comparisons(loaded(*choice, "local.mu=-1"))


def test_objects_and_changed_experiments_follow_the_same_rule():
    first = Experiment(method="fedavg", compare=["fedprox"], server={"weighting": "uniform"}, rounds=2)
    for config in (first.config(), Experiment.of(first.config()).changed(rounds=3).config()):
        assert halves(config)["fedprox"]["weighting"] == "uniform"
    plain = Experiment.of(loaded("compare=[fedavg,fedprox]"))
    later = plain.changed(**{"server.weighting": "uniform", "local.mu": 0.5}).config()
    found = halves(later)
    assert (found["fedavg"]["weighting"], found["fedprox"]["weighting"]) == ("uniform", "uniform")
    assert found["fedprox"]["mu"] == 0.5


def test_values_in_which_methods_differ_are_named():
    config = loaded("algorithm=fedavg", "compare=[scaffold,fedprox]", "tuning=head")
    every = {"fedavg": config, **comparisons(config)}
    text = differing_values({name: to_dict(each) for name, each in every.items()})
    assert text == (
        "settings of the methods differ: server.weighting is data_size with fedavg and fedprox, "
        "uniform with scaffold"
    )
    same = {name: to_dict(every[name]) for name in ("fedavg", "fedprox")}
    assert differing_values(same) == ""
