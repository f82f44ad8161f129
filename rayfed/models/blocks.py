"""The repeated blocks of a backbone, any of which can be left out, and classifiers between them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rayfed.devices import RepeatedDraws, counted

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
    def use_prompt(self, tokens: Tensor | None) -> Iterator[None]:
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

    @property
    def is_watched(self) -> bool:
        """Whether tokens of forward passes are read, changed or replaced now."""
        given = (self._taps, self._change, self._result)
        return self.tokens is not self.prompt or any(each is not None for each in given)

    def _output(self, *_: Any, **__: Any) -> Tensor:
        assert self._result is not None
        return self._result

    def __iter__(self) -> Iterator[Any]:
        if self._result is not None:
            yield self._output
            return
        if self.tokens is not None:
            yield self._append_prompt
        last = None if self._all_tokens_are_used() else self.first_token
        for j in self.active:
            block = self._modules[str(j)]
            step = partial(last, block) if last is not None and j == self.active[-1] else block
            forgets = self.checkpointing and torch.is_grad_enabled()
            run = partial(_run_checkpointed, step) if forgets else step
            yield run if self._change is None else partial(self._run_changed, block, run, j)
            if self._taps is not None and j in self._taps:
                yield partial(self._keep, j)
        if self.tokens is not None and last is None:
            yield self._remove_prompt

    def _all_tokens_are_used(self) -> bool:
        """Whether the tokens after the last active block are read or changed by more than the network."""
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
    def use_change(self, change: Change) -> Iterator[None]:
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

    def _run_changed(self, block: Any, run: Any, j: int, x: Tensor, **options: Any) -> Tensor:
        assert self._change is not None
        ends = j == self.active[0], j == self.active[-1]
        return self._change(block, partial(run, **options), j, x, *ends)

    @contextmanager
    def record_tokens(self, blocks: Collection[int]) -> Iterator[Mapping[int, Tensor]]:
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


def _run_checkpointed(block: Any, x: Tensor, **options: Any) -> Tensor:
    """Output of a block, whose activations are computed again in the backward pass, with the same dropout."""
    if counted() and not torch.compiler.is_compiling():
        options["context_fn"] = lambda: (nullcontext(), RepeatedDraws())
    result: Tensor = checkpoint(block, x, use_reentrant=False, **options)
    return result


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


class ExitHeads(nn.ModuleDict):
    """Linear classifiers on the tokens between blocks, after the network's final norm and pooling.

    An exit belongs to a span of blocks and is named after it, e.g. `0-2`. It reads the tokens after the last
    active block of its span; a model without an active block in the span does not have the exit.
    """

    def __init__(
        self, spans: Iterable[tuple[int, int]], width: int, num_classes: int, has_head: bool, last_only: bool
    ) -> None:
        """Make one classifier for each span.

        Args:
            spans: First and last block of each exit, ascending.
            num_classes: Number of logits of each exit.
            has_head: Whether the network's own head is an additional, last exit.
            last_only: Whether to predict with the last exit only, not with the mean over all exits.
        """
        self.spans = {f"{first}-{last}": range(first, last + 1) for first, last in spans}
        super().__init__({name: nn.Linear(width, num_classes) for name in self.spans})
        self.has_head = has_head
        self.last_only = last_only

    def places(self, active: tuple[int, ...]) -> dict[str, int]:
        """The block whose tokens each exit reads, by name of the exit; without the exits that do not exist.

        Args:
            active: Indices of the blocks that the model has.
        """
        blocks = {name: [j for j in active if j in span] for name, span in self.spans.items()}
        return {name: inside[-1] for name, inside in blocks.items() if inside}

    def decide(self, outputs: list[Tensor]) -> Tensor:
        """The logits (B, C) that predictions are made from: of the last exit, or the mean of all.

        Args:
            outputs: Logits (B, C) of each exit.
        """
        return outputs[-1] if self.last_only else torch.stack(outputs).mean(0)

    def features(self, net: Any, x: Tensor) -> list[Tensor]:
        """Features (B, width) of every exit, from the first to the last, and of the network's head.

        Args:
            net: The network, whose blocks are a `BlockStack`.
            x: A batch of images.
        """
        places = self.places(net.blocks.active)
        with net.blocks.record_tokens(set(places.values())) as tokens:
            features = net(x)
        return [*(_after_blocks(net, x, tokens[j]) for j in places.values()), features]

    def logits(self, features: list[Tensor], head: nn.Module, active: tuple[int, ...]) -> list[Tensor]:
        """Logits (B, C) of every exit, from the first to the last.

        Args:
            features: What `features` returned.
            head: The network's own head.
            active: Indices of the blocks that computed them.
        """
        classifiers = [*(self[name] for name in self.places(active)), *([head] if self.has_head else [])]
        return [classifier(z) for classifier, z in zip(classifiers, features, strict=False)]


def can_exit(net: Any) -> bool:
    """Whether features can be made from the tokens between the blocks of a network."""
    return hasattr(net, "after_blocks") or (hasattr(net, "norm") and hasattr(net, "forward_head"))


def _after_blocks(net: Any, x: Tensor, tokens: Any) -> Tensor:
    """Features (B, width) from tokens (B, N, D), by what follows the blocks of a network.

    Args:
        x: The batch from which the tokens were computed.
        tokens: The tokens.
    """
    if hasattr(net, "after_blocks"):
        own: Tensor = net.after_blocks(x, tokens)
        return own
    features: Tensor = net.forward_head(net.norm(tokens), pre_logits=True)
    return features
