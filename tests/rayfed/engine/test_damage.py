"""Run folders that were damaged or edited: the round before is used, or one line says what to put back."""

import gzip
import json
import os
import random
import shutil

import pyarrow.parquet as pq
import pytest

import rayfed
from rayfed import view
from rayfed.report import __main__ as report
from rayfed.report import landscape
from rayfed.resume import main
from tests.conftest import SMALL, STEADY, quickly

LAST = "checkpoints/round-000003/checkpoint.json"


def empty(path):
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def holding(data):
    def spoil(path):
        empty(path)
        path.write_bytes(data)

    return spoil


def as_folder(path):
    empty(path)
    path.mkdir()


def as_pipe(path):
    empty(path)
    os.mkfifo(path)


def dangling(path):
    empty(path)
    path.symlink_to("nowhere")


def flipped(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "nothing": holding(b""),
    "random bytes": holding(random.Random(0).randbytes(3000)),
    "a list": holding(b"[]"),
    "null": holding(b"null\n"),
    "brackets": holding(b"[" * 100_000),
    "braces": holding(b'{"a":' * 100_000),
    "a huge number": holding(b'{"round": 1' + b"0" * 9000 + b"}\n"),
    "no number": holding(b'{"round": NaN, "format": NaN, "packages": [1]}\n'),
    "no UTF-8": holding(b'\xff\xfe{"a": 1}'),
    "keys of other types": holding(b"rounds: 2\nalgorithm: 3\ndata: []\nmodel: x\ntuning: {}\nseed: a\n"),
    "a folder": as_folder,
    "a pipe": as_pipe,
    "a link to nothing": dangling,
}
QUICK = ("a list", "a folder", "a pipe")
"""Damages of every file that CI tries; `make test` tries the first one."""

FILES = (
    *(
        "config.yaml",
        "environment.json",
        "rounds.jsonl",
        "history/000003.json.gz",
        LAST,
        "checkpoints",
        "history",
    ),
    *("checkpoints/round-000003/state.safetensors", ".rayfed-run.json", ".lock", ".writer"),
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory, cache):
    """Three rounds of a method whose clients keep stores and models of their own."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    options = [*SMALL, "algorithm=ditto", "rounds=3", f"data.cache={cache}", "cluster=inline"]
    rayfed.simulate([*options, f"output={folder}"])
    return folder


@pytest.fixture
def run(finished, tmp_path):
    """A copy that has all rounds but was killed before its end."""
    folder = shutil.copytree(finished, tmp_path / "run")
    (folder / "model" / "params.safetensors").unlink()
    return folder


def assert_said(code, capsys):
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert code in (0, 2)
    assert len(said) == (code == 2)
    return "".join(said)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize(
    "damage",
    [
        "a list",
        *(
            pytest.param(d, marks=STEADY if d in QUICK else pytest.mark.slow)
            for d in DAMAGES
            if d != "a list"
        ),
    ],
)
def test_a_damaged_file_costs_a_round_or_is_named(file, damage, run, finished, capsys):
    DAMAGES[damage](run / file)
    assert_said(view.main([str(run)]), capsys)
    code = main([str(run), "--quiet"])
    assert_said(code, capsys)
    if code == 0:
        tensors = ("model", "params.safetensors")
        assert run.joinpath(*tensors).read_bytes() == finished.joinpath(*tensors).read_bytes()


@pytest.mark.parametrize("file", ["environment.json", "rounds.jsonl", "clients.parquet", "partition.parquet"])
@pytest.mark.parametrize("damage", quickly(["a list", "a link to nothing", "random bytes"], ["a list"]))
def test_a_damaged_finished_run_is_reported_or_named(file, damage, finished, tmp_path, capsys):
    run = shutil.copytree(finished, tmp_path / "run")
    DAMAGES[damage](run / file)
    assert_said(main([str(run), "--quiet"]), capsys)
    assert_said(view.main([str(run)]), capsys)


@pytest.mark.slow
@pytest.mark.steady
@pytest.mark.timeout(120)
def test_no_pipe_keeps_a_report_waiting(finished, tmp_path, capsys):
    """Whoever opens a pipe waits until somebody opens its other end."""
    names = [file.relative_to(finished) for file in finished.rglob("*") if file.is_file()]
    assert len(names) > 20
    for name in names:
        run = shutil.copytree(finished, tmp_path / "run")
        as_pipe(run / name)
        assert_said(report.main([str(run)]), capsys)
        shutil.rmtree(run)


@pytest.mark.parametrize("file", ["environment.json", "model/params.safetensors", "report.md"])
@pytest.mark.parametrize("damage", quickly(["a list", "a folder", "random bytes", "brackets"], ["a list"]))
def test_a_damaged_run_is_not_looked_at(file, damage, finished, tmp_path, capsys):
    run = shutil.copytree(finished, tmp_path / "run")
    DAMAGES[damage](run / file)
    code = landscape.main([str(run), "--points", "2", "--images", "2"])
    assert_said(code, capsys)
    assert code == 2 or file == "report.md"


def test_packages_of_another_type_are_named(run, capsys):
    file = run / "environment.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "packages": [1]}))
    assert main([str(run)]) == 2
    assert "environment.json" in assert_said(2, capsys)


@pytest.mark.parametrize("place", [0.5, *(pytest.param(place, marks=STEADY) for place in (0.2, 0.9))])
def test_a_flipped_bit_in_the_history_costs_one_round(place, run, finished, capsys):
    file = run / "history" / "000003.json.gz"
    data = bytearray(file.read_bytes())
    data[int(place * len(data))] ^= 16
    file.write_bytes(data)
    assert main([str(run), "--quiet"]) == 0
    tables = [pq.read_table(folder / "clients.parquet").to_pylist() for folder in (run, finished)]
    assert tables[0] == tables[1]


@pytest.mark.parametrize("what", ["checkpoints", "checkpoints/round-*"])
def test_a_run_without_its_checkpoints_does_not_start_again(what, run, capsys):
    for path in list(run.glob(what)):
        shutil.rmtree(path)
    before = (run / "rounds.jsonl").read_bytes()
    assert main([str(run)]) == 2
    assert "there is no checkpoint, so the 3 finished rounds cannot be continued" in assert_said(2, capsys)
    assert (run / "rounds.jsonl").read_bytes() == before


def test_a_run_without_a_finished_round_starts_from_the_start(run, finished):
    for name in ("checkpoints", "history"):
        shutil.rmtree(run / name)
    (run / "rounds.jsonl").unlink()
    assert main([str(run), "--quiet"]) == 0
    tensors = ("model", "params.safetensors")
    assert run.joinpath(*tensors).read_bytes() == finished.joinpath(*tensors).read_bytes()


def test_another_learning_rate_in_the_config_is_named(run, capsys):
    file = run / "config.yaml"
    file.write_text(file.read_text().replace("lr: 0.02", "lr: 0.5"))
    before = file.read_bytes()
    assert main([str(run)]) == 2
    error = assert_said(2, capsys)
    assert "train.lr in config.yaml was 0.02 when round 3 of" in error
    assert "is 0.5 now; put it back or start a new run" in error
    assert file.read_bytes() == before


def test_where_a_run_is_computed_may_change_in_the_config(run, capsys):
    file = run / "config.yaml"
    file.write_text(file.read_text().replace("retries: 2", "retries: 7"))
    assert "retries: 7" in file.read_text()
    assert main([str(run), "--quiet"]) == 0


def repacked(file, change):
    entry = json.loads(gzip.decompress(file.read_bytes()))
    change(entry)
    file.write_bytes(gzip.compress(json.dumps(entry).encode(), compresslevel=1, mtime=0))


def test_a_digit_in_the_history_of_the_last_round_costs_this_round(run, finished, caplog):
    repacked(run / "history" / "000003.json.gz", lambda entry: entry["row"].update(loss=0.0))
    assert main([str(run), "--quiet"]) == 0
    assert "history/000003.json.gz was changed" in caplog.text
    assert json.loads((run / "rounds.jsonl").read_text().splitlines()[-1])["loss"] > 0


def test_a_digit_in_the_history_of_an_earlier_round_is_named(run, capsys):
    repacked(run / "history" / "000001.json.gz", lambda entry: entry["row"].update(loss=0.0))
    assert main([str(run)]) == 2
    assert "history/000001.json.gz was changed" in assert_said(2, capsys)


def swapped(facts):
    first, second, *_ = facts["stores"]
    stores = facts["stores"]
    stores[first], stores[second] = stores[second], stores[first]


EDITS = {
    "two stores swapped": (swapped, "which client has which store"),
    "a store removed": (lambda facts: facts["stores"].popitem(), "which client has which store"),
    "the round": (lambda facts: facts.update(round=2), "round was changed"),
    "the config": (lambda facts: facts["config"]["train"].update(lr=9.0), "the config"),
    "the data": (lambda facts: facts["data"].update(data_digest="0"), "the digests of the data"),
    "a seal": (lambda facts: facts["seals"].pop("stores"), "which client has which store"),
    "a fact": (lambda facts: facts.pop("data"), "the digests of the data"),
}


@pytest.mark.parametrize("edit", quickly(EDITS, [*EDITS][:2]))
def test_an_edited_checkpoint_costs_a_round_and_is_named(edit, run, finished, caplog):
    change, words = EDITS[edit]
    facts = json.loads((run / LAST).read_text())
    change(facts)
    (run / LAST).write_text(json.dumps(facts))
    assert main([str(run), "--quiet"]) == 0
    assert words in caplog.text
    assert "round-000003 cannot be used" in caplog.text
    tensors = ("model", "params.safetensors")
    assert run.joinpath(*tensors).read_bytes() == finished.joinpath(*tensors).read_bytes()


def test_checkpoints_of_an_unknown_format_are_named(run, capsys):
    for file in run.glob("checkpoints/round-*/checkpoint.json"):
        file.write_text(json.dumps({**json.loads(file.read_text()), "format": 1}))
    assert main([str(run), "--quiet"]) == 2
    assert "format 1, this version reads 2" in assert_said(2, capsys)


def test_an_edited_config_is_named_although_no_round_is_left(finished, tmp_path, capsys):
    run = shutil.copytree(finished, tmp_path / "whole")
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace("lr: 0.02", "lr: 0.5"))
    assert main([str(run), "--quiet"]) == 2
    error = capsys.readouterr().err
    assert "train.lr in config.yaml was 0.02 when round 3" in error
    assert "is 0.5 now" in error
