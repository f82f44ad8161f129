"""The command line of the programs."""

from __future__ import annotations

import argparse
from pathlib import Path


def parse(about: str | None) -> argparse.Namespace:
    """Folder of inputs, number of rounds, and where to keep what a later call continues."""
    parser = argparse.ArgumentParser(description=(about or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("rounds", type=int)
    parser.add_argument("--state", type=Path, help="folder of checkpoints; continued if it has one")
    return parser.parse_args()
