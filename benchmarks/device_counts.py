"""Writes the table of docs/gpu.md: what one round of every method costs on the pretended accelerator.

python docs/device_counts.py
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from rayfed.federation.method import METHODS  # noqa: E402
from rayfed.testing import play  # noqa: E402
from tests.pretended import pretended  # noqa: E402

PAGE = ROOT / "docs" / "gpu.md"
SETTINGS = (
    "evaluation.every=0",
    "model.options={depth: 2}",
    "model.pretrained=false",
    "train.batch_size=3",
    "data.partition.scheme=by_domain",
    "data.domains=[plain,fonts]",
    "data.limit=6",
    "data.val=2",
    "tensorboard=false",
)
"""Two clients with one batch of three images each in a round, without scoring of the global model."""

ROUNDS = (2, 3)
"""The table shows what the last of these rounds adds, so that the start is not counted."""


def counts(name: str, *overrides: str) -> tuple[int, int, int]:
    """Copies to the device, copies from it, and synchronisations of one more round of a method."""
    found = []
    for rounds in ROUNDS:
        with tempfile.TemporaryDirectory() as folder, pretended() as device:
            settings = [*SETTINGS, f"algorithm={name}", f"rounds={rounds}", f"output={folder}", *overrides]
            play(settings, device.name)
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
    block = f"<!-- counts -->\n{table()}\n<!-- /counts -->"
    return re.sub(r"<!-- counts -->.*<!-- /counts -->", lambda _: block, text, flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
