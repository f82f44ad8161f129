"""Finds NVIDIA's multi-process service (MPS), which lets several processes compute on a GPU at once."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import psutil

FOLDER = "CUDA_MPS_PIPE_DIRECTORY"
DEFAULT_FOLDER = "/tmp/nvidia-mps"  # CUDA's own default
CONTROL = "control"
"""Socket of the daemon in its folder, at which CUDA asks for a server."""

DAEMON = "nvidia-cuda-mps-control"
SHOWN = 15
"""Characters of a process name that Linux keeps."""

CLIENTS = 48
"""Processes that MPS serves on a GPU at the same time: NVIDIA, Multi-Process Service, section Client-Server
Connection Limits, has 48 client contexts on a device for Volta and later; newer releases may allow more."""


def mps_runs() -> bool:
    """Whether the control daemon of MPS answers where CUDA looks for it, or runs on this machine.

    In a container, a daemon on the host is no process that can be seen, but its folder is mounted. CUDA uses
    the daemon in every process without being asked, and so do client actors. RayFed sets no share of its
    threads (`CUDA_MPS_ACTIVE_THREAD_PERCENTAGE`), because libraries choose kernels by their number, and the
    last bits of a result would depend on how many actors share a GPU.
    """
    folder = Path(os.environ.get(FOLDER, DEFAULT_FOLDER))
    if not folder.is_dir():
        return False
    return _answers(folder / CONTROL) or any(
        (process.info["name"] or "")[:SHOWN] == DAEMON[:SHOWN] for process in psutil.process_iter(["name"])
    )


def _answers(path: Path) -> bool:
    """Whether a process accepts connections at a socket of the file system."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as control:
        control.settimeout(1.0)
        try:
            control.connect(str(path))
        except OSError as err:
            return isinstance(err, TimeoutError | BlockingIOError)  # it is there, with other work
    return True
