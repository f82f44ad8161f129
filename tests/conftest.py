"""What every test may use: one Ray cluster for the session, small experiments, the folder with real data."""

from __future__ import annotations

import atexit
import gc
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import rayfed
from rayfed.config.schema import load_config
from rayfed.errors import ConfigError
from rayfed.executors.client_actor import NEW_OBJECTS
from rayfed.experiment.finished_run import Run
from rayfed.terminal.exit_code import STOP
from rayfed.testing import SGD, plain_steps
from tests.fuzz import outcomes
from tests.gallery import Gallery, session_folder
from tests.part import left_out, part_of


def _end_quietly() -> None:
    """Discard what compiled libraries print when Python has ended, such as the objects that Triton leaks.

    Without this, thirty lines of theirs stand below the result of a test run.
    """
    if "triton" in sys.modules:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


atexit.register(_end_quietly)  # registered first, so it runs last: errors of other handlers are still seen
gc.disable()  # until all tests are collected: what is imported stays, and collections only count it again
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Ray starts its workers with nice 15, so that beside other tests actors would get hardly any time.
os.environ.setdefault("RAY_worker_niceness", "0")
# Ray prints a warning about a disk that is 95 % full into the output of whichever test runs then.
os.environ.setdefault("RAY_local_fs_capacity_threshold", "1")
set_threads = torch.set_num_threads
set_threads(int(os.environ["OMP_NUM_THREADS"]))
if torch.get_num_threads() > 1:  # an imitation of tests/roundings.py; experiments would ask for one thread
    torch.set_num_threads = lambda count: None

ROOT = Path(__file__).parent.parent
SMALL = (
    "algorithm=fedavg",
    "data.limit=24",
    "rounds=2",
    "model.options={depth: 4}",
    "model.pretrained=false",
    "tuning.rank=2",
    "figures=false",
    *SGD,
)
"""Overrides of an experiment that takes about a second in one process."""


NUMERIC = (
    *("algorithms/test_end_to_end.py", "algorithms/test_fedclip.py", "algorithms/test_fedgcr.py"),
    *("algorithms/test_fedotp.py", "algorithms/test_fedpgp.py", "algorithms/test_pfedmma.py"),
    *("algorithms/test_fedra.py", "algorithms/test_fft_gp.py", "algorithms/test_inclusivefl.py"),
    *("algorithms/test_meta.py", "algorithms/test_rounds_by_hand.py", "algorithms/test_wiring.py"),
    *("rayfed/federation/test_client_gradients.py", "rayfed/fast/test_group.py"),
    *("rayfed/federation/test_aggregation.py", "rayfed/federation/test_params.py"),
    *("rayfed/models/test_attention.py", "rayfed/models/test_backbone.py", "rayfed/models/test_clip.py"),
    "rayfed/models/test_attention_class_token.py",
    *(
        "rayfed/models/test_lora_layer.py",
        "rayfed/fast/test_joint_lora.py",
        "rayfed/models/test_trunk.py",
        "rayfed/test_testing_play.py",
    ),
    *("rayfed/tuning/test_cocoop.py", "rayfed/tuning/test_gc_prompt.py", "rayfed/tuning/test_maple.py"),
    *("rayfed/test_objective.py", "test_rounding.py", "vectors/test_use.py"),
)
"""Files that `tests/roundings.py` runs (mark `numeric`): groups, kernels, devices, rounds, vectors."""

STEADY = (pytest.mark.slow, pytest.mark.steady)
"""Marks of a test of documentation, or of one of many alike, that `make test-steady` and CI run."""

QUICK = ("fedavg", "fedgcr", "fedra", "fedclip", "fft_gp", "scaffold", "fedex_lora", "fedbuff")
"""Methods that `make test` plays in every way: one for each kind of message and store."""


def quickly(names: Iterable[str], quick: Sequence[str] = QUICK) -> list[Any]:
    """Parameters of a test: `make test` runs those in `quick`, `make test-steady` and CI the others too."""
    names = [*names]
    assert {*quick} <= {*names}
    return [name if name in quick else pytest.param(name, marks=STEADY) for name in names]


def refused(*overrides: str) -> str:
    """The message with which a config with these overrides is refused."""
    with pytest.raises(ConfigError) as caught:
        load_config(overrides)
    return str(caught.value)


def pytest_configure(config: pytest.Config) -> None:
    """Refuse a version of pytest with which pytest-xdist 3.8 ignores groups without saying so."""
    if config.getoption("dist", "no") == "loadgroup" and pytest.version_tuple >= (9, 2):
        raise pytest.UsageError("pytest-xdist cannot group tests with pytest 9.2; install 9.1.1")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """End with the counts of tests/fuzz, why tests were skipped, and how to report a failure."""
    outcomes.pytest_terminal_summary(terminalreporter)
    for line in ending(terminalreporter.stats):
        terminalreporter.write_line(line)


def ending(stats: dict[str, list[Any]]) -> list[str]:
    """The last lines of the tests, from the reports by outcome."""
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in stats.get("skipped", ()))
    said = "; ".join(f"{number} x {reason}" for reason, number in sorted(reasons.items())) or "nothing"
    lines = [f"skipped: {said}"]
    if stats.get("failed") or stats.get("error"):
        lines.append("to report a failure, add what `python -m rayfed.doctor --report` prints")
    return lines


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let `--part 2/3` run a third of the steady cases of each test that has many."""
    parser.addoption("--part", default="1/1", help="the part of many steady cases that is run, such as 2/3")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the Ray tests, leave out other parts, and say which tests `--dist loadgroup` gives to one process.

    Tests on the shared cluster go to one process, so that it is started once. The tests of a file with
    fixtures of its own (scope="module") stay together, so that those are made once. All other tests, also
    those that start a cluster in their own process, go to whichever process is free.
    """
    steady = [
        (item.nodeid.partition("[")[0], item)
        for item in items
        if item.get_closest_marker("steady") is not None
    ]
    others = left_out(steady, *part_of(config.getoption("part")))
    config.hook.pytest_deselected(items=others)
    unwanted = set(map(id, others))
    items[:] = [item for item in items if id(item) not in unwanted]
    for item in items:
        names = getattr(item, "fixturenames", ())
        if item.path.relative_to(ROOT / "tests").as_posix() in NUMERIC:
            item.add_marker("numeric")
        if "ray_cluster" in names:
            item.add_marker("ray")
            item.add_marker(pytest.mark.xdist_group("ray"))
        elif any(_is_made_once_per_file(item, name) for name in names):
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))


UNFREEZE, FREEZE = gc.unfreeze, gc.freeze


def pytest_collection_finish() -> None:
    """Leave modules and tests, millions of objects that stay, out of garbage collection until the end.

    Clients on a device and actors give memory back by a collection of all objects, which takes half a second
    here each time. `all_objects` brings that back for a test.
    """
    gc.collect()
    gc.freeze()
    gc.unfreeze = gc.freeze = lambda: None
    atexit.register(UNFREEZE)  # the last collection frees what libraries report as leaked otherwise
    gc.set_threshold(NEW_OBJECTS)
    gc.enable()


@pytest.fixture
def all_objects(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let `gc.freeze` and `gc.unfreeze` work, and leave out all objects again after the test."""
    monkeypatch.setattr(gc, "freeze", FREEZE)
    monkeypatch.setattr(gc, "unfreeze", UNFREEZE)
    yield
    FREEZE()


def _is_made_once_per_file(item: pytest.Item, fixture: str) -> bool:
    made = getattr(item, "_fixtureinfo").name2fixturedefs.get(fixture, ())  # noqa: B009  (private in pytest)
    return any(each.scope == "module" for each in made)


@pytest.fixture(autouse=True)
def _no_interrupt_is_left() -> Iterator[None]:
    """A test that leaves STOP set would interrupt the first run of a later test, whichever that is."""
    yield
    left = STOP.is_set()
    STOP.clear()
    assert not left


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Compute in one thread, as a client does by default: in several, MKL may add in another order."""
    threads = torch.get_num_threads()
    set_threads(1)
    yield
    set_threads(threads)


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared data, which all processes of xdist share, because to draw and decode a set takes seconds."""
    return session_folder(tmp_path_factory, "cache")


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with real images and weights; a test that needs it is skipped where it is absent."""
    folder = Path(os.environ.get("RAYFED_SHARED", ROOT.parent / "shared"))
    if not folder.is_dir():
        pytest.skip(f"RAYFED_SHARED: no folder {folder} with real data")
    return folder


@pytest.fixture(scope="session")
def all_runs(tmp_path_factory: pytest.TempPathFactory) -> Gallery:
    return Gallery(session_folder(tmp_path_factory, "gallery"))


@pytest.fixture
def gallery(all_runs: Gallery) -> Iterator[Gallery]:
    """Finished runs of the session; fails a test that changes one."""
    yield all_runs
    all_runs.check()


@pytest.fixture
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw nothing at the end of a run in this process, which takes longer than the run itself."""
    monkeypatch.setattr("rayfed.report.figures.draw_figures", lambda folder: {})


@pytest.fixture
def small(tmp_path: Path, cache: Path) -> Callable[..., Run]:
    """Run a small experiment with `plain_steps`; later overrides win."""
    made = iter(range(1000))

    def run(*overrides: str) -> Run:
        output = f"output={tmp_path / f'run{next(made)}'}"
        fixed = [text for text in SMALL if text not in SGD] + [
            f"data.cache={cache}",
            "cluster=inline",
            output,
        ]
        return rayfed.simulate([*fixed, *plain_steps([*SMALL, *overrides]), *overrides])

    return run


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """Four declared CPUs, whatever the machine has; imports are preloaded to start actors faster."""
    import ray

    from rayfed.executors.ray_private import require_token

    require_token()  # Ray itself cannot start where HOME cannot be written
    os.environ["RAY_preload_python_modules"] = "torch,timm"  # noqa: SIM112  (Ray's own spelling)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ray.init(
            address="local",
            num_cpus=4,
            num_gpus=0,
            include_dashboard=False,
            logging_level="error",
            _system_config={
                "metrics_report_interval_ms": 2000,  # not 10,000, to see them soon
                "prestart_worker_first_driver": False,  # four processes, of which most would not be used
                "enable_worker_prestart": False,
            },
        )
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def pool_of_two(ray_cluster: None) -> Iterator[Callable[[Any], Any]]:
    """A pool of two actors for any experiment; the processes are kept, because imports take seconds."""
    import ray

    from rayfed.executors.actor_pool import RayExecutor

    pools: list[RayExecutor] = []

    def make(setup: Any) -> RayExecutor:
        weights = ray.put(dict(setup.weights))
        if not pools:
            pools.append(RayExecutor(ray.put(setup.context), weights, ["a", "b"], [{"num_cpus": 0}] * 2))
            pools[0].wait_until_up()
            return pools[0]
        pool = pools[0]
        pool.forget()
        pool._world, pool._weights = ray.put(setup.context), weights  # for actors that start anew
        again = [
            lane.actor.__ray_call__.remote(
                lambda self, *new: self.__init__(*new), lane.name, setup.context, weights
            )
            for lane in pool.lanes
        ]
        for lane, done in zip(pool.lanes, again, strict=True):
            try:
                ray.get(done)
            except ray.exceptions.RayActorError:  # the last test killed it
                pool.replace(lane)
        return pool

    yield make
    for pool in pools:
        pool.close()
