"""A Ray head node of our own, started as the documentation does, with a token."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

TOKEN = "0" * 32


@dataclass(frozen=True)
class HeadNode:
    """Where it is, and the environment of whoever uses it."""

    address: str
    dashboard: str
    env: dict[str, str]


def ray_command() -> list[str]:
    beside = Path(sys.executable).with_name("ray")
    return [str(beside)] if beside.exists() else ["ray"]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@contextmanager
def head_node() -> Iterator[HeadNode]:
    """Two CPUs; ends with the block."""
    port, dashboard, agent = free_port(), free_port(), free_port()  # Ray's own may be those of another test
    url = f"http://127.0.0.1:{dashboard}"
    env = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN, "RAY_API_SERVER_ADDRESS": url}
    env.pop("RAY_ADDRESS", None)
    command = [*ray_command(), "start", "--head", "--block", f"--port={port}", "--num-cpus=2"]
    head = subprocess.Popen(
        [*command, f"--dashboard-port={dashboard}", f"--dashboard-agent-listen-port={agent}"],
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield HeadNode(f"127.0.0.1:{port}", url, env)
    finally:
        head.terminate()
        head.wait(30)
