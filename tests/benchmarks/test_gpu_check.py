"""make gpu-check, rehearsed on the CPU and on the pretended accelerator."""

import json

import pytest
import torch

from benchmarks import gpu_check
from tests.pretended import TYPE, pretended


def test_a_method_is_compared_on_both_devices():
    with pretended() as device:
        row = gpu_check.compared("fedprox", torch.device(device.name))
    assert row["method"] == "fedprox"
    assert row["difference"] < 1e-5
    assert device.counts.down > 0


def test_a_method_that_fails_is_reported(monkeypatch):
    with pretended() as device:
        monkeypatch.setattr(gpu_check, "TINY", (*gpu_check.TINY, "train.precision=bf16"))
        row = gpu_check.compared("fedavg", torch.device(device.name))
    assert row["difference"] == float("inf")
    assert "train.precision" in row["error"]
    assert TYPE in row["error"]


@pytest.mark.slow
@pytest.mark.ray
def test_the_rehearsal_runs_every_part(tmp_path):
    file = tmp_path / "check.json"
    before = gpu_check.PAGE.read_text()
    assert gpu_check.main(["--device", "cpu", "--json", str(file), "--methods", "fedavg", "ditto"]) == 0
    found = json.loads(file.read_text())
    assert {name: row["difference"] for name, row in found["methods"].items()} == {"fedavg": 0, "ditto": 0}
    assert [row["precision"] for row in found["plain"]] == ["fp32", "tf32", "bf16"]
    assert len(found["training"]) == 6
    assert [row["actors"] for row in found["actors"]] == [1, 2, 4]
    assert all(row["images_per_second"] > 0 for row in (*found["plain"], *found["training"]))
    assert found["plan"]["planned_gigabytes"] > 0.6
    assert found["plan"]["peak_gigabytes"] is None  # memory of torch on a CPU is not counted
    assert found["seconds"] > 0
    assert gpu_check.PAGE.read_text() == before
    assert "| bf16 | resident |" in gpu_check.page("<!-- check -->\n<!-- /check -->", found)


def test_a_machine_without_a_gpu_is_told_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="torch sees no cuda on this machine"):
        gpu_check.main([])
