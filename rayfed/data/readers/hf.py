"""Any data set of images or texts that the library `datasets` loads: by name, from a folder or Parquet files.

  data=hf/OWNER/NAME                            by name, as `datasets.load_dataset` finds it
  data=hf/NAME data.root=DIR_OR_FILE            a folder that `save_to_disk` wrote, a folder of Parquet files
                                                or of images, or one Parquet file
  data.columns={image: img, label: y, client: writer, domain: site}
  data.columns={text: body, text_pair: reply, label: y}, {prompt: q, completion: a}, {messages: chat}

Where columns for texts are named, or no column has images and one has a usual name of texts, they are read
as by the readers of tables (`rayfed.data.named.texts`). Otherwise, the split `test`, or `validation` if
there is no `test`, is the official test split; all others are for training.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from rayfed.data.data_config import Resize
from rayfed.data.image_file import corrupt, decode_image, read_image
from rayfed.data.listing import ALLOWED, classes_of, in_order, is_missing, named_in_one_way
from rayfed.data.named.content import Content, ContentReader, stat_hash, with_classes
from rayfed.data.named.texts import PARTS as ALL_PARTS
from rayfed.data.named.texts import TextTable
from rayfed.data.source import ONE_DOMAIN, Listing
from rayfed.data.text import Text
from rayfed.data.tokenizer import answered_or_cached
from rayfed.errors import ConfigError, DataError, unknown
from rayfed.objective import CLASSIFICATION

PARTS = ("image", "label", "client", "domain")
"""The kinds of columns."""
TEXTS = {part: names for part, names in ALL_PARTS.items() if part not in (*PARTS, "category")}
"""Parts of texts, with the usual names of their columns."""
TYPES = {"image": "Image", "label": "ClassLabel or the name label"}
"""By what the columns of images and labels are found."""
TESTS = ("test", "validation")
"""Splits that can be the official test split, the first one that there is."""


@contextmanager
def _only(level: int, name: str) -> Iterator[None]:
    """While the block runs, a library logs nothing below a level."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(before)


@dataclass(frozen=True, kw_only=True)
class HuggingFace(ContentReader):
    """Reads the splits of one data set, whose columns `data.columns` names."""

    cache: str | None = None
    columns: Mapping[str, str] | None = None
    resize: Resize = "squash"

    sparse: ClassVar[bool] = True

    @property
    def task(self) -> str:
        """Classification of images, or the task that the columns of the texts say."""
        return self._texts.task if self._has_texts else CLASSIFICATION

    @property
    def header(self) -> list[str]:
        """The names of the columns."""
        return list(next(iter(self._loaded.values())).features)

    @property
    def said(self) -> str:
        """The columns of texts that are not used, for the header of a run; empty: there are none."""
        return self._texts.said if self._has_texts else ""

    def scan(self) -> Listing:
        return self._texts.scan() if self._has_texts else super().scan()

    def fingerprint(self) -> str:
        """A hash of the library's fingerprints of the splits, the columns and the files below the root."""
        out = hashlib.sha256(repr([*(self.columns or {}).items()]).encode())
        for split, rows in self._loaded.items():
            out.update(f"{split}={rows._fingerprint}\n".encode())
        if self.root:
            root = self._path(self.root)
            files = [root] if root.is_file() else sorted(path for path in root.rglob("*") if path.is_file())
            out.update(stat_hash(files, root.parent).encode())
        return with_classes(f"hf/1:{out.hexdigest()}", self.classes)

    def decode(self, listing: Listing, index: int, size: int) -> NDArray[np.uint8] | Text:
        if self._has_texts:
            return self._texts.decode(listing, index, size)
        split, place = self._image(index)
        value = self._splits[split][place][self._names["image"]]
        if isinstance(value, str):
            value = {"path": value}
        stored = value if isinstance(value, dict) else {"bytes": value}
        if not stored.get("bytes") and stored.get("path"):
            return read_image(self._inside(stored["path"], listing.keys[index]), size, self.resize)
        try:
            return decode_image(stored["bytes"], size, self.resize)
        except MemoryError:
            raise
        except Exception as err:  # Pillow's decoders raise almost anything on corrupt input
            raise corrupt(f"{listing.keys[index]} of {self.root or f'hf/{self.name}'}", err) from err

    def _inside(self, path: str, key: str) -> Path:
        """A file that a row names, which must be in the folder of the data set, or in a cache of the library.

        Raises:
            DataError: It is elsewhere: a data set of strangers must not read other files of this machine.
        """
        if self.root:
            root = self._path(self.root)
            folders = [root if root.is_dir() else root.parent]
        else:
            from huggingface_hub import constants

            folders = [Path(constants.HF_HUB_CACHE), Path(_library().config.HF_DATASETS_CACHE)]
            folders += [self._path(self.cache) / "hf"] if self.cache else []
        for folder in folders:
            inside = Path(os.path.normpath(folder / path))
            if inside.is_relative_to(folder) or inside.is_relative_to(folder.resolve()):
                return inside
        raise DataError(
            f"image {key} of hf/{self.name} is in {path!r}, outside of {folders[0]}; put the images into "
            f"the folder of the data set, and write their paths from there"
        )

    def place(self, key: str) -> str:
        """Words for a text, for messages. Args: key: that of the listing."""
        return self._texts.place(key)

    @cached_property
    def _has_texts(self) -> bool:
        named = (self.columns or {}).keys()
        if "image" in named or named & TEXTS.keys():
            return "image" not in named
        features = next(iter(self._loaded.values())).features
        if any(isinstance(kind, _library().Image) for kind in features.values()):
            return False
        return any(name in features for part in ("text", "prompt", "messages") for name in TEXTS[part])

    @cached_property
    def _texts(self) -> _Texts:
        """The reader of the texts."""
        return _Texts(
            name=self.name,
            root=self.root,
            classes=self.classes,
            columns=self.columns,
            splits=self._loaded,
            mark=self.fingerprint(),
        )

    @cached_property
    def _loaded(self) -> dict[str, Any]:
        """The splits by name."""
        library = _library()
        try:
            with _only(logging.CRITICAL, "datasets"):  # it logs what it raises, in several lines
                splits = self._load(library)
        except (ConfigError, DataError):
            raise
        except Exception as err:  # the library raises almost anything
            reason = (str(err).splitlines() or [type(err).__name__])[0]
            where = f"data.root: {self.root}" if self.root else f"data: hf/{self.name}"
            raise DataError(
                f"{where} cannot be loaded by the library datasets ({reason}); download the data set, and "
                f"set data.root to its folder or Parquet file"
            ) from err
        return dict(splits) if isinstance(splits, dict) else {"train": splits}

    @cached_property
    def _splits(self) -> dict[str, Any]:
        """The same, with images as they are stored."""
        library = _library()
        stored = library.Image(decode=False)
        return {
            split: rows.cast_column(column, stored)
            if isinstance(rows.features[column := self._images(rows.features, library)], library.Image)
            else rows
            for split, rows in self._loaded.items()
        }

    def _load(self, library: Any) -> Any:
        cache = str(Path(self.cache).expanduser() / "hf") if self.cache else None
        if not self.root:
            return self._from_hub(library, cache)
        root = self._path(self.root)
        if not root.exists():
            raise DataError(
                f"data.root: {root} does not exist; give the folder or Parquet file of {self.name}"
            )
        if root.is_file():
            return library.load_dataset("parquet", data_files=str(root), cache_dir=cache)
        if any((root / name).is_file() for name in ("dataset_dict.json", "state.json")):
            return library.load_from_disk(str(root))
        return library.load_dataset(str(root), cache_dir=cache)

    def _from_hub(self, library: Any, cache: str | None) -> Any:
        """The data set with this name from the hub, or from the cache where the hub does not answer."""
        quiet = _only(logging.ERROR, "huggingface_hub")  # it warns of every try
        with quiet, answered_or_cached() as answers:
            try:
                return library.load_dataset(self.name, cache_dir=cache)
            except Exception as err:
                if answers:
                    raise
                raise ConnectionError("the hub does not answer, and the cache does not have it") from err

    def _path(self, root: str) -> Path:
        return Path(root).expanduser().absolute()

    def _images(self, features: Mapping[str, Any], library: Any) -> str:
        """The column of the images."""
        likely = [name for name, kind in features.items() if isinstance(kind, library.Image)]
        return self._column("image", features, likely)

    def _column(self, part: str, features: Mapping[str, Any], likely: Sequence[str]) -> str:
        """The column that the config names, or the only likely one."""
        wanted = (self.columns or {}).get(part)
        if wanted is None and len(likely) == 1:
            return likely[0]
        if wanted is None:
            reason = f"{len(likely)} columns of hf/{self.name} could be it"
            if not likely:
                reason = f"no column of hf/{self.name} has the type {TYPES[part]}"
            raise ConfigError(
                f"data.columns.{part}: not set, and {reason}; name one of {', '.join(features)}"
            )
        if wanted not in features:
            raise ConfigError(unknown(f"data.columns.{part}", wanted, list(features)))
        return wanted

    @cached_property
    def _names(self) -> dict[str, str]:
        """The columns that are used, by part."""
        library = _library()
        for part in self.columns or {}:
            if part not in PARTS:
                raise ConfigError(unknown("data.columns", part, PARTS))
        features = next(iter(self._splits.values())).features
        labels = [name for name, kind in features.items() if isinstance(kind, library.ClassLabel)]
        labels = labels or [name for name in features if name == "label"]
        image = self._images(features, library)
        label = self._column("label", features, labels)
        if image == label:
            raise ConfigError(
                f"data.columns.label: {label!r} is the column of the images, too; name another one"
            )
        names = {"image": image, "label": label}
        optional = [part for part in ("client", "domain") if part in (self.columns or {})]
        return names | {part: self._column(part, features, ()) for part in optional}

    def _values(self, part: str) -> list[Any]:
        """The values of a column in all splits; of a ClassLabel the names of the classes.

        Raises:
            DataError: A row has none; names the first one.
        """
        name = self._names[part]
        rows = [value for split in self._splits.values() for value in split[name]]
        missing = [row for row, value in enumerate(rows) if is_missing(value)]
        if missing:
            allowed = f"; {ALLOWED}" if part == "label" else ""
            raise DataError(
                f"data.columns.{part}: column {name!r} of hf/{self.name} has no value in {len(missing)} "
                f"rows, the first of which is {self._place(missing[0])}{allowed}"
            )
        if class_names(self._splits, name, f"data.columns.{part}") is None:
            return rows
        if (wrong := next((row for row, value in enumerate(rows) if value < 0), None)) is not None:
            raise DataError(
                f"data.columns.{part}: column {name!r} of hf/{self.name} has the label {rows[wrong]} in "
                f"{self._place(wrong)}; {ALLOWED}"
            )
        return [
            split.features[name].int2str(value) for split in self._splits.values() for value in split[name]
        ]

    def _place(self, row: int) -> str:
        """Words for a row of all splits together, for messages."""
        for split, rows in self._splits.items():
            if row < len(rows):
                return f"row {row + 1} of {split}"
            row -= len(rows)
        return f"row {row + 1}"

    def _names_in(self, part: str) -> list[str]:
        """The values of a column of names as text.

        Raises:
            DataError: Two of them are the same text, but not the same value.
        """
        return named_in_one_way(self._values(part), part, self._names[part])

    @cached_property
    def _content(self) -> Content:
        images = [(split, row) for split, rows in self._splits.items() for row in range(len(rows))]
        column = self._names["label"]

        def where(row: int) -> str:
            return f"data.columns.label: column {column!r} of hf/{self.name}, {self._place(row)},"

        order = class_names(self._splits, column, "data.columns.label")
        labels, classes = classes_of(self._values("label"), where, order)
        test = next((split for split in TESTS if split in self._splits), None)
        domain = self._names_in("domain") if "domain" in self._names else [ONE_DOMAIN] * len(images)
        domains = sorted(set(domain), key=in_order)
        places = {name: place for place, name in enumerate(domains)}
        return Content(
            classes=classes,
            labels=labels,
            test=np.array([split == test for split, _ in images], dtype=np.bool_),
            names=[f"{split}-{row:07d}" for split, row in images],
            images=images,
            domains=domains,
            domain=np.array([places[name] for name in domain], dtype=np.int64),
            owners=self._names_in("client") if "client" in self._names else None,
            test_name=test or "",
        )


@dataclass(frozen=True, kw_only=True)
class _Texts(TextTable):
    """The texts of splits that the library loaded.

    Attributes:
        splits: The splits by name.
        mark: Fingerprint of the data set.
    """

    splits: Mapping[str, Any]
    mark: str

    fills: ClassVar[bool] = True

    @cached_property
    def _tables(self) -> dict[str, list[dict[str, Any]]]:
        tables = {}
        for split, rows in self.splits.items():
            named = {name: kind.int2str for name, kind in rows.features.items() if hasattr(kind, "int2str")}
            tables[split] = [
                {**row, **{n: of(row[n]) for n, of in named.items() if row[n] is not None and row[n] >= 0}}
                for row in rows.to_list()
            ]
        return tables

    @property
    def _orders(self) -> Mapping[str, Sequence[str]]:
        column = self._names.get("label", "")
        order = class_names(self.splits, column, "data.columns.label") if column else None
        return {} if order is None else {column: order}

    @property
    def _files(self) -> Sequence[Path]:
        return ()  # the library reads them

    def fingerprint(self) -> str:
        return self.mark


def class_names(splits: Mapping[str, Any], column: str, key: str) -> list[str] | None:
    """The classes of a ClassLabel in the order of the first split, then those of others; None: it is none.

    Args:
        splits: Those of the library, by name.
        key: The key of the config that it belongs to, for messages.

    Raises:
        DataError: It is a ClassLabel in some splits only, so that numbers have names and have none.
    """
    kinds = {split: rows.features[column] for split, rows in splits.items() if column in rows.features}
    named = {split: kind.names for split, kind in kinds.items() if hasattr(kind, "int2str")}
    if not named:
        return None
    if other := next((split for split in kinds if split not in named), None):
        raise DataError(
            f"{key}: column {column!r} is a ClassLabel in the split {next(iter(named))} and none in {other}; "
            f"cast it to the same in all splits"
        )
    return list(dict.fromkeys(name for names in named.values() for name in names))


def _library() -> Any:
    try:
        import datasets
    except ImportError as err:
        raise ConfigError(
            "data.reader: 'hf' needs the package datasets; install rayfed-sim[hf], or pip install datasets"
        ) from err
    return datasets


READER = HuggingFace
