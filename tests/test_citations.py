"""Every citation names a key of docs/references.bib, and a place that the paper has."""

import re

import pytest

from rayfed.config.compose import choices
from rayfed.federation.method_registry import METHODS
from rayfed.tuning.base import TUNINGS
from tests.conftest import ROOT

BIB = (ROOT / "docs" / "references.bib").read_text()
KEYS = re.findall(r"^@\w+\{(\w+),", BIB, re.M)
KEY = re.compile(r"\[([a-z]+(?:19|20)\d\d\w+)[^\]]*\]")
PLACE = re.compile(r"(?:Eq\.|Algorithm|Table|[Ss]ection|Figure)s? [\dA-Z]|baseline of|released code")
KINDS = {"equations": r"Eq\.", "algorithms": "Algorithms?", "tables": "Tables?", "figures": "Figures?"}
AFTER = re.compile(r"(?<!Eq)\. |;|:")
"""Where the sentence of a citation ends."""
OWN = (
    *("digits_five_mini", "prostate_mini", "image_folder", "intents_mini", "csv", "tsv", "jsonl", "parquet"),
)
"""Data sets of no paper."""


def cited_files():
    for pattern in ("algorithms/*.py", "rayfed/**/*.py", "configs/**/*.yaml", "docs/*.md", "*.md"):
        yield from (path for path in ROOT.glob(pattern) if path.is_file())


def docstring(path):
    """The text before the code: the docstring of a module, or the comment of a YAML file."""
    text = path.read_text()
    if path.suffix == ".py":
        return " ".join(text.split('"""')[1].split())
    return " ".join(line.strip("# ") for line in text.splitlines() if line.startswith("#"))


def test_keys_are_there_once_and_every_one_is_used():
    assert len(KEYS) == len(set(KEYS)) > 30
    used = {key for path in cited_files() for key in KEY.findall(path.read_text())}
    used |= set(re.findall(r"^reference: (\w+)", "\n".join(p.read_text() for p in cited_files()), re.M))
    assert used - set(KEYS) == set()
    assert set(KEYS) - used == set()


def test_an_invented_key_is_found():
    assert KEY.findall("Gong et al. [gong2024fedgcr], Eq. 3; [1] and [C] are none") == ["gong2024fedgcr"]


SUBJECTS = [
    *(f"algorithms/{name}.py" for name in METHODS.names()),
    *(f"rayfed/tuning/{name}.py" for name in TUNINGS.names()),
    *(f"configs/data/{name}.yaml" for name in choices("data") if name not in OWN),
    *(f"configs/experiment/{name}.yaml" for name in choices("experiment") if not name.endswith("/mini")),
]
SUBJECTS = [name for name in SUBJECTS if (ROOT / name).is_file()]


@pytest.mark.parametrize("name", SUBJECTS)
def test_a_method_a_tuning_a_data_set_and_an_experiment_cite_their_source(name):
    text = docstring(ROOT / name)
    assert KEY.search(text), text
    assert name.startswith("configs/data") or PLACE.search(text), text


def numbers(text):
    """Whole numbers in `1`, `1 and 2`, `6 to 8`, `2, 3 and 5`."""
    return [int(n) for n in re.findall(r"\d+", text)]


@pytest.mark.parametrize("key", ["cheng2024fedgcr", "su2024fedra", "lu2023fedclip", "zhang2024fftgp"])
def test_places_in_the_four_papers_exist(key):
    entry = BIB[BIB.index(f"{{{key},") :].partition("\n}")[0]
    limits = {kind: numbers(re.search(rf"{kind} = \{{(\S+)\}}", entry)[1]) for kind in KINDS}
    found = 0
    for path in cited_files():
        for words in path.read_text().split(f"[{key}")[1:]:
            words = AFTER.split(" ".join(words.partition("[")[0].split()))[0]
            for kind, name in KINDS.items():
                for place in re.findall(rf"{name} (\d+(?:(?:, | and | to |-)\d+)*)", words):
                    low, high = limits[kind]
                    assert all(low <= n <= high for n in numbers(place)), (str(path), words)
                    found += 1
    assert found > 3


FILE = re.compile(r"[\w./-]+\.(?:md|yaml|py|bib|csv)\b(?!:)")
"""A name of a file in a text; `server.md:` is a key."""
PRIVATE = re.compile(r"\bspec(?:ification)?\b|\brows? \d|\([A-H]\.?\d", re.I)
"""A reference to a list that a reader does not have."""


def unreachable(path, text):
    """What a text of the repository points to and a reader cannot open."""
    folders = (ROOT, path.parent)
    names = [name for name in FILE.findall(text) if not any((at / name).exists() for at in folders)]
    return names + PRIVATE.findall(text)


def test_texts_of_configs_point_to_nothing_that_the_repository_does_not_have():
    for path in ROOT.glob("configs/**/*.yaml"):
        assert not unreachable(path, path.read_text()), path
    text = "(spec fedra.md, rows 1 and 3), (D12), docs/data.md, server.md: 1"
    found = unreachable(ROOT / "configs" / "x.yaml", text)
    assert found == ["fedra.md", "spec", "rows 1", "(D1"]
