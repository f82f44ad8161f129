"""The environments of the programs, and the commands that run them.

pip installs each library into a separate virtual environment. This also sees the packages of the environment
that runs the command, such as torch; those of the new one come first. RayFed and plain PyTorch run in the
environment of the command itself.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Side:
    """A program, and what it needs.

    Attributes:
        name: Name of the side.
        program: Module in `benchmarks.rivals.programs`.
        package: Requirement that pip installs; empty: what RayFed needs is enough.
        options: Of pip.
        launcher: What starts the module, between the interpreter and `-m`.
        shares: Whether the loop of `local_training` is a part of its code.
        shows: Packages whose versions are shown.
    """

    name: str
    program: str
    package: str = ""
    options: tuple[str, ...] = ()
    launcher: tuple[str, ...] = ()
    shares: bool = True
    shows: tuple[str, ...] = ()


TWO_PROCESSES = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
SIDES = {
    side.name: side
    for side in (
        Side("plain", "plain", shows=("torch",)),
        Side("rayfed", "with_rayfed", shares=False, shows=("ray",)),
        Side(
            *("pfl", "with_pfl", "pfl[pytorch]==0.6.0"), launcher=TWO_PROCESSES, shares=False, shows=("pfl",)
        ),
        Side("flower", "with_flower", "flwr[simulation]==1.42.0", shows=("flwr", "ray")),
        Side(
            *("blazefl", "with_blazefl", "blazefl==2.0.3"),
            options=("--no-deps", "--ignore-requires-python"),
            shows=("blazefl",),
        ),
    )
}
"""Every BlazeFL asks for Python 3.12; the code of 2.0.3 runs on 3.11, and needs nothing but torch."""


def install(side: Side, folder: Path) -> Path:
    """Make the environment of a side, unless it is there.

    Returns:
        Its interpreter.

    Raises:
        RuntimeError: pip failed; with the last line that it wrote.
    """
    if not side.package:
        return Path(sys.executable)
    python = folder / side.name / "bin" / "python"
    done = folder / side.name / "installed.txt"
    if done.exists() and done.read_text() == side.package:
        return python
    venv.create(folder / side.name, with_pip=True, clear=True)
    own = Path(sysconfig.get_path("purelib", vars={"base": str(folder / side.name)}))
    (own / "of_the_command.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [str(python), "-m", "pip", "install", "--quiet", *side.options, side.package]
    made = subprocess.run(pip, capture_output=True, text=True)
    if made.returncode:
        raise RuntimeError(f"{side.package} was not installed: {made.stderr.strip().splitlines()[-1]}")
    done.write_text(side.package)
    return python


def command(side: Side, python: Path, folder: Path, rounds: int, state: Path | None) -> list[str]:
    """The command line of a program. Args: as of the programs."""
    module = ["-m", f"benchmarks.rivals.programs.{side.program}", str(folder), str(rounds)]
    return [str(python), *side.launcher, *module, *(["--state", str(state)] if state else [])]


def variables() -> dict[str, str]:
    """The environment variables of all programs: one thread, and this repository on the path."""
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "passive",
        "FLWR_TELEMETRY_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }


def versions(side: Side, python: Path) -> dict[str, str]:
    """Versions of the packages of a side, as its interpreter sees them."""
    if not side.package:
        return {name: version(name) for name in side.shows}
    ask = "import sys; from importlib.metadata import version; print(*map(version, sys.argv[1:]))"
    found = subprocess.run([str(python), "-c", ask, *side.shows], capture_output=True, text=True, check=True)
    return dict(zip(side.shows, found.stdout.split(), strict=True))
