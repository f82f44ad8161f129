"""protocol=few_shot: one run for each number of shots, one table, and how it is continued."""

import pytest

from rayfed.config.schema import load_config
from rayfed.config.variants import few_shots
from rayfed.errors import ConfigError
from rayfed.record.readers import read_rows
from rayfed.record.recorded_run import RecordedRun
from rayfed.report.protocols import training_samples
from rayfed.resume import main
from tests.rayfed.report.test_protocols_leave_one_out import rows_of

FEW = (
    "protocol=few_shot",
    "rounds=1",
    "data.domains=[plain,street]",
    "compare=local",
    "data.shots=[1,3]",
    "model.options={depth: 1}",
)


@pytest.mark.slow
@pytest.mark.steady
def test_every_number_of_shots_is_run_and_a_lost_run_is_done_again(small):
    run = small(*FEW, "data.val=0")
    one, three = (run.path / "cells" / f"fedavg-shots-{count}-seed0" for count in (1, 3))
    table = [row for row in rows_of(run.path / "report.md") if "shots" in row]
    assert [(row["shots"], row["method"]) for row in table] == [
        (shots, name) for shots in "13" for name in ("fedavg", "local")
    ]
    for row in table:
        folder = run.path / "cells" / f"{row['method']}-shots-{row['shots']}-seed0"
        samples = training_samples(RecordedRun(folder))
        assert int(row["training samples"]) == samples <= 2 * 10 * int(row["shots"])
        last = read_rows(folder)[-1]
        for column, key in (("clients", "accuracy"), ("domains", "accuracy_domain")):
            assert float(row[column]) == pytest.approx(100 * last[key], abs=0.006)
    assert int(table[0]["training samples"]) < int(table[2]["training samples"])
    single = small(*FEW[1:3], FEW[5], "data.val=0", "data.shots=3")
    tensors = "model/params.safetensors"
    assert (single.path / tensors).read_bytes() == (three / tensors).read_bytes()
    (three / "model" / "params.safetensors").unlink()
    (run.path / "report.md").unlink()
    kept = (one / "history" / "000001.json.gz").stat().st_mtime_ns
    assert main([str(run.path), "--quiet"]) == 0
    assert [row for row in rows_of(run.path / "report.md") if "shots" in row] == table
    assert (one / "history" / "000001.json.gz").stat().st_mtime_ns == kept


def test_runs_without_scores_have_empty_cells(small):
    quick = ("data.domains=[plain]", "data.val=0", "rounds=1", "model.options={depth: 1}")
    run = small("protocol=few_shot", "data.shots=[1]", "evaluation.every=0", *quick)
    (row,) = (row for row in rows_of(run.path / "report.md") if "shots" in row)
    assert (row["shots"], row["round"], row["clients"]) == ("1", "", "")


def test_the_numbers_are_those_of_coop_unless_they_are_listed():
    config = load_config(["protocol=few_shot"])
    assert list(few_shots(config)) == [f"shots-{count}" for count in (1, 2, 4, 8, 16)]
    assert [run.data.shots for run in few_shots(config).values()] == [1, 2, 4, 8, 16]
    for shots in ("[]", "[2,2]"):
        with pytest.raises(ConfigError, match=r"data\.shots: .* each once"):
            few_shots(load_config(["protocol=few_shot", f"data.shots={shots}"]))
