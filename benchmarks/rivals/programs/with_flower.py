"""Flower's simulation with two client actors, which keep network and data between their calls.

python -m benchmarks.rivals.programs.with_flower FOLDER ROUNDS [--state FOLDER]
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from benchmarks.rivals.gate import Gate  # measurement
from benchmarks.rivals.programs.arguments import parse
from benchmarks.rivals.programs.local_training import train
from benchmarks.rivals.workloads import Examples, Order, network, read, trained

client = ClientApp()


@cache
def held(folder: Path) -> Any:
    """Network and data, which an actor keeps."""
    torch.set_num_threads(1)
    return network(folder), read(folder), Examples(folder), Order(folder)


@client.train()
def fit(message: Message, context: Context) -> Message:
    """Trains one client."""
    config = message.content["config"]
    net, work, examples, order = held(Path(str(config["folder"])))
    values = message.content["arrays"].to_torch_state_dict()
    steps, seen = train(net, values, work, examples, order, config["round"], config["client"])
    content = {
        "arrays": ArrayRecord({name: p.detach() for name, p in trained(net).items()}),
        "metrics": MetricRecord({"num-examples": work.examples, "steps": steps, "seen": seen}),
    }
    return Message(RecordDict(content), reply_to=message)


class Chosen(FedAvg):
    """FedAvg with given clients in each round: any node trains any client."""

    def __init__(self, folder: Path, first: int, nodes: int) -> None:
        super().__init__(fraction_evaluate=0.0, min_available_nodes=nodes)
        self.folder, self.first, self.order = folder, first, Order(folder)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        round = self.first + server_round - 1
        while len(nodes := sorted(grid.get_node_ids())) < len(self.order.cohort(round)):
            pass
        for node, chosen in zip(nodes, self.order.cohort(round), strict=True):
            own = ConfigRecord({"folder": str(self.folder), "round": round, "client": chosen})
            yield Message(RecordDict({"arrays": arrays, "config": own}), node, MessageType.TRAIN)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        answers = list(replies)
        metrics = [answer.content["metrics"] for answer in answers]  # measurement
        self.steps = sum(each["steps"] for each in metrics)  # measurement
        self.seen = sum(each["seen"] for each in metrics)  # measurement
        return super().aggregate_train(server_round, answers)


def main() -> None:
    args = parse(__doc__)
    gate = Gate()  # measurement
    server, work = ServerApp(), read(args.folder)
    saved = args.state / "saved.pt" if args.state else None

    @server.main()
    def serve(grid: Grid, context: Context) -> None:
        first, arrays = 0, ArrayRecord({n: p.detach() for n, p in trained(network(args.folder)).items()})
        if saved and saved.exists():
            first, values = torch.load(saved, weights_only=False)
            arrays = ArrayRecord(values)
        strategy = Chosen(args.folder, first, work.cohort)

        def after(server_round: int, arrays: ArrayRecord) -> None:
            if server_round and saved:
                torch.save((first + server_round, arrays.to_torch_state_dict()), saved)
            if server_round:  # measurement
                values = arrays.to_numpy_ndarrays  # measurement
                named = lambda: dict(zip(arrays, values(), strict=True))  # noqa: E731  # measurement
                gate.done(strategy.steps, strategy.seen, named)  # measurement

        strategy.start(grid, arrays, num_rounds=args.rounds - first, evaluate_fn=after)

    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": 2}}
    run_simulation(server, client, num_supernodes=work.cohort, backend_config=resources)


if __name__ == "__main__":
    from benchmarks.rivals.programs import with_flower  # so that actors import the functions by their names

    with_flower.main()
