"""CPU time of joint passes without the engine, as a share of plain PyTorch: what groups can save at most.

The network and the batches of `benchmarks/engine_overhead.py`, in one process. Plain: clients one after the
other, with the forward and backward pass, the optimizer and copies of all values. Joint: forward and backward
passes of the rows of `--group` clients, each with its own LoRA factors, without anything else. Frozen: the
same rows through the network without adapters. Both multiply by frozen weights, and compute attention and
the last block, as a client actor does, and the process keeps freed memory like one. All tokens: as joint, but
the last block computes all of its tokens. The four alternate; the CPU time of the process is measured, which
other jobs of the machine change little. Prints the median milliseconds for each image, and the shares.

    python -m benchmarks.joint_pass [--batch 32] [--group 4] [--repeats 7]
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.engine_overhead import LR, RANK, plain_model

IMAGES = 512
"""Images of each repeat."""


def plain(batch: int) -> Callable[[], None]:
    """Clients with one batch each, one after the other."""
    import torch
    import torch.nn.functional as F

    net = plain_model().train()
    mine = {n: p for n, p in net.named_parameters() if p.requires_grad}
    sent = {n: p.detach().clone() for n, p in mine.items()}
    x = torch.randn(batch, 3, 32, 32)
    y = torch.arange(batch) % 10

    def run() -> None:
        for _ in range(IMAGES // batch):
            with torch.no_grad():
                for name, value in sent.items():
                    mine[name].copy_(value)
            optimizer = torch.optim.SGD(mine.values(), lr=LR, momentum=0.9)
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
            _ = {n: p.detach().clone() for n, p in mine.items()}

    return run


def joint(batch: int, group: int, all_tokens: bool = False) -> Callable[[], None]:
    """Forward and backward passes of a group, whose clients have values of their own."""
    import torch
    import torch.nn.functional as F

    from rayfed.executors.grouped.passes import bound
    from rayfed.models.attention import use_class_token, use_direct_attention
    from rayfed.models.stacked import Stacked, stackable
    from rayfed.testing.contracts import small_setup

    torch.set_num_threads(1)
    tuned = (f"tuning.rank={RANK}", "tuning.dropout=0")
    model = small_setup("algorithm=fedavg", "model.options={}", *tuned).world.build().train()
    use_direct_attention(model)
    if not all_tokens:
        use_class_token(model)
    places = stackable(model)
    start = {n: torch.stack([entry.tensor.detach()] * group) for n, entry in places.items()}
    x = torch.randn(group * batch, 3, 32, 32)
    y = torch.arange(group * batch) % 10

    def run() -> None:
        for _ in range(IMAGES // (group * batch)):
            values = {n: Stacked(value.clone().requires_grad_()) for n, value in start.items()}
            with bound(places, values):
                loss = F.cross_entropy(model(x), y)
                torch.autograd.grad(loss, [stacked.value for stacked in values.values()])

    return run


def frozen(rows: int) -> Callable[[], None]:
    """The network without adapters: forward, and backward to the tokens before the first block."""
    import torch
    import torch.nn.functional as F
    from timm.models.vision_transformer import VisionTransformer

    from rayfed.models.attention import use_class_token, use_direct_attention
    from rayfed.models.blocks import BlockStack

    net: Any = VisionTransformer(
        img_size=32, patch_size=8, embed_dim=64, depth=12, num_heads=4, num_classes=10
    ).requires_grad_(False)
    net.blocks = BlockStack(*net.blocks.children())
    use_direct_attention(net)
    use_class_token(net)
    x = torch.randn(rows, 3, 32, 32)
    y = torch.arange(rows) % 10

    def run() -> None:
        for _ in range(IMAGES // rows):
            tokens = net.norm_pre(net._pos_embed(net.patch_embed(x))).requires_grad_()
            F.cross_entropy(net.forward_head(net.norm(net.blocks(tokens))), y).backward()

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=32, help="rows of a client")
    parser.add_argument("--group", type=int, default=4, help="clients of a pass")
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    from rayfed.executors.client_actor import keep_freed_memory

    keep_freed_memory()
    runs = {
        "plain": plain(args.batch),
        "joint": joint(args.batch, args.group),
        "all tokens": joint(args.batch, args.group, all_tokens=True),
        "frozen": frozen(args.batch * args.group),
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(args.repeats + 1):
        for name, run in runs.items():
            began = time.process_time()
            run()
            if repeat:  # the first one also prepares the libraries
                times[name].append(time.process_time() - began)
    median = {name: statistics.median(values) for name, values in times.items()}
    for name, value in median.items():
        print(f"{name:10}  {value / IMAGES * 1e3:.3f} ms an image, {value / median['plain']:.2f} of plain")


if __name__ == "__main__":
    main()
