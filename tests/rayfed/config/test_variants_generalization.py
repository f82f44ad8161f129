"""The runs of the protocols that score where nobody trained."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from rayfed.config.schema import load_config
from rayfed.config.variants import (
    base_to_new,
    cross_datasets,
    cross_domains,
    new_classes,
    unseen_clients,
)
from rayfed.errors import ConfigError

LETTERS = ("a", "b", "c", "d", "e")


def opened(data):
    return SimpleNamespace(classes=LETTERS, domains=("plain", "street", "fonts"))


def config(*overrides):
    return load_config(["algorithm=fedavg", "data.cache=CACHE", *overrides])


def test_new_classes_are_the_smaller_second_half_unless_they_are_given():
    assert new_classes(None, LETTERS) == ["d", "e"]
    assert new_classes(3, LETTERS) == ["c", "d", "e"]
    assert new_classes(["e", "b"], LETTERS) == ["b", "e"]
    for wanted, message in ((0, "0 of 5"), (5, "5 of 5"), (["z"], "'z'"), (["a", "a"], "listed twice")):
        with pytest.raises(ConfigError, match=rf"^data\.new_classes: .*{message}"):
            new_classes(wanted, LETTERS)
    with pytest.raises(ConfigError, match=r"2 of 2 classes; .*choose data with four classes"):
        new_classes(2, LETTERS[:2])


def test_base_classes_train_and_new_ones_are_scored_with_their_model():
    given = (
        "capacity=2",
        "channel=[{clip: 1.0}]",
        "clients_per_round=2",
        "data.partition.clients_per_domain=3",
    )
    given += (
        "evaluation.clients=2",
        "data.partition.scheme=dirichlet",
        "data.augment=[flip]",
        "evaluation.validation=true",
    )
    runs = base_to_new(config(*given, "rounds=7"), opened)
    base, new = runs["base"], runs["new"]
    assert base.data.classes == ["a", "b", "c"]
    assert new.data.classes == ["d", "e"]
    assert (base.rounds, base.clients_per_round, base.evaluation.model_of) == (7, 2, None)
    assert (new.rounds, new.clients_per_round, new.evaluation.model_of) == (1, "all", None)
    assert (new.capacity, new.channel, new.data.augment) == (None, (), None)
    assert replace(new.data, classes=new.data.base_classes, base_classes=None, augment=["flip"]) == replace(
        base.data, augment=["flip"]
    )
    assert (new.data.base_classes, new.evaluation.clients) == (["a", "b", "c"], 2)
    assert (new.data.test, new.tuning, new.seed) == (base.data.test, base.tuning, base.seed)
    for wanted in ("[a,b,c,d]", "1"):
        with pytest.raises(ConfigError, match="leaves 1 of 5 classes as"):
            base_to_new(config(f"data.new_classes={wanted}"), opened)


def test_a_virtual_population_is_not_scored_client_by_client_on_new_classes():
    given = ("data.population=1000", "evaluation.clients=5", "data.val=2")
    new = base_to_new(config(*given), opened)["new"]
    assert (new.data.population, new.data.base_classes, new.data.val) == (None, None, 0)
    assert (new.evaluation.clients, new.data.classes) == ("all", ["d", "e"])


def test_domains_are_sources_in_turn_unless_targets_are_given():
    each = cross_domains(config(), opened)
    assert {name: (run.data.domains, run.data.held_out) for name, run in each.items()} == {
        "from-plain": (["plain"], ["street", "fonts"]),
        "from-street": (["street"], ["plain", "fonts"]),
        "from-fonts": (["fonts"], ["plain", "street"]),
    }
    (one,) = cross_domains(config("data.held_out=[plain]"), opened).values()
    assert (one.data.domains, one.data.held_out) == (["street", "fonts"], ["plain"])
    (two,) = cross_domains(config("data.held_out=fonts", "data.domains=[plain]"), opened).values()
    assert (two.data.domains, two.data.held_out) == (["plain"], ["fonts"])
    for wrong, message in (
        (("data.domains=[plain]",), "two or more domains"),
        (("data.held_out=fnts",), "fnts"),
    ):
        with pytest.raises(ConfigError, match=message):
            cross_domains(config(*wrong), opened)


def test_other_data_sets_keep_their_own_section_and_prompt():
    targets = "data.targets={pacs: {root: P, test: 0.5}, dtd: {root: D, template: 'a texture, {}'}}"
    runs = cross_datasets(config(targets, "model=clip_mini"))
    assert list(runs) == ["digits-five-mini", "pacs", "dtd"]
    source, pacs, dtd = runs.values()
    assert (source.data.targets, source.evaluation.model_of) == (None, None)
    assert (pacs.data.root, pacs.data.test, pacs.data.cache, pacs.data.val) == (
        *(str(Path("P").absolute()), 0.5, str(Path("CACHE").absolute()), 0),
    )
    assert (dtd.data.root, dtd.data.test) == (str(Path("D").absolute()), "official")
    assert source.model.template == pacs.model.template != dtd.model.template
    assert dtd.model.template == "a texture, {}"


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (None, r"^data\.targets: empty"),
        ("[pasc]", "pasc"),
        ("[digits_five_mini]", "is named 'digits-five-mini', as another data set"),
        ("{pacs: {rot: X}}", r"data\.targets\.pacs.*rot"),
    ],
)
def test_data_sets_that_cannot_be_targets(targets, message):
    with pytest.raises(ConfigError, match=message):
        cross_datasets(config(*([f"data.targets={targets}"] if targets else [])))


def test_numbers_of_unseen_clients():
    runs = unseen_clients(config("data.unseen_clients=[0,0.4]"))
    assert {name: (run.data.unseen_clients, run.evaluation.local_steps) for name, run in runs.items()} == {
        "unseen-0": (0, 0),
        "unseen-0.4": (0.4, 10),
    }
    (run,) = unseen_clients(config("evaluation.local_steps=3")).values()
    assert (run.data.unseen_clients, run.evaluation.local_steps) == (0.2, 3)
    for numbers in ("[]", "[1,1]"):
        with pytest.raises(ConfigError, match=r"data\.unseen_clients: .* each once"):
            unseen_clients(config(f"data.unseen_clients={numbers}"))
