"""The errors of calls that failed at a client, among them the lack of memory on a device."""

from __future__ import annotations

import traceback
from collections.abc import Mapping

import torch

from rayfed.data.row_table import Splits
from rayfed.errors import ClientError, DeviceMemoryError, NonFiniteClientError, place_of
from rayfed.federation.cohort import TRAINING
from rayfed.federation.executor import Call
from rayfed.federation.less_memory import Smaller, override

SENTENCES = 3
"""Of torch's message: that memory is short, how much was asked for, and how much there is."""


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
    if isinstance(err, torch.OutOfMemoryError):
        kind = DeviceMemoryError
        examples = len(splits[call.client].get("train", ()))
        cause = out_of_memory(err, share, changes_for(call, smaller, examples))
    elif isinstance(err, FloatingPointError):
        kind = NonFiniteClientError
    return kind(call.client, call.sent.round, call.tag, cause, traceback.format_exc())


def out_of_memory(err: torch.OutOfMemoryError, share: float, changes: list[str]) -> str:
    """What torch says of a lack of memory, in one line, and the overrides that would need less of it.

    Args:
        err: The error of torch.
        share: Share of the device that this process was given.
        changes: Overrides of the training that need less.
    """
    said = ". ".join(" ".join(str(err).split()).split(". ")[:SENTENCES]).removesuffix(".")
    if share < 1:
        changes = [f"cluster.gpus_per_actor={min(1.0, 2 * share):.3g} (now {share:.3g})", *changes]
    return f"{said}; what needs less: {', '.join(changes) or 'a smaller model'}"


def changes_for(call: Call, smaller: Smaller, examples: int) -> list[str]:
    """The smallest change of each key of the training with which a call would need less memory."""
    found = smaller.changes(examples)
    if call.tag == TRAINING:
        found.pop("eval_batch_size", None)
    return [override(changes[0], key) for key, changes in found.items()]
