"""Kernels that torch chooses by the kind of device, for a pretended device as the CPU computes them."""

from typing import Any

import torch
import torch.nn.functional as F

ATTENTION = F.scaled_dot_product_attention


def attention(
    q: Any,
    k: Any,
    v: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **rest: Any,
) -> Any:
    """Attention by the kernel that the CPU uses; for unknown devices torch chooses another one.

    Their roundings differ, and Adam divides by the size of a gradient, so that differences of tiny gradients
    grow until results cannot be compared.
    """
    if q.device.type == "cpu" or dropout_p or not torch.backends.cuda.flash_sdp_enabled():
        return ATTENTION(q, k, v, attn_mask, dropout_p, is_causal, **rest)
    if attn_mask is not None and attn_mask.dtype == torch.bool:  # as torch does before it calls the kernel
        attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill(~attn_mask, float("-inf"))
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    return kernel(q, k, v, 0.0, is_causal, attn_mask=attn_mask, scale=rest.get("scale"))[0]


LSTM = torch._VF.lstm


class Once(torch.autograd.Function):
    """The identity, whose gradient cannot be differentiated again."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError("the derivative for '_cudnn_rnn_backward' is not implemented")
        return grad


def lstm(x: Any, states: Any, weights: Any, biases: bool, layers: int, *rest: Any) -> Any:
    """An LSTM, batch first, in one direction; for unknown devices torch calls a kernel of CUDA."""
    if x.device.type == "cpu":
        return LSTM(x, states, weights, biases, layers, *rest)
    ends = []
    for layer in range(layers):
        w_input, w_hidden, b_input, b_hidden = weights[4 * layer : 4 * layer + 4]
        h, c = (state[layer] for state in states)
        outputs = []
        for step in x.unbind(1):
            gates = F.linear(step, w_input, b_input) + F.linear(h, w_hidden, b_hidden)
            let_in, forget, cell, out = gates.chunk(4, 1)
            c = forget.sigmoid() * c + let_in.sigmoid() * cell.tanh()
            h = out.sigmoid() * c.tanh()
            outputs.append(h)
        x = torch.stack(outputs, 1)
        ends.append((h, c))
    x = Once.apply(x) if torch.backends.cudnn.enabled else x
    return x, torch.stack([h for h, _ in ends]), torch.stack([c for _, c in ends])
