"""What a failed call, a former model and resident examples take of the memory of a device."""

import gc
import os
import subprocess
import sys
import textwrap
import time
import weakref
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from rayfed import devices
from rayfed.devices import ALLOCATION, limit_memory
from rayfed.engine.loop import run_rounds
from rayfed.errors import ClientError, DeviceError, DeviceMemoryError, ResourceError
from rayfed.executors import client_actor
from rayfed.executors.actor_pool import Exchange, SentTensors
from rayfed.executors.actor_state import ActorHandle, Pace
from rayfed.executors.client_actor import ClientActor
from rayfed.executors.inline import InlineExecutor
from rayfed.executors.worker import Worker, is_fault, is_out_of_memory, out_of_memory
from rayfed.federation.executor import Call, Policy
from rayfed.models.backbone import Backbone
from rayfed.models.shared_weights import checksum
from rayfed.testing import SMALL, play, small_setup
from rayfed.types import Broadcast, Update
from tests.pretended import pretended
from tests.pretended_memory import memory

FEW = ("data.domains=[plain]", "model.options={depth: 2}", "data.test=2", "data.val=0", "train.group=1")
FAULT = (
    "CUDA error: an illegal memory access was encountered\nSearch for `cudaErrorIllegalAddress` in https://x\n"
    "CUDA kernel errors might be asynchronously reported at some other API call."
)


def task(client, sent, fail=None, seen=None):
    """Train for a batch, and fail while the activations of another one are in use."""
    (x, _), *_ = client.data.batches("train", None, 4)
    client.model(x).sum().backward()
    hidden = client.model(x)
    if seen is not None:
        seen.append(weakref.ref(hidden))
    if fail is not None:
        raise fail
    return Update(client=client.id, num_examples=1)


def call_of(setup, **how):
    (cid, *_) = setup.experiment.clients
    return Call(cid, partial(task, **how), "fit", Broadcast(round=0, params=setup.start))


@pytest.mark.parametrize("kind", [ValueError, torch.OutOfMemoryError, ClientError])
def test_nothing_of_a_failed_call_stays_on_the_device(kind):
    setup = small_setup("tuning=lora", *FEW)
    seen = []
    error = ClientError("c", 0, "fit", "own") if kind is ClientError else kind("none")
    gc.disable()
    try:
        with pretended() as device, memory(10**9) as its:
            worker = Worker(setup.context, setup.weights, device.name)
            rest = its.live
            with pytest.raises(ClientError) as caught:
                worker.call(call_of(setup, fail=error, seen=seen), {})
            assert seen[0]() is None  # while the error is held
            assert its.live == rest
            assert its.reserved == its.live
            assert its.emptied
            assert caught.value.__context__ is None
            worker.call(call_of(setup), {})  # the next client can be run
    finally:
        gc.enable()
    assert "in task" in caught.value.trace or kind is ClientError


@pytest.mark.parametrize(
    "overrides",
    [
        ("tuning=lora",),
        ("tuning=full",),
        ("tuning=head",),
        ("model=clip_mini", "tuning=text_prompt", "model.options={}"),
        ("model=test_resnet", "tuning=full", "model.options={}", "model.size=64"),
        ("algorithm=fedgcr",),
    ],
    ids=str,
)
def test_a_model_that_ran_is_gone_with_its_last_use(overrides):
    """Without a collection of garbage: objects that an actor leaves out of it would stay for ever."""
    setup = small_setup(*FEW, "rounds=1", *overrides)
    gc.collect()
    gc.disable()
    try:
        executor = InlineExecutor(setup.context, setup.weights)
        list(run_rounds(setup.experiment, executor, setup.start))
        model = weakref.ref(executor.worker.model)
        assert isinstance(model(), Backbone)
        del executor
        assert model() is None
    finally:
        gc.enable()


def test_a_change_of_experiment_gives_up_the_former_model_first(monkeypatch):
    setup = small_setup(*FEW)
    monkeypatch.setattr(client_actor.ray, "get_gpu_ids", list)
    models = []

    class Watching(Worker):
        def __init__(self, *args):
            assert not any(model() for model in models)
            super().__init__(*args)
            self.call(call_of(setup), {})
            models.append(weakref.ref(self.model))

    monkeypatch.setattr(client_actor, "Worker", Watching)
    monkeypatch.setattr(ClientActor, "where", dict)
    actor = ClientActor("a", setup.context, setup.weights)
    actor.change(setup.context, setup.weights)
    assert [model() is not None for model in models] == [False, True]


@pytest.mark.slow
@pytest.mark.steady
def test_a_former_model_in_a_cycle_is_collected_before_the_next_one_is_built(monkeypatch, all_objects):
    """Also where the actor had left its objects out of garbage collection."""
    setup = small_setup(*FEW)
    monkeypatch.setattr(client_actor.ray, "get_gpu_ids", list)
    monkeypatch.setattr(client_actor, "limit_memory", lambda device, share: None)
    monkeypatch.setattr(ClientActor, "where", dict)
    with pretended() as device, memory(10**9) as its:
        actor = ClientActor("a", setup.context, setup.weights)
        actor._device = device.name
        actor.change(setup.context, setup.weights)
        model = actor.worker.model
        model.in_a_cycle, left = [model], weakref.ref(model)
        del model
        gc.freeze()

        def build(*args):
            assert left() is None
            assert its.reserved == 0
            return Worker(*args)

        monkeypatch.setattr(client_actor, "Worker", build)
        actor.change(setup.context, setup.weights)


@pytest.mark.slow
@pytest.mark.steady
def test_a_change_of_experiment_changes_what_is_deterministic(monkeypatch):
    setup = small_setup(*FEW)
    monkeypatch.setattr(client_actor.ray, "get_gpu_ids", list)
    monkeypatch.setattr(ClientActor, "where", dict)
    found = []
    actor = ClientActor("a", setup.context, setup.weights)
    for wanted in (True, "auto", True, False):
        actor.change(replace(setup.context, deterministic=wanted), setup.weights)
        found.append(torch.are_deterministic_algorithms_enabled())
    assert found == [True, False, True, False]


def test_an_actor_says_why_torch_cannot_use_its_gpu(monkeypatch, caplog):
    def fail():
        raise RuntimeError("The NVIDIA driver on your system\n is too old (found version 12020).")

    setup = small_setup(*FEW)
    monkeypatch.setattr(client_actor.ray, "get_gpu_ids", lambda: [3])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", fail)
    ClientActor("a", setup.context, setup.weights)
    assert (
        "actor a was given GPU [3] but torch cannot use it, so it runs on the CPU: The NVIDIA driver on your "
        "system is too old (found version 12020); docs/gpu.md says which driver torch needs"
    ) in caplog.text


FACES = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    torch.AcceleratorError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in https://x"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    RuntimeError("CUDA driver error: out of memory"),
    torch.AcceleratorError("CUDA error: CUDA-capable device(s) is/are busy or unavailable\nSearch for it"),
    RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable"),
]


@pytest.mark.parametrize("error", FACES, ids=lambda e: str(e)[:60])
def test_every_face_of_a_lack_of_memory_is_advised(error):
    assert is_out_of_memory(error)
    assert not is_fault(error)
    said = out_of_memory(error, 0.25, ["train.batch_size=2"])
    alone = "busy" in str(error)
    assert ("cluster.gpus_per_actor=1, or" if alone else "cluster.gpus_per_actor=0.5 (now 0.25)") in said
    assert ("train.batch_size=2" in said) != alone
    assert "\n" not in said


@pytest.mark.parametrize("error", [FACES[0], FACES[-1]], ids=["full", "busy"])
def test_a_call_and_a_start_that_lack_memory_say_what_needs_less(error, monkeypatch):
    setup = small_setup("tuning=lora", *FEW)
    worker = Worker(setup.context, setup.weights, share=0.25)
    with pytest.raises(DeviceMemoryError) as caught:
        worker.call(call_of(setup, fail=error), {})
    alone = "busy" in str(error)
    assert ("cluster.gpus_per_actor=1, or" if alone else "cluster.gpus_per_actor=0.5 (now 0.25)") in str(
        caught.value
    )
    assert ("train.batch_size" in str(caught.value)) != alone
    assert "\n" not in str(caught.value)

    def full(*args):
        raise error

    monkeypatch.setattr(client_actor.ray, "get_gpu_ids", list)
    monkeypatch.setattr(client_actor, "Worker", full)
    actor = ClientActor("a", setup.context, setup.weights)
    for ask in (actor.where, partial(actor.run, [[None]])):  # Ray hides what a constructor raises
        with pytest.raises(ResourceError, match=r"^cluster\.gpus_per_actor: .*(what needs less|would fit)"):
            ask()


@pytest.mark.parametrize(("frozen", "again"), [(375, 0), (376, 1)])
def test_objects_are_left_out_of_garbage_collection_only_where_they_were_before(frozen, again, monkeypatch):
    """Python 3.12 leaves some out itself; models in a cycle then stayed on the GPU after a lack of memory."""
    calls = []
    monkeypatch.setattr(devices, "FROZEN_BY_PYTHON", 375)
    monkeypatch.setattr(devices.gc, "get_freeze_count", lambda: frozen)
    monkeypatch.setattr(devices.gc, "freeze", lambda: calls.append("freeze"))
    with pretended() as device:
        devices.give_back(torch.device(device.name))
    assert len(calls) == again


def test_other_errors_are_no_lack_of_memory():
    assert not is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"))
    assert not is_out_of_memory(ValueError("out of memory"))
    assert not is_fault(RuntimeError("CUDA error"))
    assert is_fault(torch.AcceleratorError(FAULT))


def test_a_fault_that_nobody_waited_for_is_found_after_a_failure(monkeypatch):
    setup = small_setup("tuning=lora", *FEW)

    def synchronize(_):
        raise torch.AcceleratorError(FAULT)

    with pretended() as device, memory(10**9):
        monkeypatch.setattr(torch.get_device_module(device.name), "synchronize", synchronize, raising=False)
        worker = Worker(setup.context, setup.weights, device.name)
        with pytest.raises(DeviceError, match="an illegal memory access was encountered") as caught:
            worker.call(call_of(setup, fail=ValueError("odd")), {})
    assert "asynchronously" not in str(caught.value)
    assert caught.value.kind == "device_failed"


def test_a_fault_in_this_process_ends_the_run_whatever_the_policy():
    setup = small_setup(*FEW)
    executor = InlineExecutor(setup.context, setup.weights, Policy(on_client_error="drop"))
    events = []
    executor.on_event = events.append
    with pytest.raises(DeviceError):
        executor.map([call_of(setup, fail=torch.AcceleratorError(FAULT))])
    assert [event.action for event in events] == ["raise"]


def test_a_call_that_was_short_of_memory_is_repeated_once_with_the_same_result():
    """A neighbour on the GPU has used its memory for a moment; Adam counts its steps on the CPU."""
    kept = (*SMALL, *FEW, "algorithm=fedavg", "tuning=lora", "tuning.dropout=0")
    kept += ("train.optimizer=adam", "train.keep_optimizer=true")
    with pretended() as device:
        whole = play(kept, device.name)
    passes = []
    forward = Backbone.forward

    def scarce(self, x, *args, **kwargs):
        passes.append(len(x))
        if torch.is_grad_enabled() and len(passes) in (2, 8):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(self, x, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, pretended() as device, memory(10**9) as its:
        patch.setattr(Backbone, "forward", scarce)
        again = play(kept, device.name)
        assert its.emptied >= 1
    assert len(passes) > 8
    assert again.sha256 == whole.sha256


def test_a_lack_of_memory_that_stays_is_an_error():
    setup = small_setup("tuning=lora", *FEW)
    with pretended() as device, memory(10**9) as its:
        executor = InlineExecutor(setup.context, setup.weights, device=device.name)
        its.most = its.live + 100_000
        with pytest.raises(DeviceMemoryError, match=r"capacity of 1000000000 B .*; what needs less: train"):
            executor.map([call_of(setup)])
        assert its.asked == 2
        its.most = float("inf")
        executor.map([call_of(setup)])
    assert checksum(executor.worker.model)


@pytest.mark.parametrize("units", [[[1], [2], [3]], [[1, 2], [3]]])
def test_calls_after_a_fault_are_not_run(units, monkeypatch):
    setup = small_setup(*FEW)
    monkeypatch.setattr(client_actor.ray, "get_gpu_ids", list)
    actor = ClientActor("a", setup.context, setup.weights)
    done = []

    class Faulty:
        def call_group(self, calls, stores):
            return None

        def call_anew(self, call, store):
            done.append(call)
            raise DeviceError("c", 0, "fit", "gone")

    actor._held = Faulty()
    monkeypatch.setattr(client_actor.Received, "call", lambda self, wire: wire)
    monkeypatch.setattr(client_actor.Received, "store", lambda self, wire: {})
    answers, *stores = actor.run(units)
    assert [type(answer) for answer in answers] == [DeviceError, type(None), type(None)]
    assert (done, stores) == ([1], [None] * 3)


@pytest.mark.parametrize("error", [DeviceError("c", 0, "fit", "gone"), ResourceError("train.group: short")])
def test_the_error_of_a_group_is_that_of_its_first_call(error, monkeypatch):
    """The others were not run: they are queued again as a group, or the run ends."""
    setup = small_setup(*FEW)
    monkeypatch.setattr(client_actor.ray, "get_gpu_ids", list)
    actor = ClientActor("a", setup.context, setup.weights)

    class Failing:
        def call_group(self, calls, stores):
            raise error

    actor._held = Failing()
    monkeypatch.setattr(client_actor.Received, "call", lambda self, wire: wire)
    answers, *stores = actor.run([[1, 2, 3]])
    assert (answers, stores) == ([error, None, None], [None] * 3)


class Queue(Exchange):
    """Remembers what is queued again, and which failures are reported."""

    def __init__(self, groups):
        self._calls = [Call(f"c{i}", None, "fit", Broadcast(round=0, params={})) for i in range(5)]
        self._answers, self._tries = {}, [1] * 5
        self._running = {
            "done": SimpleNamespace(units=groups, indices=range(5), lane=self, began=0.0, stores=[0] * 5)
        }
        self._policy = Policy()
        self._pool = SimpleNamespace(pace=Pace(), on_event=lambda event: self.events.append(event.kind))
        self.queued, self.events, self.ended, self.busy = [], [], 0, 1

    def _enqueue(self, unit):
        self.queued.append(unit)

    def _end(self, lane):
        self.ended += 1


def test_groups_that_a_fault_ended_are_repeated_as_groups(monkeypatch):
    fault = DeviceError("c0", 0, "fit", "an illegal memory access", "trace")
    monkeypatch.setattr("ray.get", lambda ref: [fault, None, None, None, None])
    exchange = Queue([[0, 1, 2], [3, 4]])
    exchange._receive("done")
    assert exchange.queued == [[0, 1, 2], [3, 4]]
    assert exchange._tries == [1, 1, 1, 0, 0]
    assert (exchange.events, exchange.ended) == (["device_failed"] * 3, 1)
    again = Queue([[0, 1, 2], [3, 4]])
    again._tries = [2] * 5
    again._receive("done")
    assert again.queued == [[0], [1], [2], [3, 4]]  # so that it is seen whose fault it is
    alone = Queue([[0], [1], [2], [3, 4]])
    alone._receive("done")
    assert sorted(alone.queued) == [[0], [1], [2], [3, 4]]


def test_an_actor_takes_its_part_of_a_device_only(monkeypatch):
    for name in ALLOCATION:
        monkeypatch.delenv(name, raising=False)
    with pretended() as device, memory(10**9) as its:
        limit_memory(torch.device(device.name), 0.25)
        assert its.most == pytest.approx(0.225e9)  # as `actors_on` plans
        with pytest.raises(torch.OutOfMemoryError):
            torch.ones(60_000_000).to(device.name)
        limit_memory(torch.device(device.name), 1.0)
        torch.ones(60_000_000).to(device.name)
    assert os.environ.pop("PYTORCH_CUDA_ALLOC_CONF") == "expandable_segments:True"
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    with pretended() as device:
        limit_memory(torch.device(device.name), 0.25)
    assert "PYTORCH_CUDA_ALLOC_CONF" not in os.environ


def test_an_actor_sets_its_limit_before_its_model_is_built(monkeypatch):
    setup = small_setup(*FEW)
    asked = []
    monkeypatch.setattr(client_actor.ray, "get_gpu_ids", list)
    monkeypatch.setattr(client_actor, "limit_memory", lambda at, share: asked.append((str(at), share)))
    monkeypatch.setattr(client_actor, "give_back", lambda device: None)
    monkeypatch.setattr(client_actor, "Worker", lambda *args: asked.append("built"))
    actor = ClientActor("a", setup.context, setup.weights)
    actor._device, actor._share = "cuda:0", 0.25
    actor._hold(setup.context, setup.weights, None)
    assert asked == ["built", ("cuda:0", 0.25), "built"]


@pytest.mark.slow
@pytest.mark.steady
def test_torch_reads_how_it_allocates_after_its_import():
    script = """
        import torch
        from rayfed.devices import HOST, limit_memory
        limit_memory(HOST, 0.5)
        print(torch._C._accelerator_getAllocatorSettings())
    """
    env = {name: value for name, value in os.environ.items() if name not in ALLOCATION}
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=True)
    assert "expandable_segments:True" in done.stdout


def test_patience_is_longer_where_actors_have_a_gpu(monkeypatch):
    assert Policy(patience=7.0).patience_for(0.5) == 7
    lanes = [
        ActorHandle("a", {"num_gpus": share}, starting=object(), since=time.monotonic()) for share in (0, 0.5)
    ]
    exchange = Exchange(
        [], SimpleNamespace(policy=Policy(), lanes=lanes, pace=Pace(), home={}, sent=SentTensors())
    )
    exchange._progress = SimpleNamespace(since=lambda *_: 300.0)
    monkeypatch.setattr("ray.wait", lambda waiting, **_: ([], waiting))
    assert [exchange._is_stuck(lane) for lane in lanes] == [True, False]
