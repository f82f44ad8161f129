"""DomainNet's layout: lists of training and test images beside the folders."""

from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from rayfed.data.data_config import DataConfig
from rayfed.data.readers.split_files import SplitFiles
from rayfed.data.source import make_source
from rayfed.errors import ConfigError, DataError


def write(root, lists="."):
    (root / lists).mkdir(exist_ok=True)
    for domain in ("clipart", "real"):
        lines = {"train": [], "test": []}
        for label, name in enumerate(("zebra", "bird", "whale")):
            (root / domain / name).mkdir(parents=True)
            for i in range(4):
                file = f"{domain}/{name}/{domain}_{i} x.png"
                Image.new("RGB", (8, 8), (60 * label, i, 0)).save(root / file)
                lines["test" if i == 3 else "train"].append(f"{file} {label}\n")
        for half, rows in lines.items():
            (root / lists / f"{domain}_{half}.txt").write_text("".join(rows))
    (root / lists / "sketch_train.txt").write_text("")  # a domain without its second list


@pytest.mark.parametrize("lists", [".", "splits"])
def test_lists_say_what_is_tested(tmp_path, lists):
    write(tmp_path, lists)
    reader = SplitFiles(name="domainnet", root=str(tmp_path))
    listing = reader.scan()
    assert listing.domains == ("clipart", "real")
    assert listing.classes == ("zebra", "bird", "whale")  # by label
    assert np.bincount(listing.domain).tolist() == [12, 12]
    assert listing.test.sum() == 6
    assert all(key.endswith("_3 x.png") == test for key, test in zip(listing.keys, listing.test, strict=True))
    for index in (0, 13, 23):
        red = {"zebra": 0, "bird": 60, "whale": 120}[listing.classes[listing.labels[index]]]
        assert reader.decode(listing, index, 8)[0, 0, 0] == red


def test_classes_can_be_chosen(tmp_path):
    write(tmp_path)
    config = DataConfig(name="d", reader="split_files", root=str(tmp_path), classes=["zebra", "bird"])
    listing = make_source(config).scan()
    assert listing.classes == ("zebra", "bird")
    assert len(listing.labels) == 16
    with pytest.raises(ConfigError, match=r"data\.classes: 'brid' does not exist; did you mean 'bird'"):
        make_source(replace(config, classes=["brid"])).scan()
    with pytest.raises(ConfigError, match=r"data\.classes: 'bird' is listed twice"):
        make_source(replace(config, classes=["bird", "bird"])).scan()


def test_bad_lists_are_explained(tmp_path):
    with pytest.raises(DataError, match="no lists"):
        SplitFiles(name="d", root=str(tmp_path)).scan()
    write(tmp_path)
    for line, words in (
        ("real/bird.png 0", "line 1"),
        ("real/bird/x.png", "line 1"),
        ("real/bird/x.png one", "line 1"),
        ("/etc/bird/x.png 1", "not a path inside the folder"),
        ("real/../../bird/x.png 1", "not a path inside the folder"),
        ("real/bird/x.png 0", "label 0 is 'zebra', but real/bird/x.png has the same label"),
        ("real/bird/x.png 7", "one class two labels"),
    ):
        (tmp_path / "real_test.txt").write_text(line + "\n")
        with pytest.raises(DataError, match=words) as error:
            SplitFiles(name="d", root=str(tmp_path)).scan()
        assert "\n" not in str(error.value)
