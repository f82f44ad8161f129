"""A run as a user sees it: files that other programs read, the table, real images, a wheel, a job."""

import json
import subprocess
import sys
import time
import zipfile

import pyarrow.parquet as pq
import pytest
import torch

from rayfed.config.schema import load_config
from rayfed.experiment.finished_run import Run
from rayfed.record.recorded_run import RecordedRun
from rayfed.report.final_table import final_table
from tests.conftest import ROOT
from tests.rayfed.executors.head_node import head_node, ray_command
from tests.rounding import equally_near, exactly


def test_adapters_load_with_peft_and_give_the_same_features(small):
    from peft import PeftModel

    from rayfed.models.build import build_backbone
    from rayfed.tuning.base import apply_tuning, load
    from rayfed.tuning.lora import Lora

    result = small("model.pretrained=true", "model.options={}", "train.lr=0.1")
    config = load_config([], result.path / "config.yaml").model
    ours = apply_tuning(build_backbone(config, 10, 0), Lora(rank=2), 0)
    load(ours, result.params)
    theirs = PeftModel.from_pretrained(build_backbone(config, 10, 0).net, result.path / "model").eval()
    x = torch.rand(3, 3, 32, 32)
    judge = exactly(lambda m, x: m.features(x), ours.eval(), x)
    equally_near([ours.features(x)], [theirs(x)], [judge])
    noted = json.loads((result.path / "model" / "adapter_config.json").read_text())
    assert (noted["r"], noted["base_model_name_or_path"]) == (2, "vit_mini")


def test_table_statistics_follow_from_its_rows(small):
    images = ("data.limit=60", "data.partition.clients_per_domain=2")
    result = small("model.pretrained=true", "model.options={}", *images, "figures=true")
    table = final_table(RecordedRun(result.path))
    accuracies = torch.tensor([float(row[-1]) for row in table.rows])
    metrics = result.metrics
    assert metrics["accuracy_domain"] * 100 == pytest.approx(float(accuracies.mean()), abs=0.06)
    assert metrics["sigma_type"] * 100 == pytest.approx(float(accuracies.std(correction=0)), abs=0.1)
    assert metrics["worst_domain"] == table.rows[int(accuracies.argmin())][0]
    assert {row[1] for row in table.rows} == {"2"}
    assert all(len(line) == len(table.text().splitlines()[1]) for line in table.text().splitlines()[4:9])
    report = (result.path / "report.md").read_text()
    assert all(row[0] in report for row in table.rows)
    assert (result.path / "figures" / "accuracy.png").stat().st_size > 5000


def test_figures_are_drawn_only_where_they_are_wanted(small):
    result = small("figures=false", "rounds=1")
    assert not (result.path / "figures").exists()
    assert "figures/" not in (result.path / "report.md").read_text()
    assert "global accuracy" in (result.path / "report.md").read_text()


def test_a_held_out_domain_is_scored_and_never_trained_on(small):
    result = small("data.held_out=street")
    manifest = pq.read_table(result.path / "partition.parquet").to_pylist()
    street = [row for row in manifest if row["domain"] == "street"]
    assert street
    assert {row["split"] for row in street} == {"held_out"}
    assert {row["client"] for row in street} == {""}
    assert "street (held out)" in [row[0] for row in final_table(RecordedRun(result.path)).rows]
    assert 0 <= result.metrics["held_out_accuracy"] <= 1


def test_local_reports_the_clients_own_models_and_sends_nothing(small):
    result = small("algorithm=local", "rounds=3")
    assert result.history["bytes_up"].sum() == 0
    assert result.history["bytes_down"].sum() == 0
    assert {"accuracy", "global_accuracy"} <= set(result.history.columns)
    start = small("algorithm=local", "rounds=1", "evaluation.every=0")
    assert start.sha256 == result.sha256  # the global model never moved


def test_centralized_is_one_trainer_scored_like_everybody(small):
    result = small("algorithm=centralized", "data.partition.clients_per_domain=2")
    transfers = pq.read_table(result.path / "transfers.parquet").to_pylist()
    assert {row["client"] for row in transfers} == {"pooled"}
    assert len(final_table(RecordedRun(result.path)).rows) == 5


@pytest.mark.slow
@pytest.mark.steady
def test_fedprox_with_mu_zero_is_fedavg(small):
    steps = "train.epochs=2"  # the pull is zero in the first step of a round
    assert small("algorithm=fedprox", "local.mu=0", steps).sha256 == small(steps).sha256
    assert small("algorithm=fedprox", "local.mu=1", steps).sha256 != small(steps).sha256


@pytest.mark.slow
@pytest.mark.steady
def test_pacs_runs_on_real_images(small, shared):
    overrides = [
        "data=pacs",
        f"data.root={shared / 'data' / 'PACS'}",
        "model.pretrained=true",
        "data.limit=70",
    ]
    result = small(*overrides, "data.held_out=sketch", "model.options={}", "tuning.rank=4", "rounds=3")
    assert {row[0] for row in final_table(RecordedRun(result.path)).rows} == {
        "photo",
        "art_painting",
        "cartoon",
        "sketch (held out)",
    }
    assert result.history["loss"].is_monotonic_decreasing


@pytest.mark.slow
@pytest.mark.steady
def test_the_wheel_carries_configs_weights_and_packages(tmp_path):
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True, timeout=300)
    (wheel,) = tmp_path.glob("rayfed_sim-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {
        "rayfed/configs/config.yaml",
        "rayfed/__init__.pyi",
        "rayfed/configs/algorithm/fedgcr.yaml",
        "rayfed/models/weights/vit_mini.safetensors",
        "algorithms/fedprox.py",
        "tune/__init__.py",
    } <= names
    assert not any(name.startswith(("fed/", "tests/", "configs/")) for name in names)
    # The unpacked wheel alone, away from the checkout, composes an experiment.
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    script = "import rayfed, rayfed.config.schema as c; "
    script += "print(rayfed.__file__, c.load_config(['algorithm=fedprox']).local)"
    done = subprocess.run(
        [
            sys.executable,
            "-S",
            "-c",
            f"import sys; sys.path[:0]={[str(tmp_path / 'site'), *sys.path]!r}; {script}",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert str(tmp_path) in done.stdout
    assert "'mu': 0.01" in done.stdout


@pytest.mark.slow
@pytest.mark.ray
def test_ray_job_submit(tmp_path, cache):
    """A local head node of our own, a job submitted to it, its exit code, its run folder."""
    command = [*ray_command(), "job", "submit", "--working-dir", ".", "--"]
    command += [sys.executable, "-m", "rayfed.run"]
    overrides = [
        "algorithm=fedavg",
        "rounds=1",
        "data.limit=24",
        f"data.cache={cache}",
        f"output={tmp_path / 'run'}",
    ]

    def submit(*overrides):
        return subprocess.run([*command, *overrides], cwd=ROOT, env=node.env, capture_output=True, text=True)

    with head_node() as node:
        for _ in range(100):
            done = submit(*overrides)
            said = done.stdout + done.stderr
            if "Failed to connect" not in said and "No available agent" not in said:  # it is up
                break
            time.sleep(1)
        assert done.returncode == 0, done.stdout + done.stderr
        assert (tmp_path / "run" / "rounds.jsonl").exists()
        bad = submit("rouds=1")
        assert bad.returncode != 0
        assert "did you mean 'rounds'" in bad.stdout + bad.stderr


def test_simulate_returns_what_it_wrote(small):
    result = small("rounds=1")
    assert result.history["round"].tolist() == [1]
    assert result.metrics["round"] == 1
    assert set(result.params) == set(Run(result.path, result.sha256).params)
