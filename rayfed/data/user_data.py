"""Examples that a user hands over, arrays, Datasets and tables, as a reader of a data set.

Accepted are a dict by client, a pair (inputs, targets) or a Dataset of torch without clients, and a table of
pandas, Arrow or the library `datasets`. A client has a pair, a Dataset, or a dict of these with `train`,
`val` and `test`.

Inputs have any shape, the same for all examples, and are stored as they are, floats of any size as float32
(`rayfed.data.user_values`). What the targets are follows from them, as `kind` says. Columns of tables are
read by `rayfed.data.user_tables`.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from rayfed.data.data_config import Resize
from rayfed.data.listing import (
    ONE_DOMAIN,
    Listing,
    classes_of,
    in_order,
    is_missing,
    name_in_text,
    named_in_one_way,
    plainly,
)
from rayfed.data.user_tables import Columns, Order, inputs_of, order_of, read_columns, table_of
from rayfed.data.user_values import Array, is_arrow, numbers_or_images, stored, texts_of_bytes, unpacked
from rayfed.errors import DataError, one_line, place_of, shown, unknown
from rayfed.objective import CLASSIFICATION, MULTILABEL, REGRESSION, SEGMENTATION

log = logging.getLogger(__name__)

SPLITS = ("train", "val", "test")
"""Names of the splits that a user may give; their numbers in a listing are their places, plus one."""

DOMAIN = "domain"
"""Key next to the splits of a client that names its domain."""

EVERYTHING = ""
"""The client of examples without a client."""

PART = 64_000_000
"""Bytes that are hashed or written at once."""

MOST_CLASSES = 1_000_000
"""Classes that there can be; a larger number is the name of something, no output of a network."""

FULL = 255
"""Value of a mask that image editors write for an object, and some data sets for pixels without a class."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Piece:
    """The examples of one split of one client.

    Attributes:
        client: Name of the client; empty: there are no clients.
        split: `train`, `val` or `test`; empty: a fraction of them becomes each.
        inputs: Shape (N, ...), or N paths or bytes of image files.
        targets: Shape (N, ...).
        domain: Name of the domain.
        place: What names it in messages, such as `data['hospital'] (a Dataset)`.
        order: The order of the classes in the source; None: it has none.
    """

    client: str
    split: str
    inputs: Array
    targets: Array
    domain: str = ONE_DOMAIN
    place: str = "data"
    order: Order | None = None


@dataclass(frozen=True, eq=False)
class OwnData:
    """Reads what a user handed over.

    Attributes:
        pieces: The examples, in their order.
        name: Name of the data set, for reports and the cached file.
        resize: As of `rayfed.data.image_file.decode_image`.
        columns: The columns of a table that are inputs and targets; None: no table.
    """

    pieces: tuple[Piece, ...]
    name: str = "own_data"
    resize: Resize = "squash"
    columns: Columns | None = field(default=None, kw_only=True)

    sparse: ClassVar[bool] = True

    @cached_property
    def task(self) -> str:
        """Kind of the targets: `classification`, `segmentation`, `regression` or `multilabel`."""
        return kind([piece.targets for piece in self.pieces], self.pieces[0].inputs)

    @property
    def said(self) -> str:
        """The columns that were found in a table, for the header of a run; empty: no table."""
        return "" if self.columns is None else self.columns.said

    def of_task(self, task: str | None) -> OwnData:
        """The same examples with targets of the type that a task needs.

        Whole floats (0.0, 1.0) become classes, and whole numbers numbers to be regressed.

        Args:
            task: The task that was given; None: it follows from the targets.

        Raises:
            DataError: The targets cannot be those of the task; names the first one.
        """
        first = self.pieces[0].targets
        if task in (CLASSIFICATION, SEGMENTATION) and first.dtype.kind == "f":
            return replace(self, pieces=tuple(_with_classes(piece) for piece in self.pieces))
        if task == REGRESSION and first.dtype.kind in "US":
            raise DataError(
                f"{self.pieces[0].place}: the targets are texts, such as {shown(str(first[0]))}, and "
                "task='regression' needs numbers; leave the task out for classes"
            )
        if task == REGRESSION and self.task == CLASSIFICATION:
            floats = (replace(p, targets=p.targets.astype(np.float32), order=None) for p in self.pieces)
            return replace(self, pieces=tuple(floats))
        return self

    def of_classes(self, names: Sequence[str]) -> OwnData:
        """The examples of some classes. Args: names: of the classes, in the order of their outputs."""
        labels, classes = self._labels
        order, pieces, first = Order(tuple(names), matters=True), [], 0
        for piece in self.pieces:
            own = np.array([classes[label] for label in labels[first : first + len(piece.targets)]])
            first += len(own)
            if (kept := np.isin(own, names)).any():
                pieces.append(replace(piece, inputs=piece.inputs[kept], targets=own[kept], order=order))
        return replace(self, pieces=tuple(pieces))

    def check_task(self, task: str | None) -> None:
        """Check that the values of the targets can be what they were taken for.

        Args:
            task: The task that was given; None: it followed from the targets.

        Raises:
            DataError: No task was given, and whole numbers in rows, shape (N, K), are not all 0 or 1; or the
                targets of `multilabel` are not; or masks leave out most of the classes up to 255.
        """
        first = self.pieces[0].targets
        if self.task == SEGMENTATION and task in (None, SEGMENTATION):
            self._check_masks()
        in_rows = first.ndim == 2 and first.dtype.kind in "iu"
        if first.dtype.kind not in "iuf" or not (task == MULTILABEL or (task is None and in_rows)):
            return
        wrong = next((piece for piece in self.pieces if not _is_zeros_and_ones(piece.targets)), None)
        if wrong is None:
            return
        values, count = wrong.targets, len(wrong.targets)
        if values.ndim == 1:
            advice = "for classes leave out task='multilabel'"
        elif values.shape[1:] == (1,):
            advice = f"for classes give shape ({count},), e.g. y.ravel()"
        else:
            advice = (
                f"several labels are 0 or 1, classes have shape ({count},), other numbers task='regression'"
            )
        raise DataError(
            f"{wrong.place}: targets have shape {values.shape} with values {values.min():g} to "
            f"{values.max():g}; {advice}"
        )

    def _check_masks(self) -> None:
        """Raise DataError for masks in which 255 stands for an object, or for pixels without a class."""
        values = np.unique(np.concatenate([np.unique(piece.targets) for piece in self.pieces]))
        if int(values[-1]) != FULL or len(values) > FULL // 2:
            return
        place = next(piece.place for piece in self.pieces if int(piece.targets.max()) == FULL)
        if values.tolist() == [0, FULL]:
            raise DataError(f"{place}: masks hold 0 and 255; classes are 0 and 1: give masks // 255")
        raise DataError(
            f"{place}: masks hold {len(values)} values up to 255; classes are 0, 1, ...: number them so, and "
            "give pixels without a class one of their own, as there is no label that is ignored"
        )

    @property
    def has_clients(self) -> bool:
        """Whether every example belongs to a client."""
        return any(piece.client != EVERYTHING for piece in self.pieces)

    @property
    def has_splits(self) -> bool:
        """Whether the splits are given."""
        return any(piece.split for piece in self.pieces)

    @property
    def section(self) -> dict[str, Any]:
        """Keys of the config section `data` that these examples have by default."""
        if self.has_clients:
            return {"partition": {"scheme": "natural", "min_samples": 1}}
        return {"partition": {"scheme": "by_domain"}, **({"test": "official"} if self.has_splits else {})}

    @property
    def stores_images(self) -> bool:
        """Whether inputs are images that must be decoded, in the size of the model."""
        return self.pieces[0].inputs.dtype == object

    def layout(self, size: int) -> np.dtype[Any]:
        """Data type of a stored example. Args: size: side of images that are decoded, in pixels."""
        first = self.pieces[0]
        shape = (size, size, 3) if self.stores_images else first.inputs.shape[1:]
        parts = [("input", "u1" if self.stores_images else first.inputs.dtype.str, shape)]
        if self.task != CLASSIFICATION:
            parts.append(("target", first.targets.dtype.str, first.targets.shape[1:]))
        return np.dtype(parts)

    def fingerprint(self) -> str:
        return self._digest

    @cached_property
    def _digest(self) -> str:
        out = hashlib.sha256(f"own/1/{self.task}".encode())
        if self._order is not None:
            out.update(repr(self._order).encode())
        for piece in self.pieces:
            own = (piece.client, piece.split, piece.domain)
            for part in (piece.inputs, piece.targets):
                out.update(repr((own, part.dtype.str, part.shape)).encode())
                for value in _contents(part):
                    out.update(value)
        return out.hexdigest()

    def scan(self) -> Listing:
        sizes = [len(piece.targets) for piece in self.pieces]
        domains = list(dict.fromkeys(piece.domain for piece in self.pieces))
        labels, classes = self._labels
        split = np.repeat([1 + SPLITS.index(p.split) if p.split else 0 for p in self.pieces], sizes)
        keys = [
            f"{p.domain}/{p.client or 'all'}/{n}/{i}"
            for n, p in enumerate(self.pieces)
            for i in range(sizes[n])
        ]
        return Listing(
            name=self.name,
            classes=tuple(classes),
            domains=tuple(domains),
            keys=keys,
            labels=labels,
            domain=np.repeat([domains.index(piece.domain) for piece in self.pieces], sizes).astype(np.int64),
            test=split == 1 + SPLITS.index("test"),
            fingerprint=self.fingerprint(),
            owners=[p.client for p, n in zip(self.pieces, sizes, strict=True) for _ in range(n)]
            if self.has_clients
            else None,
            splits=split.astype(np.uint8) if self.has_splits else None,
        )

    @cached_property
    def _order(self) -> tuple[str, ...] | None:
        """The classes in the order of the source; None: it has none.

        Where clients have different ones that mean nothing, all their classes in the order of the alphabet.

        Raises:
            DataError: Clients have ordered classes in different orders.
        """
        orders = {piece.order: piece for piece in self.pieces}
        if len(orders) > 1:
            first, other = list(orders)[:2]
            if any(order is not None and order.matters for order in orders):
                raise DataError(
                    f"{orders[other].place}: the classes are {other or 'texts'}, those of "
                    f"{orders[first].place} {first or 'texts'}; give all clients the same classes in one "
                    "order"
                )
            named = {name for order in orders if order is not None for name in order.names}
            return tuple(sorted(named.union(*self._texts_of(None)), key=in_order))
        only = next(iter(orders))
        return None if only is None else only.names

    def _texts_of(self, order: Order | None) -> Iterator[set[str]]:
        """The labels of each piece whose classes have this order, as text."""
        for piece in self.pieces:
            if piece.order == order:
                yield set(map(str, piece.targets.tolist()))

    @cached_property
    def _labels(self) -> tuple[NDArray[np.int64], list[str]]:
        """The class of each example and the names of the classes; of other tasks those of the outputs."""
        total = sum(len(piece.targets) for piece in self.pieces)
        if self.task == CLASSIFICATION:
            parts = [piece.targets for piece in self.pieces]
            if parts[0].dtype.kind in "US":
                every = [str(label) for part in parts for label in part.tolist()]
                return classes_of(every, self._place_of_target, self._order)
            labels = np.concatenate(parts).astype(np.int64)
            return labels, [str(label) for label in range(int(labels.max()) + 1)]
        if self.task == SEGMENTATION:
            count = 1 + max(int(piece.targets.max()) for piece in self.pieces)
        else:
            count = math.prod(self.pieces[0].targets.shape[1:])
        return np.zeros(total, dtype=np.int64), [str(number) for number in range(count)]

    def rows(self, size: int) -> Iterator[Array]:
        """All stored examples in order, in parts: structured arrays with the layout; not of image files."""
        layout = self.layout(size)
        most = max(1, PART // max(1, layout.itemsize))
        for piece in self.pieces:
            for start in range(0, len(piece.targets), most):
                part = slice(start, start + most)
                out = np.empty(len(piece.targets[part]), layout)
                out["input"] = piece.inputs[part]
                if "target" in (layout.names or ()):
                    out["target"] = piece.targets[part]
                yield out

    def decode(self, listing: Listing, index: int, size: int) -> Any:
        piece, row = self._piece(index)
        value = piece.inputs[row]
        image = _image(value, size, self.resize, listing.keys[index]) if self.stores_images else value
        return image if self.task == CLASSIFICATION else (image, piece.targets[row])

    def _place_of_target(self, index: int) -> str:
        """Words for an example, for messages."""
        piece, row = self._piece(index)
        return f"{piece.place}: the target of example {row}"

    def _piece(self, index: int) -> tuple[Piece, int]:
        place = int(np.searchsorted(self._ends, index, side="right"))
        return self.pieces[place], index - int(self._ends[place - 1] if place else 0)

    @cached_property
    def _ends(self) -> NDArray[np.int64]:
        return np.cumsum([len(piece.targets) for piece in self.pieces])


def kind(targets: Sequence[Array], inputs: Array) -> str:
    """The task of targets: what they are is visible in their type and shape.

    Texts, whole numbers, and true or false, shape (N,), are classes; whole numbers in a map with the sides of
    the inputs are masks; true or false, or whole numbers in {0, 1}, shape (N, K), are K labels; other numbers
    are regressed, which `OwnData.check_task` refuses for whole numbers unless the task was given.
    """
    first = targets[0]
    if first.dtype.kind in "US" or (first.ndim == 1 and first.dtype.kind in "iub"):
        return CLASSIFICATION
    if first.dtype.kind == "f":
        return REGRESSION
    if first.ndim >= 3:
        return SEGMENTATION
    return MULTILABEL if all(map(_is_zeros_and_ones, targets)) else REGRESSION


def _is_zeros_and_ones(values: Array) -> bool:
    """Whether every value is 0 or 1."""
    return values.dtype.kind == "b" or bool(((values == 0) | (values == 1)).all())


def own_data(
    value: Any, columns: Mapping[str, Any] | None = None, name: str = "own_data", task: str | None = None
) -> OwnData:
    """Make a reader of what a user handed over, with every check that needs no network.

    Args:
        value: The examples, in one of the forms above.
        columns: Names of the columns of a table: `client`, `input`, `target`, `split` and `domain`.
        name: Name of the data set.
        task: The task, where it is known already; None: it follows from the targets.

    Raises:
        DataError: The value has no such form, a client has no examples, or examples have different shapes or
            types, or hold NaN; one line that names the client.
    """
    found = None
    if (table := table_of(value)) is not None:
        found = read_columns(table, columns or {}, task)
        pieces = tuple(_of_columns(found))
    elif columns:
        raise DataError(
            f"columns: {shown(columns)} name columns of a table, and the data are none; leave them out"
        )
    else:
        pieces = tuple(_pieces(value))
    if not pieces:
        raise DataError("data: the dict has no clients; give {client: (inputs, targets)}")
    _check_alike(pieces)
    pieces = _in_one_type(pieces)
    for piece in pieces:
        _check_values(piece, task)
    own = OwnData(pieces, name, columns=found)
    if own.task == CLASSIFICATION and task != REGRESSION:
        _ = own._labels  # every label is looked at
    return own


def is_own(value: Any) -> bool:
    """Whether a value has one of the forms, or makes one: not a name and not a section of the config."""
    if isinstance(value, Mapping):
        if any(map(_has_array, value.values())):
            return "name" not in value or not isinstance(value["name"], str)
        return (
            bool(value)
            and not all(isinstance(each, str | int | float | list | None) for each in value.values())
            and ("name" not in value)
            and not _is_section(value)
        )
    return not isinstance(value, str)


def _has_array(value: Any) -> bool:
    """Whether a value is or has an array, which no value of the config has."""
    if isinstance(value, list | tuple):
        return any(map(_has_array, value[:2]))
    return hasattr(value, "shape") or is_arrow(value) or hasattr(value, "to_pandas")


def _is_section(value: Mapping[Any, Any]) -> bool:
    """Whether a dict has keys of the config section `data`."""
    from rayfed.data.data_config import DataConfig

    return all(isinstance(key, str) and key in DataConfig.__dataclass_fields__ for key in value)


def _pieces(value: Any) -> Iterator[Piece]:
    if isinstance(value, Mapping) and set(value) <= set(SPLITS):
        for split, part in value.items():
            yield from _of_client(EVERYTHING, part, str(split), f"data[{split!r}]")
    elif isinstance(value, Mapping):
        if split := next((key for key in value if key in SPLITS), None):
            other = next(key for key in value if key not in SPLITS)
            raise DataError(
                f"data: the keys {split!r} and {other!r} are a split and something else; splits are "
                f"{', '.join(SPLITS)}, and clients have other names"
            )
        yield from _by_client(value)
    else:
        yield from _of_client(EVERYTHING, value, "", "data")


def _of_columns(table: Columns) -> Iterator[Piece]:
    """The pieces of a table, in the order of its clients, splits and domains."""
    for group in table.groups(SPLITS):
        client = EVERYTHING if group.client is None else group.client
        yield Piece(
            client=client,
            split=group.split or "",
            inputs=table.inputs[group.rows],
            targets=table.targets[group.rows],
            domain=ONE_DOMAIN if group.domain is None else group.domain,
            place=f"data: the rows of client {client!r}" if client else "data",
            order=table.order,
        )


def _by_client(value: Mapping[Any, Any]) -> Iterator[Piece]:
    """The pieces of a dict by client."""
    _check_clients(value)
    named = [part[DOMAIN] for part in value.values() if isinstance(part, Mapping) and DOMAIN in part]
    named_in_one_way([each for each in named if not is_missing(each)], DOMAIN, DOMAIN)
    for client, part in value.items():
        place = f"data[{client!r}]"
        if isinstance(part, Mapping):
            wrong = [key for key in part if key not in (*SPLITS, DOMAIN)]
            if wrong:
                raise DataError(unknown(place, str(wrong[0]), (*SPLITS, DOMAIN)))
            if "train" not in part:
                raise DataError(f"{place}: there is no 'train' among {', '.join(map(str, part))}")
            if DOMAIN in part and is_missing(part[DOMAIN]):
                raise DataError(
                    f"{place}: {part[DOMAIN]!r} names no domain; leave 'domain' out, or give a name"
                )
            domain = name_in_text(part.get(DOMAIN, ONE_DOMAIN))
            for split in (key for key in part if key != DOMAIN):
                pieces = _of_client(name_in_text(client), part[split], str(split), f"{place}[{split!r}]")
                yield from (replace(piece, domain=domain) for piece in pieces)
        else:
            yield from _of_client(name_in_text(client), part, "", place)


def _check_clients(clients: Iterable[Any]) -> None:
    """Raise DataError where a client has no name, or two have one, such as 1 and "1"."""
    names: dict[str, Any] = {}
    for client in clients:
        if is_missing(client):
            raise DataError(f"data[{client!r}]: {client!r} names no client; give it a name")
        known = names.setdefault(plainly(name_in_text(client)), client)
        if known is not client:
            raise DataError(
                f"data[{client!r}]: the client {known!r} has the same name; give each client one of its own"
            )


def _of_client(client: str, part: Any, split: str, place: str) -> Iterator[Piece]:
    order = None
    if table_of(part) is not None:
        raise DataError(
            f"{place}: a table in a dict; give one table of all, with a column of clients or splits, such as "
            "pandas.concat(tables, names=['client']).reset_index()"
        )
    if isinstance(part, tuple | list) and len(part) == 2 and all(map(_is_array, part)):
        inputs, targets = inputs_of(part[0], f"{place}[0]"), _targets(part[1], f"{place}[1]")
        order = order_of(part[1])
    elif (
        hasattr(part, "__getitem__")
        and hasattr(part, "__len__")
        and not isinstance(part, str | Mapping | tuple)
    ):
        inputs, targets = _of_dataset(part, place)
    elif hasattr(part, "__iter__") and not isinstance(part, str | tuple | list | Mapping):
        raise DataError(
            f"{place}: {in_one_line(part)} can only be iterated, but a client's examples are drawn by "
            "number; "
            "give a "
            f"Dataset with __len__ and __getitem__, or arrays"
        )
    else:
        raise DataError(
            f"{place}: {in_one_line(part)} is neither a pair (inputs, targets) of arrays nor a Dataset "
            "of torch"
        )
    if len(inputs) != len(targets):
        raise DataError(
            f"{place}: there are {len(inputs)} inputs and {len(targets)} targets; give one target each"
        )
    if not len(inputs):
        raise DataError(f"{place}: the client has no examples; leave it out, or give it one or more")
    yield Piece(client=client, split=split, inputs=inputs, targets=targets, place=place, order=order)


def in_one_line(value: Any) -> str:
    """A value as a message repeats it; arrays have lines."""
    return " ".join(shown(value).split())


def _is_array(value: Any) -> bool:
    """Whether a value can be inputs or targets: an array, or a sequence of values that is not empty."""
    if isinstance(value, list | tuple | range) or is_arrow(value):
        return bool(len(value))
    return getattr(value, "is_nested", False) or hasattr(value, "shape")


def _targets(value: Any, place: str) -> Array:
    """Targets of a user as they are stored: numbers, shape (N, ...), or texts, shape (N,).

    Raises:
        DataError: They are something else, or one is missing.
    """
    targets = stored(value, place)
    targets = texts_of_bytes(targets, place)
    if targets.dtype == object:
        raise DataError(f"{place}: the targets are {type(targets.flat[0]).__name__}; give numbers or texts")
    if targets.dtype.kind == "U" and targets.ndim > 1:
        raise DataError(
            f"{place}: the targets are texts of shape {targets.shape}; give one text for each example, shape "
            f"({len(targets)},), or for several labels zeros and ones, shape (N, K)"
        )
    return targets


def _of_dataset(dataset: Any, place: str) -> tuple[Array, Array]:
    """All items of a Dataset, read once, with its own transform."""
    inputs: list[Any] = []
    targets: list[Any] = []
    for index in range(len(dataset)):
        try:
            item = dataset[index]
        except Exception as err:
            what = f"{type(err).__name__}: {one_line(err)}{place_of(err)}"
            raise DataError(f"{place}: item {index} of {type(dataset).__name__} raised {what}") from err
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise DataError(
                f"{place}: item {index} of {type(dataset).__name__} is {shown(type(item).__name__)}, no "
                "pair (input, "
                f"target)"
            )
        for values, each in zip((inputs, targets), item, strict=True):
            values.append(unpacked(each, f"{place} ({type(dataset).__name__})", index))
        shapes = np.shape(inputs[-1]), np.shape(targets[-1])
        first = np.shape(inputs[0]), np.shape(targets[0])
        if shapes != first:
            raise DataError(
                f"{place}: item {index} of {type(dataset).__name__} has the shapes {shapes[0]} and "
                f"{shapes[1]}, item 0 {first[0]} and {first[1]}; pad or resize them to one shape"
            )
    if not inputs:
        raise DataError(f"{place}: the client has no examples; leave it out, or give it one or more")
    _warn_if_random(dataset, inputs, place)
    return numbers_or_images(inputs, place), _targets(targets, place)


READ_TWICE = 8
"""Examples of a Dataset that are read again, to see whether it changes them at random."""

_warned: set[str] = set()
"""Classes of Datasets of which the user was told that they change examples at random."""


def _warn_if_random(dataset: Any, inputs: Sequence[Array], place: str) -> None:
    """Warn, once for each class, if an example of a Dataset differs when it is read again."""
    kind = type(dataset).__qualname__
    if kind in _warned:
        return
    for index, before in enumerate(inputs[:READ_TWICE]):
        try:
            again = dataset[index][0]
        except Exception:  # it was read once, which is enough
            return
        if not np.array_equal(before, unpacked(again, place)):
            _warned.add(kind)
            log.warning(
                "%s: item %d of %s differs when it is read again; all examples are read once, so a random "
                "change stays the same in every round, and test examples have it too; leave random "
                "transforms out, and set data.augment",
                *(place, index, kind),
            )
            return


def _image(value: Any, size: int, resize: Resize, key: str) -> NDArray[np.uint8]:
    from rayfed.data.image_file import corrupt, decode_image, read_image

    if not isinstance(value, bytes):
        return read_image(Path(str(value)).expanduser(), size, resize)
    try:
        return decode_image(value, size, resize)
    except MemoryError:
        raise
    except Exception as err:
        raise corrupt(key, err) from err


def _contents(part: Array) -> Iterator[Any]:
    """The bytes of an array, or of a column of files, in parts."""
    if part.dtype == object:
        for value in part:
            if isinstance(value, bytes):
                yield value
            else:
                path = Path(str(value)).expanduser()
                state = path.stat() if path.exists() else None
                yield repr((str(value), state and (state.st_size, state.st_mtime_ns))).encode()
        return
    whole = np.ascontiguousarray(part).reshape(-1).view(np.uint8) if part.size else np.empty(0, np.uint8)
    for start in range(0, len(whole), PART):
        yield whole[start : start + PART].data


def _check_alike(pieces: Sequence[Piece]) -> None:
    """Raise DataError unless all pieces have inputs and targets of one type and shape."""
    first = pieces[0]
    for piece in pieces[1:]:
        for what in ("inputs", "targets"):
            one, other = getattr(first, what), getattr(piece, what)
            kinds = {one.dtype.kind, other.dtype.kind}
            alike = one.dtype == other.dtype or kinds <= {"i", "u"} or kinds == {"U"}
            if not alike or one.shape[1:] != other.shape[1:]:
                raise DataError(
                    f"{piece.place}: the {what} are {other.dtype} of shape {other.shape[1:]}, those of "
                    f"{first.place} "
                    f"{one.dtype} of shape {one.shape[1:]}; give all clients examples of one type and shape"
                )


def _in_one_type(pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
    """The pieces with whole numbers in the smallest type that holds those of all pieces.

    Raises:
        DataError: There is none, as some are negative and others too large for int64.
    """
    for what in ("inputs", "targets"):
        parts = [getattr(piece, what) for piece in pieces]
        if parts[0].dtype.kind not in "iu" or len({part.dtype for part in parts}) == 1:
            continue
        common = np.result_type(*parts)
        if common.kind == "f":
            raise DataError(
                f"{pieces[0].place}: the {what} are {parts[0].dtype}, and no type of whole numbers also "
                "holds those of other clients; give all clients int64"
            )
        arrays = (part.astype(common) for part in parts)
        pieces = tuple(replace(piece, **{what: array}) for piece, array in zip(pieces, arrays, strict=True))
    return pieces


def _with_classes(piece: Piece) -> Piece:
    """A piece whose targets are whole floats, with these as whole numbers.

    Raises:
        DataError: One is not whole, or negative.
    """
    targets = piece.targets
    if targets.ndim == 2:
        raise DataError(
            f"{piece.place}: targets have shape {targets.shape}; classes have shape ({len(targets)},), e.g. "
            "y.ravel() or y.argmax(1)"
        )
    wrong = np.flatnonzero(((targets < 0) | (targets % 1 != 0)).reshape(len(targets), -1).any(axis=1))
    if len(wrong):
        value = targets[wrong[0]].flat[0] if targets.ndim > 1 else targets[wrong[0]]
        raise DataError(
            f"{piece.place}: the target of example {wrong[0]} is {shown(float(value))}; classes are whole "
            "numbers from 0"
        )
    return replace(piece, targets=targets.astype(np.int64))


def _check_values(piece: Piece, task: str | None = None) -> None:
    """Raise DataError where inputs or targets hold NaN or infinity, or a class is negative.

    Args:
        task: As of `own_data`.
    """
    if not math.prod(piece.inputs.shape[1:]):
        raise DataError(
            f"{piece.place}: the inputs have shape {piece.inputs.shape}, so that an example holds no number; "
            "give columns"
        )
    for what in ("inputs", "targets"):
        values = getattr(piece, what)
        if values.dtype.kind == "f" and not np.isfinite(values.sum(dtype=np.float64)):
            bad = np.flatnonzero(~np.isfinite(values.reshape(len(values), -1)).all(axis=1))
            if len(bad):
                raise DataError(
                    f"{piece.place}: the {what} of example {bad[0]} hold NaN or infinity; replace or "
                    "leave out "
                    f"{len(bad)} such examples"
                )
    targets = piece.targets
    if task != REGRESSION and targets.dtype.kind == "i" and targets.size and int(targets.min()) < 0:
        row = int(np.argmin(targets.reshape(len(targets), -1).min(axis=1)))
        raise DataError(
            f"{piece.place}: the target of example {row} is {int(targets.min())}; classes begin at 0"
        )
    if task != REGRESSION and targets.dtype.kind in "iu" and int(targets.max()) >= MOST_CLASSES:
        row = int(np.argmax(targets.reshape(len(targets), -1).max(axis=1)))
        raise DataError(
            f"{piece.place}: the target of example {row} is {int(targets.max())}, but a class is the number "
            f"of an output, below {MOST_CLASSES:,}; number the classes from 0, or give their names as text"
        )


_MADE: dict[int, tuple[Any, OwnData]] = {}
"""Readers made of functions of modules, by identity, so that each is called once."""


def make_reader(value: Any, name: str = "own_data", task: str | None = None) -> Any:
    """Make a reader of what a module names as data; a class of readers stays as it is.

    Args:
        value: A class, examples in one of the forms above, or a function that makes them.
        name: Name of the data set.
        task: As of `own_data`.

    Raises:
        DataError: The examples cannot be used, or the function failed.
    """
    if isinstance(value, type | OwnData):
        return value
    if id(value) in _MADE:
        return _MADE[id(value)][1]
    examples = value
    if callable(value) and not hasattr(value, "__getitem__"):
        try:
            examples = value()
        except Exception as err:
            where = f"{type(err).__name__}: {one_line(err)}{place_of(err)}"
            raise DataError(f"data: {getattr(value, '__name__', shown(value))}() raised {where}") from err
    reader = own_data(examples, name=name, task=task)
    if callable(value):  # arrays may be changed by their user between two runs
        _MADE[id(value)] = value, reader
    return reader
