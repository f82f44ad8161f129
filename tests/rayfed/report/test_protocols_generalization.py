"""Tables of base_to_new, cross_dataset and cross_domain, and how these are continued."""

import json

import pytest

from rayfed.config.schema import load_config, to_yaml
from rayfed.record.readers import read_rows
from rayfed.record.recorded_run import RecordedRun
from rayfed.report.method_runs import MethodRuns
from rayfed.report.page.render import write_report
from rayfed.report.protocols import by_classes, by_data_set, harmonic_mean, of_global
from rayfed.resume import main as resume
from rayfed.run import main
from tests.conftest import SMALL
from tests.rayfed.report.test_protocols_leave_one_out import rows_of

CLIP = ("model=clip_mini", "tuning.train_head=false", "rounds=1", "data.val=0", "compare=[]")
SCORES = {"fedavg": (0.75, 0.5), "ditto": (0.0, 0.0)}


def write_run(folder, row):
    folder.mkdir(parents=True)
    rows = ({"round": 1, "accuracy": 0.3, "accuracy_domain": 0.3}, {"round": 2, **row}, {"round": 3})
    (folder / "rounds.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    (folder / "config.yaml").write_text(to_yaml(load_config(["algorithm=fedavg"])))


def test_the_harmonic_mean_and_the_mean_of_the_others_by_hand(tmp_path):
    """2 * 75 * 50 / 125 = 60; a personal method is shown with its global model; (50 + 20) / 2 = 35."""
    folders = {}
    for part, place in (("base", 0), ("new", 1)):
        for name in ("fedavg", "ditto"):
            folder = folders[name, part] = tmp_path / f"{name}-{part}"
            prefix = "global_" if name == "ditto" else ""
            row = {f"{prefix}accuracy": 0.9, f"{prefix}accuracy_domain": SCORES[name][place]}
            write_run(
                folder, row | ({"accuracy": 0.8, "accuracy_domain": 0.8} if prefix and not place else {})
            )
    (table,) = by_classes(MethodRuns(folders=folders)).parts
    assert table.rows == (("fedavg", "2", "75.00", "50.00", "60.00"), ("ditto", "2", "0.00", "0.00", "0.00"))
    first = MethodRuns(folders={("fedavg", "base"): folders["fedavg", "base"]})
    assert by_classes(first).parts[0].rows[0] == ("fedavg", "2", "75.00", "", "")
    assert harmonic_mean(0.2, 0.2) == pytest.approx(0.2)
    write_run(tmp_path / "third", {"accuracy": 0.1, "accuracy_domain": 0.2})
    alone = {key: folder for key, folder in folders.items() if key[0] == "fedavg"}
    (table,) = by_data_set(MethodRuns(folders={**alone, ("fedavg", "third"): tmp_path / "third"})).parts
    assert table.rows == (("fedavg", "2", "75.00", "50.00", "20.00", "35.00"),)
    assert table.columns[2:] == ("base", "new", "third", "mean of the others")


def test_the_table_says_which_methods_have_tensors_of_their_own_at_the_clients(tmp_path):
    pairs = [(name, part) for part in ("base", "new") for name in ("fedavg", "fedper")]
    folders = {(name, part): tmp_path / f"{name}-{part}" for name, part in pairs}
    for (name, _), folder in folders.items():
        write_run(folder, {"accuracy": 0.5, "accuracy_domain": 0.5})
        (folder / "config.yaml").write_text(to_yaml(load_config([f"algorithm={name}"])))
    *_, note = by_classes(MethodRuns(folders=folders)).parts[0].notes
    assert note.startswith("fedper: clients are scored with the tensors that stay at them")
    facts = folders["fedper", "new"] / "environment.json"
    what = "fedper: base and new classes are scored at each client, with the tensors that stay at it"
    for kept, more in ((5, ""), (3, "; 2 of 5 clients never trained and have initial values of these")):
        facts.write_text(json.dumps({"own_tensors": {"clients": 5, "kept": kept}}))
        notes = by_classes(MethodRuns(folders=folders)).parts[0].notes
        assert [one for one in notes if "fedper" in one] == [what + more]
    (folders["fedper", "base"] / "config.yaml").write_text("local: {stays: []}")
    bases = {key: folder for key, folder in folders.items() if key[1] == "base"}
    assert "fedper" not in "".join(by_classes(MethodRuns(folders=bases)).parts[0].notes)


def test_base_to_new_is_run_and_a_changed_model_is_scored_again(small, tmp_path):
    few = (*CLIP, "data.domains=[plain]", "data.new_classes=4")
    run = small(*few, "protocol=base_to_new")
    base_run, new_run = (run.path / "cells" / f"fedavg-{part}-seed0" for part in ("base", "new"))
    (row,) = (row for row in rows_of(run.path / "report.md") if "harmonic mean" in row)
    base, new = (of_global(RecordedRun(each).reported, "_domain") for each in (base_run, new_run))
    assert (float(row["base"]), float(row["new"])) == pytest.approx((100 * base, 100 * new), abs=0.006)
    assert float(row["harmonic mean"]) == pytest.approx(100 * harmonic_mean(base, new), abs=0.006)
    write_report([run.path], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "harmonic mean" in page
    assert run.scores.loc[0, "fedavg"] == pytest.approx(harmonic_mean(base, new))
    kept = (base_run / "history" / "000001.json.gz").stat().st_mtime_ns
    (new_run / "model" / "params.safetensors").unlink()
    assert resume([str(run.path), "--quiet"]) == 0
    assert [one for one in rows_of(run.path / "report.md") if "harmonic mean" in one] == [row]
    assert (base_run / "history" / "000001.json.gz").stat().st_mtime_ns == kept
    first = (new_run / "model" / "params.safetensors").read_bytes()
    assert resume([str(run.path), "rounds=+1", "--quiet"]) == 0
    assert len(read_rows(base_run)) == 2
    assert len(read_rows(new_run)) == 1
    assert (new_run / "model" / "params.safetensors").read_bytes() != first
    (row,) = (row for row in rows_of(run.path / "report.md") if "harmonic mean" in row)
    assert row["round"] == "2"


def test_other_domains_are_those_without_clients(small):
    run = small(
        "protocol=cross_domain", "data.domains=[plain,street]", "rounds=1", "model.options={depth: 1}"
    )
    table = {row["trained on"]: row for row in rows_of(run.path / "report.md") if "trained on" in row}
    assert list(table) == ["plain", "street"]
    for source, target in (("plain", "street"), ("street", "plain")):
        last = read_rows(run.path / "cells" / f"fedavg-from-{source}-seed0")[-1]
        assert float(table[source]["own domains"]) == pytest.approx(100 * last["accuracy_domain"], abs=0.006)
        assert float(table[source][target]) == pytest.approx(100 * last["held_out_accuracy"], abs=0.006)
        assert table[source]["mean of the others"] == table[source][target]
        assert table[source][source] == ""


def test_models_without_class_names_are_refused_before_anything_runs(tmp_path, cache, capsys):
    given = [*SMALL, f"data.cache={cache}", "cluster=inline", f"output={tmp_path / 'run'}"]
    assert main([*given, "protocol=base_to_new"]) == 2
    assert "cannot score new ones; choose a model" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert main([*given, "protocol=cross_dataset", "data.targets={pacs: {root: nowhere}}"]) == 2
    assert "nowhere" in capsys.readouterr().err
