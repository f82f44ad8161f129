"""Files of a run folder are read with the limits that files of users have."""

import gzip

import pytest

from rayfed.record.readers import DamagedError, read_json, read_lines, read_packed, read_rows, read_yaml


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("rounds: 1\nrounds: 2\n", "'rounds' is there twice"),
        ("a: &a [1]\nb: *a\n", "alias"),
        ("a: !!python/object/apply:os.getcwd []\n", "a tag .* that stands for no plain value"),
        ("[" * 100 + "]" * 100, "nested more than 64 deep"),
        ("- 1\n", "holds no keys"),
    ],
)
def test_a_yaml_file_that_users_may_not_write_is_damaged(tmp_path, text, cause):
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with pytest.raises(DamagedError, match=cause) as caught:
        read_yaml(file)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ('{"round": 1, "round": 2}', "'round' is there twice"),
        ('{"a":' * 100 + "1" + "}" * 100, "nested more than 64 deep"),
        ("[1]", "holds a list where a dict belongs"),
        ('{"round": 1', "it is not JSON$"),
    ],
)
def test_a_json_file_is_damaged_in_each_of_its_forms(tmp_path, text, cause):
    plain = tmp_path / "rounds.jsonl"
    packed = tmp_path / "000001.json.gz"
    plain.write_text(text + "\n")
    packed.write_bytes(gzip.compress(text.encode()))
    with pytest.raises(DamagedError, match=cause):
        read_json(plain, dict)
    with pytest.raises(DamagedError, match=cause):
        read_lines(plain)
    with pytest.raises(DamagedError, match=cause):
        read_packed(packed, dict)


def test_a_damaged_line_is_named_with_its_number_and_the_command_that_mends_it(tmp_path):
    (tmp_path / "rounds.jsonl").write_text('{"round": 1}\n{bad\n')
    with pytest.raises(DamagedError, match=r"rounds.jsonl cannot be read: line 2: it is not JSON$"):
        read_rows(tmp_path)
    (tmp_path / "checkpoints" / "round-000001").mkdir(parents=True)
    with pytest.raises(DamagedError, match=r"line 2: it is not JSON; python -m rayfed.resume writes it anew"):
        read_rows(tmp_path)


def test_a_line_that_a_crash_cut_off_is_left_out(tmp_path):
    file = tmp_path / "rounds.jsonl"
    file.write_text('{"round": 1}\n{"round": 2}\n{"rou')
    assert [row["round"] for row in read_lines(file)] == [1, 2]
