"""The files for images, clusters, CI and citation agree with the project, as far as shows without Docker."""

import json
import re
import shlex
import signal
import subprocess
import time
from pathlib import Path

import jsonschema
import pytest
import ray
import yaml

import rayfed
from rayfed.config.schema import compatible_parts, load_config
from tests.conftest import ROOT

DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()
VERSIONS = dict(
    line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line
)
JOB = yaml.safe_load((ROOT / "deploy" / "rayjob.yaml").read_text())
CLUSTER = yaml.safe_load((ROOT / "deploy" / "ray_cluster.yaml").read_text())


def accepted(words):
    config = load_config([word for word in words if "=" in word])
    compatible_parts(config)
    return config


def test_the_image_copies_what_the_package_needs_and_installs_the_tested_versions():
    copied = re.findall(r"^COPY (.+) (/src\S*)$", DOCKERFILE, re.MULTILINE)
    sources = {name for names, _ in copied for name in names.split()}
    assert sources == {
        *("pyproject.toml", "constraints.txt", "README.md", "LICENSE"),
        *("rayfed", "algorithms", "tune", "configs"),
    }
    assert all((ROOT / name).exists() for name in sources)
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert sent == sources
    assert "-c /src/constraints.txt /src" in DOCKERFILE


def test_the_image_takes_its_base_as_an_argument_and_has_a_python_that_is_allowed():
    before, _, after = DOCKERFILE.partition("FROM ")
    base = re.search(r"^ARG BASE=python:(\d+\.\d+)-\S+$", before, re.MULTILINE)[1]
    assert after.startswith("${BASE}")
    assert "Python 3.11," in (ROOT / "constraints.txt").read_text()
    assert base == "3.11"


def test_the_steps_of_the_image_are_known_instructions():
    joined = re.sub(r"\\\n\s*", "", re.sub(r"^#.*\n", "", DOCKERFILE, flags=re.MULTILINE))
    steps = [line.split()[0] for line in joined.splitlines() if line.strip()]
    assert f"--uid {re.search(r'USER (.+)', DOCKERFILE)[1]} " in DOCKERFILE
    assert set(steps) == {"ARG", "FROM", "RUN", "ENV", "COPY", "USER", "WORKDIR", "CMD"}
    for line in joined.splitlines():
        if line.startswith("RUN "):
            subprocess.run(["bash", "-n", "-c", line[4:]], check=True)


def test_the_ray_job_has_the_version_of_ray_and_a_command_that_is_accepted():
    assert (JOB["apiVersion"], JOB["kind"]) == ("ray.io/v1", "RayJob")
    cluster = JOB["spec"]["rayClusterSpec"]
    assert cluster["rayVersion"] == VERSIONS["ray"]
    program, verb, again, *words = shlex.split(JOB["spec"]["entrypoint"])
    assert (program, verb, again) == ("rayfed", "run", "--or-resume")
    config = accepted(words)
    assert config.cluster.address == "auto"
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    assert config.output
    for group in groups:
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        places = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        user = int(re.search(r"^USER (\d+)$", DOCKERFILE, re.MULTILINE)[1])
        assert pod["securityContext"] == {"runAsUser": user, "runAsGroup": user, "fsGroup": user}
        assert container["image"].partition(":")[0] == CLUSTER["docker"]["image"] == "rayfed"
        assert set(places) == {volume["name"] for volume in pod["volumes"]}
        assert places["memory"] == "/dev/shm"
        assert Path(places["data"]) in Path(config.output).parents
        assert container["resources"]["limits"] == container["resources"]["requests"]
    gpus = float(groups[1]["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])
    assert gpus >= float(config.cluster.gpus_per_actor)


def test_ray_accepts_the_cluster():
    schema = Path(ray.__file__).parent / "autoscaler" / "ray-schema.json"
    jsonschema.validate(CLUSTER, json.loads(schema.read_text()))
    assert CLUSTER["max_workers"] == len(CLUSTER["provider"]["worker_ips"])
    port = re.search(r"--head --port=(\d+)", CLUSTER["head_start_ray_commands"][1])[1]
    assert f"$RAY_HEAD_IP:{port}" in CLUSTER["worker_start_ray_commands"][1]
    starts = [CLUSTER["head_start_ray_commands"][1], CLUSTER["worker_start_ray_commands"][1]]
    assert all(start.startswith("RAY_AUTH_MODE=token ray start") for start in starts)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**CLUSTER, "image": "rayfed"}, json.loads(schema.read_text()))


COMMANDS = {
    "scontrol": 'echo "scontrol $*" >> "$LOG"; [ "$1" = requeue ] || printf "n1\\nn2\\n"',
    "python": (
        'case "$*" in -c*) echo secret; exit;; esac\n'
        'printf "python %s | %s %s\\n" "$*" "$RAY_AUTH_MODE" "$RAY_AUTH_TOKEN" >> "$LOG"\n'
        '[ -z "${RUNS_ON:-}" ] || { trap "exit 130" TERM; touch "$LOG.runs"; sleep 60 & wait; }\n'
        "exit 7"
    ),
    "srun": (
        'printf "%s | %s %s\\n" "$*" "$RAY_AUTH_MODE" "$RAY_AUTH_TOKEN" >> "$LOG"\n'
        'case "$*" in *hostname*) echo 10.0.0.1;; *--block*) exec sleep 60;; '
        # The wait for all nodes ends when the lines of the nodes that start in the background are written.
        "*) cat > /dev/null\n"
        'until [ "$(grep -c "ray start" "$LOG")" = "$SLURM_JOB_NUM_NODES" ]; do sleep 0.1; done;; esac'
    ),
}
"""Stand-ins for the commands that deploy/slurm.sh calls; srun writes down its arguments."""


def slurm(tmp_path, nodes, signals=()):
    """Exit code of the script with stand-ins, in a folder, and the lines that they wrote.

    Args:
        signals: Sent to the script while its run lasts.
    """
    for name, text in COMMANDS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "LOG": str(tmp_path / "log"),
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_JOB_ID": "17",
    }
    script = ROOT / "deploy" / "slurm.sh"
    command = [script, "algorithm=fedra", "output=a b"]
    if signals:
        environment["RUNS_ON"] = "1"
    process = subprocess.Popen(command, env=environment, cwd=tmp_path)
    while signals and not (tmp_path / "log.runs").exists():
        assert process.poll() is None
        time.sleep(0.05)
    for number in signals:
        process.send_signal(number)
    return process.wait(timeout=300), (tmp_path / "log").read_text().splitlines()


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_slurm_script_starts_ray_on_every_node_and_ends_as_the_run(tmp_path, nodes):
    code, lines = slurm(tmp_path, nodes)
    assert code == 7
    heads = [line for line in lines if "--block --head" in line]
    workers = [line for line in lines if "--block --address=10.0.0.1:6379" in line]
    assert len(heads) == 1
    assert "--node-ip-address=10.0.0.1" in heads[0]
    assert "-w n1" in heads[0]
    assert len(workers) == nodes - 1
    assert all("--exclude=n1" in line and "--nodes=1 " in line for line in workers)
    (run,) = [line for line in lines if "rayfed.run" in line]
    words = "--or-resume cluster.address=10.0.0.1:6379 algorithm=fedra output=a b"
    assert run == f"python -m rayfed.run {words} | token secret"
    assert all("mkdir -p -m 700 /tmp/rayfed-slurm-17-0;" in line for line in heads + workers)
    assert all("--temp-dir=/tmp/rayfed-slurm-17-0/ray" in line for line in heads + workers)
    assert any("hostname --all-ip-addresses" in line for line in lines)
    assert not any("requeue" in line for line in lines)
    accepted(["algorithm=fedra", "cluster.address=10.0.0.1:6379"])


@pytest.mark.parametrize(("number", "requeued"), [(signal.SIGUSR1, True), (signal.SIGTERM, False)])
def test_a_slurm_job_near_its_time_limit_ends_its_run_and_goes_back_into_the_queue(
    tmp_path, number, requeued
):
    code, lines = slurm(tmp_path, 1, [number])
    assert code == 130
    assert ("scontrol requeue 17" in lines) is requeued


def test_the_workflow_calls_what_ci_runs():
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    flow = yaml.safe_load(text)
    (job,) = flow["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111
    versions = [step["with"]["python-version"] for step in job["steps"] if "with" in step]
    assert versions == ["3.11"]
    assert flow[True].keys() == {"push", "pull_request"}  # YAML reads the key `on` as true


TEXT = (".py", ".pyi", ".yaml", ".css", ".js", ".j2", ".md", ".typed")
"""Endings of what was written for RayFed."""


def test_what_is_embedded_is_named_with_its_terms():
    """The README of the weights names each file that is no text of RayFed, or its folder, and the terms."""
    tracked = ["git", "ls-files", "rayfed", "algorithms", "tune", "configs"]
    files = subprocess.run(tracked, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    folder = ROOT / "rayfed" / "models" / "weights"
    about = (folder / "README.md").read_text()
    assert "LICENSE" in about
    embedded = [ROOT / name for name in files if not name.endswith(TEXT)]
    assert len(embedded) > 5
    for file in embedded:
        first = file.relative_to(folder).parts[0]
        assert f"`{first}`" in about or f"`{first}/`" in about, file


def test_the_citation_has_the_version_and_the_licence_of_the_package():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= cited.keys()
    assert (cited["version"], cited["license"]) == (rayfed.__version__, "Apache-2.0")
