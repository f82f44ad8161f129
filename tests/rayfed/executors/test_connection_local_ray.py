"""A Ray of our own: who can reach it, and what of it gets onto the screen."""

import json
import os
import stat
import subprocess
import sys
import textwrap

import pytest

from rayfed.executors.connection import FEW_POOLS
from rayfed.executors.ray_private import require_token, without_rays
from tests.conftest import ROOT

LISTENING = """
    import json, os, time
    import psutil
    import ray
    from rayfed.executors.connection import connection

    class Actor:
        def pools(self):
            return os.environ["MALLOC_ARENA_MAX"], os.nice(0) - int(os.environ["COMMANDS_NICENESS"])

    os.environ["COMMANDS_NICENESS"] = str(os.nice(0))
    found, until = {}, time.monotonic() + 180
    with connection(None, num_cpus=2, num_gpus=0, dashboard=True) as link:
        actor = ray.remote(Actor).remote()
        pools = ray.get(actor.pools.remote())
        own = psutil.Process()
        # The agents open their ports a moment after the node is up.
        while len(found) < 6 and time.monotonic() < until:
            time.sleep(1)
            found.clear()
            for process in [own, *own.children(recursive=True)]:
                for one in process.net_connections("inet"):
                    if one.status == psutil.CONN_LISTEN:
                        found.setdefault(process.name(), []).append(one.laddr.ip)
        mode = os.environ["RAY_AUTH_MODE"]
    print(json.dumps({"found": found, "mode": mode, "pools": pools}))
"""


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.steady
def test_every_process_of_our_own_ray_listens_on_the_loopback_address_only(tmp_path):
    """The table of SECURITY.md: who listens, and where."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(LISTENING)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=240,
        env={**os.environ, "HOME": str(tmp_path), "RAY_ADDRESS": "", "RAY_AUTH_MODE": "disabled"},
    )
    assert done.returncode == 0, done.stderr[-5000:]
    answer = json.loads(done.stdout.splitlines()[-1])
    addresses = {address.removeprefix("::ffff:") for found in answer["found"].values() for address in found}
    assert addresses == {"127.0.0.1"}
    for name in ("gcs_server", "raylet", "ray::DashboardAgent", "ray::RuntimeEnvAgent", "ray::Actor"):
        assert any(process.startswith(name[:15]) for process in answer["found"]), answer["found"]
    assert answer["mode"] == "token"
    assert answer["pools"] == [FEW_POOLS, 0]  # and the priority of the command
    token = tmp_path / ".ray" / "auth_token"
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    rows = (line.split("|") for line in (ROOT / "SECURITY.md").read_text().splitlines() if "| 127." in line)
    listed = {name.strip(): address.strip() for _, name, address, _ in rows}
    assert {"the command", "gcs_server", "raylet", "workers", "dashboard agent", "dashboard"} < listed.keys()
    assert set(listed.values()) == addresses


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    yield tmp_path
    os.environ.pop("RAY_AUTH_TOKEN", None)


def test_a_token_is_made_that_only_its_owner_reads(home):
    before = os.umask(0)
    try:
        require_token()
    finally:
        os.umask(before)
    file = home / ".ray" / "auth_token"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert len(file.read_text()) == 64
    assert os.environ["RAY_AUTH_MODE"] == "token"


def test_a_token_that_all_could_read_is_kept_and_closed(home):
    file = home / ".ray" / "auth_token"
    file.parent.mkdir()
    file.write_text("mine")
    file.chmod(0o644)
    require_token()
    assert file.read_text() == "mine"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_token_of_ones_own_stays(home, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN", "mine")
    require_token()
    assert os.environ["RAY_AUTH_TOKEN"] == "mine"
    assert not (home / ".ray").exists()


def test_without_a_home_the_token_is_in_the_environment(home, monkeypatch):
    (home / "file").touch()
    monkeypatch.setenv("HOME", str(home / "file"))
    require_token()
    assert len(os.environ["RAY_AUTH_TOKEN"]) == 64


DUMP = """\
[2026-11-21 23:04:17,377 C 18105 18148] core_worker.cc:515:  An unexpected system state has occurred.
*** StackTrace Information ***
/lib/python3.11/site-packages/ray/_raylet.so(+0x1812b9a) [0x7fefd6c12b9a] ray::operator<<()
/lib/x86_64-linux-gnu/libc.so.6(+0x891f5) [0x7fefd78a71f5]
"""


def test_stack_dumps_of_ray_are_not_shown_and_what_clients_print_is():
    assert without_rays([*DUMP.splitlines(), ""]) == []
    assert without_rays(["loss 0.5", *DUMP.splitlines(), "", "/data/a.so is odd"]) == [
        "loss 0.5",
        "",
        "/data/a.so is odd",
    ]
