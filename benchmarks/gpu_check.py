"""Checks this machine's GPU in one command: the same results as the CPU, speed, memory, shares of the GPU.

    make gpu-check               on the GPU, with ViT-B/16
    make gpu-check DEVICE=cpu    a rehearsal of the same code with small models; about two minutes

Every method plays one round on the CPU and on the device, and the largest relative difference of a tensor
is noted. Then LoRA of a ViT trains one client with each precision, with resident and with streamed images,
and in a plain PyTorch loop of the same work; and four clients train in 1, 2 and 4 actors that share the
device. Needs no network: the images are the embedded digits, the weights are random. Writes a JSON file and,
except for a rehearsal, the table in docs/gpu.md. The exit code is 1 if a method fails or differs by more than
TOLERANCE.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from rayfed.devices import HOST, Precision, peak_memory, reset_peak, set_products
from rayfed.engine.gpu_plan import actors_on
from rayfed.engine.loop import run_rounds
from rayfed.engine.measurement import largest_client
from rayfed.engine.setup import Setup, prepare
from rayfed.errors import RayFedError
from rayfed.executors.inline import InlineExecutor
from rayfed.executors.mps import mps_runs
from rayfed.federation.executor import Visit
from rayfed.federation.method import METHODS
from rayfed.testing.play import play

Row: TypeAlias = dict[str, Any]
ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "gpu.md"
TOLERANCE = 1e-3
"""Largest difference of a tensor, relative to its largest value, after one round in fp32."""

TINY = (
    "model.options={depth: 2}",
    "model.pretrained=false",
    "train.batch_size=3",
    "data.partition.scheme=by_domain",
    "data.domains=[plain,fonts]",
    "data.limit=6",
    "data.val=2",
    "tensorboard=false",
)
"""Two clients with one batch of three images each."""

LORA = (
    "algorithm=fedavg",
    "tuning=lora",
    "tuning.dropout=0",
    "model.pretrained=false",
    "data.partition.scheme=by_domain",
    "data.val=0",
    "evaluation.every=0",
    "train.batch_size=32",
)
LARGE = ("model=vit_base_patch16_224", "data.limit=512")
SMALL = ("model=vit_mini", "model.options={depth: 2}", "data.limit=64")
PRECISIONS: tuple[Precision, ...] = ("fp32", "tf32", "bf16")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all parts; returns the exit code."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--device", default="cuda", help="a device of torch; cpu is a rehearsal")
    parser.add_argument("--json", type=Path, default=Path("gpu_check.json"), help="where the results go")
    parser.add_argument("--methods", nargs="*", default=None, help="methods to play; all without it")
    chosen = parser.parse_args(arguments)
    device = torch.device(chosen.device)
    if device != HOST and not torch.get_device_module(device).is_available():
        sys.exit(f"gpu_check: torch sees no {device.type} on this machine; DEVICE=cpu rehearses")
    began = time.perf_counter()
    size = SMALL if device == HOST else LARGE
    names = METHODS.names() if chosen.methods is None else chosen.methods
    found = {
        "device": described(device),
        "torch": torch.__version__,
        "methods": {name: shown(compared(name, device)) for name in names},
        "training": [shown(trained(device, size, p, r)) for p in PRECISIONS for r in (True, False)],
        "plain": [shown(plain(device, size, precision)) for precision in PRECISIONS],
        "actors": [shown(shared(device, size, number)) for number in (1, 2, 4)],
    }
    found["plan"] = shown(planned(device, size, found["training"][0]["peak_gigabytes"]))
    found["seconds"] = round(time.perf_counter() - began, 1)
    chosen.json.write_text(json.dumps(found, indent=1) + "\n")
    if device != HOST:
        PAGE.write_text(page(PAGE.read_text(), found))
    bad = [name for name, row in found["methods"].items() if not row["difference"] <= TOLERANCE]
    print(
        f"{found['seconds']} s; {len(names) - len(bad)} of {len(names)} methods as on the CPU: {chosen.json}"
    )
    return 1 if bad else 0


def shown(row: Row) -> Row:
    print(row, flush=True)
    return row


def described(device: torch.device) -> str:
    """Name of the device, as its maker calls it."""
    name = getattr(torch.get_device_module(device), "get_device_name", None) if device != HOST else None
    return str(name(device)) if name else device.type


def compared(name: str, device: torch.device) -> Row:
    """The largest relative difference of a tensor after one round of a method on both devices."""
    ours, theirs = (play_quietly([*TINY, "rounds=1", f"algorithm={name}"], where) for where in (HOST, device))
    if isinstance(theirs, str) or isinstance(ours, str):
        return {"method": name, "difference": float("inf"), "error": str(theirs)}
    worst = [
        float((ours[key] - theirs[key]).abs().max() / ours[key].abs().max().clamp_min(1e-6)) for key in ours
    ]
    return {"method": name, "difference": max(worst, default=0.0)}


def play_quietly(overrides: Sequence[str], device: torch.device) -> dict[str, Tensor] | str:
    """Final tensors of an experiment, or its error."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            return play([*overrides, f"output={folder}"], device).params
        except (RayFedError, RuntimeError) as err:
            return f"{type(err).__name__}: {err}".splitlines()[0]


def trained(device: torch.device, size: Sequence[str], precision: Precision, resident: bool) -> Row:
    """Images a second and memory of one client's training, in the engine."""
    setup = lora(size, "data.domains=[plain]", f"train.precision={precision}", f"data.resident={resident}")
    reset_peak(device)
    executor = InlineExecutor(setup.world, setup.weights, device=device)
    visits: list[Visit] = []
    executor.on_visit = visits.append
    list(run_rounds(setup.experiment, executor, setup.start))
    images = next(iter(setup.experiment.clients.values())).num_examples
    return {
        "precision": precision,
        "images": "resident" if resident else "streamed",
        "images_per_second": round(images / visits[-1].seconds, 1),
        "peak_gigabytes": peak(device),
    }


def lora(size: Sequence[str], *overrides: str) -> Setup:
    """Three rounds of LoRA; the first ones warm up."""
    from rayfed.config.schema import load_config

    return prepare(load_config([*LORA, *size, "rounds=3", *overrides]))


def plain(device: torch.device, size: Sequence[str], precision: Precision) -> Row:
    """Images a second of the same training in a loop of plain PyTorch, with all images on the device."""
    setup = lora(size, "data.domains=[plain]")
    rows = next(iter(setup.partition.clients)).train
    pixels = torch.from_numpy(setup.dataset.images[rows]).to(device)
    labels = torch.from_numpy(setup.dataset.labels[rows]).to(device)
    net = setup.world.build().to(device)
    net.train()
    set_products(device, precision)
    live = [p for p in net.parameters() if p.requires_grad]

    def one_pass() -> None:
        optimizer = torch.optim.SGD(live, lr=0.02, momentum=0.9)
        for batch in torch.randperm(len(rows)).to(device).split(32):
            x = pixels[batch].permute(0, 3, 1, 2).float().div_(127.5).sub_(1)
            with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
                loss = torch.nn.functional.cross_entropy(net(x), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        float(loss.detach())  # waits for the device

    for _ in range(2):
        one_pass()
    return {"precision": precision, "images_per_second": round(len(rows) / seconds(one_pass), 1)}


def shared(device: torch.device, size: Sequence[str], actors: int) -> Row:
    """Seconds of a round of four clients in actors that share the device."""
    from rayfed.config.schema import load_config
    from rayfed.engine.launch import launch

    share = f"cluster.gpus_per_actor={0 if device == HOST else 1 / actors}"
    where = ("cluster=local", f"cluster.actors={actors}", share, "cluster.dashboard=false")
    clients = ("data.domains=[plain]", "data.partition.clients_per_domain=4", "rounds=3")
    with tempfile.TemporaryDirectory() as folder:
        config = load_config([*LORA, *size, *where, *clients, f"output={folder}"])
        rows = [row for row in launch(prepare(config), config, Path(folder)) if "round" in row]
    return {"actors": actors, "seconds_per_round": round(rows[-1]["seconds"], 3)}


def planned(device: torch.device, size: Sequence[str], peak_gigabytes: float | None) -> Row:
    """What `cluster.gpus_per_actor=auto` would plan for the client that `trained` trained.

    Args:
        device: The device.
        size: Overrides of model and data.
        peak_gigabytes: Peak of its training in fp32 with resident images; None on the CPU.
    """
    setup = lora(size, "data.domains=[plain]", "data.resident=true")
    found = largest_client(setup.experiment, setup.world, device, setup.weights)
    total = found.device_total
    return {
        "planned_gigabytes": round(found.device_bytes / 1e9, 3),
        "peak_gigabytes": peak_gigabytes,
        "actors_on_this_gpu": actors_on(total, found.device_bytes, mps_runs()) if total else None,
        "mps": mps_runs(),
    }


def seconds(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def peak(device: torch.device) -> float | None:
    """Largest memory that torch reserved on the device since `reset_peak`, in gigabytes; None on the CPU."""
    there = peak_memory(device)
    return None if there is None else round(there / 1e9, 2)


def page(text: str, found: Row) -> str:
    """The page with the results of this check."""
    worst = max(found["methods"].values(), key=lambda row: row["difference"])
    speed = {row["precision"]: row["images_per_second"] for row in found["plain"]}
    rows = [
        f"| {row['precision']} | {row['images']} | {row['images_per_second']} | "
        f"{row['images_per_second'] / speed[row['precision']]:.2f} | {row['peak_gigabytes']} |"
        for row in found["training"]
    ]
    plan = found["plan"]
    shares = ", ".join(f"{row['seconds_per_round']} s with {row['actors']}" for row in found["actors"])
    block = "\n".join(
        [
            f"`make gpu-check` on {found['device']}, torch {found['torch']}, {found['seconds']} s.",
            f"Largest relative difference of a tensor from the CPU after a round: {worst['difference']:.1e}",
            f"({worst['method']}).",
            f"A round of four clients: {shares} actors, {'with' if plan['mps'] else 'without'} MPS.",
            f"Plan for one actor: {plan['planned_gigabytes']} GB, of which 0.6 GB are for CUDA itself; peak",
            f"of torch in a run: {plan['peak_gigabytes']} GB; {plan['actors_on_this_gpu']} such actors fit.",
            "",
            "| precision | images | images a second | share of plain PyTorch | peak memory, GB |",
            "|---|---|---|---|---|",
            *rows,
        ]
    )
    return replaced(text, "check", block)


def replaced(text: str, mark: str, block: str) -> str:
    """A page with this block between its two comments of that mark."""
    new = f"<!-- {mark} -->\n{block}\n<!-- /{mark} -->"
    return re.sub(rf"<!-- {mark} -->.*<!-- /{mark} -->", lambda _: new, text, flags=re.DOTALL)


if __name__ == "__main__":
    sys.exit(main())
