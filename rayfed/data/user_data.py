"""Examples that a user hands over, arrays, Datasets and tables, as a reader of a data set.

Accepted are a dict by client, a pair (inputs, targets) or a Dataset of torch without clients, and a table of
pandas, Arrow or the library `datasets`. A client has a pair, a Dataset, or a dict of these with `train`,
`val` and `test`.

Inputs have any shape, the same for all examples, and are stored as they are, float64 and float16 as float32.
What the targets are follows from them, as `kind` says.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rayfed.data.data_config import Resize
from rayfed.data.listing import ONE_DOMAIN, Listing
from rayfed.errors import DataError, one_line, place_of, shown, unknown
from rayfed.objective import CLASSIFICATION, MULTILABEL, REGRESSION, SEGMENTATION

log = logging.getLogger(__name__)

Array: TypeAlias = NDArray[Any]

SPLITS = ("train", "val", "test")
DOMAIN = "domain"
"""Key next to the splits of a client that names its domain."""

"""Names of the splits that a user may give; their numbers in a listing are their places, plus one."""

EVERYTHING = ""
"""The client of examples without a client."""

PART = 64_000_000
"""Bytes that are hashed or written at once."""

FILES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff")
"""Suffixes of paths that are read as images."""


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
    """

    client: str
    split: str
    inputs: Array
    targets: Array
    domain: str = ONE_DOMAIN
    place: str = "data"


@dataclass(frozen=True, eq=False)
class OwnData:
    """Reads what a user handed over.

    Attributes:
        pieces: The examples, in their order.
        name: Name of the data set, for reports and the cached file.
    """

    pieces: tuple[Piece, ...]
    name: str = "own_data"
    resize: Resize = "squash"

    sparse: ClassVar[bool] = True

    @cached_property
    def task(self) -> str:
        """Kind of the targets: `classification`, `segmentation`, `regression` or `multilabel`."""
        return kind([piece.targets for piece in self.pieces], self.pieces[0].inputs)

    def check_task(self, task: str | None) -> None:
        """Check that the values of the targets can be what they were taken for.

        Args:
            task: The task that was given; None: it followed from the targets.

        Raises:
            DataError: No task was given, and whole numbers in rows, shape (N, K), are not all 0 or 1; or the
                targets of `multilabel` are not.
        """
        first = self.pieces[0].targets
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
    def _labels(self) -> tuple[NDArray[np.int64], list[str]]:
        """The class of each example and the names of the classes; of other tasks those of the outputs."""
        total = sum(len(piece.targets) for piece in self.pieces)
        if self.task == CLASSIFICATION:
            parts = [piece.targets for piece in self.pieces]
            if parts[0].dtype.kind in "US":
                every = np.concatenate([part.astype(np.str_) for part in parts])
                names, labels = np.unique(every, return_inverse=True)
                return labels.astype(np.int64), names.tolist()
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


def own_data(value: Any, columns: Mapping[str, Any] | None = None, name: str = "own_data") -> OwnData:
    """Make a reader of what a user handed over, with every check that needs no network.

    Args:
        value: The examples, in one of the forms above.
        columns: Names of the columns of a table: `client`, `input`, `target`, `split` and `domain`.
        name: Name of the data set.

    Raises:
        DataError: The value has no such form, a client has no examples, or examples have different shapes or
            types, or hold NaN; one line that names the client.
    """
    pieces = tuple(_pieces(value, columns or {}))
    if not pieces:
        raise DataError("data: the dict has no clients; give {client: (inputs, targets)}")
    _check_alike(pieces)
    for piece in pieces:
        _check_values(piece)
    return OwnData(pieces, name)


def is_own(value: Any) -> bool:
    """Whether a value has one of the forms, or makes one: not a name and not a section of the config."""
    if isinstance(value, Mapping):
        return (
            bool(value)
            and not all(isinstance(each, str | int | float | list | None) for each in value.values())
            and ("name" not in value)
            and not _is_section(value)
        )
    return not isinstance(value, str)


def _is_section(value: Mapping[Any, Any]) -> bool:
    """Whether a dict has keys of the config section `data`."""
    from rayfed.data.data_config import DataConfig

    return all(isinstance(key, str) and key in DataConfig.__dataclass_fields__ for key in value)


def _pieces(value: Any, columns: Mapping[str, Any]) -> Iterator[Piece]:
    if (table := _table(value)) is not None:
        yield from _of_table(table, columns)
    elif isinstance(value, Mapping) and set(value) <= set(SPLITS):
        for split, part in value.items():
            yield from _of_client(EVERYTHING, part, str(split), f"data[{split!r}]")
    elif isinstance(value, Mapping):
        yield from _by_client(value)
    else:
        yield from _of_client(EVERYTHING, value, "", "data")


def _by_client(value: Mapping[Any, Any]) -> Iterator[Piece]:
    """The pieces of a dict by client."""
    for client, part in value.items():
        place = f"data[{client!r}]"
        if isinstance(part, Mapping):
            wrong = [key for key in part if key not in (*SPLITS, DOMAIN)]
            if wrong:
                raise DataError(unknown(place, str(wrong[0]), (*SPLITS, DOMAIN)))
            if "train" not in part:
                raise DataError(f"{place}: there is no 'train' among {', '.join(map(str, part))}")
            domain = str(part.get(DOMAIN, ONE_DOMAIN))
            for split in (key for key in part if key != DOMAIN):
                pieces = _of_client(str(client), part[split], str(split), f"{place}[{split!r}]")
                yield from (replace(piece, domain=domain) for piece in pieces)
        else:
            yield from _of_client(str(client), part, "", place)


def _of_client(client: str, part: Any, split: str, place: str) -> Iterator[Piece]:
    if isinstance(part, tuple | list) and len(part) == 2 and all(map(_is_array, part)):
        inputs, targets = (_array(each, f"{place}[{n}]") for n, each in enumerate(part))
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
    yield Piece(client=client, split=split, inputs=inputs, targets=targets, place=place)


def in_one_line(value: Any) -> str:
    """A value as a message repeats it; arrays have lines."""
    return " ".join(shown(value).split())


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") or (isinstance(value, list | tuple) and bool(len(value)))


def _array(value: Any, place: str) -> Array:
    """An array of a user, of torch, of NumPy or a list, in the type in which it is stored."""
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    try:
        array = np.asarray(value)
    except ValueError as err:
        raise DataError(
            f"{place}: the examples have different shapes ({one_line(err)}); pad or resize them to one shape"
        ) from err
    if array.dtype.kind == "f" and array.dtype != np.float32:
        array = array.astype(np.float32)
    if array.dtype.kind == "O" and not all(
        isinstance(each, str | bytes | Path) for each in array.ravel()[:1]
    ):
        raise DataError(
            f"{place}: the examples are of type {type(array.ravel()[0]).__name__}; give numbers of one "
            "shape, or "
            f"paths or bytes of image files"
        )
    if array.dtype.kind == "c":
        raise DataError(f"{place}: complex numbers cannot be stored; give their parts as two channels")
    if array.dtype.kind == "U" and array.ndim == 1 and len(array) and str(array[0]).lower().endswith(FILES):
        array = array.astype(object)
    return array if array.ndim else array[None]


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
            values.append(each.detach().cpu().numpy() if hasattr(each, "detach") else np.asarray(each))
        first = inputs[0].shape, targets[0].shape
        if (inputs[-1].shape, targets[-1].shape) != first:
            raise DataError(
                f"{place}: item {index} of {type(dataset).__name__} has the shapes {inputs[-1].shape} and "
                f"{targets[-1].shape}, item 0 {first[0]} and {first[1]}; pad or resize them to one shape"
            )
    if not inputs:
        raise DataError(f"{place}: the client has no examples; leave it out, or give it one or more")
    _warn_if_random(dataset, inputs, place)
    return _array(np.stack(inputs), place), _array(np.stack(targets), place)


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
        again = again.detach().cpu().numpy() if hasattr(again, "detach") else np.asarray(again)
        if not np.array_equal(before, again):
            _warned.add(kind)
            log.warning(
                "%s: item %d of %s differs when it is read again; all examples are read once, so a random "
                "change stays the same in every round, and test examples have it too; leave random "
                "transforms out, and set data.augment",
                *(place, index, kind),
            )
            return


def _table(value: Any) -> Any:
    """A table of pandas, of Arrow or of `datasets` as a data frame; None: it is none."""
    module = type(value).__module__.partition(".")[0]
    if module == "pandas" and hasattr(value, "columns"):
        return value
    if module == "pyarrow" and hasattr(value, "to_pandas"):
        return value.to_pandas()
    if module == "datasets" and hasattr(value, "to_pandas"):
        return _of_datasets(value)
    return None


def _of_datasets(value: Any) -> Any:
    """A set of the library `datasets` as a data frame, with images as bytes or paths and names of classes."""
    frame = value.to_pandas()
    for name, feature in value.features.items():
        if hasattr(feature, "int2str"):
            frame[name] = [feature.int2str(int(each)) for each in frame[name]]
        elif type(feature).__name__ == "Image":
            frame[name] = [each["bytes"] or each["path"] for each in frame[name]]
    return frame


USUAL = {
    "client": ("client", "client_id", "user", "writer_id", "owner"),
    "target": ("target", "label", "labels", "y", "class"),
    "input": ("input", "image", "img", "path", "file", "x", "pixel_values"),
    "split": ("split",),
    "domain": ("domain",),
}
"""Names by which the columns of a table are found where `columns` says nothing."""


def _of_table(frame: Any, columns: Mapping[str, Any]) -> Iterator[Piece]:
    names = list(frame.columns)
    for part, wanted in columns.items():
        if part not in USUAL:
            raise DataError(unknown("columns", part, USUAL))
        for column in [wanted] if isinstance(wanted, str) else wanted:
            if column not in names:
                raise DataError(unknown(f"columns.{part}", column, map(str, names)))
    chosen = {
        part: columns.get(part) or next((n for n in usual if n in names), None)
        for part, usual in USUAL.items()
    }
    if chosen["target"] is None:
        raise DataError(
            f"columns.target: the table has the columns {', '.join(map(str, names))}; say which is the "
            "target: "
            f"columns={{'target': NAME}}"
        )
    taken = {chosen[part] for part in ("client", "split", "domain") if chosen[part]}
    taken |= {chosen["target"]} if isinstance(chosen["target"], str) else set(chosen["target"])
    inputs = chosen["input"] or [name for name in names if name not in taken]
    keys = [chosen[part] for part in ("client", "split", "domain") if chosen[part]]
    groups = frame.groupby(keys, sort=True, observed=True) if keys else [((), frame)]
    for key, rows in groups:
        own = dict(zip(keys, key if isinstance(key, tuple) else (key,), strict=True))
        client = str(own.get(chosen["client"], EVERYTHING))
        place = f"data: the rows of client {client!r}" if client else "data"
        split = str(own.get(chosen["split"], ""))
        if split and split not in SPLITS:
            raise DataError(unknown(f"{place}: {chosen['split']}", split, SPLITS))
        yield Piece(
            client=client,
            split=split,
            inputs=_column(rows, inputs, place),
            targets=_column(rows, chosen["target"], place),
            domain=str(own.get(chosen["domain"], ONE_DOMAIN)),
            place=place,
        )


def _column(rows: Any, names: Any, place: str) -> Array:
    """A column as an array, or several columns of numbers side by side."""
    if isinstance(names, str):
        values = list(rows[names])
        if values and isinstance(values[0], str | bytes | Path):
            if isinstance(values[0], str) and not values[0].lower().endswith(FILES):
                return np.asarray(values)
            out = np.empty(len(values), dtype=object)
            out[:] = values
            return out
        return _array(values if values and hasattr(values[0], "__len__") else rows[names].to_numpy(), place)
    try:
        return _array(rows[list(names)].to_numpy(), place)
    except (TypeError, ValueError) as err:
        raise DataError(
            f"{place}: the columns {', '.join(map(str, names))} are not all numbers; say which is the input: "
            f"columns={{'input': NAME}}"
        ) from err


def _image(value: Any, size: int, resize: Resize, key: str) -> NDArray[np.uint8]:
    from rayfed.data.formats.image_file import corrupt, decode_image, read_image

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
            alike = one.dtype == other.dtype or kinds in ({"U"}, {"i"}, {"u"})
            if not alike or one.shape[1:] != other.shape[1:]:
                raise DataError(
                    f"{piece.place}: the {what} are {other.dtype} of shape {other.shape[1:]}, those of "
                    f"{first.place} "
                    f"{one.dtype} of shape {one.shape[1:]}; give all clients examples of one type and shape"
                )


def _check_values(piece: Piece) -> None:
    """Raise DataError where inputs or targets hold NaN or infinity, or a class is negative."""
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
    if targets.dtype.kind == "i" and targets.size and int(targets.min()) < 0:
        row = int(np.argmin(targets.reshape(len(targets), -1).min(axis=1)))
        raise DataError(
            f"{piece.place}: the target of example {row} is {int(targets.min())}; classes begin at 0"
        )


_MADE: dict[int, tuple[Any, OwnData]] = {}
"""Readers made of functions of modules, by identity, so that each is called once."""


def make_reader(value: Any, name: str = "own_data") -> Any:
    """Make a reader of what a module names as data; a class of readers stays as it is.

    Args:
        value: A class, examples in one of the forms above, or a function that makes them.
        name: Name of the data set.

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
    reader = own_data(examples, name=name)
    if callable(value):  # arrays may be changed by their user between two runs
        _MADE[id(value)] = value, reader
    return reader
