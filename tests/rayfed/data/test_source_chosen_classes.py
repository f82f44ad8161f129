"""data.classes, with readers that cannot select classes themselves."""

import json

import numpy as np
import pandas as pd
import pytest
import torch

import rayfed
from rayfed.config.schema import load_config
from rayfed.data.load_dataset import load
from rayfed.data.source import ChosenClasses, source_of
from rayfed.errors import ConfigError


def config(*overrides):
    return load_config(["algorithm=fedavg", *overrides]).data


def test_the_samples_of_the_classes_are_those_of_the_whole_data_set(cache):
    whole = load(config(f"data.cache={cache}"), 32)
    wanted = [whole.classes[7], whole.classes[2]]
    some = load(config(f"data.cache={cache}", f"data.classes={wanted}"), 32)
    assert some.classes == tuple(wanted)
    assert some.domains == whole.domains
    rows = np.flatnonzero(np.isin(whole.labels, [7, 2]))
    assert [whole.keys[row] for row in rows] == some.keys
    assert np.array_equal(whole.images[rows], some.images)
    assert np.array_equal(np.where(whole.labels[rows] == 7, 0, 1), some.labels)
    assert np.array_equal(whole.domain[rows], some.domain)
    assert np.array_equal(whole.test[rows], some.test)


@pytest.mark.slow
@pytest.mark.steady
def test_each_choice_has_a_fingerprint_of_its_own():
    plain = source_of(config())
    assert not isinstance(plain, ChosenClasses)
    names = list(plain.scan().classes)
    choices = (3, names[:3], names[2::-1])
    prints = {plain.fingerprint()}
    for choice in choices:
        source = source_of(config(f"data.classes={choice}"))
        assert source.scan().fingerprint == source.fingerprint()
        prints.add(source.fingerprint())
    assert len(prints) == 1 + len(choices)
    assert list(source_of(config("data.classes=3")).scan().classes) == names[:3]


def test_refusals():
    with pytest.raises(ConfigError, match=r"data\.classes: 'nine_and_a_half'"):
        source_of(config("data.classes=[nine_and_a_half]")).scan()
    with pytest.raises(ConfigError, match=r"data\.classes: .* is for segmentation, which needs all"):
        source_of(config("data=prostate_mini", "data.classes=1"))


def chosen(labels, wanted, split, task=None):
    """Classes, numbers of examples, and the score of a network that is right for the classes 3 and 1."""
    right = torch.nn.Linear(4, 2, bias=False)
    right.weight = torch.nn.Parameter(10 * torch.eye(4)[[3, 1]])
    table = pd.DataFrame(np.eye(4)[NUMBERS], columns=list("abcd")).assign(
        label=labels, client=[f"c{i // 4 % 3}" for i in range(len(NUMBERS))]
    )
    given = {"data": table.assign(split=["train"] * 40 + ["test"] * 20) if split else table, "task": task}
    return rayfed.Experiment(
        method="zero_shot",
        tuning="full",
        model=right,
        rounds=1,
        cluster="inline",
        **{name: value for name, value in given.items() if value is not None},
        **{"data.classes": wanted},
    ).run(quiet=True)


NUMBERS = np.arange(60) % 4
NAMES = np.array(["z", "y", "x", "w"])


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(
    ("labels", "wanted", "task"),
    [
        (NUMBERS, ["3", "1"], None),
        (NUMBERS.astype(float), ["3", "1"], "classification"),
        (NAMES[NUMBERS], ["w", "y"], None),
        (pd.Categorical(NAMES[NUMBERS], categories=NAMES, ordered=True), ["w", "y"], None),
    ],
    ids=("numbers", "floats", "names", "Categorical"),
)
def test_classes_of_a_table_of_a_user_are_chosen_in_their_order(labels, wanted, task, split):
    run = chosen(labels, wanted, split, task)
    assert run.classes == tuple(wanted)
    assert run.accuracy == 1.0
    parts = run.clients[[name for name in ("train", "val", "test") if name in run.clients]].sum()
    assert parts.sum() == 30
    assert not split or parts.to_dict() == {"train": 20, "test": 10}


def test_what_a_reader_says_of_its_rows_is_kept_where_classes_are_chosen(tmp_path):
    rows = [{"text": f"t {i}", "label": "abc"[i % 3], "other": 1} for i in range(9)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    whole = source_of(config("data=jsonl", f"data.root={tmp_path / 'rows.jsonl'}"))
    some = ChosenClasses(source=whole, classes=["c", "a"])
    assert some.said == whole.said != ""
    assert some.place(some.scan().keys[0]) == whole.place(whole.scan().keys[0])
