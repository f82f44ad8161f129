"""The config section `train`: settings of local optimization, and what follows from them.

Changes of local training that need less memory on a device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from annotated_types import Ge

from rayfed.devices import Precision
from rayfed.types import Count, Decay, Fraction, NonNegative, Positive


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Settings of local optimization, shared by all methods.

    Attributes:
        optimizer: Kind of optimizer. A new one is made for every call, so momentum and Adam moments start at
            zero in every round, unless `keep_optimizer` is set.
        keep_optimizer: Clients keep momentum and Adam moments from round to round, tensor by tensor: a tensor
            that a client does not hold in a round keeps its moments.
        lr: Learning rate.
        schedule: Learning rate over the rounds: `constant`; `cosine`: from `lr` in the first round after
            warm-up towards 0 after the last one; `step`: multiplied by `step_factor` once.
        step_at: Under `step`: share of all rounds after which the learning rate changes.
        step_factor: Under `step`: the factor.
        warmup_rounds: Number of first rounds in which the learning rate grows linearly, beginning with
            lr / (warmup_rounds + 1).
        momentum: Momentum of sgd, below 1; adam and adamw ignore it.
        weight_decay: L2 penalty added to the gradient for sgd and adam; decoupled weight decay for adamw.
        betas: Decay rates of the two moments of adam and adamw.
        eps: Term added to the denominator of adam and adamw.
        clip_norm: Gradients are scaled so that their global L2 norm is at most this; none: no clipping.
        epochs: Passes over the training split in one call.
        batch_size: Examples in a training batch; a smaller last batch of a pass is used too.
        drop_last: Leave out a smaller last batch of a pass, unless it is the only one.
        eval_batch_size: Examples in a batch when a model is evaluated.
        local_steps: Optimization steps of one call: `full_epoch` (`epochs` passes), a number, or
            `min_over_clients_plus_one`, as in the released code of FedRA: full epochs, but every client stops
            one step after the client with the fewest batches.
        max_steps: Upper limit on the steps of one call; none: no limit.
        batch_norm: What happens to the running statistics of trained BatchNorm layers: `average` sends and
            averages them like parameters, `local` keeps them at the client.
        cache_features: Whether the features of a frozen network are computed once per process and image
            instead of in every round. `auto`: wherever the result is exactly the same; on: the run is refused
            where it is not; off: never.
        cache_memory: Bytes of these features that each process keeps in memory. Beyond, those that were not
            used for the longest time go to the disk (`data.cache`) where that is faster than computing them.
        group: Number of clients whose rows share each forward and backward pass of their training
            (`rayfed.fast`). `auto`: up to 32 where a pass of one client is so short that this
            pays, else 1. Rounding depends on it, and on nothing else about how clients are placed.
        pack_texts: Whether the texts of a batch lie one after the other in one row of the network, so that
            nothing is computed for pads (`rayfed.fast.packed_texts`): the same result except for rounding.
            `auto`: where the network gives the same for texts of the run, which is tried before it; true: the
            run is refused where it does not; false: texts are padded.
        checkpointing: Compute the activations within a block again in the backward pass instead of keeping
            them: less memory, about a third more time, the same result.
        micro_batch: Compute the gradients of a batch in parts of this many examples, whose sum is used for
            one step: less memory, the same step except for rounding. None: the batch as a whole.
        precision: Numbers of the network's computation, in training and scoring. fp32; tf32: as fp32, with
            faster products on GPUs that have them (no difference on a CPU); bf16: products in bfloat16, and
            the frozen network is stored in it. Trained tensors, the optimizer, heads, losses and the server
            are in fp32 always.
        base_bits: Bits of the frozen weights of linear layers of a text model: 4 stores them as NF4 by
            bitsandbytes, on CUDA only. Adapters and the residual of `tuning.residual` stay in float32. None:
            as `precision` says.
        graphs: On CUDA, record the operations of the network once for each shape, and start them together
            afterwards (`rayfed.fast.graphs`): the same result with fewer launches, in more memory. `auto`:
            with methods, tuning schemes and networks that ship with RayFed, where passes can be recorded; a
            process that is short of memory goes on without them. true: the run is refused where passes
            cannot be recorded.
        compile: Compile the network with torch.compile, which takes minutes at first, changes rounding, and
            lets dropout draw other random numbers.
    """

    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    keep_optimizer: bool = False
    lr: Positive = 0.02
    schedule: Literal["constant", "cosine", "step"] = "constant"
    step_at: Fraction = 0.8
    step_factor: Positive = 0.1
    warmup_rounds: Annotated[int, Ge(0)] = 0
    momentum: Decay = 0.9
    weight_decay: NonNegative = 0.0
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    eps: Positive = 1e-8
    clip_norm: Positive | None = None
    epochs: Count = 1
    batch_size: Count = 32
    drop_last: bool = False
    eval_batch_size: Count = 256
    local_steps: Literal["full_epoch", "min_over_clients_plus_one"] | Count = "full_epoch"
    max_steps: Count | None = None
    batch_norm: Literal["average", "local"] = "average"
    cache_features: Literal["auto"] | bool = "auto"
    cache_memory: Count = 2_000_000_000
    group: Literal["auto"] | Count = "auto"
    pack_texts: Literal["auto"] | bool = "auto"
    checkpointing: bool = False
    micro_batch: Count | None = None
    precision: Precision = "fp32"
    compile: bool = False
    graphs: Literal["auto"] | bool = "auto"
    base_bits: Literal[4] | None = None

    @property
    def varies(self) -> bool:
        """Whether the learning rate depends on the round."""
        return self.schedule != "constant" or self.warmup_rounds > 0

    def rate(self, round: int, rounds: int) -> float:
        """Learning rate of a round.

        Cosine: Loshchilov and Hutter, SGDR, ICLR 2017, Eq. 5, without restarts and in steps of a round.

        Args:
            round: Round index, from 0. Rounds after the last one, with which finished runs are analysed, have
                its learning rate.
            rounds: Total number of rounds.
        """
        round = min(round, rounds - 1)
        if round < self.warmup_rounds:
            return self.lr * (round + 1) / (self.warmup_rounds + 1)
        if self.schedule == "cosine":
            done = (round - self.warmup_rounds) / (rounds - self.warmup_rounds)
            return self.lr * (1 + math.cos(math.pi * done)) / 2
        # A product such as 0.7 * 10 may exceed the whole number by a rounding error.
        changed = self.schedule == "step" and round >= math.ceil(self.step_at * rounds - 1e-9)
        return self.lr * self.step_factor if changed else self.lr

    def batches(self, num_examples: int) -> int:
        """Number of batches of one pass over `num_examples` examples."""
        if self.drop_last and num_examples > self.batch_size:
            return num_examples // self.batch_size
        return -(-num_examples // self.batch_size)

    def smallest_batch(self, num_examples: int) -> int:
        """Examples in the smallest batch of one call on `num_examples` examples; 0: there are none."""
        last = num_examples - (self.batches(num_examples) - 1) * self.batch_size if num_examples else 0
        reaches = self.steps(num_examples) >= self.batches(num_examples)
        return min(last, self.batch_size) if reaches else self.batch_size

    def steps(self, num_examples: int) -> int:
        """Number of optimization steps of one call on a split of `num_examples` examples."""
        full = self.epochs * self.batches(num_examples)
        steps = self.local_steps if isinstance(self.local_steps, int) else full
        return steps if self.max_steps is None else min(steps, self.max_steps)

    def examples(self, num_examples: int) -> int:
        """Number of examples, with repetition, in all batches of `steps(num_examples)` steps.

        The last batch of a pass may be smaller than `batch_size`.
        """
        if not num_examples:
            return 0
        batches = self.batches(num_examples)
        passes, rest = divmod(self.steps(num_examples), batches)
        return passes * min(num_examples, batches * self.batch_size) + rest * self.batch_size


@dataclass(frozen=True, kw_only=True)
class Smaller:
    """The changes of a training that method and model allow, and that need less memory on a device.

    Attributes:
        train: The training.
        micro_batch: Gradients may be computed in parts of a batch.
        checkpointing: Activations may be computed again between the blocks.
    """

    train: TrainConfig
    micro_batch: bool = False
    checkpointing: bool = False

    def changes(self, examples: int) -> dict[str, list[TrainConfig]]:
        """The changed trainings by the key that differs, from the smallest to the largest change of it.

        `graphs` comes first, because it keeps the result, and then `micro_batch` and `checkpointing`, which
        keep it apart from rounding.

        Args:
            examples: Training examples of the client; a batch has no more.
        """
        train = self.train
        batch = min(train.batch_size, max(examples, 1))
        part = min(train.micro_batch or batch, batch)
        parts = _halves(part) if self.micro_batch else ()
        recomputes = (True,) if self.checkpointing and not train.checkpointing else ()
        plain = [replace(train, graphs=False)] if train.graphs is True else []
        by_key = {
            "graphs": plain,
            "micro_batch": [replace(train, micro_batch=n) for n in parts],
            "checkpointing": [replace(train, checkpointing=value) for value in recomputes],
            "batch_size": [replace(train, batch_size=n) for n in _halves(batch)],
            "eval_batch_size": [replace(train, eval_batch_size=n) for n in _halves(train.eval_batch_size)],
        }
        return {key: changes for key, changes in by_key.items() if changes}


def override(train: TrainConfig, key: str) -> str:
    """The override that gives a key of the section `train` the value that it has here.

    >>> override(TrainConfig(checkpointing=True), "checkpointing")
    'train.checkpointing=true'
    """
    return f"train.{key}={str(getattr(train, key)).lower()}"


def _halves(number: int) -> Iterator[int]:
    """Half of a number, a quarter of it and so on, down to 1."""
    while number > 1:
        number //= 2
        yield number
