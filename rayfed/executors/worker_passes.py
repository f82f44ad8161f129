"""The plain form of all that a worker may do in fewer operations: one client after the other.

The driver asks it before a run what is possible. Each worker lets it prepare its network, and gives it to the
clients, which compute with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal

from rayfed.data.shards import Dataset
from rayfed.errors import ConfigError
from rayfed.federation.executor import Call
from rayfed.federation.local import Local
from rayfed.federation.method_registry import Parts
from rayfed.federation.passes import Passes
from rayfed.federation.train_config import TrainConfig
from rayfed.models.backbone import Backbone
from rayfed.objective import Objective
from rayfed.types import Update

FAST = "rayfed.fast"
"""The package with another form; it is imported by its name only, so that all else works without it."""


@dataclass(frozen=True)
class GroupSize:
    """Number of clients that are trained together, and the reason.

    Attributes:
        clients: Number of clients; 1: every client is trained alone.
        why: Why it is 1, although the config does not say so; empty: no reason is needed.
        chosen: Whether `auto` chose it, because groups would not pay.
    """

    clients: int
    why: str = ""
    chosen: bool = False

    @property
    def sentence(self) -> str:
        """A sentence for the header of a run; empty if `auto` or the config chose single clients."""
        if self.clients > 1:
            return f"{self.clients} clients share each forward and backward pass (train.group)"
        explains = self.why and not self.chosen
        return f"clients are trained one by one, because {self.why}" if explains else ""


def check_group(train: TrainConfig, client_timeout: float | None) -> None:
    """Check before a run that nothing in the config excludes the groups that it asks for.

    Args:
        train: Config of local optimization.
        client_timeout: Longest time of one client in seconds (`failures.client_timeout`); None: no limit.

    Raises:
        ConfigError: Something excludes them; says what to choose instead.
    """
    if train.group in ("auto", 1):
        return
    if client_timeout is not None:
        raise ConfigError(
            f"train.group: {train.group} cannot be used with failures.client_timeout, which limits "
            f"the time of one client; set train.group=1, or leave the time limit out"
        )


@dataclass(frozen=True)
class WorkerPasses(Passes):
    """Computes for one client after the other. It keeps nothing from one call to the next."""

    def why_alone(self, model: Backbone, asked: bool) -> str:
        """Why several clients cannot be trained together with a tuned model; empty: they can.

        Args:
            asked: The config asks for groups with a number; else what needs a trial is left alone.
        """
        return f"the package {FAST} is not there"

    def group_size(
        self,
        train: TrainConfig,
        local: Local,
        reason: str,
        frozen: bool,
        cohort: int,
        row: int,
    ) -> GroupSize:
        """The number of clients that are trained together.

        Args:
            train: Config of local optimization.
            local: Client half of the method.
            reason: What `why_alone` says of the tuned model.
            frozen: The features of the network do not change in training.
            cohort: Number of clients of a round.
            row: Floating-point operations of a row of a batch, forward and backward; 0: not known.

        Raises:
            ConfigError: The config asks for what is not possible here.
        """
        if train.group not in ("auto", 1):
            raise ConfigError(f"train.group: {train.group} needs the package {FAST}; set train.group=1")
        return GroupSize(1)

    def graphs(self, train: TrainConfig, parts: Parts, model: Backbone) -> Literal["auto"] | bool:
        """The value of `train.graphs` for a tuned model, false in place of `auto` where there are no graphs.

        Raises:
            ConfigError: The config asks for what is not possible here.
        """
        if train.graphs is True:
            raise ConfigError(f"train.graphs: true needs the package {FAST}; leave it out")
        return False

    def why_padded(self, model: Backbone, dataset: Dataset, train: TrainConfig) -> str:
        """Why a network cannot compute a batch of texts without pads; empty: it can, or need not.

        Args:
            model: The tuned model with its values, in evaluation mode.
            dataset: The texts of the run.
            train: Config of local optimization.
        """
        return f"the package {FAST} is not there"

    def why_method_padded(self, local: Local, objective: Objective) -> str:
        """Why a method needs what a network computes for pads; empty: it does not."""
        return ""

    def pack_texts(
        self, train: TrainConfig, local: Local, objective: Objective, reason: str
    ) -> tuple[bool, tuple[str, ...]]:
        """The value of `train.pack_texts`, and sentences for the header where texts are padded nevertheless.

        Args:
            train: Config of local optimization.
            local: Client half of the method.
            reason: What `why_padded` says of the tuned model.

        Raises:
            ConfigError: The config asks for what is not possible here.
        """
        wish = train.pack_texts
        why = reason or self.why_method_padded(local, objective)
        if not objective.tokens:
            why = "the data set has no texts"
        if wish is True and why:
            raise ConfigError(f"train.pack_texts: true cannot be used here, because {why}; leave it out")
        if wish is False or not why or not objective.tokens:
            return wish is not False and not why, ()
        return False, (f"batches of texts are padded (train.pack_texts), because {why}",)

    def prepare(self, model: Backbone, train: TrainConfig, device: str) -> None:
        """Change how the network of a worker computes, after `adjust_trunk`, on a device of this type."""

    def save_memory(self, model: Backbone, train: TrainConfig) -> None:
        """Give back what `prepare` keeps on a device that was short of memory."""

    def drawing(self, seed: int) -> AbstractContextManager[None]:
        """The context of a client's call with this seed, in which layers of the network draw numbers."""
        return nullcontext()

    def call_group(
        self, worker: Any, calls: Sequence[Call], stores: Callable[[], Sequence[Mapping[str, Any]]]
    ) -> list[tuple[Update, dict[str, Any]]] | None:
        """As `Worker.call_group`. Args: worker: the worker; calls, stores: as there."""
        return None


def quickest_passes() -> WorkerPasses:
    """The form with the fewest operations that is installed."""
    if find_spec(FAST) is None:
        return WorkerPasses()
    form: WorkerPasses = import_module(f"{FAST}.fast_passes").FastPasses()
    return form
