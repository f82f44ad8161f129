"""protocol=leave_one_out: every domain once, selection on validation, the table."""

import pytest
import yaml

from rayfed.errors import ConfigError
from rayfed.record.atomic_files import write_parquet
from rayfed.record.readers import read_rows
from rayfed.record.recorded_run import RecordedRun, reported_round
from rayfed.report.protocols import check_unseen, scores
from rayfed.run import main
from tests.vectors import vector

FEW = ("protocol=leave_one_out", "rounds=2", "model.options={depth: 1}", "data.val=4")
DOMAINS = "data.domains=[plain, street, fonts]"


def test_every_domain_is_held_out_once_and_one_table_comes_out(small):
    result = small(*FEW, DOMAINS)
    for name in ("plain", "street", "fonts"):
        folder = result.path / "cells" / f"fedavg-{name}-seed0"
        assert yaml.safe_load((folder / "config.yaml").read_text())["data"]["held_out"] == name
        check_unseen(RecordedRun(folder), name)
        assert all(0 <= row["val_accuracy"] <= 1 for row in read_rows(folder))
    with pytest.raises(RuntimeError, match="'plain' are not used for testing only"):
        check_unseen(RecordedRun(result.path / "cells" / "fedavg-street-seed0"), "plain")
    table = rows_of(result.path / "report.md")
    assert [row["held out"] for row in table if "held out" in row] == ["plain", "street", "fonts", "mean"]
    history = read_rows(result.path / "cells" / "fedavg-fonts-seed0")
    chosen = reported_round(history, "validation")
    row = next(row for row in table if row.get("held out") == "fonts")
    three = (2 * chosen["accuracy_domain"] + chosen["held_out_accuracy"]) / 3
    for column, expected in (
        ("generalization", chosen["held_out_accuracy"]),
        ("personalization", chosen["accuracy"]),
        ("personal models", chosen["personal_accuracy"]),
        ("comprehensive", three),
        ("fonts", chosen["held_out_accuracy"]),
    ):
        assert float(row[column].rstrip("*")) == pytest.approx(100 * expected, abs=0.006), column
    assert row["fonts"].endswith("*")
    assert not row["plain"].endswith("*")
    domains = [float(row[name].rstrip("*")) for name in ("plain", "street", "fonts")]
    assert float(row["comprehensive"]) == pytest.approx(sum(domains) / 3, abs=0.011)
    turned = {row["measure"]: row for row in table if "measure" in row}
    for measure in ("generalization", "personalization", "personal models", "comprehensive"):
        cells = [float(turned[measure][name]) for name in ("plain", "street", "fonts")]
        assert float(turned[measure]["AVG"]) == pytest.approx(sum(cells) / 3, abs=0.006)
        assert turned[measure]["fonts"] == row[measure]
    last = 100 * history[-1]["held_out_accuracy"]
    assert float(turned["last round: generalization"]["fonts"]) == pytest.approx(last, abs=0.006)


def rows_of(report):
    """Every row of every table of a report, by column."""
    found = []
    columns = None
    for line in report.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            columns = None
        elif columns is None:
            columns = cells
        elif not cells[0].startswith("---"):
            found.append(dict(zip(columns, cells, strict=True)))
    return found


@pytest.mark.slow
@pytest.mark.steady
def test_zero_shot_is_a_row_of_every_table(tmp_path, cache):
    """Without being asked for, where the model is a CLIP model."""

    def run_of(name, *overrides):
        place = tmp_path / str(len(list(tmp_path.iterdir())))
        fixed = (
            f"algorithm={name}",
            f"data.cache={cache}",
            "cluster=inline",
            "data.limit=24",
            "figures=false",
        )
        assert main([*fixed, *overrides, f"output={place}"]) == 0
        return place

    few = ("rounds=1", "data.val=4", "model=clip_mini", "tuning=residual_adapter", DOMAINS)
    single = run_of("fedavg", "data.held_out=street", *few)
    assert "| zero_shot | 1 |" in (single / "report.md").read_text()
    result = run_of("fedavg", "protocol=leave_one_out", *few)
    table = rows_of(result / "report.md")
    for key in ("held out", "measure"):
        rows = [row for row in table if key in row and row[key] != "personal models"]
        assert len(rows) % 2 == 0
        for own, zero in zip(rows[::2], rows[1::2], strict=True):
            assert (zero[key], zero["method"], own["method"]) == (own[key], "zero_shot", "fedavg")
    alone = run_of("zero_shot", "data.held_out=street", *few)
    row = next(r for r in table if r.get("held out") == "street" and r["method"] == "zero_shot")
    expected = 100 * read_rows(alone)[0]["held_out_accuracy"]
    assert float(row["generalization"]) == pytest.approx(expected, abs=0.006)
    assert [r["round"] for r in read_rows(result / "cells" / "zero_shot-plain-seed0")] == [1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("data.held_out=plain",), "data.held_out: 'plain' is set"),
        (("data.domains=[plain]",), "two or more domains"),
        (("data.val=0",), "data.val: 0.* leaves no images"),
    ],
)
def test_refusals(small, change, message):
    with pytest.raises(ConfigError, match=message):
        small(*FEW, DOMAINS, *change)


def test_v12_comprehensive_accuracy(tmp_path):
    """Three participating domains and the held-out one count the same."""
    v12 = vector("fedclip_fftgp", "V12")
    *participating, held_out = v12.inputs["comprehensive"]
    kinds = [(kind, v) for v in participating for kind in ("report_domains", "report_clients")]
    kinds.append(("report_held_out", held_out))
    rows = [
        {"round": 1, "exchange": kind, "model": "global", "client": f"d{i}", "metric": "accuracy", "value": v}
        for i, (kind, v) in enumerate(kinds)
    ]
    write_parquet(tmp_path / "clients.parquet", rows)
    _, means = scores(RecordedRun(tmp_path), {"round": 1})
    v12.matches(means["comprehensive"], v12.expected["comprehensive"])
