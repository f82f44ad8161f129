"""The wheel, installed into its own environment, works without the checkout."""

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    """Wheel and source archive, built in a fresh clone: what is not committed is not in them."""
    folder = tmp_path_factory.mktemp("dist")
    clone = tmp_path_factory.mktemp("clone") / "rayfed"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True, capture_output=True)
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    subprocess.run(command, cwd=clone, check=True, capture_output=True)
    (wheel,), (source,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, source


@pytest.fixture(scope="module")
def installed(archives, tmp_path_factory):
    """A new environment with the wheel; the other packages are those of this environment."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = folder / "lib" / version / "site-packages"
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    command = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "-q",
        "--no-deps",
        "--no-index",
    ]
    subprocess.run([*command, "--ignore-installed", str(archives[0])], check=True)
    return folder


def start(environment, folder, *command):
    """A command of the new environment, started in a folder without the checkout."""
    variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    variables |= {"RAYFED_CACHE": str(folder / "cache")}
    program = str(environment / "bin" / command[0])
    done = subprocess.run(
        [program, *command[1:]], cwd=folder, env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_archives_hold_configs_and_weights(archives):
    wheel = set(zipfile.ZipFile(archives[0]).namelist())
    tree = ["git", "ls-tree", "-r", "--name-only", "HEAD"]
    files = subprocess.run(tree, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    assert "rayfed/models/weights/README.md" in wheel
    assert [name for name in wheel if name.endswith("licenses/LICENSE")]
    assert {f"rayfed/{name}" for name in files if name.startswith("configs/")} <= wheel
    assert {name for name in files if name.startswith(("rayfed/", "algorithms/", "tune/"))} <= wheel
    assert not [name for name in wheel if name.startswith(("tests/", "docs/", "benchmarks/"))]
    with tarfile.open(archives[1]) as archive:
        source = {name.partition("/")[2] for name in archive.getnames()}
    assert {name for name in files if not name.startswith((".ci/", ".github/"))} <= source


def test_rayfed_is_that_of_the_wheel(installed, tmp_path):
    code = "import rayfed, algorithms, tune; print(rayfed.__file__, algorithms.__file__, tune.__file__)"
    found = start(installed, tmp_path, "python", "-c", code).split()
    assert all(name.startswith(str(installed)) for name in found)


def test_it_lists_runs_and_shows_outside_of_the_checkout(installed, tmp_path):
    listed = json.loads(start(installed, tmp_path, "rayfed", "list", "--json"))
    assert {"fedgcr", "fedra"} <= {choice["name"] for choice in listed["algorithms"]}
    assert {choice["name"] for choice in listed["experiments"]} >= {"fedra/table1", "fedra/table1/mini"}
    overrides = [
        "algorithm=fedavg",
        "rounds=1",
        "data.limit=24",
        "cluster=inline",
        "output=run",
        "figures=false",
    ]
    shown = start(installed, tmp_path, "rayfed", "run", *overrides)
    assert "tensors sha256" in shown
    assert (tmp_path / "run" / "report.md").is_file()
    assert "fedavg" in start(installed, tmp_path, "rayfed", "view", "run")
    start(installed, tmp_path, "rayfed", "report", "run", "--out", "page.html")
    assert (tmp_path / "page.html").read_text().count("fedavg") > 1
