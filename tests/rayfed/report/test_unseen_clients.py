"""protocol=unseen_clients: one run for each number of unseen clients, one table, and how it is continued."""

from rayfed.record.readers import read_rows
from rayfed.report.page.write import write_report
from rayfed.resume import main
from tests.rayfed.report.test_leave_one_out import rows_of

FEW = (
    *("protocol=unseen_clients", "data.unseen_clients=[0,0.5]", "rounds=1", "evaluation.local_steps=2"),
    *("data.domains=[plain,street]", "data.partition.clients_per_domain=2", "data.val=0"),
    "model.options={depth: 1}",
)


def table_of(run):
    return [row for row in rows_of(run.path / "report.md") if "unseen" in row]


def test_one_table_has_the_clients_that_train_and_those_that_do_not(small, tmp_path):
    run = small(*FEW)
    table = table_of(run)
    assert [(row["unseen"], row["algorithm"]) for row in table] == [("0", "fedavg"), ("0.5", "fedavg")]
    for row in table:
        last = read_rows(run.path / f"unseen-{row['unseen']}")[-1]
        assert row["clients that train"] == f"{100 * last['accuracy']:.2f}"
        for column, key in (
            ("unseen clients", "unseen_accuracy"),
            ("worst unseen", "unseen_worst_accuracy"),
            ("unseen, adapted", "adapted_unseen_accuracy"),
            ("worst unseen, adapted", "adapted_unseen_worst_accuracy"),
        ):
            assert row[column] == (f"{100 * last[key]:.2f}" if row["unseen"] != "0" else "")
    assert "mean over unseen clients" in (run.path / "unseen-0.5" / "report.md").read_text()
    write_report([run.path], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "unseen clients, adapted" in page
    assert "worst unseen, adapted" in page
    (run.path / "unseen-0.5" / "model" / "params.safetensors").unlink()
    kept = (run.path / "unseen-0" / "history" / "000001.json.gz").stat().st_mtime_ns
    assert main([str(run.path), "--quiet"]) == 0
    assert table_of(run) == table
    assert (run.path / "unseen-0" / "history" / "000001.json.gz").stat().st_mtime_ns == kept
