"""The readers without a download pass the contract tests; readers that break them are found."""

import itertools
from dataclasses import dataclass, replace

import numpy as np
import pytest
from PIL import Image

from rayfed import testing as checks
from rayfed.data.source import Listing
from rayfed.testing import READER_CHECKS, check_reader

SERIAL = itertools.count()


@pytest.mark.parametrize("name", ["digits_five_mini", "prostate_mini"])
@pytest.mark.parametrize("check", READER_CHECKS, ids=lambda check: check.__name__)
def test_contract(check, name):
    check(name, ())


def test_a_folder_of_images(tmp_path, cache):
    for domain, label, number in itertools.product(("art", "photo"), ("cat", "dog"), range(6)):
        place = tmp_path / "pictures" / domain / label
        place.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 255, (12, 12, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(place / f"{number}.png")
    check_reader(
        "image_folder", [f"data.root={tmp_path / 'pictures'}", f"data.cache={cache}", "data.limit=12"]
    )


@dataclass(frozen=True, kw_only=True)
class Good:
    """Eight images of two classes in two domains."""

    name: str

    def fingerprint(self):
        return "good"

    def scan(self):
        labels = np.arange(8, dtype=np.int64) % 2
        domain = np.arange(8, dtype=np.int64) // 4
        keys = [f"{'ab'[d]}/{y}/{i}" for i, (d, y) in enumerate(zip(domain, labels, strict=True))]
        return Listing(
            name=self.name,
            classes=("0", "1"),
            domains=("a", "b"),
            keys=keys,
            labels=labels,
            domain=domain,
            test=np.zeros(8, dtype=np.bool_),
            fingerprint=self.fingerprint(),
        )

    def decode(self, listing, index, size):
        return np.full((size, size, 3), index, dtype=np.uint8)


class KeyTwice(Good):
    def scan(self):
        listing = super().scan()
        return replace(listing, keys=[*listing.keys[:-1], listing.keys[0]])


class OtherDomain(Good):
    def scan(self):
        listing = super().scan()
        return replace(listing, domain=1 - listing.domain)


class FloatLabels(Good):
    def scan(self):
        listing = super().scan()
        return replace(listing, labels=listing.labels.astype(float))


class LabelOutside(Good):
    def scan(self):
        listing = super().scan()
        return replace(listing, labels=listing.labels + 1)


class OtherOrder(Good):
    def scan(self):
        listing = super().scan()
        turned = np.roll(np.arange(8), next(SERIAL))
        return replace(listing, keys=[f"a/{i}" for i in turned], domain=np.zeros(8, dtype=np.int64))


class OtherFingerprint(Good):
    def fingerprint(self):
        return str(next(SERIAL))


class WrongShape(Good):
    def decode(self, listing, index, size):
        return np.zeros((size, size), dtype=np.uint8)


class DependsOnTheCall(Good):
    def decode(self, listing, index, size):
        return np.full((size, size, 3), next(SERIAL) % 256, dtype=np.uint8)


@pytest.mark.parametrize(
    ("reader", "check", "message"),
    [
        (KeyTwice, checks.lists_every_example_once, "the same key"),
        (OtherDomain, checks.lists_every_example_once, "does not begin with 'b'"),
        (FloatLabels, checks.lists_every_example_once, "labels is float64"),
        (LabelOutside, checks.lists_every_example_once, "labels holds 2"),
        (OtherOrder, checks.lists_the_same_twice, "the order"),
        (OtherFingerprint, checks.lists_the_same_twice, "fingerprint"),
        (WrongShape, checks.decodes_the_same_everywhere, "decode"),
        (DependsOnTheCall, checks.decodes_the_same_everywhere, "several threads"),
        (DependsOnTheCall, checks.prepares_the_same_twice, "the prepared data differ"),
    ],
)
def test_a_broken_reader_is_found(reader, check, message):
    with pytest.raises(AssertionError, match=message):
        check(f"{__name__}:{reader.__name__}")


def test_the_good_one_passes():
    for check in READER_CHECKS:
        check(f"{__name__}:Good")
