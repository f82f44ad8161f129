"""Refuses output folders in which no run may be written: system folders, the home and current folder."""

from __future__ import annotations

import os
from pathlib import Path

from rayfed.errors import ConfigError

SHARED = (
    *(
        "/bin",
        "/boot",
        "/dev",
        "/etc",
        "/home",
        "/lib",
        "/lib32",
        "/lib64",
        "/media",
        "/mnt",
        "/opt",
        "/proc",
    ),
    *("/root", "/run", "/sbin", "/srv", "/sys", "/tmp", "/usr", "/var", "/Applications", "/Library"),
    *("/System", "/Users", "/private", "/private/tmp", "/private/var", "/var/tmp", "/dev/shm"),
)
"""Folders with files of others; a folder inside them may be used for a run."""

SYSTEM = (
    *("/bin", "/boot", "/etc", "/lib", "/lib32", "/lib64", "/proc", "/sbin", "/sys", "/System"),
    *("/usr/bin", "/usr/include", "/usr/lib", "/usr/lib64", "/usr/libexec", "/usr/sbin", "/private/etc"),
)
"""Folders of the operating system, in which no folder may be used either."""


def check_own_folder(path: Path) -> None:
    """Refuse the root, a system folder, the home folder and the current folder as the folder of a run.

    Raises:
        ConfigError: It is one of these; the message says which.
    """
    lexical = Path(os.path.normpath(path.absolute()))
    for place in dict.fromkeys((lexical, _real(lexical))):
        if what := _owner(place):
            raise ConfigError(
                f"output: {str(path)!r} is {what}; a run needs a folder of its own, such as runs/mine"
            )


def _owner(place: Path) -> str:
    """Description of the folder if it may not be used for a run; else empty."""
    here = Path.cwd()
    home = _home()
    if place == Path(place.anchor):
        return "the root of the file system"
    if place == here:
        return "the current folder"
    if home is not None and place == home:
        return "your home folder"
    if place in here.parents or (home is not None and place in home.parents):
        return "a folder that the current folder or your home folder is in"
    if str(place) in SHARED or any(place.is_relative_to(folder) for folder in SYSTEM):
        return "a folder of the system"
    return ""


def _home() -> Path | None:
    try:
        return Path.home()
    except RuntimeError:
        return None


def _real(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError):
        return path
