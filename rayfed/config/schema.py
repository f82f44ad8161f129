"""The typed schema of an experiment, checked against the dataclasses that the code runs on."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_type_hints

import yaml

from rayfed.columns import Unit
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
from rayfed.config.design import Names
from rayfed.config.settings import Settings
from rayfed.config.short_forms import spelled_out
from rayfed.errors import ConfigError, adding, shown
from rayfed.executors.kinds.base import kind_of
from rayfed.federation.method_registry import METHODS, Parts, check_compatible
from rayfed.sampling.base import SAMPLERS
from rayfed.tuning.base import TUNINGS, Tuning
from rayfed.user_files import check_run_folder, read_file
from rayfed.user_objects import records

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


log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """One experiment, whose method and tuning scheme are names with their hyperparameters.

    Attributes:
        algorithm: File name in algorithms/, or package.module:NAME.
        server: Hyperparameters of the server half; `name` takes the half of another algorithm.
        local: Hyperparameters of the client half; `name` takes the half of another algorithm.
        tuning: `name` of the tuning scheme, and its options.
    """

    algorithm: str = "fedavg"
    server: dict[str, Any] = field(default_factory=dict)
    local: dict[str, Any] = field(default_factory=dict)
    tuning: dict[str, Any] = field(default_factory=lambda: {"name": "lora"})


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
        equal: What all methods have as much of as the one that has most with these rounds: training batches
            (`steps`), `examples` in them, operations (`flops`) or `bytes` sent and received. The others run
            more rounds.
        protocol: Several runs with one table (docs/many_runs.md): `leave_one_out`, one for each domain, which
            no client owns in it; `few_shot`, one for each number in `data.shots`; `unseen_clients`, some
            clients never train; `cross_domain`, `base_to_new` and `cross_dataset`, with scores on domains,
            classes and data sets of which no client has an example.
    """

    compare: str | tuple[str, ...] = ()
    compare_options: dict[str, dict[str, Any]] = field(default_factory=dict)
    equal: Unit | None = None
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
        kind_of(config.cluster)
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
    check_compatible(parts.server, parts.local, parts.tuning, vars(names_of(config)))
    return parts


def names_of(config: Config) -> Names:
    """The names of the method of a config and of its parts."""
    return Names(
        algorithm=config.algorithm,
        server=str(config.server.get("name", config.algorithm)),
        local=str(config.local.get("name", config.algorithm)),
        tuning=str(config.tuning["name"]),
    )


def objects_of(config: Config) -> dict[str, dict[str, str]]:
    """Name, `repr` and digest of the objects of a user in a config, by key."""
    own = config.server.get("name"), config.local.get("name")
    names = {
        "algorithm": config.algorithm,
        "server": own[0] if own[0] != config.algorithm else None,
        "local": own[1] if own[1] != config.algorithm else None,
        "tuning": config.tuning["name"],
        "model": config.model.name,
        "reader": config.data.reader,
    }
    return records(names)


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
    """Plain containers, as they go into config.yaml, the method and the tuning scheme first."""
    found = plain(config)
    settings = {each.name for each in dataclasses.fields(Settings)}
    own = [each.name for each in dataclasses.fields(Config) if each.name not in settings]
    return {key: found[key] for key in own} | found


def to_yaml(config: Config) -> str:
    """The text of config.yaml, which repeats the run."""
    return yaml.safe_dump(to_dict(config), sort_keys=False)


def _with_name(name: str, part: object) -> dict[str, Any]:
    return {"name": name, **plain(part)}
