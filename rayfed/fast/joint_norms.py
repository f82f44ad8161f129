"""timm's blocks in fewer launches, in mixed precision on a device."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from timm.models.vision_transformer import Block, LayerNorm  # type: ignore[attr-defined]
from torch import Tensor, nn

from rayfed.fast import kernels  # noqa: F401  # registers torch.ops.rayfed
from rayfed.models.attention import SameAsBlock


def use_joint_norms(model: nn.Module) -> None:
    """Let blocks of a model on a device add, normalize and cast in one launch in mixed precision.

    Args:
        model: The tuned model; blocks of other classes than timm's `Block`, those with trained norms, and
            those that scale or leave out their branches stay as they are.
    """
    for module in model.modules():
        if type(module) is Block and all(map(_is_frozen_norm, (module.norm1, module.norm2))):
            branches = (module.ls1, module.drop_path1, module.ls2, module.drop_path2)
            if all(type(part) is nn.Identity for part in branches):
                module.__class__ = JointNormBlock


def _is_frozen_norm(norm: Any) -> bool:
    plain = (
        type(norm) in (nn.LayerNorm, LayerNorm) and not norm._forward_hooks and not norm._forward_pre_hooks
    )
    if not plain or norm.weight is None or norm.bias is None or len(norm.normalized_shape) != 1:
        return False
    return not (norm.weight.requires_grad or norm.bias.requires_grad)


class JointNormBlock(SameAsBlock):
    """A block whose sums, norms and casts are three launches forward and three back, where torch needs ten.

    The values are those of timm's block but for the order in which the sums of a norm are added.
    """

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Output of the block, shape (B, N, D), float32.

        Args:
            x: Tokens, shape (B, N, D).
            *args: Given to timm's block, which then computes the output.
            **kwargs: Likewise.
        """
        kind = x.device.type
        if args or kwargs or x.dtype != torch.float32 or not torch.is_autocast_enabled(kind):
            return super().forward(x, *args, **kwargs)
        half = torch.get_autocast_dtype(kind)
        x, normed = AddNorm.apply(x, None, self.norm1.weight, self.norm1.bias, self.norm1.eps, half)
        branch = self.attn(normed)
        x, normed = AddNorm.apply(x, branch, self.norm2.weight, self.norm2.bias, self.norm2.eps, half)
        return x + self.mlp(normed)


class AddNorm(torch.autograd.Function):
    """The sum of x and a branch, and its norm in a smaller type (`kernels.plain_add_norm`)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        branch: Tensor | None,
        weight: Tensor,
        bias: Tensor,
        eps: float,
        half: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        """Add and normalize.

        Args:
            ctx: What the backward pass needs.
            x: float32, shape (..., D).
            branch: Shape (..., D); None: the sum is x.
            weight: That of the norm, shape (D,), frozen.
            bias: That of the norm, shape (D,), frozen.
            eps: Added to the variance.
            half: Type of the norm's result.
        """
        total, normed, mean, rstd = torch.ops.rayfed.add_norm(x, branch, weight, bias, eps, half)
        total = x if branch is None else total
        ctx.save_for_backward(total, mean, rstd, weight, bias)
        ctx.eps, ctx.kind = eps, None if branch is None else branch.dtype
        ctx.set_materialize_grads(False)
        return total, normed

    @staticmethod
    def backward(ctx: Any, through: Tensor | None, grad: Tensor | None) -> Any:
        total, mean, rstd, weight, bias = ctx.saved_tensors
        if grad is None:
            of_x = of_branch = through
        elif torch.is_grad_enabled():  # of the gradient there will be a gradient, too
            with torch.autocast(total.device.type, enabled=False):
                normed = F.layer_norm(total, weight.shape, weight, bias, ctx.eps)
            (of_x,) = torch.autograd.grad(normed, total, grad.float(), create_graph=True)
            of_x = of_branch = of_x if through is None else of_x + through
        else:
            given = (grad, through, total, mean, rstd, weight)
            of_x, of_branch = torch.ops.rayfed.add_norm_backward(*given)
        of_branch = None if ctx.kind is None or of_branch is None else of_branch.to(ctx.kind)
        return of_x, of_branch, None, None, None, None
