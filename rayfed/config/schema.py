"""The typed schema of an experiment, checked against the dataclasses that the code runs on."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, get_type_hints

import yaml
from annotated_types import Ge, Le

from rayfed.config.check_keys import UnknownKeyError, advice, parse, plain, whole
from rayfed.config.compose import (
    CHOOSES,
    HALVES,
    check_listed_once,
    compose,
    merge,
    methods_to_compare,
    written_for_halves,
)
from rayfed.config.short_forms import PATHS, spelled_out
from rayfed.data.data_config import DataConfig
from rayfed.devices import Deterministic
from rayfed.errors import ConfigError, adding, shown
from rayfed.federation.executor import OnNonFinite, Policy
from rayfed.federation.method_registry import METHODS, Parts, check_compatible
from rayfed.federation.noise_and_compression import ChannelConfig
from rayfed.federation.privacy_accountant import PrivacyConfig
from rayfed.federation.train_config import TrainConfig
from rayfed.heterogeneity.capacity import CapacityConfig
from rayfed.heterogeneity.faults import FaultsConfig
from rayfed.models.model_config import HF, ModelConfig
from rayfed.sampling.base import SAMPLERS
from rayfed.tuning.base import TUNINGS, Tuning
from rayfed.types import Count, Head, NonNegative, Positive
from rayfed.user_files import check_run_folder, read_file

ProtocolName: TypeAlias = Literal[
    "single",
    "leave_one_out",
    "few_shot",
    "unseen_clients",
    "cross_domain",
    "base_to_new",
    "cross_dataset",
]
"""Values of `protocol`; all but `single` are entries of `rayfed.config.variants.PROTOCOLS`."""


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """The section `cluster`: where clients run. Only `threads` can change a result.

    Attributes:
        executor: `ray`: on Ray actors; `inline`: everything in one process.
        device: Device of the clients with `inline`, and of the analysis of a run: `auto` (the first GPU that
            torch sees, else the CPU), `cpu`, `cuda` or `cuda:N`. GPUs of actors: `num_gpus`.
        address: Address of a running Ray cluster (host:port); none: that of RAY_ADDRESS, or else Ray is
            started on this machine.
        actors: Number of client actors; `auto`: as many as fit and can be used; `per_client`: one for each
            client.
        cpus_per_actor: CPUs of an actor; auto: one, or less if there are more actors than CPUs.
        gpus_per_actor: Share of a GPU of an actor; auto: all GPUs are shared evenly by as many actors as
            their memory holds, which is measured with one client before the actors start (docs/gpu.md); none
            for a small network, unless `num_gpus` is given.
        memory_per_actor: Memory of an actor in GB, counted when actors are planned, neither reserved nor
            enforced.
        threads: Threads of torch and NumPy in an actor. They change results, because float sums depend on
            them.
        num_cpus: CPUs of a Ray that is started here; none: those of the machine.
        num_gpus: GPUs of a Ray that is started here; none: those of the machine.
        dashboard: Start Ray's dashboard with a Ray that is started here, which takes longer then.
        metrics: Export metrics for Prometheus through Ray (docs/watching.md).
        connect_timeout: Seconds to wait for a cluster, or for actors to be placed.
    """

    executor: Literal["ray", "inline"] = "ray"
    device: str = "auto"
    address: str | None = None
    actors: Literal["auto", "per_client"] | Count = "auto"
    cpus_per_actor: Literal["auto"] | Positive = "auto"
    gpus_per_actor: Literal["auto"] | NonNegative = "auto"
    memory_per_actor: Positive = 1.0
    threads: Annotated[int, Ge(1), Le(1024)] = 1
    num_cpus: Count | None = None
    num_gpus: Annotated[int, Ge(0)] | None = None
    dashboard: bool = False
    metrics: bool = True
    connect_timeout: Positive = 30.0


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """The section `evaluation`: which models are scored, and when.

    Attributes:
        every: Score models in every n-th round and in the last one; 0: never.
        clients: Number of clients whose test sets are scored, drawn once by the seed and so the same for all
            methods; all: every client's.
        personal: Also score the personal model of each client, on its own split: in a round that is due those
            of all clients that `clients` names, of which those that do not train in it have what they keep,
            or what the method makes of the present global model.
        personal_split: That split: `test`, or `val`, on which FFT-GP scores personal models; a round that is
            selected by the same split makes these scores optimistic.
        validation: Also score the model that the method deploys on validation examples, by which a round or
            a trial can be selected: `clients` or true: on each client's own, whose classes are those of its
            training examples; `domains`: on those of all clients of its domain, as a test set is that they
            share.
        ties: Of the rounds with the highest validation score, the one that leave_one_out reports: the first,
            as in FedCLIP's code, or the last, as in the code of GA, which FFT-GP follows.
        local_steps: Clients that never train (`data.unseen_clients`) are also scored after this many
            optimization steps from the global model; 0: not.
        model_of: Folder of a finished run with the same model, tuning and method, whose final model is
            scored; nothing is trained then. The classes may be others: the model makes its classifier from
            their names. Where the clients are the same, each is scored with the tensors that stayed at it.
            None: the experiment trains its own model.
        without_parts: Score the final model again with the adapters, and again with the head, put back to
            their start values (columns without_adapters and without_head); `auto`: where this costs at most a
            tenth of what training and scoring the rounds cost.
        table: Rows of the final table: `domains`, or `clients` for statistics over clients of each model
            (average, worst and best tenth, variance).
    """

    every: Annotated[int, Ge(0)] = 1
    clients: Literal["all"] | Count = "all"
    personal: bool = False
    personal_split: Literal["test", "val"] = "test"
    validation: bool | Literal["clients", "domains"] = False
    ties: Literal["first", "last"] = "first"
    local_steps: Annotated[int, Ge(0)] = 0
    model_of: str | None = None
    without_parts: Literal["auto"] | bool = "auto"
    table: Literal["domains", "clients"] = "domains"


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """The section `checkpoint`: checkpoints from which a run is continued. It changes no result.

    Attributes:
        every: Write a checkpoint after every n-th round and after the last one; 0: only after the last one.
        keep: Number of checkpoints that are kept.
    """

    every: Annotated[int, Ge(0)] = 1
    keep: Count = 2


log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Config:
    """One experiment.

    Attributes:
        algorithm: File name in algorithms/, or package.module:NAME.
        server: Hyperparameters of the server half; `name` takes the half of another algorithm.
        local: Hyperparameters of the client half; `name` takes the half of another algorithm.
        tuning: `name` of the tuning scheme, and its options.
        head: `shared`: the head is trained, sent and averaged, with every method. `personal`: it stays at the
            clients (as `local.stays=[head]`). `frozen`: it is not trained (as `tuning.train_head=false`).
            None: as method and tuning scheme have it. Every table says which it was.
        task: What is learned, and its metric: a name (docs/tasks.md), or package.module:TASK; none: that of
            the data set.
        model: The backbone.
        data: The data set and its partition into clients.
        train: Local optimization.
        evaluation: Which models are scored, and when.
        cluster: Where clients run.
        rounds: Number of rounds.
        seed: Seed of all random numbers.
        clients_per_round: Number of clients in a round, or all.
        sampling: Rule that draws the clients of a round (docs/realism.md): `uniform`; `poisson`: each client
            independently, with `clients_per_round` as the expected number; `one_per_domain`; `by_size`;
            `power_of_choice`; or package.module:FUNCTION.
        channel: What happens to trained values between client and server, in order: `{clip: NORM}`,
            `{noise: MULTIPLE}`, `{top_k: SHARE}`, `fp16`, `int8` (docs/realism.md).
        privacy: The guarantee of `channel` with noise.
        capacity: Number of blocks that a client can hold: one number, a list by client or by domain, shares
            by depth, or dynamic (drawn each round); none: all blocks. `capacity.rank`: the same for the rank
            of its LoRA adapters, besides `capacity.blocks`.
        faults: Simulated faults: clients that are unavailable, drop out or are slow; none by default.
        deterministic: Refuse kernels whose results differ from run to run; auto: on a GPU (docs/gpu.md).
        checkpoint: Checkpoints from which a run is continued.
        failures: The policy for failures of clients and actors.
        on_nonfinite: A loss or a global tensor that is NaN or infinite is recorded in the events, on the
            screen and in the report, and the run continues (warn) or ends (raise).
        tensorboard: Also write the rounds for TensorBoard, into tensorboard/ of the run's folder.
        figures: Draw the figures of a run when it ends, about a second of work.
        report: Also write report.html when it ends, one page with everything (docs/watching.md).
        trackers: Also send the rounds to MLflow or to Weights & Biases (docs/watching.md).
        output: Folder of the run; none: a new folder in runs/.
        overwrite: Move an earlier run in `output` to NAME.before-1, and begin a new one.
    """

    algorithm: str = "fedavg"
    server: dict[str, Any] = field(default_factory=dict)
    local: dict[str, Any] = field(default_factory=dict)
    tuning: dict[str, Any] = field(default_factory=lambda: {"name": "lora"})
    model: ModelConfig
    data: DataConfig
    head: Head | None = None
    task: str | None = None
    train: TrainConfig = field(default_factory=TrainConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    rounds: Count = 10
    seed: Annotated[int, Ge(0)] = 0
    clients_per_round: Literal["all"] | Count = "all"
    sampling: str = "uniform"
    channel: ChannelConfig = ()
    privacy: PrivacyConfig = field(default_factory=PrivacyConfig)
    capacity: CapacityConfig = None
    faults: FaultsConfig = field(default_factory=FaultsConfig)
    deterministic: Deterministic = "auto"
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    failures: Policy = field(default_factory=Policy)
    on_nonfinite: OnNonFinite = "warn"
    tensorboard: bool = True
    figures: bool = True
    report: bool = False
    trackers: tuple[Literal["mlflow", "wandb"], ...] = ()
    output: str | None = None
    overwrite: bool = False


@dataclass(frozen=True, kw_only=True)
class Request(Config):
    """An experiment, and what a command asks for besides it: other methods, or the runs of a protocol.

    These make several runs, which a study holds; the config of a run has none of them.

    Attributes:
        compare: Algorithms that are run with the same data, tuning and training, one after the other. Where
            nothing else chooses an algorithm, exactly these are run, with what the first one brings that fits
            all; otherwise `algorithm` is run first, then these. Each is a cell of a study
            (docs/many_runs.md); one table and one figure show all.
        compare_options: What a command that compares methods says of `server` and `local`, filled in by it:
            every compared method gets the values of those keys that it has, not only the first one.
        equal_steps: Methods that would train less often than another one make more passes (`train.epochs`),
            so that all train on as many batches.
        protocol: Several runs with one table (docs/many_runs.md): `leave_one_out`, one for each domain, which
            no client owns in it; `few_shot`, one for each number in `data.shots`; `unseen_clients`, some
            clients never train; `cross_domain`, `base_to_new` and `cross_dataset`, with scores on domains,
            classes and data sets of which no client has an example.
    """

    compare: str | tuple[str, ...] = ()
    compare_options: dict[str, dict[str, Any]] = field(default_factory=dict)
    equal_steps: bool = False
    protocol: ProtocolName = "single"

    def alone(self) -> Config:
        """The experiment without what is asked for besides."""
        return Config(**{each.name: getattr(self, each.name) for each in dataclasses.fields(Config)})

    @classmethod
    def of(cls, config: Config, protocol: ProtocolName = "single") -> Request:
        """The runs of a protocol of an experiment; `single`: the experiment itself."""
        values = {each.name: getattr(config, each.name) for each in dataclasses.fields(Config)}
        return cls(**values, protocol=protocol)


def load_config(
    overrides: Sequence[str] = (),
    file: str | Path | None = None,
    more: Mapping[str, Any] | None = None,
) -> Request:
    """Compose, override and check one experiment, with what is asked for besides.

    Where nothing chooses an algorithm and the default one cannot use what was chosen, such as tuning=lora,
    the algorithm is FedAvg, and a warning says so. Where only `compare` names methods, the algorithm is the
    first of them with whose settings (`configs/algorithm/`) all can run, and which trains.

    Args:
        overrides: `group=name` and `section.key=value`, in this order of precedence: groups, then values.
        file: A resolved config (a run's config.yaml) to start from instead of the defaults.
        more: Values that are no texts, by key or dotted key, which come last.

    Raises:
        ConfigError: One line: the key, its value, what is allowed.
    """
    if file is not None:
        return resolve(whole(composed(overrides, read_file(file, "--config"), more), file))
    if names := methods_to_compare(overrides, more):
        return _comparison(names, overrides, more)
    config = resolve(composed(overrides, more=more))
    has_method = any(text.partition("=")[0].strip() in CHOOSES for text in overrides)
    return config if has_method else _with_fitting_method(config, overrides, more)


def composed(
    overrides: Sequence[str] = (),
    base: Mapping[str, Any] | None = None,
    more: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """As `compose`, with what is written for `server` and `local` in `compare_options`, too.

    A key that the first method lacks and a compared one has is left out of the sections of the first.

    Raises:
        ConfigError: As of `compose`, or a compared method does not exist.
    """
    tree = compose(overrides, base, more)
    compared = tree.get("compare")
    names = [compared] if isinstance(compared, str) else compared
    if not names or not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        tree.pop("compare_options", None)
        return tree
    written = written_for_halves(overrides, more)
    options = tree.get("compare_options")
    tree["compare_options"] = options = options if isinstance(options, dict) else {}
    merge(options, written)
    for half, values in written.items():
        section = tree[half]
        name, where = (
            (section["name"], f"{half}.name") if "name" in section else (tree["algorithm"], "algorithm")
        )
        own = _keys_of_half(name, half, where)
        for key in values.keys() - own:
            others = (name for name in names if METHODS.load(name, "compare").server.trains)
            if any(key in _keys_of_half(name, half) for name in others):
                del section[key]
    return tree


def _keys_of_half(method: str, half: str, where: str = "algorithm") -> set[str]:
    """The hyperparameters of the server half or of the client half of a method."""
    return {each.name for each in dataclasses.fields(getattr(METHODS.load(method, where), half))}


def _comparison(names: Sequence[str], overrides: Sequence[str], more: Mapping[str, Any] | None) -> Request:
    """The config of the first method that trains and with whose settings all of them can run."""

    def led_by(lead: str) -> Request:
        config = resolve(composed([*overrides, f"algorithm={lead}"], more=more))
        for name in names:
            with adding("" if name == lead else of_compared(name)):
                compatible_parts(with_method(config, name))
        return config

    leads = [name for name in names if METHODS.load(name, "compare").server.trains] or list(names)
    try:
        return led_by(leads[0])
    except ConfigError:
        for lead in leads[1:]:
            with suppress(ConfigError):
                return led_by(lead)
        raise


def of_compared(method: str) -> str:
    """The end of a message about wrong input of a compared method."""
    return f" (compared method {method})"


def with_method(config: Request, name: str, **changes: Any) -> Config:
    """The same experiment with another method.

    It has its default hyperparameters, except for those that `compare_options` says of it.

    Args:
        config: The experiment.
        name: The other method.
        changes: Other values, by key of the config.

    Raises:
        ConfigError: There is no such method, or a value is not allowed.
    """
    parts = build_parts(config)
    own = {**parts.server.tuning, **parts.local.tuning}
    tuning = {key: value for key, value in config.tuning.items() if key not in own}
    trains = METHODS.load(name).server.trains
    halves = {
        half: {
            key: value
            for key, value in config.compare_options.get(half, {}).items()
            if trains and key in _keys_of_half(name, half)
        }
        for half in HALVES
    }
    other = {"algorithm": name, **halves, "tuning": tuning}
    return resolve({**to_dict(config.alone()), **other, **changes}).alone()


def _with_fitting_method(
    config: Request, overrides: Sequence[str], more: Mapping[str, Any] | None
) -> Request:
    """The config, or the same with FedAvg where only that can use what was chosen."""
    try:
        compatible_parts(config)
    except ConfigError:
        general = resolve(composed([*overrides, "algorithm=fedavg"], more=more))
        with suppress(ConfigError):
            compatible_parts(general)
            what = f"the default algorithm={config.algorithm} cannot use tuning={config.tuning['name']}"
            log.warning("%s, so algorithm=fedavg is used; choose another one with algorithm=NAME", what)
            return general
    return config


def load_run(folder: Path, overrides: Sequence[str] = ()) -> Request:
    """The config of a run or of a command with several runs, read from its folder.

    Args:
        folder: Folder of the run.
        overrides: As of `load_config`.

    Raises:
        ConfigError: The folder holds no config, or it is not valid.
    """
    check_run_folder(folder)
    file = folder / "config.yaml"
    return resolve(compose(overrides, read_file(file, str(folder))))


def resolve(tree: Mapping[str, Any]) -> Request:
    """Check a plain mapping and fill in every default, those of the halves and the tuning included.

    Raises:
        ConfigError: One line: the key, its value, what is allowed.
    """
    try:
        config = parse(Request, spelled_out(tree), "")
        check_listed_once(config.compare)
        SAMPLERS.load(config.sampling)
        parts = build_parts(config)
    except UnknownKeyError as err:
        raise ConfigError(advice(err.key, str(err), Request, tree)) from err
    return dataclasses.replace(
        config,
        server=_with_name(config.server.get("name", config.algorithm), parts.server),
        local=_with_name(config.local.get("name", config.algorithm), parts.local),
        tuning=_with_name(config.tuning["name"], parts.tuning),
    )


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
    local = half["local"]
    if config.head == "personal" and "head" not in local.stays:
        half["local"] = dataclasses.replace(local, stays=(*local.stays, "head"))
    options = {**half["server"].tuning, **half["local"].tuning}
    options |= {"train_head": False} if config.head == "frozen" else {}
    tuning = _tuning(config.tuning, "tuning", options)
    return Parts(server=half["server"], local=half["local"], tuning=tuning)


def compatible_parts(config: Config) -> Parts:
    """The same, after a check that every part gets what it needs from the others.

    Raises:
        ConfigError: A name does not exist, a hyperparameter is wrong, or the parts do not fit together.
    """
    parts = build_parts(config)
    names = {key: str(getattr(config, key).get("name", config.algorithm)) for key in ("server", "local")}
    chosen = {"algorithm": config.algorithm, **names, "tuning": str(config.tuning["name"])}
    check_compatible(parts.server, parts.local, parts.tuning, chosen)
    return parts


def _tuning(section: Mapping[str, Any], where: str, options: Mapping[str, object] | None = None) -> Tuning:
    """The scheme of a section with these options; one that wraps another has a section `inner` for it."""
    values = dict(section)
    if "name" not in values:
        raise ConfigError(f"{where}.name: missing; set tuning=lora or another scheme")
    cls = TUNINGS.load(values.pop("name"), f"{where}.name")
    hints = get_type_hints(cls)
    values |= {key: value for key, value in (options or {}).items() if key in hints}
    if "inner" in hints:
        values = _with_inner(values, set(hints), where)
    scheme: Tuning = parse(cls, values, where)
    return scheme


def _with_inner(values: dict[str, Any], own: set[str], where: str) -> dict[str, Any]:
    """The section `inner`, complete; keys that the wrapper does not have go to the inner scheme."""
    inner = values.get("inner", {})
    if not isinstance(inner, Mapping):
        raise ConfigError(f"{where}.inner: {shown(inner)} is not a section; write {where}.inner.name=lora")
    inner = {"name": "lora", **inner, **{key: value for key, value in values.items() if key not in own}}
    scheme = _with_name(inner["name"], _tuning(inner, f"{where}.inner"))
    return {**{key: value for key, value in values.items() if key in own}, "inner": scheme}


def to_dict(config: Config) -> dict[str, Any]:
    """Plain containers, as they go into config.yaml."""
    return plain(config)


def to_yaml(config: Config) -> str:
    """The text of config.yaml, which repeats the run."""
    return yaml.safe_dump(to_dict(config), sort_keys=False)


def _with_name(name: str, part: object) -> dict[str, Any]:
    return {"name": name, **plain(part)}


HARMLESS = (
    "cluster",
    "checkpoint",
    "failures",
    "on_nonfinite",
    "tensorboard",
    "figures",
    "report",
    "trackers",
    "output",
    "overwrite",
    "data.root",
    "data.cache",
    "train.cache_memory",
    "train.graphs",
    "evaluation.model_of",
)
"""Keys that may change: where clients run, what is saved, and where the same data and models are stored."""

BINDING = ("cluster.threads",)
"""Keys in these sections that may not change, because float sums depend on them."""


def config_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Keys of two configs that differ and would change a result, with both values.

    Args:
        old: A config as plain containers; keys that its version of RayFed did not have are their defaults.
        new: A config of this version.
    """
    return changes(_with_new_keys(old, Request), _with_new_keys(new, Request))


def _with_new_keys(tree: Mapping[str, Any], section: type) -> dict[str, Any]:
    """A section of a config with the defaults of the keys that it lacks."""
    found = dict(tree)
    kinds = get_type_hints(section)
    for each in dataclasses.fields(section):
        if each.name in found:
            if dataclasses.is_dataclass(kinds[each.name]) and isinstance(found[each.name], Mapping):
                found[each.name] = _with_new_keys(found[each.name], kinds[each.name])
        elif each.default is not dataclasses.MISSING:
            found[each.name] = each.default
        elif each.default_factory is not dataclasses.MISSING:
            value = each.default_factory()
            found[each.name] = plain(value) if dataclasses.is_dataclass(value) else value
    return found


def changes(old: Any, new: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Keys that differ and would change a result, with both values. Lists and tuples count as equal."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for name in {**old, **new}:
            yield from changes(old.get(name), new.get(name), f"{key}.{name}" if key else str(name))
    elif (
        _comparable(old) != _comparable(new)
        and not _same_path(key, old, new)
        and (not _under(key, HARMLESS) or _under(key, BINDING))
    ):
        yield key, old, new


def _comparable(value: Any) -> Any:
    return [_comparable(item) for item in value] if isinstance(value, list | tuple) else value


def _same_path(key: str, old: Any, new: Any) -> bool:
    """Whether two values of a key are one path. Earlier versions kept relative paths as they were written."""
    if key == "model.name" and str(old).startswith(HF) and str(new).startswith(HF):
        key, old, new = "model.weights", str(old).removeprefix(HF), str(new).removeprefix(HF)
    if key not in PATHS or not (isinstance(old, str) and isinstance(new, str)):
        return False
    return old == new or (
        not Path(old).is_absolute() and Path(new).parts[-len(Path(old).parts) :] == Path(old).parts
    )


def _under(key: str, prefixes: Sequence[str]) -> bool:
    return any(key == prefix or key.startswith(f"{prefix}.") for prefix in prefixes)
