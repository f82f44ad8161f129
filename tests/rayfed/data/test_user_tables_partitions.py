"""A partition of another library as data: an object with `load_partition(i)` and `num_partitions`."""

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import rayfed
from rayfed.data.user_data import own_data
from rayfed.data.user_tables import table_of
from rayfed.errors import DataError


class Partitioner:
    """Rows of a frame by turns."""

    def __init__(self, frame, num_partitions):
        self.frame, self.num_partitions = frame, num_partitions

    def load_partition(self, partition_id):
        return self.frame.iloc[partition_id :: self.num_partitions]


class Federated:
    """As FederatedDataset: a partitioner gets its data with the first call."""

    def __init__(self, **partitioners):
        self.partitioners = partitioners
        self._whole = {split: part.frame for split, part in partitioners.items()}
        for part in partitioners.values():
            part.frame = None

    def load_partition(self, partition_id, split=None):
        self.partitioners[split].frame = self._whole[split]
        return self.partitioners[split].load_partition(partition_id)


def frame(rows=44, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 3)).astype("f4")
    return pd.DataFrame({"a": x[:, 0], "b": x[:, 1], "c": x[:, 2], "label": (x[:, 0] > 0).astype(int)})


def test_each_part_is_a_client_with_its_rows():
    whole = frame()
    table = table_of(Partitioner(whole, 11))
    assert sorted(table["client"].unique()) == [f"{i:02d}" for i in range(11)]
    for i in range(11):
        mine = table[table["client"] == f"{i:02d}"].drop(columns="client").reset_index(drop=True)
        pd.testing.assert_frame_equal(mine, whole.iloc[i::11].reset_index(drop=True))
    assert "client" not in whole.columns
    assert len(own_data(Partitioner(whole, 11)).pieces) == 11


def test_splits_of_a_federated_set_stay_apart():
    given = Federated(train=Partitioner(frame(), 4), test=Partitioner(frame(20, seed=1), 4))
    table = table_of(given)
    assert {(c, s): len(rows) for (c, s), rows in table.groupby(["client", "split"])} == {
        **{(str(i), "train"): 11 for i in range(4)},
        **{(str(i), "test"): 5 for i in range(4)},
    }


def test_a_run_trains_on_it(monkeypatch, cache, no_figures):
    monkeypatch.setenv("RAYFED_CACHE", str(cache))
    torch.manual_seed(0)
    own = {"model": nn.Linear(3, 2), "tuning": "full", "rounds": 1, "cluster": "inline"}
    by_turns = rayfed.Experiment(data=Partitioner(frame(60), 3), **own).run()
    same = {str(i): frame(60).iloc[i::3] for i in range(3)}
    by_hand = pd.concat([part.assign(client=name) for name, part in same.items()])
    assert by_turns.sha256 == rayfed.Experiment(data=by_hand, **own).run().sha256
    assert len(by_turns.clients) == 3


def test_what_is_no_table_or_names_clients_already_is_refused():
    class Wrong(Partitioner):
        def load_partition(self, partition_id):
            return [1, 2, 3]

    with pytest.raises(DataError, match=r"load_partition\(0\) gave .* no table"):
        own_data(Wrong(frame(), 2))
    with pytest.raises(DataError, match="have a column 'client'; rename it"):
        own_data(Partitioner(frame().assign(client="x"), 2))


def test_partitions_of_flwr_datasets():
    partitioners = pytest.importorskip("flwr_datasets.partitioner", reason="flwr-datasets is not installed")
    datasets = pytest.importorskip("datasets")
    whole = datasets.Dataset.from_pandas(frame(60), preserve_index=False)
    partitioner = partitioners.IidPartitioner(num_partitions=5)
    partitioner.dataset = whole
    table = table_of(partitioner)
    assert table["client"].value_counts().to_dict() == {str(i): 12 for i in range(5)}
