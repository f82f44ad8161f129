import logging
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image
from pydantic import TypeAdapter

from rayfed.data.data_config import DataConfig
from rayfed.data.load_dataset import load
from rayfed.data.partition.make import make_partition
from rayfed.data.partition.manifest import describe, to_table
from rayfed.data.source import READERS, make_source
from rayfed.errors import ConfigError, DataError
from tests.rayfed.data.folders import PACS, make_folder, needs_pacs
from tests.rayfed.data.partition.toy import save_manifest

CONFIGS = Path(__file__).parents[3] / "configs" / "data"


def config(tmp_path, **options) -> DataConfig:
    options = {"reader": "image_folder", "root": str(tmp_path / "data"), **options}
    return DataConfig(name="toy", cache=str(tmp_path / "cache"), **options)


def from_yaml(name: str, **options) -> DataConfig:
    values = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
    return TypeAdapter(DataConfig).validate_python(values | options)


def test_all_domains_are_loaded_and_shared_by_configs(tmp_path):
    make_folder(tmp_path / "data")
    whole = load(config(tmp_path), 16)
    some = load(config(tmp_path, domains=["sketch"]), 16)
    assert some.path == whole.path
    assert some.domains == ("photo", "sketch")


def test_empty_class_is_found_before_decoding(tmp_path):
    root = make_folder(tmp_path / "data")
    shutil.rmtree(root / "sketch" / "dog")
    (root / "photo" / "cat" / "0.jpg").write_bytes(b"bad, but nobody looks")
    with pytest.raises(DataError, match="empty class: domain 'sketch' of 'toy' has no images of dog"):
        load(config(tmp_path), 16)
    (root / "sketch" / "dog").mkdir()
    with pytest.raises(DataError, match="empty class: domain 'sketch'"):
        load(config(tmp_path, held_out="sketch"), 16)


def test_of_many_empty_classes_five_are_named(tmp_path):
    root = make_folder(tmp_path / "data", classes=[*"abcdefgh"], count=1)
    for name in "abcdefg":
        shutil.rmtree(root / "sketch" / name)
    with pytest.raises(DataError, match="has no images of a, b, c, d, e and 2 others; add some"):
        load(config(tmp_path), 16)


def test_empty_class_in_a_domain_that_is_not_used(tmp_path):
    root = make_folder(tmp_path / "data")
    shutil.rmtree(root / "sketch" / "dog")
    assert len(load(config(tmp_path, domains=["photo"]), 16)) == 9
    with pytest.raises(DataError, match="empty class"):  # also when the shard is there already
        load(config(tmp_path), 16)


def test_class_emptied_by_skipping(tmp_path, caplog):
    root = make_folder(tmp_path / "data")
    for path in (root / "sketch" / "dog").iterdir():
        path.write_bytes(b"bad")
    with pytest.raises(DataError, match="empty class: domain 'sketch'"):
        load(config(tmp_path, on_bad_image="skip"), 16)
    with caplog.at_level(logging.WARNING):
        data = load(config(tmp_path, on_bad_image="skip", domains=["photo"]), 16)
    assert data.skipped == 3
    assert "left out of toy: 3 images that cannot be decoded (data.on_bad_image=skip)" in caplog.text


@pytest.mark.parametrize(
    ("root", "advice"),
    [
        ("above", ", but data, other; they are in {0}/above/data: set data.root={0}/above/data"),
        ("above/data/photo", "; they are in {0}/above/data: set data.root={0}/above/data"),
        ("above/other", ", but deeper; give the folder that holds them"),
    ],
)
def test_a_root_near_the_right_one_is_corrected(tmp_path, root, advice):
    make_folder(tmp_path / "above" / "data")
    make_folder(tmp_path / "above" / "other" / "deeper", domains=("day", "night"))
    given = config(tmp_path, root=str(tmp_path / root), domains=["photo", "sketch"])
    with pytest.raises(DataError) as error:
        load(given, 16)
    beginning = f"data.root: {tmp_path / root} has none of the domains photo, sketch"
    assert str(error.value) == beginning + advice.format(tmp_path)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"domains": ["photo", "sketsh"]}, ["data.domains", "did you mean 'sketch'?"]),
        ({"held_out": "fotos"}, ["data.held_out", "did you mean 'photo'?"]),
        ({"reader": "image_foldr"}, ["data.reader", "did you mean 'image_folder'?"]),
        ({"reader": "no.such.module:READER"}, ["data.reader", "no.such.module"]),
        ({"root": None}, ["data.root", "not set"]),
        ({"root": "nowhere"}, ["data.root", "does not exist"]),
        ({"val": 2.0}, ["data.val", "2.0"]),
    ],
)
def test_bad_input_is_explained_in_one_line(tmp_path, options, words):
    make_folder(tmp_path / "data")
    with pytest.raises(ConfigError) as error:
        load(config(tmp_path, **options), 16)
    assert all(word in str(error.value) for word in words), str(error.value)
    assert "\n" not in str(error.value)
    assert not list((tmp_path / "cache").glob("*.arrow"))


def test_readers_are_found_by_file_name(tmp_path):
    shipped = {"digits", "digits_five_mini", "image_folder", "split_files", "terra_incognita", "vlcs"}
    shipped |= {"prostate", "prostate_mini", "shakespeare"}
    shipped |= {"banking77", "clinc150", "csv", "gsm8k", "intents_mini", "jsonl", "medquad", "parquet", "tsv"}
    assert shipped <= set(READERS.names())
    named = make_source(config(tmp_path, reader="rayfed.data.readers.image_folder:ImageFolder"))
    assert named == make_source(config(tmp_path))


def test_import_stays_light():
    heavy = ["torch", "pyarrow", "PIL", "sklearn", "pandas"]
    code = f"import sys, rayfed.data; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_config_is_valid():
    names = sorted(path.stem for path in CONFIGS.glob("*.yaml"))
    assert {"digits_five_mini", "image_folder", "pacs"} <= set(names)
    for name in names:
        assert callable(READERS.load(from_yaml(name).reader))


def test_fractions_and_counts_keep_their_kind():
    cfg = from_yaml("image_folder", val=1, test=0.5)
    assert (type(cfg.val), type(cfg.test)) == (int, float)
    assert type(from_yaml("image_folder", val=0).val) is int


@pytest.mark.parametrize("name", ["pacs", "image_folder"])
def test_folders_must_be_given(name, tmp_path):
    with pytest.raises(ConfigError, match=r"data\.root: not set"):
        load(from_yaml(name, cache=str(tmp_path)), 16)


def test_digits_five_mini_from_config_to_table(tmp_path):
    cfg = from_yaml("digits_five_mini", cache=str(tmp_path))
    data = load(cfg, 32)
    result = make_partition(data.labels, data.domain, data.test, data.domains, cfg, seed=0)
    assert [client.domain for client in result.clients] == list(data.domains)
    assert {name: len(own) for name, own in result.domain_tests().items()} == dict.fromkeys(data.domains, 150)
    used = np.concatenate([a for c in result.clients for a in (c.train, c.val, c.test)])
    assert np.array_equal(np.sort(used), np.arange(len(data)))
    assert "5 clients in 5 domains, 10 classes" in describe(result, data)


@needs_pacs
def test_pacs_from_config_to_manifest(tmp_path):
    partition = {"scheme": "dirichlet", "clients_per_domain": 3}
    cfg = from_yaml("pacs", root=str(PACS), cache=str(tmp_path), held_out="sketch", partition=partition)
    data = load(cfg, 32)
    result = make_partition(data.labels, data.domain, data.test, data.domains, cfg, seed=0)
    assert [client.domain for client in result.clients[::3]] == ["photo", "art_painting", "cartoon"]
    assert all(data.keys[i].startswith("sketch/") for i in result.held_out["sketch"])
    assert min(len(client.train) for client in result.clients) >= 10
    save_manifest(result, tmp_path / "partition.parquet", data)
    assert to_table(result, data).num_rows == len(data)
    assert "held out: sketch" in describe(result, data)


def test_a_reader_of_a_users_own_package(tmp_path, monkeypatch):
    (tmp_path / "reader_of_a_user.py").write_text(
        "from rayfed.data.readers.image_folder import ImageFolder\n\nclass Mine(ImageFolder):\n    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    make_folder(tmp_path / "data")
    data = load(config(tmp_path, reader="reader_of_a_user:Mine"), 16)
    with Image.open(tmp_path / "data" / data.keys[-1]) as image:
        assert np.array_equal(data.images[-1], np.asarray(image.resize((16, 16), Image.Resampling.BICUBIC)))
