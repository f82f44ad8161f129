"""protocol=leave_one_out: every domain once, selection on validation, the table."""

import pytest
import yaml

from rayfed.errors import ConfigError
from rayfed.leave_one_out import check_unseen, selected
from rayfed.report.table import read_rows

FEW = ("protocol=leave_one_out", "rounds=2", "model.options={depth: 1}", "data.val=4")
DOMAINS = "data.domains=[plain, street, fonts]"


def test_every_domain_is_held_out_once_and_one_table_comes_out(small):
    result = small(*FEW, DOMAINS)
    for name in ("plain", "street", "fonts"):
        folder = result.path / name
        assert yaml.safe_load((folder / "config.yaml").read_text())["data"]["held_out"] == name
        check_unseen(folder, name)
        assert all(0 <= row["val_accuracy"] <= 1 for row in read_rows(folder))
    with pytest.raises(RuntimeError, match="'plain' have another use"):
        check_unseen(result.path / "street", "plain")
    lines = (result.path / "report.md").read_text().splitlines()
    assert [line.split("|")[1].strip() for line in lines if line.startswith("| ")][2:] == [
        "plain", "street", "fonts", "mean",
    ]  # fmt: skip
    row, at = read_rows(result.path / "fonts"), 0
    at = selected(row)["round"] - 1
    cells = next(line for line in lines if line.startswith("| fonts")).split("|")
    assert float(cells[3]) == pytest.approx(100 * row[at]["held_out_accuracy"], abs=0.006)
    assert float(cells[4]) == pytest.approx(100 * row[at]["accuracy"], abs=0.006)
    three = 100 * (2 * row[at]["accuracy_domain"] + row[at]["held_out_accuracy"]) / 3
    assert float(cells[6]) == pytest.approx(three, abs=0.006)


def test_the_first_best_round_is_selected():
    rows = [{"round": i, "val_accuracy": a} for i, a in enumerate((0.2, 0.7, 0.7, 0.1), start=1)]
    assert selected([{"round": 0}, *rows])["round"] == 2


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
