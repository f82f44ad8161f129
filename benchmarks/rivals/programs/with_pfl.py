"""pfl with two processes, which share the clients of a round and reduce their sums (gloo).

torchrun --standalone --nproc-per-node 2 -m benchmarks.rivals.programs.with_pfl FOLDER ROUNDS [--state FOLDER]
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.callback.restore_training import RestoreTrainingCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import nn

from benchmarks.rivals.gate import Gate  # measurement
from benchmarks.rivals.programs.arguments import parse
from benchmarks.rivals.workloads import Examples, Order, arrays, loss_of, network, read, trained


class Model(nn.Module):
    """A network with the loss and metrics that pfl asks for."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.net = network(folder)
        self.steps = self.seen = 0  # measurement

    def loss(self, y: torch.Tensor, **x: torch.Tensor) -> torch.Tensor:
        self.steps, self.seen = self.steps + 1, self.seen + len(y)  # measurement
        return loss_of(self.net, x.get("x", x), y)

    @torch.no_grad()
    def metrics(self, y: torch.Tensor, **x: torch.Tensor) -> dict[str, Any]:
        return {"loss": Weighted(loss_of(self.net, x.get("x", x), y).item() * len(y), len(y))}


class Client(Dataset):
    """The examples of a client, in the batches of one round."""

    def __init__(self, round: int, client: int, examples: Examples, order: Order) -> None:
        super().__init__(raw_data=[examples.labels[client]], user_id=str(client))
        self.client, self.examples = client, examples
        self.batches: Iterator[Any] = iter(order.batches(round, client))

    def iter(self, batch_size: int | None) -> Iterable[dict[str, torch.Tensor]]:
        """One pass in the batches of training; all examples at once for pfl's scores of the first round."""
        whole = batch_size is None or batch_size >= len(self)
        for _ in range(1 if whole else -(-len(self) // batch_size)):
            rows = np.arange(len(self)) if whole else next(self.batches)
            x, y = self.examples.batch(self.client, rows)
            yield {**x, "y": y} if isinstance(x, dict) else {"x": x, "y": y}


class Sampler:
    """The clients of the rounds, one after the other, from the first round that is not finished."""

    def __init__(self, order: Order, algorithm: FederatedAveraging) -> None:
        self.order, self.algorithm = order, algorithm
        self.queue: list[tuple[int, int]] = []

    def __call__(self) -> tuple[int, int]:
        if not self.queue:
            round = self.algorithm._current_central_iteration
            self.queue = [(round, client) for client in self.order.cohort(round)]
        return self.queue.pop(0)


class Wait(TrainingProcessCallback):  # measurement
    """Waits for the other programs between the rounds."""  # measurement

    def __init__(self, model: Model) -> None:  # measurement
        self.model, self.gate = model, Gate() if int(os.environ.get("RANK", 0)) == 0 else None  # measurement

    def after_central_iteration(
        self, metrics: Any, model: Any, *, central_iteration: int
    ) -> Any:  # measurement
        counts = torch.tensor([self.model.steps, self.model.seen])  # measurement
        self.model.steps = self.model.seen = 0  # measurement
        torch.distributed.all_reduce(counts)  # measurement
        if self.gate:  # measurement
            self.gate.done(*counts.tolist(), lambda: arrays(self.model.net))  # measurement
        torch.distributed.barrier()  # measurement
        return False, Metrics()  # measurement


def main() -> None:
    args = parse(__doc__)
    torch.set_num_threads(1)
    work, order, examples = read(args.folder), Order(args.folder), Examples(args.folder)
    module = Model(args.folder)
    model = PyTorchModel(
        module,
        lambda _, lr: torch.optim.SGD(trained(module).values(), lr=lr, momentum=work.momentum),
        torch.optim.SGD(trained(module).values(), lr=1.0),
    )
    algorithm = FederatedAveraging()
    users = FederatedDataset(lambda user: Client(*user, examples, order), Sampler(order, algorithm))
    callbacks: list[TrainingProcessCallback] = []
    if args.state:
        callbacks.append(RestoreTrainingCallback([model, algorithm], str(args.state)))
    callbacks.append(Wait(module))  # measurement
    algorithm.run(
        NNAlgorithmParams(
            central_num_iterations=args.rounds,
            evaluation_frequency=10**9,
            train_cohort_size=work.cohort,
            val_cohort_size=None,
        ),
        SimulatedBackend(training_data=users, val_data=None, postprocessors=[]),
        model,
        NNTrainHyperParams(
            local_num_epochs=work.epochs, local_learning_rate=work.lr, local_batch_size=work.batch
        ),
        callbacks=callbacks,
        send_metrics_to_platform=False,
    )


if __name__ == "__main__":
    main()
