"""protocol=unseen_clients: one run for each number of unseen clients, one table, and how it is continued."""

import json

from rayfed.config.schema import load_config, to_yaml
from rayfed.record.readers import read_rows
from rayfed.report import protocols
from rayfed.report.method_runs import MethodRuns
from rayfed.report.page.render import write_report
from rayfed.resume import main
from tests.rayfed.report.test_protocols_leave_one_out import rows_of

FEW = (
    *("protocol=unseen_clients", "data.unseen_clients=[0,0.5]", "rounds=1", "evaluation.local_steps=2"),
    *("data.domains=[plain,street]", "data.partition.clients_per_domain=2", "data.val=0"),
    "model.options={depth: 1}",
)


def table_of(run):
    return [row for row in rows_of(run.path / "report.md") if "unseen" in row]


def test_one_table_has_the_clients_that_train_and_those_that_do_not(small, tmp_path):
    run = small(*FEW)
    none, half = (run.path / "cells" / f"fedavg-unseen-{share}-seed0" for share in ("0", "0.5"))
    table = table_of(run)
    assert [(row["unseen"], row["method"]) for row in table] == [("0", "fedavg"), ("0.5", "fedavg")]
    for row in table:
        last = read_rows(run.path / "cells" / f"fedavg-unseen-{row['unseen']}-seed0")[-1]
        assert row["clients that train"] == f"{100 * last['accuracy']:.2f}"
        for column, key in (
            ("unseen clients", "unseen_accuracy"),
            ("worst unseen", "unseen_worst_accuracy"),
            ("unseen, adapted", "adapted_unseen_accuracy"),
            ("worst unseen, adapted", "adapted_unseen_worst_accuracy"),
        ):
            assert row[column] == (f"{100 * last[key]:.2f}" if row["unseen"] != "0" else "")
    assert "mean over unseen clients" in (half / "report.md").read_text()
    write_report([run.path], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "unseen clients, adapted" in page
    assert "worst unseen, adapted" in page
    (half / "model" / "params.safetensors").unlink()
    kept = (none / "history" / "000001.json.gz").stat().st_mtime_ns
    assert main([str(run.path), "--quiet"]) == 0
    assert table_of(run) == table
    assert (none / "history" / "000001.json.gz").stat().st_mtime_ns == kept


def test_rows_are_in_the_order_of_the_comparison_with_personal_scores_where_there_are_some(tmp_path):
    methods = ("fedavg", "ditto", "fedper")
    unseen = {"unseen_accuracy": 0.4, "unseen_worst_accuracy": 0.3, "adapted_unseen_accuracy": 0.6}
    scores = ({"accuracy": 0.5}, {"accuracy": 0.9, "global_accuracy": 0.7}, {"accuracy": 0.8})

    def write(folder, own):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text(to_yaml(load_config(["algorithm=fedavg"])))
        (folder / "rounds.jsonl").write_text(json.dumps({"round": 1, **own, **unseen}) + "\n")

    folders = [tmp_path / name for name in methods]
    runs = MethodRuns(folders={(path.name, "unseen-1"): path for path in folders})
    for folder, own in zip(folders, scores, strict=True):
        write(folder, own)
    (table,) = protocols.unseen_clients_table(runs).parts
    assert table.columns[3:5] == ("clients that train", "clients that train, personal")
    assert [row[1:6] for row in table.rows] == [
        ("fedavg", "1", "50.00", "", "40.00"),
        ("ditto", "1", "70.00", "90.00", "40.00"),
        ("fedper", "1", "80.00", "", "40.00"),
    ]
    assert any(
        "10 local steps from the global model, which has had none of them" in note for note in table.notes
    )
    write(folders[1], {"accuracy": 0.5, "personal_accuracy": 0.2})  # what evaluation.personal=true adds
    assert protocols.unseen_clients_table(runs).parts[0].rows[1][3:5] == (
        "50.00",
        "20.00",
    )
    write(folders[1], scores[0])
    (table,) = protocols.unseen_clients_table(runs).parts
    assert "clients that train, personal" not in table.columns
    assert [row[3:5] for row in table.rows] == [("50.00", "40.00"), ("50.00", "40.00"), ("80.00", "40.00")]
