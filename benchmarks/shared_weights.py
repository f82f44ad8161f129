"""Memory of 8 actors that share the frozen weights of a ViT-B/16 with random weights.

Maps the weights in 1 actor and then in 8 and prints the proportional set size of the processes (PSS: shared
pages are divided between the processes that map them), and the size of 8 private copies.

    python benchmarks/shared_weights.py [--actors 8]
"""

from __future__ import annotations

import argparse
import os
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

MB = 1e6
MODEL = "vit_base_patch16_224.augreg2_in21k_ft_in1k"


def memory_of(pid: int) -> dict[str, float]:
    """PSS and private memory of a process, in MB."""
    from pathlib import Path

    fields = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, value = line.split(":")
        fields[name] = int(value.split()[0]) * 1024 / MB
    private = fields["Private_Clean"] + fields["Private_Dirty"]
    return {"pss": fields["Pss"], "private": private, "rss": fields["Rss"]}


def probe() -> Any:
    """An actor class that maps the weights, trains one step and measures itself."""
    import ray

    @ray.remote(num_cpus=0.1)
    class Resident:
        def load(self, context: Any, weights: Any) -> dict[str, float]:
            import torch

            from rayfed.models.shared_weights import attach

            torch.set_num_threads(1)
            self.model = context.skeleton()
            self.before = memory_of(os.getpid())
            attach(self.model, weights)
            self.model.train()
            self.model(torch.zeros(1, 3, 224, 224)).sum().backward()
            return self.measure()

        def measure(self) -> dict[str, float]:
            return memory_of(os.getpid())

    return Resident


def build_world() -> Any:
    """A world with the model, and without data."""
    from pathlib import Path

    from rayfed.executors.worker import ClientContext
    from rayfed.federation.train_config import TrainConfig
    from rayfed.models.build import build_backbone
    from rayfed.models.model_config import ModelConfig
    from rayfed.tuning.lora import Lora

    return ClientContext(
        seed=0,
        model=ModelConfig(name=MODEL, pretrained=False),
        construct=build_backbone,
        tuning=Lora(),
        num_classes=10,
        train=TrainConfig(),
        shard=Path("unused"),
        splits={},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--actors", type=int, default=8)
    count = parser.parse_args().actors

    import ray

    context = build_world()
    weights = context.weights()
    size = sum(array.nbytes for array in weights.values()) / MB
    ray.init(address="local", include_dashboard=False, logging_level="error")
    reference = ray.put(dict(weights))
    del weights
    resident = probe()
    actors = []
    for total in (1, count):
        new = [resident.remote() for _ in range(total - len(actors))]
        for actor in new:  # in turn, because simultaneous imports slow each other down
            ray.get(actor.load.remote(context, reference))
        actors += new
        memory = ray.get([actor.measure.remote() for actor in actors])
        pss = sum(f["pss"] for f in memory)
        private = sum(f["private"] for f in memory)
        print(
            f"{total} actor(s): PSS {pss:6.0f} MB in all, {pss / total:5.0f} MB each; "
            f"private {private / total:5.0f} MB each"
        )
        per_actor = private / total
    copies = count * size
    shared = sum(f["rss"] for f in memory) - sum(f["private"] for f in memory)
    print(f"weights: {size:.0f} MB, mapped once; {count} copies would take {copies:.0f} MB")
    print(f"an actor: {per_actor:.0f} MB private, {shared / count:.0f} MB mapped together with others")
    ray.shutdown()


if __name__ == "__main__":
    main()
