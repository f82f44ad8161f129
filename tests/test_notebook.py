"""The notebook tour: its code is valid, its experiments are accepted, and it runs to its last figure."""

import ast
import json

import pytest

from rayfed.config.schema import compatible_parts, load_config
from tests.conftest import ROOT

NOTEBOOK = ROOT / "notebooks" / "tour.ipynb"
OWN = ROOT / "notebooks" / "own.ipynb"
CELLS = json.loads(NOTEBOOK.read_text())["cells"]
CODE = {cell["id"]: "".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code"}


def test_no_output_is_committed():
    assert len(CODE) > 5
    for cells in (CELLS, json.loads(OWN.read_text())["cells"]):
        assert all(
            cell["execution_count"] is None and not cell["outputs"] for cell in cells if "outputs" in cell
        )


def test_its_experiments_are_accepted_and_have_the_same_clients():
    for source in CODE.values():
        ast.parse(source)
    names = {"ROUNDS": 2}
    exec(CODE["experiment"], names)
    assert list(names["METHODS"]) == ["FedAvg", "FedGCR", "FedRA"]
    configs = [load_config([*names["SETTINGS"], *overrides]) for overrides in names["METHODS"].values()]
    for config in configs:
        compatible_parts(config)
    parts = {
        (c.data.partition.scheme, c.data.partition.clients_per_domain, c.data.limit, c.seed) for c in configs
    }
    assert parts == {("by_domain", 1, None, 0)}


@pytest.mark.slow
def test_it_runs_and_shows_its_figures(tmp_path, monkeypatch):
    import nbformat
    from nbclient import NotebookClient

    for key, value in {
        "TOUR_ROUNDS": "2",
        "TOUR_FOLDER": str(tmp_path / "runs"),
        "PYTHONPATH": str(ROOT),
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
        "IPYTHONDIR": str(tmp_path / "ipython"),
    }.items():
        monkeypatch.setenv(key, value)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = {cell["id"]: cell.get("outputs", []) for cell in notebook.cells}
    pictures = {
        name: sum("image/png" in output.get("data", {}) for output in found)
        for name, found in outputs.items()
    }
    assert {name: count for name, count in pictures.items() if count} == {"data": 1, "curves": 1, "inside": 2}
    shown = "".join(output["data"]["text/plain"] for output in outputs["comparison"])
    assert all(name in shown for name in ("FedAvg", "FedGCR", "FedRA", "worst domain"))
    assert (tmp_path / "runs" / "fedra" / "report.md").is_file()


@pytest.mark.slow
@pytest.mark.steady
def test_the_notebook_about_own_parts_runs_and_its_results_show_themselves(tmp_path, monkeypatch):
    import nbformat
    from nbclient import NotebookClient

    for key, value in {
        "RAYFED_CACHE": str(tmp_path / "cache"),
        "PYTHONPATH": str(ROOT),
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
        "IPYTHONDIR": str(tmp_path / "ipython"),
    }.items():
        monkeypatch.setenv(key, value)
    notebook = nbformat.read(OWN, as_version=4)
    NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = {cell["id"]: cell.get("outputs", []) for cell in notebook.cells}
    for name in ("run", "clients", "compare", "sweep"):
        assert any("text/html" in output.get("data", {}) for output in outputs[name]), name
    assert any("image/png" in output.get("data", {}) for output in outputs["plot"])
    assert {path.name for path in tmp_path.iterdir()} <= {"cache", "ipython"}
