"""Writes benchmarks/results/device_counts.md: copies and waits of a round of each method, without a GPU.

python -m benchmarks.device_counts
"""

from __future__ import annotations

import tempfile

from benchmarks.gpu_check import ROOT, TINY, replaced
from rayfed.federation.method_registry import METHODS
from rayfed.testing import play
from tests.pretended import pretended

PAGE = ROOT / "benchmarks" / "results" / "device_counts.md"
ROUNDS = (2, 3)
"""The table shows what the last of these rounds adds, so that the start is not counted."""


def counts(name: str, *overrides: str) -> tuple[int, int, int]:
    """Copies to the device, copies from it, and synchronisations of one more round of a method.

    The round has two clients with one batch each, and no scoring of the global model.
    """
    found = []
    for rounds in ROUNDS:
        with tempfile.TemporaryDirectory() as folder, pretended() as device:
            settings = [*TINY, "evaluation.every=0", f"algorithm={name}", f"rounds={rounds}"]
            play([*settings, f"output={folder}", *overrides], device.name)
            found.append((device.counts.down, device.counts.up, device.counts.waits))
    return tuple(after - before for before, after in zip(*found, strict=True))  # type: ignore[return-value]


def row(name: str) -> str:
    """The row of a method."""
    down, up, waits = counts(name)
    streamed, _, _ = counts(name, "data.resident=false")
    return f"| `{name}` | {down} | {up} | {waits} | {streamed} |"


def table() -> str:
    """One row for each method."""
    head = "| method | copies down | copies up | synchronisations | copies down, examples not resident |"
    return "\n".join([head, "|---|---|---|---|---|", *map(row, METHODS.names())])


def page(text: str) -> str:
    """The page with its table written anew."""
    return replaced(text, "counts", table())


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
