from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest

from rayfed.data.partition.manifest import client_rows, describe, numbered_in_words
from rayfed.data.text import flaw_bits
from tests.rayfed.data.partition.toy import (
    CLASSES,
    DOMAINS,
    as_dataset,
    config,
    digests_of,
    make_data,
    part,
    save_manifest,
)


@pytest.mark.parametrize("cfg", [config(clients=2), config("dirichlet", 3, test="official", held_out="art")])
def test_manifest(cfg, tmp_path):
    data = make_data()
    result, dataset = part(cfg), as_dataset(make_data())
    path = tmp_path / "partition.parquet"
    save_manifest(result, path, dataset)
    assert list(tmp_path.iterdir()) == [path]
    assert digests_of(path) == {"partition": result.digest, "data": "0" * 64, "classes": list(CLASSES)}
    rows = pq.read_table(path).to_pylist()
    assert set(rows[0]) == {"key", "index", "label", "domain", "client", "split"}
    assert len({row["index"] for row in rows}) == len(rows) == len(data[0])
    for row in rows:
        assert row["key"] == dataset.keys[row["index"]]
        assert row["label"] == data[0][row["index"]]
        assert row["domain"] == DOMAINS[data[1][row["index"]]]
    for client in result.clients:
        for split in ("train", "val", "test"):
            if split == "test" and result.official_test:
                continue
            mine = [row["index"] for row in rows if (row["client"], row["split"]) == (client.id, split)]
            assert mine == getattr(client, split).tolist()
    if result.official_test:
        nobodys = [(row["client"], row["split"]) for row in rows if row["split"] in ("test", "held_out")]
        assert set(nobodys) == {("", "test"), ("", "held_out")}


@pytest.mark.parametrize(("flaw", "begin"), [("answer", "warning: cut"), ("prompt", "cut")])
def test_texts_that_are_used_and_cut_are_counted(flaw, begin):
    data = as_dataset(make_data())
    result = part(config(domains=["art"]))
    bits = np.zeros(len(data), np.uint8)
    bits[result.clients[0].train[:2]] = flaw_bits([flaw])
    bits[data.domain != 0] = flaw_bits(["answer"])
    used = sum(len(rows) for _, _, rows in result.pieces())
    last = describe(result, replace(data, flaws=bits)).splitlines()[-1]
    part_of = "the answer" if flaw == "answer" else "a part of the prompt"
    assert last.startswith(f"{begin} at model.size=")
    assert f"tokens, of {used} texts: {part_of} of 2 ({2 / used:.0%}".replace("%", " %)") in last


@pytest.mark.parametrize(
    ("flaw", "words"),
    [("empty", "2 of {} texts have an empty answer"), ("endless", "of 2 of {} texts has no eos_token")],
)
def test_answers_without_content_or_end_are_warned_of(flaw, words):
    data = as_dataset(make_data())
    result = part(config(domains=["art"]))
    bits = np.zeros(len(data), np.uint8)
    bits[result.clients[0].train[:2]] = flaw_bits([flaw])
    used = sum(len(rows) for _, _, rows in result.pieces())
    last = describe(result, replace(data, flaws=bits)).splitlines()[-1]
    assert last.startswith("warning: ")
    assert words.format(used) in last


def test_held_out_classes_that_no_client_has_are_warned_of():
    data = make_data(sizes=(60,) * 4)
    labels, domain, _ = data
    labels[:] = np.where(domain == 0, labels % 2, 1 + labels % 2)
    sentence = f"warning: no client has samples of 1 of the 2 classes of {DOMAINS[0]}; a"
    assert sentence in describe(part(config(held_out=DOMAINS[0]), data), as_dataset(data))
    assert "warning" not in describe(part(config(held_out=DOMAINS[1]), data), as_dataset(data))


def test_table_and_description():
    data = make_data(sizes=(4, 150, 120, 300), num_classes=2)
    result = part(config(clients=[1, 8, 8, 8], held_out=None, val=1, test=1), data)
    rows = client_rows(result.clients, data[0], CLASSES)
    assert len(rows) == 25
    counts = {key: rows[0][key] for key in ("client", "domain", "train", "val", "test")}
    assert counts == {"client": "c00-art", "domain": "art", "train": 2, "val": 1, "test": 1}
    mine = data[0][result.clients[0].train]
    assert rows[0]["classes"] == len(set(mine))
    assert rows[0]["top"] == f"{CLASSES[np.bincount(mine).argmax()]} {np.bincount(mine).max() / 2:.0%}"
    text = describe(result, as_dataset(data))
    lines = text.splitlines()
    assert lines[0].split() == ["client", "domain", "train", "val", "test", "classes", "top"]
    assert len(lines) == 1 + 20 + 1 + 2
    assert lines[21] == "... and 5 more clients"
    assert lines[22] == "toy: 25 clients in 4 domains, 7 classes; 524 train, 25 val, 25 test"
    assert lines[1].index(" art ") == lines[0].index(" domain ")
    sizes = {"blocks": {row["client"]: 3 + i % 2 for i, row in enumerate(rows)}, "rank": {}}
    more = [line.split() for line in describe(result, as_dataset(data), None, sizes).splitlines()]
    assert more[0][-1] == "blocks"  # rank is the same for all
    assert [line[-1] for line in more[1:4]] == ["3", "4", "3"]
    narrow = describe(result, as_dataset(data), 30).splitlines()
    assert max(map(len, narrow)) <= 30
    blocks = sum(line.startswith("client ") for line in narrow)
    assert blocks > 1
    again = [line.split()[0] for line in lines[:21]] * (blocks - 1)  # the first column of each further block
    assert sorted(" ".join(narrow).split()) == sorted([*text.split(), *again])
    held = describe(part(config(held_out="art", pooled=True, test="official")), as_dataset(make_data()))
    assert "held out: art (200)" in held
    assert "(official, shared by the clients of a domain)" in held
    one = describe(
        part(config(clients=1, held_out=None, test=0.2, scheme="imbalanced")), as_dataset(make_data())
    )
    assert "(shared by the clients of a domain)" in one, "drawn here, not released by the authors"
    alone = describe(part(config(clients=1, domains=["art"])), as_dataset(make_data()))
    assert "toy: 1 client in 1 domain, 7 classes" in alone
    assert "pooled: one client trains on the train and val samples of all" in held


@pytest.mark.parametrize(
    ("classes", "own", "words"),
    [
        (("1", "2", "5"), False, "outputs 0 to 2 are the classes 1, 2, 5"),
        (("b", "a"), True, "outputs 0 to 1 are the classes b, a"),
        (("0", "1", "2"), True, ""),
        (("cat", "dog"), False, ""),
    ],
)
def test_classes_whose_number_is_not_their_name_are_told(classes, own, words):
    dataset = SimpleNamespace(classes=classes, own=own, task="classification")
    assert numbered_in_words(dataset) == words
