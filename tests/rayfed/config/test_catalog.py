"""Everything that can be chosen is listed, with a line of description and with what it brings."""

import json
from functools import cache

import pytest

from rayfed.config.catalog import SECTIONS, VALUES, as_json, catalog, choices_of, main
from rayfed.config.compose import HUB, choices

everything = cache(as_json)


def brings(section):
    return {entry["name"]: entry["brings"] for entry in everything()[section]}


@pytest.mark.parametrize(("section", "group"), SECTIONS.items())
def test_every_choice_has_a_description_of_one_line(section, group):
    entries = everything()[section]
    assert [entry["name"] for entry in entries] == (
        VALUES[group].names() if group in VALUES else choices(group)
    )
    for entry in entries:
        assert set(entry) == {"name", "description", "brings"}
        assert 15 < len(entry["description"]) < 120, entry
        assert not entry["description"].endswith((".", ",", " and", " as", " with")), entry


def test_it_says_what_a_choice_brings():
    assert brings("data")["shakespeare"]["model"] == "char_lstm"
    assert brings("data")["prostate"]["model"] == "unet"
    assert brings("data")["pacs"] == {}
    assert brings("algorithms")["depthfl"] == {"tuning": "exits"}
    authors = brings("experiments")["fedgcr/authors"]
    assert authors == {
        "data": "digits",
        "model": "vit_base_patch16_224",
        "tuning": "gc_prompt",
        "algorithm": "fedgcr",
    }
    small = {"data": "digits_five_mini", "model": "vit_mini"}
    assert brings("experiments")["fedgcr/authors/mini"] == {**authors, **small}
    assert "[model=char_lstm, tuning=full, algorithm=fedavg]" in catalog()


def test_presets_are_methods_of_their_own():
    assert {"fft_gp", "fft_gp_clip", "fft_gp_prompt"} <= {choice.name for choice in choices_of("algorithm")}


def test_what_it_brings_can_be_chosen():
    for section in SECTIONS:
        for found in brings(section).values():
            named = {group: name for group, name in found.items() if not name.startswith(HUB)}
            assert all(name in choices(group) for group, name in named.items()), found


def test_every_model_of_our_own_is_listed():
    from rayfed.models.networks import BUILDERS

    assert set(BUILDERS) <= {choice.name for choice in choices_of("model")}


@pytest.mark.parametrize("section", ["tunings", "tuning"])
def test_one_section_is_listed_by_its_title_or_its_key(section, capsys):
    assert main([section]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "tuning="
    assert [line.split()[0] for line in lines[1:] if not line.startswith("   ")] == choices("tuning")
    assert main([section, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"tunings": everything()["tunings"]}


def test_a_section_that_does_not_exist_names_all(capsys):
    assert main(["tables"]) == 2
    assert "section: 'tables' does not exist. Choose one of: algorithms, data, " in capsys.readouterr().err
