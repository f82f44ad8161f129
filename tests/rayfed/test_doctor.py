"""The doctor measures one client for real, says what does not fit, and leaves nothing running."""

import json
import multiprocessing
import os
import platform
import re
import shutil
import signal
import sys
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest
import torch
from torch import nn

from rayfed.config.schema import compatible_parts, load_config
from rayfed.doctor import _facts, main
from rayfed.engine import measure_client
from rayfed.engine.client_places import check_resources
from rayfed.engine.measure_client import Measurement, costs, measure
from rayfed.errors import ConfigError, ResourceError
from rayfed.executors.cluster import ActorPlan
from rayfed.experiment.diagnosis import _lanes, _nodes, _saved
from rayfed.experiment.plan import first_run, prepared
from rayfed.federation.train_config import TrainConfig
from rayfed.models.build import build_backbone
from rayfed.tuning.base import apply_tuning
from tests.conftest import ROOT, SMALL, ending
from tests.rayfed.malformed import last_wins

PROGRESS = ("loading the data", "running the largest client")
LARGER = (*SMALL, "data.limit=150", "rounds=3")
"""Enough images that a visit is more than overhead."""


MEASURED = Measurement(
    client="c4-fonts",
    examples=102,
    device="cpu",
    first_visit_s=0.4,
    visit_s=0.3,
    server_s=0.001,
    scored=39,
    scoring_s=0.05,
    memory_bytes=500_000_000,
    weights_bytes=900_000,
    device_bytes=750_000_000,
    device_total=0,
    device_free=0,
    down_bytes=17_000,
    up_bytes=17_000,
    store_bytes=0,
    state_bytes=17_000,
)
"""About what `played` gives."""


@pytest.fixture(scope="module")
def played(cache):
    """One client, really played in its own process; the slow part of every diagnosis."""
    setup = prepared(load_config([*LARGER, f"data.cache={cache}"]))
    return measure(setup.experiment, setup.context)


@pytest.fixture
def doctor(cache, monkeypatch, capsys):
    """The command with a measurement made before; code, diagnosis (None for bad input), error lines."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("ray.is_initialized", lambda: False)  # other tests share one
    monkeypatch.setattr(measure_client, "measure", lambda *args, **kwargs: MEASURED)

    def run(*overrides):
        code = main([*last_wins([*LARGER, f"data.cache={cache}", *overrides]), "--json"])
        said = capsys.readouterr()
        errors = [line for line in said.err.splitlines() if not line.startswith(PROGRESS)]
        return code, json.loads(said.out) if said.out else None, errors

    return run


@pytest.mark.slow
@pytest.mark.steady
def test_the_measured_client_is_plausible(played, doctor, small, monkeypatch):
    monkeypatch.setattr(measure_client, "measure", lambda *args, **kwargs: played)
    assert 100e6 < played.memory_bytes < 4e9
    assert played.device == "cpu"
    assert played.device_total == 0
    assert 0.6e9 < played.device_bytes < 3e9  # of a GPU, as estimated on the CPU
    code, found, errors = doctor("cluster=inline")
    assert (code, errors) == (0, [])
    seconds = small(*LARGER).history["seconds"].iloc[1:].median()
    assert seconds / 3 < found["estimate"]["round_s"] < seconds * 3
    assert found["estimate"]["total_s"] >= 2 * found["estimate"]["round_s"]


@pytest.mark.slow
@pytest.mark.steady
def test_nothing_is_left_running(played):
    assert not multiprocessing.active_children()
    assert not [p for p in psutil.Process().children() if "spawn_main" in " ".join(p.cmdline())]


def test_the_report_names_every_part(doctor, cache, capsys):
    assert main(last_wins([*LARGER, f"data.cache={cache}"])) == 0
    text, progress = capsys.readouterr()
    assert text.startswith("experiment ")  # progress is on standard error
    assert re.search(r"running the largest client twice .*: c\d-\w+ with \d+ examples", progress)
    for word in (
        "cluster",
        "started on this machine",
        "CPU",
        "object store",
        "needs",
        "measured",
        "estimate",
        "disk",
        "fits",
    ):
        assert word in text


def test_too_many_actors_is_one_line_with_what_would_fit(doctor):
    code, found, errors = doctor(
        "cluster.num_cpus=1",
        "cluster.actors=4",
        "cluster.cpus_per_actor=1",
        "cluster.num_gpus=0",
        "cluster.gpus_per_actor=0.5",
    )
    assert code == 2
    assert len(errors) == 1
    assert "this machine has no GPU" in errors[0]
    assert "cluster.gpus_per_actor=0" in errors[0]
    assert found["actors"] == 0
    assert found["problems"] == [errors[0].removeprefix("error: ")]


def test_memory_is_compared_as_it_was_measured(doctor, monkeypatch):
    """memory_per_actor says that two fit; what one really took says that they do not."""
    node = {"CPU": 2.0, "GPU": 0.0, "memory": 1.5 * MEASURED.memory_bytes, "object_store_memory": 1e9}
    monkeypatch.setattr("rayfed.executors.cluster.own_node", lambda *args: node)
    code, found, errors = doctor("cluster.memory_per_actor=0.1")
    assert code == 2
    assert found["actors"] == 2
    assert len(errors) == 1
    assert "measured" in errors[0]
    assert "cluster.actors=1" in errors[0]
    assert "cluster.memory_per_actor=" in found["advice"][0]


def test_without_a_gpu_the_plan_for_common_ones_is_shown(doctor, cache, capsys):
    assert main(last_wins([*LARGER, f"data.cache={cache}"])) == 0
    held = int(0.9 * 80e9 / MEASURED.device_bytes)
    text = capsys.readouterr().out
    assert f"a GPU of 80 GB would hold {held} actors" in text
    assert "as estimated on the CPU" in text
    assert "actors=auto starts at most 2 on it, or 6 with MPS" in " ".join(text.split())


def test_the_share_of_a_gpu_follows_from_what_was_measured_on_it(doctor, cache, capsys, monkeypatch):
    gpu = {"device_total": 16_000_000_000, "device_free": 16_000_000_000}
    there = replace(MEASURED, device="cuda:0", device_bytes=6_000_000_000, **gpu)
    monkeypatch.setattr(measure_client, "measure", lambda *args, **kwargs: there)
    where = ("cluster.num_cpus=8", "cluster.num_gpus=1", "cluster.memory_per_actor=0.01")
    code, found, errors = doctor(*where)
    assert (code, errors) == (0, [])
    assert (found["actors"], found["gpus_per_actor"]) == (2, 0.5)  # 0.9 of 16 GB holds two
    assert found["gpu_actors"] == {"16000000000": 2}
    code, _, errors = doctor(*where, "cluster.actors=3")
    assert code == 2
    assert "1 GPU" in errors[0]
    assert "what would fit: cluster.actors=2" in errors[0]
    code, _, errors = doctor(*where, "cluster.gpus_per_actor=0.25")
    assert code == 2
    assert "puts 4 actors of 6.0 GB on a GPU of 16.0 GB; raise it to 0.5, or leave it out" in errors[-1]
    small = replace(there, device_bytes=3_000_000_000)
    monkeypatch.setattr(measure_client, "measure", lambda *args, **kwargs: small)
    assert main(last_wins([*LARGER, f"data.cache={cache}", *where])) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "the memory of a GPU of 16.0 GB holds 4; actors=auto starts 2 on it, as they take turns" in text


def test_a_small_network_is_planned_without_the_gpu_that_is_there(doctor, monkeypatch):
    node = {"CPU": 4.0, "GPU": 1.0, "memory": 64e9, "object_store_memory": 1e9}
    monkeypatch.setattr("rayfed.executors.cluster.own_node", lambda *args: node)
    code, found, _ = doctor()
    assert (code, found["gpus_per_actor"]) == (0, 0.0)
    assert "clients run on the CPU" in found["advice"][0]


def test_weights_that_the_object_store_cannot_hold(doctor, monkeypatch):
    node = {"CPU": 2.0, "GPU": 0.0, "memory": 64e9, "object_store_memory": 1000.0}
    monkeypatch.setattr("rayfed.executors.cluster.own_node", lambda *args: node)
    code, _, errors = doctor()
    assert code == 2
    assert "object store" in errors[0]


def test_a_full_disk(doctor, tmp_path, cache, monkeypatch):
    monkeypatch.setattr(
        "rayfed.engine.client_places.shutil",
        SimpleNamespace(disk_usage=lambda path: shutil._ntuple_diskusage(9, 9, 1)),
    )
    code, _, errors = doctor()
    assert code == 2
    assert "output" in errors[0]
    config = load_config([*LARGER, f"data.cache={cache}"])
    with pytest.raises(ConfigError, match=r"output: the disk of .* free"):
        check_resources(config.cluster, prepared(config), tmp_path / "run")


@pytest.mark.parametrize("overrides", [["rouds=3"], ["capacity=99"], ["data=pacs", "data.root=/no/such"]])
def test_bad_input(doctor, overrides):
    code, found, errors = doctor(*overrides)
    assert (code, found, len(errors)) == (2, None, 1)
    assert errors[0].startswith("error: ")


def die(pipe, *args):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.steady
def test_a_process_that_is_killed_is_a_reason_not_a_hang(monkeypatch):
    monkeypatch.setattr(measure_client, "_report", die)
    with pytest.raises(ResourceError, match="exit code -9"):
        measure(None, None)


def test_a_running_cluster_is_asked(ray_cluster, cache):
    config = load_config([*SMALL, f"data.cache={cache}"])
    where, nodes, checked, problems = _nodes(config, prepared(first_run(config)))
    assert where.startswith("joined")
    assert [node["CPU"] for node in nodes] == [4]
    (facts,) = checked
    assert problems == []
    assert facts.problem == ""
    assert facts.data > 0
    assert abs(facts.clock) < 60
    assert facts.bytes_per_second > 0
    assert f"{facts.name}: {facts.processor}; Python {sys.version.split()[0]}; the data is there" in _facts(
        facts
    )


def test_examples_of_a_visit():
    assert TrainConfig(batch_size=10).examples(25) == 25
    assert TrainConfig(batch_size=10, epochs=3).examples(25) == 75
    assert TrainConfig(batch_size=10, max_steps=2).examples(30) == 20
    assert TrainConfig(batch_size=10, local_steps=7).examples(30) == 70


def test_costs_follow_examples_and_blocks():
    clients = {"a": SimpleNamespace(num_examples=10), "b": SimpleNamespace(num_examples=40)}
    known = {"clients": clients, "depth": 4}
    assert costs(SimpleNamespace(**known, capacity={"a": 4, "b": 1}), TrainConfig()) == {"a": 10, "b": 10}
    assert costs(SimpleNamespace(**known, capacity=None), TrainConfig()) == {"a": 6.25, "b": 25}


def test_a_report_names_versions_processor_and_kernels_and_nobody(capsys, monkeypatch):
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    monkeypatch.setenv("RAY_ADDRESS", "10.1.2.3:6379")
    assert main(["--report"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("```text\n")
    assert text.endswith("\n```\n")
    for part in (
        f"torch {torch.__version__.partition('+')[0]}",
        f"ATen {torch.backends.cpu.get_cpu_capability()}",
        "MKL_CBWR=COMPATIBLE",
        "RAY_ADDRESS is set",
        f"python    {platform.python_version()}",
    ):
        assert part in text
    for secret in ("10.1.2.3", platform.node(), str(ROOT)):
        assert secret not in text


def test_the_tests_end_with_what_was_skipped_and_how_to_report_a_failure():
    skipped = [SimpleNamespace(longrepr=("a.py", 1, f"Skipped: {why}")) for why in ("no GPU", "x", "no GPU")]
    assert ending({"skipped": skipped}) == ["skipped: 2 x no GPU; 1 x x"]
    first, last = ending({"failed": [None]})
    assert first == "skipped: nothing"
    assert "rayfed.doctor --report" in last


def test_actors_that_take_turns_on_a_gpu_make_no_run_shorter():
    nodes = [{"CPU": 16.0, "GPU": 2.0}]
    found = ActorPlan(actors=12, cpus=1.0, gpus=1 / 6)
    assert [_lanes(found, nodes, mps) for mps in (False, True)] == [2, 12]
    assert _lanes(ActorPlan(actors=1, cpus=1.0, gpus=1.0), nodes, False) == 1


class TwoLayers(nn.Module):
    """A network of two layers, of which a pass keeps its input and what is between them."""

    size, tokenizer = 7, None

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))

    def forward(self, x):
        return self.net(x)

    def sample(self, rows):
        return torch.zeros(rows, 3, device="meta")


def test_what_a_step_keeps_is_counted_once_and_weights_are_not():
    assert _saved(TwoLayers().to("meta"), 4) == 4 * 4 * (3 + 5)


def test_a_plan_by_shapes_has_the_bytes_of_the_tensors(capsys):
    """Frozen weights at 4 bytes, or 2 where products are in bf16; trained ones four times under AdamW."""
    given = ["algorithm=fedit", "tuning=lora", "train.optimizer=adamw", "train.batch_size=4"]
    assert main(["--shapes", "--json", *given]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [way["way"] for way in told["ways"]] == [
        "train.precision=fp32",
        "train.precision=fp32 train.checkpointing=true",
        "train.precision=bf16",
        "train.precision=bf16 train.checkpointing=true",
    ]
    config = load_config(given)
    model = apply_tuning(build_backbone(config.model, 2, 0), compatible_parts(config).tuning, 0)
    frozen = [p for p in model.parameters() if not p.requires_grad]
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    layers = [m for m in model.net.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    halved = sum(p.numel() for layer in layers for p in layer.parameters() if not p.requires_grad)
    plain, cut, half, _ = told["ways"]
    assert plain["frozen"] == 4 * sum(p.numel() for p in frozen)
    assert half["frozen"] == plain["frozen"] - 2 * halved
    assert plain["trained"] == 4 * 4 * trained
    assert 0 < cut["activations"] < plain["activations"]
    assert plain["scoring"] == 0
    assert plain["actor"] == plain["frozen"] + plain["trained"] + plain["activations"] + 600_000_000


@pytest.mark.slow
@pytest.mark.steady
def test_a_language_model_is_planned_from_its_settings_alone(tmp_path, capsys):
    from tests.tiny_models import CONFIGS

    CONFIGS["llama"]().save_pretrained(tmp_path)
    given = ["algorithm=fedit", "tuning=lora", "tuning.rank=2", "train.batch_size=2", "model.size=16"]
    assert main(["--shapes", f"model=hf/{tmp_path}", *given, "train.eval_batch_size=50"]) == 0
    text = capsys.readouterr().out
    assert "2 texts of 16 tokens, 50 are scored at once" in " ".join(text.split())
    assert f"scoring {50 * 16 * 300 * 8 / 1e6:.1f} MB" in " ".join(text.split())
    assert "a smaller train.eval_batch_size needs less" in " ".join(text.split())
    assert "on 80 GB" in text
