"""The final table says the same words for the same things as the table at the start."""

import json
from collections import Counter
from shutil import copytree

from rayfed.record.readers import read_lines, read_parquet
from rayfed.record.recorded_run import RecordedRun
from rayfed.report.comparison import table_of_methods
from rayfed.report.final_table import cost_notes, final_table, selection_notes


def test_train_images_are_those_that_are_trained_on(small):
    run = small("rounds=1", "data.val=0.25").path
    manifest = read_parquet(run / "partition.parquet").to_pylist()
    splits = Counter((row["domain"], row["split"]) for row in manifest)
    table = final_table(RecordedRun(run))
    column = table.columns.index("train images")
    assert {row[0]: int(row[column]) for row in table.rows} == {
        domain: count for (domain, split), count in splits.items() if split == "train"
    }
    assert any(split == "val" for _, split in splits)


def test_a_long_run_says_which_round_is_reported_and_what_other_rules_give():
    scores = [0.1, 0.5, 0.4, 0.6, 0.3, 0.2]
    history = [{"round": n + 1, "accuracy": s, "accuracy_domain": s} for n, s in enumerate(scores)]
    [note] = selection_notes(history)
    assert "over the last 5 as in FedGCR's code 40.0, over the last 4 as in FedRA's 37.5" in note
    assert "the best of these 4 60.0 (round 4)" in note
    assert [*selection_notes(history[:4])] == []


def test_a_run_without_scores_says_so_and_what_to_set(small):
    run = small("rounds=1", "evaluation.every=0").path
    for table in (final_table(RecordedRun(run)), table_of_methods([RecordedRun(run)])):
        text = table.text()
        assert "nothing was evaluated (evaluation.every=0): run again with evaluation.every=1" in text
        assert "round 0" not in text


def test_a_run_that_is_scored_on_other_domains_only_has_their_scores(small, tmp_path):
    run = tmp_path / "run"
    copytree(small("rounds=1", "data.held_out=street").path, run)
    [row] = read_lines(run / "rounds.jsonl")
    kept = {key: row[key] for key in ("round", "held_out_accuracy", "bytes_up", "bytes_down", "seconds")}
    (run / "rounds.jsonl").write_text(json.dumps(kept) + "\n")
    table = final_table(RecordedRun(run))
    assert "street (held out)" in [row[0] for row in table.rows]
    assert not any("nothing was evaluated" in note for note in table.notes)


def test_what_training_cost_is_the_sum_of_the_operations_and_the_largest_client():
    history = [
        {"flops": 2_000_000_000, "trained_params": 1500},
        {"flops": 500_000_000, "trained_params": 900},
    ]
    assert [*cost_notes(history)] == [
        "training: 2.5 GFLOP of all clients; a client trains up to 1,500 parameters"
    ]
    assert [*cost_notes([{"round": 1}])] == []  # a run of an earlier version
