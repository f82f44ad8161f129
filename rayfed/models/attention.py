"""timm's attention with fewer copies, and the last block for its class token alone."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from timm.models.vision_transformer import Attention, Block, VisionTransformer  # type: ignore[attr-defined]
from torch import Tensor, nn

from rayfed.models.blocks import BlockStack


def use_direct_attention(model: nn.Module) -> None:
    """Let the attention of a model be computed by `DirectAttention`.

    Args:
        model: The tuned model; layers of other classes than timm's `Attention` stay as they are.
    """
    for module in model.modules():
        if type(module) is Attention:
            module.__class__ = DirectAttention


class DirectAttention(Attention):
    """Self-attention whose queries, keys and values are parts of one tensor in the order of its memory.

    timm permutes that tensor before it takes the parts, so that the backward pass puts their gradients into
    one tensor and then copies that into the order of the first: a tenth of the time of the attention. The
    results have the same bits.
    """

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Output of the layer, shape (B, N, d_out).

        Args:
            x: Tokens, shape (B, N, d_in).
            *args: A mask and whether it is causal; with a mask, timm computes the output.
            **kwargs: Likewise.
        """
        masked = any(given is not None and given is not False for given in (*args, *kwargs.values()))
        if masked or not self.is_direct:
            return super().forward(x, *args, **kwargs)
        return self.proj_drop(self.proj(self.norm(self._mix(self._split(x), x.shape[1]))))

    def first(self, x: Tensor) -> Tensor:
        """Output for the first token alone, shape (B, 1, d_out).

        Args:
            x: Tokens, shape (B, N, d_in).
        """
        return self.proj_drop(self.proj(self.norm(self._mix(self._split(x), 1))))

    def _split(self, x: Tensor) -> Tensor:
        """Queries, keys and values of all tokens, shape (B, N, 3, H, D)."""
        qkv: Tensor = self.qkv(x).reshape(*x.shape[:2], 3, self.num_heads, self.head_dim)
        return qkv

    def _mix(self, qkv: Tensor, queries: int) -> Tensor:
        """Output of all heads for the first tokens, as many as `queries`, shape (B, queries, H D)."""
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        dropped = self.attn_drop.p if self.training else 0.0
        q, k = self.q_norm(q[:, :, :queries]), self.k_norm(k)
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropped).transpose(1, 2).flatten(2)

    @property
    def is_direct(self) -> bool:
        """Whether nothing is asked for that timm computes otherwise."""
        return self.fused_attn and getattr(self, "gate", None) is None


def use_class_token(model: nn.Module) -> None:
    """Let the last block that runs compute the class token only, in networks whose features are made from it.

    The other tokens of its output are not read. Its keys and values need all tokens of its input;
    queries, the product after the attention, and the MLP do not. The features are the same but for rounding.

    Args:
        model: The tuned model, whose attention is `DirectAttention`; networks other than timm's
            `VisionTransformer` with features from the class token stay as they are.
    """
    for net in model.modules():
        if type(net) is VisionTransformer and isinstance(net.blocks, BlockStack):
            net.blocks.first_token = class_token if net.global_pool == "token" else None


class SameAsBlock(Block):
    """A base of blocks that compute what timm's `Block` does, in another way."""


def class_token(block: nn.Module, x: Tensor, **options: Any) -> Tensor:
    """The first token of the output of a block, shape (B, 1, D).

    Blocks of other kinds, with a mask, or with dropout, which would draw other numbers, are computed whole.

    Args:
        block: The block.
        x: All tokens of its input, shape (B, N, D).
        **options: Given to the block.
    """
    if options or not _is_plain(block):
        whole: Tensor = block(x, **options)
        return whole[:, :1]
    own: Any = block
    first = x[:, :1] + own.drop_path1(own.ls1(own.attn.first(own.norm1(x))))
    result: Tensor = first + own.drop_path2(own.ls2(own.mlp(own.norm2(first))))
    return result


def _is_plain(block: nn.Module) -> bool:
    """Whether a block is computed as `class_token` does, without functions that see or change its tokens."""
    if type(block) is not Block and not isinstance(block, SameAsBlock):
        return False
    if type(block.attn) is not DirectAttention or not block.attn.is_direct:
        return False
    hooks = (layer._forward_hooks or layer._forward_pre_hooks for layer in (block, block.attn))
    drops = (part.training and part.p > 0 for part in block.modules() if isinstance(part, nn.Dropout))
    return not any(hooks) and not any(drops)
