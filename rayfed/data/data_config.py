"""The config section `data`, and the checks of it that do not need the data set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal, TypeAlias

from annotated_types import Ge, Gt, Le, Lt

from rayfed.data.partition_config import PartitionConfig, PopulationConfig, check_partition
from rayfed.errors import ConfigError, unknown

Resize: TypeAlias = Literal["squash", "crop"]
"""The part of an image that becomes a square: all of it, or only its centre."""


# The ranges of `rayfed.types` are not imported: readers of configs need no torch.
Share: TypeAlias = Annotated[float, Ge(0), Le(1)]
Factor: TypeAlias = Annotated[float, Ge(0)]
Area: TypeAlias = Annotated[float, Ge(1e-4), Le(1)]
Ratio: TypeAlias = Annotated[float, Gt(0), Le(100)]


@dataclass(frozen=True, kw_only=True)
class Flip:
    """Mirror an image from left to right.

    Attributes:
        p: Probability.
    """

    p: Share = 0.5


@dataclass(frozen=True, kw_only=True)
class Crop:
    """Cut out a random part and resize it to the input of the model (bilinear, with antialiasing).

    The default is that of FFT-GP's and DomainBed's code; ImageNet training uses scale [0.08, 1].

    Attributes:
        scale: Smallest and largest share of the area.
        ratio: Smallest and largest ratio of width to height.
    """

    scale: tuple[Area, Area] = (0.7, 1.0)
    ratio: tuple[Ratio, Ratio] = (0.75, 4 / 3)


@dataclass(frozen=True, kw_only=True)
class Rotate:
    """Rotate an image about its centre (nearest pixel; corners become black).

    Attributes:
        degrees: Largest angle in either direction; 30 in the code of FedGCR and FedCLIP.
    """

    degrees: Annotated[float, Ge(0), Le(180)] = 30.0


@dataclass(frozen=True, kw_only=True)
class RandAugment:
    """RandAugment (Cubuk et al., 2020): operations drawn from a list of 14, all of the same strength.

    Attributes:
        num_ops: Operations on an image.
        magnitude: Their strength, from 0 to 30.
    """

    num_ops: Annotated[int, Ge(1), Le(14)] = 2
    magnitude: Annotated[int, Ge(0), Le(30)] = 9


@dataclass(frozen=True, kw_only=True)
class Jitter:
    """Change brightness, contrast, saturation and hue, in random order.

    The default is that of FFT-GP's code; DomainBed uses 0.3 for all four.

    Attributes:
        brightness, contrast, saturation: Factors are drawn from [max(0, 1 - value), 1 + value].
        hue: The hue is turned by up to this share of the circle in either direction.
    """

    brightness: Factor = 0.4
    contrast: Factor = 0.4
    saturation: Factor = 0.4
    hue: Annotated[float, Ge(0), Le(0.5)] = 0.4


@dataclass(frozen=True, kw_only=True)
class Grayscale:
    """Remove the colours.

    Attributes:
        p: Probability; 0.1 in the code of FFT-GP and DomainBed.
    """

    p: Share = 0.1


@dataclass(frozen=True, kw_only=True)
class AugmentConfig:
    """The config section `data.augment`: what is done to training images, in the order of this list.

    On the command line a list of names is enough, with the defaults of each: `data.augment=[crop,flip]`.
    Numbers are given as in `data.augment.crop.scale=[0.08,1]`.

    Attributes:
        crop: Random part, resized.
        flip: Mirror.
        rotate: Rotation.
        randaugment: Random operations.
        jitter: Brightness, contrast, saturation, hue.
        grayscale: Without colours.
    """

    crop: Crop | None = None
    flip: Flip | None = None
    rotate: Rotate | None = None
    randaugment: RandAugment | None = None
    jitter: Jitter | None = None
    grayscale: Grayscale | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of what is done, in order."""
        return tuple(f.name for f in fields(self) if getattr(self, f.name) is not None)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The config section `data`.

    Attributes:
        name: Name of the data set, for reports and the cached file.
        reader: File name in `rayfed/data/readers`, or `package.module:NAME` of an installed package.
        root: Folder of the data set; embedded data sets need none.
        cache: Folder of prepared data sets; None means `$RAYFED_CACHE`, else `~/.cache/rayfed`.
        domains: Domains to use, in the order of the clients; None means all, in the reader's order.
        classes: Classes to use, in this order, or the number of first classes to use; None means all.
        aliases: Name of the domain or class by the name of a folder that is spelled differently.
        columns: Name of the column of each part, for readers of tables (data=hf/NAME, csv, tsv, jsonl,
            parquet), such as `label`, `tools`, `client` and `domain`; None, or a part that is left out: what
            the reader says.
        template: For language models: what a prompt becomes before its answer; {prompt} stands for it. None:
            the prompt and a line break.
        truncate: End at which a text with too many tokens is cut: `left` or `right`. None: of a text to
            classify the right end, of a prompt the left one.
        new_classes: Under protocol=base_to_new: the classes of which no client has an example, by name, or
            the number of last classes; None: the second half of all.
        base_classes: Set by protocol=base_to_new in its second run, where `classes` are the new ones: the
            clients are those to whom the samples of the base classes are distributed, and each is tested on
            the test samples of the new classes in its domain. Only with `evaluation.model_of`.
        targets: Under protocol=cross_dataset: the data sets on which the model is scored, a list of names, or
            values of the section `data` by name, such as `{dtd: {root: DTD}}`. The value `template` is their
            class prompt; without it they have that of the model.
        held_out: Domain or domains without clients; all their images test the global model.
        on_bad_image: `stop` ends the command at an image that cannot be decoded, `skip` leaves it out.
        resize: How an image file becomes the square input of the model: `squash` resizes the whole image,
            `crop` the largest centred square (shorter side, then centre crop); `auto`: `crop` for models
            whose own transform cuts out the centre (CLIP, most of timm), `squash` for the others.
        limit: Largest number of images of each domain, or a share in (0, 1] of them; the seed chooses them,
            stratified by class.
        shots: Largest number of training samples of each class that a client keeps; None: all. For
            protocol=few_shot a list, of which each number is a run; then None is 1, 2, 4, 8 and 16.
        unseen_clients: Number of clients, or a share in [0, 1) of them, that never train and are scored
            besides the others; the seed draws them. For protocol=unseen_clients a number or a list, of which
            each entry is a run.
        val: Fraction in [0, 1), or number, of a client's samples for validation.
        test: As `val`, for testing; `official` is the official test split of the data set, which the clients
            of a domain share.
        augment: Random changes of training images: none, a list of names (crop, flip, rotate, randaugment,
            jitter, grayscale), or a section with the numbers of each. Images that are scored never change.
        resident: Whether each process copies the examples of all clients to its device once, as they are
            stored (uint8). `auto`: where they need at most `resident_memory` and half of the device's free
            memory. Otherwise batches are copied one by one, during the computation. The result is the same;
            no effect on the CPU.
        resident_memory: Gigabytes of examples that `resident: auto` puts on the device of a process.
        population: Number of clients, or a section: clients that draw their samples with replacement when
            they take part, so that there may be any number of them. None: samples are distributed as
            `partition` says.
        partition: Distribution of the samples to clients. In a config, a path here is short for `file: path`.
        seed: Seed of what distributes the samples: which of them are used, each client's, and its splits.
            None: `seed`, which decides all else. With a number, runs that differ in `seed` have the same
            clients; with `seed` fixed, runs that differ in this one have the same start and sampling.
    """

    name: str
    reader: str
    root: str | None = None
    cache: str | None = None
    domains: list[str] | None = None
    classes: list[str] | int | None = None
    aliases: dict[str, str] | None = None
    columns: dict[str, str] | None = None
    template: str | None = None
    truncate: Literal["left", "right"] | None = None
    new_classes: list[str] | int | None = None
    base_classes: list[str] | None = None
    targets: list[str] | dict[str, dict[str, Any]] | None = None
    held_out: str | list[str] | None = None
    on_bad_image: Literal["stop", "skip"] = "stop"
    resize: Literal["auto", "squash", "crop"] = "auto"
    limit: float | int | None = None
    shots: int | list[int] | None = None
    unseen_clients: float | int | list[float | int] | None = None
    val: float | int = 0.1
    test: Literal["official"] | float | int = 0.2
    augment: AugmentConfig | None = None
    resident: Literal["auto"] | bool = "auto"
    resident_memory: Annotated[float, Gt(0), Lt(float("inf"))] = 4.0
    population: PopulationConfig | None = None
    partition: PartitionConfig = field(default_factory=PartitionConfig)
    seed: Annotated[int, Ge(0)] | None = None


def check_config(config: DataConfig) -> None:
    """Check the values that can be checked without the data set.

    Raises:
        ConfigError: A value is not allowed; one line that names the key, the value and what is allowed.
    """
    _check_share("data.val", config.val)
    if config.test != "official":
        _check_share("data.test", config.test)
        total = sum(share for share in (config.val, config.test) if isinstance(share, float))
        if total >= 1:
            raise ConfigError(
                f"data.val + data.test: {config.val} + {config.test} leaves nothing to train on; "
                "their sum must be below 1"
            )
    limit = config.limit
    if limit is not None and not (0 < limit <= 1 if isinstance(limit, float) else limit >= 1):
        raise ConfigError(
            f"data.limit: {limit} is neither a number of images >= 1 nor a fraction in (0, 1]; "
            "use null for no limit"
        )
    if config.template is not None and "{prompt}" not in config.template:
        raise ConfigError(
            f"data.template: {config.template!r} has no {{prompt}}, which stands for the prompt of a sample; "
            f'write for example "Question: {{prompt}}\\nAnswer:\\n"'
        )
    _check_protocol(config)
    check_partition(config.partition)
    if config.population is not None:
        _check_population(config.partition)


def _check_population(partition: PartitionConfig) -> None:
    """Raise ConfigError for what a virtual population cannot be combined with."""
    default = PartitionConfig()
    for key in ("file", "split_test", "clients_per_domain", "pool_size", "pool_share"):
        if (value := getattr(partition, key)) != getattr(default, key):
            raise ConfigError(
                f"data.partition.{key}: {value!r} cannot be used with data.population, whose clients draw "
                f"their samples; leave one of them out"
            )
    if partition.scheme not in ("by_domain", "imbalanced"):
        raise ConfigError(
            f"data.partition.scheme: {partition.scheme} distributes samples to clients, those of "
            f"data.population draw theirs; set data.population.alpha, and leave the scheme out"
        )


def _check_protocol(config: DataConfig) -> None:
    """Raise ConfigError for what only the runs of a protocol may have, or none of them."""
    if config.shots is not None:
        _check_shots(config)
    if config.unseen_clients is not None:
        _check_unseen(config)
    for key, protocol in (("new_classes", "base_to_new"), ("targets", "cross_dataset")):
        if (value := getattr(config, key)) is not None:
            raise ConfigError(
                f"data.{key}: {value} has no effect without protocol={protocol}; set that, or leave it out"
            )


def _check_shots(config: DataConfig) -> None:
    if isinstance(config.shots, list):
        raise ConfigError(
            f"data.shots: {config.shots} is a list, for which protocol=few_shot makes one run each; set "
            f"that, or one number"
        )
    if config.shots is None or config.shots < 1:
        raise ConfigError(f"data.shots: {config.shots} is not a number of samples >= 1; use null for all")
    if config.population is not None:
        raise ConfigError(
            f"data.shots: {config.shots} cannot be used with data.population, whose clients draw their "
            f"samples; set data.population.size, and leave it out"
        )


def _check_unseen(config: DataConfig) -> None:
    if isinstance(config.unseen_clients, list):
        raise ConfigError(
            f"data.unseen_clients: {config.unseen_clients} is a list, for which protocol=unseen_clients "
            f"makes one run each; set that, or one number"
        )
    _check_share("data.unseen_clients", config.unseen_clients)
    if config.population is not None:
        raise ConfigError(
            f"data.unseen_clients: {config.unseen_clients} cannot be used with data.population; set "
            f"data.partition.clients_per_domain in its place"
        )


def _check_share(key: str, share: object) -> None:
    whole = isinstance(share, int) and not isinstance(share, bool) and share >= 0
    if not whole and not (isinstance(share, float) and 0 <= share < 1):
        official = ' nor "official"' if key == "data.test" else ""
        raise ConfigError(
            f"{key}: {share!r} is neither a fraction in [0, 1) nor a whole number >= 0{official}"
        )


def client_domains(config: DataConfig, domains: Sequence[str]) -> tuple[list[str], list[str]]:
    """The domains that have clients, in the order of the clients, and the held-out domains.

    Args:
        domains: All domains of the data set.

    Raises:
        ConfigError: A domain does not exist (the message names the nearest one) or is listed twice, or no
            domain is left for clients.
    """
    chosen = list(domains) if config.domains is None else config.domains
    held_out = [config.held_out] if isinstance(config.held_out, str) else config.held_out or []
    for key, names in (("data.domains", chosen), ("data.held_out", held_out)):
        for position, name in enumerate(names):
            if name not in domains:
                raise ConfigError(unknown(key, name, domains))
            if name in names[:position]:
                raise ConfigError(f"{key}: {name!r} is listed twice; list each domain once")
    owners = [name for name in chosen if name not in held_out]
    if config.partition.scheme == "imbalanced" and config.partition.order is not None:
        owners = _in_order(owners, config.partition.order)
    if not chosen:
        raise ConfigError(f"data.domains: [] is empty; list one or more of {', '.join(domains)}")
    if not owners:
        raise ConfigError(
            f"data.held_out: {', '.join(held_out) or 'nothing'} of data.domains {', '.join(chosen)} "
            "leaves no domain for clients; hold out fewer or list more"
        )
    return owners, list(held_out)


def _in_order(owners: list[str], order: list[str]) -> list[str]:
    if sorted(order) != sorted(owners):
        raise ConfigError(
            f"data.partition.order: {order} must list each domain that has clients once: {', '.join(owners)}"
        )
    return order
