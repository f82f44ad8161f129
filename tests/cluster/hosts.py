"""Hosts made of namespaces: each with a network, processes, mounts, /tmp, /dev/shm and a home of its own.

They are connected by a bridge, which the machine itself cannot reach.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.conftest import ROOT

NEEDED = ("ip", "unshare", "nsenter", "mount")
SPACES = ("-n", "-m", "-p", "-u", "-i")
"""Network, mounts, processes, names and shared memory, as `unshare` and `nsenter` name them."""

NETWORK = "10.99.0"
HOME = "/home/me"

INIT = """
set -e
mount --make-rprivate /
hostname {name}
mount -t tmpfs none /home && mkdir {home}
mount --bind {seen} /mnt
mount -t tmpfs -o mode=1777 none /tmp
mount -t tmpfs -o mode=1777,size=1g none /dev/shm
mkdir -p {seen} && mount --bind /mnt {seen} && umount -l /mnt
ip link set lo up
echo ready
exec sleep 100000
"""
"""A host's first process. What a test hands over lies in the folder `seen`, at one place on all hosts."""


class Host:
    """A host of the network.

    Attributes:
        name: Its name.
        address: Its address.
    """

    def __init__(self, number: int, seen: Path, switch: int) -> None:
        self.name = f"h{number}"
        self.address = f"{NETWORK}.{10 + number}"
        self._port = f"w{number}"
        self._switch = switch
        first = INIT.format(name=self.name, home=HOME, seen=seen)
        self._outer = subprocess.Popen(
            ["unshare", *SPACES, "--fork", "--kill-child", "--mount-proc", "bash", "-c", first],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._outer.stdout is not None
        assert self._outer.stdout.readline() == "ready\n"
        children = Path(f"/proc/{self._outer.pid}/task/{self._outer.pid}/children").read_text().split()
        self._pid = int(children[0])
        peer = ["type", "veth", "peer", "name", "eth0", "netns", str(self._pid)]
        in_namespace(switch, "ip", "link", "add", self._port, *peer)
        in_namespace(switch, "ip", "link", "set", self._port, "up", "master", "br0")
        in_namespace(self._pid, "ip", "addr", "add", f"{self.address}/24", "dev", "eth0")
        in_namespace(self._pid, "ip", "link", "set", "eth0", "up")

    def start(self, command: str, **environment: str) -> subprocess.Popen[str]:
        """Start a command of the shell there, without waiting for it."""
        settings = {
            "HOME": HOME,
            "TMPDIR": "/tmp",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "RAY_USAGE_STATS_ENABLED": "0",
            **environment,
        }
        pairs = [f"{key}={value}" for key, value in settings.items()]
        return subprocess.Popen(
            [
                "nsenter",
                "-t",
                str(self._pid),
                *SPACES,
                "env",
                "-i",
                *pairs,
                "bash",
                "-c",
                f"cd {HOME}; {command}",
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, command: str, timeout: float = 240, **environment: str) -> tuple[int, str]:
        """Run a command of the shell there; returns its exit code and what it wrote."""
        process = self.start(command, **environment)
        try:
            said, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            said, _ = process.communicate()
            raise AssertionError(f"{command} did not end within {timeout} s:\n{said}") from None
        return process.returncode, said

    def unplug(self) -> None:
        """Take its cable out."""
        in_namespace(self._switch, "ip", "link", "set", self._port, "down")

    def received(self) -> int:
        """Bytes that came over its cable."""
        text = in_namespace(self._pid, "cat", "/proc/net/dev")
        line = next(line for line in text.splitlines() if "eth0:" in line)
        return int(line.split("eth0:")[1].split()[0])

    def power_off(self) -> None:
        """End all of its processes at once."""
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        self._outer.wait()
        if self._outer.stdout:
            self._outer.stdout.close()


def in_namespace(process: int, *command: str) -> str:
    """Run a command in the network of a process; returns what it wrote."""
    done = subprocess.run(
        ["nsenter", "-t", str(process), "-n", *command], check=True, capture_output=True, text=True
    )
    return done.stdout


@contextmanager
def hosts(count: int, seen: Path) -> Iterator[list[Host]]:
    """Hosts h1, h2, ... while the block runs.

    Args:
        seen: A folder that all of them see.
    """
    bridge = "ip link add br0 type bridge && ip link set br0 up && echo ready && exec sleep 100000"
    switch = subprocess.Popen(["unshare", "-n", "bash", "-c", bridge], stdout=subprocess.PIPE, text=True)
    assert switch.stdout is not None
    assert switch.stdout.readline() == "ready\n"
    made: list[Host] = []
    try:
        made.extend(Host(number, seen, switch.pid) for number in range(1, count + 1))
        yield made
    finally:
        for host in made:
            host.power_off()
        switch.kill()
        switch.wait()
        switch.stdout.close()


TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "f" * 64}


def start_ray(machines: list[Host], **environment: str) -> str:
    """Start Ray on hosts as docs/cluster.md says, the first of which is the head; returns its address."""
    head, *others = machines
    address = f"{head.address}:6379"
    folder = "mkdir -m 700 /tmp/private && ray start --temp-dir=/tmp/private/ray --num-cpus=1"
    settings = {**TOKEN, **environment}
    code, said = head.run(f"{folder} --head --node-ip-address={head.address} --port=6379", **settings)
    assert code == 0, said
    started = [
        host.start(f"{folder.split(' --temp-dir')[0]} --num-cpus=1 --address={address}", **settings)
        for host in others
    ]
    for process in started:
        said, _ = process.communicate(timeout=120)
        assert process.returncode == 0, said
    deadline = time.monotonic() + 60
    count = (
        "import ray; ray.init('auto', logging_level=50); print('alive', sum(n['Alive'] for n in ray.nodes()))"
    )
    while f"alive {len(machines)}" not in head.run(f"python -c {shlex.quote(count)}", **settings)[1]:
        assert time.monotonic() < deadline, "not all hosts joined"
    return address
