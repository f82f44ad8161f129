"""The rows of the rounds: appended, the same bytes as if all were written at once."""

import json

from rayfed.record.folder import RoundRows
from rayfed.record.history import History

ROWS = [
    {"round": 1, "loss": 0.1 + 0.2, "note": 'a "b", c'},
    {"round": 2, "loss": None},
    {"round": 3, "loss": 1e-30, "missing": 4},
    {"round": 4, "missing": 0},
]


def added(run, rows, begin=0):
    history = History(run)
    written = RoundRows(run, history)
    history.cut(begin)
    written.begin()
    inodes = []
    for row in rows[begin:]:
        history.write(row["round"], row, {})
        written.add(row)
        inodes.append((run / "rounds.jsonl").stat().st_ino)
    return inodes


def test_rows_are_appended_to_one_file(tmp_path):
    inodes = added(tmp_path, ROWS)
    assert len(set(inodes)) == 1
    lines = (tmp_path / "rounds.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == ROWS


def test_a_continued_run_has_the_file_of_one_that_was_never_interrupted(tmp_path):
    added(tmp_path, ROWS)
    file = tmp_path / "rounds.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole[:-3])  # as a crash may leave it
    added(tmp_path, ROWS, begin=2)
    assert file.read_bytes() == whole


def test_a_file_that_is_changed_during_the_run_is_mended_by_the_next_round(tmp_path):
    history = History(tmp_path)
    written = RoundRows(tmp_path, history)
    for row in ROWS:
        history.write(row["round"], row, {})
        written.add(row)
        (tmp_path / "rounds.jsonl").write_text("")
    written.begin()
    assert len((tmp_path / "rounds.jsonl").read_text().splitlines()) == 4
    history.write(5, {"round": 5}, {})
    (tmp_path / "rounds.jsonl").unlink()
    written.add({"round": 5})
    assert [json.loads(line)["round"] for line in (tmp_path / "rounds.jsonl").open()] == [1, 2, 3, 4, 5]
