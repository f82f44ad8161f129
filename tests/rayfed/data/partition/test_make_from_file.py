"""Partitions from files: what a run saved, and plain lists."""

import csv
import json
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest

from rayfed.data.data_config import DataConfig, PartitionConfig
from rayfed.data.partition.make import make_partition
from rayfed.errors import ConfigError, DataError
from tests.rayfed.data.partition.toy import DOMAINS, as_dataset, config, digests_of, make_data, save_manifest

KEYS = as_dataset(make_data()).keys


def from_file(path, data=None, keys=KEYS, **options):
    cfg = DataConfig(name="toy", reader="image_folder", partition=PartitionConfig(file=str(path)), **options)
    return make_partition(*(data or make_data()), DOMAINS, cfg, 0, keys)


def write_json(path, content):
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize(
    "cfg",
    [
        config(clients=2),
        config("dirichlet", 3, test="official", held_out="art"),
        config(clients=3, limit=60, val=0, held_out=["photo", "art"]),
        config("imbalanced", test=0.2, domains=["sketch", "art", "photo", "cartoon"]),
    ],
)
def test_what_a_run_saved_comes_back(cfg, tmp_path):
    before = make_partition(*make_data(), DOMAINS, cfg, 3)
    save_manifest(before, tmp_path / "partition.parquet", as_dataset(make_data()))
    after = from_file(tmp_path / "partition.parquet", domains=cfg.domains)
    assert after.digest == before.digest
    assert [client.id for client in after.clients] == [client.id for client in before.clients]
    assert after.official_test == before.official_test
    assert list(after.held_out) == list(before.held_out)


def test_a_saved_partition_finds_its_samples_by_key(tmp_path):
    before = make_partition(*make_data(), DOMAINS, config(clients=2), 0)
    save_manifest(before, tmp_path / "partition.parquet", as_dataset(make_data()))
    # The same data with the first sample left out, as on_bad_image=skip would: all numbers move by one.
    data, keys = tuple(array[1:] for array in make_data()), KEYS[1:]
    with pytest.raises(ConfigError, match=r"has 'art/0/0\.png', which is neither"):
        from_file(tmp_path / "partition.parquet", data, keys)
    table = pq.read_table(tmp_path / "partition.parquet")
    pq.write_table(table.filter(np.asarray(table["index"]) != 0), tmp_path / "less.parquet")
    after = from_file(tmp_path / "less.parquet", data, keys)
    for old, new in zip(before.clients, after.clients, strict=True):
        assert np.array_equal(old.train[old.train != 0] - 1, new.train)


def test_a_saved_partition_of_other_data(tmp_path):
    save_manifest(
        make_partition(*make_data(), DOMAINS, config(), 0), tmp_path / "p.parquet", as_dataset(make_data())
    )
    labels, domain, test = make_data()
    with pytest.raises(ConfigError, match=r"p\.parquet: 770 samples have other labels"):
        from_file(tmp_path / "p.parquet", (labels + 1, domain, test))
    with pytest.raises(ConfigError, match=r"data\.held_out: photo, but the partition file holds out nothing"):
        from_file(tmp_path / "p.parquet", held_out="photo")


def test_lists_of_numbers_or_keys(tmp_path):
    content = {"ann": list(range(250, 300)), "bob": [KEYS[i] for i in range(100)], "cy": [*range(300, 340)]}
    result = from_file(write_json(tmp_path / "x.json", content), val=0.1, test=0.2)
    assert [client.id for client in result.clients] == ["c0-bob", "c1-ann", "c2-cy"]  # by domain
    assert [client.domain for client in result.clients] == ["art", "cartoon", "cartoon"]
    assert [(len(c.train), len(c.val), len(c.test)) for c in result.clients] == [
        (70, 10, 20),
        (35, 5, 10),
        (28, 4, 8),
    ]
    bob = result.clients[0]
    assert sorted(np.concatenate([bob.train, bob.val, bob.test])) == list(range(100))
    assert not result.official_test
    with (tmp_path / "x.csv").open("w", newline="") as file:
        rows = [{"client": name, "sample": sample} for name, own in content.items() for sample in own]
        writer = csv.DictWriter(file, ["client", "sample"])
        writer.writeheader()
        writer.writerows(rows)
    assert from_file(tmp_path / "x.csv", val=0.1, test=0.2).digest == result.digest


def test_lists_with_splits(tmp_path):
    content = {"a": {"train": [5, 3], "val": [9], "test": [1, 2]}, "b": {"train": [210]}}
    result = from_file(write_json(tmp_path / "x.json", content))
    a, b = result.clients
    assert (a.train.tolist(), a.val.tolist(), a.test.tolist()) == ([3, 5], [9], [1, 2])
    assert (b.train.tolist(), b.val.tolist(), b.test.tolist()) == ([210], [], [])
    (tmp_path / "x.csv").write_text(
        "client,sample,split\na,5,train\na,3,train\na,9,val\na,1,test\na,2,test\nb,210,train\n"
    )
    assert from_file(tmp_path / "x.csv").digest == result.digest


def test_official_tests_are_shared_and_not_trained_on(tmp_path):
    path = write_json(tmp_path / "x.json", {"a": list(range(200)), "b": list(range(190, 201))})
    with pytest.raises(ConfigError, match="sample 190 is listed for 'a' and for 'b'"):
        from_file(path)
    path = write_json(tmp_path / "x.json", {"a": list(range(200))})
    (a,) = from_file(path, test="official").clients
    assert a.test.tolist() == list(range(180, 200))
    assert len(a.train) + len(a.val) == 180
    path = write_json(tmp_path / "x.json", {"a": list(range(180, 200))})
    with pytest.raises(ConfigError, match="nothing is left to train on for client 'a'"):
        from_file(path, test="official")


def test_clients_of_several_domains(tmp_path):
    path = write_json(tmp_path / "x.json", {"both": list(range(150, 250)), "art": list(range(50))})
    result = from_file(path, test="official", held_out="sketch")
    assert [(c.id, c.domain) for c in result.clients] == [("c0-art", "art"), ("c1-both", "mixed")]
    assert len(result.clients[1].test) == 40  # those of both domains
    assert len(result.held_out["sketch"]) == 300
    with pytest.raises(ConfigError, match=r"data\.held_out: 'cartoon', but client 'both' of the file"):
        from_file(path, held_out="cartoon")


BAD = {
    "x.txt": ("", "none of .parquet, .json, .csv"),
    "gone.json": (None, "there is no file"),
    "a.json": ("{", "a.json is not a partition"),
    "b.json": ("[1]", "expected an object of clients"),
    "c.json": ('{"a": 1}', "client 'a': expected a list"),
    "d.json": ('{"a": [770]}', "'a' has 770, which is neither a number below 770"),
    "e.json": ('{"a": [-1]}', "'a' has -1"),
    "f.json": ('{"a": [true]}', "'a' has True"),
    "g.json": ('{"a": ["art/0/1.png"]}', "'a' has 'art/0/1.png'"),
    "h.json": ('{"a": [1, 1]}', "sample 1 is listed for 'a' and for 'a'"),
    "i.json": ('{"../../etc": [1]}', "'../../etc' is not a name for a client"),
    "j.json": ('{"a/b": [1]}', "'a/b' is not a name for a client"),
    "k.json": ('{"a": {"trian": [1]}}', "split 'trian'; allowed: train, val, test"),
    "l.json": ('{"a": {"test": [1]}}', "client 'a' has nothing to train on"),
    "m.json": ("{}", "lists no samples"),
    "a.csv": ("who,sample\na,1\n", "no column client"),
    "b.csv": ("client,sample\n,1\n", "'' is not a name for a client"),
    "c.csv": ("client,sample\na\n", "'a' has ''"),
    "d.csv": ("client,sample,split\na,1,train\na,2,\n", "with and without a split"),
    "e.csv": ("client,sample,split\na,1,train\nb,2,\n", "line 3 has no value in split"),
    "a.parquet": ("PAR1", "a.parquet is not a partition"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_explained_in_one_line(name, tmp_path):
    content, words = BAD[name]
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError) as error:
        from_file(tmp_path / name)
    assert words in str(error.value)
    assert str(error.value).startswith("data.partition.file: ")
    assert "\n" not in str(error.value)


@pytest.mark.slow
@pytest.mark.steady
def test_a_run_loads_the_partition_of_another(small, tmp_path):
    first = small("data.partition.clients_per_domain=2", "rounds=1", "figures=true")
    assert (first.path / "figures" / "partition.png").stat().st_size > 10_000
    assert "figures/partition.png" in (first.path / "report.md").read_text()
    saved = f"data.partition={first.path / 'partition.parquet'}"
    other = small(saved, "rounds=1", "seed=1")  # another seed, but the same clients
    assert digests_of(first.path / "partition.parquet") == digests_of(other.path / "partition.parquet")
    assert f"file: {first.path}" in (other.path / "config.yaml").read_text()


def test_limit_as_a_share():
    sizes = (200, 150, 120, 300)
    for share in (0.5, 1.0, 0.1):
        result = make_partition(*make_data(), DOMAINS, config(limit=share), 0)
        found = [len(c.train) + len(c.val) + len(c.test) for c in result.clients]
        assert found == [round(share * size) for size in sizes]
    for bad in (0.0, 1.5, -0.1):
        with pytest.raises(ConfigError, match=r"data\.limit"):
            make_partition(*make_data(), DOMAINS, config(limit=bad), 0)


def test_fedgcr_split_of_the_test_sets():
    cfg = config("imbalanced", test=0.2, val=0)
    cfg = replace(cfg, partition=replace(cfg.partition, factor=1, split_test=True))
    shared = replace(cfg, partition=replace(cfg.partition, split_test=False))
    result, reference = (make_partition(*make_data(), DOMAINS, c, 0) for c in (cfg, shared))
    assert not result.official_test
    for name, own in result.domain_tests().items():
        small, large = (client for client in result.clients if client.domain == name)
        assert not set(small.test) & set(large.test)
        assert abs(len(small.test) - len(own) / 4) <= 1  # as their parts: 1 to 3
        assert np.array_equal(own, reference.domain_tests()[name])
        assert [len(c.train) for c in (small, large)] == [
            len(c.train) for c in reference.clients if c.domain == name
        ]
    with pytest.raises(ConfigError, match=r"data\.partition\.split_test: true needs scheme=imbalanced"):
        make_partition(*make_data(), DOMAINS, replace(cfg, partition=PartitionConfig(split_test=True)), 0)
    few = replace(cfg, test=3, partition=replace(cfg.partition, factor=10))
    with pytest.raises(ConfigError, match=r"data\.partition\.split_test: the 3 test samples of domain 'art'"):
        make_partition(*make_data(), DOMAINS, few, 0)


def test_a_table_of_a_spreadsheet_begins_with_a_mark(tmp_path):
    (tmp_path / "plain.csv").write_text("client,sample\na,1\na,2\na,3\nb,4\nb,5\nb,6\n")
    (tmp_path / "marked.csv").write_bytes(b"\xef\xbb\xbf" + (tmp_path / "plain.csv").read_bytes())
    assert from_file(tmp_path / "marked.csv").digest == from_file(tmp_path / "plain.csv").digest


def test_no_client_and_no_sample_of_a_list_vanishes(tmp_path, caplog):
    with pytest.raises(DataError, match="client 'b' has no samples"):
        from_file(write_json(tmp_path / "x.json", {"a": list(range(200)), "b": []}))
    with pytest.raises(DataError, match="'a ' and 'a' differ in blanks only"):
        from_file(write_json(tmp_path / "x.json", {"a": list(range(50)), "a ": list(range(50, 100))}))
    from_file(write_json(tmp_path / "x.json", {"a": list(range(50))}), val=0.1, test=0.2)
    assert f"not used: {len(KEYS) - 50} samples of {len(KEYS)} that no client has" in caplog.text
