"""The data sets as their authors published them, and a comparison of a download with them.

Domains, classes, numbers of images and addresses; files are compared without decoding them.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from rayfed.data.source import Listing


@dataclass(frozen=True, kw_only=True)
class PublishedDataset:
    """A data set as its authors describe it.

    Attributes:
        source: Address at which it is published.
        domains: Number of images of each domain; None if it is not known.
        classes: Names of the classes, or their number.
        cells: Number of images of each class, in the order of `classes`, by domain; empty if not known.
        optional: Whether domains may be missing.
    """

    source: str
    domains: Mapping[str, int | None]
    classes: tuple[str, ...] | int
    cells: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    optional: bool = False


_PACS = PublishedDataset(
    source="the authors' project page, dali-dl.github.io/project_iccv2017.html, or DomainBed's script",
    domains={"photo": 1670, "art_painting": 2048, "cartoon": 2344, "sketch": 3929},
    classes=("dog", "elephant", "giraffe", "guitar", "horse", "house", "person"),
    cells={
        "art_painting": (379, 255, 285, 184, 201, 295, 449),
        "cartoon": (389, 457, 346, 135, 324, 288, 405),
        "photo": (189, 202, 182, 186, 199, 280, 432),
        "sketch": (772, 740, 753, 608, 816, 80, 160),
    },
)
_DOMAINNET = "the authors' project page, ai.bu.edu/M3SDA (the cleaned version, with its lists)"
_TEN = (
    "bird",
    "feather",
    "headphones",
    "ice_cream",
    "teapot",
    "tiger",
    "whale",
    "windmill",
    "wine_glass",
    "zebra",
)
_SIX = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")

PUBLISHED: Mapping[str, PublishedDataset] = {
    "pacs": _PACS,
    "pacs_official": _PACS,
    "vlcs": PublishedDataset(
        source="DomainBed's script, or JigenDG's repository for the layout of the first release",
        domains={"Caltech101": 1415, "LabelMe": 2656, "SUN09": 3282, "VOC2007": 3376},
        classes=("bird", "car", "chair", "dog", "person"),
        cells={
            "Caltech101": (237, 123, 118, 67, 870),
            "LabelMe": (80, 1209, 88, 42, 1237),
            "SUN09": (20, 932, 1036, 30, 1264),
            "VOC2007": (330, 699, 428, 420, 1499),
        },
    ),
    "office_home": PublishedDataset(
        source="the authors' project page, hemanthdv.org/officeHomeDataset.html",
        domains={"Art": 2427, "Clipart": 4365, "Product": 4439, "Real World": 4357},
        classes=65,
    ),
    "office_caltech10": PublishedDataset(
        source="the authors' project page (Gong et al., Geodesic Flow Kernel), and FedBN's repository",
        domains={"amazon": 958, "caltech": 1123, "dslr": 157, "webcam": 295},
        classes=10,
    ),
    "terra_incognita": PublishedDataset(
        source="the authors' project page, beerys.github.io/CaltechCameraTraps, and LILA BC, "
        "lila.science/datasets/caltech-camera-traps",
        domains={"location_100": 4741, "location_38": 9736, "location_43": 3970, "location_46": 5883},
        classes=(
            "bird",
            "bobcat",
            "cat",
            "coyote",
            "dog",
            "empty",
            "opossum",
            "rabbit",
            "raccoon",
            "squirrel",
        ),
    ),
    "domainnet": PublishedDataset(source=_DOMAINNET, domains=dict.fromkeys(_SIX), classes=_TEN),
    "domainnet100": PublishedDataset(source=_DOMAINNET, domains=dict.fromkeys(_SIX), classes=100),
    "domainnet345": PublishedDataset(
        source=_DOMAINNET,
        domains=dict(zip(_SIX, (48129, 51605, 72266, 172500, 172947, 69128), strict=True)),
        classes=345,
    ),
    "nico": PublishedDataset(
        source="the authors' project page, nicochallenge.com/dataset",
        domains=dict.fromkeys(("autumn", "dim", "grass", "outdoor", "rock", "water")),
        classes=60,
    ),
    "digits": PublishedDataset(
        source="MNIST yann.lecun.com/exdb/mnist, USPS the LIBSVM data page, SVHN "
        "ufldl.stanford.edu/housenumbers, MNIST-M and SynthDigits yaroslav.ganin.net; all five as prepared "
        "for FedBN: the repository med-air/FedBN",
        domains={"mnist": 70000, "usps": 9298, "synth": 488953, "mnist_m": 68002, "svhn": 99289},
        classes=tuple("0123456789"),
        optional=True,
    ),
}
"""Data sets by the name of their config, `data=<name>`."""


@dataclass(frozen=True, kw_only=True)
class DomainCounts:
    """Counts of one domain.

    Attributes:
        domain: Name of the domain.
        classes: Number of classes that have images.
        images: Number of images.
        test: Number of images of the official test split.
        published: Number of images that the authors published; None if it is not known.
    """

    domain: str
    classes: int
    images: int
    test: int
    published: int | None


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """The result of a comparison.

    Attributes:
        rows: Counts of each domain; published domains first.
        problems: Differences that make the data unusable, one line each.
        notes: Differences that do not, one line each.
    """

    rows: tuple[DomainCounts, ...]
    problems: tuple[str, ...]
    notes: tuple[str, ...]


def take_inventory(listing: Listing, published: PublishedDataset | None) -> Inventory:
    """Compare a listing with the published counts.

    Args:
        listing: The samples that a reader finds.
        published: The data set as published; None only checks that every domain has every class.
    """
    counts = np.zeros((len(listing.domains), len(listing.classes)), dtype=np.int64)
    np.add.at(counts, (listing.domain, listing.labels), 1)
    tests = np.bincount(listing.domain[listing.test], minlength=len(listing.domains))
    expected = dict(published.domains) if published else dict.fromkeys(listing.domains)
    here = [name for name in expected if name in listing.domains]
    extra = [name for name in listing.domains if name not in expected]
    rows = []
    for name in here + extra:
        place = listing.domains.index(name)
        rows.append(
            DomainCounts(
                domain=name,
                classes=int((counts[place] > 0).sum()),
                images=int(counts[place].sum()),
                test=int(tests[place]),
                published=expected.get(name),
            )
        )
    by_domain = {name: counts[listing.domains.index(name)].tolist() for name in here}
    cells = {name: dict(zip(listing.classes, each, strict=True)) for name, each in by_domain.items()}
    absent = [_missing_domain(name, extra) for name in expected if name not in here]
    problems = [*_class_problems(cells, published), *_number_of_classes(listing, published)]
    notes = [f"folder {name!r} is not a domain of this data set and is ignored" for name in extra]
    notes += [*_count_notes(rows), *_cell_notes(cells, published)]
    if published and published.optional and here:
        notes = absent + notes
    else:
        problems = absent + problems
    return Inventory(rows=tuple(rows), problems=tuple(problems), notes=tuple(notes))


def _missing_domain(name: str, extra: Collection[str]) -> str:
    near = difflib.get_close_matches(name.lower(), [other.lower() for other in extra], n=1, cutoff=0.5)
    similar = next((other for other in extra if near and other.lower() == near[0]), None)
    hint = f"; {similar!r} is there: rename it to {name!r}" if similar else ""
    return f"domain {name!r} is missing{hint}"


def _class_problems(cells: dict[str, dict[str, int]], published: PublishedDataset | None) -> Iterator[str]:
    """One line for each class folder that is missing or unknown, domain by domain."""
    named = published.classes if published and not isinstance(published.classes, int) else None
    present = {name for counts in cells.values() for name, count in counts.items() if count}
    wanted = named or sorted(present)
    for domain, counts in cells.items():
        unknown = [name for name, count in counts.items() if count and name not in wanted]
        for name in wanted:
            if not counts.get(name):
                near = difflib.get_close_matches(name, unknown, n=1)
                hint = f"; {near[0]!r} is there: rename it to {name!r}" if near else ""
                yield f"class {domain}/{name} is missing{hint}"
        for name in unknown:
            if not difflib.get_close_matches(name, [w for w in wanted if not counts.get(w)], n=1):
                yield f"class {domain}/{name} is not a class of this data set; remove it"


def _number_of_classes(listing: Listing, published: PublishedDataset | None) -> Iterator[str]:
    if published and isinstance(published.classes, int) and len(listing.classes) != published.classes:
        yield f"{len(listing.classes)} classes, {published.classes} published"


def _count_notes(rows: list[DomainCounts]) -> Iterator[str]:
    known = [row for row in rows if row.published is not None]
    for row in known:
        if row.images > (row.published or 0):
            yield f"{row.domain} has {row.images:,} images, more than the {row.published:,} published"
    total = sum(row.images for row in known)
    everything = sum(row.published or 0 for row in known)
    if known and total < everything:
        yield f"sample: {total:,} of {everything:,} images"


def _cell_notes(cells: dict[str, dict[str, int]], published: PublishedDataset | None) -> Iterator[str]:
    """One line for each class with more images than were published, e.g. because of copies."""
    if published is None or isinstance(published.classes, int):
        return
    for domain, known in published.cells.items():
        for name, count in zip(published.classes, known, strict=True):
            if (present := cells.get(domain, {}).get(name, 0)) > count:
                yield f"class {domain}/{name} has {present:,} images, more than the {count:,} published"
