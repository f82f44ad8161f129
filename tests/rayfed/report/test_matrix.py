"""What `--dry-run` prints of an experiment that is no table of a paper."""

import pytest

from rayfed.config.schema import load_config, to_yaml
from rayfed.errors import ConfigError
from rayfed.report.matrix import matrix_of


def test_every_compared_method_has_a_row_with_what_it_would_run_with():
    text = matrix_of(["compare=[fedavg,ffa_lora,zero_shot]", "model=clip_mini", "tuning=lora", "rounds=7"])
    assert text.startswith("3 methods on the same data (compare)")
    rows = [line for line in text.splitlines() if "clip_mini" in line]
    assert [line.split()[1] for line in rows] == ["fedavg", "ffa_lora", "zero_shot"]
    assert "freeze_a True" in rows[1]
    assert "7 rounds" in rows[0]
    assert "1 round" in rows[2]  # nothing is trained
    assert "its own tuning" not in text
    text = matrix_of(["compare=[fedavg,promptfl]", "tuning=lora"])
    assert text.endswith("\npromptfl trains tuning=lora here, not its own tuning=text_prompt")


def test_a_protocol_says_how_many_runs_there_are_and_no_column_is_empty():
    text = matrix_of(["algorithm=fedavg", "protocol=leave_one_out"])
    title, _, head, *_ = text.splitlines()
    assert title == "one run for each held-out domain (protocol=leave_one_out)"
    assert head.split() == ["seeds", "method", "tuning", "model", "data", "training"]


@pytest.mark.parametrize("choice", ["row=Nobody", "setting=nowhere"])
def test_a_row_or_a_setting_that_does_not_exist_is_named(choice):
    with pytest.raises(ConfigError, match=f"{choice.replace('=', ': .')}. does not exist"):
        matrix_of(["experiment=fedgcr/table1/mini", choice])


def test_a_small_experiment_of_its_own_says_that_its_data_ship_and_asks_for_none():
    text = matrix_of(["experiment=fft_gp/prostate_mini", "row=FFT-GP"])
    assert "\ndata: ships with RayFed\n" in text
    assert "data.root" not in text
    assert "paper scale" not in text
    large = matrix_of(["experiment=fft_gp/prostate", "row=FFT-GP"])
    assert "set data.root" in large
    assert "(paper scale)" in large


def test_a_config_file_is_described_with_the_overrides_of_the_command(tmp_path):
    (tmp_path / "config.yaml").write_text(to_yaml(load_config(["algorithm=fedprox", "rounds=9"])))
    text = matrix_of(["seed=5"], tmp_path / "config.yaml")
    (row,) = (line.split() for line in text.splitlines() if "fedprox" in line)
    assert row[:2] == ["5", "fedprox"]
    assert "9 rounds" in text
