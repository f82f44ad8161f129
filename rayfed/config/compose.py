"""Composes YAML groups and overrides into one plain mapping.

Choices from groups come first (`algorithm=fedprox`, `data=pacs`); plain `key=value` overrides are YAML values
that are merged on top. Nothing is checked here beyond names and syntax: `rayfed.config.schema` does that.

A method, a tuning scheme, a reader and an executor need no YAML file: the name of the Python file is enough,
and so is `package.module:NAME`. A YAML file in a group is for values that differ from the defaults.

A network of a user, which may not be pre-trained as models by name are, trains as a whole (tuning=full)
unless the command, the method or an experiment chooses a tuning, or the method needs LoRA.

A column of clients (`data.columns.client`) brings `data.partition.scheme=natural`, unless a key divides the
samples otherwise.

A tuning scheme's file brings the optimizer and the learning rate that train it, from its paper or code. Those
that a method's file brings count more, then those of an experiment, then those of the command line.

`methods_to_compare` reads the methods of `compare` for a command on which nothing else chooses an algorithm.

A file of `configs/` may build on others, in its list `defaults`:

    # @package _global_                        the keys are those of the whole config, not of the file's group
    defaults:
      - /experiment/fedgcr/clean@_global_      the values of that file
      - override /tuning: lora                 a choice from another group
      - _self_                                 the values of this file come here; without the line, last

Of two values for one key the later one counts. Of two choices from one group, that of the command line
counts, then that of the file which builds on the other, then that of the later entry of a list.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from rayfed.config import papers
from rayfed.errors import MOST_SHOWN, ConfigError, check_name, shown, unknown
from rayfed.registry import (
    EXECUTOR_FILES,
    METHOD_FILES,
    READER_FILES,
    TUNING_FILES,
    Entries,
    check_no_module,
)
from rayfed.user_files import is_folder, parse_value, read_file
from rayfed.user_objects import find, import_or_none

CHOOSES = ("algorithm", "experiment")
"""Groups that choose the method of a command."""


def methods_to_compare(overrides: Sequence[str], more: Mapping[str, Any] | None = None) -> tuple[str, ...]:
    """The methods that are compared where nothing but `compare` names one.

    Args:
        overrides: `group=name` and `key=value`, as on the command line.
        more: Values that are no texts, as of `compose`.

    Returns:
        Their names; empty where `algorithm` or `experiment` chooses a method, or nothing is compared.

    Raises:
        ConfigError: Only one method is listed, or one of them twice.
    """
    pairs = [(key.strip(), value.strip()) for key, _, value in (text.partition("=") for text in overrides)]
    given = [parse_value(key, value) for key, value in pairs if key == "compare"]
    given += [more["compare"]] if more and "compare" in more else []
    if not given or any(key in CHOOSES for key, _ in pairs):
        return ()
    value = given[-1]
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        return ()  # the schema refuses it, or nothing is compared
    check_listed_once(value)
    if len(names) == 1:
        raise ConfigError(
            f"compare: {names[0]!r} is the only method, as no algorithm is given; write algorithm=NAME "
            f"compare={names[0]}, or list two or more methods"
        )
    return tuple(names)


def check_listed_once(names: str | Sequence[str]) -> None:
    """Refuse a method that `compare` lists twice, and a list without brackets.

    Raises:
        ConfigError: Names the first one, or says how the list is written.
    """
    listed = [names] if isinstance(names, str) else list(names)
    if isinstance(names, str) and "," in names:
        raise ConfigError(f"compare: {names!r} is not a list; write compare=[{names.replace(' ', '')}]")
    if twice := [name for name in listed if listed.count(name) > 1]:
        raise ConfigError(f"compare: {twice[0]!r} is listed twice; list each method once")


DEFAULTS = "defaults"
SELF = "_self_"
OVERRIDE = "override /"
GLOBAL = "# @package _global_"
ROOT = "config"
"""Name of the file with which every config begins."""

FORMS = "write '_self_', '/GROUP/NAME@_global_' or 'override /GROUP: NAME'"

Content = dict[str, Any]


@dataclass
class Composition:
    """One config while it is put together.

    Attributes:
        folder: Folder of the groups.
        chosen: The choice of the command line from each group; `values` adds those that files make.
        plain: The content of a choice that has no YAML file, in the keys of the whole config.
        otherwise: Choices that replace those of `config.yaml` where nothing else chooses from the group.
    """

    folder: Path
    chosen: dict[str, str]
    plain: Callable[[str, str], Content]
    otherwise: Mapping[str, str] = field(default_factory=dict)
    _done: set[str] = field(default_factory=set)
    _open: list[str] = field(default_factory=list)

    def values(self) -> Content:
        """All values, as new nested mappings.

        Raises:
            ConfigError: A file is missing, cannot be read, builds on itself, or has an entry in `defaults`
                that means nothing; a choice is from a group that no file puts in.
        """
        tree: Content = {}
        for part in self._file(ROOT, ""):
            merge(tree, part)
        if unused := sorted(self.chosen.keys() - self._done):
            raise ConfigError(
                f"{unused[0]}={self.chosen[unused[0]]}: no file puts in a choice from {unused[0]!r}; add "
                f"`- {unused[0]}: NAME` to the list {DEFAULTS!r} in configs/{ROOT}.yaml (groups there: "
                f"{', '.join(sorted(self._done))})"
            )
        return tree

    def _file(self, name: str, group: str) -> list[Content]:
        """The values of a file and of those it builds on, in the order in which they count."""
        if name in self._open:
            raise ConfigError(f"configs/{name}.yaml: {DEFAULTS}: the file builds on itself")
        path = self.folder / f"{name}.yaml"
        if not path.is_file():
            raise ConfigError(f"configs/{name}.yaml: there is no such file, and another builds on it")
        own, entries, is_global = _read(path, name, path.stat().st_mtime_ns)
        parts = [own if is_global or not group else {group: own}]
        if name == ROOT and "experiment" in self.chosen:
            entries = [*entries, {"experiment": self.chosen["experiment"]}]
        self._open.append(name)
        for entry in entries:
            if is_override(entry):
                self._override(name, *_pair(name, entry))
        # The last entry first: what it chooses counts in the entries before it.
        contents = [parts if entry == SELF else self._entry(name, entry) for entry in reversed(entries)]
        self._open.pop()
        if SELF not in entries:
            contents.insert(0, parts)
        return [part for each in reversed(contents) for part in each]

    def _override(self, file: str, group: str, choice: str) -> None:
        if group in self._done and group not in self.chosen:
            raise ConfigError(
                f"configs/{file}.yaml: {DEFAULTS}: {group} cannot be chosen here, because it is put in later"
            )
        self.chosen.setdefault(group, choice)

    def _entry(self, file: str, entry: Any) -> list[Content]:
        if is_override(entry):
            return []
        if isinstance(entry, str) and entry.startswith("/"):
            name = entry.removeprefix("/").removesuffix("@_global_")
            return self._file(name, name.partition("/")[0])
        group, default = _pair(file, entry)
        choice = self.chosen.get(group, self.otherwise.get(group, default))
        self._done.add(group)
        name = f"{group}/{choice}"
        if (self.folder / f"{name}.yaml").is_file():
            return self._file(name, group)
        return [self.plain(group, choice)]


def is_override(entry: Any) -> bool:
    """Whether an entry of `defaults` chooses from another group."""
    return isinstance(entry, dict) and any(str(key).startswith(OVERRIDE) for key in entry)


def merge(tree: Content, other: Mapping[str, Any]) -> None:
    """Put the values of `other` into `tree`; nested mappings are merged, anything else is replaced."""
    for key, value in other.items():
        if isinstance(tree.get(key), dict) and isinstance(value, dict):
            merge(tree[key], value)
        else:
            tree[key] = deepcopy(value)


def _pair(file: str, entry: Any) -> tuple[str, str]:
    """Group and name of the entry `GROUP: NAME`.

    Raises:
        ConfigError: The entry is something else.
    """
    match list(entry.items()) if isinstance(entry, dict) else ():
        case [(str(group), str(choice))]:
            return group.removeprefix(OVERRIDE), choice
    raise ConfigError(f"configs/{file}.yaml: {DEFAULTS}: {shown(entry)} is no entry; {FORMS}")


@cache
def _read(path: Path, name: str, changed: int) -> tuple[Content, list[Any], bool]:
    """The values of a file, its list `defaults`, and whether its keys are those of the whole config.

    Args:
        name: Its name below `configs/`, for errors.
        changed: When it was written, so that a new text is read.
    """
    content = read_file(path, f"configs/{name}.yaml")
    entries = content.pop(DEFAULTS, [])
    if not isinstance(entries, list):
        raise ConfigError(f"configs/{name}.yaml: {DEFAULTS}: {shown(entries)} is not a list")
    comments = [line.strip() for line in path.read_text("utf-8").splitlines() if line.startswith("#")]
    return content, entries, GLOBAL in comments


SECTIONS_OF_GROUP = {"algorithm": ("algorithm", "server", "local")}
"""Sections that a choice from a group sets, for groups that do not set the section of their name."""

NAMED: Mapping[str, Entries] = {
    "algorithm": METHOD_FILES,
    "tuning": TUNING_FILES,
    "data": READER_FILES,
    "cluster": EXECUTOR_FILES,
}
"""Groups whose choices are also the names of Python files."""

OBJECTS = {"algorithm": "METHOD", "tuning": "TUNING", "data": "READER", "cluster": "EXECUTOR"}
"""Names of the objects that Python files of these groups define."""

LAYOUTS = " with the layout DIR/<domain>/<class>/<image>, or DIR/<class>/<image> for one domain"
OWN_IMAGES = f"; your own images: data=image_folder data.root=DIR{LAYOUTS}"
ELSE = {"data": OWN_IMAGES, "experiment": "; rayfed list experiments shows all"}
"""Advice about a name that does not exist, by group."""

HUB = "hf/"
"""Prefix of the names of data sets that the library `datasets` loads."""

MODEL_OF_LIBRARIES = "timm"
"""The YAML file with the values of every model that has no file: any of timm and open_clip."""

BRINGS = "brings"
"""Section of a data set's YAML file: the choices in other groups that the data set needs."""


def folder() -> Path:
    """Folder of the YAML groups: inside the installed package, or next to it in a checkout."""
    package = Path(__file__).parent.parent
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


def compose(
    overrides: Sequence[str] = (),
    base: Mapping[str, Any] | None = None,
    more: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Groups first, then values, in the order given.

    Args:
        overrides: `group=name` and `section.key=value`.
        base: A resolved config to start from instead of the defaults.
        more: Values that are no texts, by key or dotted key, which come last; sections are merged.

    Raises:
        ConfigError: One line: the override, what is allowed.
    """
    pairs = [_split_override(text) for text in overrides]
    known = config_groups()
    groups = {key: value for key, value in pairs if key in known}
    values = [(key, value) for key, value in pairs if key not in groups]
    chosen = {**_added_choices(groups, has_method=base is not None or "experiment" in groups), **groups}
    if base is not None:
        tree = _replace_sections(base, chosen)
    elif table := papers.find(folder(), groups.get("experiment", "")):
        tree = _cell(table, chosen, dict(values))
        values = [(key, value) for key, value in values if key not in papers.CHOICE]
    elif "experiment" in chosen:
        tree = _experiment(chosen)
    else:
        tree = _compose(chosen, _for_own_network(chosen, dict(values), more or {}))
    for key, value in values:
        _set(tree, key, value)
    for key, value in (more or {}).items():
        nested: dict[str, Any] = {}
        put_value(nested, key, value)
        merge(tree, nested)
    _give_natural_clients(tree)
    return tree


def _give_natural_clients(tree: dict[str, Any]) -> None:
    """Set `data.partition.scheme=natural` where a column names clients and no key divides the samples."""
    data = tree.get("data")
    if not isinstance(data, dict):
        return
    columns = data.get("columns")
    if not isinstance(columns, Mapping) or columns.get("client") is None or data.get("population"):
        return
    section = data.get("partition") or {}
    if isinstance(section, Mapping) and not section.keys() - {"min_samples", "pooled", "by_group"}:
        data["partition"] = {**section, "scheme": "natural"}


HALVES = ("server", "local")
"""Sections with the hyperparameters of the two halves of a method."""


def written_for_halves(overrides: Sequence[str], more: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The hyperparameters in the overrides, by section; without `name`, which chooses a half.

    Args:
        overrides: As of `compose`.
        more: As of `compose`.
    """
    tree: dict[str, Any] = {}
    for key, text in map(_split_override, overrides):
        if key.partition(".")[0] in HALVES:
            _set(tree, key, text)
    for key, value in (more or {}).items():
        if key.partition(".")[0] in HALVES:
            nested: dict[str, Any] = {}
            put_value(nested, key, value)
            merge(tree, nested)
    sections = {half: values for half, values in tree.items() if isinstance(values, Mapping)}
    found = {
        half: {key: value for key, value in values.items() if key != "name"}
        for half, values in sections.items()
    }
    return {half: values for half, values in found.items() if values}


def _experiment(chosen: Mapping[str, str]) -> dict[str, Any]:
    """The choices put together; an algorithm that is chosen for an experiment changes the method only."""
    tree = _compose(chosen)
    if "algorithm" not in chosen:
        return tree
    fixed = _compose({group: name for group, name in chosen.items() if group != "algorithm"})
    method = {key: tree[key] for key in (*SECTIONS_OF_GROUP["algorithm"], "tuning") if key in tree}
    kept = {key: value for key, value in fixed.items() if key not in SECTIONS_OF_GROUP["algorithm"]}
    return _pooled_as(tree, kept | method)


def _for_own_network(
    chosen: Mapping[str, str], values: Mapping[str, str], more: Mapping[str, Any]
) -> dict[str, str]:
    """The tuning of a network of a user where nothing chooses one or sets a key of one; else nothing."""
    model = chosen.get("model", values.get("model.name", ""))
    keys = {key.partition(".")[0] for key in (*chosen, *values, *more)}
    if "tuning" in keys or not (":" in model or find(model) is not None):
        return {}
    from rayfed.federation.method_registry import METHODS

    for half in ("server", "local"):
        section = more.get(half, {})
        name = section.get("name") if isinstance(section, Mapping) else None
        name = name or values.get(f"{half}.name") or chosen.get("algorithm", "")
        with suppress(ConfigError):  # a name that does not exist is refused where it is used
            needs = getattr(METHODS.load(name), half).needs
            if isinstance(needs, frozenset) and "lora" in needs:
                return {}
    return {"tuning": "full"}


def _pooled_as(method: Mapping[str, Any], tree: dict[str, Any]) -> dict[str, Any]:
    """The tree with `data.partition.pooled` where the method is to train one client with the data of all."""
    if method["data"].get("partition", {}).get("pooled"):
        tree["data"].setdefault("partition", {})["pooled"] = True
    return tree


def _cell(table: papers.PaperTable, chosen: Mapping[str, str], values: Mapping[str, str]) -> dict[str, Any]:
    """A cell of a paper's table: its experiment, in which a row and a setting change what belongs to them.

    The algorithm changes the method only: model, tuning, data and training stay those of the experiment,
    whatever the YAML file of the algorithm sets, except where the row of the table has its own.

    Args:
        chosen: Choices of the command line and of the data set, by group; they win over those of the table.
        values: Values of the command line, by key; `row` and `setting` are read here.
    """
    experiment, scale = papers.split_scale(chosen["experiment"])
    shared = {group: name for group, name in chosen.items() if group != "algorithm"} | {
        "experiment": experiment
    }
    asked = None if values.get("row") is None else table.row_of(values["row"], "")
    of_row = table.rows[asked]["algorithm"] if asked else None
    algorithm = chosen.get("algorithm") or of_row or str(_compose(shared)["algorithm"])
    row = asked or table.row_of(None, algorithm)
    changes = table.changes(row, values.get("setting"), scale)
    known = config_groups()
    groups = {group: changes[group] for group in known & changes.keys() if group != "algorithm"}
    tree = _compose({**groups, **shared})
    own = _compose({"algorithm": algorithm})
    method = {section: own[section] for section in SECTIONS_OF_GROUP["algorithm"] if section in own}
    tree = {key: value for key, value in tree.items() if key not in SECTIONS_OF_GROUP["algorithm"]} | method
    tree = _pooled_as(own, tree)
    for key, value in changes.items():
        if key not in known and not _is_replaced(key, groups, chosen):
            put_value(tree, key, value)
    return tree


def _is_replaced(key: str, groups: Mapping[str, Any], chosen: Mapping[str, str]) -> bool:
    """Whether a value of the table belongs to a choice that the command line replaced."""
    group = key.partition(".")[0]
    return group in chosen and group in groups and chosen[group] != groups[group]


def config_groups() -> set[str]:
    """Keys whose value is the name of a YAML file or of a Python file."""
    folders = {p.name for p in folder().iterdir() if p.is_dir()}
    folders -= {"sweep", papers.FOLDER}  # those are for tune.run, and data of tables
    return folders.union(NAMED)


def _split_override(text: str) -> tuple[str, str]:
    key, sep, value = text.partition("=")
    if not sep or not all(part.strip() for part in key.split(".")):
        groups = [group for group in sorted(config_groups()) if text in choices(group)]
        advice = f"{groups[0]}={text}" if groups else "key=value or section.key=value"
        advice = "--config FILE for a saved config" if text.endswith(".yaml") else f"{advice}, without spaces"
        raise ConfigError(f"{text!r} is not an override; write {advice}")
    return key.strip(), value.strip()


def _added_choices(groups: Mapping[str, str], has_method: bool) -> dict[str, str]:
    """The choices that the data set of the command line brings.

    Args:
        groups: The choices of the command line.
        has_method: An experiment or a saved config has chosen the method, which then stays.
    """
    file = folder() / "data" / f"{groups.get('data')}.yaml"
    has_file = groups.get("data") in choices("data") and file.is_file()
    brings = read_file(file, "data").get(BRINGS, {}) if has_file else {}
    return {group: name for group, name in brings.items() if not (has_method and group == "algorithm")}


def _replace_sections(base: Mapping[str, Any], groups: Mapping[str, str]) -> dict[str, Any]:
    """A resolved config with the sections that the choices fill, and what a tuning brings to `train`."""
    tree = deepcopy(dict(base))
    plain = {"algorithm": "fedavg"}
    before = _compose(plain)
    if "tuning" in groups:
        tree["train"] = _exchange_training(base, groups["tuning"])
    for group, name in groups.items():
        composed = _compose({**plain, group: name})
        changed = {key for key in composed if composed[key] != before.get(key)}
        changed -= {"train"} if group == "tuning" else set()
        sections = changed.union(SECTIONS_OF_GROUP.get(group, (group,)))
        tree = {k: v for k, v in tree.items() if k not in sections}
        tree |= {k: v for k, v in composed.items() if k in sections}
    return tree


def _exchange_training(base: Mapping[str, Any], tuning: str) -> dict[str, Any]:
    """The section `train` of a resolved config, with the values in which two tunings differ exchanged."""
    train = dict(base.get("train", {}))
    method = {"algorithm": str(base.get("algorithm", "fedavg"))}
    before, after = (
        _compose({**method, "tuning": name}).get("train", {})
        for name in (str(base.get("tuning", {}).get("name", tuning)), tuning)
    )
    for key in before.keys() | after.keys():
        if before.get(key) != after.get(key):
            train.pop(key, None)
            train |= {key: after[key]} if key in after else {}
    return train


def _compose(groups: Mapping[str, str], otherwise: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The choices put together, as new nested mappings; `otherwise` as of `Composition`."""
    return deepcopy(_compose_cached(folder(), tuple(groups.items()), tuple((otherwise or {}).items())))


@cache
def _compose_cached(
    root: Path, chosen: tuple[tuple[str, str], ...], otherwise: tuple[tuple[str, str], ...]
) -> dict[str, Any]:
    groups = dict(chosen)
    for group, name in groups.items():
        _check_choice(group, name)
    other = groups["model"] if "model" in groups and groups["model"] not in choices("model") else None
    known = {**groups, "model": MODEL_OF_LIBRARIES} if other else groups
    tree = Composition(root, dict(known), _by_name, dict(otherwise)).values()
    tree["data"].pop(BRINGS, None)
    return tree | _model(other, tree["model"]) if other else tree


def _by_name(group: str, name: str) -> dict[str, Any]:
    """The values of a choice that has no YAML file: a Python file, a data set of `datasets`.

    Raises:
        ConfigError: There is no such name.
    """
    _check_choice(group, name)
    if group == "algorithm":
        return {"algorithm": name}
    if group == "cluster":
        return {"cluster": {"executor": name}}
    if group == "data" and (find(name) is not None or ":" in name):
        return {"data": {"name": name.replace(":", "."), "reader": name, **_of_examples(name)}}
    if group == "data" and name.startswith(HUB):
        return {"data": {"name": name.removeprefix(HUB), "reader": "hf"}}
    return {group: {"name": name.replace(":", "."), "reader": name} if group == "data" else {"name": name}}


def _of_examples(name: str) -> dict[str, Any]:
    """Keys that examples of a user have by default; none for readers of data sets."""
    from rayfed.data.user_data import make_reader

    known = find(name)
    value = known.value if known is not None else import_or_none(name)
    return {} if value is None or isinstance(value, type) else dict(make_reader(value).section)


def _check_no_path(model: str) -> None:
    """Raise ConfigError for a path in place of the name of a model."""
    if Path(model).is_absolute():
        raise ConfigError(
            f"model: {shown(model)} is a path; for transformers, set model=hf/{model[:MOST_SHOWN]}"
        )


def _check_choice(group: str, name: str) -> None:
    """Raise ConfigError unless the group has this choice."""
    if group == "model":
        _check_no_path(name)
    elif name not in choices(group):
        _check_other(group, name)


def _check_other(group: str, name: str) -> None:
    """Raise ConfigError unless a name that is no choice of the group is something else that it takes."""
    if group == "data" and name.startswith(HUB):
        if not re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", name.removeprefix(HUB)):
            raise ConfigError(
                f"data: {name!r} is not hf/NAME or hf/OWNER/NAME with letters, digits, '_', '-', '.'"
            )
    elif group in NAMED and find(name) is not None:
        return
    elif group in NAMED and ":" in name:
        check_name(group, name)
    elif group == "data" and (os.sep in name or is_folder(name)) and not name.endswith(".py"):
        raise ConfigError(
            f"data: {shown(name)} is no name of a data set; for images of your own write data=image_folder "
            f"data.root={name[:MOST_SHOWN]}{LAYOUTS}"
        )
    else:
        if group in OBJECTS and (group != "data" or name.endswith(".py")):
            check_no_module(group, name, OBJECTS[group])
        raise ConfigError(unknown(group, name, choices(group)) + ELSE.get(group, ""))


def _model(name: str, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The sections of a model without a YAML file: any model of timm or of open_clip."""
    from rayfed.models.model_config import OPEN_CLIP

    reference = {"compare": "zero_shot"} if name.startswith(OPEN_CLIP) else {}
    return {"model": {**defaults, "name": name}, **reference}


def choices(group: str) -> list[str]:
    """Every name of a config group: its YAML files, in nested folders too, and its Python files."""
    root = folder() / group
    files = {str(path.relative_to(root).with_suffix("")) for path in root.rglob("*.yaml")}
    if group == "experiment":
        files |= {f"{name}/{papers.MINI}" for name, table in papers.tables(folder()).items() if table.small}
    return sorted(files.union(NAMED[group].names() if group in NAMED else ()))


def _set(tree: dict[str, Any], key: str, text: str) -> None:
    """Put the YAML value of `a.b.c=text` into nested mappings."""
    put_value(tree, key, parse_value(key, text))


def put_value(tree: dict[str, Any], key: str, value: Any) -> None:
    """Put a value under the key `a.b.c` into nested mappings."""
    *path, last = key.split(".")
    node = tree
    for part in path:
        inner = node.setdefault(part, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"{key}: {part} is a value, not a section")
        node = inner
    node[last] = value
