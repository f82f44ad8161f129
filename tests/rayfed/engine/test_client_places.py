"""Shares of a GPU follow from one visit of the largest client on it."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from rayfed.engine import client_places
from rayfed.engine.check_design import check_base
from rayfed.engine.client_places import GpuPlans, check_gpu, check_resources, inline_device, is_measured
from rayfed.engine.measure_client import CONTEXT, _visit, largest_client, resident_bytes
from rayfed.errors import BusyError, ConfigError, ResourceError
from rayfed.executors.cluster_config import ClusterConfig
from rayfed.federation.train_config import TrainConfig
from rayfed.models.backbone import Backbone
from rayfed.testing import small_setup
from tests.conftest import quickly
from tests.pretended import TYPE, pretended
from tests.pretended_memory import memory as allocator

GB = 10**9
GPU = {"device_total": 16 * GB, "device_free": 16 * GB}
NODE = {"CPU": 8.0, "GPU": 1.0, "memory": 64e9}


@pytest.fixture
def memory(monkeypatch):
    """The memory of the pretended device: 16 GB, of which 3 GB were reserved at the peak."""
    module = getattr(torch, TYPE)
    monkeypatch.setattr(module, "mem_get_info", lambda device: (10 * GB, 16 * GB), raising=False)
    monkeypatch.setattr(module, "max_memory_reserved", lambda device: 3 * GB, raising=False)


def clients(*overrides):
    few = (
        "data.domains=[plain]",
        "model.options={depth: 1}",
        "evaluation.every=2",
        "data.val=0",
        "data.test=2",
    )
    return small_setup("algorithm=fedavg", *few, *overrides)


@pytest.mark.usefixtures("memory")
def test_the_largest_client_is_measured_on_a_device_that_has_not_started():
    uneven = ("data.domains=[plain,fonts]", "data.partition.scheme=imbalanced", "data.partition.factor=4")
    setup = clients(*uneven, "data.limit=20")
    with pretended() as device:
        found = largest_client(setup.experiment, setup.context, torch.device(device.name), setup.weights)
        assert device.counts.resets == 1
    sizes = {cid: info.num_examples for cid, info in setup.experiment.clients.items()}
    assert sizes[found.client] == max(sizes.values()) > min(sizes.values())
    assert found.device_bytes == 3 * GB + CONTEXT
    assert found.device_total == 16 * GB
    assert found.device == device.name
    assert min(found.first_visit_s, found.visit_s, found.scoring_s) > 0


def test_examples_on_the_device_are_counted():
    pixels = 32 * 32 * 3 + 8
    setup = clients("data.limit=10")
    whole = resident_bytes(setup.context)
    assert whole > 0
    assert whole % pixels == 0
    assert resident_bytes(clients("data.limit=10", "data.resident=false").context) == 0
    assert resident_bytes(clients("data.limit=10", "data.resident_memory=1e-6").context) == 0


def test_where_a_whole_gpu_is_too_small_what_fits_was_tried(monkeypatch):
    forward = Backbone.forward

    def small(self, x, *args, **kwargs):
        if torch.is_grad_enabled() and len(x) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(self, x, *args, **kwargs)

    monkeypatch.setattr(Backbone, "forward", small)
    setup = clients("train.batch_size=8", "data.limit=10", "train.group=1", "tuning=lora")
    with pytest.raises(ResourceError) as caught:
        largest_client(setup.experiment, setup.context, torch.device("cpu"), setup.weights)
    assert str(caught.value).endswith("what would fit: train.micro_batch=2 or train.batch_size=2")
    assert "cluster.gpus_per_actor" in str(caught.value)


def test_a_gpu_that_torch_does_not_see_is_not_measured():
    assert _visit(None, None, None) is None


def test_a_given_share_is_not_measured():
    assert is_measured(ClusterConfig(), [NODE])
    assert not is_measured(ClusterConfig(gpus_per_actor=0.5), [NODE])
    assert not is_measured(ClusterConfig(), [{"CPU": 8.0}])


@pytest.mark.parametrize(("mps", "words"), [(False, "2 such actors"), (True, "share it through MPS")])
def test_a_command_measures_once_and_plans_from_it(monkeypatch, mps, words):
    setup = clients("data.partition.clients_per_domain=4", "data.limit=40")
    measured = SimpleNamespace(client="c00", device_bytes=6 * GB, visit_s=0.5, **GPU)
    asked = []

    def fake(*args):
        asked.append(args)
        return measured, mps

    monkeypatch.setattr(client_places, "measured_on_gpu", fake)
    monkeypatch.setattr(client_places, "WORTH", 0.0)
    monkeypatch.setattr("rayfed.executors.cluster.node_resources", lambda: [NODE])
    gpus = GpuPlans()
    plans = [gpus.plan(setup, ClusterConfig(), list, None) for _ in range(2)]
    assert [(plan.actors, plan.gpus) for plan in plans] == [(2, 0.5), (2, 0.5)]
    assert len(asked) == 1
    assert words in (gpus.sentence or "")
    assert gpus.plan(setup, ClusterConfig(gpus_per_actor=0.25), list, None).actors == 4
    with pytest.raises(ResourceError, match="whose memory holds 2 actors"):
        gpus.plan(setup, ClusterConfig(actors=3), list, None)


def test_a_small_network_stays_on_the_cpu_unless_a_gpu_is_asked_for(monkeypatch):
    """The default experiment takes longer on a GPU than on the cores beside it."""
    setup = clients("data.partition.clients_per_domain=4", "data.limit=40")
    monkeypatch.setattr("rayfed.executors.cluster.node_resources", lambda: [NODE])
    measured = SimpleNamespace(client="c00", device_bytes=6 * GB, visit_s=0.5, **GPU)
    asked = []
    monkeypatch.setattr(
        client_places, "measured_on_gpu", lambda *args: asked.append(args) or (measured, False)
    )
    gpus = GpuPlans()
    plans = [gpus.plan(setup, ClusterConfig(), list, None) for _ in range(2)]
    assert [(plan.actors, plan.cpus, plan.gpus) for plan in plans] == [(4, 1.0, 0.0)] * 2
    assert "clients run on the CPU" in gpus.sentence
    assert "cluster.gpus_per_actor=1 uses a GPU" in gpus.sentence
    assert not asked
    train = replace(setup.context.train, graphs=True)
    graphs = replace(setup, context=replace(setup.context, train=train))
    with pytest.raises(ConfigError, match=r"train.graphs: true records operations of a GPU"):
        gpus.plan(graphs, ClusterConfig(), list, None)
    with pytest.raises(ConfigError, match=r"train.graphs: true records operations of a GPU"):
        inline_device(graphs, ClusterConfig(executor="inline", device="cpu"))
    assert gpus.plan(graphs, ClusterConfig(gpus_per_actor=0.5), list, None).gpus == 0.5
    assert gpus.plan(setup, ClusterConfig(gpus_per_actor=0.5), list, None).gpus == 0.5
    assert GpuPlans().plan(setup, ClusterConfig(num_gpus=1), list, None).gpus == 0.5
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("graphs", True, "train.graphs: true records operations of a GPU"),
        ("base_bits", 4, "train.base_bits: 4 needs a GPU of NVIDIA"),
    ],
)
def test_what_needs_a_gpu_is_refused_before_ray_starts(key, value, words, monkeypatch, tmp_path):
    monkeypatch.setattr("rayfed.executors.connection.ray.is_initialized", lambda: False)  # by other tests
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    setup = clients("data.limit=10")
    train = replace(setup.context.train, **{key: value})
    wanted = replace(setup, context=replace(setup.context, train=train))

    def refused(gpus, **asked):
        node = {**NODE, "GPU": gpus, "object_store_memory": 16e9}
        monkeypatch.setattr("rayfed.executors.cluster.own_node", lambda *_: node)
        check_resources(ClusterConfig(**asked), setup, tmp_path)  # which needs none
        try:
            check_resources(ClusterConfig(**asked), wanted, tmp_path)
        except ConfigError as err:
            return str(err).startswith(words)
        return False

    assert refused(0.0)
    assert refused(1.0)  # so little work stays on the CPU
    assert refused(1.0, gpus_per_actor=0)
    assert not refused(1.0, gpus_per_actor=0.5)
    assert not refused(1.0, num_gpus=1)
    assert not refused(0.0, address="10.0.0.1:6379")  # whose GPUs are known once it answers
    monkeypatch.setattr(client_places, "WORTH", 0.0)
    assert not refused(1.0)


@pytest.mark.parametrize("tuning", quickly(["lora", "head"], ["lora"]))
def test_a_network_of_much_work_uses_the_gpu(tuning):
    """The features of a frozen network are computed once, but a CPU would take long even for that."""
    large = small_setup(
        "algorithm=fedavg", f"tuning={tuning}", "model=vit_mini", "model.options={embed_dim: 768, depth: 12}"
    )
    assert client_places.too_small(large, ClusterConfig()) == ""
    assert "0.0" in client_places.too_small(clients(f"tuning={tuning}"), ClusterConfig())


def test_what_other_processes_use_and_what_the_device_takes_itself_are_measured():
    setup = clients("tuning=lora", "data.resident=false", "data.limit=10")
    parts = {"context": 400_000_000, "libraries": 300_000_000}
    with pretended() as device, allocator(16 * GB, others=5 * GB, **parts) as its:
        found = largest_client(setup.experiment, setup.context, torch.device(device.name), setup.weights)
        assert found.device_bytes == its.peak + CONTEXT + 300_000_000  # 0.2 GB of the others could be our own
        assert found.device_free == 11 * GB - 400_000_000 + CONTEXT
    with pretended() as device, allocator(16 * GB, **parts) as its:
        alone = largest_client(setup.experiment, setup.context, torch.device(device.name), setup.weights)
        assert alone.device_bytes == its.peak + 700_000_000
        assert alone.device_free == 16 * GB


def test_frozen_features_of_all_clients_are_counted():
    few = ("tuning=head", "data.partition.clients_per_domain=4", "data.limit=40", "train.epochs=1")
    setup = clients(*few)
    width = setup.context.skeleton().width
    every = sum(info.num_examples for info in setup.experiment.clients.values())
    with pretended() as device, allocator(16 * GB) as its:
        found = largest_client(setup.experiment, setup.context, torch.device(device.name), setup.weights)
        more = found.device_bytes - its.peak
    assert 0.5 * 4 * width * every < more < 2 * 4 * width * every
    small = clients(*few, "train.cache_memory=1000")
    with pretended() as device, allocator(16 * GB) as its:
        found = largest_client(small.experiment, small.context, torch.device(device.name), small.weights)
        assert found.device_bytes <= its.peak + 1000


@pytest.mark.slow
@pytest.mark.steady
def test_resident_examples_are_part_of_the_measured_peak():
    peaks = {}
    for resident in (True, False):
        setup = clients("tuning=lora", "data.limit=20", f"data.resident={str(resident).lower()}")
        with pretended() as device, allocator(16 * GB) as its:
            largest_client(setup.experiment, setup.context, torch.device(device.name), setup.weights)
            peaks[resident] = its.peak, resident_bytes(setup.context)
    assert peaks[True][0] - peaks[False][0] > 0.5 * peaks[True][1] > 0


@pytest.mark.slow
@pytest.mark.steady
def test_clients_that_share_their_passes_are_measured_together():
    peaks = {}
    for group in (1, 4):
        setup = clients(
            *("tuning=lora", "data.resident=false", "data.partition.clients_per_domain=4", "data.limit=80"),
            f"train.group={group}",
        )
        with pretended() as device, allocator(16 * GB) as its:
            found = largest_client(setup.experiment, setup.context, torch.device(device.name), setup.weights)
            peaks[group] = its.peak
        sent = sum(value.nbytes for value in setup.start.values())
        assert found.up_bytes == sent  # of one client
    assert peaks[4] > 2 * peaks[1]


def test_a_cluster_without_a_free_gpu_is_planned_without_measuring(monkeypatch):
    def busy(*args):
        raise BusyError("not placed")

    monkeypatch.setattr(client_places, "measured_on_gpu", busy)
    monkeypatch.setattr(client_places, "too_small", lambda *args: "")
    monkeypatch.setattr("rayfed.executors.cluster.node_resources", lambda: [NODE])
    setup = clients("data.partition.clients_per_domain=4", "data.limit=40")
    gpus = GpuPlans()
    plans = [gpus.plan(setup, ClusterConfig(), list, None) for _ in range(2)]
    assert [(plan.actors, plan.gpus) for plan in plans] == [(2, 0.5), (2, 0.5)]
    assert "no whole GPU became free within 30 s" in gpus.sentence


def test_the_sentence_says_that_actors_take_turns():
    measured = SimpleNamespace(client="c00", device_bytes=GB, visit_s=0.5, **GPU)
    assert "2 are started, because without MPS they take turns" in client_places.on_gpu(measured, False, 14)
    assert "a fatal fault of one ends all" in client_places.on_gpu(measured, True, 14)


def test_a_base_of_four_bits_is_refused_without_a_gpu_and_without_its_library(monkeypatch):
    train, text = TrainConfig(base_bits=4), SimpleNamespace(tokenizer="bert", label="bert")
    with pytest.raises(ConfigError, match=r"^train\.base_bits: 4 needs a GPU of NVIDIA"):
        check_gpu(train, False)
    check_gpu(train, True)
    monkeypatch.setattr("rayfed.engine.check_design.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"^train\.base_bits: 4 needs bitsandbytes.*\[quantized\]"):
        check_base(train, text)
    monkeypatch.setattr("rayfed.engine.check_design.find_spec", lambda name: name)
    check_base(train, text)
    with pytest.raises(ConfigError, match="is for models of transformers, not for 'vit'"):
        check_base(train, SimpleNamespace(tokenizer=None, label="vit"))
    with pytest.raises(ConfigError, match=r"cannot be used with train\.compile"):
        check_base(replace(train, graphs=True), text)
