"""Time of FedCLIP's rounds with cached features, compared with encoding every image in every round.

    python benchmarks/frozen_features.py --images 32 --rounds 3

open_clip's ViT-B/32 with random weights (the time does not depend on them), one client, one thread.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from rayfed.config.schema import load_config
from rayfed.engine.loop import run_rounds
from rayfed.engine.setup import Setup
from rayfed.executors.inline import InlineExecutor
from rayfed.experiment.plan import prepared
from rayfed.federation.executor import Call
from rayfed.federation.params import digest
from rayfed.types import Update

MODEL = "open_clip/ViT-B-32-quickgelu"


class Forgetful(InlineExecutor):
    """Keeps no features from call to call: every call encodes its images again, in the same batches."""

    def map(self, calls: Sequence[Call]) -> Sequence[Update]:
        answers: list[Update] = []
        for call in calls:
            self.worker.cache.clear()
            answers += super().map([call])
        return answers


def timed(setup: Setup, executor: InlineExecutor) -> tuple[list[float], str, dict[str, torch.Tensor]]:
    """Seconds of training in each round, and the final tensors."""
    rounds = list(run_rounds(setup.experiment, executor, setup.start))
    params = rounds[-1].state.params
    return [r.row["seconds_training"] for r in rounds], digest(params), params


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=32, help="training images of the one client")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        overrides = [
            "algorithm=fedclip", f"model={MODEL}", "model.pretrained=false", "data.domains=[plain]",
            f"data.limit={options.images + 20}", "data.test=20", "data.val=0", "cluster=inline",
            f"rounds={options.rounds}", "evaluation.every=0", f"data.cache={Path(folder)}",
        ]  # fmt: skip
        kept_setup = prepared(load_config(overrides))
        plain_setup = prepared(load_config([*overrides, "train.cache_features=off"]))
        kept = timed(kept_setup, InlineExecutor(kept_setup.context, kept_setup.weights))
        forgot = timed(kept_setup, Forgetful(kept_setup.context, kept_setup.weights))
        online = timed(plain_setup, InlineExecutor(plain_setup.context, plain_setup.weights))
    difference = max(float((kept[2][n] - v).abs().max()) for n, v in online[2].items())
    cached = min(kept[0][1:])
    encoded = min(online[0][1:])
    print(f"{options.images} images, seconds of training per round")
    print(f"features kept:            {cached:.4f} (first round {kept[0][0]:.3f})")
    print(f"encoded in every batch:   {encoded:.4f}")
    print(f"encoded in every call:    {min(forgot[0][1:]):.4f}")
    print(f"ratio:                    {encoded / cached:.1f}")
    print(f"same bits as every call:  {kept[1] == forgot[1]}")
    print(f"largest difference to every batch: {difference:.2e}")


if __name__ == "__main__":
    main()
