"""Other experiments that a config asks for: compared algorithms, and the runs of a protocol."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from rayfed.config.catalog import choices_of
from rayfed.config.check_keys import parse
from rayfed.config.compose import HALVES, compose, folder
from rayfed.config.schema import Config, Request, compatible_parts, of_compared, with_method
from rayfed.data.data_config import DataConfig, client_domains
from rayfed.data.partition.groups import only_tests
from rayfed.data.shards import Dataset
from rayfed.data.source import choose_classes
from rayfed.errors import ConfigError, adding, shown
from rayfed.federation.method_registry import METHODS
from rayfed.federation.privacy_accountant import PrivacyConfig
from rayfed.heterogeneity.faults import FaultsConfig
from rayfed.user_files import read_file

Open: TypeAlias = Callable[[DataConfig], Dataset]
"""Opens the data set of a section `data`."""

UNSEEN = 0.2
"""Share of the clients that never train under protocol=unseen_clients, by default."""

LOCAL_STEPS = 10
"""Steps after which unseen clients are scored there, by default."""

BASE, NEW = "base", "new"
"""Names of the two runs of protocol=base_to_new."""

TEMPLATE = "template"
"""Key of a data set in `data.targets` that is not one of the section `data`: its class prompt."""


def part(config: Config, **changes: Any) -> Config:
    """A run of a protocol. Args: changes: other values, by key of the config."""
    return replace(config, **changes)


def unseen_clients(config: Config) -> dict[str, Config]:
    """One experiment for each number of clients that never train.

    Raises:
        ConfigError: A number is listed twice, or none is.
    """
    asked = config.data.unseen_clients
    numbers = asked if isinstance(asked, list) else [UNSEEN if asked is None else asked]
    if not numbers or len(set(numbers)) < len(numbers):
        raise ConfigError(
            f"data.unseen_clients: {asked} must list one number or share of clients or more, each once"
        )
    steps = config.evaluation.local_steps or LOCAL_STEPS
    runs = {}
    for number in numbers:
        evaluation = replace(config.evaluation, local_steps=steps if number else 0)
        data = replace(config.data, unseen_clients=number)
        runs[f"unseen-{number}"] = part(config, data=data, evaluation=evaluation)
    return runs


def cross_domains(config: Config, open_data: Open) -> dict[str, Config]:
    """One experiment whose clients have the domains that are not held out; or one for each domain alone.

    Raises:
        ConfigError: A domain does not exist, or there is only one.
    """
    data = config.data
    owners, held_out = client_domains(data, open_data(data).domains)
    if held_out:
        pairs = [(owners, held_out)]
    else:
        pairs = [([name], [other for other in owners if other != name]) for name in owners]
    if not all(targets for _, targets in pairs):
        raise ConfigError(f"protocol: cross_domain needs two or more domains, there is {owners[0]}")
    runs = {}
    for sources, targets in pairs:
        name = f"from-{sources[0]}" if len(sources) == 1 else f"from-{len(sources)}-domains"
        runs[name] = part(config, data=replace(data, domains=sources, held_out=targets))
    return runs


def base_to_new(config: Config, open_data: Open) -> dict[str, Config]:
    """The experiment on the base classes, and one that scores its model on the new ones at the same clients.

    `evaluation.model_of` of the second run is left to its caller, who knows the folder of the first one.

    Raises:
        ConfigError: There are no such classes, or fewer than two base or new ones.
    """
    plain = replace(config.data, new_classes=None)
    classes = list(open_data(plain).classes)
    new = new_classes(config.data.new_classes, classes)
    base = [name for name in classes if name not in new]
    for what, names in (("base", base), ("new", new)):
        if len(names) < 2:
            raise ConfigError(
                f"data.new_classes: {config.data.new_classes} leaves {len(names)} of {len(classes)} classes "
                f"as {what} classes; two or more are needed to be told apart"
            )
    trained = part(config, data=replace(plain, classes=base))
    if plain.population is not None:  # too many clients to score each of them on the new classes
        return {BASE: trained, NEW: scoring(trained, only_tests(replace(plain, classes=new)))}
    scored = scoring(trained, replace(plain, classes=new, base_classes=base, augment=None))
    evaluation = replace(scored.evaluation, clients=config.evaluation.clients)
    return {BASE: trained, NEW: replace(scored, evaluation=evaluation)}


def new_classes(wanted: Sequence[str] | int | None, classes: Sequence[str]) -> list[str]:
    """The new classes, in the order of the data set.

    Args:
        wanted: Names, or the number of last classes; None: the second half, the smaller one where the number
            of classes is odd.
        classes: All classes.

    Raises:
        ConfigError: A class does not exist or is listed twice, or there are fewer than the number.
    """
    if wanted is None:
        wanted = len(classes) // 2
    if isinstance(wanted, int):
        if not 1 <= wanted < len(classes):
            raise ConfigError(
                f"data.new_classes: {wanted} of {len(classes)} classes; {_range_of_classes(len(classes))}"
            )
        return list(classes[-wanted:])
    chosen = choose_classes(wanted, classes, "data.new_classes")
    return [name for name in classes if name in chosen]


def _range_of_classes(classes: int) -> str:
    if classes < 4:
        return "the base and the new classes are two or more each; choose data with four classes or more"
    return f"use a number of 2..{classes - 2}"


def cross_datasets(config: Config) -> dict[str, Config]:
    """The experiment on its own data, and one that scores its model on each data set of `data.targets`.

    `evaluation.model_of` of these is left to the caller, as in `base_to_new`.

    Raises:
        ConfigError: There are none, one does not exist, or two have the same name.
    """
    asked = config.data.targets
    if not asked:
        raise ConfigError(
            "data.targets: empty; protocol=cross_dataset needs the data sets to score on, such as "
            "'data.targets={dtd: {root: DTD}, eurosat: {root: EUROSAT}}'"
        )
    source = folder_name(config.data.name)
    trained = part(config, data=replace(config.data, targets=None))
    runs = {source: trained}
    for name, values in (asked if isinstance(asked, Mapping) else {name: {} for name in asked}).items():
        target = target_data(name, values, config.data.cache)
        model = config.model
        if TEMPLATE in values:
            model = replace(model, template=str(values[TEMPLATE]))
        key = folder_name(target.name)
        if key in runs:
            raise ConfigError(
                f"data.targets: {name} is named {target.name!r}, as another data set of this experiment; set "
                f"its `name`, as in data.targets={{{name}: {{name: other}}}}"
            )
        runs[key] = replace(scoring(trained, only_tests(target)), model=model)
    return runs


def folder_name(name: str) -> str:
    """The name of a data set as the name of a folder."""
    return re.sub(r"[^\w-]+", "-", name)


def target_data(name: str, values: Mapping[str, Any], cache: str | None) -> DataConfig:
    """The section `data` of a data set of `data.targets`.

    Args:
        name: What `data=` accepts.
        values: Values of its section, and `template`.
        cache: Folder of prepared data sets, unless the section has one.

    Raises:
        ConfigError: There is no such data set or key.
    """
    section = compose([f"data={name}"])["data"]
    own = {key: value for key, value in values.items() if key != TEMPLATE}
    return parse(DataConfig, {"cache": cache, **section, **own}, f"data.targets.{name}")


def scoring(trained: Config, data: DataConfig) -> Config:
    """A run that trains nothing and scores the final model of another one on other data.

    Args:
        trained: The other run.
        data: Its data, of which only the test samples count.
    """
    evaluation = replace(
        trained.evaluation,
        every=1,
        clients="all",
        personal=False,
        validation=False,
        local_steps=0,
    )
    off: dict[str, Any] = {"channel": (), "privacy": PrivacyConfig(), "faults": FaultsConfig()}
    off |= {
        "capacity": None,
        "clients_per_round": "all",
        "sampling": "uniform",
        "rounds": 1,
    }
    return part(trained, data=data, evaluation=evaluation, **off)


def comparisons(config: Request) -> dict[str, Config]:
    """The other experiments of `compare`, by algorithm: the same but for the method.

    A method has its defaults, and of `compare_options` what it has a key for.

    Args:
        config: The main experiment.

    Raises:
        ConfigError: An algorithm does not exist, does not fit the tuning, or cannot have a value that was
            written for all; names the method.
    """
    names = (config.compare,) if isinstance(config.compare, str) else config.compare
    configs = {}
    for name in names:
        if name == config.algorithm:
            continue
        rounds = config.rounds if METHODS.load(name, "compare").server.trains else 1
        with adding(of_compared(name)):
            configs[name] = with_method(config, name, rounds=rounds)
            compatible_parts(configs[name])
    return configs


def differing_values(methods: Mapping[str, Mapping[str, Any]]) -> str:
    """Says in which hyperparameters that they share compared methods differ; empty where in none.

    `local.stays` is left out: `rayfed.report.final_table.own_tensors` says which tensors stay at clients.

    Args:
        methods: The config of each compared method as plain containers, by the name of the method.
    """
    values: dict[str, dict[str, Any]] = {}
    for name, config in methods.items():
        if config["algorithm"] in METHODS.names() and not METHODS.load(config["algorithm"]).server.trains:
            continue
        for half in HALVES:
            for key, value in config.get(half, {}).items():
                if key not in ("name", "stays"):
                    values.setdefault(f"{half}.{key}", {})[name] = value
    texts = [f"{key} is {text}" for key, each in values.items() if (text := _who_has_what(each))]
    return f"settings of the methods differ: {'; '.join(texts)}" if texts else ""


def _who_has_what(values: Mapping[str, Any]) -> str:
    """Each value with the methods that have it; empty where all have the same one."""
    methods: dict[str, list[str]] = {}
    for name, value in values.items():
        methods.setdefault(value if isinstance(value, str) else shown(value), []).append(name)
    parts = [f"{value} with {' and '.join(names)}" for value, names in methods.items()]
    return ", ".join(parts) if len(parts) > 1 else ""


def trained_otherwise(methods: Mapping[str, tuple[str, str]]) -> str:
    """Says which compared methods train otherwise than with their own settings; empty where none does.

    Args:
        methods: The name of the tuning and the kind of optimizer of each compared method; a single method
            chose them itself.
    """
    if len(methods) < 2:
        return ""
    own = {choice.name: choice.brings.get("tuning") for choice in choices_of("algorithm")}
    differing = []
    for name, (tuning, optimizer) in methods.items():
        if name not in own or not METHODS.load(name).server.trains:
            continue
        if own[name] not in (None, tuning):
            differing.append(f"{name} trains tuning={tuning} here, not its own tuning={own[name]}")
        elif (usual := own_optimizer(name)) not in (None, optimizer):
            what = f"train.optimizer={usual}"
            differing.append(f"{name} trains with {optimizer} here, not its own {what}")
    return "; ".join(differing)


def own_optimizer(method: str) -> str | None:
    """The kind of optimizer that the own settings of a method have; None: that of the tuning counts."""
    file = folder() / "algorithm" / f"{method}.yaml"
    train = read_file(file, method).get("train", {}) if file.is_file() else {}
    return train.get("optimizer")


def folds(config: Config, open_data: Open) -> dict[str, Config]:
    """One experiment per domain, with that domain held out.

    Raises:
        ConfigError: A domain is held out already, there is only one, or there is nothing to select with.
    """
    if config.data.held_out:
        raise ConfigError(
            f"data.held_out: {config.data.held_out!r} is set, but protocol=leave_one_out holds out each"
        )
    if not config.data.val:
        raise ConfigError(
            f"data.val: {config.data.val!r} leaves no images to choose a round with; set data.val=0.1"
        )
    domains = config.data.domains or open_data(config.data).domains
    if len(domains) < 2:
        raise ConfigError(f"protocol: leave_one_out needs two or more domains, there is {', '.join(domains)}")
    evaluation = replace(
        config.evaluation, every=config.evaluation.every or 1, personal=True, validation=True
    )
    return {
        name: part(config, data=replace(config.data, held_out=name), evaluation=evaluation)
        for name in domains
    }


SHOTS = (1, 2, 4, 8, 16)
"""Numbers of shots of protocol=few_shot where `data.shots` is not set, those of CoOp (Zhou et al., 2022)."""


def few_shots(config: Config) -> dict[str, Config]:
    """One experiment for each number of training samples of a class and client.

    Raises:
        ConfigError: A number is listed twice, or none is.
    """
    shots = [config.data.shots] if isinstance(config.data.shots, int) else config.data.shots
    shots = list(SHOTS) if shots is None else shots
    if not shots or len(set(shots)) < len(shots):
        raise ConfigError(f"data.shots: {shots} must list one number of samples or more, each once")
    return {f"shots-{count}": part(config, data=replace(config.data, shots=count)) for count in shots}


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """An experiment that consists of several runs.

    Attributes:
        parts: The runs by name, in their order, from the config and what opens data sets.
        doing: What is said when it begins, with the names of the runs.
        part: What a run is, for messages.
        data: What the matrix of a paper's table says of the data.
        setting: What tells a run apart from the others, with its name.
        by_validation: The round with the best validation score is reported, not the last evaluated one.
        scores_first: All runs but the first one train nothing, and score the final model of the first one.
    """

    parts: Callable[[Config, Open], dict[str, Config]]
    doing: str
    part: str
    data: str
    setting: str = "{name}"
    by_validation: bool = False
    scores_first: bool = False


PROTOCOLS: Mapping[str, Protocol] = {
    "leave_one_out": Protocol(
        parts=folds,
        doing="holding out {names} in turn",
        part="held-out domain",
        data="each domain held out",
        setting="{name} held out",
        by_validation=True,
    ),
    "few_shot": Protocol(
        parts=lambda config, open_data: few_shots(config),
        doing="training with {names}",
        part="number of shots",
        data="few shots",
    ),
    "unseen_clients": Protocol(
        parts=lambda config, open_data: unseen_clients(config),
        doing="holding back clients: {names}",
        part="share of unseen clients",
        data="some clients never train",
    ),
    "cross_domain": Protocol(
        parts=cross_domains,
        doing="training on source domains: {names}",
        part="source",
        data="scored on domains without clients",
    ),
    "base_to_new": Protocol(
        parts=base_to_new,
        doing="training on the base classes, then scoring on the new ones: {names}",
        part="set of classes",
        data="base and new classes",
        setting="{name} classes",
        scores_first=True,
    ),
    "cross_dataset": Protocol(
        parts=lambda config, open_data: cross_datasets(config),
        doing="training on the first and scoring on the other data sets: {names}",
        part="data set",
        data="scored on other data sets",
        scores_first=True,
    ),
}
"""Every protocol but `single`; `rayfed.report.protocols` has the table of each."""
