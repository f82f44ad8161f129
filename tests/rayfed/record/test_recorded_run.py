"""A run is read from its folder, each file once, and one rule says which of its rounds is reported."""

import json

import pytest
from safetensors.torch import save_file

from rayfed.errors import ConfigError
from rayfed.record import recorded_run as reader
from rayfed.record.folder import TENSORS
from rayfed.record.history import History
from rayfed.record.readers import DamagedError
from rayfed.record.recorded_run import RecordedRun, reported_round
from tests.rayfed.report.tables import DOMAINS, HELD_OUT, write_run


def rows(*scores, name="accuracy"):
    return [{"round": number, name: score} for number, score in enumerate(scores, start=1)]


def test_the_last_evaluated_round_is_reported():
    assert reported_round([*rows(0.2, 0.9, 0.4), {"round": 4, "loss": 0.1}])["round"] == 3
    assert reported_round([{"round": 1}]) == {}
    assert reported_round([]) == {}


@pytest.mark.parametrize(
    "row",
    [
        {"clients_scored": 3},  # their examples define no metric
        {"held_out_dice": 0.5},  # only domains without clients have test examples
        {"personal_accuracy": 0.5},
        {"unseen_accuracy": 0.5},
    ],
)
def test_a_round_is_evaluated_whosever_scores_it_has(row):
    assert reported_round([{"round": 1, **row}, {"round": 2}])["round"] == 1


def test_validation_selects_the_first_or_the_last_of_the_best_rounds():
    validated = [{"round": 0}, *rows(0.2, 0.7, 0.7, None, 0.1, name="val_accuracy")]
    assert [reported_round(validated, "validation", ties)["round"] for ties in ("first", "last")] == [2, 3]
    errors = rows(0.3, 0.1, 0.2, name="val_mae")  # of which smaller ones are better
    assert reported_round(errors, "validation")["round"] == 2
    assert reported_round(rows(None, None, name="val_accuracy"), "validation")["round"] == 2


def test_validation_of_the_global_model_counts_where_the_clients_own_models_are_deployed():
    both = [
        {"round": 1, "val_accuracy": 0.1, "global_val_accuracy": 0.9},
        {"round": 2, "val_accuracy": 0.9, "global_val_accuracy": 0.1},
    ]
    assert reported_round(both, "validation")["round"] == 1


def test_a_run_without_validation_reports_its_last_evaluated_round():
    assert reported_round(rows(0.9, 0.4), "validation")["round"] == 2


def test_the_rule_and_the_ties_of_a_run_decide(tmp_path):
    write_run(tmp_path / "run")
    (tmp_path / "run" / "config.yaml").write_text("evaluation: {ties: last}\n")
    lines = [{**row, "accuracy": 0.1} for row in rows(0.7, 0.7, 0.2, name="val_accuracy")]
    (tmp_path / "run" / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert RecordedRun(tmp_path / "run").reported["round"] == 3
    run = RecordedRun(tmp_path / "run", "validation")
    assert (run.reported["round"], run.reported_by("last")["round"]) == (2, 3)


def test_each_file_is_read_once_and_only_when_it_is_needed(tmp_path, monkeypatch):
    write_run(tmp_path / "run")
    names = ("read_yaml", "read_json", "rows_so_far", "read_parquet")
    opened = []

    def counting(read):
        def count(path, *more):
            opened.append(path.name)
            return read(path, *more)

        return count

    for name in names:
        monkeypatch.setattr(reader, name, counting(getattr(reader, name)))
    run = RecordedRun(tmp_path / "run")
    assert opened == []
    for _ in range(2):
        assert run.method == "fedgcr"
        assert run.reported["round"] == 5
        assert {score["round"] for score in run.scores_at(3)} == {3}
        assert run.rows("gaps")
        assert list(run.clients) == sorted(run.clients, key=lambda c: DOMAINS.index(run.clients[c]))
        assert not run.segmentation
        assert not run.scores.empty
    frame = "clients.parquet"  # of which the frame has some columns only
    assert sorted(opened) == sorted(
        [
            "config.yaml",
            "run",
            "clients.parquet",
            frame,
            "gaps.parquet",
            "partition.parquet",
            "environment.json",
        ]
    )


def test_the_order_of_the_data_set_is_that_of_domains(tmp_path):
    write_run(tmp_path / "run")
    run = RecordedRun(tmp_path / "run")
    assert run.domains == list(DOMAINS)
    assert run.held_out == [HELD_OUT]
    assert run.order(["fonts", "other", "plain"]) == ["plain", "fonts", "other"]
    assert HELD_OUT not in set(run.owners.values())


def test_a_folder_without_files_is_a_run_that_has_not_begun(tmp_path):
    run = RecordedRun(tmp_path)
    assert (run.config, run.environment, run.rounds, run.reported) == ({}, {}, [], {})
    assert (run.domains, run.events, run.commands, run.rows("gaps")) == ([], [], [], [])
    with pytest.raises(DamagedError, match=r"partition\.parquet cannot be read"):
        run.partition_rows("split")
    with pytest.raises(ConfigError, match="holds no run"):
        RecordedRun.opened(tmp_path)


def test_rows_that_a_finished_run_lacks_are_a_damage(tmp_path):
    write_run(tmp_path / "run")
    (tmp_path / "run" / "rounds.jsonl").unlink()
    assert RecordedRun(tmp_path / "run").rounds == []  # it may not have finished a round yet
    (tmp_path / "run" / TENSORS).parent.mkdir()
    save_file({}, tmp_path / "run" / TENSORS)
    with pytest.raises(DamagedError, match=r"rounds\.jsonl cannot be read"):
        _ = RecordedRun(tmp_path / "run").rounds


def test_scores_of_a_run_in_progress_come_from_its_history(tmp_path):
    write_run(tmp_path / "run", rounds=2)
    run = tmp_path / "run"
    score = {"exchange": "report_clients", "client": "c", "domain": "d", "model": "global"}
    score |= {"metric": "accuracy", "value": 0.5, "round": 1}
    (run / "clients.parquet").unlink()
    (run / "history").mkdir()
    History(run).write(1, {"round": 1}, {"clients": [score], "gaps": []})
    read = RecordedRun(run)
    assert read.scores_at(1) == [score]
    assert read.scores_at(2) == []
    assert read.columns_of("clients") == list(score)
    assert read.scores["value"].tolist() == [0.5]


def test_facts_that_a_run_lacks_are_a_damage(tmp_path):
    write_run(tmp_path / "run")
    assert RecordedRun(tmp_path / "run").fact("task") == "classification"
    with pytest.raises(DamagedError, match=r"environment\.json cannot be read: KeyError: 'numbers_trained'"):
        RecordedRun(tmp_path / "run").fact("numbers_trained")
    (tmp_path / "run" / "environment.json").unlink()
    with pytest.raises(DamagedError, match=r"environment\.json cannot be read: No such file"):
        RecordedRun(tmp_path / "run").fact("task")


def test_a_damaged_file_is_named(tmp_path):
    write_run(tmp_path / "run")
    (tmp_path / "run" / "clients.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(DamagedError, match=r"clients\.parquet cannot be read"):
        RecordedRun(tmp_path / "run").read()
