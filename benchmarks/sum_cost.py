"""Processor time of the exact mean of clients, and of one with rounded additions.

    python -m benchmarks.sum_cost

Both are measured in turns in one process, on one thread; the fastest of some turns counts. The messages have
the shapes of ViT-S/16: LoRA of rank 8 in all linear layers of 12 blocks with a head, and all parameters. They
are compared with the processor time of a training step of full tuning with a batch of 32 images.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import timm
import torch
from torch import Tensor

from rayfed.federation.aggregation import mean_by_name
from rayfed.types import Params, Update

CLIENTS = 16
RANK = 8
LAYERS = {"attn.qkv": (1152, 384), "attn.proj": (384, 384), "mlp.fc1": (1536, 384), "mlp.fc2": (384, 1536)}
TURNS = 4


def rounded_mean(updates: Sequence[Update], weights: Sequence[float]) -> Params:
    """The weighted mean in the type of the tensors, each addition rounded, client by client."""
    total = sum(weights)
    names = list(updates[0].params)
    mean = [updates[0].params[name] * (weights[0] / total) for name in names]
    for update, weight in zip(updates[1:], weights[1:], strict=True):
        torch._foreach_add_(mean, [update.params[name] for name in names], alpha=weight / total)
    return dict(zip(names, mean, strict=True))


def lora_shapes() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"head.weight": (10, 384), "head.bias": (10,)}
    for block in range(12):
        for layer, (out, inside) in LAYERS.items():
            shapes[f"blocks.{block}.{layer}.lora_A"] = (RANK, inside)
            shapes[f"blocks.{block}.{layer}.lora_B"] = (out, RANK)
    return shapes


def messages(shapes: Mapping[str, Sequence[int]]) -> list[Update]:
    draw = torch.Generator().manual_seed(0)
    return [
        Update(client=str(i), params={n: torch.randn(*s, generator=draw) * 0.02 for n, s in shapes.items()})
        for i in range(CLIENTS)
    ]


def fastest(*functions: Callable[[], object]) -> list[float]:
    """Processor seconds of each function, the fastest of `TURNS` turns in which they alternate."""
    seconds = [float("inf")] * len(functions)
    for _ in range(TURNS):
        for i, function in enumerate(functions):
            begin = time.process_time()
            function()
            seconds[i] = min(seconds[i], time.process_time() - begin)
    return seconds


def training_step(model: torch.nn.Module, images: Tensor) -> None:
    model.zero_grad()
    model(images).logsumexp(1).mean().backward()


def main() -> None:
    torch.set_num_threads(1)
    model = timm.create_model("vit_small_patch16_224", num_classes=10)
    images = torch.randn(32, 3, 224, 224)
    counts = [float(100 + i) for i in range(CLIENTS)]
    shares = [count**0.5 / sum(other**0.5 for other in counts) for count in counts]
    full = {name: tuple(p.shape) for name, p in model.named_parameters()}
    print(
        "| message | values | rounded, s | exact, numbers of examples as weights, s | exact, any weights, s |"
    )
    print("|---|---:|---:|---:|---:|")
    for label, shapes in (("LoRA", lora_shapes()), ("all parameters", full)):
        updates = messages(shapes)
        values = sum(value.numel() for value in updates[0].params.values())
        turns = fastest(
            lambda sent=updates: rounded_mean(sent, counts),
            lambda sent=updates: mean_by_name(sent, counts),
            lambda sent=updates: mean_by_name(sent, shares),
        )
        print(
            f"| {label} | {values:,} | " + " | ".join(f"{second:.4f}" for second in turns) + " |", flush=True
        )
    step = fastest(lambda: training_step(model, images))[0]
    print(f"A training step of full tuning takes {step:.2f} s, without the optimizer.")


if __name__ == "__main__":
    main()
