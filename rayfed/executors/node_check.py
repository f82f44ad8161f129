"""Checks the nodes of a Ray cluster before a run: code, versions, hardware, and room for the data.

A node with other code or another version computes other numbers and says nothing; so such a node ends a run
before its first actor starts.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import re
import shutil
import socket
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from io import BytesIO
from pathlib import Path
from pickle import Unpickler
from types import ModuleType
from typing import Any

import ray
from ray import cloudpickle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayfed.errors import ConfigError, printable

SOURCES = ("rayfed", "algorithms", "tune")
"""Packages that must be the same on all nodes, to the byte."""

COMPUTING = (
    "torch",
    "torchvision",
    "numpy",
    "timm",
    "open_clip_torch",
    "peft",
    "transformers",
    "scikit-learn",
    "safetensors",
)
"""Distributions whose versions can change a number, or what can be read."""

SAMPLE = 16 * 2**20
"""Bytes that a node sends to measure its connection."""

NO_MODULE = "missing"


@dataclass(frozen=True, kw_only=True)
class NodeFacts:
    """The facts of a node by which it can run clients, or cannot.

    Attributes:
        node: Id of the node in Ray.
        host: Its host name.
        address: Its IP address.
        code: SHA-256 hex digest of the sources of RayFed and its methods there; empty: it is not known.
        modules: The same of each module of the user, by its name; `missing`: the node cannot import it.
        versions: Versions of Python and of packages that compute, by name.
        processor: Name of the processor.
        gpu: Type of its GPUs as Ray knows it; empty: it has none, or Ray does not know it.
        data: Bytes of the prepared data set there; None: the file is not there.
        disk: Free bytes on the disk for it.
        memory_disk: Free bytes in /dev/shm, where Ray keeps objects; None: there is no such folder.
        clock: Seconds by which its clock is ahead of this machine's; None: not measured.
        bytes_per_second: Speed at which it sends to this node; None: not measured.
        problem: Why it did not say any of this, in one line; empty: it did.
    """

    node: str
    host: str
    address: str
    code: str = ""
    modules: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    processor: str = ""
    gpu: str = ""
    data: int | None = None
    disk: int = 0
    memory_disk: int | None = None
    clock: float | None = None
    bytes_per_second: float | None = None
    problem: str = ""

    @property
    def name(self) -> str:
        """The name of the node in messages."""
        return f"node {self.host} ({self.address})"

    @property
    def row(self) -> dict[str, str]:
        """The facts of the node in environment.json."""
        where = {"host": self.host, "address": self.address, "processor": self.processor, "gpu": self.gpu}
        return {**where, **self.versions}


def facts_here(node: str, data: Path, modules: Sequence[str] = ()) -> NodeFacts:
    """The facts of the machine on which this is called.

    Args:
        node: Id of the node in Ray.
        data: The file of the prepared data set.
        modules: Modules of the user that clients need.
    """
    folder = next(parent for parent in (data, *data.parents) if parent.exists())
    shared = Path("/dev/shm")
    return NodeFacts(
        node=node,
        host=socket.gethostname(),
        address="",
        code=digest_of_packages(SOURCES),
        modules={name: digest_of_module(name) for name in modules},
        versions={"python": platform.python_version(), **versions()},
        processor=processor(),
        data=data.stat().st_size if data.exists() else None,
        disk=shutil.disk_usage(folder).free,
        memory_disk=shutil.disk_usage(shared).free if shared.exists() else None,
    )


def versions() -> dict[str, str]:
    """Installed versions of the packages that compute; one that is not installed is left out."""
    found = {}
    for name in COMPUTING:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def processor() -> str:
    """Name of the processor as the system has it, or its architecture."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match.group(1) if match else platform.processor() or platform.machine()


def digest_of_packages(packages: Sequence[str]) -> str:
    """SHA-256 hex digest of the names and the contents of all Python files of packages."""
    digest = hashlib.sha256()
    for package in packages:
        spec = importlib.util.find_spec(package)
        for folder in spec.submodule_search_locations or () if spec else ():
            for file in sorted(Path(folder).rglob("*.py")):
                content = file.read_bytes()
                digest.update(f"{package}/{file.relative_to(folder).as_posix()} {len(content)}\n".encode())
                digest.update(content)
    return digest.hexdigest()


def digest_of_module(name: str) -> str:
    """SHA-256 hex digest of the source of a module; `missing` where it cannot be found."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):
        spec = None
    file = Path(spec.origin) if spec and spec.origin else None
    return hashlib.sha256(file.read_bytes()).hexdigest() if file and file.is_file() else NO_MODULE


def user_modules(*sent: Any) -> list[str]:
    """Names of the modules of a user that a process must import to receive these objects, sorted.

    Modules of the user which these import belong to them. Objects of a program or a notebook travel with
    their code and need no module.
    """
    named: set[str] = set()

    class Names(Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            named.add(module)
            return super().find_class(module, name)

    Names(BytesIO(cloudpickle.dumps(sent))).load()
    found: set[str] = set()
    waiting = [name for name in named if _is_of_user(name)]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += _imported_by(sys.modules[name])
    return sorted(found)


def _imported_by(module: ModuleType) -> Iterator[str]:
    for value in list(vars(module).values()):
        name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
        if isinstance(name, str) and _is_of_user(name):
            yield name


def _is_of_user(name: str) -> bool:
    """Whether a module is neither RayFed's nor one of an installed package or of Python."""
    file = getattr(sys.modules.get(name), "__file__", None)
    if name == "__main__" or name.partition(".")[0] in SOURCES or not file:
        return False
    paths = sysconfig.get_paths()
    libraries = {paths[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")}
    return not any(Path(file).is_relative_to(folder) for folder in libraries)


def look_at_nodes(
    data: Path, modules: Sequence[str], timeout: float, measure: bool = False
) -> list[NodeFacts]:
    """Ask all nodes that can run a client, and this one, for their facts.

    Args:
        data: The file of the prepared data set, at the same place on all nodes.
        modules: Modules of the user that clients need.
        timeout: Seconds in which a node must answer.
        measure: Also measure clocks and connections.
    """
    own = ray.get_runtime_context().get_node_id()
    nodes = [
        node
        for node in ray.nodes()
        if node["Alive"] and (node["NodeID"] == own or node["Resources"].get("CPU", 0) > 0)
    ]
    nodes.sort(key=lambda node: (node["NodeManagerAddress"], node["NodeID"]))
    asked = [on_node(node["NodeID"], facts_here).remote(node["NodeID"], data, modules) for node in nodes]
    ray.wait(asked, num_returns=len(asked), timeout=timeout)
    found = [_answer(node, reference, timeout) for node, reference in zip(nodes, asked, strict=True)]
    return [_measured(facts) if measure and not facts.problem else facts for facts in found]


def on_node(node: str, function: Any) -> Any:
    """The function as a remote one, which runs on this node and takes none of its resources.

    It has the name of the function in Ray's dashboard. A node that is lost is not waited for.
    """
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(function).options(
        num_cpus=0, max_retries=0, scheduling_strategy=there, name=f"rayfed:{function.__name__}"
    )


def _answer(node: Mapping[str, Any], reference: Any, timeout: float) -> NodeFacts:
    """The facts of a node, or why it has none."""
    known = NodeFacts(
        node=node["NodeID"],
        host=node["NodeManagerHostname"],
        address=node["NodeManagerAddress"],
        gpu=node.get("Labels", {}).get("ray.io/accelerator-type", ""),
    )
    try:
        facts: NodeFacts = ray.get(reference, timeout=0)
    except ray.exceptions.GetTimeoutError:
        ray.cancel(reference, force=True)
        return replace(known, problem=f"it did not answer within {timeout:g} s (cluster.connect_timeout)")
    except Exception as err:  # Ray raises the errors of a node as its own or as those of the task
        return replace(known, problem=_why(err))
    return replace(facts, host=known.host, address=known.address, gpu=known.gpu)


def _why(error: Exception) -> str:
    """Why a node could not run the check: most often RayFed is not installed there."""
    text = str(error)
    if match := re.search(r"ModuleNotFoundError: (No module named '[\w.]+')", text):
        return f"its Python cannot import what a run needs ({match.group(1)}); install the same environment"
    last = [line for line in text.splitlines() if line.strip()]
    return printable(last[-1] if last else type(error).__name__)


def _measured(facts: NodeFacts) -> NodeFacts:
    """The facts with the clock and the connection of a node whose process runs already."""
    before = time.time()
    there = ray.get(on_node(facts.node, clock).remote())
    after = time.time()
    began = time.perf_counter()
    ray.get(on_node(facts.node, sample).remote(SAMPLE))
    seconds = time.perf_counter() - began
    return replace(facts, clock=there - (before + after) / 2, bytes_per_second=SAMPLE / seconds)


def clock() -> float:
    """The time of the machine where this runs, in seconds."""
    return time.time()


def sample(size: int) -> bytes:
    """So many bytes, which nothing on the way can make fewer."""
    return os.urandom(size)


def check_nodes(nodes: Sequence[NodeFacts], own: NodeFacts) -> None:
    """Check that all nodes have the code and the versions of this process.

    Raises:
        ConfigError: A node has not, or did not say; a part of the message for each.
    """
    if problems := problems_of(nodes, own):
        raise ConfigError(f"cluster.address: {'; '.join(problems)}")


def problems_of(nodes: Sequence[NodeFacts], own: NodeFacts) -> list[str]:
    """A line for each node that cannot compute what this process would."""
    return [f"{node.name}: {why}" for node in nodes if (why := "; ".join(_differences(node, own)))]


def _differences(node: NodeFacts, own: NodeFacts) -> Iterator[str]:
    if node.problem:
        yield node.problem
        return
    if node.code != own.code:
        yield (
            f"its sources of RayFed differ from those of this command ({node.code[:8]}, here "
            f"{own.code[:8]}); install the same version there"
        )
    for name, digest in own.modules.items():
        there = node.modules.get(name, NO_MODULE)
        if there == NO_MODULE:
            yield f"it cannot import your module {name!r}; `ray start` there needs its folder in PYTHONPATH"
        elif there != digest:
            yield f"its file of your module {name!r} differs from the one here"
    names = sorted({*own.versions, *node.versions})
    differing = [
        f"{name} {node.versions.get(name, NO_MODULE)}, here {own.versions.get(name, NO_MODULE)}"
        for name in names
        if node.versions.get(name) != own.versions.get(name)
    ]
    if differing:
        yield f"other versions ({'; '.join(differing)})"


def check_same_hardware(nodes: Sequence[NodeFacts], on_gpu: bool) -> None:
    """Check that clients compute on one kind of processor, or of GPU, so that placement changes no bit.

    Args:
        nodes: The nodes that can run a client.
        on_gpu: Clients compute on GPUs.

    Raises:
        ConfigError: There are several kinds; names a node of each.
    """
    kinds: dict[str, list[str]] = {}
    for node in nodes:
        kinds.setdefault(node.gpu if on_gpu else node.processor, []).append(node.host)
    if len(kinds) > 1:
        what = "GPUs" if on_gpu else "processors"
        listed = "; ".join(f"{kind or 'unknown'} on {', '.join(hosts)}" for kind, hosts in kinds.items())
        raise ConfigError(
            f"cluster.mixed_hardware: the nodes have several kinds of {what} ({listed}), which round "
            f"differently, so that results would depend on where a client ran; use nodes of one kind, or set "
            f"cluster.mixed_hardware=true"
        )
