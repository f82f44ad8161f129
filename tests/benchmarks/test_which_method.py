"""benchmarks/which_method: every method that fits runs once, and what was measured is written."""

import json

import pytest

from benchmarks import which_method
from docs.generate import results
from rayfed.config.schema import compatible_parts, load_config
from rayfed.errors import ConfigError

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
TRIED = ("fedavg", "fedavg_sgd", "fedra", "ditto", "scaffold", "fedgcr", "zero_shot", "promptfl")


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
    assert ran == {"fedavg", "fedavg_sgd", "fedra", "ditto", "scaffold"}
    assert found["bases"]["scaffold"] == "fedavg_sgd"
    assert {"fedprox", "fedkseed"} <= {*found["unfinished"]}
    assert len({row["steps"] for row in found["rows"]}) == 1  # Ditto trains two models, half as often
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
    assert capsys.readouterr().out == "10 of 10 cells are finished\n"  # no run was repeated
    assert "`fedra`" in results.methods(SETTING, tmp_path)
    timed = call(tmp_path, cache, "--time")
    assert timed["rows"] == found["rows"]
    assert timed["seconds"].keys() == ran
    assert min(timed["seconds"].values()) > 0
    shown = next(
        line for line in results.methods(SETTING, tmp_path).splitlines() if line.startswith("| `fedra`")
    )
    assert shown.endswith(f"| {timed['seconds']['fedra']:.2f} |")


def test_a_setting_in_which_no_method_fits_says_why(tmp_path, cache, capsys):
    with pytest.raises(SystemExit, match="2"):
        call(tmp_path, cache, "data.val=13")
    assert "data" in capsys.readouterr().err
    assert not (tmp_path / results.METHODS).exists()


def test_settings_that_were_written_before_stay(tmp_path):
    """Other methods of a setting stay too, but not those with another config."""
    file = tmp_path / "x.json"

    def facts(rounds, refused, *methods):
        rows = [{"method": name, "seed": 0} for name in methods]
        about = {"overrides": [], "rounds": rounds, "seeds": [0], "clients": 5}
        return about | {"refused": dict.fromkeys(refused, "why"), "rows": rows}

    def ran(setting):
        return [row["method"] for row in json.loads(file.read_text())[setting]["rows"]]

    which_method.write("texts", facts(1, ["fedra"], "fedavg", "ditto"), file)
    which_method.write(SETTING, facts(1, [], "fedavg"), file)
    assert list(json.loads(file.read_text())) == [SETTING, "texts"]
    which_method.write("texts", facts(1, [], "ditto", "afl", "fedra"), file)
    assert ran("texts") == ["fedavg", "ditto", "afl", "fedra"]
    assert json.loads(file.read_text())["texts"]["refused"] == {}
    which_method.write("texts", facts(2, [], "afl"), file)
    assert (ran("texts"), ran(SETTING)) == (["afl"], ["fedavg"])


@pytest.mark.parametrize(("batches", "factor"), [(1.0, 2), (2.0, 1), (0.0, 1)])
def test_all_methods_train_on_as_many_batches(batches, factor):
    assert which_method._factor("x", batches) == factor


def test_frozen_blocks_count_for_no_method():
    assert which_method.own_options("fedra") == which_method.INSTALLED
    assert which_method.own_options("fedavg") == ()


@pytest.mark.parametrize("batches", [4.0, 1.5])
def test_a_method_that_cannot_train_on_as_many_is_refused(batches):
    with pytest.raises(ConfigError, match="x trains on"):
        which_method._factor("x", batches)


@pytest.mark.parametrize("setting", which_method.SETTINGS)
def test_every_setting_is_a_valid_config(setting):
    """Nothing is prepared: paths need not exist."""
    paths = {"pacs": "PACS", "weights": "FILE", "text": "TEXT"}
    fixed = [text.format(**paths) for text in which_method.SETTINGS[setting]]
    config = load_config([*which_method.COMMON, *fixed, "algorithm=fedavg"])
    compatible_parts(config)
    assert config.cluster.executor == "inline"
    assert "{" not in repr(fixed) or config.model.options == {"pad_type": "same"}
