"""Runs calls of clients in one process; all executors use it, so that placement changes no result.

A call moves what the client receives to the device, prepares the network as the config asks, runs the code
of the client, and moves its checked answer back to the CPU. A call that failed becomes an error that names
the client, with advice if the device had too little memory.
"""

from __future__ import annotations

import logging
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy.typing as npt
import torch
from torch import Tensor, nn

from rayfed.client_facts import Splits
from rayfed.data.augmentation import Augmentation
from rayfed.data.data_config import AugmentConfig
from rayfed.data.examples import ClientData, Normalizer, Resident, choose
from rayfed.data.shards import Dataset, open_dataset
from rayfed.data.text import Inputs
from rayfed.devices import (
    HOST,
    Deterministic,
    as_made_here,
    base_of,
    give_back,
    move,
    packs_of,
    set_deterministic,
    set_products,
    use_threads,
)
from rayfed.errors import (
    ClientError,
    DeviceError,
    DeviceMemoryError,
    NonFiniteClientError,
    RayFedError,
    one_line,
    place_of,
)
from rayfed.executors.worker_passes import WorkerPasses
from rayfed.federation.client import Client
from rayfed.federation.client_tasks import PERSONAL, VALIDATED
from rayfed.federation.cohort import TRAINING
from rayfed.federation.executor import Call
from rayfed.federation.noise_and_compression import CODED
from rayfed.federation.passes import Passes
from rayfed.federation.tensors_that_stay import STAYS, add_own, keep_own, names_that_stay
from rayfed.federation.train_config import Smaller, TrainConfig, override
from rayfed.models.backbone import Backbone
from rayfed.models.behaviour import Behaviour
from rayfed.models.model_config import ModelConfig
from rayfed.models.put_back import PutBack
from rayfed.models.shared_weights import attach, checksum, dump, skeleton
from rayfed.models.trunk import (
    FeatureCache,
    FeatureFolder,
    feature_folder,
    use_checkpointing,
    use_compile,
    use_mean_pooling,
)
from rayfed.models.user_model import Network, OwnBackbone
from rayfed.mps import mps_runs
from rayfed.objective import Classification, Objective
from rayfed.seeds import derive, use_seed
from rayfed.tuning.base import Tuning, apply_tuning, copies, load, sent_tensors, train_mode
from rayfed.types import RESIDUAL, Broadcast, Params, Update, cut_to_rank

CHANNELS = (1, 3)
"""Numbers of channels of images of a user that are stored as bytes."""


def converter(
    dataset: Dataset, pixels: bool, model: Backbone, device: torch.device
) -> Callable[[Tensor], Tensor]:
    """The function that turns a batch of stored inputs, shape (B, ...), into input of the network.

    Inputs of a user stay what they are: images of bytes, with channels first or last, become numbers from 0
    to 1 with channels first, and are normalized if the model says with what; other whole numbers become
    int64, such as those that an embedding takes; floats are given as they are, unless a `rayfed.Model` says
    what they are normalized with.

    Args:
        pixels: Whether the task of a data set of RayFed has images.
        model: The network, with its mean and standard deviation by channel.
    """
    if not dataset.own or isinstance(dataset.images, Inputs):
        return Normalizer(model.mean, model.std, device) if pixels else symbols
    shape, kind = dataset.images.shape[1:], dataset.images.dtype
    if kind == "u1" and len(shape) == 3 and shape[-1] == 3 and len(model.mean) == 3:
        return Normalizer(model.mean, model.std, device)
    if kind == "u1" and len(shape) in (2, 3):
        return Images(shape, model, device)
    if kind.kind in "iub":
        return symbols
    if getattr(model, "scales", False):
        return Scaled(len(shape), model, device)
    return torch.Tensor.float


def symbols(rows: npt.NDArray[Any] | Tensor) -> Tensor:
    """Stored symbols, shape (B, length), as an int64 tensor for a model, on the same device."""
    return torch.as_tensor(rows).long()


class Images:
    """Images of bytes, shape (B, C, H, W), (B, H, W, C) or (B, H, W), as numbers, shape (B, C, H, W)."""

    def __init__(self, shape: tuple[int, ...], model: Backbone, device: torch.device) -> None:
        """Args: shape: that of one image. model: has mean and deviation. device: that of batches."""
        self._last = len(shape) == 3 and shape[-1] in CHANNELS and shape[0] not in CHANNELS
        self._flat = len(shape) == 2
        channels = 1 if self._flat else shape[-1] if self._last else shape[0]
        mean, std = (v if len(v) == channels else v[:1] * channels for v in (model.mean, model.std))
        self._mean = torch.tensor(mean, device=device).view(1, -1, 1, 1)
        self._std = torch.tensor(std, device=device).view(1, -1, 1, 1)

    def __call__(self, images: Tensor) -> Tensor:
        """Normalize a batch."""
        images = images[:, None] if self._flat else images.permute(0, 3, 1, 2) if self._last else images
        x = images.to(torch.float32, memory_format=torch.contiguous_format)
        return x.div_(255).sub_(self._mean).div_(self._std)


class Scaled:
    """Floats with channels first, normalized by channel."""

    def __init__(self, dims: int, model: Backbone, device: torch.device) -> None:
        """Args: dims: dimensions of one input. model, device: as of `Images`."""
        shape = (1, -1, *[1] * (dims - 1))
        self._mean = torch.tensor(model.mean, device=device).view(shape)
        self._std = torch.tensor(model.std, device=device).view(shape)

    def __call__(self, inputs: Tensor) -> Tensor:
        """Normalize a batch."""
        return (inputs.float() - self._mean) / self._std


Leaving: TypeAlias = tuple[Update, Params, Mapping[str, Any]]
"""The answer of a task, and the `params` and the `extra` that leave the client in place of its values."""


def receive(
    messages: Sequence[tuple[Broadcast, Mapping[str, Any]]], device: torch.device
) -> list[tuple[Broadcast, dict[str, Any]]]:
    """Messages and stores of clients on a device; all tensors of a type travel together.

    The code of a client sees every tensor in one layout (`as_made_here`), wherever it comes from.

    Args:
        messages: The message and the private store of each client, on the CPU.
    """
    parts = [(sent.params, sent.shared, dict(store)) for sent, store in messages]
    parts = as_made_here(parts) if device == HOST else move(parts, device)
    pairs = zip(messages, parts, strict=True)
    return [(replace(sent, params=p, shared=shared), own) for (sent, _), (p, shared, own) in pairs]


def send_back(
    clients: Sequence[Client], answers: Sequence[Leaving], device: torch.device
) -> list[tuple[Update, dict[str, Any]]]:
    """Updates and stores of clients on the CPU; all tensors of a type travel together.

    Args:
        answers: What leaves each of them, on the device of the model.
    """
    parts = [(params, extra, one.store) for one, (_, params, extra) in zip(clients, answers, strict=True)]
    if device != HOST:
        parts = move(parts, HOST)
    sent = []
    for one, (answer, _, _), (params, extra, store) in zip(clients, answers, parts, strict=True):
        metrics = {**answer.metrics, **one.metrics()}
        own: dict[str, Any] = {"rank": one.rank, "metrics": metrics, **one.counted()}
        sent.append((replace(answer, params=params, extra=extra, **own), store))
    return sent


def check_shapes(update: Update, wanted: Params) -> None:
    """Raise ValueError if an update has a tensor that the model does not have, or of another shape.

    Args:
        update: The answer of a client.
        wanted: Tensors of the model by global name.
    """
    for name, value in update.params.items():
        if name not in wanted:
            raise ValueError(f"it answered with {name!r}, which is not a trained tensor of this model")
        if value.shape != wanted[name].shape:
            shapes = f"{tuple(value.shape)} instead of {tuple(wanted[name].shape)}"
            raise ValueError(f"{name} has shape {shapes}")


def check_finite(updates: Sequence[Update]) -> None:
    """Raise FloatingPointError if trained values, also compressed ones, hold NaN or infinity.

    Names the first such tensor.

    Args:
        updates: Answers of clients, on the CPU.
    """
    every: list[tuple[str, Tensor]] = []
    for update in updates:
        coded = ((n, v) for n, parts in update.extra.get(CODED, {}).items() for v in parts.values())
        own = (*update.params.items(), *coded)
        every += [(name, value) for name, value in own if value.is_floating_point() and value.numel()]
    packs = packs_of({id(value): value for _, value in every}).values()
    good = {key for parts in packs if _is_finite(base_of(parts)) for key in parts}
    alike: dict[tuple[str, torch.Size, torch.dtype], list[Tensor]] = {}
    for name, value in every:
        if id(value) not in good:
            alike.setdefault((name, value.shape, value.dtype), []).append(value)
    for (name, _, _), values in alike.items():
        if not _is_finite(torch.stack(values) if len(values) > 1 else values[0]):
            raise FloatingPointError(f"{name} is not finite after the call; a smaller train.lr may help")


def _is_finite(values: Tensor) -> bool:
    # NaN is both the least and the largest value of a tensor that has any.
    return bool(torch.isfinite(torch.stack(values.aminmax())).all())


def adjust_trunk(model: Backbone, train: TrainConfig, device: str = "cpu") -> None:
    """Switch on the checkpointing and the compilation of the network that the config asks for.

    A network that is not compiled gets attention that is quicker, and a last block that computes the class
    token only, whose rounding all results have. On a GPU pooling has the same bits in every run, and
    convolutions get the layout of tensor cores.

    Raises:
        ConfigError: The network or the machine does not support it.
    """
    if device != "cpu":
        use_mean_pooling(model)
        use_channels_last(model)
    if train.checkpointing:
        use_checkpointing(model)
    if train.compile:
        use_compile(model, device)
    elif "timm" in sys.modules:  # otherwise no layer is timm's, and its import would take 190 MB
        from rayfed.models.attention import use_class_token, use_direct_attention

        use_direct_attention(model)
        use_class_token(model)


def use_channels_last(model: nn.Module) -> None:
    """Store weights of 2d convolutions, shape (out, in, height, width), with the channels next to each other.

    Kernels of a GPU that want this layout then need not convert the weights. Values stay the same.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.to(memory_format=torch.channels_last)


SENTENCES = 3
"""Of torch's message: that memory is short, how much was asked for, and how much there is."""

NO_MEMORY = re.compile(
    r"out of memory"  # CUDA's own error, also of its driver, of Triton and of Apple's GPUs
    r"|(CUBLAS|CUSOLVER|CUSPARSE|CUDNN)_STATUS_\w*ALLOC(ATION)?_FAILED|CUFFT_ALLOC_FAILED"
)
"""Messages of a RuntimeError that tell of a lack of memory on a device."""

EXCLUSIVE = re.compile(r"devices?(\(s\))? (is/are|are|is) busy or unavailable")
"""CUDA's message if a GPU may be used by one process only, and another process uses it."""

LOST_WITH_MPS = "; under MPS such a fault ends all processes on its GPU"


def is_out_of_memory(err: BaseException) -> bool:
    """Whether a device had no memory, or no place, for this process.

    torch has its own error for its allocator. CUDA and its libraries also allocate by themselves, for
    which torch raises RuntimeError, or its subclass AcceleratorError.
    """
    if isinstance(err, torch.OutOfMemoryError):
        return True
    return isinstance(err, RuntimeError) and bool(NO_MEMORY.search(str(err)) or EXCLUSIVE.search(str(err)))


def is_fault(err: BaseException) -> bool:
    """Whether a device raised an error after which its process cannot use it any more.

    Such errors are an illegal address, an assertion in a kernel, or memory with more errors than it corrects.
    """
    accelerator = getattr(torch, "AcceleratorError", None)  # torch has it since 2.8
    return accelerator is not None and isinstance(err, accelerator) and not is_out_of_memory(err)


def failed_call(
    call: Call, err: BaseException, smaller: Smaller, splits: Mapping[str, Splits], share: float
) -> ClientError:
    """The error of a call, by what was raised in it.

    Args:
        err: What was raised.
        smaller: The changes of the training that would need less memory on a device.
        splits: Row numbers by client and split.
        share: Share of the device that this process was given.
    """
    kind: type[ClientError] = ClientError
    cause = f"{type(err).__name__}: {err}{place_of(err)}"
    if is_out_of_memory(err):
        kind = DeviceMemoryError
        examples = len(splits[call.client].get("train", ()))
        cause = out_of_memory(err, share, changes_for(call, smaller, examples))
    elif is_fault(err):
        kind = DeviceError
        text = one_line(err).partition(" CUDA kernel errors might")[0]
        cause = f"{type(err).__name__}: {text}{place_of(err)}{LOST_WITH_MPS if mps_runs() else ''}"
    elif isinstance(err, FloatingPointError):
        kind = NonFiniteClientError
    trace = "".join(traceback.format_exception(err))
    return kind(call.client, call.sent.round, call.tag, cause, trace)


def out_of_memory(err: BaseException, share: float, changes: list[str]) -> str:
    """Torch's message about a lack of memory, in one line, and the overrides that would need less.

    Args:
        err: An error for which `is_out_of_memory` holds.
        share: Share of the device that this process was given.
        changes: Overrides of the training that need less.
    """
    text = ". ".join(" ".join(str(err).split()).split(". ")[:SENTENCES]).removesuffix(".")
    text = text.partition(" CUDA kernel errors might")[0]
    if EXCLUSIVE.search(text):
        return (
            f"{text}: this GPU takes one process only, if another job has not taken it; what would fit: "
            f"cluster.gpus_per_actor=1, or several processes after `nvidia-smi -c DEFAULT`"
        )
    if share < 1:
        changes = [f"cluster.gpus_per_actor={min(1.0, 2 * share):.3g} (now {share:.3g})", *changes]
    return f"{text}; what needs less: {', '.join(changes) or 'a smaller model'}"


def changes_for(call: Call, smaller: Smaller, examples: int) -> list[str]:
    """The smallest change of each key of the training with which a call would need less memory."""
    by_key = smaller.changes(examples)
    if call.tag == TRAINING:
        by_key.pop("eval_batch_size", None)
    return [override(changes[0], key) for key, changes in by_key.items()]


log = logging.getLogger(__name__)

Weights = Mapping[str, npt.NDArray[Any]]
Constructor = Callable[[ModelConfig, int | Sequence[str], int, str | None, Network | None], Backbone]
BUFFERS = "_buffers"  # reserved name in a client's store: its own BatchNorm statistics


@dataclass(frozen=True, kw_only=True)
class ClientContext:
    """Input of a process that runs clients: small, picklable, sent once to each process.

    Attributes:
        seed: Seed of the experiment.
        model: Config of the backbone.
        construct: Makes the backbone: of this config, classes, seed, task and the network of a user.
        tuning: Tuning scheme: which of its tensors train.
        num_classes: Number of outputs of the head.
        classes: Names of the classes, for models that use them.
        train: Config of local optimization.
        shard: The Arrow file of the examples.
        splits: Row numbers by client (or evaluation set) and split.
        objective: Loss and scores of the task.
        augment: Random changes of training images; None: no changes.
        personal_every: Score personal models in every n-th round and in the last one; 0: never.
        personal_split: Split of a client on which they are scored.
        validation_split: Split on which the models that clients would deploy are validated in these rounds;
            empty: they are not.
        rounds: Number of planned rounds.
        stays: Which tensors stay at the clients (`rayfed.federation.tensors_that_stay`).
        resident: Whether a process copies the examples to its device once (`rayfed.data.examples.choose`).
        resident_bytes: Most bytes of examples that `resident=auto` copies.
        threads: Threads of torch and NumPy in a process; equal in all processes, because it affects float
            sums.
        deterministic: Refuse nondeterministic kernels; `auto`: on a GPU.
        features: Digest of the frozen weights, where frozen features may be kept on disk; empty: they are
            kept in memory only.
        shares_features: Write all frozen features to disk, for other experiments.
        smaller: Changes of the training with which a client needs less memory on a device.
        network: The network of a user, in place of one of a library; None: `model` names the latter.
        behaviour: Behaviour of that network apart from its outputs; None: it was not examined.
        passes: How clients are computed.
    """

    seed: int
    model: ModelConfig
    construct: Constructor
    tuning: Tuning
    num_classes: int
    train: TrainConfig
    shard: Path
    splits: Mapping[str, Splits]
    classes: tuple[str, ...] = ()
    objective: Objective = field(default_factory=Classification)
    augment: AugmentConfig | None = None
    personal_every: int = 0
    personal_split: str = "test"
    validation_split: str = ""
    rounds: int = 1
    stays: tuple[str, ...] = ()
    resident: Resident = "auto"
    resident_bytes: float = 0.0
    threads: int = 1
    deterministic: Deterministic = "auto"
    features: str = ""
    shares_features: bool = False
    smaller: Smaller = field(default_factory=lambda: Smaller(train=TrainConfig()))
    network: Network | None = None
    behaviour: Behaviour | None = None
    passes: WorkerPasses = field(default_factory=WorkerPasses)

    def build(self) -> Backbone:
        """The tuned model with its initial values."""
        own = (self.seed, self.objective.reads, self.network)
        model = self.construct(self.model, self.classes or self.num_classes, *own)
        return apply_tuning(model, self.tuning, self.seed).note(self.behaviour)

    def skeleton(self) -> Backbone:
        """The same model without values, for `attach`."""
        bare = skeleton(lambda: apply_tuning(self._bare(), self.tuning, self.seed))
        return bare.note(self.behaviour)

    def untuned(self) -> Backbone:
        """The model without values to which no tuning was applied."""
        return skeleton(self._bare)

    def _bare(self) -> Backbone:
        return self.construct(self.model, self.num_classes, self.seed, self.objective.reads, self.network)

    def weights(self) -> Weights:
        """All tensors of the initial model, to be shared between processes."""
        return dump(self.build(), half=self.train.precision == "bf16")

    def deployed_on(self, round: int) -> dict[str, str]:
        """Splits on which clients score their personal models in this round (`Client.deployed_on`)."""
        every = self.personal_every
        if not every or ((round + 1) % every and round + 1 != self.rounds):
            return {}
        validated = {VALIDATED: self.validation_split} if self.validation_split else {}
        return {PERSONAL: self.personal_split, **validated}


def choose_settings(context: ClientContext, device: torch.device) -> None:
    """Choose what libraries have once for a process: threads, products and deterministic kernels."""
    use_threads(context.threads)
    set_products(device, context.train.precision)
    set_deterministic(device, context.deterministic)


class Worker:
    """Holds one model and runs any client with it.

    Before each call, the tensors that the call before may have changed are reset. A frozen backbone is built
    once and never copied.

    Attributes:
        context: What the process needs to run clients.
        passes: How clients are computed.
        share: Share of the device that the process was given.
        model: The tuned model, on the device.
        all_blocks: Numbers of all its blocks.
        stays: Global names of the tensors that stay at the clients.
        put_back: Puts back what a call changed besides trained tensors.
    """

    def __init__(
        self, context: ClientContext, weights: Weights, device: str | torch.device = HOST, share: float = 1.0
    ) -> None:
        """Build the model on a device.

        Args:
            context: What the process needs to run clients.
            weights: All tensors of the initial model.
            device: Any device of torch. Calls and their answers are on the CPU all the same.
            share: Share of the device that the process was given, for messages.
        """
        self.context = context
        self.share = share
        self.passes = context.passes
        self._device = torch.device(device)
        choose_settings(context, self._device)
        model = context.skeleton()
        attach(model, weights)
        if context.train.base_bits is not None:
            from rayfed.models.lora_layer import four_bits, quantize

            quantize(model, four_bits)
        self.model: Backbone = model.to(device)
        self._device = next(self.model.parameters()).device  # with its index, which `device` may leave out
        self.model.mixed = context.train.precision == "bf16"
        adjust_trunk(self.model, context.train, self._device.type)
        self.passes.prepare(self.model, context.train, self._device.type)
        self.all_blocks = model.active
        self._start = copies(self.model)
        self.stays = names_that_stay(self.model, context.stays)
        buffers = self._start.keys() - sent_tensors(model, buffers=False).keys()
        self._float_buffers = {name for name in buffers if not name.endswith(RESIDUAL)}
        dataset = open_dataset(context.shard)
        examples = dataset.images, dataset.targets, context.splits
        self._examples = choose(*examples, self._device, context.resident, context.resident_bytes)
        scale = self.model.mean, self.model.std
        self._normalize = converter(dataset, context.objective.pixels, self.model, self._device)
        shape = model.example[0] if isinstance(model, OwnBackbone) else ()
        sides = (shape[-2], shape[-1]) if len(shape) > 1 else model.size
        self._augment = (
            Augmentation.of(context.augment, sides, *scale, dataset.own) if context.augment else None
        )
        self.cache = FeatureCache(context.train.cache_memory, self._folder(), context.shares_features)
        self.put_back = PutBack(self.model)

    def _folder(self) -> FeatureFolder | None:
        """Folder of the frozen features on disk."""
        context = self.context
        if not context.features:
            return None
        train = context.train
        numbers = (train.eval_batch_size, context.threads, train.compile, train.precision, train.pack_texts)
        network = (context.features, context.model)
        return feature_folder(context.shard, context.splits, self._device, *network, *numbers)

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return self._device

    def start_params(self) -> Params:
        """The tensors that are sent and trained, with their initial values, on the CPU."""
        local = self.context.train.batch_norm == "local"
        own = self.stays | self._float_buffers if local else self.stays
        return move({n: v for n, v in self._start.items() if n not in own}, HOST)

    def checksum(self) -> str:
        """Digest of everything that calls must leave alone: frozen weights, and what is put back."""
        self.put_back()
        travels = {entry.path for entry in self.model.tensors().values() if entry.is_trained}
        fixed = {n: b for n, b in self.model.named_buffers() if n not in travels}
        return checksum(self.model, fixed)

    def call(self, call: Call, store: Mapping[str, Any]) -> tuple[Update, dict[str, Any]]:
        """Run one call of a client; changes nothing but the returned values.

        The message and the store go to the device together, and the update and the store come back together.

        Args:
            call: The client, its task and the message to it, on the CPU.
            store: The private store of the client before the call, on the CPU.

        Returns:
            Its update, and its store after the call, on the CPU.

        Raises:
            ClientError: The task failed, or its update has a tensor of a wrong shape or that is not finite.
                Nothing of the call stays on the device.
            DeviceError: The device failed; this process cannot run another call.
        """
        try:
            return self._run(call, store)
        except Exception as err:
            failed = self._failure(call, err)
        self.give_back_after(failed, call)
        raise failed  # here, where it has no context, whose frames would hold the tensors of the call

    def give_back_after(self, failed: RayFedError | None, call: Call) -> None:
        """Give back what a failed call had of the memory of the device.

        Raises:
            DeviceError: The device has failed, which another error had hidden.
        """
        hidden = None
        if isinstance(failed, DeviceMemoryError):
            self.passes.save_memory(self.model, self.context.train)
        try:
            give_back(self._device)
        except RuntimeError as err:
            if is_fault(err) and not isinstance(failed, DeviceError):
                hidden = self._failure(call, err)
        if hidden is not None:
            raise hidden

    def call_anew(self, call: Call, store: Callable[[], Mapping[str, Any]]) -> tuple[Update, dict[str, Any]]:
        """Run a call as `call` does, and once more if the device was short of memory.

        The second time the failed call has given back what it had, and neighbours on a GPU may have as well.
        It gives the same result as the first one would have.

        Args:
            call: As of `call`.
            store: Makes a new copy of the private store of the client before the call.
        """
        try:
            return self.call(call, store())
        except DeviceMemoryError as err:
            log.warning("%s; running it once more", err)
        return self.call(call, store())

    def _run(self, call: Call, store: Mapping[str, Any]) -> tuple[Update, dict[str, Any]]:
        seed = derive(self.context.seed, call.tag, call.sent.round, call.client)
        with use_seed(seed) as rng, self.passes.drawing(seed):
            ((sent, own),) = receive([(call.sent, store)], self._device)
            sent = self._load(sent, own)
            client = self.client(call, self.model, own, rng, self.passes)
            answer = self.answer(call, client, sent)
            self.put_back.check()
            self._keep_buffers(client)
            ((update, kept),) = send_back([client], [answer], self._device)
            check_finite([update])
            return update, kept

    def _failure(self, call: Call, err: Exception) -> RayFedError:
        """The error of a call, without the frames of `err`, which hold the tensors of the call."""
        context = self.context
        if isinstance(err, RayFedError):
            failed = err
        else:
            failed = failed_call(call, err, context.smaller, context.splits, self.share)
        drop_frames(err)
        self.model.forget()
        return failed.with_traceback(None)

    def call_group(
        self, calls: Sequence[Call], stores: Callable[[], Sequence[Mapping[str, Any]]]
    ) -> list[tuple[Update, dict[str, Any]]] | None:
        """Run calls of several clients together.

        Args:
            calls: The calls, all of one exchange.
            stores: Makes a new copy of the private store of each client before its call, on the CPU.

        Returns:
            As `call` for each of them; None if each call has to be run alone, as where the code of a client
            failed, which tells whose fault it is.

        Raises:
            ResourceError: The device has too little memory for this group; names what needs less.
            DeviceError: The device failed; this process cannot run another call.
        """
        return self.passes.call_group(self, calls, stores)

    def answer(self, call: Call, client: Client, sent: Broadcast) -> Leaving:
        """Run the task of a call, check the shapes of its answer, and let it leave the client."""
        answer = call.task(client, sent)
        check_shapes(answer, self._start)
        params, extra = keep_own(answer.params, client), answer.extra
        for leave in call.leaves:
            params, extra = leave(client, sent, params, extra)
        return answer, params, extra

    def values(self, sent: Broadcast, store: Mapping[str, Any]) -> Params:
        """Values of all tensors that calls may change, at the start of a call."""
        own = self._start | store.get(BUFFERS, {}) | store.get(STAYS, {})
        return cut_to_rank(own | {n: v for n, v in sent.params.items() if sent.holds(n)}, sent.rank)

    def _load(self, sent: Broadcast, store: Mapping[str, Any]) -> Broadcast:
        """Reset the model to the values with which a call starts; returns the message as its code sees it."""
        values = self.values(sent, store)
        model = self.model
        self.put_back()
        model.active = self.all_blocks if sent.blocks is None else sent.blocks
        model.untuned = False
        load(model, values)
        model.zero_grad(set_to_none=True)
        train_mode(model)
        return add_own(sent, self.stays, values)

    def client(
        self, call: Call, model: Any, store: dict[str, Any], rng: torch.Generator, passes: Passes
    ) -> Client:
        """The client of a call.

        Args:
            model: The model, or what stands for it in the code of this client.
            store: Its private store, on the device.
            rng: The stream of the call.
            passes: How this client is computed.
        """
        context = self.context
        train = replace(context.train, lr=context.train.rate(call.sent.round, context.rounds))
        return Client(
            id=call.client,
            model=model,
            data=ClientData(call.client, self._examples, context.splits[call.client], self._normalize),
            config=train,
            rng=rng,
            store=store,
            deployed_on=context.deployed_on(call.sent.round),
            cache=self.cache,
            augment=self._augment,
            objective=context.objective,
            lr_factor=train.lr / context.train.lr,
            rank=call.sent.rank,
            stays=self.stays,
            passes=passes,
        )

    def _keep_buffers(self, client: Client) -> None:
        if self._float_buffers and not client.buffers_travel:
            values = copies(self.model)
            client.store[BUFFERS] = {n: values[n] for n in sorted(self._float_buffers & values.keys())}


def drop_frames(err: BaseException) -> None:
    """Clear the frames that an error and its causes came through, and end the chain."""
    chain: list[BaseException] = []
    following: BaseException | None = err
    while following is not None and following not in chain:
        chain.append(following)
        following = following.__cause__ or following.__context__
    for each in chain:
        traceback.clear_frames(each.__traceback__)
        each.__traceback__ = each.__cause__ = each.__context__ = None
