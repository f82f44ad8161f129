"""An experiment made of names, plain values and objects, and the run that it gives."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

import torch

from rayfed.config.schema import Config, Request, composed, load_config, resolve, to_dict
from rayfed.errors import ConfigError, shown
from rayfed.experiment.finished_run import RoundRow, Run, state_after_round
from rayfed.experiment.from_objects import to_overrides
from rayfed.experiment.kept_session import QUIETLY, Shown, session_of
from rayfed.experiment.kept_session import end_session as end_session
from rayfed.experiment.study.described import compared, one_method
from rayfed.user_objects import is_own, why_other_values

if TYPE_CHECKING:
    from torch import nn

    from rayfed.config.schema import ProtocolName
    from rayfed.config.settings import CheckpointConfig, EvaluationConfig
    from rayfed.data.partition_config import PartitionConfig
    from rayfed.evaluation.stopping import StopConfig
    from rayfed.executors.cluster_config import ClusterConfig
    from rayfed.executors.kinds.base import ExecutorKind
    from rayfed.experiment.runner import Runner
    from rayfed.experiment.single_run import Show
    from rayfed.federation.executor import Policy
    from rayfed.federation.local import Local
    from rayfed.federation.method_registry import Method
    from rayfed.federation.privacy_accountant import PrivacyConfig
    from rayfed.federation.server import Server
    from rayfed.federation.train_config import TrainConfig
    from rayfed.heterogeneity.faults import FaultsConfig
    from rayfed.models.model_config import ModelConfig
    from rayfed.models.user_model import Model
    from rayfed.objective import Task
    from rayfed.sampling.base import Rule
    from rayfed.tuning.base import Tuning
    from rayfed.types import Row, ServerState

    Section: TypeAlias = Mapping[str, Any]
    Half: TypeAlias = Local | Server | type[Local] | type[Server]
    MethodLike: TypeAlias = str | Half | Method | Sequence[Half]
    ModelLike: TypeAlias = str | nn.Module | Callable[[], nn.Module] | Model | ModelConfig | Section

F = TypeVar("F", bound=Callable[..., Any])


def with_gradients(work: F) -> F:
    """The function, in which gradients are computed even if it is called under no_grad or inference_mode."""
    return torch.inference_mode(False)(torch.enable_grad()(work))


OnRound: TypeAlias = "Callable[[RoundRow, ServerState], object]"
"""A function that is called with the row of a round and the state of the server after it."""

GENERAL = "fedavg"
"""The method of an experiment with a model or data of a user, where none is given."""


class Experiment:
    """One experiment. Nothing is read, checked or started before `run`, `config` or an iteration.

    Every key of the command line is an argument, with a name, a plain value, a dict, a dataclass, or, where
    the documentation says so, an object; keys in dots, such as `{"local.mu": 0.1}`, are given with `**`.
    """

    def __init__(  # noqa: PLR0913  (one argument for each key of the config that is used often)
        self,
        *,
        method: MethodLike | None = None,
        model: ModelLike | None = None,
        data: Any = None,
        tuning: str | Tuning | type[Tuning] | Section | None = None,
        task: str | Task | None = None,
        columns: Mapping[str, Any] | None = None,
        rounds: int | None = None,
        seed: int | None = None,
        train: TrainConfig | Section | None = None,
        server: Mapping[str, Any] | None = None,
        local: Mapping[str, Any] | None = None,
        partition: PartitionConfig | Section | None = None,
        evaluation: EvaluationConfig | Section | None = None,
        cluster: str | ExecutorKind | ClusterConfig | Section | None = None,
        clients_per_round: int | Literal["all"] | None = None,
        sampling: str | Rule | None = None,
        channel: Any = None,
        privacy: PrivacyConfig | Section | None = None,
        capacity: Any = None,
        faults: FaultsConfig | Section | None = None,
        failures: Policy | Section | None = None,
        stop: StopConfig | Section | None = None,
        checkpoint: CheckpointConfig | Section | None = None,
        protocol: ProtocolName | None = None,
        experiment: str | None = None,
        **others: Any,
    ) -> None:
        """Describe an experiment; what is left out has the values of the command line.

        Args:
            method: A name, a `Server` or `Local` class or instance, a pair of them, or a `Method`.
            model: A name, a network, a function that makes one, or a `rayfed.Model`.
            data: A name, or examples by client in one of the forms of docs/models.md.
            task: A name, or a `rayfed.Task`; None: what the data are for.
            columns: Columns of a table: `client`, `input`, `target`, `split`, `domain`.
            tuning: A name, a scheme such as `rayfed.LoRA(rank=8)`, or a configuration of PEFT.
            seed: Seed of everything random.
            train: Keys of the section `train`.
            server: Hyperparameters of the server half.
            local: Hyperparameters of the client half.
            partition: Keys of `data.partition`.
            evaluation: Keys of the section `evaluation`.
            cluster: `inline`, an executor of your own (CONTRIBUTING.md), or keys of the section `cluster`.
            clients_per_round: Number of clients in a round, or `all`.
            sampling: How these are drawn: a name, or a function (round, clients, rng) that returns their ids
                (docs/realism.md).
            channel: What happens to values between client and server.
            privacy: Keys of the section `privacy`.
            capacity: What a client can hold.
            faults: Keys of the section `faults`.
            failures: Keys of the section `failures`.
            stop: Keys of the section `stop`, which ends the run before its last round.
            checkpoint: Keys of the section `checkpoint`.
            protocol: Several runs with one table.
            experiment: Settings of a paper, by name.
            others: Any other key of the command line.
        """
        named = {
            "algorithm": method,
            "model": model,
            "data": data,
            "task": task,
            "columns": columns,
            "tuning": tuning,
            "rounds": rounds,
            "seed": seed,
            "train": train,
            "server": server,
            "local": local,
            "data.partition": partition,
            "evaluation": evaluation,
            "cluster": cluster,
            "clients_per_round": clients_per_round,
            "sampling": sampling,
            "channel": channel,
            "privacy": privacy,
            "capacity": capacity,
            "faults": faults,
            "failures": failures,
            "stop": stop,
            "checkpoint": checkpoint,
            "protocol": protocol,
            "experiment": experiment,
        }
        if method is not None and "algorithm" in others:
            raise ConfigError(f"algorithm: {others['algorithm']!r} is given, and method too; leave out one")
        self._given = {key: value for key, value in named.items() if value is not None} | others
        self._checked: Request | None = None
        self._texts: dict[str, str] = {}  # those of a command line, which the checked config has
        self.last: Run | None = None
        """The run of the last loop over the rounds, which may have been left early; None: there is none."""

    @classmethod
    def of(cls, config: Config) -> Experiment:
        """The experiment of a checked config."""
        same = cls()
        same._checked = config if isinstance(config, Request) else Request.of(config)
        return same

    @classmethod
    def from_overrides(cls, overrides: Iterable[str] = (), file: str | Path | None = None) -> Experiment:
        """The experiment that a command line describes.

        Args:
            overrides: `group=name` and `section.key=value`, as of `rayfed run`.
            file: A resolved config to start from, such as the config.yaml of a run.

        Raises:
            ConfigError: A key or a value is wrong, or something else than a list of texts is given.
        """
        is_list = isinstance(overrides, Iterable) and not isinstance(overrides, str | Mapping)
        listed = list(overrides) if is_list else None
        if listed is None:
            raise ConfigError(
                f"config: {shown(overrides)} is no list, such as ['algorithm=fedprox', 'rounds=5']"
            )
        for each in listed:
            if not isinstance(each, str):
                raise ConfigError(f"config: {shown(each)} is no text, such as 'algorithm=fedprox'")
        same = cls.of(load_config(listed, file))
        same._texts = {key.strip(): value for key, _, value in (text.partition("=") for text in listed)}
        return same

    @property
    def given(self) -> Mapping[str, Any]:
        """The values that were given, by key; objects are as they were handed over."""
        return {**self._texts, **self._given}

    def changed(self, **changes: Any) -> Experiment:
        """The same experiment with other values, by key; keys in dots are given with `**`."""
        same = Experiment()
        same._checked, same._texts = self._checked, self._texts
        renamed = {
            {"method": "algorithm", "partition": "data.partition"}.get(k, k): v for k, v in changes.items()
        }
        same._given = {**self._given, **renamed}
        return same

    def differs_from(self, others: Sequence[Experiment]) -> str:
        """The given values in which this experiment differs from others, such as `tuning=head`.

        Args:
            others: Experiments of one method; this one may be among them.
        """
        every = [_flat(each._given) for each in others]
        own = _flat(self._given)
        keys = {key for each in every for key in each if any(each.get(key) != o.get(key) for o in every)}
        return ",".join(f"{key}={own[key]}" for key in sorted(keys & own.keys() - {"seed", "algorithm"}))

    def config(self, **values: Any) -> Request:
        """The checked config, in which every object has a name.

        Args:
            values: Values that replace those of the experiment, by key of the config.

        Raises:
            ConfigError: A key or a value is wrong; one line, as on the command line.
        """
        overrides, more = to_overrides({**self._given, **values})
        if self._checked is not None:
            changed = overrides or more
            return resolve(composed(overrides, to_dict(self._checked), more)) if changed else self._checked
        has_own = any(not isinstance(self._given.get(key, ""), str) for key in ("model", "data"))
        chooses = {"algorithm", "experiment"} & self._given.keys() or self._given.get("compare")
        if has_own and not chooses:
            overrides.append(f"algorithm={GENERAL}")
        return load_config(overrides, more=more)

    @with_gradients
    def run(
        self,
        output: str | Path | None = None,
        *,
        quiet: bool | None = None,
        overwrite: bool = False,
        on_round: OnRound | None = None,
    ) -> Run:
        """Run the experiment.

        One that compares methods or has a protocol gives a `Study`, whose cells have the coordinates
        `method`, `seed`, and of a protocol `part`.

        Args:
            output: Folder of the run, as of the command line; None: that of the experiment, if it has one;
                otherwise nothing is written where you look, and what was recorded is removed with the `Run`.
            quiet: Show nothing; None: show the rounds in a notebook and on a terminal.
            overwrite: Replace an earlier run in `output`.
            on_round: Called in this process after each round, before the next one begins, with its row, which
                has its model, and the state of the server. An error in it ends the run, which can be
                continued.

        Raises:
            ConfigError: Something in the input is wrong; found before any actor starts.
            RayFedError: The run failed; its finished rounds are in the folder.
        """
        output = self.given.get("output") if output is None else output
        own = {} if output is not None else {k: v for k, v in QUIETLY.items() if k not in self.given}
        kept = tempfile.TemporaryDirectory(prefix="rayfed-") if output is None else None
        folder = Path(kept.name) / "run" if kept is not None else Path(str(output)).expanduser()
        with Shown(quiet) as hidden:
            config = self.config(output=str(folder), overwrite=overwrite, **own)
            if config.protocol != "single" or compared(config, self.given):
                if on_round is not None:
                    raise ConfigError(
                        "on_round: is for a single run; a study has callbacks of its own (stop)"
                    )
                return self._study(config, overwrite).run(output, quiet=quiet)
            alone = one_run(config, self.given)
            done = _runner(alone, hidden, on_round).start(alone)
        done._kept = kept
        return done

    def _study(self, config: Request, overwrite: bool) -> Any:
        """The study of the compared methods and of the runs of the protocol."""
        from rayfed.experiment.study.methods import methods_study

        if overwrite:
            raise ConfigError("overwrite: a study is never replaced; give another folder, or remove this one")
        with_others = config if compared(config, self.given) else one_method(config, self.given)
        return methods_study(with_others, self.given)

    @with_gradients
    def __iter__(self) -> Iterator[RoundRow]:
        """Run the experiment, and yield the row of every round, with its model: `row.model()`.

        A round begins when its row is asked for, so leaving the loop ends the run; `last` is then the run of
        the finished rounds. It is in the folder `output`, if the experiment has one, and can be continued
        there; otherwise its folder goes with the object.
        """
        from rayfed.engine.session import launch
        from rayfed.experiment.plan import make_plan
        from rayfed.experiment.single_run import begin, report
        from rayfed.record import claim as folders

        given = self.given.get("output")
        kept = tempfile.TemporaryDirectory(prefix="rayfed-") if given is None else None
        path = Path(kept.name) / "run" if kept is not None else Path(str(given)).expanduser()
        own = {} if kept is None else {k: v for k, v in QUIETLY.items() if k not in self.given}
        config = one_run(self.config(output=str(path), **own), self.given)
        setup = make_plan(config, path).setup
        assert setup is not None  # it is one run
        digest = ""
        with folders.claim(path, folders.look(path, config.overwrite), config.overwrite) as claim:
            begin(config, setup, claim, lambda _: None, resume=False)
            session = session_of(config)
            session.waits = True
            try:
                with launch(setup, path, claim=claim.token, session=session) as rows:
                    for row in rows:
                        digest = str(row.get("sha256", digest))
                        if "round" in row:
                            yield RoundRow(row, Run(path, "", config, setup=setup))
                if kept is None:
                    report(path, lambda _: None, config.figures)
            finally:
                left = Run(path, digest, config, kept, setup)
                self.last = left if left.recorded.rounds else None

    @with_gradients
    def resume(self, path: str | Path, *, quiet: bool | None = None, on_round: OnRound | None = None) -> Run:
        """Continue a run of this experiment after its last checkpoint, to the same bytes.

        Args:
            quiet: As of `run`.
            on_round: As of `run`; called for the rounds that are run now.

        Raises:
            ConfigError: There is no run, or the experiment differs from it; names the key or the object.
        """
        from rayfed.config.config_changes import config_changes, is_about_the_end
        from rayfed.experiment.go_on import check_goes_on
        from rayfed.record.claim import claim_again
        from rayfed.user_files import check_run_folder

        folder = Path(path).expanduser()
        check_run_folder(folder)
        with Shown(quiet) as hidden, claim_again(folder) as claim:
            config = replace(one_run(self.config(), self.given), output=str(folder), overwrite=False)
            before = to_dict_of(folder)
            check_goes_on(config, folder)
            for key, old, new in config_changes(before, to_dict(config)):
                if key == "rounds" and new < old:
                    raise ConfigError(
                        f"rounds: {new} is fewer than the {old} of the run in {folder}; give {old}, or more "
                        "to add rounds"
                    )
                if not is_about_the_end(key):
                    raise ConfigError(_differs(key, old, new, folder))
            return _runner(config, hidden, on_round).start(config, claim)

    def __repr__(self) -> str:
        base = {} if self._checked is None else {"algorithm": self._checked.algorithm}
        given = ", ".join(f"{key}={_short(value)}" for key, value in (base | self._given).items())
        return f"Experiment({given})"


def one_run(config: Request, given: Mapping[str, Any]) -> Config:
    """The config of an experiment that is one run, without the reference that a model brings.

    Args:
        given: The values that its user gave, by key.

    Raises:
        ConfigError: It makes several runs, which no `Run` can stand for.
    """
    if config.protocol != "single":
        raise ConfigError(
            f"protocol: {config.protocol!r} makes several runs, and one is needed here; run(), compare and "
            f"grid make a study of them"
        )
    return one_method(config, given).alone()


def _differs(key: str, old: Any, new: Any, folder: Path) -> str:
    """The message for an experiment that is not the one of a run."""
    if is_own(old) and is_own(new) and old.rpartition("-")[0] == new.rpartition("-")[0]:
        what = f"the source or the values of {old.rpartition('-')[0]} changed since the run in {folder} began"
        return f"{key}: {what}; put back what it began with{why_other_values(key)}, or start a new run"
    return f"{key}: {new!r} would change the result of {folder}, which began with {old!r}; start a new run"


def to_dict_of(folder: Path) -> dict[str, Any]:
    """The config of a run as plain containers, whether or not its objects are known to this process."""
    from rayfed.record.recorded_run import RecordedRun

    return RecordedRun(folder).config


def _runner(config: Config, quiet: bool, on_round: OnRound | None = None) -> Runner:
    """A runner on the Ray and the actors that stay until this process ends."""
    from rayfed.experiment.runner import Runner
    from rayfed.experiment.single_run import Show

    if on_round is not None and config.checkpoint.every != 1:
        raise ConfigError(
            f"checkpoint.every: {config.checkpoint.every} leaves out rounds whose state on_round gets; set 1"
        )

    def call(row: Row, run: Run) -> None:
        assert on_round is not None
        on_round(RoundRow(row, run), state_after_round(run._folder, row["round"]))

    return Runner(
        show=Show(quiet), session=session_of(config), stays=True, on_round=None if on_round is None else call
    )


def simulate(config: Iterable[str] | Config = (), quiet: bool = True) -> Run:
    """Run one experiment as `rayfed run` does: in a folder, on a Ray that ends with it.

    One that compares methods or has a protocol gives a `Study`, as `Experiment.run` does.

    Args:
        config: Overrides as on the command line, or a checked config.

    Raises:
        ConfigError: Something in the input is wrong; found before any actor starts.
        RayFedError: The run failed; its finished rounds are in the folder.
    """
    from rayfed.experiment.runner import Runner
    from rayfed.experiment.single_run import Show

    wanted = Experiment.of(config) if isinstance(config, Config) else Experiment.from_overrides(config)
    checked = wanted.config()
    if not compared(checked, wanted.given):
        checked = one_method(checked, wanted.given)
    if checked.protocol != "single" or checked.compare:
        return _command_study(checked, Show(quiet))
    return Runner(show=Show(quiet)).start(checked.alone())


def _command_study(config: Request, show: Show) -> Any:
    from rayfed.experiment.study.from_command import begin

    return begin(config, show)


def _flat(given: Mapping[str, Any], before: str = "") -> dict[str, str]:
    """Given values by their whole keys, in a few words each."""
    flat: dict[str, str] = {}
    for key, value in given.items():
        if isinstance(value, Mapping) and key != "data":
            flat |= _flat(value, f"{before}{key}.")
        else:
            flat[before + key] = str(value) if isinstance(value, str | int | float) else _short(value)
    return flat


def _short(value: Any) -> str:
    text = repr(value) if isinstance(value, str | int | float | bool) else type(value).__name__
    return (
        text if isinstance(value, str | int | float | bool) or not isinstance(value, type) else value.__name__
    )
