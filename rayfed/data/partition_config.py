"""The config sections `data.partition` and `data.population`, and checks that do not need the data set."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal, TypeAlias, get_args

from annotated_types import Ge, Gt, Le

from rayfed.errors import ConfigError, unknown

Scheme: TypeAlias = Literal[
    "by_domain",
    "dirichlet",
    "inner_dirichlet",
    "pathological",
    "shards",
    "quantity",
    "linear",
    "square",
    "exponential",
    "natural",
    "imbalanced",
]
"""Distribution of the samples of a domain."""


@dataclass(frozen=True, kw_only=True)
class PartitionConfig:
    """The config section `data.partition`: how the samples of a domain are distributed to its clients.

    Attributes:
        scheme: `by_domain` distributes at random in nearly equal parts; `dirichlet` skews labels within a
            domain; `pathological` gives each client a few classes, `shards` a few parts of the samples sorted
            by class; `quantity` skews the numbers of samples. `inner_dirichlet` draws class shares for each
            client, whose sizes are nearly equal. Under `linear`, `square` and `exponential` the sizes of the
            clients of a domain grow with their number k as k, k squared and e^k. `natural` gives each client
            of the data set (a column of the data) its own samples; `imbalanced` gives domains very different
            numbers of clients and clients very different numbers of samples, and separates the test samples
            of a domain before it is distributed.
        clients_per_domain: One number for all domains, or a list with one number per domain that has clients.
        alpha: Concentration of the Dirichlet distribution, > 0, of labels (`dirichlet`, `inner_dirichlet`) or
            of numbers of samples (`quantity`); a small value skews strongly, 100 hardly.
        min_samples: Smallest number of training samples of a client under `dirichlet`, `quantity`, `linear`,
            `square` and `exponential`; under `natural`, clients with fewer are left out.
        classes_per_client: Under `pathological`: number of classes of a client.
        shards_per_client: Under `shards`: number of parts of a client.
        factor: Under `imbalanced`: number of clients of the first domain for each of the last, e.g. 1, 5, 10.
        order: Under `imbalanced`: domains from the largest to the smallest; None: as in `data.domains`.
        within: Under `imbalanced`: `ratio`: from client to client of a domain, sizes fall by the same ratio
            as the numbers of clients from domain to domain (Digit-Five, DomainNet); `factor`: the largest
            client has `factor` times the samples of the smallest (PACS).
        pool_size: Under `imbalanced`: number of samples of the first domain of which its clients get
            theirs; that of each further domain is 1 / ratio of the domain before. None: all training samples
            of the first domain.
        pool_share: Under `imbalanced`: share in (0, 1] of these samples that the clients of a domain get;
            the others are not used.
        split_test: Under `imbalanced`: distribute the test samples of a domain to its clients in proportion
            to their sizes, instead of sharing them (FedGCR's spread over clients at factor 1).
        share_of_smallest: Share in (0, 1] of the training samples of the client with the fewest: no client
            keeps more than that (0.05 in FedBN's script for DomainNet). None: clients keep all.
        by_group: Assign samples of a group (slices of a patient) to the same client and split; all numbers
            here and in `data` then count groups.
        pooled: Train one client on the samples of all (the centralised reference); test sets do not change.
        file: A saved partition to use instead: partition.parquet of a run, or a JSON or CSV list of the
            samples of each client. Then `data.limit` and this section, except `pooled`, have no effect.
    """

    scheme: Scheme = "by_domain"
    clients_per_domain: int | list[int] = 1
    alpha: float = 0.5
    min_samples: int = 10
    classes_per_client: int = 2
    shards_per_client: int = 2
    factor: float = 5
    order: list[str] | None = None
    within: Literal["ratio", "factor"] = "ratio"
    pool_size: int | None = None
    pool_share: float = 1.0
    split_test: bool = False
    share_of_smallest: float | None = None
    by_group: bool = True
    pooled: bool = False
    file: str | None = None


Partition = PartitionConfig
"""The name of the section for those who write it as an object."""


def check_partition(partition: PartitionConfig) -> None:
    """Check the values that can be checked without the data set.

    Raises:
        ConfigError: A value is not allowed, or has no effect under the scheme.
    """
    _check_scheme(partition)
    if not 0 < partition.alpha < float("inf"):
        raise ConfigError(f"data.partition.alpha: {partition.alpha} is not a finite number > 0; try 0.5")
    for key in ("min_samples", "classes_per_client", "shards_per_client"):
        if (value := getattr(partition, key)) < 1:
            raise ConfigError(f"data.partition.{key}: {value} must be at least 1")
    if not 1 <= partition.factor < float("inf"):
        raise ConfigError(f"data.partition.factor: {partition.factor} is not a finite number >= 1; try 5")
    if partition.split_test and partition.scheme != "imbalanced":
        raise ConfigError(
            f"data.partition.split_test: true needs scheme=imbalanced, not {partition.scheme}, whose clients "
            "have their own test samples if data.test is a fraction"
        )
    _check_pool(partition)
    _check_effect(partition)
    counts = partition.clients_per_domain
    if any(count < 1 for count in (counts if isinstance(counts, list) else [counts])):
        raise ConfigError(f"data.partition.clients_per_domain: {counts} must be at least 1 everywhere")


def _check_scheme(partition: PartitionConfig) -> None:
    if (file := Path(partition.file or "").name) in get_args(Scheme):  # paths are absolute
        raise ConfigError(
            f"data.partition: {file!r} is a scheme, no file; write data.partition.scheme={file}"
        )
    if partition.scheme not in get_args(Scheme):
        raise ConfigError(unknown("data.partition.scheme", partition.scheme, get_args(Scheme)))


def _check_pool(partition: PartitionConfig) -> None:
    if partition.pool_size is not None and partition.pool_size < 1:
        raise ConfigError(f"data.partition.pool_size: {partition.pool_size} must be at least 1, or null")
    if not 0 < partition.pool_share <= 1:
        raise ConfigError(f"data.partition.pool_share: {partition.pool_share} is not a share in (0, 1]")
    share = partition.share_of_smallest
    if share is not None and not 0 < share <= 1:
        raise ConfigError(
            f"data.partition.share_of_smallest: {share} is not a share in (0, 1]; use null for no limit"
        )


ONLY = {
    "clients_per_domain": (
        *("by_domain", "dirichlet", "inner_dirichlet", "pathological", "shards"),
        *("quantity", "linear", "square", "exponential"),
    ),
    "alpha": ("dirichlet", "inner_dirichlet", "quantity"),
    "min_samples": ("dirichlet", "quantity", "linear", "square", "exponential", "natural"),
    "classes_per_client": ("pathological",),
    "shards_per_client": ("shards",),
    "factor": ("imbalanced",),
    "order": ("imbalanced",),
    "pool_size": ("imbalanced",),
    "pool_share": ("imbalanced",),
}
"""Keys of a partition that count under some schemes only. `within` is not among them: data sets set it."""


def _check_effect(partition: PartitionConfig) -> None:
    """Raise ConfigError for a key that was set and that the scheme does not look at."""
    for option in fields(partition):
        schemes, value = ONLY.get(option.name, (partition.scheme,)), getattr(partition, option.name)
        if partition.file is None and partition.scheme not in schemes and value != option.default:
            raise ConfigError(
                f"data.partition.{option.name}: {value!r} has no effect under scheme={partition.scheme}; "
                f"leave it out, or set data.partition.scheme={' or '.join(schemes)}"
            )


# The ranges of `rayfed.types` are not imported: readers of configs need no torch.
MOST = 10_000_000


@dataclass(frozen=True, kw_only=True)
class PopulationConfig:
    """The config section `data.population`: N clients, each with samples drawn with replacement.

    On the command line a number is enough: `data.population=100000`.

    Attributes:
        clients: Number of clients.
        size: Mean number of samples of a client, for training and validation together.
        sigma: Standard deviation of the logarithm of that number, which has a normal distribution; 0 gives
            all clients the same number.
        alpha: Concentration of the Dirichlet distribution of a client's class shares, for each class; a small
            value gives a client few classes, 100 those of its domain.
    """

    clients: Annotated[int, Ge(1), Le(MOST)]
    size: Annotated[float, Gt(0), Le(100_000)] = 50.0
    sigma: Annotated[float, Ge(0), Le(2)] = 0.7
    alpha: Annotated[float, Gt(0), Le(1e6)] = 0.5
