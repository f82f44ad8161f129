"""The final table says the same words for the same things as the table at the start."""

from collections import Counter

from rayfed.record.readers import read_parquet
from rayfed.report.table import final_table


def test_train_images_are_those_that_are_trained_on(small):
    run = small("rounds=1", "data.val=0.25").path
    manifest = read_parquet(run / "partition.parquet").to_pylist()
    splits = Counter((row["domain"], row["split"]) for row in manifest)
    table = final_table(run)
    column = table.columns.index("train images")
    assert {row[0]: int(row[column]) for row in table.rows} == {
        domain: count for (domain, split), count in splits.items() if split == "train"
    }
    assert any(split == "val" for _, split in splits)
