"""The last block of a vision transformer, computed for the class token alone where nothing else is read."""

from __future__ import annotations

from typing import Any

from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from rayfed.models.attention import DirectAttention
from rayfed.models.blocks import BlockStack


def use_class_token(model: nn.Module) -> None:
    """Let the last block that runs compute the class token only, in networks whose features are made from it.

    The other tokens of its output are read by nobody. Its keys and values need all tokens of its input;
    queries, the product after the attention, and the MLP do not. The features are the same but for rounding.

    Args:
        model: The tuned model, whose attention is `DirectAttention`; networks other than timm's
            `VisionTransformer` with features from the class token stay as they are.
    """
    for net in model.modules():
        if type(net) is VisionTransformer and isinstance(net.blocks, BlockStack):
            net.blocks.first_token = class_token if net.global_pool == "token" else None


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
    if type(block) is not Block or type(block.attn) is not DirectAttention or not block.attn.is_direct:
        return False
    hooks = (layer._forward_hooks or layer._forward_pre_hooks for layer in (block, block.attn))
    drops = (part.training and part.p > 0 for part in block.modules() if isinstance(part, nn.Dropout))
    return not any(hooks) and not any(drops)
