"""BlazeFL with a pool of two processes, which share tensors through memory.

python -m benchmarks.rivals.programs.with_blazefl FOLDER ROUNDS [--state FOLDER]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo  # the first optimizer of a process imports it: once here, not in every fork
import torch.multiprocessing as mp
from blazefl.core import BaseServerHandler, IPCMode, ProcessPoolClientTrainer, SHMHandle
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from benchmarks.rivals.gate import Gate  # measurement
from benchmarks.rivals.programs.arguments import parse
from benchmarks.rivals.programs.local_training import train
from benchmarks.rivals.workloads import Examples, Order, arrays, network, read, trained

HELD: dict[str, Any] = {}
"""Network and data, which the processes of the pool inherit when they are forked."""


@dataclass
class Down:
    """The message of the server: all trained values in one vector."""

    values: torch.Tensor


@dataclass
class Up:
    """The answer of a client."""

    values: torch.Tensor | SHMHandle
    examples: int = 0
    steps: int = 0
    seen: int = 0


def by_name(values: torch.Tensor) -> dict[str, torch.Tensor]:
    """The parts of a vector by the names of the parameters."""
    live = trained(HELD["net"])
    parts = values.split([p.numel() for p in live.values()])
    return {name: part.view_as(p) for (name, p), part in zip(live.items(), parts, strict=True)}


class Server(BaseServerHandler[Up, Down]):
    """FedAvg over vectors."""

    def __init__(self, values: torch.Tensor, round: int, rounds: int) -> None:
        self.values, self.round, self.rounds = values, round, rounds

    def sample_clients(self) -> list[int]:
        return HELD["order"].cohort(self.round)

    def if_stop(self) -> bool:
        return self.round >= self.rounds

    def downlink_package(self) -> Down:
        return Down(self.values.clone())

    def global_update(self, buffer: list[Up]) -> None:
        total = sum(each.examples for each in buffer)
        mean = torch.zeros_like(self.values)
        for each in buffer:
            mean.add_(each.values, alpha=each.examples / total)
        self.values, self.round = mean, self.round + 1


class Trainer(ProcessPoolClientTrainer[Up, Down, tuple[int, int]]):
    """Trains the clients of a round in a pool."""

    def __init__(self, server: Server) -> None:
        self.server, self.num_parallels, self.device = server, 2, "cpu"
        self.ipc_mode, self.cache, self.stop_event = IPCMode.SHARED_MEMORY, [], mp.Manager().Event()

    def get_client_config(self, cid: int) -> tuple[int, int]:
        return self.server.round, cid

    def prepare_uplink_package_buffer(self) -> Up:
        return Up(torch.empty_like(self.server.values))

    @staticmethod
    def worker(config: Any, payload: Any, device: str, stop_event: Any, *, shm_buffer: Any = None) -> Any:
        net, work = HELD["net"], HELD["work"]
        steps, seen = train(net, by_name(payload.values), work, HELD["examples"], HELD["order"], *config)
        shm_buffer.values.copy_(parameters_to_vector(trained(net).values()).detach())
        return Up(SHMHandle(), work.examples, steps, seen)

    def uplink_package(self) -> list[Up]:
        packages, self.cache = self.cache, []
        return packages


def main() -> None:
    args = parse(__doc__)
    gate = Gate()  # measurement
    torch.set_num_threads(1)
    HELD["net"], HELD["work"] = network(args.folder), read(args.folder)
    HELD["examples"], HELD["order"] = Examples(args.folder), Order(args.folder)
    first, values = 0, parameters_to_vector(trained(HELD["net"]).values()).detach().clone()
    saved = args.state / "saved.pt" if args.state else None
    if saved and saved.exists():
        first, values = torch.load(saved)
    server = Server(values, first, args.rounds)
    trainer = Trainer(server)
    while not server.if_stop():
        trainer.local_process(server.downlink_package(), server.sample_clients())
        answers = trainer.uplink_package()
        server.global_update(answers)
        if saved:
            torch.save((server.round, server.values), saved)
        vector_to_parameters(server.values, trained(HELD["net"]).values())  # measurement
        values_now = lambda: arrays(HELD["net"])  # noqa: E731  # measurement
        if not gate.done(
            sum(a.steps for a in answers), sum(a.seen for a in answers), values_now
        ):  # measurement
            break  # measurement


if __name__ == "__main__":
    main()
