"""Clients that the data set names."""

from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pytest

from rayfed.data.data_config import DataConfig, PartitionConfig
from rayfed.data.load_dataset import load
from rayfed.data.partition.groups import partition_of
from rayfed.data.partition.make import make_partition
from rayfed.data.source import Listing
from rayfed.errors import ConfigError
from tests.rayfed.data.partition.toy import as_dataset, make_data

# Two domains of 10 samples. ann has samples 0..5, bob 6..13 (of both domains), the rest is of "c/1" and "d".
OWNERS = ["ann"] * 6 + ["bob"] * 8 + ["c/1"] * 5 + ["d"]
TEST = np.arange(20) % 5 == 4


@dataclass(frozen=True, kw_only=True)
class Owned:
    """A reader of black images that names clients."""

    name: str
    root: str | None
    owners = OWNERS

    def fingerprint(self):
        return "".join(self.owners)

    def scan(self):
        return Listing(
            name=self.name,
            classes=("a", "b"),
            domains=("art", "photo"),
            keys=[f"x/{place}" for place in range(20)],
            labels=np.arange(20) % 2,
            domain=np.repeat([0, 1], 10),
            test=TEST,
            fingerprint=self.fingerprint(),
            owners=self.owners,
        )

    def decode(self, listing, index, size):
        return np.zeros((size, size, 3), np.uint8)


@dataclass(frozen=True, kw_only=True)
class Renamed(Owned):
    """The same images of other clients."""

    owners = [*OWNERS[:-1], "e"]


def config(**options):
    partition = PartitionConfig(scheme="natural", min_samples=options.pop("min_samples", 2))
    return DataConfig(
        name="toy", partition=partition, **{"reader": "image_folder", "val": 0, "test": 0, **options}
    )


def partition(cfg, owners=OWNERS):
    return make_partition(
        np.arange(20) % 2, np.repeat([0, 1], 10), TEST, ("art", "photo"), cfg, seed=0, keys=owners
    )


def test_every_client_has_its_own_samples(caplog):
    clients = {client.id: client for client in partition(config()).clients}
    assert list(clients) == ["c0-ann", "c1-c-1", "c2-bob"]  # by domain; bob has samples of two, d has too few
    assert [client.domain for client in clients.values()] == ["art", "photo", "mixed"]
    assert clients["c2-bob"].train.tolist() == [*range(6, 14)]
    assert clients["c1-c-1"].train.tolist() == [*range(14, 19)]
    assert "1 of 4 clients have fewer than 2 training samples and are left out ('d'); lower" in caplog.text


def test_a_client_whose_examples_all_go_to_test_is_named_with_advice_that_helps(caplog):
    partition(config(min_samples=1, test=0.2))
    assert (
        "client 'd' is left out: its only example went to test; give it more, or set data.test" in caplog.text
    )
    assert "min_samples" not in caplog.text


def test_official_test_samples_are_shared_and_held_out_domains_have_no_client():
    clients = {c.id: c for c in partition(config(test="official")).clients}
    assert clients["c0-ann"].train.tolist() == [0, 1, 2, 3, 5]
    assert clients["c0-ann"].test.tolist() == [4, 9]
    held_out = partition(config(held_out="photo"))
    assert [(c.id, c.train.tolist()) for c in held_out.clients] == [
        ("c0-ann", [*range(6)]),
        ("c1-bob", [*range(6, 10)]),
    ]
    assert held_out.held_out["photo"].tolist() == [*range(10, 20)]
    split = {c.id: c for c in partition(config(val=0.25, test=0.25)).clients}["c2-bob"]
    assert [len(split.train), len(split.val), len(split.test)] == [4, 2, 2]


def test_a_data_set_without_clients_or_with_small_ones_only_is_refused():
    with pytest.raises(ConfigError, match="names the client of each sample, and toy does not"):
        partition(config(), owners=[])
    with pytest.raises(ConfigError, match=r"min_samples: 9, but no client .* the largest has 8 samples"):
        partition(config(min_samples=9))


def test_a_file_without_named_clients_is_refused_with_its_columns(tmp_path):
    path = tmp_path / "mails.csv"
    path.write_text("body,folder,user\na,b,c\n")
    own = config(reader="csv", root=str(path))
    with pytest.raises(ConfigError, match=r"set data.columns.client to one of body, folder, user, or list"):
        partition(own, owners=[])


def test_clients_that_are_not_used_and_one_client_are_warned_of(caplog):
    data = as_dataset(make_data())
    plain = DataConfig(name="toy", reader="csv", val=0, test=0, domains=["art"])
    alone = replace(data, domains=("art",), domain=np.zeros(len(data), np.int64))
    partition_of(alone, plain, 0)
    assert "1 client: toy names none" in caplog.text
    caplog.clear()
    partition_of(alone, replace(plain, partition=PartitionConfig(clients_per_domain=2)), 0)
    partition_of(alone, replace(plain, partition=PartitionConfig(pooled=True)), 0)
    partition_of(data, replace(plain, domains=None), 0)
    assert not caplog.text
    partition_of(alone, replace(plain, columns={"client": "user"}), 0)
    assert "data.columns.client: 'user' is not used under data.partition.scheme=by_domain" in caplog.text


def test_groups_go_to_the_client_of_their_first_sample():
    dataset = as_dataset(make_data())
    keys = [f"art/{place // 2}/{place}" for place in range(len(dataset))]
    owners = ["even" if place // 2 % 2 == 0 else "odd" for place in range(len(dataset))]
    dataset = replace(dataset, key_column=pa.array(keys), owner_column=pa.array(owners), grouped=True)
    clients = {c.id.split("-")[1]: c for c in partition_of(dataset, config(), 0).clients}
    assert (clients["even"].train // 2 % 2 == 0).all()
    assert len(clients["even"].train) == len(clients["odd"].train) + 2 == 386


def test_the_names_are_kept_in_the_prepared_file(tmp_path):
    options = {"root": str(tmp_path), "cache": str(tmp_path), "reader": f"{__name__}:Owned"}
    dataset = load(config(**options), 4)
    assert dataset.owners == OWNERS
    other = load(config(**(options | {"reader": f"{__name__}:Renamed"})), 4)
    assert other.digest != dataset.digest
    assert len(partition_of(dataset, config(), 0).clients) == 3
    assert as_dataset(make_data()).owners == []
