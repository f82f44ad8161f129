"""What the tables of malformed inputs share: a case, and the check that nothing starts because of it."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import rayfed.engine.measure_work  # noqa: F401 - extends a class that is replaced in the tests
from rayfed.run import main

ALWAYS = (
    "algorithm=fedavg",
    "cluster=inline",
    "data.limit=24",
    "model.pretrained=false",
    "model.options={depth: 2}",
)


@dataclass(frozen=True)
class Case:
    """One malformed input.

    Attributes:
        name: What is wrong with it.
        words: What the error line must contain, such as the key or file and the value, separated by " | ".
        overrides: The command line, beyond ALWAYS, separated by " | ".
        make: Writes files into an empty folder; returns more of the command line.
    """

    name: str
    words: str
    overrides: str = ""
    make: Callable[[Path], Sequence[str]] = lambda folder: ()


def _split(text):
    return text.split(" | ") if text else []


def last_wins(arguments):
    """A command line in which no key is given twice, as the tables of cases build on common overrides."""
    last = {text.partition("=")[0]: text for text in arguments if "=" in text}
    return [text for text in arguments if "=" not in text or last[text.partition("=")[0]] is text]


def started(*args, **kwargs):
    raise AssertionError("an actor, a driver or a cluster was started for a malformed input")


def assert_refused(case, folder, cache, capsys, monkeypatch):
    """Exit code 2, one line that names the culprit, nothing started, nothing left."""
    for name in (
        "rayfed.engine.session.launch",
        "ray.init",
        "ray.remote",
        "rayfed.executors.inline.InlineExecutor",
    ):
        monkeypatch.setattr(name, started)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("ray.is_initialized", lambda: False)  # other tests share one that is not asked here
    made, output = folder / "made", folder / "run"
    made.mkdir()
    arguments = [
        f"output={output}",
        f"data.cache={cache}",
        *ALWAYS,
        *_split(case.overrides),
        *case.make(made),
    ]
    arguments = last_wins(arguments)
    before = {path for path in cache.iterdir() if path.suffix != ".lock"}
    code = main(arguments)
    said = capsys.readouterr()
    error = said.err.strip()
    assert code == 2, error
    assert len(error.splitlines()) == 1, error
    assert error.startswith("error: "), error
    assert error.isprintable(), error
    for word in _split(case.words):
        assert word in error, error
    assert not output.exists(), sorted(output.rglob("*"))
    left = {path for path in cache.iterdir() if path.suffix != ".lock"} - before
    left = {path for path in left if path.suffix != ".tmp" or f".{os.getpid()}." in path.name}
    assert all(path.suffix == ".arrow" for path in left), left  # other processes write files there, too
