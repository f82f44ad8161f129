"""Roles of plays: who says what, cut into windows."""

import numpy as np
import pytest

from rayfed.data.data_config import DataConfig
from rayfed.data.load_dataset import load
from rayfed.data.readers.shakespeare import ALPHABET, Shakespeare
from rayfed.errors import ConfigError, DataError
from tests.rayfed.models.small import shared

SPEECH = "To be, or not to be:  that is\nthe question: whether 'tis nobler in the mind to suffer $lings. "


def script(roles=("First Citizen", "ROMEO"), times=3):
    blocks = [f"{role}:\n{SPEECH}" for _ in range(times) for role in roles]
    return "\n\n".join([*blocks, "BIT PART:\nAy."]) + "\n"


def config(root, **options):
    values = {"name": "s", "reader": "shakespeare", "root": str(root), "cache": str(root / "cache")}
    return DataConfig(**values | options)


@pytest.fixture
def root(tmp_path):
    (tmp_path / "input.txt").write_text(script())
    return tmp_path


def read(codes):
    return "".join(ALPHABET[code] for code in codes)


def test_the_alphabet_is_leafs():
    assert len(ALPHABET) == len(set(ALPHABET)) == 80
    assert ALPHABET.index("0") == 11
    assert ALPHABET.index("A") == 25
    assert ALPHABET.endswith("xyz}")


def test_a_window_is_followed_by_its_label(root):
    dataset = load(config(root), 80)
    assert (dataset.task, dataset.domains) == ("next_character", ("First_Citizen", "ROMEO"))
    assert dataset.images.shape[1:] == (80,)
    text = " ".join([SPEECH.strip().replace("\n", " ").replace("  ", " ").replace("$", "}")] * 3)
    for role in range(2):
        rows = np.flatnonzero(dataset.domain == role)
        assert len(rows) == len(text) - 80
        for start in (0, 1, 57, len(rows) - 1):
            assert read(dataset.images[rows[start]]) == text[start : start + 80]
            assert ALPHABET[dataset.labels[rows[start]]] == text[start + 80]
    assert dataset.classes[:2] == ("newline", "space")


def test_a_shorter_window_ends_at_the_same_place(root):
    short, full = (load(config(root), size) for size in (20, 80))
    assert np.array_equal(short.images, full.images[:, 60:])
    assert np.array_equal(short.labels, full.labels)
    with pytest.raises(ConfigError, match=r"model.size: 90 is more than the 80 characters"):
        load(config(root), 90)


def test_one_file_for_each_role_says_the_same(root, tmp_path):
    folder = tmp_path / "roles"
    folder.mkdir()
    for role in ("First_Citizen", "ROMEO"):
        (folder / f"{role}.txt").write_text("\n".join([SPEECH.strip()] * 3))
    one, many = load(config(root), 80), load(config(folder), 80)
    assert one.digest != many.digest or one.keys == many.keys
    assert np.array_equal(one.images, many.images)
    assert np.array_equal(one.labels, many.labels)


def test_chosen_roles_and_bad_ones(root):
    assert load(config(root, domains=["ROMEO"]), 80).domains == ("ROMEO",)
    with pytest.raises(ConfigError, match=r"data.domains: 'ROMEOO' does not exist; did you mean 'ROMEO'"):
        load(config(root, domains=["ROMEOO"]), 80)
    with pytest.raises(ConfigError, match=r"BIT_PART"):  # too few windows
        load(config(root, domains=["BIT_PART"]), 80)


def test_nothing_to_read(tmp_path):
    with pytest.raises(ConfigError, match=r"data.root: not set"):
        Shakespeare(name="s", root=None, domains=None).scan()
    with pytest.raises(DataError, match=r"data.root: no text in"):
        Shakespeare(name="s", root=str(tmp_path), domains=None).scan()
    (tmp_path / "input.txt").write_text("ROMEO:\nAy.\n")
    with pytest.raises(DataError, match=r"no role in .* has 64 windows"):
        Shakespeare(name="s", root=str(tmp_path), domains=None).scan()


def test_31_roles_of_the_real_text():
    folder = shared("data/shakespeare")
    listing = Shakespeare(name="s", root=str(folder), domains=None).scan()
    assert len(listing.domains) == 31
    counts = np.bincount(listing.domain)
    assert counts.min() >= 64
    assert listing.labels.max() < 80
    again = Shakespeare(name="s", root=str(folder), domains=None).scan()
    assert again.domains == listing.domains
    assert listing.fingerprint == again.fingerprint
