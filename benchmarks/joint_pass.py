"""CPU time of joint passes without the engine, as a share of plain PyTorch: what groups can save at most.

The network and the batches of `benchmarks/engine_overhead.py`, in one process. Plain: clients one after the
other, with the forward and backward pass, the optimizer and copies of all values. Joint: forward and backward
passes of the rows of `--group` clients, each with its own LoRA factors, without anything else. vmap: the same
gradients by `torch.func.functional_call`, `grad` and `vmap` over the network of plain. Frozen: the same
rows through the network without adapters. Products: what frozen multiplies with weights, and nothing else.
Joint and frozen compute attention and the last block as a client actor does, and the process keeps freed
memory like one. All tokens: as joint, but the last block computes all of its tokens. RoBERTa has the sides
plain, frozen and products. The sides alternate; the CPU time of the process is measured, which other jobs of
the machine change little.

Prints the median milliseconds for each image, the shares, the operations that torch dispatches in a pass of
all clients, and by how much another process grows in two passes. Gradients of vmap are compared with
those of plain first.

    python -m benchmarks.joint_pass [--shape toy] [--batch 32] [--group 4] [--images 512] [--repeats 7]
                                    [--sides joint frozen products]
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.engine_overhead import LR, RANK, SHAPES, VOCABULARY, Shape, plain_model, roberta

Run = Callable[[], None]
"""Passes over the batches of all clients of a group."""


def batches(shape: Shape, batch: int, group: int) -> tuple[Any, Any]:
    """Images, shape (group * batch, 3, side, side), or tokens (group * batch, length), and ten classes."""
    import torch

    torch.set_num_threads(1)
    rng = torch.Generator().manual_seed(0)
    labels = torch.arange(group * batch) % 10
    if shape.is_text:
        return torch.randint(4, VOCABULARY, (group * batch, shape.size), generator=rng), labels
    return torch.randn(group * batch, 3, shape.size, shape.size, generator=rng), labels


def plain(shape: Shape, batch: int, group: int) -> Run:
    """Clients with one batch each, one after the other."""
    import torch
    import torch.nn.functional as F

    x, y = batches(shape, batch, group)
    net = plain_model(shape).train()
    mine = {n: p for n, p in net.named_parameters() if p.requires_grad}
    sent = {n: p.detach().clone() for n, p in mine.items()}

    def run() -> None:
        for rows, labels in zip(x.split(batch), y.split(batch), strict=True):
            with torch.no_grad():
                for name, value in sent.items():
                    mine[name].copy_(value)
            optimizer = torch.optim.SGD(mine.values(), lr=LR, momentum=0.9)
            optimizer.zero_grad()
            output = net(rows)
            F.cross_entropy(output.logits if shape.is_text else output, labels).backward()
            optimizer.step()
            _ = {n: p.detach().clone() for n, p in mine.items()}

    return run


def vmapped(shape: Shape, batch: int, group: int) -> Run:
    """Gradients of all clients by `vmap` over their values and batches.

    Raises:
        AssertionError: They are not those of the clients one by one.
    """
    import torch
    import torch.nn.functional as F
    from torch.func import functional_call, grad, vmap

    x, y = (each.unflatten(0, (group, batch)) for each in batches(shape, batch, group))
    net = plain_model(shape).train()
    mine = {n: p.detach() for n, p in net.named_parameters() if p.requires_grad}
    values = {n: torch.stack([p] * group) for n, p in mine.items()}
    frozen = {n: p.detach() for n, p in net.named_parameters() if not p.requires_grad}

    def loss(own: Any, rows: Any, labels: Any) -> Any:
        return F.cross_entropy(functional_call(net, {**frozen, **own}, (rows,)), labels)

    gradients = vmap(grad(loss), randomness="different")
    together, alone = gradients(values, x, y), grad(loss)(mine, x[0], y[0])
    for name, gradient in alone.items():
        rounding = torch.finfo(gradient.dtype).eps * shape.size**2 * (gradient.abs().max() + 1e-3)
        assert (together[name][0] - gradient).abs().max() <= rounding, name

    return lambda: gradients(values, x, y) and None


def joint(shape: Shape, batch: int, group: int, all_tokens: bool = False) -> Run:
    """Forward and backward passes of a group, whose clients have their own values."""
    import torch
    import torch.nn.functional as F

    from rayfed.fast.group import bound
    from rayfed.fast.joint_lora import use_joint_adapters
    from rayfed.fast.stacked import Stacked, stackable
    from rayfed.models.attention import use_class_token, use_direct_attention
    from rayfed.testing import small_setup

    x, y = batches(shape, batch, group)
    tuned = (f"tuning.rank={RANK}", "tuning.dropout=0", "model.pretrained=false", *shape.overrides)
    model = small_setup("algorithm=fedavg", "model.options={}", *tuned).context.build().train()
    use_joint_adapters(model)
    use_direct_attention(model)
    if not all_tokens:
        use_class_token(model)
    places = stackable(model)
    start = {n: torch.stack([entry.tensor.detach()] * group) for n, entry in places.items()}

    def run() -> None:
        values = {n: Stacked(value.clone().requires_grad_()) for n, value in start.items()}
        with bound(places, values):
            loss = F.cross_entropy(model(x), y)
            torch.autograd.grad(loss, [stacked.value for stacked in values.values()])

    return run


def all_tokens(shape: Shape, batch: int, group: int) -> Run:
    """As `joint`, but the last block computes all of its tokens."""
    return joint(shape, batch, group, all_tokens=True)


def bare(shape: Shape) -> Any:
    """The network of a shape without adapters, whose weights are frozen."""
    from timm import create_model
    from timm.models.vision_transformer import VisionTransformer

    from rayfed.models.attention import use_class_token, use_direct_attention
    from rayfed.models.blocks import BlockStack

    if shape.is_text:
        return roberta().requires_grad_(False).train()
    net: Any
    if shape.model:
        net = create_model(shape.model, pretrained=False, num_classes=10)
    else:
        net = VisionTransformer(
            img_size=32, patch_size=8, embed_dim=64, depth=12, num_heads=4, num_classes=10
        )
    net.requires_grad_(False)
    net.blocks = BlockStack(*net.blocks.children())
    use_direct_attention(net)
    use_class_token(net)
    return net


def frozen(shape: Shape, batch: int, group: int, net: Any = None) -> Run:
    """The network without adapters: forward, and backward to the tokens before the first block."""
    import torch.nn.functional as F

    x, y = batches(shape, batch, group)
    net = bare(shape) if net is None else net

    def run() -> None:
        if shape.is_text:
            tokens = net.roberta.embeddings(x).requires_grad_()
            output = net.classifier(net.roberta.encoder(tokens).last_hidden_state)
        else:
            tokens = net.norm_pre(net._pos_embed(net.patch_embed(x))).requires_grad_()
            output = net.forward_head(net.norm(net.blocks(tokens)))
        F.cross_entropy(output, y).backward()

    return run


def products(shape: Shape, batch: int, group: int) -> Run:
    """The products of `frozen` with weights, forward and back to their inputs, on tensors of these shapes."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    net = bare(shape)
    seen: list[tuple[Any, Any, Any]] = []

    def note(layer: Any, inputs: Any, output: Any) -> None:
        if inputs[0].requires_grad:  # the first layers, which see images, have nothing to go back to
            seen.append((layer, inputs[0].detach(), torch.randn(output.shape)))

    handles = [m.register_forward_hook(note) for m in net.modules() if isinstance(m, nn.Linear)]
    frozen(shape, batch, group, net)()
    for handle in handles:
        handle.remove()

    @torch.no_grad()
    def run() -> None:
        for layer, rows, grad in seen:
            F.linear(rows, layer.weight, layer.bias)
            F.linear(grad, layer.weight.mT)

    return run


SIDES: dict[str, Callable[[Shape, int, int], Run]] = {
    "plain": plain,
    "joint": joint,
    "vmap": vmapped,
    "all tokens": all_tokens,
    "frozen": frozen,
    "products": products,
}
OF_TEXTS = ("plain", "frozen", "products")


def operations(run: Run) -> int:
    """Number of operations that torch dispatches in a run; views are counted, too."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counting(TorchDispatchMode):
        number = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            Counting.number += 1
            return func(*args, **(kwargs or {}))

    with Counting():
        run()
    return Counting.number


def grown(name: str, shape: Shape, batch: int, group: int) -> float:
    """By how many MB a process grows, at most, in two passes of a side."""
    with mp.get_context("spawn").Pool(1) as pool:
        return pool.apply(_grown, (name, shape, batch, group))


def _grown(name: str, shape: Shape, batch: int, group: int) -> float:
    SIDES[name](shape, 1, 1)()  # what the libraries allocate at their first use
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run = SIDES[name](shape, batch, group)
    run()
    run()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=list(SHAPES))
    parser.add_argument("--batch", type=int, default=32, help="rows of a client")
    parser.add_argument("--group", type=int, default=4, help="clients of a pass")
    parser.add_argument("--images", type=int, default=512, help="images of each repeat")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--sides", nargs="*", choices=list(SIDES), help="beside plain; all without it")
    args = parser.parse_args()
    from rayfed.executors.client_actor import keep_freed_memory

    shape = SHAPES[args.shape or "toy"]
    possible = [name for name in SIDES if not shape.is_text or name in OF_TEXTS]
    names = [name for name in possible if name == "plain" or args.sides is None or name in args.sides]
    memory = {name: grown(name, shape, args.batch, args.group) for name in names}
    keep_freed_memory()
    runs = {name: SIDES[name](shape, args.batch, args.group) for name in names}
    number = max(1, args.images // (args.batch * args.group))
    images = number * args.batch * args.group
    times: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(args.repeats + 1):
        for name, run in runs.items():
            began = time.process_time()
            for _ in range(number):
                run()
            if repeat:  # the first one also prepares the libraries
                times[name].append(time.process_time() - began)
    median = {name: statistics.median(values) for name, values in times.items()}
    for name, value in median.items():
        print(
            f"{name:10}  {value / images * 1e3:.3f} ms an image, {value / median['plain']:.2f} of plain, "
            f"{operations(runs[name]):,} operations, {memory[name]:.0f} MB"
        )


if __name__ == "__main__":
    main()
