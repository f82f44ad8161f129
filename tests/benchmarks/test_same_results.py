"""benchmarks/same_results.py notices every kind of difference, and nothing that is none."""

import json
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import save_file

from benchmarks import same_results
from benchmarks.same_results import CaseError, cases, differences, digests, main
from tests.conftest import ROOT

WEIGHTS = np.arange(6, dtype=np.float32).reshape(2, 3)
ROW = {"round": 1, "loss": 0.5, "virtual_seconds": 4.0, "seconds": 0.1, "seconds_training": 0.1}
CLIENTS = [
    {"round": 1, "exchange": "fit", "client": "c0", "model": "own", "metric": "loss", "value": 0.25},
    {"round": 1, "exchange": "fit", "client": "c1", "model": "own", "metric": "loss", "value": 0.5},
]


def run_folder(path, tensors=None, row=ROW, clients=CLIENTS, rows_file="rounds.jsonl"):
    (path / "model").mkdir(parents=True)
    save_file({"w": WEIGHTS} if tensors is None else tensors, path / "model" / "params.safetensors")
    (path / rows_file).write_text(json.dumps(row) + "\n")
    pq.write_table(pa.Table.from_pylist(clients), path / "clients.parquet")
    return path


def changed(tmp_path, **other):
    before, after = run_folder(tmp_path / "before"), run_folder(tmp_path / "after", **other)
    return differences(digests(before), digests(after))


@pytest.mark.parametrize(
    "tensors",
    [
        {"v": WEIGHTS},
        {"w": WEIGHTS.reshape(3, 2)},
        {"w": WEIGHTS.view(np.int32)},
        {"w": np.nextafter(WEIGHTS, 9, dtype=np.float32)},
        {"w": WEIGHTS, "v": WEIGHTS},
    ],
    ids=["name", "shape", "type", "last bits", "one more"],
)
def test_other_tensors_differ(tmp_path, tensors):
    assert changed(tmp_path, tensors=tensors) == ["tensors"]


def test_other_rows_and_scores_differ(tmp_path):
    assert changed(tmp_path / "1", row={**ROW, "loss": 0.5000000001}) == ["loss"]
    assert changed(tmp_path / "2", row={**ROW, "virtual_seconds": 5.0}) == ["virtual_seconds"]
    assert changed(tmp_path / "3", row={k: v for k, v in ROW.items() if k != "loss"}) == ["loss"]
    assert changed(tmp_path / "4", clients=[CLIENTS[0], {**CLIENTS[1], "value": 0.6}]) == ["clients"]
    assert changed(tmp_path / "5", clients=CLIENTS[:1]) == ["clients"]


def test_clocks_new_columns_and_names_of_files_and_exchanges_do_not(tmp_path):
    later = {**ROW, "seconds": 9.0, "seconds_training": 8.0, "events": 0}
    renamed = [{**row, "exchange": "train_and_score"} for row in reversed(CLIENTS)]
    assert changed(tmp_path, row=later, clients=renamed, rows_file="result.json") == []


def test_every_run_below_the_folder_counts(tmp_path):
    run_folder(tmp_path / "run" / "photo")
    one = digests(tmp_path / "run")
    run_folder(tmp_path / "run" / "sketch")
    assert differences(one, digests(tmp_path / "run")) == [
        "tensors",
        "clients",
        "round",
        "loss",
        "virtual_seconds",
    ]


def test_a_run_without_tensors_cannot_be_compared(tmp_path):
    (run_folder(tmp_path) / "model" / "params.safetensors").unlink()
    with pytest.raises(CaseError, match=re.escape("no model/params.safetensors")):
        digests(tmp_path)


def test_every_case_of_the_saved_table_is_still_there():
    saved = json.loads((ROOT / "benchmarks" / "same_results_7d22d02.json").read_text())
    found = cases(ROOT)
    assert len([name for name in saved["cases"] if name.startswith("method/")]) == 32
    assert saved["cases"].keys() <= found.keys()
    assert found["method/fedra"]["capacity"] == "capacity=[12,6,3]"
    assert found["ray/two_actors"]["cluster"] == "cluster=local"  # replaces cluster=inline


PRETENDED = """
import json, sys
from pathlib import Path
import numpy as np
from safetensors.numpy import save_file

options = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
if options["algorithm"] == "broken":
    sys.exit("error: it broke")
folder = Path(options["output"])
(folder / "model").mkdir(parents=True)
moved = options["algorithm"] == Path("moved").read_text()
rate = options.get("train.lr", Path("rate").read_text())
(folder / "config.yaml").write_text(f"train: {{lr: {rate}, epochs: 1}}")
save_file({"w": np.full(2, moved + float(rate))}, folder / "model" / "params.safetensors")
(folder / "rounds.jsonl").write_text(json.dumps({"round": 1}) + "\\n")
"""


@pytest.fixture
def checkout(tmp_path):
    """A pretended checkout; the method that its file `moved` names has another result than the others."""
    folder = tmp_path / "checkout"
    for name, text in {
        "rayfed/__init__.py": "",
        "rayfed/run.py": PRETENDED,
        "moved": "",
        "rate": "0.1",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "algorithms").mkdir()
    for name in ("kept", "other"):
        (folder / "algorithms" / f"{name}.py").touch()
    return folder


@pytest.mark.slow
@pytest.mark.steady
def test_a_table_is_saved_and_compared(checkout, tmp_path, capsys, monkeypatch):
    table, here = tmp_path / "table.json", ["--checkout", str(checkout), "--only", "method/[!f]*"]
    against = [*here, "--against", str(table)]
    assert main([*here, "--save", str(table)]) == 0
    assert main(against) == 0
    assert "| yes |" in capsys.readouterr().out
    (checkout / "algorithms" / "added.py").touch()
    assert main(against) == 0
    assert re.search(
        r"method/added \|  \| \w{12} \| new \|.*\n1 new, 2 yes$", capsys.readouterr().out.strip(), re.S
    )

    (checkout / "rate").write_text("0.2")
    assert main(against) == 1
    assert main([*against, "--same-training"]) == 0
    (checkout / "rate").write_text("0.1")
    capsys.readouterr()
    (checkout / "moved").write_text("kept")
    assert main(against) == 1
    assert capsys.readouterr().out.strip().endswith("1 new, 1 NO, 1 yes")
    (checkout / "moved").write_text("")
    (checkout / "algorithms" / "broken.py").touch()
    assert main(against) == 1
    assert "FAILED: exit code 1: error: it broke" in capsys.readouterr().out
    (checkout / "algorithms" / "broken.py").unlink()
    (checkout / "algorithms" / "kept.py").unlink()
    assert main(against) == 1
    assert "method/kept | " in (shown := capsys.readouterr().out)
    assert "GONE" in shown

    monkeypatch.setattr(same_results, "machine", lambda: {"processor": "another", "torch": "0.1"})
    main(against)
    assert "another processor, torch" in capsys.readouterr().out


def test_a_comparison_of_nothing_fails(checkout, tmp_path, capsys, monkeypatch):
    table = tmp_path / "table.json"
    here = ["--checkout", str(checkout), "--only"]
    assert main([*here, "method/kept", "--save", str(table)]) == 0
    monkeypatch.setattr(same_results, "SHARED", tmp_path / "nowhere")
    assert main([*here, "images/pacs"]) == 1
    assert "skipped: " in capsys.readouterr().out
    (checkout / "algorithms" / "added.py").touch()
    assert main([*here, "method/added", "--against", str(table)]) == 1
    with pytest.raises(SystemExit, match="2"):
        main([*here, "no/such", "--against", str(table)])
