"""The kinds of cases: a strategy for each, and what is done with a case."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from rayfed import resume, run, view
from rayfed.prepare import __main__ as prepare
from rayfed.report import landscape
from tests.fuzz.damage import WRONG, damaged_bytes, damaged_tree, overrides, written
from tests.fuzz.ground import Ground, stopping, with_base, without_figures
from tests.fuzz.outcomes import attempt

Check = Callable[[Ground, Any], None]


def config_on_the_command_line(ground: Ground, case: Any) -> None:
    (pairs, damaged), dice = case
    with ground.case() as folder:
        if damaged or dice:
            with stopping():
                attempt("config, command line", run.main, [*with_base(pairs), f"output={folder}/run"])
        else:
            pairs = [*pairs, *(["train.max_steps=2"] if "max_steps" not in str(pairs) else [])]
            with without_figures():
                attempt("config, run to the end", run.main, [*with_base(pairs), f"output={folder}/run"])


def config_file(ground: Ground, case: Any) -> None:
    _, tree = case
    with ground.case() as folder, stopping():
        text = "{" + ", ".join(f"{json.dumps(k)}: {written(v)}" for k, v in tree.items()) + "}"
        if any(isinstance(v, dict) for v in tree.values()):
            text = _yaml(tree)
        (folder / "config.yaml").write_bytes(text.encode(errors="surrogatepass"))
        arguments = [
            "--config",
            f"{folder}/config.yaml",
            "cluster=inline",
            f"output={folder}/run",
            "data.cache=cache",
        ]
        attempt("config, file", run.main, arguments)


def _yaml(value: Any) -> str:
    """Flow style; every leaf as `written` writes it."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(str(k))}: {_yaml(v)}" for k, v in value.items()) + "}"
    return written(value)


def bytes_of_a_config_file(ground: Ground, case: bytes) -> None:
    with ground.case() as folder, stopping():
        (folder / "config.yaml").write_bytes(case)
        arguments = [
            "--config",
            f"{folder}/config.yaml",
            "cluster=inline",
            f"output={folder}/run",
            "data.cache=cache",
        ]
        attempt("config, bytes of a file", run.main, arguments)


SAMPLES = st.lists(
    st.one_of(st.integers(-1, 130), st.sampled_from(["plain/0/0", "x", None, True, 1.5, []])), max_size=6
)
CLIENTS = st.one_of(st.sampled_from(["a", "b", "", "../x", "a\nb", "🙂", "x" * 300]), st.text(max_size=6))
SPLITS = st.dictionaries(st.sampled_from(["train", "val", "test", "all", "x"]), SAMPLES, max_size=3)
PARTITIONS = st.one_of(st.dictionaries(CLIENTS, st.one_of(SAMPLES, SPLITS, WRONG), max_size=4), WRONG)
ROWS = st.lists(
    st.tuples(CLIENTS, st.integers(-1, 130), st.sampled_from(["train", "val", "x", ""])), max_size=8
)


@st.composite
def right_partitions(draw: st.DrawFn) -> dict[str, dict[str, list[int]]]:
    """Every sample once, every client with something to train on."""
    samples = draw(st.permutations(range(60)))
    size = draw(st.integers(6, 20))
    parts = [samples[i : i + size] for i in range(0, len(samples) - size, size)]
    return {f"c{i}": {"train": p[2:], "val": p[:1], "test": p[1:2]} for i, p in enumerate(parts)}


@st.composite
def partition_files(draw: st.DrawFn, parquet: bytes) -> tuple[str, bytes]:
    suffix = draw(st.sampled_from(["json", "csv", "parquet", "txt"]))
    if suffix == "parquet":
        return suffix, draw(damaged_bytes(parquet, [b"PAR1PAR1"]))
    right = draw(st.one_of(st.none(), right_partitions()))
    if suffix == "csv":
        text, rows = io.StringIO(), draw(ROWS)
        if right is not None:
            rows = [(c, n, s) for c, splits in right.items() for s, own in splits.items() for n in own]
        csv.writer(text).writerows([("client", "sample", "split"), *rows])
        content = text.getvalue().encode(errors="surrogatepass")
    else:
        content = _yaml(right or draw(PARTITIONS)).encode(errors="surrogatepass")
    return suffix, draw(st.one_of(st.just(content), damaged_bytes(content, [b""])))


def partition_file(ground: Ground, case: tuple[str, bytes]) -> None:
    suffix, content = case
    with ground.case() as folder, stopping():
        (folder / f"clients.{suffix}").write_bytes(content)
        arguments = [*with_base([f"data.partition={folder}/clients.{suffix}"]), f"output={folder}/run"]
        attempt(f"partition, .{suffix}", run.main, arguments)


@st.composite
def run_folders(draw: st.DrawFn, files: dict[str, bytes]) -> tuple[str, str, bytes | None, str]:
    """File, what becomes of it (bytes; None: gone), in what form, and which command then looks."""
    name = draw(st.sampled_from(sorted(files)))
    form = draw(st.sampled_from(["bytes", "bytes", "bytes", "bytes", "gone", "folder", "link"]))
    content = draw(damaged_bytes(files[name], [v for k, v in files.items() if k != name]))
    command = draw(st.sampled_from(["view", "resume", "resume longer", "resume longer", "reopen"]))
    return name, form, content, command


def run_folder(ground: Ground, case: tuple[str, str, bytes, str]) -> None:
    name, form, content, command = case
    with ground.case() as folder, without_figures():
        path = folder / "run"
        for file, original in ground.run.items():
            (path / file).parent.mkdir(parents=True, exist_ok=True)
            (path / file).write_bytes(original)
        target = path / name
        target.unlink()
        if form == "bytes":
            target.write_bytes(content)
        elif form == "folder":
            target.mkdir()
        elif form == "link":
            target.symlink_to("/dev/null/nowhere")
        mains: dict[str, tuple[Any, list[str]]] = {
            "view": (view.main, [str(path)]),
            "resume": (resume.main, [str(path)]),
            "resume longer": (resume.main, [str(path), "rounds=+1"]),
            "reopen": (landscape.main, [str(path), "--points", "2", "--images", "2"]),
        }
        attempt(f"run folder, {command}", *mains[command])


NAMES = st.one_of(
    st.sampled_from(
        ["a.png", "b.jpg", "x" * 250 + ".png", "a\nb.png", "🙂.png", ".png", "c.PNG", "\x1b[31m.png", "-.gif"]
    ),
    st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=12),
    st.just(os.fsdecode(b"\xff.png")),
)


@st.composite
def data_folders(draw: st.DrawFn, image: bytes) -> tuple[list[tuple[str, str, bytes]], str, str]:
    """Things to put into a folder of images (place, kind, content), the policy, and the command."""
    places = st.sampled_from(
        ["photo/cat", "sketch/dog", "photo", ".", "photo/cat/deep", "new/cat", "photo/a"]
    )
    forms = st.sampled_from(sorted(FORMS))
    things = []
    for _ in range(draw(st.integers(1, 3))):
        content = draw(damaged_bytes(image, [b"", b"GIF89a", b"\x89PNG\r\n\x1a\n", b"RIFF"]))
        things.append((f"{draw(places)}/{draw(NAMES)}", draw(forms), content))
    return (
        things,
        draw(st.sampled_from(["stop", "skip"])),
        draw(st.sampled_from(["run", "prepare", "prepare json"])),
    )


def data_folder(ground: Ground, case: tuple[list[tuple[str, str, bytes]], str, str]) -> None:
    things, policy, command = case
    with ground.case() as folder, stopping():
        root = folder / "images"
        for file in sorted((ground.path / "images").rglob("*.*")):
            here = root / file.relative_to(ground.path / "images")
            here.parent.mkdir(parents=True, exist_ok=True)
            here.write_bytes(file.read_bytes())
        for place, kind, content in things:
            with contextlib.suppress(OSError, ValueError):  # a name that this file system does not take
                _put(root / place, kind, content)
        common = [f"data.on_bad_image={policy}", "data.val=0.2"]
        if command == "run":
            pairs = [
                *common,
                "data=image_folder",
                f"data.root={root}",
                "data.limit=null",
                f"data.cache={folder}/cache",
            ]
            attempt("data folder, run", run.main, [*with_base(pairs), f"output={folder}/run"])
            return
        arguments = [
            "image_folder",
            "--root",
            str(root),
            "--cache",
            f"{folder}/cache",
            "--image-size",
            "8",
            *common,
        ]
        arguments += ["--json"] if command == "prepare json" else []
        attempt("data folder, prepare", prepare.main, arguments, report=True)


def _put(path: Path, form: str, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if os.path.lexists(path) and not path.is_dir():
        path.unlink()  # opening a fifo of the same name would wait for ever
    FORMS[form](path, content)


def _sparse(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.truncate(3_000_000_000)


def _emptied(path: Path, content: bytes) -> None:
    for file in path.parent.glob("*.*"):
        file.unlink()


FORMS: dict[str, Callable[[Path, bytes], object]] = {
    "bytes": lambda path, content: path.write_bytes(content),
    "folder": lambda path, content: path.mkdir(),
    "loop": lambda path, content: path.symlink_to(".."),
    "link to nothing": lambda path, content: path.symlink_to("nowhere"),
    "device": lambda path, content: path.symlink_to("/dev/zero"),
    "fifo": lambda path, content: os.mkfifo(path),
    "sparse": _sparse,
    "emptied": _emptied,
}
"""What may stand in a folder of images in the place of an image."""


def kinds(ground: Ground) -> dict[str, tuple[st.SearchStrategy[Any], Check, int, int, int]]:
    """Strategy, check, and how many cases `make test`, `make test-steady` and the long test have, by name."""
    image = (ground.path / "images" / "sketch" / "dog" / "0.png").read_bytes()
    config = ground.run["config.yaml"]
    return {
        "command_line": (
            st.tuples(overrides(), st.integers(0, 15)),
            config_on_the_command_line,
            12,
            25,
            1600,
        ),
        "config_file": (damaged_tree(ground.tree), config_file, 10, 20, 900),
        "config_bytes": (damaged_bytes(config, [b"", b"[]"]), bytes_of_a_config_file, 5, 10, 500),
        "partition": (partition_files(ground.partition), partition_file, 10, 20, 900),
        "run_folder": (run_folders(ground.run), run_folder, 5, 10, 500),
        "data_folder": (data_folders(image), data_folder, 6, 12, 600),
    }


KINDS = ("command_line", "config_file", "config_bytes", "partition", "run_folder", "data_folder")
