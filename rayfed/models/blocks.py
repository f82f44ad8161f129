"""The repeated blocks of a backbone, any of which can be left out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Change: TypeAlias = Callable[..., Tensor]


class BlockStack(nn.Sequential):
    """A sequence of blocks of which only the active ones run, in ascending order, under their own indices.

    Replaces the `blocks` of a timm model, and works both when the model calls the container and when it
    iterates over it. A skipped block is the identity: nothing is rescaled. Prompt tokens, if there are any,
    are appended before the first active block and removed after the last one (Jia et al., Visual Prompt
    Tuning, 2022, section 3.2, VPT-shallow), so pooling and norms outside the blocks do not receive them.

    With `checkpointing`, the activations within a block are computed again in the backward pass (Chen et al.,
    Training Deep Nets with Sublinear Memory Cost, 2016).

    With `first_token`, that function runs the last active block and returns its first token only, shape
    (B, 1, D), where only the network's features are made from its output (`rayfed.models.attention`).

    Letters in shapes: B batch, N tokens, P prompts, D width.
    """

    prompt: nn.Parameter | None

    def __init__(self, *blocks: Any) -> None:
        super().__init__(*blocks)
        self.active: tuple[int, ...] = tuple(range(len(self)))
        self.register_parameter("prompt", None)
        self._taps: dict[int, Tensor | None] | None = None
        self._instead: tuple[Tensor | None] | None = None
        self._change: Change | None = None
        self._result: Tensor | None = None
        self.checkpointing = False
        self.first_token: Change | None = None

    @property
    def tokens(self) -> Tensor | None:
        """Prompt tokens of the next forward pass: (P, D) for all samples, (B, P, D) by sample, or None."""
        return self.prompt if self._instead is None else self._instead[0]

    @contextmanager
    def prompted(self, tokens: Tensor | None) -> Iterator[None]:
        """Use these prompt tokens instead of `prompt` in forward passes within the context.

        Args:
            tokens: Shape (P, D) for all samples or (B, P, D) by sample; None: no prompt tokens.
        """
        self._instead = (tokens,)
        try:
            yield
        finally:
            self._instead = None

    @contextmanager
    def replaced(self, tokens: Tensor) -> Iterator[None]:
        """Let these tokens be the output of the blocks in forward passes within the context.

        Args:
            tokens: Shape (B, N, D).
        """
        self._result = tokens
        try:
            yield
        finally:
            self._result = None

    def _given(self, *_: Any, **__: Any) -> Tensor:
        assert self._result is not None
        return self._result

    def __iter__(self) -> Iterator[Any]:
        if self._result is not None:
            yield self._given
            return
        if self.tokens is not None:
            yield self._append_prompt
        last = None if self._all_tokens_are_used() else self.first_token
        for j in self.active:
            block = self._modules[str(j)]
            step = partial(last, block) if last is not None and j == self.active[-1] else block
            forgets = self.checkpointing and torch.is_grad_enabled()
            run = partial(checkpoint, step, use_reentrant=False) if forgets else step
            yield run if self._change is None else partial(self._changed, block, run, j)
            if self._taps is not None and j in self._taps:
                yield partial(self._keep, j)
        if self.tokens is not None and last is None:
            yield self._remove_prompt

    def _all_tokens_are_used(self) -> bool:
        """Whether somebody else than the network reads or changes the tokens after the last active block."""
        return self._change is not None or (self._taps is not None and self.active[-1] in self._taps)

    def __getitem__(self, index: Any) -> Any:
        """A block by index.

        Raises:
            RuntimeError: Some blocks are inactive; a forward pass that indexes blocks would run these too.
        """
        if len(self.active) < len(self):
            raise RuntimeError(
                "blocks cannot be indexed while some are inactive; iterate over them, or use get_submodule"
            )
        return super().__getitem__(index)

    @contextmanager
    def wrapped(self, change: Change) -> Iterator[None]:
        """Let a function run the blocks in forward passes within the context.

        Args:
            change: Called instead of each block with the block, a function that runs it on tokens, its index,
                the tokens, and whether it is the first and the last block that runs; returns tokens.
        """
        self._change = change
        try:
            yield
        finally:
            self._change = None

    def _changed(self, block: Any, run: Any, j: int, x: Tensor, **options: Any) -> Tensor:
        assert self._change is not None
        ends = j == self.active[0], j == self.active[-1]
        return self._change(block, partial(run, **options), j, x, *ends)

    @contextmanager
    def tapped(self, blocks: Collection[int]) -> Iterator[Mapping[int, Tensor]]:
        """Record the tokens after some blocks in forward passes within the context.

        Args:
            blocks: Indices of these blocks.

        Yields:
            A mapping from block index to tokens (B, N, D), which the forward pass fills.
        """
        self._taps = taps = dict.fromkeys(blocks)
        try:
            yield taps  # type: ignore[misc]  # filled by the forward pass
        finally:
            self._taps = None

    def _keep(self, block: int, x: Tensor, **_: Any) -> Tensor:
        assert self._taps is not None
        self._taps[block] = x if self.tokens is None else self._remove_prompt(x)
        return x

    def _append_prompt(self, x: Tensor, **_: Any) -> Tensor:
        assert self.tokens is not None
        prompt = self.tokens.to(x.dtype).expand(x.shape[0], -1, -1)
        return torch.cat((x, prompt), dim=1)  # (B, N + P, D)

    def _remove_prompt(self, x: Tensor, **_: Any) -> Tensor:
        assert self.tokens is not None
        return x[:, : -self.tokens.shape[-2]]  # (B, N, D)


def has_uniform_blocks(net: nn.Module) -> bool:
    """Whether `net.blocks` is a list of blocks of the same type with tensors of the same names and shapes."""
    blocks = getattr(net, "blocks", None)
    if not isinstance(blocks, nn.Sequential | nn.ModuleList) or len(blocks) == 0:
        return False
    # timm looks up mixed rotary embeddings by position in the list: leaving a block out would shift them.
    return len({_signature(block) for block in blocks}) == 1 and not getattr(net, "rope_mixed", False)


def validate(active: Sequence[int], num_blocks: int) -> tuple[int, ...]:
    """Check a selection of blocks and return it as a tuple.

    Raises:
        ValueError: It is empty, not strictly ascending, or names a block that does not exist.
    """
    chosen = tuple(active)
    ascending = all(a < b for a, b in pairwise(chosen))
    if not chosen or not ascending or chosen[0] < 0 or chosen[-1] >= num_blocks:
        raise ValueError(
            f"active blocks {chosen}: give ascending, different indices from 0 to {num_blocks - 1}"
        )
    return chosen


def _signature(block: nn.Module) -> tuple[object, ...]:
    return type(block), tuple((name, tuple(p.shape)) for name, p in block.named_parameters())
