"""benchmarks/which_method: every method that fits runs once, and what was measured is written."""

import json

import pytest

from benchmarks import which_method
from docs.generate import results
from rayfed.config.schema import compatible_parts, load_config

TINY = (
    "rounds=1",
    "data.limit=12",
    "data.val=2",
    "data.test=4",
    "model.options={depth: 4}",
    "model.pretrained=false",
)
TINY = (*TINY, "tuning.rank=2", "capacity=[4,3,2,2,1]")
SETTING = "unequal devices"
TRIED = ("fedavg", "fedra", "ditto", "fedgcr", "zero_shot", "promptfl")


def call(tmp_path, cache, *more):
    which_method.main(
        ["--setting", SETTING, "--seeds", "2", "--folder", str(tmp_path / "runs")]
        + ["--file", str(tmp_path / results.METHODS)]
        + [f"--method={name}" for name in TRIED]
        + [*TINY, f"data.cache={cache}", *more]
    )
    return json.loads((tmp_path / results.METHODS).read_text())[SETTING]


@pytest.mark.slow
@pytest.mark.steady
def test_it_writes_every_method_and_seed_and_repeats_nothing(tmp_path, cache, capsys):
    found = call(tmp_path, cache)
    assert found["seeds"] == [0, 1]
    assert found["clients"] == 5
    ran = {row["method"] for row in found["rows"]}
    assert {"fedavg", "fedra"} <= ran
    assert "fedgcr" in found["refused"]  # its groups need prompts of GC-Net
    assert found["refused"]["zero_shot"] == "algorithm: zero_shot trains nothing"
    assert found["refused"]["promptfl"] == "tuning: promptfl is made for tuning=text_prompt"
    assert ran | found["refused"].keys() == {*TRIED}
    assert sorted((row["method"], row["seed"]) for row in found["rows"]) == sorted(
        (name, seed) for name in ran for seed in (0, 1)
    )
    for row in found["rows"]:
        assert 0 <= row["worst client"] <= row["mean"] <= 1
        assert row["bytes"] > 0
        assert row["steps"] > 0
    capsys.readouterr()
    assert call(tmp_path, cache)["rows"] == found["rows"]
    assert capsys.readouterr().out == ""  # no run was repeated
    assert "`fedra`" in results.methods(SETTING, tmp_path)


def test_a_setting_in_which_no_method_fits_says_why(tmp_path, cache, capsys):
    with pytest.raises(SystemExit, match="2"):
        call(tmp_path, cache, "data.val=13")
    assert "data" in capsys.readouterr().err
    assert not (tmp_path / results.METHODS).exists()


def test_settings_that_were_written_before_stay(tmp_path):
    file = tmp_path / "x.json"
    which_method.write("texts", {"a": 1}, file)
    which_method.write(SETTING, {"b": 2}, file)
    assert list(json.loads(file.read_text()).items()) == [(SETTING, {"b": 2}), ("texts", {"a": 1})]


@pytest.mark.parametrize("setting", which_method.SETTINGS)
def test_every_setting_is_a_valid_config(setting):
    """Nothing is prepared: paths need not exist."""
    paths = {"pacs": "PACS", "weights": "FILE", "text": "TEXT"}
    fixed = [text.format(**paths) for text in which_method.SETTINGS[setting]]
    config = load_config([*which_method.COMMON, *fixed, "algorithm=fedavg"])
    compatible_parts(config)
    assert config.cluster.executor == "inline"
    assert "{" not in repr(fixed) or config.model.options == {"pad_type": "same"}
