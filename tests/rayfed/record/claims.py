"""Folders as strangers leave them, and what a run does to one: for the tests of claims and locks."""

import os
from contextlib import contextmanager, suppress
from pathlib import Path

from hypothesis import strategies as st

from rayfed.errors import StorageError
from rayfed.record.atomic_files import write_text
from rayfed.record.claim import KEPT, claim, look

OURS = ("config.yaml", "rounds.jsonl", "model/params.safetensors", "figures/a.png", "history/000001.json.gz")
NAME = st.sampled_from(
    [
        "model",
        "figures",
        "checkpoints",
        "history",
        "wandb",
        "cells",
        "config.yaml",
        "a.parquet",
        "report.md",
        ".lock",
        "x",
    ]
)
PATHS = st.lists(NAME, min_size=1, max_size=3).map("/".join)
TREES = st.dictionaries(PATHS, st.sampled_from(["file", "folder", "link"]), max_size=6)


def plant(root, tree):
    """Make files, folders and links to a folder outside; one within a file is left out."""
    outside = root.parent / "outside"
    outside.mkdir(parents=True, exist_ok=True)
    (outside / "precious").write_text("outside")
    for name, kind in tree.items():
        with suppress(OSError):
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if kind == "folder":
                path.mkdir()
            elif kind == "link":
                path.symlink_to(outside)
            elif not path.exists():
                path.write_text(f"foreign {name}")


def pictured(root):
    """Every file, folder and link below a folder, with its content."""
    found = {}
    for folder, folders, files in os.walk(root):
        for name in (*folders, *files):
            path = Path(folder, name)
            what = path.readlink() if path.is_symlink() else path.read_bytes() if path.is_file() else "folder"
            found[str(path.relative_to(root))] = what
    return found


@contextmanager
def unchanged(root):
    """Check that the block leaves everything below a folder as it is."""
    before = pictured(root)
    yield
    assert pictured(root) == before


def without_kept(tree):
    """What `pictured` has, but for markers and locks."""
    return {name: content for name, content in tree.items() if Path(name).name not in KEPT}


def run_in(path, overwrite=False):
    """What a run does to a folder; what it could not write is left out."""
    with claim(path, look(path, overwrite), overwrite):
        for name in OURS:
            with suppress(StorageError):
                write_text(path / name, f"ours {name}")


def fresh(tmp_path_factory):
    folder = tmp_path_factory.mktemp("case") / "around"
    folder.mkdir()
    return folder
