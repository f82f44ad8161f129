"""The recipes of CONTRIBUTING.md, followed as a stranger would: in a folder outside the checkout."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import rayfed
from rayfed.run import main
from tests.conftest import ROOT

PAGE = (ROOT / "CONTRIBUTING.md").read_text()
RECIPES = dict(
    re.findall(r"Save it\s+as\s+`([^`]+)`[^`]*(?:`[^`]*`)?:\n\n```python\n(.*?)```", PAGE, re.DOTALL)
)
COMMANDS = [
    line for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL) for line in block.strip().splitlines()
]
SHIPPED = {
    "mine/fedavgm.py": "algorithms/fedavgm.py",
    "mine/scaffold.py": "algorithms/scaffold.py",
    "mine/bitfit.py": "rayfed/tuning/bitfit.py",
}
SMALL = ("rounds=2", "data.limit=24", "cluster=inline", "figures=false")


def write_recipes(folder: Path) -> Path:
    for name, source in RECIPES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(source)
    return folder


@pytest.fixture
def own_folder(tmp_path, cache, monkeypatch):
    """A folder with the recipes and nothing else, in which commands are started."""
    monkeypatch.chdir(write_recipes(tmp_path))
    monkeypatch.setenv("RAYFED_CACHE", str(cache))
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    _forget_modules()  # another test may have a module of this name
    yield tmp_path
    _forget_modules()


def _forget_modules():
    for name in [name for name in sys.modules if name.partition(".")[0] == "mine"]:
        del sys.modules[name]


def start(*command: str) -> subprocess.CompletedProcess[str]:
    """A command as in a terminal, with this Python."""
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=500, check=False
    )


def test_the_page_has_every_recipe():
    files = {"fedprox", "fedavgm", "scaffold", "bitfit", "arrays", "shortest_first"}
    assert set(RECIPES) == {f"mine/{name}.py" for name in files} | {"make_digits.py", "test_mine.py"}
    assert PAGE.count("```python") == len(RECIPES) + 1  # and the rule of which a part is shown
    assert len(COMMANDS) == len(files) + 2


def test_the_rule_that_is_shown_weighs_by_square_roots(monkeypatch):
    """Two clients with 4 and 16 examples."""
    (shown,) = re.findall(r"```python\n(class SquareRoots.*?)```", PAGE, re.DOTALL)
    names = {"Server": rayfed.Server}
    exec(shown, names)
    monkeypatch.setattr(rayfed.Server, "average", lambda self, state, updates, weights: weights)
    updates = [rayfed.Update(client=str(n), num_examples=n) for n in (4, 16)]
    assert names["SquareRoots"]().aggregate(None, None, updates) == pytest.approx([1 / 3, 2 / 3])


@pytest.mark.parametrize("recipe", SHIPPED)
def test_what_ships_is_what_the_page_shows(recipe):
    assert RECIPES[recipe] == (ROOT / SHIPPED[recipe]).read_text()


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_passes_our_own_linter(recipe):
    for command in (["check"], ["format", "--check"]):
        place = ["--config", str(ROOT / "pyproject.toml"), "--stdin-filename", str(ROOT / recipe), "-"]
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, *place],
            input=RECIPES[recipe],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name.startswith("mine/")])
def test_a_recipe_imports_the_public_face_and_documented_modules_only(recipe):
    modules = set(re.findall(r"^\s*(?:from|import) (rayfed[\w.]*)", RECIPES[recipe], re.MULTILINE))
    assert modules
    assert modules <= {
        "rayfed",
        "rayfed.data.source",
        "rayfed.errors",
        "rayfed.executors.inline",
        "rayfed.executors.kinds.base",
        "rayfed.federation.executor",
        "rayfed.federation.params",
        "rayfed.models.backbone",
        "rayfed.tuning.base",
        "rayfed.types",
    }


@pytest.mark.slow
@pytest.mark.steady
def test_every_command_of_the_page_runs(own_folder):
    """In this process where that is the same, because every new one imports torch again."""
    for number, command in enumerate(COMMANDS):
        program, *arguments = command.removeprefix("python ").split()
        if "rayfed.run" in arguments:
            assert main([*arguments[1:], f"output=runs/{number}", "figures=false"]) == 0
            continue
        done = start(program, *arguments)
        assert done.returncode == 0, done.stdout + done.stderr
    runs = {path.parents[1].name for path in own_folder.glob("runs/*/model/params.safetensors")}
    assert len(runs) == len([command for command in COMMANDS if "rayfed.run" in command])


@pytest.mark.slow
@pytest.mark.steady
def test_what_is_written_from_the_page_composes_from_the_command_line(own_folder):
    assert start("make_digits.py").returncode == 0
    parts = ("algorithm=mine.scaffold:METHOD", "tuning=mine.bitfit:TUNING", "data=mine.arrays:READER")
    done = start("-m", "rayfed.run", *parts, "data.root=digits.npz", "output=mine_run", *SMALL)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (own_folder / "mine_run" / "report.md").exists()


@pytest.mark.slow
@pytest.mark.steady
@pytest.mark.ray
def test_ray_actors_import_what_is_written_from_the_page(own_folder):
    assert start("make_digits.py").returncode == 0
    parts = ("algorithm=mine.scaffold:METHOD", "tuning=mine.bitfit:TUNING", "data=mine.arrays:READER")
    digests = []
    for cluster in (("cluster=inline",), ("cluster.num_cpus=2", "cluster.dashboard=false")):
        options = ("data.root=digits.npz", "rounds=2", "data.limit=24", f"output=run{len(digests)}", *cluster)
        done = start("-m", "rayfed.run", *parts, *options)
        assert done.returncode == 0, done.stdout + done.stderr
        digests.append(re.search(r"sha256 (\w+)", done.stdout)[1])
    assert digests[0] == digests[1]


@pytest.mark.slow
@pytest.mark.steady
def test_the_local_loss_of_the_page_is_fedprox(own_folder):
    same = (*SMALL, "local.mu=0.5", "train.epochs=2")  # the pull is zero in the first step of a round
    shipped = rayfed.simulate(["algorithm=fedprox", "output=shipped", *same])
    written = rayfed.simulate(["algorithm=mine.fedprox:METHOD", "output=written", *same])
    plain = rayfed.simulate(["algorithm=fedavg", "output=plain", *SMALL, "train.epochs=2"])
    assert written.sha256 == shipped.sha256
    assert written.sha256 != plain.sha256
    none = rayfed.simulate(["algorithm=mine.fedprox:METHOD", "output=none", *same, "local.mu=0"])
    assert none.sha256 == plain.sha256
