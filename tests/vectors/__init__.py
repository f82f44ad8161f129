"""Numbers that specifications give for checking an implementation, kept as data with their source.

A file for each specification, an entry for each vector: `name`, `source`, `tolerance` (absolute), `inputs`
and `expected`.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

FOLDER = Path(__file__).parent


class Vector(NamedTuple):
    """One entry: what goes in, what must come out, and how close it must be."""

    inputs: dict[str, Any]
    expected: dict[str, Any]
    tolerance: float

    def matches(self, found: Any, expected: Any) -> None:
        """Fail unless a number, an array or a tensor is within the tolerance of the expected one."""
        value = found.detach() if hasattr(found, "detach") else found
        np.testing.assert_allclose(
            np.asarray(value, dtype=float), np.asarray(expected, dtype=float), atol=self.tolerance, rtol=0
        )


@cache
def entries(specification: str) -> dict[str, dict[str, Any]]:
    """All vectors of a specification by number."""
    return json.loads((FOLDER / f"{specification}.json").read_text())


def vector(specification: str, number: str) -> Vector:
    """A vector by the name of its file and its number, as in `vector("fedra", "V1")`."""
    entry = entries(specification)[number]
    return Vector(entry["inputs"], entry["expected"], entry["tolerance"])
