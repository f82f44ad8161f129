"""A Ray actor that runs calls of clients with one model on a share of a CPU and of a GPU.

Returns freed memory of a process to the operating system; glibc would keep it in the pools of its threads.

A driver or a client actor has about 30 threads of Ray, whose pools fill with holes over the rounds. A client
actor keeps what it freed, because each pass needs it again, until it has grown by `SLACK`. Python's own
collection of garbage leaves out what a process made when it started.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import logging
import math
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import psutil
import ray
import torch
from ray import cloudpickle
from torch import Tensor

from rayfed.devices import HOST, give_back, limit_memory, why_no_cuda
from rayfed.errors import ConfigError, DeviceError, RayFedError, ResourceError, one_line
from rayfed.executors.actor_state import WireCall
from rayfed.executors.prometheus import Memory
from rayfed.executors.wire import PackedUpdate, decode, encode, encode_updates, unpack
from rayfed.executors.worker import ClientContext, Weights, Worker, is_out_of_memory, out_of_memory
from rayfed.federation.executor import Call, ClientTask
from rayfed.types import Params, Update, num_bytes

PAUSE = 10.0  # seconds between two times, which take milliseconds each

NEW_OBJECTS = 10_000
"""New objects after which Python looks for garbage among them, instead of 700: a visit makes thousands."""

SLACK = 32 * 2**20
"""Bytes by which a client actor grows before it gives free memory back. All that it gives back, some hundred
megabytes, it gets back page by page in its next visit, which takes up to half a second."""

KEPT = 256_000_000
"""Free bytes at the end of its memory that a client actor keeps."""

LARGEST = 32 * 2**20
"""Bytes of the largest tensors that are taken from this memory; glibc allows no more."""

M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
"""Names of glibc for the two numbers (`man mallopt`)."""


def keep_freed_memory() -> None:
    """Let this process keep freed memory until `Trim` gives it back; nothing happens without glibc.

    By default, glibc returns the end of its memory after a pass of many rows and gets it back page by page in
    the next one, which takes some percent of the time.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_TRIM_THRESHOLD, KEPT)
        mallopt(M_MMAP_THRESHOLD, LARGEST)


def leave_out_of_garbage_collection() -> None:
    """Let Python's garbage collection leave out all objects that exist now, until the process ends.

    torch, PEFT and Ray make half a million objects in a process. Without this, every few rounds a collection
    visits all of them, which takes 0.2 seconds and finds nothing. Garbage of former calls is collected first.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS)
    atexit.unregister(gc.unfreeze)
    atexit.register(gc.unfreeze)  # the last collection frees what libraries report as leaked otherwise


class Trim:
    """Gives free memory back now and then; does nothing where the C library is not glibc."""

    def __init__(self, slack: int | None = None) -> None:
        """Args: slack: bytes by which the process must have grown since it worked after the last time."""
        self._malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._last = time.monotonic()
        self._slack = slack
        self._needs = 0.0
        self._process = psutil.Process()

    def now_and_then(self) -> bool:
        """Return memory if the pause since the last time has passed; tell whether it ran."""
        if time.monotonic() - self._last < PAUSE:
            return False
        self._last = time.monotonic()
        if self._slack is not None and not self._has_grown(self._slack):
            return False
        if self._malloc_trim is not None:
            self._malloc_trim(0)
        return True

    def _has_grown(self, slack: int) -> bool:
        """Whether the process is larger by `slack` bytes than after work for PAUSE seconds since then."""
        resident = self._process.memory_info().rss
        if resident > self._needs + slack:
            self._needs = math.inf
            return True
        self._needs = min(self._needs, resident)
        return False


log = logging.getLogger(__name__)


class ClientActor:
    """A Ray actor that holds one model and runs any client with it, one call after the other."""

    def __init__(
        self, name: str, context: ClientContext, weights: Weights, labels: Mapping[str, str] | None = None
    ) -> None:
        """Args: name: name of the actor. labels: labels of its metrics; None: no metrics."""
        self._name = name
        gpus = ray.get_gpu_ids()
        usable = bool(gpus) and torch.cuda.is_available()
        if gpus and not usable:
            log.warning(
                "actor %s was given GPU %s but torch cannot use it, so it runs on the CPU: %s; docs/gpu.md "
                "says which driver torch needs, and cluster.num_gpus=0 plans without GPUs",
                *(name, gpus, why_no_cuda()),
            )
        self._device = "cuda:0" if usable else "cpu"
        keep_freed_memory()
        self._trim = Trim(SLACK)
        self._share = ray.get_runtime_context().get_assigned_resources().get("GPU", 1.0) if usable else 1.0
        self._hold(context, weights, labels)

    def _hold(self, context: ClientContext, weights: Weights, labels: Mapping[str, str] | None) -> None:
        """Build the model of an experiment; the one before is given up first, as two may not fit."""
        self._held: Worker | RayFedError = ResourceError("the actor has no model")
        device = torch.device(self._device)
        try:
            if device != HOST:
                limit_memory(device, self._share)
            give_back(device)
            self._held = Worker(context, weights, self._device, self._share)
        except RuntimeError as err:  # `worker` raises it: Ray hides what a constructor raises
            if not is_out_of_memory(err):
                raise
            self._held = ResourceError(f"cluster.gpus_per_actor: {out_of_memory(err, self._share, [])}")
        except ConfigError as err:  # such as a file that this node does not have
            self._held = type(err)(f"{one_line(err)} (on node {socket.gethostname()})")
        self._memory = Memory(labels, self._device) if labels else None
        leave_out_of_garbage_collection()

    @property
    def worker(self) -> Worker:
        """The model of the present experiment.

        Raises:
            ConfigError: The device has no memory for it, or the node lacks what it needs.
        """
        if isinstance(self._held, RayFedError):
            raise self._held
        return self._held

    def change(
        self, context: ClientContext, weights: Weights, labels: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """Run the clients of another experiment from now on; returns `where()`."""
        self._hold(context, weights, labels)
        return self.where()

    def __repr__(self) -> str:
        return self._name

    def run(self, units: list[list[WireCall]], *args: Any) -> tuple[Any, ...]:
        """Run calls of clients, one unit after the other; the clients of a unit share their passes.

        Returns:
            The list of answers: for each call an update, the bytes of the client's store (None: it keeps
            none), and the seconds it took, or its error; None for calls that were not run, because the device
            had failed in one before. Then the store of each client as its own value,
            so that large stores stay in the object store and are not sent to the driver.
        """
        answers: list[tuple[PackedUpdate, int | None, float] | RayFedError | None] = []
        stores: list[Any] = []
        received = Received(args)
        failed = False
        for unit in units:
            results = iter([(None, None)] * len(unit)) if failed else self._unit(unit, received)
            for answer, store in results:
                answers.append(answer)
                stores.append(store)
                failed = failed or isinstance(answer, DeviceError)
        self._trim.now_and_then()
        if self._memory is not None and not failed:
            self._memory.measure()
        return answers, *stores

    def _unit(self, unit: list[WireCall], received: Received) -> Iterator[tuple[Any, Any]]:
        """The answer and the store of each call of a unit; if the code of one fails, all are run alone."""
        worker = self.worker
        calls = [received.call(wire) for wire in unit]
        began = time.perf_counter()
        done = None
        if len(unit) > 1:
            try:
                done = worker.call_group(calls, lambda: [received.store(wire) for wire in unit])
            except RayFedError as err:
                yield from [(err, None), *[(None, None)] * (len(unit) - 1)]
                return
        if done is not None:
            yield from self._encode(done, (time.perf_counter() - began) / len(unit))
            return
        failed = False
        for wire, call in zip(unit, calls, strict=True):
            if failed:
                yield None, None
                continue
            began = time.perf_counter()
            try:
                update, store = worker.call_anew(call, partial(received.store, wire))
            except RayFedError as err:
                failed = isinstance(err, DeviceError)
                yield err, None
            else:
                yield from self._encode([(update, store)], time.perf_counter() - began)

    @staticmethod
    def _encode(
        done: Sequence[tuple[Update, Mapping[str, Any]]], seconds: float
    ) -> Iterator[tuple[Any, Any]]:
        updates = encode_updates([update for update, _ in done])
        for update, (_, store) in zip(updates, done, strict=True):
            yield (update, num_bytes(store) if store else None, seconds), encode(store)

    def where(self) -> dict[str, Any]:
        """Name, node, worker and process id of this actor.

        Raises:
            ConfigError: The device has no memory for its model, or the node lacks what that needs.
        """
        _ = self.worker  # or what it raises
        context = ray.get_runtime_context()
        return {
            "name": self._name,
            "node": context.get_node_id(),
            "worker": context.get_worker_id(),
            "pid": os.getpid(),
        }


class Received:
    """The arguments of a remote call, each of them decoded once.

    What is one tensor in several messages is one here, too: a group computes with a tensor that all of its
    clients have otherwise than with equal ones (`rayfed.fast.group`), and rounds otherwise.
    """

    def __init__(self, args: Sequence[Any]) -> None:
        self._args = args
        self._params: dict[int, Params] = {}
        self._known: dict[int, Tensor] = {}
        self._tasks: dict[bytes, ClientTask] = {}

    def call(self, wire: WireCall) -> Call:
        """The call that was sent."""
        if wire.params not in self._params:
            self._params[wire.params] = unpack(self._args[wire.params], self._known)
        if wire.task not in self._tasks:
            self._tasks[wire.task] = cloudpickle.loads(wire.task)
        sent = wire.call.sent
        shared = {k: self._args[wire.shared[k]] if k in wire.shared else v for k, v in sent.shared.items()}
        sent = replace(sent, params=self._params[wire.params], shared=decode(shared, known=self._known))
        return replace(wire.call, task=self._tasks[wire.task], sent=sent)

    def store(self, wire: WireCall) -> dict[str, Any]:
        """A new copy of the client's store."""
        return {} if wire.store is None else dict(decode(self._args[wire.store], copy=True))
