"""The command python -m rayfed.report: exit codes and messages."""

import json

import pytest

from rayfed.report.__main__ import main
from tests.rayfed.report.page import folders


def test_it_writes_the_page_and_its_numbers(tmp_path, capsys):
    folders.write(tmp_path / "run", rounds=1, clients=3)
    out = tmp_path / "out.html"
    assert main([str(tmp_path / "run"), "--out", str(out)]) == 0
    assert f"{out}  0." in capsys.readouterr().out
    assert out.read_text().count("<figure") > 5
    assert json.loads(out.with_suffix(".json").read_text())["runs"][0]["config"]["rounds"] == 1


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda run: (run / "config.yaml").unlink(), "there is no config.yaml"),
        (lambda run: (run / "config.yaml").write_text("a: 1"), "config.yaml is not that of a run"),
        (lambda run: (run / "rounds.jsonl").write_text("{\n"), "rounds.jsonl cannot be read"),
        (lambda run: (run / "rounds.jsonl").write_text("[]\n"), "rounds.jsonl cannot be read"),
        (lambda run: (run / "clients.parquet").write_bytes(b"PAR1"), "clients.parquet cannot be read"),
        (
            lambda run: (run / "transfers.parquet").write_bytes((run / "clients.parquet").read_bytes()),
            "cannot be read",
        ),
        (lambda run: (run / "partition.parquet").write_text(""), "partition.parquet cannot be read"),
        (lambda run: (run / "environment.json").write_text("[1]"), "environment.json cannot be read"),
    ],
)
def test_a_damaged_folder_ends_in_one_line(damage, words, tmp_path, capsys):
    folders.write(tmp_path / "run", rounds=1, clients=3)
    damage(tmp_path / "run")
    assert main([str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert words in error
    assert not (tmp_path / "run" / "report.html").exists()


def test_a_missing_folder_is_named(tmp_path, capsys):
    assert main([str(tmp_path / "nosuch")]) == 2
    assert "there is no such folder" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["two", "-1", "0", "inf"])
def test_a_margin_is_a_positive_number(text, tmp_path, capsys):
    folders.write(tmp_path / "run", rounds=1, clients=3)
    assert main([str(tmp_path / "run"), f"--margin={text}"]) == 2
    assert f"--margin: '{text}' is no positive number" in capsys.readouterr().err
