"""What the dashboard of a head node answers over HTTP while an experiment runs."""

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

from tests.conftest import ROOT
from tests.rayfed.executors.head_node import TOKEN, head_node


def ask(url, token=TOKEN):
    """The JSON that the dashboard answers."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.loads(answer.read())


def actors(node):
    """Actors of the cluster by name, with their state and the name that pages and logs show."""
    rows = ask(f"{node.dashboard}/api/v0/actors?detail=1")["data"]["result"]["result"]
    return {row["name"]: (row["state"], row["repr_name"]) for row in rows if row["name"]}


@pytest.mark.slow
@pytest.mark.steady
@pytest.mark.ray
def test_its_pages_name_the_actors_of_a_running_experiment(tmp_path, cache):
    options = ["algorithm=fedavg", "rounds=500", "model.options={depth: 1}", "model.pretrained=false"]
    options += ["data.domains=[plain,street]", "data.partition.scheme=by_domain", "evaluation.every=0"]
    options += ["data.partition.clients_per_domain=1", "cluster.actors=per_client", "checkpoint.every=0"]
    options += ["data.limit=24", f"data.cache={cache}", f"output={tmp_path / 'watched'}"]
    with head_node() as node:
        command = [sys.executable, "-m", "rayfed.run", f"cluster.address={node.address}", *options]
        run = subprocess.Popen(
            command, cwd=ROOT, env=node.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            deadline = time.monotonic() + 300
            while not (tmp_path / "watched" / "rounds.jsonl").exists():
                assert run.poll() is None, run.stdout.read()
                assert time.monotonic() < deadline
                time.sleep(0.5)
            with pytest.raises(urllib.error.HTTPError) as refused:
                ask(f"{node.dashboard}/api/v0/actors", token="")
            assert refused.value.code == 401
            found = actors(node)
        finally:
            run.terminate()
            run.communicate(timeout=300)
    names = ["rayfed:driver:watched", "rayfed:clients:watched:c0-plain", "rayfed:clients:watched:c1-street"]
    assert found == {name: ("ALIVE", name) for name in names}
