"""A few training samples of each class and client."""

from dataclasses import replace

import numpy as np
import pytest

from rayfed.data.data_config import DataConfig, PartitionConfig
from rayfed.data.partition.groups import partition_of
from rayfed.data.partition_config import PopulationConfig
from rayfed.errors import ConfigError
from tests.rayfed.data.partition.toy import as_dataset, make_data

PARTITION = PartitionConfig(clients_per_domain=2)
CONFIG = DataConfig(name="toy", reader="image_folder", partition=PARTITION, val=0.1, test=0.2)


def part(seed=0, **options):
    return partition_of(as_dataset(make_data()), replace(CONFIG, **options), seed)


def test_every_client_keeps_so_many_samples_of_each_class_and_its_other_splits():
    labels = make_data()[0]
    whole = part()
    before: dict = {}
    for shots in (1, 3, 1000):
        few = part(shots=shots)
        for old, new in zip(whole.clients, few.clients, strict=True):
            counts = np.bincount(labels[old.train], minlength=7)
            assert np.bincount(labels[new.train], minlength=7).tolist() == np.minimum(counts, shots).tolist()
            assert set(before.get(new.id, ())) <= set(new.train.tolist()) <= set(old.train.tolist())
            assert np.array_equal(new.val, old.val)
            assert np.array_equal(new.test, old.test)
            assert (np.diff(new.train) > 0).all()
            before[new.id] = new.train.tolist()
    assert few.digest == whole.digest
    assert part(shots=2, seed=1).digest != part(shots=2).digest == part(shots=2).digest


def test_another_domain_changes_nobodys_shots():
    alone = part(shots=2, domains=["photo"]).clients
    theirs = [c for c in part(shots=2, domains=["art", "photo"]).clients if c.domain == "photo"]
    assert all(np.array_equal(a.train, b.train) for a, b in zip(alone, theirs, strict=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shots": 0}, "data.shots: 0 is not a number of samples >= 1"),
        ({"shots": [1, 2]}, r"data.shots: \[1, 2\] is a list, for which protocol=few_shot"),
        (
            {"shots": 1, "population": PopulationConfig(clients=9), "partition": PartitionConfig()},
            "data.shots: 1 cannot be used with data.population",
        ),
    ],
)
def test_shots_that_cannot_be_kept_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        part(**options)
