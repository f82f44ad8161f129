"""The settings of an experiment: the sections of a config, and its numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge

from rayfed.data.data_config import DataConfig
from rayfed.devices import Deterministic
from rayfed.evaluation.stopping import StopConfig
from rayfed.executors.cluster_config import ClusterConfig
from rayfed.federation.executor import OnNonFinite, Policy
from rayfed.federation.noise_and_compression import ChannelConfig
from rayfed.federation.privacy_accountant import PrivacyConfig
from rayfed.federation.train_config import TrainConfig
from rayfed.heterogeneity.capacity import CapacityConfig
from rayfed.heterogeneity.faults import FaultsConfig
from rayfed.models.model_config import ModelConfig
from rayfed.types import Count, Head


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
    """The section `checkpoint`: from what a run is continued, and which round is kept.

    Attributes:
        every: Write a checkpoint after every n-th round and after the last one; 0: only after the last one.
        keep: Number of checkpoints that are kept.
        best: The column of validation, such as `val_accuracy` or `val_loss`, whose best round is reported and
            gives the final tensors, those that clients keep included; auto: the metric of the task. None:
            the last round is and does.
    """

    every: Annotated[int, Ge(0)] = 1
    keep: Count = 2
    best: str | None = None


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All of an experiment but its method and its tuning scheme.

    Attributes:
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
        stop: When the run ends before its last round.
        checkpoint: Checkpoints from which a run is continued, and the round whose model is kept.
        failures: The policy for failures of clients and actors.
        on_nonfinite: A loss or a global tensor that is NaN or infinite is recorded in the events, on the
            screen and in the report, and the run continues (warn) or ends (raise).
        tensorboard: Also write the rounds for TensorBoard, into tensorboard/ of the run's folder.
        figures: Draw the figures of a run when it ends, about a second of work.
        report: Also write report.html when it ends, one page with everything (docs/watching.md).
        trackers: Also send the rounds elsewhere: `mlflow`, `wandb`, `trackio`, or a tracker of your own,
            `package.module:NAME` (docs/watching.md).
        output: Folder of the run; none: a new folder in runs/.
        overwrite: Move an earlier run in `output` to NAME.before-1, and begin a new one.
    """

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
    stop: StopConfig = field(default_factory=StopConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    failures: Policy = field(default_factory=Policy)
    on_nonfinite: OnNonFinite = "warn"
    tensorboard: bool = True
    figures: bool = True
    report: bool = False
    trackers: tuple[str, ...] = ()
    output: str | None = None
    overwrite: bool = False


PATHS = (
    *("output", "data.root", "data.cache", "data.partition.file", "model.weights", "evaluation.model_of"),
    *(f"faults.{name}" for name in ("trace", "devices", "sessions")),
)
"""Keys that may hold a path; `~` in them stands for a home folder, and relative ones begin where the command
was started."""
