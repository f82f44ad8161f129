"""Base of the readers of texts, and the reader of tables of texts: CSV, TSV, JSON lines and Parquet.

data.root is a file, or a folder with a file for each split, such as train.csv and test.csv, or several
(train-00000-of-00002.parquet), or a folder for each split, such as train/ and test/. The split test, or
validation if there is no test with labels, is the official test split; all others are for training.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from abc import abstractmethod
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from rayfed.data.listing import classes_of, in_order, is_missing, name_in_text, named_in_one_way, warn_once
from rayfed.data.named.content import Content, ContentReader, stat_hash, with_classes
from rayfed.data.source import ONE_DOMAIN, Listing
from rayfed.data.text import Text
from rayfed.errors import ConfigError, DataError, count_of, one_line, unknown
from rayfed.objective import LANGUAGE_MODELING, TEXT_CLASSIFICATION, TEXT_REGRESSION

TESTS = ("test", "validation", "validation_matched", "valid", "dev", "val")
"""Splits that can be the official test split, the first one that there is."""

LEFT_OUT = {"validation_matched": "validation_mismatched"}
"""Splits that are used for nothing, by the test split that is used in their place (MNLI of GLUE)."""

UNKNOWN = "-1"
"""Label of all rows of a split whose labels are not public, as those of the test splits of GLUE."""

TABLES = (".csv", ".tsv", ".jsonl", ".json", ".parquet")
"""Suffixes of tables, those of which that a reader leaves out are counted."""

PIECE = re.compile(r"-\d+(-of-\d+)?$")
"""End of the name of a file that has a part of a split, such as train-00000-of-00002.parquet."""

MOST_NAMED = 10
"""Columns that are named in the header of a run."""

ONE_CLASS = "text"
"""The class of all texts where none is named, which is only used to distribute them to clients."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A text and what is known about it.

    Attributes:
        text: The text.
        label: Its class, or its category where a language model learns it.
        name: Unique name within its domain and class.
        test: Whether it is in the official test split.
        domain: Its domain.
        owner: Its client; None: the data set names no clients.
    """

    text: Text
    label: str
    name: str
    test: bool = False
    domain: str = ONE_DOMAIN
    owner: str | None = None


@dataclass(frozen=True, kw_only=True)
class TextReader(ContentReader):
    """Lists texts; a reader says which files it reads and what they hold.

    Attributes:
        where: Which files are read, from whom, and how they must lie, for messages.
    """

    sparse: ClassVar[bool] = True
    task: ClassVar[Any] = TEXT_CLASSIFICATION
    where: ClassVar[str] = ""

    @property
    @abstractmethod
    def _files(self) -> Sequence[Path]:
        """Files that are read."""

    @property
    @abstractmethod
    def _samples(self) -> Sequence[Sample]:
        """All samples, read once."""

    def fingerprint(self) -> str:
        """A hash of names, sizes and modification times of the files, and of the chosen classes."""
        files = self._files
        root = self._folder
        return with_classes(f"{type(self).__name__}/1:{stat_hash(files, root)}", self.classes)

    def decode(self, listing: Listing, index: int, size: int) -> Text:
        text: Text = self._image(index)
        return text

    @property
    def _folder(self) -> Path:
        """The folder `data.root`, or that of the file."""
        root = self._root
        return root if root.is_dir() else root.parent

    @property
    def _root(self) -> Path:
        if not self.root:
            raise ConfigError(f"data.root: not set; give {self.where}")
        root = Path(self.root).expanduser().absolute()
        if not root.exists():
            raise DataError(f"data.root: {root} does not exist; give {self.where}")
        return root

    def _require_files(self, *names: str) -> list[Path]:
        """Files below the folder.

        Raises:
            DataError: One of them is missing.
        """
        root = self._root
        for name in names:
            if not (root / name).is_file():
                raise DataError(f"data.root: {root / name} does not exist; give {self.where}")
        return [root / name for name in names]

    @cached_property
    def _content(self) -> Content:
        samples = self._samples
        labels, classes = self._classes
        domains = sorted({sample.domain for sample in samples}, key=in_order)
        place = {name: place for place, name in enumerate(domains)}
        owners = [sample.owner for sample in samples]
        return Content(
            classes=classes,
            labels=labels,
            test=np.array([sample.test for sample in samples], dtype=np.bool_),
            names=[sample.name for sample in samples],
            images=[sample.text for sample in samples],
            domains=domains,
            domain=np.array([place[sample.domain] for sample in samples], dtype=np.int64),
            owners=None if None in owners else [str(owner) for owner in owners],
            test_name=self._test_name,
        )

    @property
    def _classes(self) -> tuple[NDArray[np.int64], list[str]]:
        """The class of each sample, and the names of the classes in their order."""
        labels = [sample.label for sample in self._samples]
        classes = sorted(set(labels), key=in_order)
        number = {name: place for place, name in enumerate(classes)}
        return np.array([number[name] for name in labels], dtype=np.int64), classes

    @property
    def _test_name(self) -> str:
        """Name of the official test split, see `rayfed.data.listing.Listing`."""
        return ""


def _test_of(splits: Container[str]) -> str:
    """The split that is the official test split; empty: there is none."""
    return next((split for split in TESTS if split in splits), "")


def read_text(path: Path) -> str:
    """The text of a file.

    Raises:
        DataError: It cannot be read, or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as err:
        raise DataError(f"data.root: {path} cannot be read ({one_line(err)}){_hint(err)}") from err


def _hint(err: Exception) -> str:
    """The advice about a file that cannot be read; empty: none."""
    return "; save it as UTF-8" if isinstance(err, UnicodeDecodeError) else ""


def read_csv(path: Path, delimiter: str = ",") -> list[dict[str, Any]]:
    """The rows of a table with a header.

    Quotation marks enclose values in files with commas, and in those with tabs where `has_quotes` finds so.

    Raises:
        DataError: It has no header, or a row has more or fewer values than that.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file, _values_of_any_length():
            text = file.read()
            quoted = delimiter != "\t" or has_quotes(text)
            quoting: Any = csv.QUOTE_MINIMAL if quoted else csv.QUOTE_NONE
            lines = io.StringIO(text, newline="")
            table = csv.DictReader(lines, delimiter=delimiter, quoting=quoting, strict=True)
            rows = list(table)
            header = table.fieldnames
    except (OSError, UnicodeDecodeError, csv.Error) as err:
        raise DataError(f"data.root: {path} cannot be read as a table ({one_line(err)}){_hint(err)}") from err
    if not header or len(set(header)) < len(header):
        raise DataError(f"data.root: {path} has no header with different names of columns in its first line")
    for number, row in enumerate(rows, 2):
        if None in row or None in row.values():
            raise DataError(
                f"data.root: row {number} of {path} has not {len(header)} values, as the header has"
            )
    return rows


@contextmanager
def _values_of_any_length() -> Iterator[None]:
    """While the block runs, the module csv takes values of more than 131,072 characters."""
    before = csv.field_size_limit(2**31 - 1)
    try:
        yield
    finally:
        csv.field_size_limit(before)


QUOTED = re.compile(r'"(?:[^"]|"")*"')
"""A value in quotation marks, in which these are doubled."""


def has_quotes(text: str) -> bool:
    """Whether quotation marks enclose values of a file with tabs, as pandas and spreadsheets write them.

    They do where rows have other numbers of values than the header without them, and as many with them. Else
    a value must show it, such as `"he said ""hi"" twice"`, or the quoted names of the header, and no other
    value may contradict it. Otherwise, as in the files of GLUE, they are part of the texts.

    Args:
        text: The whole file.
    """
    if '"' not in text:
        return False
    text = text.replace("\r\n", "\n")
    try:
        lines = io.StringIO(text, newline="")
        rows = [row for row in csv.reader(lines, delimiter="\t", strict=True) if row]
    except csv.Error:
        return False
    raw = [line.split("\t") for line in text.split("\n") if line]
    if not _are_alike(raw):
        return _are_alike(rows)
    if any('"' in value and not value.startswith('"') for row in raw for value in row):
        return False  # a program would have enclosed this value
    marked = [value for row in raw for value in row if value.startswith('"')]
    whole = [value for value in marked if QUOTED.fullmatch(value)]
    needed = [value for value in whole if '""' in value[1:-1] or value == '""']
    names = all(map(QUOTED.fullmatch, raw[0]))
    if len(whole) == len(marked):
        return bool(marked) and (names or len(needed) == len(marked))
    return bool(needed or names) and _are_alike(rows) and _written(rows, names) == text.strip("\n")


def _are_alike(rows: Sequence[Sequence[str]]) -> bool:
    """Whether all rows have as many values."""
    return all(len(row) == len(rows[0]) for row in rows)


def _written(rows: Sequence[Sequence[str]], everything: bool) -> str:
    """A table with tabs as the module csv writes it. Args: everything: whether every value is quoted."""
    out = io.StringIO(newline="")
    quoting: Any = csv.QUOTE_ALL if everything else csv.QUOTE_MINIMAL
    csv.writer(out, delimiter="\t", quoting=quoting, lineterminator="\n").writerows(rows)
    return out.getvalue().strip("\n")


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The objects of a file with one JSON object a line, or with one list of objects.

    A list of lists has the objects of a client in each of them, as in FedLLM-Bench; their number is the value
    of `client`. An object with `user_data` has the layout of LEAF (`of_users`).

    Raises:
        DataError: A line is something else.
    """
    text = read_text(path)
    # Only a line feed ends a line: other separators of Unicode are allowed inside of a text of JSON.
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    first = lines[0][1].strip() if lines else ""
    if first.startswith("["):
        found = _parse(text, f"{path}")
        rows = _of_clients(found) if isinstance(found, list) else []
        named = [(f"object {number} of {path}", row) for number, row in enumerate(rows, 1)]
    elif first == "{" or (len(lines) == 1 and '"user_data"' in first):
        return list(of_users(_parse(text, f"{path}"), str(path)))
    else:
        named = [
            (f"line {number} of {path}", _parse(line, f"line {number} of {path}")) for number, line in lines
        ]
    for where, row in named:
        if not isinstance(row, dict):
            raise DataError(f"data.root: {where} is no JSON object")
    return [row for _, row in named]


def _of_clients(found: list[Any]) -> list[Any]:
    """The objects of a list, or those of a list of lists with the number of their client."""
    if not found or not all(isinstance(own, list) for own in found):
        return found
    return [
        {"client": str(number), **row} if isinstance(row, dict) else row
        for number, own in enumerate(found)
        for row in own
    ]


def of_users(found: Any, where: str) -> Iterator[dict[str, Any]]:
    """The rows of a file of LEAF: `{"users": [...], "user_data": {user: {"x": [...], "y": [...]}}}`.

    Args:
        found: What the file holds.
        where: The file, for messages.

    Yields:
        `user`, `y`, and `x`; where x is a list, as in Sent140, its values are `x0`, `x1`, and so on.

    Raises:
        DataError: It holds something else.
    """
    users = found.get("user_data") if isinstance(found, dict) else None
    for user, own in users.items() if isinstance(users, dict) else [("", None)]:
        x, y = (own.get(key) if isinstance(own, dict) else None for key in ("x", "y"))
        if not isinstance(x, list) or not isinstance(y, list) or len(x) != len(y):
            raise DataError(
                f"data.root: {where} is not of LEAF's layout, in which user_data has x and y of each user, "
                f"two lists of one length"
            )
        for each, label in zip(x, y, strict=True):
            parts = {f"x{place}": part for place, part in enumerate(each)} if isinstance(each, list) else {}
            yield {"user": user, "y": label, **(parts or {"x": each})}


def _parse(text: str, where: str) -> Any:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as err:
        raise DataError(f"data.root: {where} is not JSON ({one_line(err)})") from err
    if half := HALF.search(text):  # rare, so that JSON with none is not written again
        try:
            json.dumps(found, ensure_ascii=False).encode()
        except UnicodeEncodeError as err:
            raise DataError(
                f"data.root: {where} has half of a character, such as {half[0]} without its other half; "
                "write whole characters (an emoji has two such parts)"
            ) from err
    return found


HALF = re.compile(r"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
"""Half of a character as JSON writes it."""


def read_parquet(path: Path) -> list[dict[str, Any]]:
    """The rows of a Parquet file.

    Raises:
        DataError: It is no such file.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        names = pq.read_schema(path).names
        if twice := next((name for place, name in enumerate(names) if name in names[:place]), None):
            raise DataError(f"data.root: {path} has two columns {twice!r}; rename one of them")
        table = pq.read_table(path)
        rows: list[dict[str, Any]] = table.to_pylist()
    except (OSError, UnicodeDecodeError, pa.ArrowException) as err:
        raise DataError(f"data.root: {path} is no Parquet file ({one_line(err)})") from err
    return rows


def orders_in_parquet(path: Path) -> dict[str, list[str]]:
    """The classes of each dictionary column (a Categorical of pandas) of a Parquet file, in their order.

    Raises:
        DataError: As of `read_parquet`.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        schema = pq.read_schema(path)
        names = [field.name for field in schema if pa.types.is_dictionary(field.type)]
        table = pq.read_table(path, columns=names).unify_dictionaries() if names else pa.table({})
    except (OSError, pa.ArrowException) as err:
        raise DataError(f"data.root: {path} is no Parquet file ({one_line(err)})") from err
    orders = {}
    for name in names:
        chunks = table.column(name).chunks
        order = chunks[0].dictionary.to_pylist() if chunks else []
        if order and all(isinstance(each, str) for each in order):
            orders[name] = order
    return orders


PARTS: Mapping[str, tuple[str, ...]] = {
    "text": ("text", "sentence"),
    "text_pair": (),
    "label": ("label", "intent"),
    "score": (),
    "prompt": ("prompt", "question", "instruction"),
    "context": (),
    "completion": ("completion", "answer", "response", "output"),
    "messages": ("messages", "conversations"),
    "tools": ("tools",),
    "client": (),
    "domain": (),
    "category": (),
}
"""Parts that columns can be, and the usual names of their columns, which `data.columns` need not name."""


@dataclass(frozen=True, kw_only=True)
class TextTable(TextReader):
    """Reads tables of texts.

    With a column of labels the texts are classified, with one of scores these numbers are learned. With
    prompts and completions, messages, or texts without labels, a language model learns to write them.
    """

    columns: Mapping[str, str] | None = None

    fills: ClassVar[bool] = False
    """Whether the format gives every object all keys that any has, with None where it has no value."""

    @property
    def task(self) -> str:
        kinds = {"score": TEXT_REGRESSION, "label": TEXT_CLASSIFICATION}
        return next((task for part, task in kinds.items() if part in self._names), LANGUAGE_MODELING)

    @property
    @abstractmethod
    def _tables(self) -> dict[str, list[dict[str, Any]]]:
        """Rows of each split, as values by column."""

    @property
    def header(self) -> list[str]:
        """The names of the columns: those that any row has, as objects of JSON may lack some."""
        return list(dict.fromkeys(name for rows in self._tables.values() for row in rows for name in row))

    @cached_property
    def _names(self) -> dict[str, str]:
        """The column of each part that there is.

        Raises:
            ConfigError: A part or a column does not exist, or what is there is not enough.
        """
        wanted = self.columns or {}
        header = self.header
        if not any(self._tables.values()):
            raise DataError(f"data.root: {self.root} has no rows; give one or more")
        for part, column in wanted.items():
            if part not in PARTS:
                raise ConfigError(unknown("data.columns", part, PARTS))
            if column not in header:
                raise ConfigError(unknown(f"data.columns.{part}", column, header))
        found = _usual(wanted, header)
        _check_header(header, found)
        if not ({"text", "messages"} & found.keys() or {"prompt", "completion"} <= found.keys()):
            raise ConfigError(
                f"data.columns: {wanted or 'not set'}, and no column of {self.name} is known to hold texts; "
                f"name text and label, or prompt and completion, or messages, of {', '.join(header)}"
            )
        return found

    @property
    def said(self) -> str:
        """The columns that are not used, for the header of a run; empty: there are none."""
        free = [name for name in self.header if name not in self._names.values()]
        more = f" and {len(free) - MOST_NAMED} more" if len(free) > MOST_NAMED else ""
        return f"columns that are not used: {', '.join(free[:MOST_NAMED])}{more}" if free else ""

    @property
    def _orders(self) -> Mapping[str, Sequence[str]]:
        """The order of the classes in the source, by column; empty: it has none."""
        return {}

    @property
    def _classes(self) -> tuple[NDArray[np.int64], list[str]]:
        if "label" not in self._names:
            return super()._classes
        column = self._names["label"]
        rows = [
            (split, number, row) for split, rows in self._known.items() for number, row in enumerate(rows)
        ]

        def where(place: int) -> str:
            return f"data.columns.label: {self._place(*rows[place][:2])}"

        return classes_of([row.get(column) for _, _, row in rows], where, self._orders.get(column))

    @cached_property
    def _samples(self) -> Sequence[Sample]:
        test = self._test_name
        self._check_names()
        return [
            self._sample(split, row, number, split == test)
            for split, rows in self._known.items()
            for number, row in enumerate(rows)
        ]

    def _check_names(self) -> None:
        """Raise DataError where two values in the columns of clients or domains would be one name."""
        for part in ("client", "domain"):
            column = self._names.get(part)
            values = [row.get(column) for rows in self._known.values() for row in rows] if column else []
            values = [value for value in values if not is_missing(value)]
            names = sorted(set(named_in_one_way(values, part, str(column))))
            written = {name.replace("/", "-"): name for name in names}
            if part == "domain" and len(written) < len(names):
                one = next(name for name in names if written[name.replace("/", "-")] != name)
                raise DataError(
                    f"data.columns.domain: {one!r} and {written[one.replace('/', '-')]!r} in {column!r} "
                    "are one name, as / becomes - in it; rename one"
                )

    @cached_property
    def _known(self) -> Mapping[str, Sequence[Mapping[str, Any]]]:
        """The rows of the splits that are used."""
        known = {split: rows for split, rows in self._tables.items() if not self._is_unknown(rows)}
        known = known or self._tables
        without = LEFT_OUT.get(_test_of(known), "")
        return {split: rows for split, rows in known.items() if split != without}

    @property
    def _test_name(self) -> str:
        return _test_of(self._known) if len(self._known) > 1 else ""

    def _is_unknown(self, rows: Sequence[Mapping[str, Any]]) -> bool:
        """Whether the labels of a split are not public, so that nothing can be done with it."""
        column = self._names.get("label", self._names.get("score", ""))
        return bool(rows) and all(str(row.get(column)) in (UNKNOWN, f"{UNKNOWN}.0") for row in rows)

    def _place(self, split: str, number: int) -> str:
        """Words for a row, for messages. Args: number: from 0, among those of the split."""
        return f"row {number + 1} of {split} of {self.name}"

    def place(self, key: str) -> str:
        """Words for a sample, for messages. Args: key: that of the listing."""
        split, _, number = key.rpartition("/")[2].rpartition("-")
        return self._place(split, int(number))

    def _sample(self, split: str, row: Mapping[str, Any], number: int, test: bool) -> Sample:
        names = self._names
        where = self._place(split, number)

        def value(part: str) -> str:
            found = row.get(names[part])
            if part in SINGLE and is_missing(found):
                raise DataError(f"data.columns.{part}: {where} has no value in {names[part]!r}")
            return text_of(found, part, where, names[part])

        if "messages" in names:
            text = self._conversation(row, "messages", where)
        elif "completion" in names and _is_list(row.get(names["prompt"]), row.get(names["completion"])):
            text = self._conversation(row, "prompt", where)
        elif "completion" in names:
            has_more = "context" in names and row.get(names["context"]) is not None
            asked = "\n".join(filter(None, (value("prompt"), value("context") if has_more else "")))
            text = Text(text=asked, answer=value("completion"))
            if "tools" in (self.columns or {}) and row.get(names["tools"]):
                raise DataError(
                    f"data.columns.tools: {where} has tools, which only conversations can have; write prompt "
                    f"and completion as lists of messages"
                )
        else:
            pair = value("text_pair") if "text_pair" in names else None
            score = number_of(value("score"), where) if "score" in names else None
            text = Text(text=value("text"), pair=pair, score=score)
        category = "label" if "label" in names else "category"
        return Sample(
            text=text,
            label=value(category) if category in names else ONE_CLASS,
            name=f"{split}-{number:07d}",
            test=test,
            domain=value("domain").replace("/", "-") if "domain" in names else ONE_DOMAIN,
            owner=value("client") if "client" in names else None,
        )

    def _conversation(self, row: Mapping[str, Any], part: str, where: str) -> Text:
        """The conversation of a row.

        Args:
            row: Values by column.
            part: `messages`, or `prompt` where that and the completion are lists of messages.
            where: The row, for messages.

        Raises:
            DataError: It is no conversation.
        """
        names = self._names
        told = messages_of(row.get(names[part]), where, part, self.fills)
        tools = tools_of(row.get(names["tools"]), where, self.fills) if "tools" in names else ()
        if part == "messages" and not told:
            raise DataError(f"data.columns.messages: {where} has no message in {names[part]!r}")
        if part == "messages":
            return Text(messages=told, tools=tools)
        if "context" in names and row.get(names["context"]):
            raise DataError(
                f"data.columns.context: {where} has a text in {names['context']!r}, and a prompt of "
                f"messages; write it into a message"
            )
        answers = messages_of(row.get(names["completion"]), where, "completion", self.fills)
        if not answers:
            column = names["completion"]
            raise DataError(f"data.columns.completion: {where} has no message in {column!r}")
        return Text(messages=(*told, *answers), asked=len(told), tools=tools)


@dataclass(frozen=True, kw_only=True)
class TextFiles(TextTable):
    """Reads tables of texts from files; a subclass for each format."""

    suffixes: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def _rows(self, path: Path) -> list[dict[str, Any]]:
        """The rows of a file, as values by column."""

    def fingerprint(self) -> str:
        return f"{super().fingerprint()}:{sorted((self.columns or {}).items())}"

    @cached_property
    def _files(self) -> Sequence[Path]:
        root = self._root
        if root.is_file():
            return [root]
        places = ("*", *(f"{split}/*" for split in ("train", *TESTS)))
        there = (
            sorted(path for suffix in self.suffixes for path in root.glob(f"{p}{suffix}")) for p in places
        )
        found, *inside = there
        found = found or [path for paths in inside for path in paths]
        others = sorted(
            path
            for suffix in TABLES
            for path in (*root.glob(f"*{suffix}"), *root.glob(f"*/*{suffix}"))
            if path not in found and not path.name.startswith(".") and path.is_file()
        )
        if found and others:
            warn_once(
                f"data.root: not used: {count_of(len(others), 'file')} of {root} that {self.name} does not "
                f"read, such as {others[0].relative_to(root)}"
            )
        if not found:
            raise DataError(f"data.root: no file in {root} ends with {self.suffixes[0]}; give {self.where}")
        return found

    @cached_property
    def _tables(self) -> dict[str, list[dict[str, Any]]]:
        return {
            split: [row for rows in files.values() for row in rows] for split, files in self._by_file.items()
        }

    @cached_property
    def _by_file(self) -> dict[str, dict[Path, list[dict[str, Any]]]]:
        """Rows of each file of each split."""
        found: dict[str, dict[Path, list[dict[str, Any]]]] = {}
        for path in self._files:
            alone = path.parent == self._folder
            split = PIECE.sub("", path.name.partition(".")[0]) if alone else path.parent.name
            found.setdefault(split, {})[path] = self._rows(path)
        return found

    def _place(self, split: str, number: int) -> str:
        for path, rows in self._by_file[split].items():
            if number < len(rows):
                return f"row {number + 1} of {path}"
            number -= len(rows)
        return super()._place(split, number)


ROLES = {
    "human": "user",
    "gpt": "assistant",
    "developer": "system",
    **{role: role for role in ("user", "assistant", "system", "tool")},
}
"""Roles of messages as they are written, and as templates know them."""


def _check_header(header: Sequence[str], found: Mapping[str, str]) -> None:
    """Raise ConfigError where a name of a column would be a usual one but for blanks around it."""
    usual = {name for names in PARTS.values() for name in names}
    for column in header:
        if column != column.strip() and column.strip() in usual and column not in found.values():
            raise ConfigError(
                f"data.columns: the header has {column!r}, with blanks around the name; write "
                f"{column.strip()!r} there, or name the column in data.columns"
            )


def _usual(wanted: Mapping[str, str], header: Sequence[str]) -> dict[str, str]:
    """The columns that are named, and those with usual names that go with them, by part."""
    found = dict(wanted)
    has_content = {"text", "prompt", "messages"} & wanted.keys()
    for part, names in PARTS.items():
        known = next((name for name in names if name in header and name not in found.values()), None)
        if part not in found and known and (part in ("label", "completion", "tools") or not has_content):
            found[part] = known
    if "messages" in found:
        dropped: tuple[str, ...] = ("text", "prompt", "completion", "label")
    elif "prompt" in found and "completion" in found:
        dropped = ("text", "label")
    else:
        dropped = ("prompt", "completion", "tools", *(("label",) if "score" in wanted else ()))
    return {part: name for part, name in found.items() if part not in dropped or part in wanted}


def number_of(value: str, where: str) -> float:
    """The number that a text says.

    Args:
        where: The row, for messages.

    Raises:
        DataError: It says none, or one that is not finite.
    """
    try:
        found = math.nan if "_" in value else float(value)
    except ValueError:
        found = math.nan
    if not math.isfinite(found):
        raise DataError(f"data.columns.score: {where} has {value[:40]!r}, which is no finite number")
    return found


SINGLE = ("label", "score", "client", "domain", "category")
"""Parts that an empty text is no value of."""


def text_of(value: Any, part: str, where: str, column: str) -> str:
    """The text that a column holds; a number is the text that JSON has for it.

    Args:
        value: What the column holds.
        part: The part that it is.
        where: The row, for messages.

    Raises:
        DataError: It is no text, such as a list, which would be learned as Python writes it.
    """
    if value is None or (part in SINGLE and value == ""):
        raise DataError(f"data.columns.{part}: {where} has no value in {column!r}")
    if isinstance(value, str) or (part in SINGLE and not isinstance(value, list | dict | tuple)):
        return name_in_text(value)
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return str(value)
    kind = {list: "a list", dict: "an object", bool: "true or false"}.get(type(value), type(value).__name__)
    if isinstance(value, float):
        kind = str(value)
    hint = "; a list of messages is data.columns.messages, or both prompt and completion" * (
        isinstance(value, list) and part not in SINGLE
    )
    raise DataError(f"data.columns.{part}: {where} has {kind} in {column!r}, which is no text{hint}")


def _is_list(*values: Any) -> bool:
    """Whether prompt or completion is a list, or both are lists in JSON: both must be lists of messages."""
    if any(isinstance(value, list) or _rows_of(value) != [None] for value in values):
        return True
    return all(isinstance(value, str) and MESSAGES.match(value) for value in values)


def messages_of(
    value: Any, where: str, part: str = "messages", fills: bool = False
) -> tuple[dict[str, Any], ...]:
    """The messages of `[{role, content}]`, or of `[{from, value}]`, as templates take them.

    Content that is a list of parts with texts becomes one text. Whatever else a message holds is kept, such
    as `tool_calls` and `name`.

    Args:
        value: What the column holds; also as JSON, where a format has texts only.
        where: The row, for messages.
        part: The part that the column is.
        fills: As of `TextTable`.

    Raises:
        DataError: It is something else.
    """
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = _parse(value, f"{part} of {where}")
    found = []
    for message in _rows_of(value):
        known = message if isinstance(message, dict) else {}
        role = known.get("role") or known.get("from")
        content = known.get("content", known.get("value"))
        more = {k: v for k, v in known.items() if k not in NAMED_PARTS and v is not None}
        more = without_none(more) if fills else more
        if content is None and more.get("tool_calls"):
            content = ""
        content = _joined(content)
        if not isinstance(role, str) or role not in ROLES or content is None:
            raise DataError(
                f"data.columns.{part}: {where} is no list of messages with content, a text or a list of "
                f"parts of type text, and a role of user, assistant, system, developer or tool"
            )
        found.append({"role": ROLES[role], "content": content, **more})
    return tuple(found)


def _rows_of(value: Any) -> list[Any]:
    """The messages of a conversation, also where a data set has them as lists of roles and of contents."""
    lists = [each for each in value.values() if isinstance(each, list)] if isinstance(value, dict) else []
    if lists and len(lists) == len(value) and len({len(each) for each in lists}) == 1:
        return [dict(zip(value, each, strict=True)) for each in zip(*lists, strict=True)]
    return value if isinstance(value, list) else [None]


MESSAGES = re.compile(r'\s*\[\s*\{\s*"(role|from|content|value)"\s*:')
"""Begin of a list of messages in JSON."""

NAMED_PARTS = ("role", "from", "content", "value")
"""Keys of messages for role and content."""


def _joined(content: Any) -> str | None:
    """The text of a message, of one text or of parts; None: it has another content, such as an image."""
    if not isinstance(content, list):
        return content if isinstance(content, str) else None
    parts: list[Any] = [
        part.get("text") if isinstance(part, dict) and part.get("type", "text") == "text" else None
        for part in content
    ]
    return "".join(parts) if all(isinstance(part, str) for part in parts) else None


def without_none(value: Any) -> Any:
    """A value without the keys of objects that have None, with which Arrow fills what an object lacks."""
    if isinstance(value, dict):
        return {key: without_none(each) for key, each in value.items() if each is not None}
    return [without_none(each) for each in value] if isinstance(value, list) else value


def tools_of(value: Any, where: str, fills: bool = False) -> tuple[Any, ...]:
    """The descriptions of functions that the template of a conversation lists.

    Args:
        value: What the column holds: a list of objects, also as JSON; None: there are none.
        where: The row, for messages.
        fills: As of `TextTable`.

    Raises:
        DataError: It is something else.
    """
    if isinstance(value, str):
        value = _parse(value, f"tools of {where}") if value.strip() else None
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise DataError(f"data.columns.tools: {where} is no list of objects that describe functions")
    return tuple(without_none(value) if fills else value)
