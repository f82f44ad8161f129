"""make gpu-check, rehearsed on the CPU and on the pretended accelerator."""

import itertools
import json
import os
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from benchmarks import gpu_check
from benchmarks.gpu_check import SMALL, Place
from rayfed.devices import HOST
from tests import tiny_models
from tests.conftest import ROOT
from tests.pretended import TYPE, pretended
from tests.pretended_autocast import mixed_precision
from tests.pretended_graphs import recording
from tests.pretended_memory import memory
from tests.rounding import near

CPU = Place(HOST, SMALL, ("fedavg",))


def test_a_method_is_compared_on_both_devices():
    with pretended() as device:
        row = gpu_check.compared("fedprox", torch.device(device.name))
    assert row["method"] == "fedprox"
    assert row["difference"] < 1e-5
    assert "bad" not in row
    assert device.counts.down > 0


def test_a_method_that_fails_is_reported(monkeypatch):
    with pretended() as device:
        monkeypatch.setattr(gpu_check, "TINY", (*gpu_check.TINY, "train.precision=bf16"))
        row = gpu_check.compared("fedavg", torch.device(device.name))
    assert row["difference"] == float("inf")
    assert "train.precision" in row["bad"]
    assert TYPE in row["bad"]


def test_methods_are_compared_with_dropout_of_the_same_numbers(monkeypatch):
    monkeypatch.setattr(gpu_check, "TINY", (*gpu_check.TINY, "tuning.dropout=0.5"))
    with pretended() as device:
        row = gpu_check.compared("fedavg", torch.device(device.name))
    assert row["difference"] < 1e-5
    with pretended() as device:
        monkeypatch.setattr(gpu_check, "dropping_as_devices", nullcontext)
        row = gpu_check.compared("fedavg", torch.device(device.name))
    assert row["difference"] > 1e-2


def test_a_method_that_is_too_far_away_is_bad_and_one_that_divides_may_be_farther(monkeypatch):
    values = itertools.cycle([torch.ones(3), torch.ones(3) + torch.tensor([0.0, 0.0, 5e-3])])
    monkeypatch.setattr(gpu_check, "played", lambda overrides, device: ({"head.weight": next(values)}, ""))
    rows = {name: gpu_check.compared(name, HOST) for name in ("fedavg", "fedadam", "fedclip")}
    assert ["bad" in row for row in rows.values()] == [True, False, False]
    near(rows["fedavg"]["difference"], 5e-3, 3, size=1.0)  # a sum, a difference and a quotient


def test_factors_of_a_singular_value_decomposition_are_compared_by_their_product(monkeypatch):
    a, b = torch.randn(2, 5), torch.randn(4, 2)
    name = "blocks.0.attn.proj.lora_"
    signs = itertools.cycle([1, -1])

    def played(overrides, device):
        sign = next(signs)
        return {f"{name}A": sign * a, f"{name}B": sign * b}, ""

    monkeypatch.setattr(gpu_check, "played", played)
    assert gpu_check.compared("flexlora", HOST)["difference"] == 0
    assert gpu_check.compared("fedavg", HOST)["difference"] == 2
    assert gpu_check.difference({f"{name}A": a}, {f"{name}A": a * float("nan")}) == float("inf")


@pytest.mark.slow
@pytest.mark.steady
def test_what_saves_launches_is_left_out_one_by_one(monkeypatch):
    seen = []

    def counted(last_round):
        device.counts.clear()
        last_round()
        seen.append(device.counts.kernels)
        return 1.0

    monkeypatch.setattr(gpu_check, "seconds", counted)
    monkeypatch.setattr(gpu_check, "MANY", ((2, 4),))
    monkeypatch.setattr(gpu_check, "REPEATS", 1)
    with pretended() as device, mixed_precision(), recording():
        rows = list(gpu_check.clients(Place(torch.device(device.name), SMALL)))
    assert len(rows) == len(seen) == 7
    graphs, everything, plain, loops, each, alone, torch_alone = seen
    assert graphs < everything < min(plain, loops)
    assert each < max(plain, loops) < alone < torch_alone


def test_a_method_that_has_no_graphs_is_not_bad():
    row = gpu_check._method_with_graphs("slora", HOST)
    assert row == {"method": "slora", "what": "graphs", "same": True, "passes": 0}


@pytest.mark.slow
@pytest.mark.steady
def test_graphs_are_used_and_compared():
    with pretended() as device, mixed_precision():
        place = Place(torch.device(device.name), SMALL)
        with recording():
            rows = list(itertools.islice(gpu_check.graphs(place), 2))
        with recording(dict.fromkeys(range(1, 9), RuntimeError("refused"))):
            refused = next(gpu_check.graphs(place))
    assert [row["same"] for row in rows] == [True] * 2
    assert all(row["recorded"] > 0 and row["passes"] > 2 and "bad" not in row for row in rows)
    assert refused["bad"] == "no pass could be recorded"


@pytest.mark.slow
@pytest.mark.steady
@pytest.mark.parametrize(("part", "rows"), [("bits", 6), ("bf16", 1), ("training", 6), ("plain", 3)])
def test_parts_find_nothing_bad_on_a_device(part, rows):
    with pretended() as device, mixed_precision(), memory(10**9):
        found = list(gpu_check.PARTS[part](Place(torch.device(device.name), SMALL)))
    assert len(found) == rows
    assert [row for row in found if "bad" in row] == []


def test_each_row_is_written_and_a_part_that_fails_ends_no_other(tmp_path, monkeypatch, capsys):
    file = tmp_path / "check.json"

    def broken(place):
        yield {"what": "first"}
        assert json.loads(file.read_text())["parts"] == {"broken": [{"what": "first"}]}
        raise RuntimeError("CUDA error: an illegal memory access\nmore lines")

    parts = {"broken": broken, "whole": lambda place: iter([{"what": "second", "same": True}])}
    monkeypatch.setattr(gpu_check, "PARTS", parts)
    assert gpu_check.main(["--device", "cpu", "--json", str(file), "--parts", "broken", "whole"]) == 1
    found = json.loads(file.read_text())
    assert [row.get("what") for rows in found["parts"].values() for row in rows] == ["first", None, "second"]
    said = capsys.readouterr().out
    block = said.partition("```\n")[2]
    assert "broken: this part: RuntimeError: CUDA error: an illegal memory access" in block
    assert "whole: ok (1)" in block
    assert f"torch: {torch.__version__}" in block
    assert "driver: " in block
    assert gpu_check.main(["--device", "cpu", "--json", str(file), "--parts", "whole"]) == 0


def test_the_five_methods_that_differ_most_are_named():
    rows = [{"method": f"m{i}", "difference": i * 1e-5} for i in range(8)]
    found = {"machine": {"device": "x"}, "parts": {"methods": rows}}
    assert [row["method"] for row in gpu_check.worst(found)] == ["m7", "m6", "m5", "m4", "m3"]
    assert gpu_check.summary(found).splitlines()[-2] == "difference 3.0e-05: m3"


def test_tensors_that_differ_between_runs_are_bad(monkeypatch):
    digests = map(str, itertools.count())
    monkeypatch.setattr(gpu_check, "played", lambda overrides, device: ({}, next(digests)))
    assert [row["bad"] for row in gpu_check.bits(CPU)] == ["the tensors differ"] * 6


def test_bf16_is_compared_with_the_bf16_of_the_cpu():
    (row,) = gpu_check.bf16(CPU)
    assert row["difference"] == 0
    assert 1e-3 < row["bar"] < 0.2


def test_the_plan_counts_what_other_processes_leave_free(monkeypatch):
    gb = 10**9
    found = SimpleNamespace(device_total=80 * gb, device_free=20 * gb, device_bytes=6 * gb, device="cpu")
    monkeypatch.setattr(gpu_check, "trained", lambda *args, **options: {"peak_gigabytes": 5})
    monkeypatch.setattr(gpu_check, "lora", lambda *args: SimpleNamespace(experiment=None, context=None))
    monkeypatch.setattr(gpu_check, "measure", lambda *args, **options: found)
    (row,) = gpu_check.plan(CPU)
    assert row["actors_on_this_gpu"] == 3
    assert "bad" not in row


@pytest.mark.slow
@pytest.mark.steady
def test_too_little_memory_is_tried_and_its_advice_checked(monkeypatch):
    rows = list(gpu_check.memory(CPU))
    assert [row["what"] for row in rows if "bad" not in row] == [
        "a call that fails",
        "the same run afterwards",
        "a plan that does not fit",
    ]
    monkeypatch.setattr(gpu_check, "short_of_memory", lambda device, most: pretended())
    assert [row["what"] for row in gpu_check.memory(CPU) if "bad" in row] == [
        "a call that fails",
        "a plan that does not fit",
    ]


def test_plain_pytorch_casts_what_the_engine_casts(monkeypatch):
    seen = []
    real = gpu_check.attach
    monkeypatch.setattr(gpu_check, "attach", lambda net, weights: (seen.append(net), real(net, weights)))
    for precision in ("fp32", "bf16"):
        assert gpu_check.plainly_trained(CPU, precision)["images_per_second"] > 0
    assert [net.mixed for net in seen] == [False, True]
    kinds = [{p.dtype for p in net.parameters() if p.ndim > 1} for net in seen]
    assert kinds == [{torch.float32}, {torch.float32, torch.bfloat16}]


@pytest.mark.slow
@pytest.mark.steady
def test_without_ray_everything_else_is_checked(monkeypatch):
    monkeypatch.setattr(gpu_check, "has_ray", lambda: False)
    assert list(gpu_check.actors(CPU)) == [{"skipped": "Ray is not installed"}]
    script = "import sys; sys.modules['ray'] = None; import benchmarks.gpu_check"
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT, timeout=300)


def test_a_named_interpreter_is_used_as_it_is():
    rest = {name: value for name, value in os.environ.items() if name != "PYTHON"}

    def asked(*arguments):
        command = ["make", "-n", "gpu-check", "VENV=/nowhere/venv", *arguments]
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=rest, check=True).stdout

    assert "/nowhere/python benchmarks/gpu_check.py" in asked("PYTHON=/nowhere/python")
    assert "venv" not in asked("PYTHON=/nowhere/python")
    assert "-m venv /nowhere/venv" in asked()


@pytest.mark.slow
@pytest.mark.ray
def test_the_rehearsal_runs_every_part(tmp_path):
    file = tmp_path / "check.json"
    before = gpu_check.PAGE.read_text()
    assert gpu_check.main(["--device", "cpu", "--json", str(file), "--methods", "fedavg", "ditto"]) == 0
    found = json.loads(file.read_text())
    parts = found["parts"]
    assert list(parts) == list(gpu_check.PARTS)
    assert {row["method"]: row["difference"] for row in parts["methods"]} == {"fedavg": 0, "ditto": 0}
    assert [row["precision"] for row in parts["plain"]] == ["fp32", "tf32", "bf16"]
    assert len(parts["training"]) == 6
    assert len(parts["clients"]) == 14
    assert [(row["same"], row["passes"]) for row in parts["graphs"]] == [(True, 0)] * 6
    texts = {(row["model"], row["what"]) for row in parts["texts"]}
    assert texts >= {(family, "a device") for family in tiny_models.CONFIGS}
    assert texts >= {(family, "groups") for family in tiny_models.DECODERS}
    assert all(row["seconds_per_round"] > 0 for row in parts["clients"])
    assert [row["what"] for row in parts["clients"]][5:7] == ["one by one", "plain PyTorch"]
    assert "skipped" in parts["kernels"][0]
    assert [row["actors"] for row in parts["actors"]] == ["a default run", 1, 2, 4, "auto"]
    assert len({row["sha256"] for row in parts["actors"][1:]}) == 1
    assert all(row["images_per_second"] > 0 for row in (*parts["plain"], *parts["training"]))
    assert parts["plan"][0]["planned_gigabytes"] > 0.6
    assert parts["plan"][0]["peak_gigabytes"] is None  # memory of torch on a CPU is not counted
    assert found["seconds"] > 0
    assert gpu_check.PAGE.read_text() == before
    assert "| bf16 | resident |" in gpu_check.page("<!-- check -->\n<!-- /check -->", found)


def test_a_machine_without_a_gpu_is_told_torchs_reason(monkeypatch):
    def refused(*args, **kwargs):
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 12020)")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch, "empty", refused)
    with pytest.raises(SystemExit, match=r"sees no cuda on this machine: The NVIDIA driver .* is too old"):
        gpu_check.main([])
