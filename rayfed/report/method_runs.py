"""The runs of several methods, alone or in each run of a protocol, as the tables of all of them read them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayfed.errors import ConfigError
from rayfed.record.folder import TENSORS
from rayfed.record.readers import STUDY, read_json, reading
from rayfed.record.recorded_run import RecordedRun, Rule


@dataclass(frozen=True, kw_only=True)
class MethodRuns:
    """Runs of one seed by method, and by the part of a protocol.

    Attributes:
        folders: Folder of each run, by the method and the part; the part is empty without a protocol.
    """

    folders: Mapping[tuple[str, str], Path]

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods, in their order."""
        return tuple(dict.fromkeys(method for method, _ in self.folders))

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts, in their order."""
        return tuple(dict.fromkeys(part for _, part in self.folders))

    @property
    def config(self) -> Mapping[str, Any]:
        """The config of the first run, as plain containers."""
        return RecordedRun(next(iter(self.folders.values()))).config

    def each(self) -> Iterator[tuple[str, str, Path]]:
        """Part, method and folder of each run, part by part."""
        for part in self.parts:
            for method in self.methods:
                if (method, part) in self.folders:
                    yield part, method, self.folders[method, part]

    def recorded(self, rule: Rule = "final") -> Iterator[tuple[str, str, RecordedRun]]:
        """Part, method and records of each run, part by part; `rule` says which round of it is reported."""
        for part, method, folder in self.each():
            yield part, method, RecordedRun(folder, rule)

    def finished(self) -> MethodRuns:
        """The finished runs of the parts that all methods have finished, without methods that finished none.

        So a mean over the parts is over the same ones for each method.
        """
        done = {key: folder for key, folder in self.folders.items() if (folder / TENSORS).is_file()}
        methods = {method for method, _ in done}
        whole = {part for part in self.parts if all((method, part) in done for method in methods)}
        return MethodRuns(folders={key: folder for key, folder in done.items() if key[1] in whole})


@dataclass(frozen=True, kw_only=True)
class StudyRuns:
    """The runs of a study that have begun.

    Attributes:
        protocol: The protocol whose runs they are; empty: none.
        seeds: The runs of each seed, in the order of the study; methods are the rows of its table.
    """

    protocol: str
    seeds: tuple[MethodRuns, ...]


def runs_in(study: Path) -> StudyRuns:
    """The runs in the folder of a study.

    Raises:
        ConfigError: None of them has begun.
        DamagedError: The study cannot be read.
    """
    tree = read_json(study / STUDY, dict)
    seeds: dict[Any, dict[tuple[str, str], Path]] = {}
    with reading(study / STUDY):
        for cell in tree["cells"]:
            at, folder = cell["coordinates"], study / cell["folder"]
            if (folder / "config.yaml").exists():
                key = (str(cell["label"]), str(at.get("part", "")))
                seeds.setdefault(at.get("seed"), {})[key] = folder
        protocol = str(tree["protocol"])
    if not seeds:
        raise ConfigError(f"{study}: none of the study's cells has begun; there is nothing to report yet")
    return StudyRuns(protocol=protocol, seeds=tuple(MethodRuns(folders=own) for own in seeds.values()))
