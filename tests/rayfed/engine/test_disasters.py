"""What ends a run, done for real: a killed driver, a full disk, a lost node, too little memory."""

import os
import resource
import signal
import subprocess
import sys

import psutil
import pytest

import rayfed
from rayfed.errors import ClusterError
from rayfed.resume import main
from tests.conftest import ROOT, SMALL
from tests.rayfed.executors.test_cluster import python
from tests.rayfed.malformed import last_wins
from tests.rayfed.test_resume import tables


def after_round(number, act, monkeypatch):
    """Do something when the line of a round is shown."""

    def line(row, rounds):
        if row["round"] == number:
            act()
        return ""

    monkeypatch.setattr("rayfed.terminal.console.line", line)


@pytest.mark.slow
@pytest.mark.steady
@pytest.mark.ray
def test_a_killed_driver_actor_ends_the_run_and_it_can_go_on(
    small, cache, tmp_path, ray_cluster, monkeypatch
):
    options = [*SMALL, "rounds=6", "algorithm=ditto", f"data.cache={cache}"]
    run = tmp_path / "killed"

    def kill_driver():
        for process in psutil.process_iter(["cmdline"]):
            if "DriverActor" in " ".join(process.info["cmdline"] or ()):
                process.send_signal(signal.SIGKILL)

    after_round(2, kill_driver, monkeypatch)
    with pytest.raises(ClusterError, match="driver actor was lost"):
        rayfed.simulate([*options, "cluster.actors=2", f"output={run}"], quiet=False)
    monkeypatch.undo()
    assert main([str(run), "cluster=inline", "--quiet"]) == 0
    assert tables(run) == tables(small("rounds=6", "algorithm=ditto").path)


@pytest.mark.slow
@pytest.mark.steady
def test_a_full_disk_ends_the_run_with_one_line_and_it_can_go_on(small, cache, tmp_path):
    """A quota on the size of files, which the tables of the third round exceed."""
    run = tmp_path / "run"
    options = ("cluster=inline", f"data.cache={cache}", f"output={run}")
    script = f"""
        import resource, sys
        import rayfed.terminal.console as console
        from rayfed.run import main

        def line(row, rounds):
            if row["round"] == 2:
                resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
            return "round " + str(row["round"])

        console.line = line
        sys.exit(main({last_wins([*SMALL, "rounds=4", *options])!r}))
    """
    import textwrap

    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, cwd=ROOT, timeout=240
    )
    assert done.returncode == 1, done.stderr
    error = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(error) == 1
    assert "cannot write" in error[0]
    assert "File too large" in error[0]
    assert f"continue with: python -m rayfed.resume {run}" in done.stderr
    assert not list(run.rglob("*.tmp"))
    assert sorted(p.name for p in (run / "checkpoints").iterdir())[:2] == ["round-000001", "round-000002"]
    assert main([str(run), "--quiet"]) == 0
    assert tables(run) == tables(small("rounds=4").path)
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY


@pytest.mark.slow
def test_a_file_system_without_space(cache, tmp_path):
    """The same on a file system of one megabyte, mounted for the length of this test."""
    disk = tmp_path / "disk"
    disk.mkdir()
    given = last_wins([*SMALL, "rounds=200", "cluster=inline", f"data.cache={cache}"])
    options = " ".join(f"'{o}'" for o in given)
    mount = f"mount -t tmpfs -o size=1m tmpfs {disk}"
    command = f"{mount} && {sys.executable} -m rayfed.run {options} output={disk}/run"
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", command], capture_output=True, text=True, cwd=ROOT, timeout=400
    )
    assert done.returncode == 1, done.stderr
    assert "No space left on device" in done.stderr
    assert len([line for line in done.stderr.splitlines() if line.startswith("error: ")]) == 1


@pytest.mark.slow
@pytest.mark.ray
def test_a_lost_node_with_the_state_of_clients_goes_back_to_the_checkpoint(small, cache, tmp_path):
    """Whole models as private state lie in the object store of the node that is lost."""
    options = [*SMALL, "algorithm=ditto", "tuning=full", "rounds=5", "checkpoint.every=2"]
    options = [o for o in options if o != "tuning.rank=2"] + [f"data.cache={cache}"]
    script = f"""
        import ray
        from ray.cluster_utils import Cluster
        cluster = Cluster(initialize_head=True, head_node_args={{"num_cpus": 1, "include_dashboard": False}})
        worker = cluster.add_node(num_cpus=1)
        ray.init(address=cluster.address, logging_level="error")
        cluster.wait_for_nodes()
        import rayfed.terminal.console as console

        def line(row, rounds):
            if row["round"] == 3 and worker in cluster.worker_nodes:  # it comes twice
                cluster.remove_node(worker, allow_graceful=False)
            return "round " + str(row["round"])

        console.line = line
        import rayfed
        result = rayfed.simulate({[*options, f"output={tmp_path / 'run'}"]!r}, quiet=False)
        print("HASH", result.sha256, flush=True)
        ray.shutdown()  # in this order: at the end of the process, Ray looks for the node that is gone
        cluster.shutdown()
    """
    out = python(script, timeout=400)
    whole = rayfed.simulate([*options, "cluster=inline", f"output={tmp_path / 'whole'}"])
    assert f"HASH {whole.sha256}" in out
    assert tables(tmp_path / "run") == tables(whole.path)
    import pyarrow.parquet as pq

    kinds = set(pq.read_table(tmp_path / "run" / "events.parquet")["kind"].to_pylist())
    assert "store_lost" in kinds


@pytest.mark.slow
@pytest.mark.steady
@pytest.mark.ray
def test_a_run_goes_on_without_a_lost_node_and_uses_it_when_it_returns(cache, tmp_path):
    """Meanwhile Ray has no group of which it looks for a place without a pause."""
    options = [*SMALL, "rounds=9000", f"data.cache={cache}"]
    script = f"""
        import ray
        from ray.cluster_utils import Cluster
        from ray.util.placement_group import placement_group_table
        cluster = Cluster(initialize_head=True, head_node_args={{"num_cpus": 1, "include_dashboard": False}})
        worker = cluster.add_node(num_cpus=1)
        ray.init(address=cluster.address, logging_level="error")
        cluster.wait_for_nodes()
        import rayfed.engine.session as session
        import rayfed.terminal.console as console

        class Driver(session.DriverActor):
            def rounds(self, *args):
                for row in super().rounds(*args):
                    up = sum(lane.starting is None for lane in self._executor.lanes)
                    yield {{**row, "actors": up}}

        seen = []

        def line(row, rounds):
            if row["actors"] not in seen[-1:]:
                seen.append(row["actors"])
                if len(seen) == 1:
                    cluster.remove_node(worker, allow_graceful=False)
                elif len(seen) == 3:
                    raise KeyboardInterrupt
            states = sorted(found["state"] for found in placement_group_table().values())
            if "PENDING" in states and len(cluster.worker_nodes) == 0:
                print("WAITING", states)
                cluster.add_node(num_cpus=1)
            return "round " + str(row["round"])

        session.DriverActor = Driver
        console.line = line
        import rayfed
        try:
            rayfed.simulate({last_wins([*options, f"output={tmp_path / 'run'}"])!r}, quiet=False)
        except KeyboardInterrupt:
            print("SEEN", seen, flush=True)
        ray.shutdown()
        cluster.shutdown()
    """
    out = python(script, timeout=400)
    # REMOVED: the group of both nodes, of which one for each was made, and that of the lost node
    assert "WAITING ['CREATED', 'PENDING', 'REMOVED', 'REMOVED']" in out
    assert "SEEN [2, 1, 2]" in out


GREEDY = """
import os, time
from dataclasses import dataclass
from rayfed.federation.local import Local
from rayfed.federation.method_registry import Method

@dataclass(frozen=True)
class Greedy(Local):
    marker: str = ""

    def train(self, client, sent):
        if client.id.startswith("c1") and not os.path.exists(self.marker):
            open(self.marker, "w").close()
            hoard = [bytearray(os.urandom(1)) * 200_000_000 for _ in range(20)]
            time.sleep(30)
            del hoard
        return super().train(client, sent)

METHOD = Method(local=Greedy)
"""


@pytest.mark.slow
@pytest.mark.ray
def test_an_actor_that_rays_memory_monitor_kills_is_replaced(small, cache, tmp_path):
    """Needs a machine whose other memory stays as it is for a minute."""
    (tmp_path / "greedy.py").write_text(GREEDY)
    memory = psutil.virtual_memory()
    threshold = (memory.total - memory.available + 4e9) / memory.total
    run = tmp_path / "run"
    options = [
        *SMALL,
        "algorithm=greedy:METHOD",
        f"local.marker={tmp_path / 'marker'}",
        f"data.cache={cache}",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "rayfed.run", *last_wins(options), f"output={run}", "cluster.dashboard=false"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=300,
        env={
            **os.environ,
            "PYTHONPATH": str(tmp_path),
            "RAY_memory_usage_threshold": f"{threshold:.3f}",
            "RAY_memory_monitor_refresh_ms": "100",
        },
    )
    assert done.returncode == 0, done.stderr
    import pyarrow.parquet as pq

    events = pq.read_table(run / "events.parquet").to_pylist()
    assert {(e["kind"], e["action"]) for e in events} == {("out_of_memory", "retry")}
    assert tables(run) == tables(small().path)
