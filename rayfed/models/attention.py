"""timm's attention with fewer copies, and for short sequences on a CPU by plain matrix products."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from timm.models.vision_transformer import Attention  # type: ignore[attr-defined]
from torch import Tensor, nn

SHORT = 32
"""Most tokens of a sequence that is computed by plain products; from 65 on these gained nothing."""

PART = 200_000
"""Most numbers of queries, keys and values that are used at a time, so that they stay in the core's cache."""


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
    results have the same bits, but for short sequences (`Products`), where they differ by rounding.
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
        qkv = self._split(x)
        mixed = Products.apply(qkv) if self._is_short(qkv) else self._mixed(qkv, x.shape[1])
        return self.proj_drop(self.proj(self.norm(mixed)))

    def first(self, x: Tensor) -> Tensor:
        """Output for the first token alone, shape (B, 1, d_out).

        Args:
            x: Tokens, shape (B, N, d_in).
        """
        return self.proj_drop(self.proj(self.norm(self._mixed(self._split(x), 1))))

    def _split(self, x: Tensor) -> Tensor:
        """Queries, keys and values of all tokens, shape (B, N, 3, H, D)."""
        qkv: Tensor = self.qkv(x).reshape(*x.shape[:2], 3, self.num_heads, self.head_dim)
        return qkv

    def _mixed(self, qkv: Tensor, queries: int) -> Tensor:
        """Output of all heads for the first tokens, as many as `queries`, shape (B, queries, H D)."""
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        dropped = self.attn_drop.p if self.training else 0.0
        q, k = self.q_norm(q[:, :, :queries]), self.k_norm(k)
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropped).transpose(1, 2).flatten(2)

    @property
    def is_direct(self) -> bool:
        """Whether nothing is asked for that timm computes otherwise."""
        return self.fused_attn and getattr(self, "gate", None) is None

    def _is_short(self, qkv: Tensor) -> bool:
        """Whether `Products` computes this, where torch would use the kernel without second derivatives."""
        plain = type(self.q_norm) is nn.Identity and type(self.k_norm) is nn.Identity
        drops = self.training and self.attn_drop.p > 0
        fits = qkv.device.type == "cpu" and qkv.dtype == torch.float32 and 0 < qkv.shape[1] <= SHORT
        # The products of one head of width 1 round differently for one row and for several.
        return plain and not drops and fits and self.head_dim > 1 and torch.backends.cuda.flash_sdp_enabled()


class Products(torch.autograd.Function):
    """softmax(q k^T / sqrt(D)) v by head, as batches of small matrix products (Vaswani et al., 2017, eq. 1).

    torch's kernel for CPUs goes through the keys in blocks, for sequences of any length. For 17 tokens and
    heads of width 16 it takes 1.5 times as long. The result of a row does not depend on the other rows.
    Second derivatives do not exist.

    Letters in shapes: B rows, N tokens, H heads, D width of a head, b rows of a part.
    """

    @staticmethod
    def forward(ctx: Any, qkv: Tensor) -> Tensor:
        """Output of all heads, shape (B, N, H D).

        Args:
            ctx: What the backward pass needs.
            qkv: Queries, keys and values, shape (B, N, 3, H, D).
        """
        rows, tokens, _, heads, width = qkv.shape
        ctx.size = max(1, PART // (3 * tokens * heads * width))
        mixed = qkv.new_empty(rows, tokens, heads, width)
        saved = []
        for part, out in zip(qkv.split(ctx.size), mixed.split(ctx.size), strict=True):
            own = part.permute(2, 0, 3, 1, 4).reshape(3, -1, tokens, width)  # (3, b H, N, D)
            q, k, v = own.unbind(0)
            # The softmax over the keys is quicker where they are not the last dimension.
            weights = torch.bmm(k, q.mT).mul_(width**-0.5).softmax(1)  # (b H, keys, queries)
            out.copy_(torch.bmm(weights.mT, v).view(-1, heads, tokens, width).transpose(1, 2))
            saved += [own, weights]
        ctx.save_for_backward(*saved)
        ctx.shape = qkv.shape
        return mixed.view(rows, tokens, -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """The gradient of qkv.

        Raises:
            RuntimeError: It is to be differentiated again.
        """
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"attention over at most {SHORT} tokens has no second derivatives on a CPU; compute the "
                "forward pass within torch.nn.attention.sdpa_kernel(SDPBackend.MATH), where it has them"
            )
        rows, tokens, _, heads, width = ctx.shape
        of_qkv = grad.new_empty(ctx.shape)
        given = grad.reshape(rows, tokens, heads, width).transpose(1, 2)
        kept = ctx.saved_tensors  # with checkpointing they can be read once only
        saved = zip(kept[::2], kept[1::2], strict=True)
        for out, part, (own, weights) in zip(
            of_qkv.transpose(1, 3).split(ctx.size), given.split(ctx.size), saved, strict=True
        ):
            q, k, v = own.unbind(0)
            of_mixed = part.reshape(-1, tokens, width)
            of_weights = torch.bmm(v, of_mixed.mT)
            scores = torch._softmax_backward_data(of_weights, weights, 1, grad.dtype).mul_(width**-0.5)
            parts = torch.bmm(scores.mT, k), torch.bmm(scores, q), torch.bmm(weights, of_mixed)
            for i, value in enumerate(parts):
                out[:, :, i].copy_(value.view(-1, heads, tokens, width))
        return of_qkv
