"""The errors of calls that failed at a client, among them faults of a device and a lack of its memory."""

from __future__ import annotations

import re
import traceback
from collections.abc import Mapping

import torch

from rayfed.data.row_table import Splits
from rayfed.errors import (
    ClientError,
    DeviceError,
    DeviceMemoryError,
    NonFiniteClientError,
    one_line,
    place_of,
)
from rayfed.executors.mps import mps_runs
from rayfed.federation.cohort import TRAINING
from rayfed.federation.executor import Call
from rayfed.federation.less_memory import Smaller, override

SENTENCES = 3
"""Of torch's message: that memory is short, how much was asked for, and how much there is."""

NO_MEMORY = re.compile(
    r"out of memory"  # CUDA's own error, also of its driver, of Triton and of Apple's GPUs
    r"|(CUBLAS|CUSOLVER|CUSPARSE|CUDNN)_STATUS_\w*ALLOC(ATION)?_FAILED|CUFFT_ALLOC_FAILED"
)
"""Messages of a RuntimeError that tell of a lack of memory on a device."""

EXCLUSIVE = re.compile(r"devices?(\(s\))? (is/are|are|is) busy or unavailable")
"""What CUDA says where a GPU may be used by one process only, and another process uses it."""

LOST_WITH_MPS = "; under MPS such a fault ends all processes on its GPU"


def is_out_of_memory(err: BaseException) -> bool:
    """Whether a device had no memory, or no place, for this process.

    torch has an error of its own for its allocator. CUDA and its libraries also allocate by themselves, for
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
    call: Call, err: Exception, smaller: Smaller, splits: Mapping[str, Splits], share: float
) -> ClientError:
    """The error of a call, by what was raised in it.

    Args:
        call: The call.
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
        said = one_line(err).partition(" CUDA kernel errors might")[0]
        cause = f"{type(err).__name__}: {said}{place_of(err)}{LOST_WITH_MPS if mps_runs() else ''}"
    elif isinstance(err, FloatingPointError):
        kind = NonFiniteClientError
    trace = "".join(traceback.format_exception(err))
    return kind(call.client, call.sent.round, call.tag, cause, trace)


def out_of_memory(err: BaseException, share: float, changes: list[str]) -> str:
    """What torch says of a lack of memory, in one line, and the overrides that would need less of it.

    Args:
        err: An error for which `is_out_of_memory` holds.
        share: Share of the device that this process was given.
        changes: Overrides of the training that need less.
    """
    said = ". ".join(" ".join(str(err).split()).split(". ")[:SENTENCES]).removesuffix(".")
    said = said.partition(" CUDA kernel errors might")[0]
    if EXCLUSIVE.search(said):
        return (
            f"{said}: this GPU takes one process only, if another job has not taken it; what would fit: "
            f"cluster.gpus_per_actor=1, or several processes after `nvidia-smi -c DEFAULT`"
        )
    if share < 1:
        changes = [f"cluster.gpus_per_actor={min(1.0, 2 * share):.3g} (now {share:.3g})", *changes]
    return f"{said}; what needs less: {', '.join(changes) or 'a smaller model'}"


def changes_for(call: Call, smaller: Smaller, examples: int) -> list[str]:
    """The smallest change of each key of the training with which a call would need less memory."""
    found = smaller.changes(examples)
    if call.tag == TRAINING:
        found.pop("eval_batch_size", None)
    return [override(changes[0], key) for key, changes in found.items()]
