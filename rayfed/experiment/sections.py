"""Keys of the sections of a config, as types; written by `python -m docs.generate.sections`."""

from __future__ import annotations

from typing import Literal, TypedDict


class TrainKeys(TypedDict, total=False):
    """Keys of the section `train`."""

    optimizer: Literal["sgd", "adam", "adamw"]
    keep_optimizer: bool
    lr: float
    schedule: Literal["constant", "cosine", "step"]
    step_at: float
    step_factor: float
    warmup_rounds: int
    momentum: float
    weight_decay: float
    betas: tuple[float, float]
    eps: float
    clip_norm: float | None
    epochs: int
    batch_size: int
    drop_last: bool
    eval_batch_size: int
    local_steps: Literal["full_epoch", "min_over_clients_plus_one"] | int
    max_steps: int | None
    batch_norm: Literal["average", "local"]
    cache_features: Literal["auto"] | bool
    cache_memory: int
    group: Literal["auto"] | int
    checkpointing: bool
    micro_batch: int | None
    precision: Literal["fp32", "tf32", "bf16"]
    compile: bool
    graphs: Literal["auto"] | bool
    base_bits: Literal[4] | None


class EvaluationKeys(TypedDict, total=False):
    """Keys of the section `evaluation`."""

    every: int
    clients: Literal["all"] | int
    personal: bool
    personal_split: Literal["test", "val"]
    validation: bool | Literal["clients", "domains"]
    ties: Literal["first", "last"]
    local_steps: int
    model_of: str | None
    without_parts: Literal["auto"] | bool
    table: Literal["domains", "clients"]


class ClusterKeys(TypedDict, total=False):
    """Keys of the section `cluster`."""

    executor: str
    device: str
    address: str | None
    actors: Literal["auto", "per_client"] | int
    cpus_per_actor: Literal["auto"] | float
    gpus_per_actor: Literal["auto"] | float
    memory_per_actor: float
    threads: int
    num_cpus: int | None
    num_gpus: int | None
    dashboard: bool
    metrics: bool
    connect_timeout: float


class PrivacyKeys(TypedDict, total=False):
    """Keys of the section `privacy`."""

    noise_at: Literal["server", "client"]
    delta: Literal["auto"] | float
    accountant: Literal["rdp", "prv"]
    epsilon: float | None


class FaultsKeys(TypedDict, total=False):
    """Keys of the section `faults`."""

    tiers: dict[str, float] | dict[str, str]
    availability: float | dict[str, float]
    dropout: float | dict[str, float]
    speed: float | dict[str, float]
    bandwidth: float | dict[str, float] | None
    seconds_per_example: float | None
    deadline: float | None
    attack: Literal["none", "labels", "noise", "sign_flip"] | dict[str, str]
    attack_scale: float | dict[str, float]
    trace: str | None
    devices: str | None
    sessions: str | None


class FailuresKeys(TypedDict, total=False):
    """Keys of the section `failures`."""

    on_client_error: Literal["raise", "retry", "drop"]
    retries: int
    client_timeout: float | None
    watchdog: float | None
    patience: Literal["auto"] | float


class CheckpointKeys(TypedDict, total=False):
    """Keys of the section `checkpoint`."""

    every: int
    keep: int


class PartitionKeys(TypedDict, total=False):
    """Keys of the section `data.partition`."""

    scheme: Literal["by_domain", "dirichlet", "pathological", "shards", "quantity", "natural", "imbalanced"]
    clients_per_domain: int | list[int]
    alpha: float
    min_samples: int
    classes_per_client: int
    shards_per_client: int
    factor: float
    order: list[str] | None
    within: Literal["ratio", "factor"]
    pool_size: int | None
    pool_share: float
    split_test: bool
    share_of_smallest: float | None
    by_group: bool
    pooled: bool
    file: str | None
