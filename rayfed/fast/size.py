"""Chooses how many clients share their passes: from config, method and model, never from placement."""

from __future__ import annotations

from rayfed.executors.worker_passes import GroupSize
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

PARTS = 4
"""With `auto`, the cohort is divided into at least this many groups, so that several actors have work."""


def group_size(
    train: TrainConfig,
    local: Local,
    joint: str,
    frozen: bool,
    cohort: int,
    row: int = 0,
) -> GroupSize:
    """The number of clients that share their passes.

    Args:
        train: Config of local optimization.
        local: Client half of the method.
        joint: Why several clients cannot share the passes of the tuned network; empty: they can.
        frozen: The features of the network do not change in training.
        cohort: Number of clients of a round.
        row: Floating-point operations of a row of a batch, forward and backward; 0: not known.
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
    return GroupSize(min(MOST, most, max(1, -(-cohort // PARTS))))


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
