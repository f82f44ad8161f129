"""The typed schema of an experiment, checked against the dataclasses that the code runs on.

`rayfed.config.compose` puts the YAML together, `rayfed.config.check` builds dataclasses from it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

from annotated_types import Ge, Le
from pydantic import TypeAdapter

from rayfed.config.check import parse
from rayfed.config.compose import compose
from rayfed.data.config import DataConfig
from rayfed.documents import user_path
from rayfed.errors import ConfigError, shown
from rayfed.executors.failures import OnError, OnNonFinite
from rayfed.federation.client import TrainConfig
from rayfed.federation.local import Local
from rayfed.federation.method import METHODS
from rayfed.federation.server import Server
from rayfed.heterogeneity.capacity import CapacityConfig
from rayfed.heterogeneity.faults import FaultsConfig
from rayfed.models.config import ModelConfig
from rayfed.tuning.base import TUNINGS, Tuning
from rayfed.types import Count, NonNegative, Positive


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """Where clients run; nothing here changes a result.

    Attributes:
        executor: Ray actors, or everything in this process.
        address: A running Ray cluster (host:port); none: RAY_ADDRESS, else a cluster of our own on this
            machine.
        actors: Number of client actors; `auto` fits the cluster; `per_client`: each client has its own.
        cpus_per_actor: CPUs an actor occupies; auto: one, or less where more actors are asked for than there
            are.
        gpus_per_actor: Share of a GPU an actor occupies; auto: all GPUs are shared out evenly.
        memory_per_actor: GB an actor may need; limits `auto`.
        threads: torch threads of an actor. Part of the result: float sums depend on it.
        num_cpus: CPUs of a cluster of our own; none: what the machine has.
        num_gpus: GPUs of a cluster of our own; none: what the machine has.
        dashboard: Start Ray's dashboard with a cluster of our own.
        metrics: Tell Prometheus about the run, through Ray (docs/monitoring.md).
        task_names: Tasks in Ray's dashboard are named after their exchange, or (`client`) also after round
            and client, of which Ray keeps time series without end.
        connect_timeout: Seconds to wait for a cluster, or for actors to be placed.
        retries: How often a client's work is repeated after its actor was lost.
    """

    executor: Literal["ray", "inline"] = "ray"
    address: str | None = None
    actors: Literal["auto", "per_client"] | Count = "auto"
    cpus_per_actor: Literal["auto"] | Positive = "auto"
    gpus_per_actor: Literal["auto"] | NonNegative = "auto"
    memory_per_actor: Positive = 1.0
    threads: Annotated[int, Ge(1), Le(1024)] = 1
    num_cpus: Count | None = None
    num_gpus: Annotated[int, Ge(0)] | None = None
    dashboard: bool = True
    metrics: bool = True
    task_names: Literal["exchange", "client"] = "exchange"
    connect_timeout: Positive = 30.0
    retries: Annotated[int, Ge(0)] = 2


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """What is scored when.

    Attributes:
        every: Score the global model in every such round and in the last one; 0: never.
        personal: Also score the model each client would deploy, on its own test split.
        validation: Also score the global model on the clients' validation splits, to choose a round by.
        table: The final table has a row for each domain, or (`clients`) for each model the statistics over
            clients: average, worst and best tenth, variance.
    """

    every: Annotated[int, Ge(0)] = 1
    personal: bool = False
    validation: bool = False
    table: Literal["domains", "clients"] = "domains"


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """What is kept for going on after a crash; nothing here changes a result.

    Attributes:
        every: Write a checkpoint after every such round, and after the last one; 0: only after the last one.
        keep: How many of the last checkpoints stay.
    """

    every: Annotated[int, Ge(0)] = 1
    keep: Count = 2


@dataclass(frozen=True, kw_only=True)
class Config:
    """One experiment.

    Attributes:
        algorithm: File name in algorithms/, or package.module:NAME.
        server: Hyperparameters of the driver half; `name` takes it from another algorithm.
        local: Hyperparameters of the client half; `name` takes it from another algorithm.
        tuning: `name` of the scheme and its fields.
        model: Backbone.
        data: Data set and who has what.
        train: Local optimisation.
        evaluation: What is scored when.
        cluster: Where clients run.
        rounds: Rounds to run.
        seed: Seed of everything random.
        clients_per_round: How many clients take part in a round, or all.
        sampling: uniform draws, or one client of each domain a round.
        capacity: Blocks a client can hold: one number, a list by client or by domain, shares by depth,
            dynamic (drawn each round); none: all.
        compare: Algorithms to run as well, with the same data, tuning and training; they go into the final
            table and into compare/<name> of the run's folder.
        faults: Clients that cannot be reached, drop out or are slow; nothing by default.
        deterministic: Refuse nondeterministic kernels.
        protocol: `leave_one_out`: one run for each domain, which no client owns in it, and one table.
        checkpoint: What is kept for going on after a crash.
        on_client_error: A client that raises, answers nonsense or is too slow ends the run (raise), is asked
            again up to cluster.retries times and then ends it (retry), or is left out of the round (drop).
        on_nonfinite: A loss or a global tensor that is NaN or infinite is noted in the events, on the screen
            and in the report, and the run goes on (warn) or ends (raise).
        client_timeout: Seconds a client may take; none: as long as it likes. On Ray only.
        watchdog: Seconds without any answer after which the clients that are waited for are named, with
            what they are doing; none: never.
        tensorboard: Also write the rounds for TensorBoard, into tensorboard/ of the run's folder.
        trackers: Also send the rounds to MLflow or to Weights & Biases (docs/monitoring.md).
        output: Folder of the run; none: a new one under runs/.
        overwrite: Allow `output` to hold an earlier run, which is replaced.
    """

    algorithm: str = "fedavg"
    server: dict[str, Any] = field(default_factory=dict)
    local: dict[str, Any] = field(default_factory=dict)
    tuning: dict[str, Any] = field(default_factory=lambda: {"name": "lora"})
    model: ModelConfig
    data: DataConfig
    train: TrainConfig = field(default_factory=TrainConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    rounds: Count = 10
    seed: Annotated[int, Ge(0)] = 0
    clients_per_round: Literal["all"] | Count = "all"
    sampling: Literal["uniform", "one_per_domain"] = "uniform"
    capacity: CapacityConfig = None
    compare: str | tuple[str, ...] = ()
    faults: FaultsConfig = field(default_factory=FaultsConfig)
    deterministic: bool = False
    protocol: Literal["single", "leave_one_out"] = "single"
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    on_client_error: OnError = "raise"
    on_nonfinite: OnNonFinite = "warn"
    client_timeout: Positive | None = None
    watchdog: Positive | None = 300.0
    tensorboard: bool = True
    trackers: tuple[Literal["mlflow", "wandb"], ...] = ()
    output: str | None = None
    overwrite: bool = False


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The three exchangeable parts of an algorithm."""

    server: Server
    local: Local
    tuning: Tuning


def load_config(overrides: Sequence[str] = (), file: str | Path | None = None) -> Config:
    """Compose, override and check one experiment.

    Args:
        overrides: `group=name` and `section.key=value`, in this order of precedence: groups, then values.
        file: A resolved config (a run's config.yaml) to start from instead of the defaults.

    Raises:
        ConfigError: One line: the key, its value, what is allowed.
    """
    return resolve(compose(overrides, file))


def resolve(tree: Mapping[str, Any]) -> Config:
    """Check a plain mapping and fill in every default, those of the halves and the tuning included."""
    config = parse(Config, spelled_out(tree), "")
    parts = build_parts(config)
    return dataclasses.replace(
        config,
        server=_named(config.server.get("name", config.algorithm), parts.server),
        local=_named(config.local.get("name", config.algorithm), parts.local),
        tuning=_named(config.tuning["name"], parts.tuning),
    )


PATHS = ("output", "data.root", "data.cache", "data.partition.file", "faults.trace", "model.pretrained")
"""Keys that may hold a path; `~` in them stands for a home folder."""


def spelled_out(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    """`data.partition: path` written in full, as `data.partition.file: path`, and `~` in every path.

    Raises:
        ConfigError: A path begins with `~` and names no home folder.
    """
    data = tree.get("data")
    if isinstance(data, Mapping) and isinstance(data.get("partition"), str):
        tree = {**tree, "data": {**data, "partition": {"file": data["partition"]}}}
    for key in PATHS:
        tree = _at_home(tree, key.split("."), key)
    return tree


def _at_home(tree: Mapping[str, Any], path: Sequence[str], key: str) -> Mapping[str, Any]:
    """The tree with the home folder written out in one value, where that is a path that begins with `~`."""
    name, *rest = path
    value = tree.get(name)
    if rest:
        return {**tree, name: _at_home(value, rest, key)} if isinstance(value, Mapping) else tree
    if isinstance(value, str) and value.startswith("~"):
        return {**tree, name: str(user_path(value, key))}
    return tree


def build_parts(config: Config) -> Parts:
    """The halves and the tuning a config names, with their hyperparameters.

    Raises:
        ConfigError: A name does not exist or a hyperparameter is wrong.
    """
    METHODS.load(config.algorithm)
    half: dict[str, Any] = {}
    for key in ("server", "local"):
        values = dict(getattr(config, key))
        name = values.pop("name", config.algorithm)
        where = "algorithm" if name == config.algorithm else f"{key}.name"
        half[key] = parse(getattr(METHODS.load(name, where), key), values, key)
    return Parts(server=half["server"], local=half["local"], tuning=_tuning(config.tuning, "tuning"))


def _tuning(section: Mapping[str, Any], where: str) -> Tuning:
    """The scheme of a section; a scheme that wraps another one has a section `inner` for it."""
    values = dict(section)
    if "name" not in values:
        raise ConfigError(f"{where}.name: missing; set tuning=lora or another scheme")
    cls = TUNINGS.load(values.pop("name"), f"{where}.name")
    if "inner" in (hints := get_type_hints(cls)):
        values = _with_inner(values, set(hints), where)
    scheme: Tuning = parse(cls, values, where)
    return scheme


def _with_inner(values: dict[str, Any], own: set[str], where: str) -> dict[str, Any]:
    """The section `inner`, complete; keys that the wrapper does not have go to the inner scheme."""
    inner = values.get("inner", {"name": "lora"})
    if not isinstance(inner, Mapping) or "name" not in inner:
        raise ConfigError(f"{where}.inner: {shown(inner)} is not a section with a name, such as lora")
    inner = {**inner, **{key: value for key, value in values.items() if key not in own}}
    scheme = _named(inner["name"], _tuning(inner, f"{where}.inner"))
    return {**{key: value for key, value in values.items() if key in own}, "inner": scheme}


def to_dict(config: Config) -> dict[str, Any]:
    """Plain containers, as they go into config.yaml."""
    plain: dict[str, Any] = TypeAdapter(Config).dump_python(config, mode="json")
    return plain


def _named(name: str, part: object) -> dict[str, Any]:
    plain: dict[str, Any] = TypeAdapter(type(part)).dump_python(part, mode="json")
    return {"name": name, **plain}
