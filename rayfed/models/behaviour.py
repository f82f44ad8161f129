"""The behaviour of a user's network apart from its outputs, and the rules that a run has for it.

`rayfed.models.examine` finds it out before the first round. One rule holds for each kind:

- tensors of floats that training moves (running statistics, moving means, the teacher of a student) are
  averaged like the statistics of BatchNorm, or stay with the client (`train.batch_norm`);
- what else moves (counters, vectors of spectral norm, attributes of modules) is put back before each call;
- a network whose rows change each other is run for one client at a time, and its features are not kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rayfed.models.named_tensors import global_name

MOST_NAMED = 3
"""Names in a sentence."""


@dataclass(frozen=True, kw_only=True)
class Behaviour:
    """The behaviour of a tuned network of a user apart from its outputs.

    Attributes:
        moves: Paths, in the state dict of the model, of tensors of floats that training moves without an
            optimizer. They travel, or stay with the client.
        put_back: Paths of other tensors that a pass moves, which are put back before each call.
        attributes: Attributes of modules that a pass changes, which are put back as well.
        mixes_training, mixes_evaluation: Rows of a batch change each other's outputs in that mode.
        moves_in_evaluation: A pass in evaluation mode changes tensors or attributes.
        varies: Two passes of the same rows differ, or the modes do: features of the network cannot be kept.
    """

    moves: frozenset[str] = frozenset()
    put_back: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()
    mixes_training: bool = False
    mixes_evaluation: bool = False
    moves_in_evaluation: bool = False
    varies: bool = False

    @property
    def is_steady(self) -> bool:
        """Whether an output depends on its row and the trained tensors alone, in both modes."""
        return self.is_still and not self.mixes and not self.varies

    @property
    def is_still(self) -> bool:
        """Whether no pass changes anything in the network."""
        return not (self.moves or self.put_back or self.attributes)

    @property
    def mixes(self) -> bool:
        """Whether rows of a batch change each other's outputs in some mode."""
        return self.mixes_training or self.mixes_evaluation

    @property
    def scores_alone(self) -> bool:
        """Whether a score depends on which test sets share a batch."""
        return self.mixes_evaluation or self.moves_in_evaluation

    @property
    def why_alone(self) -> str:
        """Why clients with this network cannot share a pass; empty: they can."""
        if self.mixes:
            return "the rows of a batch change each other's outputs in this network"
        moved = (*sorted(map(global_name, self.moves)), *map(global_name, self.put_back), *self.attributes)
        return f"the network changes {_few(moved)} in its passes" if moved else ""

    @property
    def of_whole_batches(self) -> str:
        """The part of the network that needs the whole batch; empty: there is none."""
        if self.mixes_training:
            return "layers that look at all rows of a batch"
        return "" if self.is_still else "tensors that each pass moves"

    def sentences(self, average: bool) -> list[str]:
        """Sentences for the header of a run about what a reader may not expect.

        Args:
            average: Statistics are averaged by the server; otherwise they stay with their client.
        """
        names = sorted(global_name(path) for path in self.moves if not path.endswith(EXPECTED))
        said = []
        if names:
            rule = "averaged by the server" if average else "kept by each client"
            said.append(f"{_few(names)}: moved by training, not by the optimizer; {rule} (train.batch_norm)")
        back = [*(global_name(path) for path in self.put_back), *self.attributes]
        if back := [name for name in back if not name.endswith("num_batches_tracked")]:
            said.append(f"{_few(back)}: changed by passes of the network; put back before each client's call")
        if self.mixes and not all(path.endswith(EXPECTED) for path in self.moves or ("",)):
            said.append("rows of a batch change each other's outputs: clients are run one by one")
        return said


EXPECTED = ("running_mean", "running_var")
"""Tensors of layers of torch of which everybody expects that they move."""


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} others" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more
