"""Files of a folder of groups build on each other and choose from other groups."""

import pytest

from rayfed.config.compose import Composition, merge
from rayfed.errors import ConfigError

HEAD = "# @package _global_\n# what it does\n"
FILES = {
    "config": "defaults: [data: digits, model: small, algorithm: fedavg, _self_]\nrounds: 5\n",
    "data/digits": "name: digits\nval: 0.1\noptions: {a: 1, b: [1, 2]}\n",
    "data/pacs": "name: pacs\n",
    "model/small": "name: small\n",
    "model/large": "name: large\n",
    "algorithm/fedavg": f"{HEAD}algorithm: fedavg\n",
    "algorithm/clip": f"{HEAD}defaults: [override /model: large]\nalgorithm: clip\nrounds: 7\n",
    "experiment/base": f"{HEAD}defaults: [override /data: pacs, override /algorithm: clip, _self_]\n"
    "data: {options: {b: [3]}}\nrounds: 9\nseed: 1\n",
    "experiment/child": f"{HEAD}defaults: [/experiment/base@_global_, override /data: digits, _self_]\n"
    "rounds: 2\n",
    "experiment/first": f"{HEAD}defaults: [_self_, /experiment/base@_global_]\nrounds: 2\nextra: {{a: 1}}\n",
}


def composed(folder, files=None, **chosen):
    for name, text in (FILES | (files or {})).items():
        path = folder / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Composition(folder, chosen, lambda group, name: {group: {"name": name, "plain": True}}).values()


def test_each_group_has_its_section_and_later_values_count(tmp_path):
    assert composed(tmp_path) == {
        "data": {"name": "digits", "val": 0.1, "options": {"a": 1, "b": [1, 2]}},
        "model": {"name": "small"},
        "algorithm": "fedavg",
        "rounds": 5,
    }


def test_a_choice_of_a_file_counts_unless_the_command_line_chooses(tmp_path):
    assert composed(tmp_path, algorithm="clip")["model"] == {"name": "large"}
    assert composed(tmp_path, algorithm="clip", model="small")["model"] == {"name": "small"}
    assert composed(tmp_path, algorithm="clip")["rounds"] == 5  # config.yaml comes after the groups


def test_an_experiment_counts_more_than_what_it_builds_on(tmp_path):
    base = composed(tmp_path, experiment="base")
    assert (base["data"], base["rounds"], base["seed"]) == ({"name": "pacs", "options": {"b": [3]}}, 9, 1)
    assert (base["algorithm"], base["model"]) == ("clip", {"name": "large"})
    child = composed(tmp_path, experiment="child")
    assert child["data"] == {"name": "digits", "val": 0.1, "options": {"a": 1, "b": [3]}}
    assert (child["rounds"], child["algorithm"]) == (2, "clip")
    assert composed(tmp_path, experiment="child", data="pacs", algorithm="fedavg")["data"]["name"] == "pacs"


def test_values_before_those_of_the_base_do_not_count(tmp_path):
    first = composed(tmp_path, experiment="first")
    assert (first["rounds"], first["extra"]) == (9, {"a": 1})


def test_a_choice_without_a_file_has_plain_values(tmp_path):
    assert composed(tmp_path, model="mine")["model"] == {"name": "mine", "plain": True}


def test_no_result_changes_another(tmp_path):
    composed(tmp_path)["data"]["options"]["b"].append(3)
    assert composed(tmp_path)["data"]["options"]["b"] == [1, 2]


def test_a_value_replaces_a_section_and_the_other_way_round():
    tree = {"a": {"b": 1}, "c": 2, "d": None}
    merge(tree, {"a": None, "c": {"d": 3}, "d": {"e": 1}})
    assert tree == {"a": None, "c": {"d": 3}, "d": {"e": 1}}


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("experiment/e", "defaults: 3\n", "configs/experiment/e.yaml: defaults: 3 is not a list"),
        ("experiment/e", "defaults: [x]\n", "'x' is no entry; write '_self_', '/GROUP/NAME@_global_'"),
        ("experiment/e", "defaults: [{a: b, c: d}]\n", "is no entry"),
        ("experiment/e", "defaults: [override /data: 3]\n", "is no entry"),
        (
            "experiment/e",
            "defaults: [/experiment/no@_global_]\n",
            "configs/experiment/no.yaml: there is no such",
        ),
        (
            "experiment/e",
            "defaults: [/experiment/e@_global_]\n",
            "configs/experiment/e.yaml.*builds on itself",
        ),
        ("experiment/e", "a: [\n", "configs/experiment/e.yaml"),
        (
            "data/digits",
            "# @package _global_\ndefaults: [override /algorithm: clip]\n",
            "algorithm cannot be chosen here",
        ),
        (
            "experiment/e",
            "# @package _global_\ndefaults: [override /algoritm: clip]\n",
            "algoritm=clip: no file puts in a choice from 'algoritm'",
        ),
    ],
)
def test_what_means_nothing_is_named(tmp_path, file, text, message):
    chosen = {"experiment": "e"} if file.startswith("experiment") else {}
    with pytest.raises(ConfigError, match=message):
        composed(tmp_path, {file: text}, **chosen)
