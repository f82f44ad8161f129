"""CPU seconds and memory of a round of 4 clients with 8 images each: ViT-B/16 and CLIP ViT-B/16 on the CPU.

python -m benchmarks.large_models [--only NAME ...] [overrides]

Each case is one run of `rayfed.run` in its own process, with random weights (nothing is downloaded) and
one thread. CPU seconds and the peak of the memory are those of the whole process, with imports, preparation
and the construction of the model.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

COMMON = (
    *("cluster=inline", "rounds=1", "model.pretrained=false", "tensorboard=false", "checkpoint.every=0"),
    *("data.domains=[plain,inverted,blended,street]", "data.limit=10", "data.val=0", "data.test=2"),
    *("data.partition.scheme=by_domain", "train.batch_size=8", "train.optimizer=sgd"),
)
VIT = ("model=vit_base_patch16_224", "algorithm=fedavg")
CLIP = ("model=clip_vit_b_16", "compare=[]")
CASES = {
    "ViT-B/16, LoRA": (*VIT, "tuning=lora"),
    "ViT-B/16, full": (*VIT, "tuning=full"),
    "ViT-B/16, full, train.micro_batch=2": (*VIT, "tuning=full", "train.micro_batch=2"),
    "ViT-B/16, full, train.checkpointing=true": (*VIT, "tuning=full", "train.checkpointing=true"),
    "CLIP ViT-B/16, attention adapter (FedCLIP)": (*CLIP, "algorithm=fedclip"),
    "CLIP ViT-B/16, full": (*CLIP, "algorithm=fedavg", "tuning=full"),
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.large_models", description=__doc__)
    parser.add_argument("--only", nargs="*", default=list(CASES), help="names of cases")
    args, overrides = parser.parse_known_args(argv)
    print("| case | CPU seconds | peak memory |\n|---|---:|---:|", flush=True)
    for name in args.only:
        seconds, peak = run([*COMMON, *CASES[name], *overrides])
        print(f"| {name} | {seconds:.0f} | {peak / 1e9:.1f} GB |", flush=True)


def run(overrides: Sequence[str]) -> tuple[float, int]:
    """Run one experiment in its own process.

    Returns:
        Its CPU seconds, and its largest resident memory in bytes.

    Raises:
        SystemExit: The run failed; its messages are on the screen.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        command = [sys.executable, "-m", "rayfed.run", *overrides, f"output={path}", "--quiet"]
        process = os.posix_spawn(sys.executable, command, {**os.environ, "OMP_NUM_THREADS": "1"})
        _, status, usage = os.wait4(process, 0)
        if status:
            raise SystemExit(f"{' '.join(command)} failed")
        return usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024


if __name__ == "__main__":
    main()
