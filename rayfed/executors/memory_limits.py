"""Free memory of this process: of the machine, or of the smallest control group in which it runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

OWN_MEMORY = 0.7
"""Share of the memory that Ray leaves to actors; the rest is for its object store."""

GROUPS = Path("/proc/self/cgroup")
MOUNTED = Path("/sys/fs/cgroup")


def machine_memory() -> float:
    """Free memory in bytes as Ray sees it: of the machine, or of the outermost control group."""
    return min([_available(), *_free_of(MOUNTED), *_free_of(MOUNTED / "memory")])


def free_memory(groups: Path = GROUPS, mounted: Path = MOUNTED) -> float:
    """Free memory in bytes of this process.

    Slurm, systemd and containers limit memory by control groups. The limit of every group around the own one
    holds, too.

    Args:
        groups: The file in which the kernel names the groups of this process.
        mounted: Folder in which the groups are, of version 2, or of version 1 with a folder `memory`.
    """
    limits = [_available(), *_free_of(mounted), *_free_of(mounted / "memory")]
    for folder in own_groups(groups, mounted):
        limits += _free_of(folder)
    return max(min(limits), 0.0)


def own_groups(groups: Path = GROUPS, mounted: Path = MOUNTED) -> Iterator[Path]:
    """The control groups of this process that can limit memory, each before those around it."""
    try:
        lines = groups.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        roots = [mounted / "memory"] if controllers else [mounted, mounted / "unified"]
        own = Path(path.lstrip("/"))
        for root in roots:
            yield from (root / part for part in (own, *own.parents))


def _available() -> float:
    import psutil

    return float(psutil.virtual_memory().available)


def _free_of(group: Path) -> Iterator[float]:
    """Bytes that a group may still use, of both versions; nothing where it has no limit.

    What it holds of files counts as free, because the kernel gives it up before it refuses memory.
    """
    for limit, used, cached in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        with contextlib.suppress(OSError, ValueError):  # there is no such file, or it says `max`
            free = float((group / limit).read_text()) - float((group / used).read_text())
            yield free + _cached(group / "memory.stat", cached)


def _cached(file: Path, name: str) -> float:
    with contextlib.suppress(OSError, ValueError):
        for line in file.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return float(value)
    return 0.0
