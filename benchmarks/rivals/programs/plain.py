"""FedAvg by hand in plain PyTorch: two processes train half of the clients each, through pipes.

python -m benchmarks.rivals.programs.plain FOLDER ROUNDS [--state FOLDER]
"""

from __future__ import annotations

import multiprocessing as mp
from pathlib import Path
from typing import Any

import torch

from benchmarks.rivals.gate import Gate  # measurement
from benchmarks.rivals.programs.arguments import parse
from benchmarks.rivals.programs.local_training import train
from benchmarks.rivals.workloads import Examples, Order, arrays, network, read, trained


def worker(pipe: Any, folder: Path) -> None:
    """Trains the clients that it is told, and answers with the sum of their values."""
    torch.set_num_threads(1)
    net, work, examples, order = network(folder), read(folder), Examples(folder), Order(folder)
    while (task := pipe.recv()) is not None:
        round, clients, values = task
        sums: dict[str, Any] = {}
        steps = seen = 0
        for client in clients:
            took, saw = train(net, values, work, examples, order, round, client)
            steps, seen = steps + took, seen + saw
            for name, p in trained(net).items():
                sums[name] = sums.get(name, 0.0) + p.detach().double()
        pipe.send((steps, seen, {name: value.numpy() for name, value in sums.items()}))


def main() -> None:
    args = parse(__doc__)
    gate = Gate()  # measurement
    context = mp.get_context("spawn")
    pairs = [context.Pipe() for _ in range(2)]
    for _, theirs in pairs:
        context.Process(target=worker, args=(theirs, args.folder), daemon=True).start()
    pipes = [ours for ours, _ in pairs]
    order, first, values = Order(args.folder), 0, arrays(network(args.folder))
    saved = args.state / "saved.pt" if args.state else None
    if saved and saved.exists():
        first, values = torch.load(saved, weights_only=False)
    for round in range(first, args.rounds):
        cohort = order.cohort(round)
        for part, pipe in enumerate(pipes):
            pipe.send((round, cohort[part::2], values))
        answers = [pipe.recv() for pipe in pipes]
        values = {
            name: (sum(a[2][name] for a in answers) / len(cohort)).astype(old.dtype)
            for name, old in values.items()
        }
        if saved:
            torch.save((round + 1, values), saved)
        if not gate.done(sum(a[0] for a in answers), sum(a[1] for a in answers), values.copy):  # measurement
            break  # measurement
    for pipe in pipes:
        pipe.send(None)


if __name__ == "__main__":
    main()
