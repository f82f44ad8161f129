"""Counts what a GPU is asked for in a training step and in a visit, on the pretended accelerator.

    python -m benchmarks.step_operations

Writes the table of docs/gpu.md. A GPU takes a few microseconds to begin an operation (launch), however small;
with small batches that is most of the time of a step. The networks are narrow ones of 12 blocks, because the
number of operations does not depend on the width, with two images in a batch. Counted are operations of the
device but views; casts among them, which change the type of a tensor; copies between processor and device;
and waits of the processor for the device. A visit is the rest of a client's round: its values are written,
its answer is packed, its optimizer is made. With `train.group` all counts are those of the whole group.

The optimizer is counted as a few operations for all tensors (`foreach`); on CUDA it is one (`fused`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch

from benchmarks.gpu_check import ROOT, replaced
from rayfed.data.augmentation import Augmentation
from rayfed.data.data_config import AugmentConfig, Crop, Flip, Grayscale, Jitter, RandAugment, Rotate
from rayfed.engine.loop import run_rounds
from rayfed.engine.setup import Setup
from rayfed.executors.inline import InlineExecutor
from rayfed.testing import small_setup
from tests.pretended import Counts, pretended
from tests.pretended_autocast import mixed_precision

PAGE = ROOT / "docs" / "gpu.md"
BLOCKS = 12
DEEP = (f"model.options={{depth: {BLOCKS}, embed_dim: 48, num_heads: 3}}",)
METHODS = {
    "LoRA": ("algorithm=fedavg", "tuning=lora", "tuning.dropout=0.1", *DEEP),
    "FedGCR": ("algorithm=fedgcr", "data.partition.scheme=by_domain", *DEEP),
    "FedRA": ("algorithm=fedra", "capacity=dynamic", "tuning=lora", "tuning.dropout=0.1", *DEEP),
    "InclusiveFL": ("algorithm=inclusivefl", "capacity=dynamic", "tuning=lora", "tuning.dropout=0.1", *DEEP),
    "DepthFL": ("algorithm=depthfl", "capacity=dynamic", *DEEP),
    "FedCLIP": ("algorithm=fedclip", "model.options={}"),
}
PRECISIONS = ("fp32", "bf16")
GROUPS = (1, 8, 32)
"""Numbers of clients that share their passes."""

COMMON = (
    "data.domains=[plain]",
    "data.test=1",
    "data.val=0",
    "evaluation.every=0",
    "evaluation.personal=false",
    "train.batch_size=2",
)
STEPS = (1, 2)
"""A step is what the second number of steps costs more; what is left of the first one is the visit."""

CHANGES = {
    "flip": AugmentConfig(flip=Flip()),
    "crop": AugmentConfig(crop=Crop()),
    "rotate": AugmentConfig(rotate=Rotate()),
    "jitter": AugmentConfig(jitter=Jitter()),
    "grayscale": AugmentConfig(grayscale=Grayscale()),
    "randaugment": AugmentConfig(randaugment=RandAugment()),
}
IMAGES = 32


@dataclass(frozen=True)
class Case:
    """A row of the table: a method, a precision, and how many clients share their passes."""

    method: str
    precision: str
    group: int

    def row(self) -> str:
        """The line of the table."""
        step, visit = self.counts()
        assert step.waits == step.down == step.up == 0, "a step waits for the device, or copies"
        copies = f"{visit.down} | {visit.up} | {visit.waits}"
        return (
            f"| {self.method} | {self.precision} | {self.group} | {step.kernels} | {step.casts} | "
            f"{visit.kernels} | {copies} |"
        )

    def counts(self) -> tuple[Counts, Counts]:
        """Of one more step, and of a visit without its steps."""
        setup = self._setup()
        few, more = (self._round(setup, steps) for steps in STEPS)
        step = _less(more, few, 1)
        return step, _less(few, step, STEPS[0])

    def _setup(self) -> Setup:
        """As many clients as a group has."""
        clients = (f"data.partition.clients_per_domain={self.group}", f"data.limit={4 * self.group + 4}")
        asked = (f"train.group={self.group}", f"train.precision={self.precision}")
        return small_setup(*COMMON, *clients, *METHODS[self.method], *asked)

    def _round(self, setup: Setup, steps: int) -> Counts:
        """Counts of the second round."""
        context = replace(setup.context, train=replace(setup.context.train, local_steps=steps))
        experiment = replace(setup.experiment, rounds=2)
        mixed = mixed_precision() if self.precision == "bf16" else nullcontext()
        with pretended() as device, mixed:
            executor = InlineExecutor(context, setup.weights, device=device.name)
            rounds = run_rounds(experiment, executor, setup.start)
            next(rounds)
            device.counts.clear()
            next(rounds)
            return replace(device.counts)


def _less(counts: Counts, other: Counts, times: int) -> Counts:
    """The counts without `times` times the other ones."""
    rest = vars(other)
    return Counts(**{name: value - times * rest[name] for name, value in vars(counts).items()})


def cases() -> Iterator[Case]:
    """All rows."""
    for method in METHODS:
        for precision in PRECISIONS:
            for group in GROUPS:
                yield Case(method, precision, group)


def changed(name: str) -> int:
    """Launches with which images of a batch are changed at random."""
    change = Augmentation.of(CHANGES[name], 32, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    with pretended() as device:
        images = torch.rand(IMAGES, 3, 32, 32).to(device.name)
        change(images, 0)
        device.counts.clear()
        change(images, 0)
        return device.counts.kernels


def table() -> str:
    """Both tables."""
    columns = (
        *("method", "precision", "clients at once", "launches of a step", "of them casts"),
        *("launches of a visit besides", "copies down", "copies up", "waits"),
    )
    lines = [
        f"| {' | '.join(columns)} |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
        *(case.row() for case in cases()),
    ]
    changes = ", ".join(f"`{name}` {changed(name)}" for name in CHANGES)
    return "\n".join([*lines, "", f"Launches of `data.augment` for {IMAGES} images: {changes}."])


def page(text: str) -> str:
    """The page with these tables written anew."""
    return replaced(text, "operations", table())


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
