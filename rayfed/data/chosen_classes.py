"""Some classes of a data set, for readers that cannot select classes themselves."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from rayfed.data.config import DataConfig, Resize
from rayfed.data.source import Decoded, Listing, Source, choose_classes, make_source, task_of
from rayfed.errors import ConfigError
from rayfed.objective import CLASSIFICATION


def source_of(config: DataConfig, resize: Resize = "squash") -> Source:
    """The reader of a config (`make_source`), of the chosen classes only.

    Raises:
        ConfigError: As `make_source`; or `data.classes` is set for a task without classes to choose.
    """
    source = make_source(config, resize)
    if config.classes is None or hasattr(source, "classes"):
        return source
    if task_of(source) != CLASSIFICATION:
        raise ConfigError(
            f"data.classes: {config.name!r} is for {task_of(source)}, which needs all of its classes; "
            f"leave it out"
        )
    return ChosenClasses(source=source, classes=config.classes)


@dataclass(frozen=True, kw_only=True)
class ChosenClasses:
    """A reader that lists the samples of some classes of another one; a label is an index into these classes.

    Attributes:
        source: The other reader, of a data set for classification.
        classes: The value of `data.classes`.
    """

    source: Source
    classes: Sequence[str] | int

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def resize(self) -> str:
        """How images become squares."""
        return str(getattr(self.source, "resize", "squash"))

    @property
    def sparse(self) -> bool:
        """Whether domains need not have samples of every class."""
        return bool(getattr(self.source, "sparse", False))

    def fingerprint(self) -> str:
        chosen = json.dumps(self.classes if isinstance(self.classes, int) else list(self.classes))
        return hashlib.sha256(f"{self.source.fingerprint()}|{chosen}".encode()).hexdigest()

    def scan(self) -> Listing:
        whole = self._whole
        rows = self._rows
        place = {name: label for label, name in enumerate(self._names)}
        new = np.array([place.get(name, -1) for name in whole.classes], dtype=np.int64)
        return replace(
            whole,
            classes=tuple(self._names),
            keys=[whole.keys[row] for row in rows.tolist()],
            labels=new[whole.labels[rows]],
            domain=whole.domain[rows],
            test=whole.test[rows],
            fingerprint=self.fingerprint(),
            owners=None if whole.owners is None else [whole.owners[row] for row in rows.tolist()],
        )

    def decode(self, listing: Listing, index: int, size: int) -> Decoded:
        return self.source.decode(self._whole, int(self._rows[index]), size)

    @cached_property
    def _whole(self) -> Listing:
        return self.source.scan()

    @cached_property
    def _names(self) -> list[str]:
        return choose_classes(self.classes, self._whole.classes)

    @cached_property
    def _rows(self) -> np.ndarray:
        """Places of the samples in the listing of the other reader, ascending."""
        wanted = np.array([name in self._names for name in self._whole.classes])
        return np.flatnonzero(wanted[self._whole.labels])
