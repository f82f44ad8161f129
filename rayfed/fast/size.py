"""Chooses how many clients share their passes: from config, method and model, never from placement."""

from __future__ import annotations

from rayfed.executors.worker_passes import GroupSize, Whole
from rayfed.federation.local import Local
from rayfed.federation.train_config import TrainConfig

LARGEST_BATCH = 16
"""With `auto`, the largest `train.batch_size` with which clients share their passes."""

ROWS = 256
"""With `auto`, the largest number of rows of a joint batch."""

MOST = 32
"""With `auto`, the largest number of clients that share their passes."""

OPERATIONS = 12_000_000_000
"""With `auto`, the largest number of floating-point operations of a joint batch, forward and backward.

Starting the operations of a network takes little time compared with computing so many, and the results of all
layers for more rows would need much memory: 3 GB for 32 images of 224 x 224 pixels in a ViT-S."""

WHOLE_ROW = 20_000_000
"""With `auto`, the most operations of a row with which whole networks are trained in groups.

The size of a group may not depend on where clients run, so a CPU, where more is slower, decides for all.
Measured (benchmarks/results/whole_networks.md): groups are faster for networks of up to 18.5 MFLOP for a row
and 199,210 numbers, and slower from 28 MFLOP and 809,322 numbers on, which leave the caches."""

WHOLE_NUMBERS = 250_000
"""With `auto`, the most trained numbers with which whole networks are trained in groups."""

WHOLE_LEAST = 4
"""With `auto`, the smallest group with whole networks; groups of 2 gain nothing in some."""

USUAL = ("prepare", "train", "step", "loss")
"""Functions that a method does not override where clients with whole networks train in one loop."""

PARTS = 4
"""With `auto`, the cohort is divided into at least this many groups, so that several actors have work."""


def group_size(
    train: TrainConfig,
    local: Local,
    joint: str,
    frozen: bool,
    cohort: int,
    row: int = 0,
    whole: Whole | None = None,
) -> GroupSize:
    """The number of clients that share their passes.

    Args:
        train: Config of local optimization.
        local: Client half of the method.
        joint: Why several clients cannot share the passes of the tuned network; empty: they can.
        frozen: The features of the network do not change in training.
        cohort: Number of clients of a round.
        row: Floating-point operations of a row of a batch, forward and backward; 0: not known.
        whole: The network, if most of it is trained; None: clients have a part of it in common.
    """
    if train.group == 1:
        return GroupSize(1)
    if reason := why_alone(local) or _why_not_run(train) or joint:
        return GroupSize(1, reason)
    if train.group != "auto":
        return GroupSize(train.group)
    if train.precision == "bf16":
        return GroupSize(1, "train.group=auto makes no groups with train.precision=bf16")
    if frozen and train.cache_features is not False:
        return GroupSize(1, "the features of the frozen network are computed once and kept", chosen=True)
    if train.batch_size > LARGEST_BATCH:
        return GroupSize(1, f"train.batch_size is above {LARGEST_BATCH}", chosen=True)
    most = min(ROWS, OPERATIONS // row if row else ROWS) // train.batch_size
    if most < 2:
        return GroupSize(1, f"batches of {train.batch_size} are work enough for this network", chosen=True)
    if whole is not None and (reason := _why_slower(train, local, row, whole)):
        return GroupSize(1, reason, chosen=True)
    clients = min(MOST, most, max(1, -(-cohort // PARTS)))
    if whole is not None and clients < WHOLE_LEAST:
        return GroupSize(1, "groups of so few clients with whole networks are slower on a CPU", chosen=True)
    return GroupSize(clients)


def _why_slower(train: TrainConfig, local: Local, row: int, whole: Whole) -> str:
    """Why groups of whole networks would not be faster than single clients; empty: they are.

    Args:
        train: As of `group_size`.
        local: As of `group_size`.
        row: As of `group_size`.
        whole: The network.
    """
    usual = all(getattr(type(local), name) is getattr(Local, name) for name in USUAL)
    cut = train.clip_norm is not None or train.micro_batch is not None or train.keep_optimizer
    if not usual or cut or whole.has_own_batches:
        return "whole networks take turns on a CPU where their steps are not the usual ones"
    if not row or row > WHOLE_ROW or whole.numbers > WHOLE_NUMBERS:
        return "the memory of a CPU decides the time of a whole network of this size"
    return ""


def why_alone(local: Local) -> str:
    """Why clients of a method are trained one by one whatever the config says; empty: they need not be.

    Args:
        local: Client half of the method.
    """
    kind = type(local)
    own = [name for name in ("train", "step") if getattr(kind, name) is not getattr(Local, name)]
    if local.needs_curvature:
        return f"{kind.__name__} needs second derivatives"
    return f"{kind.__name__} has its own {own[0]}()" if own and not kind.grouped else ""


def _why_not_run(train: TrainConfig) -> str:
    """Why the network cannot be run for several clients as this config wants to run it."""
    for key in ("checkpointing", "compile"):
        if getattr(train, key):
            return f"train.{key} runs the network in another way"
    return ""
