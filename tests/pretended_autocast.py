"""Automatic mixed precision of the pretended device, with the lists of CUDA.

    with pretended() as device, mixed_precision():
        play([..., "train.precision=bf16"], device.name)

Which operations torch casts on CUDA is asked of torch; which of them it casts to the smaller type, and which
to the largest type of their arguments, is in its documentation (Automatic Mixed Precision, CUDA Ops that can
autocast). Unlike CUDA's, the casts of trained tensors are not kept for a second use in the same block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._pytree import tree_flatten, tree_map

from tests.pretended import TYPE

KEY = "AutocastPrivateUse1"
LIKE = "AutocastCUDA"
HALVES = (torch.bfloat16, torch.float16)

SMALLER = {
    *("addbmm", "addmm", "addmv", "addr", "baddbmm", "bmm", "chain_matmul", "linalg_multi_dot", "conv1d"),
    *("conv2d", "conv3d", "conv_tbc", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
    *("convolution", "_convolution", "gru_cell", "linear", "lstm_cell", "matmul", "mm", "mv", "prelu"),
    *("rnn_relu_cell", "rnn_tanh_cell", "scaled_dot_product_attention", "_thnn_fused_lstm_cell"),
    *("_thnn_fused_gru_cell", "conv_depthwise3d", "cudnn_convolution", "cudnn_convolution_transpose"),
    *("_flash_attention_forward",),
}
"""Operations that CUDA computes in the smaller type."""

WIDEST = {
    *("addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put"),
    *("tensordot", "scatter_add", "cat", "stack"),
}
"""Operations that CUDA computes in the largest type among their arguments; the others are in float32."""


@contextmanager
def mixed_precision() -> Iterator[None]:
    """Within the block the pretended device has automatic mixed precision in bfloat16."""
    _registered()
    with patch.object(getattr(torch, TYPE), "get_amp_supported_dtype", lambda: [torch.bfloat16]):
        yield


@cache
def _registered() -> list[torch.library.Library]:
    """Register the casts, once in a process; they do nothing outside of `torch.autocast` for the device."""
    everything = torch.library.Library("_", "IMPL", KEY)
    everything.fallback(torch.library.fallthrough_kernel)
    ours = torch.library.Library("aten", "IMPL", KEY)
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    for full in torch._C._dispatch_get_all_op_names():
        namespace, _, name = full.partition("::")
        if namespace == "aten" and has(full, LIKE):
            packet, _, overload = name.partition(".")
            kernel = _kernel(getattr(getattr(torch.ops.aten, packet), overload or "default"), packet)
            ours.impl(name, kernel)
    return [everything, ours]  # the registrations end with them


def _kernel(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    key = torch._C._parse_dispatch_key(KEY)
    keys = torch._C.DispatchKeySet(key)

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(keys):
            wanted = _type_for(name, args, kwargs)

            def cast(value: Any) -> Any:
                is_cast = isinstance(value, torch.Tensor) and value.device.type == TYPE
                is_cast = is_cast and value.dtype in (torch.float32, *HALVES) and value.dtype != wanted
                return value.to(wanted) if is_cast else value

            return function(*tree_map(cast, args), **tree_map(cast, kwargs))

    return run


def _type_for(name: str, args: Any, kwargs: Any) -> torch.dtype:
    if name in SMALLER:
        return torch.get_autocast_dtype(TYPE)
    if name in WIDEST:
        flat, _ = tree_flatten((args, kwargs))
        kinds = {value.dtype for value in flat if isinstance(value, torch.Tensor)}
        return torch.float32 if torch.float32 in kinds else torch.get_autocast_dtype(TYPE)
    return torch.float32
