"""Keys that may change when a run is continued."""

import re
from copy import deepcopy
from dataclasses import fields

from rayfed.config.config_changes import BINDING, ENDING, HARMLESS, OF_A_COMMAND, changes, config_changes
from rayfed.config.schema import Config, Request, load_config, to_dict
from tests.conftest import ROOT


def test_the_page_names_the_keys_that_may_change():
    page = (ROOT / "docs" / "recovery.md").read_text()
    (item,) = re.findall(r"^- Keys that would change the result.*?(?=^- )", page, re.DOTALL | re.MULTILINE)
    assert sorted(re.findall("`(.+?)`", item)) == sorted([*HARMLESS, *BINDING, *ENDING])


def test_a_key_that_an_earlier_version_did_not_have_counts_as_its_default():
    new = to_dict(load_config(["algorithm=fedavg"]))
    old = deepcopy(new)
    del old["compare_options"], old["train"]["graphs"], old["evaluation"]["ties"], old["privacy"]
    assert list(config_changes(old, new)) == []
    new["train"]["graphs"] = False  # graphs change no result
    assert list(config_changes(old, new)) == []
    new["evaluation"]["ties"] = "another"
    assert [key for key, _, _ in config_changes(old, new)] == ["evaluation.ties"]
    del old["server"]["weighting"]  # a hyperparameter has no default here
    assert "server.weighting" in [key for key, _, _ in config_changes(old, new)]


def test_keys_of_a_command_that_earlier_versions_wrote_change_no_run():
    own = {each.name for each in fields(Request)} - {each.name for each in fields(Config)}
    assert set(OF_A_COMMAND) == {*own, "equal_steps"}  # which was a key until there was `equal`
    new = to_dict(load_config(["algorithm=fedavg"]).alone())
    assert list(config_changes({**new, "compare": ["afl"], "protocol": "few_shot"}, new)) == []


def test_only_keys_that_would_change_the_result_are_named():
    old = {"cluster": {"actors": 2, "threads": 1}, "trackers": [], "data": {"root": "a", "val": 0.1}}
    new = {"cluster": {"actors": 4, "threads": 2}, "trackers": ["mlflow"], "data": {"root": "b", "val": 0.2}}
    found = [key for key, _, _ in changes(old, new)]
    assert found == ["cluster.threads", "data.val"]
