"""Checks this machine's GPU in one command: the same results as the CPU, speed, memory, shares of the GPU.

    make gpu-check                    on the GPU, with ViT-B/16
    make gpu-check DEVICE=cpu         a rehearsal of the same code with small models; about two minutes
    make gpu-check PYTHON=python3     with an interpreter that has torch and the other libraries; no network

The parts, one after the other (`PARTS`):

- kernels: dropout and norms in Triton against the plain forms.
- methods: one round of every method on the CPU and on the device, which drop the same; the largest difference
  of a tensor.
- texts: the same for tiny encoders and language models, and for two clients that share their passes.
- bits: the same tensors twice, with `deterministic`, and with streamed and resident images.
- bf16: the device's bf16 against the CPU's.
- settings: checkpointing, compile, parts of batches and joint passes against a run without them.
- clients: seconds of a round of many small clients, with and without what saves launches.
- training, plain: images a second and memory of one client, and of a plain PyTorch loop of the same work.
- plan: the memory that is planned for a client actor against the peak.
- memory: too little memory, its advice, and that nothing is left of the failed call.
- actors: a default run, and four clients in 1, 2, 4 and the planned number of actors; needs Ray.

The JSON file is written after every row. A part that fails is reported, and the others go on. At the end
there is a block to paste into an issue, and, except for a rehearsal, the tables of
benchmarks/results/gpu.md. The exit code is 1 if anything is not as it should be.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias
from unittest.mock import patch

import torch
from torch import Tensor

from rayfed.config.schema import load_config
from rayfed.devices import HOST, Precision, peak_memory, reset_peak, set_products, total_memory
from rayfed.engine.client_places import actors_on
from rayfed.engine.loop import run_rounds
from rayfed.engine.measure_client import largest_client, measure
from rayfed.engine.setup import Setup
from rayfed.errors import DeviceMemoryError, ResourceError, one_line
from rayfed.executors import worker
from rayfed.executors.inline import InlineExecutor
from rayfed.experiment.plan import prepared
from rayfed.fast import fast_passes
from rayfed.fast.dropout import use_counted_dropout
from rayfed.fast.graphs import graphs_in
from rayfed.fast.member import MemberPasses
from rayfed.federation.executor import CallTiming
from rayfed.federation.method_registry import METHODS
from rayfed.federation.params import digest
from rayfed.federation.train_config import TrainConfig
from rayfed.models.backbone import Backbone
from rayfed.models.shared_weights import attach
from rayfed.mps import mps_runs
from rayfed.testing import SGD, plain_steps, play

Row: TypeAlias = dict[str, Any]
"""Finding of a row; `bad` says what is not as it should be, `skipped` why it was not tried."""

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "benchmarks" / "results" / "gpu.md"
TOLERANCE = 1e-3
"""Largest difference of a tensor, relative to its largest value, after one round in fp32."""

DIVIDED = 1e-2
"""The same where a step is divided by the root of its second moment.

Then a difference of the mean update grows by up to lr / tau, which is 10 for FedAdam, FedYogi and FedAdagrad;
Adam at the clients takes steps of full length also where a gradient is near zero."""

TINY = (
    "model.options={depth: 2}",
    "model.pretrained=false",
    "train.batch_size=3",
    "data.partition.scheme=by_domain",
    "data.domains=[plain,fonts]",
    "data.limit=6",
    "data.val=2",
    "train.group=1",
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
    "tensorboard=false",
)
TEXTS = (
    *(
        "algorithm=fedavg",
        "tuning=lora",
        "tuning.dropout=0",
        "rounds=1",
        "data=jsonl",
        "data.val=0",
        "model.size=32",
    ),
    *("data.partition.scheme=natural", "data.partition.min_samples=1", "train.batch_size=4", "train.group=1"),
    "tensorboard=false",
)
LARGE = ("model=vit_base_patch16_224", "data.limit=512")
SMALL = ("model=vit_mini", "model.options={depth: 2}", "data.limit=64")
ONE = ("data.domains=[plain]",)
FEW = (*ONE, "data.limit=64")
"""One client with two batches or fewer."""

PRECISIONS: tuple[Precision, ...] = ("fp32", "tf32", "bf16")
LEFT = 10e6
"""Bytes that may stay on the device after a failed call."""


@dataclass(frozen=True)
class Place:
    """Subject of a check: the device, the overrides of model and data, and the methods to play."""

    device: torch.device
    size: Sequence[str]
    methods: Sequence[str] = ()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all parts; returns the exit code."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--device", default="cuda", help="a device of torch; cpu is a rehearsal")
    parser.add_argument("--json", type=Path, default=Path("gpu_check.json"), help="where the results go")
    parser.add_argument("--methods", nargs="*", default=None, help="methods to play; all without it")
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS), help="all without it")
    chosen = parser.parse_args(arguments)
    device = torch.device(chosen.device)
    if device != HOST and device.index is None:
        device = torch.device(device.type, 0)  # torch limits the memory of a numbered device only
    if device != HOST and not torch.get_device_module(device).is_available():
        sys.exit(
            f"gpu_check: torch {torch.__version__} sees no {device.type} on this machine: {reason(device)}; "
            f"DEVICE=cpu rehearses"
        )
    methods = METHODS.names() if chosen.methods is None else chosen.methods
    place = Place(device, SMALL if device == HOST else LARGE, methods)
    found = checked(place, [part for part in PARTS if part in chosen.parts], chosen.json)
    if device != HOST:
        PAGE.write_text(page(PAGE.read_text(), found))
    print(f"\nto paste into an issue, with {chosen.json}:\n\n{summary(found)}")
    return 1 if any(wrong(found).values()) else 0


def checked(place: Place, parts: Sequence[str], file: Path) -> Row:
    """Everything that these parts found; the file holds it after every row."""
    began = time.perf_counter()
    found: Row = {"machine": described(place.device), "parts": {}}
    for part in parts:
        rows = found["parts"][part] = []
        for row in caught(part, place):
            print(part, row, flush=True)
            rows.append(row)
            found["seconds"] = round(time.perf_counter() - began, 1)
            file.write_text(json.dumps(found, indent=1) + "\n")
    return found


def caught(part: str, place: Place) -> Iterator[Row]:
    """The rows of a part; its error, if it fails, is the last one."""
    try:
        yield from PARTS[part](place)
    except Exception as err:  # whatever it is, the other parts can still say something
        traceback.print_exc()
        yield {"bad": f"{type(err).__name__}: {one_line(err)}"}
    gc.collect()


def reason(device: torch.device) -> str:
    """Why torch cannot use a device, in torch's own words."""
    try:
        torch.empty(0, device=device)
    except (AssertionError, RuntimeError) as err:
        return one_line(err)
    return "it gives no reason"


def described(device: torch.device) -> Row:
    """The machine: device, driver and versions."""
    name = getattr(torch.get_device_module(device), "get_device_name", None) if device != HOST else None
    ask = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    smi = device.type == "cuda" and shutil.which("nvidia-smi")
    driver = subprocess.run(ask, capture_output=True, text=True, check=False).stdout if smi else ""
    return {
        "device": str(name(device)) if name else device.type,
        "driver": driver.partition("\n")[0].strip() or "unknown",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "ray": "installed" if has_ray() else "none",
        "python": platform.python_version(),
        "system": platform.platform(),
        "mps": mps_runs(),
    }


def has_ray() -> bool:
    return find_spec("ray") is not None


# The same results


def methods(place: Place) -> Iterator[Row]:
    """One round of every method on the CPU and on the device."""
    for name in place.methods:
        yield compared(name, place.device)


def compared(name: str, device: torch.device) -> Row:
    """The largest relative difference of a tensor after one round of a method on both devices."""
    try:
        overrides = [*TINY, "rounds=1", f"algorithm={name}"]
        overrides += plain_steps(overrides)
        config = load_config(overrides)
        with dropping_as_devices():
            ours, theirs = (played(overrides, where)[0] for where in (HOST, device))
    except Exception as err:  # of any kind: a method that fails must not end the list
        return {"method": name, "difference": float("inf"), "bad": f"{type(err).__name__}: {one_line(err)}"}
    server = METHODS.load(name).server
    if getattr(server, "lora_agg", "") == "product_svd":  # whose factors have any signs
        ours, theirs = products(ours), products(theirs)
    divides = hasattr(server, "tau") or config.train.optimizer in ("adam", "adamw")
    bar = DIVIDED if divides else TOLERANCE
    row = {"method": name, "difference": difference(ours, theirs), "bar": bar}
    return row | too_large(row["difference"], bar)


@contextmanager
def dropping_as_devices() -> Iterator[None]:
    """Let dropout on the CPU draw what it draws on a device, where clients are trained one by one."""
    adjust = worker.adjust_trunk

    def adjusted(model: Backbone, train: TrainConfig, device: str = "cpu") -> None:
        adjust(model, train, device)
        use_counted_dropout(model, train.checkpointing)

    with patch.object(worker, "adjust_trunk", adjusted):
        yield


def too_large(value: float, bar: float) -> Row:
    return {} if value <= bar else {"bad": f"{value:.1e} is above {bar:.1e}"}


def difference(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """The largest difference of a tensor, relative to its largest value; infinite where one is not finite."""
    if ours.keys() != theirs.keys():
        return float("inf")
    found = [
        float((ours[key] - theirs[key]).abs().max() / ours[key].abs().max().clamp_min(1e-6)) for key in ours
    ]
    return max((value if value == value else float("inf") for value in found), default=0.0)


def texts(place: Place) -> Iterator[Row]:
    """One round of LoRA of tiny text models on the CPU and on the device, and of both clients at once."""
    from tests.tiny_models import CONFIGS, DECODERS, save

    with tempfile.TemporaryDirectory() as folder:
        for family in CONFIGS:
            is_decoder = family in DECODERS
            model = save(family, Path(folder) / family, language=is_decoder)
            rows = [
                {"client": f"c{i % 2}", "text": f"where is card {i}", "label": f"{i % 3}"} for i in range(16)
            ]
            columns = "{prompt: text, completion: label" if is_decoder else "{text: text, label: label"
            file = Path(folder) / "rows.jsonl"
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))
            overrides = [
                *TEXTS,
                f"data.root={file}",
                f"data.columns={columns}, client: client}}",
                f"model={model}",
            ]
            with dropping_as_devices():
                ours, theirs = (played([*overrides, *SGD], where)[0] for where in (HOST, place.device))
            found = {"a device": difference(ours, theirs)}
            if place.device != HOST or is_decoder:  # in groups on a CPU encoders draw other dropout
                together = played([*overrides, *SGD, "train.group=2"], place.device)[0]
                found["groups"] = difference(theirs, together)
            for what, value in found.items():
                yield {"model": family, "what": what, "difference": value} | too_large(value, TOLERANCE)


def products(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, with B A in place of the factors A and B of an adapter."""
    result = dict(params)
    for name in params:
        if name.endswith("lora_A"):
            site = name.removesuffix("lora_A")
            result[f"{site}product"] = result.pop(f"{site}lora_B") @ result.pop(name)
    return result


def played(overrides: Sequence[str], device: torch.device) -> tuple[Mapping[str, Tensor], str]:
    """Final tensors of an experiment and their digest."""
    with tempfile.TemporaryDirectory() as folder:
        result = play([*overrides, f"output={folder}"], device)
        return result.params, result.sha256


def ran(place: Place, *overrides: str) -> tuple[Mapping[str, Tensor], str]:
    """As `played`, one round of LoRA with few images."""
    return played([*LORA, *place.size, *FEW, "rounds=1", *overrides], place.device)


def kernels(place: Place) -> Iterator[Row]:
    """The kernels that Triton makes for CUDA against the plain forms of operations, on the device."""
    if place.device.type != "cuda" or find_spec("triton") is None:
        yield {"skipped": "Triton makes kernels for CUDA only, where it is installed"}
        return
    yield from forms(place.device)


FORMS = ((6, 5, 19), (3, 8), (4, 197, 768))
"""Shapes of what is dropped; the rows of two or three clients."""


def forms(device: torch.device) -> Iterator[Row]:
    """Dropout has the same bits in both forms; sums of norms are added in another order."""
    from rayfed.fast import kernels as plain
    from rayfed.fast import triton_kernels as triton

    rng = torch.Generator().manual_seed(0)

    def made(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=rng).to(dtype).to(device)

    for dtype in (torch.float32, torch.bfloat16):
        for shape in FORMS[: 2 if device == HOST else 3]:
            seeds = torch.tensor([2**62 + 5, 77, 3][: 3 if shape[0] % 3 == 0 else 2]).to(device)
            x, mine = made(*shape, dtype=dtype), made(*shape, dtype=dtype)
            theirs = mine.clone()
            draw = (seeds, 5, 3, 0.3)
            counts = torch.arange(len(seeds)).to(device)  # of a graph, by client
            triton.dropout_add_(mine, x, *draw, counts)
            plain.plain_dropout_add_(theirs, x, *draw, counts)
            found, wanted = (form(x, *draw) for form in (triton.dropout, plain.plain_dropout))
            same = torch.equal(found, wanted) and torch.equal(mine, theirs)
            row = {"what": f"dropout of {dtype} {shape}", "same": same}
            yield row | ({} if same else {"bad": "masks or values differ"})
    for width in (48, 768):
        x, through, grad = (made(2, 5, width) for _ in range(3))
        weight, bias = made(width), made(width)
        for branch in (None, made(2, 5, width)):
            own = (x, branch, weight, bias, 1e-6, torch.float32)
            mine, theirs = triton.add_norm(*own), plain.plain_add_norm(*own)
            total = x if branch is None else theirs[0]
            rest = (total, *theirs[2:], weight)
            back = [
                form(grad, through, *rest)
                for form in (triton.add_norm_backward, plain.plain_add_norm_backward)
            ]
            pairs = zip((*mine, *back[0]), (*theirs, *back[1]), strict=True)
            apart = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs if b.numel())
            bar = width * torch.finfo(torch.float32).eps
            row = {
                "what": f"norm of {width}, {'alone' if branch is None else 'after a sum'}",
                "difference": apart,
            }
            yield row | too_large(apart, bar)


def bits(place: Place) -> Iterator[Row]:
    """Runs that must have the same tensors to the last bit."""
    for precision in ("fp32", "bf16"):
        train = f"train.precision={precision}"
        _, first = ran(place, train, "data.resident=true")
        pairs = {
            "a run twice": (first, "data.resident=true"),
            "streamed and resident images": (first, "data.resident=false"),
            "deterministic=true twice": (ran(place, train, "deterministic=true")[1], "deterministic=true"),
        }
        for what, (known, override) in pairs.items():
            same = ran(place, train, override)[1] == known
            yield {"what": what, "precision": precision, "same": same} | (
                {} if same else {"bad": "the tensors differ"}
            )


def bf16(place: Place) -> Iterator[Row]:
    """bf16 of the device against that of the CPU.

    Both round, in different orders, so they may differ by twice what bf16 differs from fp32 on the CPU.
    """
    round_of = [*TINY, *SGD, "rounds=1", "algorithm=fedavg"]
    with dropping_as_devices():
        exact, rounded = (played([*round_of, f"train.precision={p}"], HOST)[0] for p in ("fp32", "bf16"))
        there, _ = played([*round_of, "train.precision=bf16"], place.device)
    bar, found = 2 * difference(exact, rounded), difference(rounded, there)
    yield {"difference": found, "bar": bar} | too_large(found, bar)


def settings(place: Place) -> Iterator[Row]:
    """Settings that may change rounding only, with SGD: Adam takes long steps along small gradients, too."""
    alone, four = "train.group=1", ("data.partition.clients_per_domain=4", "train.batch_size=8")
    for override, common in (
        ("train.checkpointing=true", (alone,)),
        ("train.micro_batch=8", (alone,)),
        ("train.group=4", four),
        ("train.compile=true", (alone,)),
    ):
        reference, _ = ran(place, *SGD, *common, alone)
        try:
            found = difference(reference, ran(place, *SGD, *common, override)[0])
        except Exception as err:  # a setting that this machine cannot have does not end the others
            yield {"setting": override, "bad": f"{type(err).__name__}: {one_line(err)}"}
        else:
            yield {"setting": override, "difference": found} | too_large(found, TOLERANCE)


def graphs(place: Place) -> Iterator[Row]:
    """Runs with graphs of the network, which must have the tensors of runs without, and must use them."""
    for precision in ("fp32", "bf16"):
        for group in (1, 4):
            common = (f"train.precision={precision}", f"train.group={group}")
            known, _ = _with_graphs(place, *common, "train.graphs=false")
            found, made = _with_graphs(place, *common, "train.graphs=true")
            row = {"what": f"graphs for groups of {group}", "precision": precision, "same": found == known}
            row |= {"recorded": made.made, "passes": made.used} if made else {"recorded": 0, "passes": 0}
            if found != known:
                row["bad"] = "the tensors differ"
            elif made and not made.used:
                row["bad"] = "no pass could be recorded"
            yield row
    for name in place.methods:
        yield _method_with_graphs(name, place.device)


def _with_graphs(place: Place, *train: str) -> tuple[str, Any]:
    """Digest of the final tensors of four clients, and the graphs; None: there are none."""
    return _digest_and_graphs(many(place, 4, 2 * BATCH, *train), place.device)


def _digest_and_graphs(setup: Setup, device: torch.device) -> tuple[str, Any]:
    executor = InlineExecutor(setup.context, setup.weights, device=device)
    *_, last = run_rounds(setup.experiment, executor, setup.start)
    return digest(last.state.params), graphs_in(executor.worker.model)


def _method_with_graphs(name: str, device: torch.device) -> Row:
    """Three rounds of a method with graphs, where it may have them, and the same tensors without."""
    overrides = [*TINY, "rounds=3", f"algorithm={name}"]
    try:
        known, _ = _digest_and_graphs(prepared(load_config([*overrides, "train.graphs=false"])), device)
        found, made = _digest_and_graphs(prepared(load_config([*overrides, "train.graphs=auto"])), device)
    except Exception as err:  # of any kind: a method that fails must not end the list
        return {"method": name, "what": "graphs", "bad": f"{type(err).__name__}: {one_line(err)}"}
    row = {"method": name, "what": "graphs", "same": found == known, "passes": made.used if made else 0}
    return row if found == known else row | {"bad": "the tensors differ"}


# Speed


MANY = ((64, 8), (16, 64))
"""Numbers of clients, and of images of each."""

BATCH = 8
REPEATS = 3
"""Number of rounds that are timed; the median counts, because times of small operations vary by two."""


def clients(place: Place) -> Iterator[Row]:
    """Seconds of a round of LoRA in bf16 with many small clients, with and without what saves launches."""
    together, graphs = ("train.group=16", "train.graphs=false"), "train.graphs=true"
    ways: Mapping[str, tuple[tuple[str, ...], tuple[Any, ...]]] = {
        "everything and graphs": ((*together, graphs), ()),
        "everything": (together, ()),
        "plain layers and dropout": (together, (patch.object(fast_passes, "use_fewer_launches"),)),
        "a loop for each client": (
            together,
            (patch.object(MemberPasses, "_train_together", lambda *_: False),),
        ),
        "one by one with graphs": (("train.group=1", graphs), ()),
        "one by one": (("train.group=1", "train.graphs=false"), ()),
    }
    shapes = ((4, 4), (2, 8)) if place.device == HOST else MANY
    for number, images in shapes:
        for way, (train, patches) in ways.items():
            with ExitStack() as stack:
                for each in patches:
                    stack.enter_context(each)
                row = {"clients": number, "images_each": images, "what": way}
                yield row | {"seconds_per_round": _round_of(place, number, images, train)}
        row = {"clients": number, "images_each": images, "what": "plain PyTorch"}
        yield row | {"seconds_per_round": _plain_round_of(place, number, images)}


def _round_of(place: Place, number: int, images: int, train: Sequence[str]) -> float:
    """Seconds of a round, the median of three after two, in this process."""
    setup = many(place, number, images, "train.precision=bf16", f"rounds={REPEATS + 2}", *train)
    executor = InlineExecutor(setup.context, setup.weights, device=place.device)
    rounds = run_rounds(setup.experiment, executor, setup.start)
    next(rounds)
    next(rounds)
    return round(usual_seconds(lambda: next(rounds)), 4)


def _plain_round_of(place: Place, number: int, images: int) -> float:
    """Seconds of a round in plain PyTorch, as in `_round_of`: clients one after the other, and a mean."""
    device = place.device
    setup = many(place, number, images, "train.precision=bf16")
    net = _plain_network(setup, device, "bf16")
    pixels, labels = (torch.tensor(x).to(device) for x in (setup.dataset.images, setup.dataset.labels))
    live = [p for p in net.parameters() if p.requires_grad]
    start = [p.detach().clone() for p in live]

    def one_round() -> None:
        answers = []
        for client in setup.partition.clients:
            torch._foreach_copy_([p.detach() for p in live], start)
            optimizer = _plain_optimizer(live, device)
            rows = torch.tensor(client.train)[torch.randperm(len(client.train))].to(device)
            for batch in rows.split(BATCH):
                _plain_step(net, optimizer, pixels[batch], labels[batch])
            answers.append([p.detach().clone() for p in live])
        for kept, *own in zip(start, *answers, strict=True):
            kept.copy_(torch.stack(own).mean(0))
        float(start[0].sum())  # waits for the device

    one_round()
    one_round()
    return round(usual_seconds(one_round), 4)


def _plain_network(setup: Setup, device: torch.device, precision: Precision) -> Backbone:
    """The network as torch computes it; in bf16 it is stored and cast as the engine does it."""
    net = setup.context.skeleton()
    attach(net, setup.weights)
    net.to(device).train()
    net.mixed = precision == "bf16"
    set_products(device, precision)
    return net


def _plain_optimizer(live: Sequence[Tensor], device: torch.device) -> torch.optim.Optimizer:
    """The optimizer of `tuning=lora`, in one launch on CUDA."""
    return torch.optim.AdamW(live, lr=0.001, weight_decay=0, fused=device.type == "cuda")


def _plain_step(net: Backbone, optimizer: torch.optim.Optimizer, pixels: Tensor, labels: Tensor) -> Tensor:
    """One step of plain PyTorch; returns the loss."""
    x = pixels.permute(0, 3, 1, 2).float().div_(127.5).sub_(1)
    loss = torch.nn.functional.cross_entropy(net(x), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def many(place: Place, number: int, images: int, *train: str) -> Setup:
    """Rounds of LoRA with dropout, and with this number of clients and of images of each."""
    shape = (f"data.partition.clients_per_domain={number}", f"data.limit={number * images}", "data.test=1")
    return lora(place, *shape, f"train.batch_size={BATCH}", "tuning.dropout=0.1", *train)


def training(place: Place) -> Iterator[Row]:
    """Images a second and memory of one client's training, in the engine."""
    for precision in PRECISIONS:
        for resident in (True, False):
            yield trained(place, precision, resident)


def trained(place: Place, precision: Precision, resident: bool) -> Row:
    setup = lora(place, f"train.precision={precision}", f"data.resident={resident}")
    gc.collect()
    reset_peak(place.device)
    executor = InlineExecutor(setup.context, setup.weights, device=place.device)
    visits: list[CallTiming] = []
    executor.on_visit = visits.append
    list(run_rounds(setup.experiment, executor, setup.start))
    images = next(iter(setup.experiment.clients.values())).num_examples
    return {
        "precision": precision,
        "images": "resident" if resident else "streamed",
        "images_per_second": round(images / median(visit.seconds for visit in visits[-REPEATS:]), 1),
        "peak_gigabytes": peak(place.device),
    }


def lora(place: Place, *overrides: str) -> Setup:
    """Rounds of LoRA with one client; the first two warm up."""
    return prepared(load_config([*LORA, *place.size, *ONE, f"rounds={REPEATS + 2}", *overrides]))


def plain(place: Place) -> Iterator[Row]:
    """Images a second of the same training in a loop of plain PyTorch, with all images on the device."""
    for precision in PRECISIONS:
        yield plainly_trained(place, precision)


def plainly_trained(place: Place, precision: Precision) -> Row:
    """One row of `plain`; in bf16 the network is stored and cast as the engine does it."""
    device = place.device
    setup = lora(place, f"train.precision={precision}")
    rows = next(iter(setup.partition.clients)).train
    pixels = torch.from_numpy(setup.dataset.images[rows]).to(device)
    labels = torch.from_numpy(setup.dataset.labels[rows]).to(device)
    net = _plain_network(setup, device, precision)
    live = [p for p in net.parameters() if p.requires_grad]

    def one_pass() -> None:
        optimizer = _plain_optimizer(live, device)
        for batch in torch.randperm(len(rows)).to(device).split(32):
            loss = _plain_step(net, optimizer, pixels[batch], labels[batch])
        float(loss)  # waits for the device

    for _ in range(2):
        one_pass()
    return {"precision": precision, "images_per_second": round(len(rows) / usual_seconds(one_pass), 1)}


def usual_seconds(work: Callable[[], None]) -> float:
    """The median of several times."""
    return median(seconds(work) for _ in range(REPEATS))


def seconds(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


# Memory


def plan(place: Place) -> Iterator[Row]:
    """Planned memory of a client actor, measured in a new process, and the peak of its training."""
    known = trained(place, "fp32", resident=True)["peak_gigabytes"]
    setup = lora(place, "data.resident=true")
    found = measure(setup.experiment, setup.context, on_gpu=place.device.type == "cuda")
    total, planned = found.device_total, round(found.device_bytes / 1e9, 3)
    row = {
        "planned_gigabytes": planned,
        "peak_gigabytes": known,
        "actors_on_this_gpu": actors_on(found.device_free, found.device_bytes, mps_runs()) if total else None,
        "measured_on": found.device,
    }
    if place.device.type not in found.device:
        row["bad"] = f"the client was measured on {found.device}"
    elif known is not None and known > planned:
        row["bad"] = "the peak is above the plan"
    yield row


def memory(place: Place) -> Iterator[Row]:
    """Too little memory: the error, its advice, and what is left on the device afterwards."""
    gc.collect()
    reset_peak(place.device)
    _, known = ran(place, "train.group=1")
    gc.collect()
    before, most = allocated(place.device), peak_memory(place.device)
    said = ""
    with short_of_memory(place.device, most):
        try:
            ran(place, "train.group=1")
        except DeviceMemoryError as err:
            said = one_line(err)
    gc.collect()
    left = None if before is None else (allocated(place.device) or 0) - before
    row = {"what": "a call that fails", "message": said, "bytes_left": left}
    if "what needs less: train.micro_batch" not in said:
        row["bad"] = "no error that advises a smaller train.micro_batch"
    elif left is not None and left > LEFT:
        row["bad"] = "tensors of the failed call are still on the device"
    yield row
    again = ran(place, "train.group=1")[1] == known
    yield {"what": "the same run afterwards", "same": again} | ({} if again else {"bad": "tensors differ"})
    yield planned_short(place, most)


def planned_short(place: Place, most: int | None) -> Row:
    """Advice of the plan if a whole device is too small for a client."""
    setup = prepared(load_config([*LORA, *place.size, *FEW, "rounds=1", "train.group=1"]))
    said = ""
    with short_of_memory(place.device, most):
        try:
            largest_client(setup.experiment, setup.context, place.device, setup.weights)
        except ResourceError as err:
            said = one_line(err)
    row = {"what": "a plan that does not fit", "message": said}
    return row if "what would fit: train." in said else row | {"bad": "no setting that would fit is named"}


@contextmanager
def short_of_memory(device: torch.device, most: int | None) -> Iterator[None]:
    """Let this process have three fifths of the memory that a run took.

    Torch limits its own allocator on a GPU. On other devices training with more than 16 images raises.

    Args:
        device: The device.
        most: Peak of the run in bytes; None: not known.
    """
    limit = getattr(torch.get_device_module(device), "set_per_process_memory_fraction", None)
    if limit is not None and most and (total := total_memory(device)):
        reset_peak(device)  # gives unused memory back, which would serve above the limit
        limit(0.6 * most / total, device)
        try:
            yield
        finally:
            limit(1.0, device)
        return
    forward = Backbone.forward

    def limited(self: Backbone, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and len(x) > 16:
            raise torch.OutOfMemoryError("out of memory, as pretended")
        return forward(self, x, *args, **kwargs)

    with patch.object(Backbone, "forward", limited):
        yield


def allocated(device: torch.device) -> int | None:
    """Bytes of all tensors on a device; None where torch cannot say."""
    query = getattr(torch.get_device_module(device), "memory_allocated", None)
    return None if query is None or device == HOST else int(query(device))


def peak(device: torch.device) -> float | None:
    """Largest memory that torch reserved on the device since `reset_peak`, in gigabytes; None on the CPU."""
    there = peak_memory(device)
    return None if there is None else round(there / 1e9, 3)


# Client actors


def actors(place: Place) -> Iterator[Row]:
    """Rounds in client actors, whose number must not change a bit; the first is a default run."""
    if not has_ray():
        yield {"skipped": "Ray is not installed"}
        return
    yield {"actors": "a default run"} | shared(["data.limit=60", "rounds=1"])
    gpus = f"cluster.num_gpus={0 if place.device == HOST else 1}"
    clients = ("data.partition.clients_per_domain=4", "rounds=3", "cluster=local", gpus)
    first = ""
    for number in (1, 2, 4, "auto"):
        share = "auto" if number == "auto" else 0 if place.device == HOST else 1 / float(number)
        many = (f"cluster.actors={number}", f"cluster.gpus_per_actor={share}")
        row = shared([*LORA, *place.size, *ONE, *clients, *many])
        first = first or row["sha256"]
        differs = {"bad": "the tensors are not those with 1 actor"} if row["sha256"] != first else {}
        yield {"actors": number} | row | differs


def shared(overrides: Sequence[str]) -> Row:
    """Seconds of the last round of an experiment on Ray, its digest, and what the command said."""
    from rayfed.engine.session import launch

    said: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        config = load_config([*overrides, "cluster.dashboard=false", f"output={folder}"])
        with launch(prepared(config), Path(folder), said.append) as rows:
            *rounds, last = rows
    row = {"seconds_per_round": round(rounds[-1]["seconds"], 3), "sha256": last["sha256"]}
    return row | {"said": [text for text in said if not text.startswith("actors ready")]}


PARTS: Mapping[str, Callable[[Place], Iterator[Row]]] = {
    "kernels": kernels,
    "methods": methods,
    "texts": texts,
    "bits": bits,
    "bf16": bf16,
    "settings": settings,
    "graphs": graphs,
    "clients": clients,
    "training": training,
    "plain": plain,
    "plan": plan,
    "memory": memory,
    "actors": actors,
}


# What is shown at the end


def wrong(found: Row) -> dict[str, list[str]]:
    """Faults by part."""
    return {
        part: [f"{name_of(row)}: {row['bad']}" for row in rows if "bad" in row]
        for part, rows in found["parts"].items()
    }


def name_of(row: Row) -> str:
    """Subject of a row: its values before the first number that was found."""
    known = ("method", "model", "what", "setting", "precision", "images", "actors")
    return " ".join(str(row[key]) for key in known if key in row) or "this part"


def worst(found: Row) -> list[Row]:
    """The five methods with the largest difference, beginning with the largest."""
    rows = [row for row in found["parts"].get("methods", ()) if "difference" in row]
    return sorted(rows, key=lambda row: -row["difference"])[:5]


def summary(found: Row) -> str:
    """The block for an issue: the machine, the verdict of each part, and the largest differences."""
    lines = [f"{key}: {value}" for key, value in found["machine"].items()]
    for part, bad in wrong(found).items():
        rows = found["parts"][part]
        skipped = [row["skipped"] for row in rows if "skipped" in row]
        verdict = "; ".join(bad or skipped) or f"ok ({len(rows)})"
        lines.append(f"{part}: {verdict}")
    lines += [f"difference {row['difference']:.1e}: {row['method']}" for row in worst(found)]
    return "\n".join(["```", f"gpu-check, {found.get('seconds', 0)} s", *lines, "```"])


def page(text: str, found: Row) -> str:
    """The page with the results of this check."""
    parts, machine = found["parts"], found["machine"]
    loop = [row for row in parts.get("plain", ()) if "precision" in row]
    speed = {row["precision"]: row["images_per_second"] for row in loop}
    rows = [
        f"| {row['precision']} | {row['images']} | {row['images_per_second']} | "
        f"{row['images_per_second'] / speed[row['precision']]:.2f} | {row['peak_gigabytes']} |"
        for row in parts.get("training", ())
        if row.get("precision") in speed
    ]
    shares = [
        f"{row['seconds_per_round']} s with {row['actors']}"
        for row in parts.get("actors", ())[1:]
        if "seconds_per_round" in row
    ]
    largest = [f"{row['method']} {row['difference']:.1e}" for row in worst(found)]
    where = f"{machine['device']}, driver {machine['driver']}, torch {machine['torch']}"
    lines = [f"`make gpu-check` on {where}."]
    if largest:
        lines.append(f"Largest relative differences of a tensor from the CPU: {', '.join(largest)}.")
    many = [
        f"| {row['clients']} | {row['images_each']} | {row['what']} | {row['seconds_per_round']} |"
        for row in parts.get("clients", ())
        if "seconds_per_round" in row
    ]
    if shares:
        mps = "with" if machine["mps"] else "without"
        lines.append(f"A round of four clients: {', '.join(shares)} actors, {mps} MPS.")
    lines += [
        f"Plan for one actor: {row['planned_gigabytes']} GB; peak of torch in a run: "
        f"{row['peak_gigabytes']} GB; {row['actors_on_this_gpu']} such actors fit."
        for row in parts.get("plan", ())
        if "planned_gigabytes" in row
    ]
    lines += [f"Not as it should be: {part}: {text}." for part, bad in wrong(found).items() for text in bad]
    if many:
        lines += ["", "| clients | images each | bf16 | seconds a round |", "|---:|---:|---|---:|", *many]
    if rows:
        lines += [
            "",
            "| precision | images | images a second | share of plain PyTorch | peak memory, GB |",
            "|---|---|---|---|---|",
            *rows,
        ]
    return replaced(text, "check", "\n".join(lines))


def replaced(text: str, mark: str, block: str) -> str:
    """A page with this block between its two comments of that mark."""
    new = f"<!-- {mark} -->\n{block}\n<!-- /{mark} -->"
    return re.sub(rf"<!-- {mark} -->.*<!-- /{mark} -->", lambda _: new, text, flags=re.DOTALL)


if __name__ == "__main__":
    sys.exit(main())
