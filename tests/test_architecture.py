"""docs/architecture.md describes the packages as they are."""

import importlib
import importlib.util
import json
import re
import sys
import traceback
from collections import Counter
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from rayfed import Experiment, Local, Method, Server, Task, Update
from rayfed.config.schema import Config
from rayfed.engine.loop import RoundPlan
from rayfed.experiment.plan import prepared
from rayfed.federation.cohort import Cohort, Federation
from rayfed.run import main
from rayfed.tuning.full import Full
from tests.conftest import ROOT, SMALL
from tests.rings import RingsContract, Tree

spec = importlib.util.spec_from_file_location("layers", ROOT / "docs" / "layers.py")
layers = importlib.util.module_from_spec(spec)
spec.loader.exec_module(layers)


def test_the_objects_that_are_handed_over_are_those_that_run(tmp_path):
    """The design of a config has the classes and functions themselves, and so has the run."""

    class Halved(Server):
        pass

    class Patient(Local):
        pass

    @dataclass(frozen=True)
    class Whole(Full):
        pass

    def loss(outputs, targets):
        return torch.nn.functional.cross_entropy(outputs, targets, reduction="none")

    def right(outputs, targets):
        return (outputs.argmax(1) == targets).float()

    def first(round, clients, rng):
        return list(clients)[:2]

    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 2))
    data = {f"c{i}": (np.random.default_rng(i).normal(size=(6, 4)), np.arange(6) % 2) for i in range(3)}
    given = {"method": (Halved, Patient), "model": network, "data": data, "sampling": first}
    given |= {"tuning": Whole(), "task": Task(loss=loss, metrics={"right": right})}
    setup = prepared(Experiment(**given, evaluation={"every": 0}, **{"data.cache": str(tmp_path)}).config())
    design = setup.design
    assert type(design.parts.server) is type(setup.experiment.server) is Halved
    assert type(design.parts.local) is type(setup.experiment.local) is Patient
    assert type(design.parts.tuning) is type(setup.context.tuning) is Whole
    assert setup.context.objective.given.loss is loss
    assert design.rule is setup.experiment.sampling is first
    assert design.network.values is network


def test_the_table_and_the_picture_are_those_of_the_tree():
    """Run `python -m docs.layers` where this fails."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    assert text == layers.page(text)
    assert layers.PICTURE.read_text() == layers.picture()


def test_every_module_and_package_has_a_row():
    folder = ROOT / "rayfed"
    modules = {path.stem for path in folder.glob("*.py") if path.stem != "__init__"}
    packages = {path.parent.name for path in folder.glob("*/__init__.py")}
    rows = re.findall(r"^\| `(\w+)` \|", layers.table(), flags=re.MULTILINE)
    assert sorted(rows) == sorted(modules | packages)


def test_the_steps_of_a_run_are_functions_of_the_files_named():
    text = (ROOT / "docs" / "architecture.md").read_text()
    steps = re.findall(r"^(\w+) +(rayfed/[\w/]+\.py) ", text, flags=re.MULTILINE)
    assert "run_rounds" in dict(steps)
    assert [step for step in steps if f"def {step[0]}(" not in (ROOT / step[1]).read_text()] == []


def test_no_import_crosses_a_ring():
    assert Tree().crossings() == []


def write_tree(root, **files):
    for name, text in files.items():
        path = root / "rayfed" / f"{name.replace('.', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Tree(root)


def test_an_import_that_crosses_a_ring_is_found_wherever_it_stands(tmp_path):
    files = {
        "engine.loop": "def late():\n    import rayfed.report.page.render",
        "engine.setup": "if TYPE_CHECKING:\n    from rayfed.run import main",
        "report.page.render": "from rayfed.engine import loop",
        "report.__init__": '"""Only a docstring."""',
        "run": "import rayfed.report\nimport rayfed.engine.loop",
    }
    tree = write_tree(tmp_path, **files)
    assert tree.crossings() == ["rayfed.engine.loop -> rayfed.report.page.render"]
    assert tree.reached(["rayfed.run"]) == {"rayfed.run", "rayfed.engine.loop", "rayfed.report.page.render"}
    assert tree.reached(["rayfed.run"], without=["views"]) == {"rayfed.run", "rayfed.engine.loop"}


def test_a_crossing_breaks_the_contract(tmp_path, monkeypatch, capsys):
    tree = write_tree(tmp_path, **{"engine.loop": "import rayfed.run", "run": "x = 1"})
    contract = RingsContract("rings", {}, {})
    assert contract.check(None, False).kept
    monkeypatch.setattr("tests.rings.Tree", lambda: tree)
    check = contract.check(None, False)
    assert not check.kept
    contract.render_broken_contract(check)
    assert "rayfed.engine.loop -> rayfed.run: crosses a ring" in capsys.readouterr().out


def calls():
    """Functions of rayfed that are being executed, from the outermost one, with their files."""
    files = [(frame.name, Path(frame.filename)) for frame in traceback.extract_stack()]
    return [[name, f.relative_to(ROOT).as_posix()] for name, f in files if (ROOT / "rayfed") in f.parents]


@dataclass(frozen=True)
class Tracing(Server):
    """Writes into `file` who called `aggregate`."""

    file: str = ""

    def aggregate(self, state, cohort, updates):
        Path(self.file).write_text(json.dumps(calls()))
        return super().aggregate(state, cohort, updates)


TRACING = Method(server=Tracing)


def count_updates(file):
    """Write the client of every `Update` that is made from now on into a file; returns what ends it."""
    plain = Update.__init__

    def init(self, *args, **fields):
        plain(self, *args, **fields)
        with Path(file).open("a") as lines:
            lines.write(f"{self.client}\n")

    Update.__init__ = init
    return lambda: setattr(Update, "__init__", plain)


@dataclass(frozen=True)
class CountingServer(Server):
    """Counts in `file` the updates that its process makes between the training and the sum."""

    file: str = ""

    def round(self, state, cohort, local):
        end = count_updates(self.file)
        try:
            return super().round(state, cohort, local)
        finally:
            end()

    def average(self, state, updates, weights):
        Path(self.file).replace(f"{self.file}.summed")
        return super().average(state, updates, weights)


@dataclass(frozen=True)
class CountingLocal(Local):
    """Counts in `file`, if a server half has not begun that in this process, the updates of its clients."""

    file: str = ""

    def train(self, client, sent):
        if Update.__init__.__module__ != __name__:
            count_updates(self.file)
        return super().train(client, sent)


COUNTING = Method(server=CountingServer, local=CountingLocal)


def rebuilt(tmp_path, cache, *more):
    """The numbers of times that the updates of clients were made anew before the sum."""
    options = [*SMALL[1:], f"data.cache={cache}", f"output={tmp_path / 'run'}", "evaluation.every=0", *more]
    file = tmp_path / "updates.txt"
    method = [f"algorithm={__name__}:COUNTING", f"server.file={file}", f"local.file={file}"]
    assert main([*options, *method, "--quiet"]) == 0
    made = Counter(Path(f"{file}.summed").read_text().split())
    assert made
    return {count - 1 for count in made.values()}


CODES = "channel=[{clip: 9.0}, {top_k: 0.5}, fp16]"


def test_an_update_is_rebuilt_once_in_one_process(tmp_path, cache):
    assert rebuilt(tmp_path, cache, "cluster=inline") == {1}


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.steady
@pytest.mark.parametrize(("more", "times"), [((), 2), ((CODES,), 3)])
def test_an_update_is_rebuilt_twice_on_ray_and_once_more_after_a_channel(
    tmp_path, cache, ray_cluster, more, times
):
    assert rebuilt(tmp_path, cache, "cluster.executor=ray", "cluster.actors=1", *more) == {times}


def traced(tmp_path, cache, *more):
    """The calls of a run by the command line as the process with the method's server half sees them."""
    options = [*SMALL[1:], f"data.cache={cache}", f"output={tmp_path / 'run'}", *more]
    method = [f"algorithm={__name__}:TRACING", f"server.file={tmp_path / 'calls.json'}"]
    assert main([*options, *method, "--quiet"]) == 0
    return json.loads((tmp_path / "calls.json").read_text())


def steps_of_the_page():
    """Functions, their files, and where they run, as the page lists them."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    return [
        list(step) for step in re.findall(r"^(\w+) +(rayfed/[\w/]+\.py) +(.*)$", text, flags=re.MULTILINE)
    ]


def test_the_steps_of_a_run_are_the_calls_of_a_run_in_one_process(tmp_path, cache):
    listed = [step[:2] for step in steps_of_the_page() if not step[2].startswith("on Ray")]
    found = traced(tmp_path, cache, "cluster=inline")
    assert found[found.index(["main", "rayfed/run.py"]) :] == listed
    assert len(listed) == 9


def test_the_classes_that_carry_an_experiment_are_where_the_page_says():
    text = (ROOT / "docs" / "architecture.md").read_text()
    carriers = re.findall(r"^(\w+) +(rayfed\.[\w.]+) ", text, flags=re.MULTILINE)
    assert len(carriers) == 5
    found = {name: getattr(importlib.import_module(module), name) for name, module in carriers}
    assert all(is_dataclass(carrier) for carrier in found.values())
    shared = {one.name for one in fields(Federation)}
    assert {one.name for one in fields(RoundPlan)} >= shared <= {one.name for one in fields(Cohort)}
    own = set(RoundPlan.__annotations__), set(Cohort.__annotations__)
    assert not shared & (own[0] | own[1])
    assert own[0] & own[1] == {"capacity"}  # drawn anew in a round where the experiment has none


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.steady
def test_the_steps_of_a_run_are_the_calls_of_a_run_on_ray(tmp_path, cache, ray_cluster, monkeypatch):
    from rayfed.executors.connection import Health

    waits = []
    wait = Health.wait

    def waiting(*args, **kwargs):
        waits.append(calls())
        return wait(*args, **kwargs)

    monkeypatch.setattr(Health, "wait", waiting)
    there = traced(tmp_path, cache, "cluster.executor=ray", "cluster.actors=1")
    rows = [found for found in waits if found[-2:-1] == [["rows", "rayfed/engine/session.py"]]]
    here = rows[-1][rows[-1].index(["main", "rayfed/run.py"]) :]
    listed = [step[:2] for step in steps_of_the_page() if not step[2].startswith("with cluster=inline")]
    assert here + there == listed
    assert len(listed) <= 13


def test_each_name_of_a_module_and_a_class_stands_for_one_thing():
    files = {path.relative_to(ROOT).as_posix(): path.read_text() for path in (ROOT / "rayfed").rglob("*.py")}
    own = [file for file in files if not re.search(r"/tuning/|/readers/|/kinds/|/__\w+__\.py$", file)]
    stems = Counter(Path(file).name for file in own)
    assert {name for name, count in stems.items() if count > 1} == set()
    classes = Counter(re.findall(r"^class (\w+)", "\n".join(files.values()), flags=re.MULTILINE))
    assert {name for name, count in classes.items() if count > 1} == set()


def modules(*folders):
    """The text of each module, by its path."""
    return {
        path.relative_to(ROOT).as_posix(): path.read_text()
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
    }


def test_few_modules_open_the_files_of_runs():
    """All others read a run by `RecordedRun`, which also chooses the reported round."""
    reads = (
        r"\b(read_rows|rows_so_far|read_footer|read_tensors)\(|(?<!pq\.)\bread_table\(|\bHistory\("
        r"|read_(yaml|json)\([^)\n]*\"(config\.yaml|environment\.json)\""
        r"|\"(clients|partition|events|rounds|transfers)\.parquet\", *\["
    )
    found = {file for file, text in modules("rayfed", "tune").items() if re.search(reads, text)}
    writers = {"rayfed/record/checkpoint.py", "rayfed/record/folder.py"}
    assert found - writers == {"rayfed/record/readers.py", "rayfed/record/recorded_run.py"}


def test_few_modules_spell_the_columns_of_results():
    """Only the one that computes them, and the one that describes them."""
    for column in ("sigma_type", "sigma_client", "worst_tenth_"):
        found = {file for file, text in modules("rayfed", "tune").items() if column in text}
        assert found == {"rayfed/columns.py", "rayfed/evaluation/metrics.py"}, column


def test_every_path_that_the_page_names_exists():
    text = (ROOT / "docs" / "architecture.md").read_text()
    paths = re.findall(r"`((?:rayfed|tests|docs|algorithms|tune|configs)/[\w/.]*)`", text)
    assert paths
    assert [path for path in paths if not (ROOT / path).exists()] == []


def carried(rings):
    """Functions of modules of these rings that are called with a `Config` in the block, and their files."""
    tree, found = Tree(), set()
    files = {str(file) for name, file in tree.files.items() if tree.ring(name) in rings}

    def look(frame, event, arg):
        code = frame.f_code
        if event == "call" and code.co_filename in files:
            names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            if any(isinstance(frame.f_locals.get(name), Config) for name in names):
                found.add((Path(code.co_filename).relative_to(ROOT).as_posix(), code.co_name))

    return found, look


@pytest.mark.parametrize("more", [("algorithm=fedavg",), ("algorithm=fedprox", "sampling=by_size")])
def test_below_the_names_nobody_gets_a_config(tmp_path, cache, more):
    """What runs an experiment has its objects; the names that chose them are known above it only."""
    found, look = carried({"core", "fast", "methods", "datasets"})
    above, look_above = carried({"names"})
    options = [*SMALL[1:], f"data.cache={cache}", f"output={tmp_path / 'run'}", "cluster=inline", *more]

    def both(*event):
        look(*event)
        look_above(*event)

    sys.setprofile(both)
    try:
        assert main([*options, "--quiet"]) == 0
    finally:
        sys.setprofile(None)
    assert ("rayfed/config/look_up.py", "design_of") in above
    assert found == set()
