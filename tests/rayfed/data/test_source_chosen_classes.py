"""data.classes, with readers that cannot select classes themselves."""

import numpy as np
import pytest

from rayfed.config.schema import load_config
from rayfed.data import load
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
