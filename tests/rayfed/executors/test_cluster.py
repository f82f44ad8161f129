"""Fitting actors onto nodes: arithmetic first, then real clusters in separate processes."""

import os
import signal
import socket
import subprocess
import sys
import textwrap

import pytest

from rayfed.errors import ConfigError, ResourceError, UnreachableError
from rayfed.executors.cluster import GB, ActorPlan, Wish, plan
from rayfed.executors.connection import probe
from tests.conftest import ROOT, SMALL
from tests.rayfed.malformed import last_wins


def wish(actors="auto", cpus="auto", gpus="auto", memory=0.0, per_gpu=None, mps=False, joined=False):
    return Wish(actors=actors, cpus=cpus, gpus=gpus, memory=memory, per_gpu=per_gpu, mps=mps, joined=joined)


def node(cpus, gpus=0, memory=64 * GB):
    return {"CPU": cpus, "GPU": gpus, "memory": memory}


@pytest.mark.parametrize(
    ("asked", "nodes", "found"),
    [
        (wish(), [node(2)], (2, 1, 0)),  # one actor per CPU
        (wish(), [node(64)], (10, 1, 0)),  # never more than clients work at the same time
        (wish(), [node(2), node(1)], (3, 1, 0)),  # nodes add up
        (
            wish(actors=3),
            [node(2)],
            (3, 1 / 2, 0),
        ),  # more than CPUs: each gets half (two on one, one on the other)
        (wish(actors="per_client"), [node(2)], (20, 1 / 10, 0)),
        (wish(actors=4, gpus=0.25), [node(2, 1)], (4, 1 / 2, 0.25)),
        (wish(gpus=0.25), [node(2, 1)], (4, 1 / 2, 0.25)),  # the GPU share decides the number
        (wish(mps=True), [node(4, 1)], (4, 1, 0.25)),  # auto: the GPU is shared evenly
        (wish(), [node(16, 1)], (2, 1, 0.5)),  # without MPS actors take turns
        (wish(mps=True), [node(16, 1)], (6, 1, 1 / 6)),
        (wish(), [node(64, 8)], (8, 1, 1)),  # not ten halves, which Ray packs on five GPUs
        (wish(), [node(64, 3)], (6, 1, 0.5)),
        (wish(), [node(6, 4), node(6, 4)], (8, 1, 1)),
        (wish(), [node(64, 16)], (10, 1, 1)),
        (wish(actors=3), [node(8, 2)], (3, 1, 0.5)),  # three actors on two GPUs: halves
        (wish(gpus=0.3), [node(8, 2)], (6, 1, 0.3)),  # three on each GPU, not 6.67 in total
        (wish(memory=2 * GB), [node(8, memory=5 * GB)], (2, 1, 0)),  # memory limits auto
        (
            wish(per_gpu=3, mps=True),
            [node(8, 1)],
            (3, 1, 1 / 3),
        ),  # so does the memory of a GPU, where it was measured
        (wish(per_gpu=3, mps=True), [node(8, 2)], (6, 1, 1 / 3)),
        (wish(per_gpu=30, mps=True), [node(4, 1)], (4, 1, 0.25)),
        (wish(actors=2, per_gpu=3), [node(8, 1)], (2, 1, 0.5)),
    ],
)
def test_plan(asked, nodes, found):
    got = plan(asked, clients=20, per_round=10, nodes=nodes)
    assert (got.actors, got.cpus, got.gpus) == pytest.approx(found)


@pytest.mark.parametrize(
    ("asked", "nodes", "words"),
    [
        (
            wish(actors=4, gpus=0.3),
            [node(8, 1)],
            ["gpus_per_actor", "4 actors", "0.3", "1 GPU", "actors=3", "=0.25"],
        ),
        (
            wish(actors=2, gpus=1),
            [node(8)],
            ["gpus_per_actor", "this machine has no GPU", "gpus_per_actor=0"],
        ),
        (wish(actors=5, cpus=1), [node(4)], ["cluster.actors", "5 actors", "4 CPU", "cluster.actors=4"]),
        # 3 + 3 CPUs do not hold three actors of two CPUs each: one CPU is left over on each node
        (wish(actors=3, cpus=2), [node(3), node(3)], ["cluster.actors=2", "do not fit 2 nodes"]),
        (wish(actors=2, memory=40 * GB), [node(8)], ["40 GB", "cluster.actors=1"]),
        (wish(actors=1, cpus=9), [node(8)], ["1 actor with 9 CPU", "does not fit this machine"]),
        (wish(actors=1, cpus=9, joined=True), [node(8)], ["does not fit this cluster with 8 CPU"]),
        (wish(actors=2, gpus=1, joined=True), [node(8)], ["the cluster has no GPU"]),
        (wish(actors=2, gpus=1), [node(8), node(8)], ["the cluster has no GPU"]),
        (
            wish(actors=4, per_gpu=3),
            [node(8, 1)],
            [
                "4 actors, each with 0.25 GPU (whose memory holds 3 actors)",
                "what would fit: cluster.actors=3",
            ],
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_what_would(asked, nodes, words):
    with pytest.raises(ResourceError) as err:
        plan(asked, clients=20, per_round=10, nodes=nodes)
    message = str(err.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_what_the_refusal_proposes_fits():
    nodes = [node(8, 1)]
    for better in (wish(actors=3, gpus=0.3), wish(actors=4, gpus=0.25)):
        assert plan(better, 20, 10, nodes).gpus == better.gpus


def test_bundle():
    assert ActorPlan(actors=1, cpus=0.5, gpus=0).bundle == {"CPU": 0.5}
    assert ActorPlan(actors=1, cpus=0.5, gpus=0.25).bundle == {"CPU": 0.5, "GPU": 0.25}


@pytest.mark.parametrize("address", ["127.0.0.1:9", "ray://127.0.0.1:9"])
def test_an_address_that_does_not_answer(address):
    with pytest.raises(UnreachableError, match="no Ray cluster answers"):
        probe(address, timeout=5)


def test_a_server_that_never_answers_is_waited_for_as_long_as_was_asked(monkeypatch):
    connect, given = socket.create_connection, []

    def noted(address, timeout):
        given.append(timeout)
        return connect(address, timeout=timeout)

    monkeypatch.setattr(socket, "create_connection", noted)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts connections, and says nothing
        for timeout in (0.1, 0.2):
            with pytest.raises(ConfigError, match=r"no Ray cluster answers at .*timed out"):
                probe(f"127.0.0.1:{silent.getsockname()[1]}", timeout)
    assert given == [0.1, 0.2]


def python(script, timeout=240, **env):
    """Run a script in its own process, with its own Ray."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
    )
    assert done.returncode == 0, done.stderr[-20000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.steady
@pytest.mark.ray
def test_a_cluster_of_two_nodes_is_used_whole(tmp_path, cache, small):
    script = f"""
        import ray
        from ray.cluster_utils import Cluster
        cluster = Cluster(initialize_head=True, head_node_args={{"num_cpus": 1, "include_dashboard": False}})
        cluster.add_node(num_cpus=1)
        ray.init(address=cluster.address, logging_level="error")
        cluster.wait_for_nodes()

        import rayfed.engine.session as session
        class Driver(session.DriverActor):
            def start(self, *args):
                yield from super().start(*args)
                self.nodes = [lane.place["node"] for lane in self._executor.lanes]
                print("NODES", len(set(self.nodes)), len(self.nodes), flush=True)
        session.DriverActor = Driver
        import rayfed
        result = rayfed.simulate({[*SMALL, f"data.cache={cache}"]!r} + ["output={tmp_path / "run"}"])
        print("HASH", result.sha256)
    """
    out = python(script)
    assert f"HASH {small().sha256}" in out
    assert "NODES 2 2" in out


@pytest.mark.slow
@pytest.mark.steady
@pytest.mark.ray
def test_a_lost_node_leaves_no_group_with_a_bundle_that_cannot_be_placed():
    """Ray's gcs_server would look for a place for it without a pause, until the run ends."""
    out = python("""
        import time
        import ray
        from ray.cluster_utils import Cluster
        from ray.util.placement_group import placement_group_table
        from rayfed.executors.cluster import ActorPlan, has_lost_its_node, reserve, reserve_again
        from rayfed.executors.connection import Health

        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
        worker = cluster.add_node(num_cpus=2)
        ray.init(address=cluster.address, logging_level="error")
        cluster.wait_for_nodes()

        def states():
            found = [row["state"] for row in placement_group_table().values()]
            return sorted(state for state in found if state != "REMOVED")

        def group(options):
            return options["scheduling_strategy"].placement_group

        with reserve(ActorPlan(actors=4, cpus=1, gpus=0), 60, Health()) as options:
            print("PLACED", states(), len(set(map(group, options))))
            cluster.remove_node(worker, allow_graceful=False)
            while not any(map(has_lost_its_node, options)):
                time.sleep(0.1)
            print("LOST", [has_lost_its_node(each) for each in options].count(True))
            again = [reserve_again(each) for each in options]
            print("WAITING", states(), [has_lost_its_node(each) for each in again])
            print("KEPT", sum(new == old for new, old in zip(again, options)))
            cluster.add_node(num_cpus=2)
            print("BACK", [group(each).wait(60) for each in again], states())
        print("RELEASED", states())
        ray.shutdown()
        cluster.shutdown()
    """)
    assert "PLACED ['CREATED', 'CREATED'] 2" in out
    assert "LOST 2" in out
    assert "WAITING ['CREATED', 'PENDING', 'PENDING'] [False, False, False, False]" in out
    assert "KEPT 2" in out
    assert "BACK [True, True, True, True] ['CREATED', 'CREATED', 'CREATED']" in out
    assert "RELEASED []" in out


@pytest.mark.slow
@pytest.mark.steady
@pytest.mark.ray
def test_two_runs_that_want_the_same_nodes_both_get_them():
    """Each wants all of both nodes, so that neither could go on with a part of what the other needs."""
    out = python("""
        import threading
        import ray
        from ray.cluster_utils import Cluster
        from rayfed.executors.cluster import ActorPlan, reserve
        from rayfed.executors.connection import Health

        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
        cluster.add_node(num_cpus=2)
        ray.init(address=cluster.address, logging_level="error")
        cluster.wait_for_nodes()
        had = []

        def run():
            for _ in range(3):
                with reserve(ActorPlan(actors=4, cpus=1, gpus=0), 200, Health()) as options:
                    had.append(len(options))

        runs = [threading.Thread(target=run) for _ in range(3)]
        for each in runs:
            each.start()
        for each in runs:
            each.join()
        print("HAD", had)
        ray.shutdown()
        cluster.shutdown()
    """)
    assert f"HAD {[4] * 9}" in out


@pytest.mark.slow
@pytest.mark.ray
def test_four_actors_share_a_declared_gpu(tmp_path, cache, small):
    arguments = [
        *SMALL,
        f"data.cache={cache}",
        "cluster.num_cpus=2",
        "cluster.num_gpus=1",
        "cluster.dashboard=false",
    ]
    command = [sys.executable, "-m", "rayfed.run", *arguments, "cluster.actors=4"]
    fits = subprocess.run(
        [*command, "cluster.gpus_per_actor=0.25", f"output={tmp_path / 'fits'}"],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=ROOT,
    )
    assert fits.returncode == 0, fits.stderr[-2000:]
    assert "4 client actors with 0.5 CPU and 0.25 GPU each" in fits.stdout
    refused = subprocess.run(
        [*command, "cluster.gpus_per_actor=0.3", f"output={tmp_path / 'refused'}"],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=ROOT,
    )
    assert refused.returncode == 2
    assert "cluster.gpus_per_actor=0.25" in refused.stderr
    assert "cluster.actors=3" in refused.stderr
    assert len(refused.stderr.strip().splitlines()) == 1


@pytest.mark.slow
@pytest.mark.ray
def test_the_share_of_a_declared_gpu_is_measured_on_ray(tmp_path, cache, small):
    """One visit runs on Ray before the actors start; a GPU is said to hold two and a half such actors."""
    script = f"""
        import dataclasses
        import torch
        import rayfed
        from rayfed.engine import measure_client

        def visit(experiment, world, weights):
            found = measure_client.largest_client(experiment, world, torch.device("cpu"), weights)
            size = int(2.5 * found.device_bytes)
            return dataclasses.replace(found, device_total=size, device_free=size), False

        measure_client._visit = visit
        settings = {[*SMALL, "data.domains=[plain,street,fonts]", f"data.cache={cache}"]!r}
        where = ["cluster.num_cpus=8", "cluster.num_gpus=1", "cluster.memory_per_actor=0.01"]
        more = ["cluster.dashboard=false", "output={tmp_path / "run"}"]
        print("HASH", rayfed.simulate([*settings, *where, *more], quiet=False).sha256)
    """
    out = python(script, timeout=500)
    assert f"HASH {small('data.domains=[plain,street,fonts]').sha256}" in out
    assert "a GPU holds at most 2 such actors" in out
    assert "2 client actors with 1 CPU and 0.5 GPU each" in out


def children_of(pid):
    """Living descendants of a process."""
    import psutil

    return psutil.Process(pid).children(recursive=True)


def launched(tmp_path, cache, *more):
    """A run in its own process."""
    own = [f"data.cache={cache}", f"output={tmp_path / 'run'}", "cluster.dashboard=false"]
    command = [sys.executable, "-m", "rayfed.run", *last_wins([*SMALL, *own, *more])]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, cwd=ROOT)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_nothing_running(number, tmp_path, cache):
    import psutil

    process = launched(tmp_path, cache, "rounds=500")
    for line in process.stdout:
        if line.startswith("round   2"):
            break
    started = children_of(process.pid)
    assert started
    process.send_signal(number)
    assert process.wait(240) == 130
    run = tmp_path / "run"
    assert process.stderr.read() == (
        f"interrupted; finished rounds are kept; continue with: python -m rayfed.resume {run}\n"
    )
    _, alive = psutil.wait_procs(started, timeout=120)
    assert not alive
    rows = (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()
    assert len(rows) >= 2
    assert (tmp_path / "run" / "checkpoints" / f"round-{len(rows):06d}").is_dir()
    assert (tmp_path / "run" / "clients.parquet").exists()


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize("moment", ["starting Ray", "actors started"])
def test_a_sigterm_before_the_first_round_ends_quietly_with_one_line(moment, tmp_path, cache):
    process = launched(tmp_path, cache)
    assert any(line.startswith(moment) for line in process.stdout)
    process.terminate()
    assert process.wait(240) == 130
    assert process.stderr.read() == "interrupted; no round was finished; run the same command again\n"
