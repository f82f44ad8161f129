"""Numbers that specifications give for checking an implementation, kept as data with their source.

A file for each specification, an entry for each vector: `name`, `source`, `digits` (after the point, of
`expected`; null: whole numbers), `inputs` and `expected`.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.rounding import near, printed

FOLDER = Path(__file__).parent


class Vector(NamedTuple):
    """One entry: what goes in, what must come out, and with how many digits it is known."""

    inputs: dict[str, Any]
    expected: dict[str, Any]
    digits: int | None

    def matches(self, found: Any, expected: Any) -> None:
        """Fail unless a number, an array or a tensor is as near as printing and roundings explain.

        The vectors are worked out with sums of at most eight numbers.
        """
        known = 0.0 if self.digits is None else printed(self.digits)
        precision = torch.float32 if getattr(found, "dtype", None) == torch.float32 else torch.float64
        near(found, expected, 0 if self.digits is None else 8 + 8, precision=precision, known=known)


@cache
def entries(specification: str) -> dict[str, dict[str, Any]]:
    """All vectors of a specification by number."""
    return json.loads((FOLDER / f"{specification}.json").read_text())


def vector(specification: str, number: str) -> Vector:
    """A vector by the name of its file and its number, as in `vector("fedra", "V1")`."""
    entry = entries(specification)[number]
    return Vector(entry["inputs"], entry["expected"], entry["digits"])
