"""Contract tests for methods, tuning schemes and readers of your own.

In a test file of your own:

    from rayfed.testing import check_method

    def test_my_method():
        check_method("mypackage.fedprox:METHOD")

The three `check_` functions raise AssertionError, or the error of the code under test, and need no test
framework. `play` runs one experiment on any device of torch and returns its result.
"""

from __future__ import annotations

import importlib
import pickle
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from importlib.resources import files
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

from rayfed.columns import is_result
from rayfed.config.own_network import network_of
from rayfed.config.schema import build_parts, load_config
from rayfed.config.variants import own_optimizer
from rayfed.data.load_dataset import with_tokens
from rayfed.data.preparation import prepare as prepare_data
from rayfed.data.shards import open_dataset
from rayfed.data.source import Decoded, Source, make_source, task_of
from rayfed.data.text import Text, Tokens
from rayfed.engine.loop import RoundPlan, run_rounds
from rayfed.engine.record_rounds import RecordSettings, record_rounds
from rayfed.engine.setup import Setup
from rayfed.executors.inline import InlineExecutor
from rayfed.executors.wire import encode
from rayfed.experiment.finished_run import Run
from rayfed.experiment.plan import prepared
from rayfed.federation.executor import Call, Executor
from rayfed.federation.method_registry import check_compatible
from rayfed.federation.params import digest
from rayfed.heterogeneity.traces import TraceEntry
from rayfed.models.backbone import Backbone
from rayfed.models.build import build_backbone
from rayfed.models.model_config import ModelConfig
from rayfed.models.shared_weights import attach, checksum, dump, skeleton
from rayfed.objective import CLASSIFICATION, objective
from rayfed.tuning.base import Tuning, apply_tuning, export, load, trainable
from rayfed.types import Broadcast, Params, Update

SMALL = (
    "rounds=2",
    "model.options={depth: 4}",
    "model.pretrained=false",
    "train.batch_size=4",
    "data.partition.scheme=by_domain",
    "data.limit=12",
    "data.val=2",
)
"""Overrides of an experiment of about a second: two rounds of a small vision transformer."""

DOMAINS = "data.domains=[plain,fonts,street]"
"""Three clients of the embedded data set."""

SGD = ("train.optimizer=sgd", "train.lr=0.02")


def plain_steps(overrides: Sequence[str]) -> tuple[str, ...]:
    """Overrides for steps of SGD where the method brings no optimizer.

    Adam's step of a gradient near zero depends on how it is rounded, so that with the optimizer of a tuning
    two ways to compute the same could not be compared.

    Args:
        overrides: Those of an experiment, which are to follow.
    """
    chosen = dict(text.partition("=")[::2] for text in overrides)
    if "experiment" in chosen:
        return ()
    method = chosen.get("algorithm", "fedgcr")
    return () if own_optimizer(method) else SGD


def small_setup(*overrides: str) -> Setup:
    """The small experiment with `plain_steps`, prepared; later overrides win.

    Raises:
        ConfigError: An override is wrong.
    """
    return prepared(load_config([*SMALL, *plain_steps(overrides), *overrides]))


class WatchingExecutor(InlineExecutor):
    """Runs calls in this process; raises AssertionError if a call has changed its message."""

    def map(self, calls: Sequence[Call]) -> list[Update | None]:
        before = [_content(call.sent) for call in calls]
        updates = super().map(calls)
        for call, content in zip(calls, before, strict=True):
            assert _content(call.sent) == content, (
                f"the message to client {call.client!r} was changed in exchange {call.tag!r}; messages are "
                f"read-only: copy a tensor before writing into it"
            )
        return updates


def _content(sent: Broadcast) -> tuple[str, bytes]:
    """The content of a message, for exact comparison."""
    return digest(sent.params), pickle.dumps(encode(dict(sent.shared)))


@contextmanager
def two_actors(setup: Setup) -> Iterator[Executor]:
    """Two Ray actors that run clients; a cluster that is started for them ends with the block."""
    import ray

    from rayfed.executors.actor_pool import RayExecutor
    from rayfed.executors.connection import connection

    with connection("local", num_cpus=2, num_gpus=0, dashboard=False):
        weights = ray.put(dict(setup.weights))
        executor = RayExecutor(ray.put(setup.context), weights, ["a", "b"], [{"num_cpus": 0}] * 2)
        try:
            yield executor
        finally:
            executor.close()


def without_times(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row of a round without its timings."""
    return {name: value for name, value in row.items() if is_result(name)}


ONE_EXAMPLE = ("data.limit=13", "data.val=0", "data.test=1", "data.partition.clients_per_domain=6")
"""A split of the embedded data in which some clients have a single training example."""

SHORTEST = 20
"""Fewest characters of the first line of a method's docstring."""


def check_method(name: str, overrides: Sequence[str] = (), actors: bool = False) -> None:
    """Run every contract test on a method.

    Args:
        name: File name in algorithms/, or `package.module:NAME` of a `Method`.
        overrides: Settings as on the command line, such as `local.mu=0.1`; they win over those of the small
            experiment that the tests run on.
        actors: Also compare with two Ray actors, which takes some seconds more.

    Raises:
        AssertionError: The method breaks the contract; the message says how.
        ConfigError: There is no such method, or an override is wrong.
        ClientError: The method's client half failed.
    """
    for one in METHOD_CHECKS:
        one(name, overrides)
    if actors:
        same_tensors_on_actors(name, overrides)


def says_what_it_is(name: str, overrides: Sequence[str] = ()) -> None:
    """The module begins with a line that describes it, and its halves fit each other and the tuning."""
    config = load_config([f"algorithm={name}", *overrides])
    parts = build_parts(config)
    check_compatible(parts.server, parts.local, parts.tuning)
    module = name.partition(":")[0] if ":" in name else f"algorithms.{name}"
    doc = importlib.import_module(module).__doc__ or ""
    first = doc.strip().partition("\n")[0]
    assert len(first) > SHORTEST, f"{name}: begin the file with a docstring that says what the method does"


def leaves_messages_and_frozen_weights_alone(name: str, overrides: Sequence[str] = ()) -> None:
    """The method does not change messages or frozen weights, and all values stay finite."""
    setup = _setup(name, overrides)
    executor = WatchingExecutor(setup.context, setup.weights)
    frozen = executor.worker.checksum()
    *_, last = run_rounds(setup.experiment, executor, setup.start)
    assert executor.worker.checksum() == frozen, f"{name}: a frozen weight was changed"
    _check_finite(name, last.state.params)
    assert last.row["round"] == setup.experiment.rounds
    assert 0 <= last.row[setup.context.objective.metric] <= 1


def survives_a_client_with_one_example(name: str, overrides: Sequence[str] = ()) -> None:
    """A client with a single training example does not break a round."""
    setup = _setup(name, (*ONE_EXAMPLE, *overrides))
    *_, last = run_rounds(setup.experiment, InlineExecutor(setup.context, setup.weights), setup.start)
    _check_finite(name, last.state.params)


def repeats_itself_after_an_interruption(name: str, overrides: Sequence[str] = ()) -> list[dict[str, Any]]:
    """With missing clients, an interrupted and continued run ends with the tensors of an uninterrupted one.

    Some clients drop out in the first round, all of them in the second, and one in the third. Whatever a
    method keeps between rounds must be in `state.memory`, `state.shared` or `client.store` to pass this.

    Returns:
        The rows of the rounds, and a last one with the digest of the tensors.
    """
    setup = _setup(name, ("rounds=3", "evaluation.every=3", "faults.dropout=0.4", *overrides))
    experiment = _with_missing_clients(setup.experiment)
    with TemporaryDirectory() as folder:
        whole = _record(setup, experiment, Path(folder) / "whole")
        interrupted = Path(folder) / "interrupted"
        first = _record(setup, experiment, interrupted, rounds=1)
        continued = first + _record(setup, experiment, interrupted, resume=True)
        params = load_file(interrupted / "model" / "params.safetensors")
    assert continued == whole, (
        f"{name}: an interruption after the first round changed the result; keep what must survive a round "
        f"in state.memory, state.shared or client.store"
    )
    assert digest(params) == whole[-1]["sha256"]
    _check_finite(name, params)
    return whole


def same_tensors_on_actors(
    name: str,
    overrides: Sequence[str] = (),
    pool: Callable[[Setup], AbstractContextManager[Executor]] = two_actors,
) -> None:
    """Two Ray actors give the tensors and the rows that one process gives.

    Args:
        name: As for `check_method`.
        overrides: As for `check_method`.
        pool: Opens an executor with actors.
    """
    setup = _setup(name, overrides)
    experiment = replace(setup.experiment, clients_per_round=min(2, len(setup.experiment.clients)))
    *_, here = run_rounds(experiment, InlineExecutor(setup.context, setup.weights), setup.start)
    with pool(setup) as executor:
        *_, there = run_rounds(experiment, executor, setup.start)
    assert digest(here.state.params) == digest(there.state.params), f"{name}: actors give other tensors"
    assert without_times(here.row) == without_times(there.row), f"{name}: actors give other rows"


METHOD_CHECKS: tuple[Callable[[str, Sequence[str]], Any], ...] = (
    says_what_it_is,
    leaves_messages_and_frozen_weights_alone,
    survives_a_client_with_one_example,
    repeats_itself_after_an_interruption,
)
"""Every contract test of a method that needs no Ray: functions of its name and of overrides."""


def _setup(name: str, overrides: Sequence[str]) -> Setup:
    return small_setup(f"algorithm={name}", DOMAINS, *overrides)


def _with_missing_clients(experiment: RoundPlan) -> RoundPlan:
    """The experiment with faults: some clients drop out in round 1, all in round 2, one in round 3."""
    ids = list(experiment.clients)
    assert experiment.faults is not None
    lost = {(1, cid): TraceEntry(dropout=True) for cid in ids}
    lost |= {(2, cid): TraceEntry(dropout=cid == ids[0] and len(ids) > 1) for cid in ids}
    return replace(experiment, faults=replace(experiment.faults, trace=lost))


def _record(
    setup: Setup, experiment: RoundPlan, path: Path, rounds: int | None = None, resume: bool = False
) -> list[dict[str, Any]]:
    """Run all rounds, or the first `rounds`, and record them in a folder, with a new executor."""
    path.mkdir(exist_ok=True)
    executor = InlineExecutor(setup.context, setup.weights)
    running = record_rounds(
        experiment, executor, setup.start, RecordSettings(path=path, domains={}, resume=resume)
    )
    rows = [without_times(row) for row in islice(running, rounds)]
    running.close()
    return rows


def _check_finite(name: str, params: Params) -> None:
    bad = [key for key, value in params.items() if not torch.isfinite(value).all()]
    assert not bad, f"{name}: {bad[0]} is NaN or infinite after the last round"


CLASSES = 3
SEED = 0


def check_tuning(name: str, overrides: Sequence[str] = (), actors: bool = False) -> None:
    """Run every contract test on a tuning scheme, and those of methods on FedAvg with this scheme.

    Args:
        name: File name in rayfed/tuning/, or `package.module:NAME` of a class.
        overrides: Settings as on the command line, such as `tuning.train_head=false` or another model.
        actors: Also compare with two Ray actors, which takes some seconds more.

    Raises:
        AssertionError: The scheme breaks the contract; the message says how.
        ConfigError: There is no such scheme, or it refuses the model.
    """
    for one in TUNING_CHECKS:
        one(name, overrides)
    settings = (f"tuning={name}", *overrides)
    for check in METHOD_CHECKS:
        check("fedavg", settings)
    if actors:
        same_tensors_on_actors("fedavg", settings)


def starts_the_same_everywhere(name: str, overrides: Sequence[str] = ()) -> None:
    """Building the model twice with one seed gives the same values; a model without values can share them."""
    model, tuning = _config(name, overrides)
    first, second = _tune(model, tuning), _tune(model, tuning)
    assert digest(export(first)) == digest(export(second)), f"{name}: the start values change"
    assert pickle.loads(pickle.dumps(tuning)) == tuning, f"{name}: the scheme must survive pickling"
    shared = dump(first)
    bare = skeleton(lambda: _tune(model, tuning))
    attach(bare, shared)
    assert digest(export(bare)) == digest(export(first)), f"{name}: apply() differs on the meta device"


def trains_some_parameters_and_only_those(name: str, overrides: Sequence[str] = ()) -> None:
    """Some tensors train, a training step changes them, and the rest of the model does not change."""
    model, tuning = _config(name, overrides)
    tuned = _tune(model, tuning)
    live = trainable(tuned)
    assert live, f"{name}: nothing requires gradients; call requires_grad_(True) on what shall train"
    frozen, before = checksum(tuned), export(tuned)
    tuned.train()
    output = tuned.predict(tuned(torch.rand(2, 3, tuned.size, tuned.size)))
    optimizer = torch.optim.SGD(live.values(), lr=0.1)
    torch.nn.functional.cross_entropy(output, torch.tensor([0, 1])).backward()
    optimizer.step()
    assert checksum(tuned) == frozen, f"{name}: a frozen weight was changed"
    assert digest(export(tuned)) != digest(before), f"{name}: a training step changes nothing that travels"


@torch.no_grad()
def travels_completely(name: str, overrides: Sequence[str] = ()) -> None:
    """A model that loads the tensors that are sent gives the same output: training changes no others."""
    model, tuning = _config(name, overrides)
    sender, receiver = _tune(model, tuning), _tune(model, tuning)
    for value in trainable(sender).values():
        value.add_(0.01)
    load(receiver, export(sender))
    x = torch.rand(2, 3, sender.size, sender.size)
    answers = [one.eval().predict(one(x)) for one in (sender, receiver)]
    assert torch.equal(*answers), f"{name}: what travels does not determine the model's answer"


TUNING_CHECKS: tuple[Callable[[str, Sequence[str]], None], ...] = (
    starts_the_same_everywhere,
    trains_some_parameters_and_only_those,
    travels_completely,
)
"""Every contract test of a tuning scheme alone: functions of its name and of overrides."""


def _config(name: str, overrides: Sequence[str]) -> tuple[ModelConfig, Tuning]:
    config = load_config([*SMALL, "algorithm=fedavg", f"tuning={name}", *overrides])
    return config.model, build_parts(config).tuning


def _tune(model: ModelConfig, tuning: Tuning) -> Backbone:
    classes = tuple(f"class {i}" for i in range(CLASSES))
    return apply_tuning(build_backbone(model, classes, SEED, network=network_of(model.name)), tuning, SEED)


SIZES = (32, 20)
"""Sides in pixels, or characters of a window, for which examples are decoded."""

EXAMPLES = 16
"""Number of examples that are decoded, spread over the data set."""

THREADS = 4

TOKENIZER = str(files("rayfed.models") / "weights" / "lm_mini")
"""Folder of the tokenizer that these tests use."""


def check_reader(name: str, overrides: Sequence[str] = ()) -> None:
    """Run every contract test on a reader, and for classification two rounds of FedAvg on its data.

    Args:
        name: File name in rayfed/data/readers/, or `package.module:NAME` of a class.
        overrides: Settings as on the command line, such as `data.root=folder`.

    Raises:
        AssertionError: The reader breaks the contract; the message says how.
        ConfigError: There is no such reader, or the data are not what it expects.
    """
    for one in READER_CHECKS:
        one(name, overrides)
    if task_of(source_of(name, overrides)) == CLASSIFICATION:
        leaves_messages_and_frozen_weights_alone("fedavg", ("data.domains=null", *_settings(name, overrides)))


def source_of(name: str, overrides: Sequence[str]) -> Source:
    """The reader with the options that the overrides give it."""
    return make_source(load_config(["algorithm=fedavg", *_settings(name, overrides)]).data)


def lists_every_example_once(name: str, overrides: Sequence[str] = ()) -> None:
    """Arrays have one length, labels and domains are within range, and keys `domain/...` are unique."""
    source = source_of(name, overrides)
    listing = source.scan()
    size = len(listing.keys)
    assert size, f"{name}: scan() found no example"
    assert len(set(listing.keys)) == size, f"{name}: two examples have the same key"
    for what, array, dtype in (
        ("labels", listing.labels, np.int64),
        ("domain", listing.domain, np.int64),
        ("test", listing.test, np.bool_),
    ):
        assert array.shape == (size,), f"{name}: {what} has shape {array.shape} for {size} keys"
        assert array.dtype == dtype, f"{name}: {what} is {array.dtype} instead of {np.dtype(dtype)}"
    _check_range(name, "domain", listing.domain, len(listing.domains))
    if task_of(source) == CLASSIFICATION:
        _check_range(name, "labels", listing.labels, len(listing.classes))
    for key, domain in zip(listing.keys, listing.domain, strict=True):
        wanted = listing.domains[domain]
        assert key.startswith(f"{wanted}/"), f"{name}: the key {key!r} does not begin with {wanted!r}/"


def lists_the_same_twice(name: str, overrides: Sequence[str] = ()) -> None:
    """Two readers of the same data list the same examples in the same order, with one fingerprint."""
    first, second = source_of(name, overrides).scan(), source_of(name, overrides).scan()
    assert list(first.keys) == list(second.keys), f"{name}: the order of the examples changes"
    assert np.array_equal(first.labels, second.labels), f"{name}: the labels change"
    assert first.fingerprint == second.fingerprint, f"{name}: the fingerprint changes although no example did"
    own = source_of(name, overrides).fingerprint()
    assert own == first.fingerprint, f"{name}: fingerprint() is not the fingerprint of scan()"


def decodes_the_same_everywhere(name: str, overrides: Sequence[str] = ()) -> None:
    """decode() gives arrays of the shape and type of the task, also when several threads call it.

    Of a data set of texts it gives a `Text`.
    """
    source = source_of(name, overrides)
    listing = source.scan()
    chosen = np.unique(np.linspace(0, len(listing.keys) - 1, EXAMPLES).astype(int)).tolist()
    if objective(task_of(source)).tokens:
        texts = [source.decode(listing, index, SIZES[0]) for index in chosen]
        assert all(isinstance(text, Text) for text in texts), f"{name}: decode() gave no Text"
        with ThreadPoolExecutor(THREADS) as pool:
            others = list(pool.map(lambda i: source.decode(listing, i, SIZES[0]), chosen))
        assert texts == others, f"{name}: decode() gives something else when several threads call it"
        return
    for size in SIZES:
        layout = objective(task_of(source)).layout(size)
        wanted = [(layout[field].shape, layout[field].base) for field in layout.names or ()]
        alone = [_arrays(source.decode(listing, index, size)) for index in chosen]
        for index, arrays in zip(chosen, alone, strict=True):
            shapes = [(array.shape, array.dtype) for array in arrays]
            assert shapes == wanted, (
                f"{name}: decode() of {listing.keys[index]!r} gave {shapes}, not {wanted}"
            )
        with ThreadPoolExecutor(THREADS) as pool:
            together = [_arrays(a) for a in pool.map(lambda i, s=size: source.decode(listing, i, s), chosen)]
        pairs = [
            pair for one, other in zip(alone, together, strict=True) for pair in zip(one, other, strict=True)
        ]
        same = all(np.array_equal(*pair) for pair in pairs)
        assert same, f"{name}: decode() gives something else when several threads call it"


def prepares_the_same_twice(name: str, overrides: Sequence[str] = ()) -> None:
    """Preparing the data set twice, in two empty caches, gives the same content."""
    digests = set()
    config = load_config(["algorithm=fedavg", *_settings(name, overrides)]).data
    for _ in range(2):
        with TemporaryDirectory() as folder:
            source = with_tokens(source_of(name, overrides), config, TOKENIZER)
            digests.add(open_dataset(prepare_data(source, SIZES[0], Path(folder))).digest)
    assert len(digests) == 1, f"{name}: the prepared data differ although the data set is the same"


READER_CHECKS: tuple[Callable[[str, Sequence[str]], None], ...] = (
    lists_every_example_once,
    lists_the_same_twice,
    decodes_the_same_everywhere,
    prepares_the_same_twice,
)
"""Every contract test of a reader: functions of its name and of overrides."""


def _settings(name: str, overrides: Sequence[str]) -> tuple[str, ...]:
    return (f"data={name}", *overrides)


def _arrays(decoded: Decoded) -> tuple[NDArray[np.uint8], ...]:
    assert not isinstance(decoded, Text | Tokens), "decode() gave a text for a task without texts"
    return decoded if isinstance(decoded, tuple) else (decoded,)


def _check_range(name: str, what: str, values: NDArray[np.int64], names: int) -> None:
    low, high = int(values.min()), int(values.max())
    assert low >= 0, f"{name}: {what} holds {low}"
    assert high < names, f"{name}: {what} holds {high}, and there are {names} names"


def play(overrides: Sequence[str], device: str | torch.device = "cpu", resume: bool = False) -> Run:
    """Play one experiment in this process, with its clients on a device; nothing is shown.

    The device may be one of a test: any that torch knows by its name. The rounds are recorded as in any run,
    without figures and report. Not for `compare` and `protocol=leave_one_out`, which are several experiments.

    Args:
        overrides: Settings as on the command line. `output` names the folder; without it, the folder is a
            new one among the temporary files of the system.
        device: Device of the model and the batches.
        resume: Continue after the last checkpoint in `output`.

    Returns:
        The finished run.

    Raises:
        ConfigError: Something in the overrides is wrong.
        ClientError: A client failed.
    """
    config = load_config([*overrides, "cluster=inline"])
    setup = prepared(config)
    path = Path(config.output or tempfile.mkdtemp(prefix="rayfed-play-"))
    path.mkdir(parents=True, exist_ok=True)
    executor = InlineExecutor(setup.context, setup.weights, config.failures, device)
    keeping = RecordSettings.of(setup, path, resume)
    *_, last = record_rounds(setup.experiment, executor, setup.start, keeping)
    return Run(path, last["sha256"], config)
