"""The tests mirror the modules, so that whoever knows a module finds its tests."""

import importlib
import importlib.util
import re
from pathlib import Path

from tests.conftest import ROOT

IMPORTS = re.compile(r"^ +from ((?:rayfed|algorithms|tune)[\w.]*) import ([\w, ]+)$", re.MULTILINE)
"""Imports in functions, and in programs that tests run in other processes."""

SUBJECTS = {
    "algorithms": {
        "contract",
        "contract_own_network",
        "depth_views",
        "fair_servers",
        "end_to_end",
        "exact_lora",
        "group_reports",
        "options",
        "private",
        "private_attacks",
        "rounds_by_hand",
        "wiring",
    },
    "rayfed": {"bad_input", "folders", "input_faults", "interrupted"},
    "rayfed/config": {"malformed_config"},
    "rayfed/data": {"malformed", "malformed_folders", "streaming"},
    "rayfed/data/readers": {"layouts"},
    "rayfed/engine": {
        *("batch_norm", "damage", "deployed", "disasters", "endings"),
        *("missing", "nonfinite", "population", "other_tasks", "placement", "precision", "texts"),
    },
    "rayfed/executors": {"dashboard", "device_memory"},
    "rayfed/experiment/study": {"doors"},
    "rayfed/models": {"other_tasks"},
    "rayfed/report": {"device", "gallery"},
    "rayfed/report/page": {"in_chromium"},
    "rayfed/tuning": {"schemes"},
}
"""What a test file may be about that no single module does, by folder."""


def strays(root: Path, subjects: dict[str, set[str]]) -> set[str]:
    """Test files of `tests/rayfed`, `tests/algorithms` and `tests/tune` that name no module and no subject.

    Several files may test one module: their names begin with its name, as in `test_folder_round_rows.py`.
    `test_main.py` and `test_init.py` belong to `__main__.py` and `__init__.py`; the leading underscore of a
    private module is left out.
    """
    files = [
        path.relative_to(root / "tests")
        for package in ("rayfed", "algorithms", "tune")
        for path in (root / "tests" / package).rglob("test_*.py")
    ]
    return {str(file) for file in files if not _names_something(root, file, subjects)}


def _names_something(root: Path, file: Path, subjects: dict[str, set[str]]) -> bool:
    name = file.stem.removeprefix("test_")
    parts = name.split("_")
    beginnings = ["_".join(parts[:number]) for number in range(1, len(parts) + 1)]
    modules = {"main": ("__main__",), "init": ("__init__",)}.get(name, (*beginnings, f"_{name}"))
    folder = root / file.parent
    return (
        any((folder / f"{module}.py").is_file() for module in modules)
        or (folder / name / "__init__.py").is_file()
        or name in subjects.get(str(file.parent), ())
    )


def test_every_test_file_names_a_module_or_a_listed_subject():
    assert strays(ROOT, SUBJECTS) == set()


def test_every_subject_has_a_file_and_is_no_module():
    for folder, names in SUBJECTS.items():
        for name in names:
            assert (ROOT / "tests" / folder / f"test_{name}.py").is_file(), f"{folder}: {name}"
            assert not (ROOT / folder / f"{name}.py").exists(), f"{folder}: {name} is a module"


def test_a_new_stray_file_is_found(tmp_path):
    for name in ("rayfed/data/stored.py", "algorithms/_meta.py", "tune/__main__.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    for name in (
        "rayfed/data/test_stored",
        "rayfed/data/test_stored_size",
        "rayfed/data/test_restored",
        "algorithms/test_meta",
        "tune/test_main",
        "tune/test_cache",
    ):
        (tmp_path / "tests" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tests" / f"{name}.py").touch()
    assert strays(tmp_path, {}) == {"rayfed/data/test_restored.py", "tune/test_cache.py"}
    assert strays(tmp_path, {"rayfed/data": {"restored"}, "tune": {"cache"}}) == set()


def test_what_tests_import_in_other_processes_exists():
    """Programs in strings are only run by slow tests, which would notice a new name late."""
    missing = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for module, names in IMPORTS.findall(path.read_text()):
            there = importlib.import_module(module)
            for name in (each.partition(" as ")[0].strip() for each in names.split(",")):
                is_package = hasattr(there, "__path__")
                if not (
                    hasattr(there, name) or (is_package and importlib.util.find_spec(f"{module}.{name}"))
                ):
                    missing.append(f"{path.relative_to(ROOT)}: {module}.{name}")
    assert missing == []
