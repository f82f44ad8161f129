"""Loads the data set of a config: prepares it once, checks domains and classes, and maps it into memory."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from rayfed.data.data_config import DataConfig, Resize, check_config, client_domains
from rayfed.data.preparation import cache_folder, prepare
from rayfed.data.shards import Dataset, open_dataset
from rayfed.data.source import ONE_DOMAIN, Listing, Reader, Source, source_of, task_of
from rayfed.data.text import Targets
from rayfed.data.tokens import Tokenized
from rayfed.data.user_data import OwnData
from rayfed.errors import ConfigError, DataError, count_of
from rayfed.objective import CLASSES, objective
from rayfed.user_files import nearby

log = logging.getLogger(__name__)

FITTING = (
    "model=unet for segmentation, char_lstm for next_character, text_mini or hf/NAME for "
    "text_classification, lm_mini or hf/NAME for language_modeling, any other for classification"
)


def load(
    config: DataConfig,
    size: int,
    task: str | None = None,
    resize: Resize = "squash",
    tokenizer: str | None = None,
    goal: str | None = None,
    reader: Reader | None = None,
) -> Dataset:
    """Prepare the data set of a config, if that was not done before, and map it into memory.

    The result has every domain of the data set, also those that `data.domains` leaves out, so that all
    configs of the same data share one file. The partition selects the domains that are used.

    Args:
        size: Input height and width of the model in pixels, or characters in a window.
        task: The task of the model; None accepts data of any task.
        resize: How images become squares under `data.resize=auto`.
        tokenizer: Folder or name of the model whose tokenizer makes tokens of texts.
        goal: The task that the config names, for examples of a user; None: it follows from their targets.
        reader: What reads the data; None: what the config names.

    Raises:
        ConfigError: A value of the config or the data cannot be used; one line that says what to change.
    """
    check_config(config)
    source = source_of(config, resize, reader, goal)
    own_task = task_of(source)
    if task not in (None, own_task) and not isinstance(source, OwnData):
        raise ConfigError(
            f"model.name: the model is for {task}, the data set {config.name!r} for {own_task}; set {FITTING}"
        )
    source = with_tokens(source, config, tokenizer)

    def check_domains(data: Listing | Dataset) -> None:
        _check_root(config, data.domains)
        if own_task in CLASSES:
            _check_domains(data, config, source)
        else:
            client_domains(config, data.domains)

    path = prepare(source, size, cache_folder(config), config.on_bad_image, check_domains)
    dataset = open_dataset(path)
    # Again, because the file may be from another config, and a class may be empty without its bad images.
    check_domains(dataset)
    if isinstance(dataset.targets, Targets) and (silent := int((dataset.targets.counts == 0).sum())):
        log.warning(
            "%s of %s have no token that is learned, such as an answer; they count in no loss and no score",
            *(count_of(silent, "text"), config.name),
        )
    if dataset.skipped:
        log.warning(
            "left out of %s: %s that cannot be decoded (data.on_bad_image=skip); "
            "data.on_bad_image=stop names the first one",
            *(config.name, count_of(dataset.skipped, "image")),
        )
    return dataset


def with_tokens(source: Source, config: DataConfig, tokenizer: str | None) -> Source:
    """The reader of a config, whose texts are tokens; another reader as it is.

    Args:
        tokenizer: As of `load`.

    Raises:
        ConfigError: There are texts and no tokenizer.
    """
    if not objective(task_of(source)).tokens:
        return source
    if tokenizer is None:
        raise ConfigError(
            f"model.name: the data set {config.name!r} has texts, for which the model needs a tokenizer; "
            f"set {FITTING}"
        )
    return Tokenized(source=source, tokenizer=tokenizer, template=config.template, truncate=config.truncate)


def _check_root(config: DataConfig, domains: Sequence[str]) -> None:
    """Refuse a folder without any of the domains that the data set has; the right one may be near."""
    wanted = config.domains or ()
    if not config.root or not wanted or set(wanted) & set(domains):
        return
    place = nearby(config.root, wanted)
    advice = f"they are in {place}: set data.root={place}" if place else "give the folder that holds them"
    raise DataError(
        f"data.root: {config.root} has none of the domains {', '.join(wanted)}{instead(domains)}; {advice}"
    )


def instead(domains: Sequence[str]) -> str:
    """The end of a message: the domains of a folder that has none of those that are expected."""
    return "" if tuple(domains) == (ONE_DOMAIN,) else f", but {', '.join(domains[:5])}"


def _check_domains(data: Listing | Dataset, config: DataConfig, source: Source) -> None:
    if len(data.classes) < 2 and config.classes is not None:
        raise DataError(
            f"data.classes: {config.classes!r} leaves one class of {data.name!r} ({data.classes[0]}); "
            "choose two or more"
        )
    if len(data.classes) < 2:
        raise DataError(_one_class(data, config, source))
    owners, held_out = client_domains(config, data.domains)
    for name in [] if getattr(source, "sparse", False) else owners + held_out:
        present = np.unique(data.labels[data.domain == data.domains.index(name)])
        missing = sorted(set(range(len(data.classes))) - set(present.tolist()))
        if missing:
            names = ", ".join(data.classes[label] for label in missing[:5])
            names += f" and {len(missing) - 5} others" if len(missing) > 5 else ""
            raise DataError(
                f"data.root: empty class: domain {name!r} of {data.name!r} has no images of {names}; "
                "add some, or remove the class folder from all domains"
            )


def _one_class(data: Listing | Dataset, config: DataConfig, source: Source) -> str:
    """The message for a data set in which all examples have one class."""
    if isinstance(source, OwnData):
        return (
            f"data: all {len(data.labels)} examples have the class {data.classes[0]!r}, so that there is "
            "nothing to tell apart; give examples of two classes or more, or numbers with task='regression'"
        )
    if config.root and objective(task_of(source)).tokens:
        return (
            f"data.columns.label: all {len(data.labels)} texts of {data.name!r} have the label "
            f"{data.classes[0]!r}; give texts of two classes or more, or name another column"
        )
    return (
        f"data.root: {data.name!r} has one class only ({data.classes[0]}); images are expected in "
        "<root>/<domain>/<class>/, of two classes or more"
    )
