"""Runs on several hosts: the first, as documented; nodes that would compute otherwise; a lost head."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from tests.cluster.hosts import NEEDED, TOKEN, hosts, start_ray
from tests.conftest import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can make namespaces"),
    pytest.mark.skipif(
        any(shutil.which(name) is None for name in NEEDED), reason=f"needs {', '.join(NEEDED)}"
    ),
]

PLAIN = "algorithm=fedavg figures=false tensorboard=false"
SMALL = f"{PLAIN} rounds=1"


@pytest.fixture
def seen(tmp_path_factory):
    """A folder that all hosts see. It is not below /tmp, which each host has for itself."""
    folder = Path("/var/tmp") / f"rayfed-cluster-{os.getpid()}"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


def digest_in(said: str) -> str:
    found = re.search(r"tensors sha256 ([0-9a-f]{16})", said)
    assert found, said
    return found.group(1)


def read_until(command: subprocess.Popen[str], wanted: str) -> str:
    """All that a command writes until a line has the wanted text."""
    assert command.stdout is not None
    said = ""
    for line in command.stdout:
        said += line
        if re.search(wanted, line):
            return said
    raise AssertionError(said)


def test_the_first_run_uses_all_hosts_whose_caches_are_empty_and_gives_the_bytes_of_one_process(seen):
    with hosts(3, seen) as machines:
        address = start_ray(machines)
        code, said = machines[0].run(f"rayfed run {SMALL} cluster.address={address} output=run", **TOKEN)
        assert code == 0, said
        assert "actors started: 3 of 3" in said
        environment = json.loads(machines[0].run("cat run/environment.json")[1])
        assert [node["host"] for node in environment["nodes"]] == ["h1", "h2", "h3"]
        caches = {host.run("cat .cache/rayfed/*.arrow | sha256sum")[1] for host in machines}
        assert len(caches) == 1
        code, alone = machines[1].run(f"rayfed run {SMALL} cluster=inline output=alone")
        assert code == 0, alone
        assert digest_in(said) == digest_in(alone)
        code, doctor = machines[0].run(f"rayfed doctor {SMALL} cluster.address={address}", **TOKEN)
        assert code == 0, doctor
        for host in machines:
            assert re.search(
                rf"node {host.name} \({host.address}\): .* in /dev/shm, sends", " ".join(doctor.split())
            )


def test_nodes_that_would_compute_something_else_end_a_run_before_its_first_actor(seen):
    other, without = seen / "other", seen / "without"
    for package in ("rayfed", "algorithms", "tune"):
        shutil.copytree(ROOT / package, other / package, ignore=shutil.ignore_patterns("__pycache__"))
    file = other / "rayfed" / "objective.py"
    file.write_text(f"{file.read_text()}\nHALF = 0.5\n")
    without.mkdir()
    (without / "rayfed.py").write_text("raise ModuleNotFoundError(\"No module named 'rayfed'\")\n")
    with hosts(3, seen) as machines:
        address = start_ray(machines[:1])
        for host, code in zip(machines[1:], (other, without), strict=True):
            joined = f"ray start --num-cpus=1 --address={address}"
            assert host.run(joined, **TOKEN, PYTHONPATH=str(code))[0] == 0
        code, said = machines[0].run(f"rayfed run {SMALL} cluster.address={address} output=run", **TOKEN)
    assert code == 2, said
    error = said.splitlines()[-1]
    assert "node h2 (10.99.0.12): its sources of RayFed differ from those of this command" in error
    assert (
        "node h3 (10.99.0.13): its Python cannot import what a run needs (No module named 'rayfed')" in error
    )
    assert "h1" not in error
    assert "actors started" not in said


def test_a_module_of_the_user_that_a_node_lacks_is_named(seen):
    mine = seen / "mine"
    mine.mkdir()
    (mine / "own_rule.py").write_text(
        "def first(round, clients, generator):\n    return [client.id for client in clients][:4]\n"
    )
    with hosts(2, seen) as machines:
        address = start_ray(machines)
        code, said = machines[0].run(
            f"rayfed run {SMALL} cluster.address={address} sampling=own_rule:first output=run",
            **TOKEN,
            PYTHONPATH=f"{ROOT}:{mine}",
        )
    assert code == 2, said
    wanted = r"node h2 \(10.99.0.12\): it cannot import your module 'own_rule'"
    assert re.search(wanted, said.splitlines()[-1]), said


def test_a_cluster_with_tls_is_joined_by_its_address(seen):
    make_certificates(seen, ["10.99.0.11", "10.99.0.12"])
    secured = {
        "RAY_USE_TLS": "1",
        "RAY_TLS_CA_CERT": str(seen / "ca.pem"),
        "RAY_TLS_SERVER_CERT": str(seen / "node.pem"),
        "RAY_TLS_SERVER_KEY": str(seen / "node.key"),
    }
    with hosts(2, seen) as machines:
        address = start_ray(machines, **secured)
        command = f"rayfed run {SMALL} cluster.address={address} output="
        code, said = machines[0].run(f"{command}run", **TOKEN, **secured)
        assert code == 0, said
        code, said = machines[0].run(f"{command}plain", **TOKEN)
        assert code == 75, said
        code, said = machines[0].run(f"{command}other", **TOKEN, **secured | {"RAY_TLS_CA_CERT": "/no/file"})
        assert code == 2, said
        assert "RAY_USE_TLS is on, but its certificates cannot be read" in said


def make_certificates(folder: Path, addresses: list[str]) -> None:
    """An authority, and one certificate for all nodes."""
    names = ",".join(f"IP:{address}" for address in ["127.0.0.1", *addresses])
    for command in (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=authority -keyout ca.key -out ca.pem",
        "openssl req -newkey rsa:2048 -nodes -subj /CN=node -keyout node.key -out node.csr",
        "openssl x509 -req -in node.csr -days 2 -CA ca.pem -CAkey ca.key -CAcreateserial -out node.pem "
        "-extfile names",
    ):
        (folder / "names").write_text(f"subjectAltName={names}\n")
        subprocess.run(command.split(), cwd=folder, check=True, capture_output=True)


def test_a_lost_head_is_told_within_half_a_minute(seen):
    with hosts(2, seen) as machines:
        address = start_ray(machines)
        command = machines[1].start(
            f"rayfed run {PLAIN} cluster.address={address} rounds=200 evaluation.every=0 output=run", **TOKEN
        )
        said = read_until(command, r"round +2/")
        began = time.monotonic()
        machines[0].unplug()
        said += read_until(command, "the head of the Ray cluster")
        told = time.monotonic() - began
        command.communicate(timeout=60)
    assert told < 35
    assert command.returncode == 1
    assert "finished rounds are kept; continue with" in said


def test_a_host_that_is_no_node_is_told_so(seen):
    with hosts(2, seen) as machines:
        address = start_ray(machines[:1])
        code, said = machines[1].run(f"rayfed run {SMALL} cluster.address={address} output=run", **TOKEN)
    assert code == 2, said
    assert "either this machine is no node of it" in said


def test_another_user_cannot_enter_the_folder_of_a_ray_that_a_run_started(seen):
    look = (
        "for path in /tmp/rayfed-0/r/session_latest/logs; do "
        "setpriv --reuid=65534 --clear-groups touch $path/x && echo entered; done"
    )
    with hosts(1, seen) as (host,):
        command = host.start(f"rayfed run {PLAIN} rounds=200 cluster.actors=1 output=run")
        read_until(command, r"round +1/")
        assert "session_latest" in host.run("ls -d /tmp/rayfed-0/r/session_latest")[1]
        _, tried = host.run(look)
    command.communicate(timeout=60)  # all processes of the host are gone
    assert "Permission denied" in tried
    assert "entered" not in tried
