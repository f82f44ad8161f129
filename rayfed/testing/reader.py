"""Contract tests that every reader of a data set must pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray

from rayfed.config.schema import load_config
from rayfed.data.preparation import prepare
from rayfed.data.shards import open_dataset
from rayfed.data.source import Decoded, Source, make_source, task_of
from rayfed.objective import CLASSIFICATION, objective
from rayfed.testing.method import leaves_messages_and_frozen_weights_alone

SIZES = (32, 20)
"""Sides in pixels, or characters of a window, for which examples are decoded."""

EXAMPLES = 16
"""How many examples are decoded, spread over the data set."""

THREADS = 4


def check_reader(name: str, overrides: Sequence[str] = ()) -> None:
    """Run every contract test on a reader, and for classification two rounds of FedAvg on its data.

    Args:
        name: File name in rayfed/data/readers/, or `package.module:NAME` of a class.
        overrides: Settings as on the command line, such as `data.root=folder`.

    Raises:
        AssertionError: The reader breaks the contract; the message says how.
        ConfigError: There is no such reader, or the data are not what it expects.
    """
    for one in READER_CHECKS:
        one(name, overrides)
    if task_of(source_of(name, overrides)) == CLASSIFICATION:
        leaves_messages_and_frozen_weights_alone("fedavg", ("data.domains=null", *_settings(name, overrides)))


def source_of(name: str, overrides: Sequence[str]) -> Source:
    """The reader with the options that the overrides give it."""
    return make_source(load_config(["algorithm=fedavg", *_settings(name, overrides)]).data)


def lists_every_example_once(name: str, overrides: Sequence[str] = ()) -> None:
    """Arrays have one length, labels and domains are within range, and keys `domain/...` are unique."""
    source = source_of(name, overrides)
    listing = source.scan()
    size = len(listing.keys)
    assert size, f"{name}: scan() found no example"
    assert len(set(listing.keys)) == size, f"{name}: two examples have the same key"
    for what, array, dtype in (
        ("labels", listing.labels, np.int64),
        ("domain", listing.domain, np.int64),
        ("test", listing.test, np.bool_),
    ):
        assert array.shape == (size,), f"{name}: {what} has shape {array.shape} for {size} keys"
        assert array.dtype == dtype, f"{name}: {what} is {array.dtype} instead of {np.dtype(dtype)}"
    _check_range(name, "domain", listing.domain, len(listing.domains))
    if task_of(source) == CLASSIFICATION:
        _check_range(name, "labels", listing.labels, len(listing.classes))
    for key, domain in zip(listing.keys, listing.domain, strict=True):
        wanted = listing.domains[domain]
        assert key.startswith(f"{wanted}/"), f"{name}: the key {key!r} does not begin with {wanted!r}/"


def lists_the_same_twice(name: str, overrides: Sequence[str] = ()) -> None:
    """Two readers of the same data list the same examples in the same order, with one fingerprint."""
    first, second = source_of(name, overrides).scan(), source_of(name, overrides).scan()
    assert list(first.keys) == list(second.keys), f"{name}: the order of the examples changes"
    assert np.array_equal(first.labels, second.labels), f"{name}: the labels change"
    assert first.fingerprint == second.fingerprint, f"{name}: the fingerprint changes although no example did"
    own = source_of(name, overrides).fingerprint()
    assert own == first.fingerprint, f"{name}: fingerprint() is not the fingerprint of scan()"


def decodes_the_same_everywhere(name: str, overrides: Sequence[str] = ()) -> None:
    """decode() gives arrays of the shape and type of the task, also when several threads call it."""
    source = source_of(name, overrides)
    listing = source.scan()
    chosen = np.unique(np.linspace(0, len(listing.keys) - 1, EXAMPLES).astype(int)).tolist()
    for size in SIZES:
        layout = objective(task_of(source)).layout(size)
        wanted = [(layout[field].shape, layout[field].base) for field in layout.names or ()]
        alone = [_arrays(source.decode(listing, index, size)) for index in chosen]
        for index, arrays in zip(chosen, alone, strict=True):
            found = [(array.shape, array.dtype) for array in arrays]
            assert found == wanted, f"{name}: decode() of {listing.keys[index]!r} gave {found}, not {wanted}"
        with ThreadPoolExecutor(THREADS) as pool:
            together = [_arrays(a) for a in pool.map(lambda i, s=size: source.decode(listing, i, s), chosen)]
        pairs = [
            pair for one, other in zip(alone, together, strict=True) for pair in zip(one, other, strict=True)
        ]
        same = all(np.array_equal(*pair) for pair in pairs)
        assert same, f"{name}: decode() gives something else when several threads call it"


def prepares_the_same_twice(name: str, overrides: Sequence[str] = ()) -> None:
    """Preparing the data set twice, in two empty caches, gives the same content."""
    digests = set()
    for _ in range(2):
        with TemporaryDirectory() as folder:
            digests.add(open_dataset(prepare(source_of(name, overrides), SIZES[0], Path(folder))).digest)
    assert len(digests) == 1, f"{name}: the prepared data differ although the data set is the same"


READER_CHECKS: tuple[Callable[[str, Sequence[str]], None], ...] = (
    lists_every_example_once,
    lists_the_same_twice,
    decodes_the_same_everywhere,
    prepares_the_same_twice,
)
"""Every contract test of a reader: functions of its name and of overrides."""


def _settings(name: str, overrides: Sequence[str]) -> tuple[str, ...]:
    return (f"data={name}", *overrides)


def _arrays(decoded: Decoded) -> tuple[NDArray[np.uint8], ...]:
    return decoded if isinstance(decoded, tuple) else (decoded,)


def _check_range(name: str, what: str, values: NDArray[np.int64], names: int) -> None:
    low, high = int(values.min()), int(values.max())
    assert low >= 0, f"{name}: {what} holds {low}"
    assert high < names, f"{name}: {what} holds {high}, and there are {names} names"
