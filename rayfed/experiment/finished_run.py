"""A finished run as an object: its scores as tables, its model, its figures."""

from __future__ import annotations

import html
import tempfile
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayfed.errors import ConfigError, adding, unknown
from rayfed.record.folder import LABELS, TENSORS
from rayfed.record.recorded_run import RecordedRun
from rayfed.user_objects import title

if TYPE_CHECKING:
    import pandas as pd
    from torch import nn

    from rayfed.config.schema import Config
    from rayfed.engine.setup import Setup
    from rayfed.experiment.replayed_call import Replay
    from rayfed.models.backbone import Backbone
    from rayfed.types import Params, ServerState


class RoundRow(dict[str, Any]):
    """The row of one round; its columns are attributes, too: `row.accuracy`, `row.round`."""

    def __init__(self, columns: Mapping[str, Any], run: Run | None = None) -> None:
        """Describe a round. Args: run: the run so far, whose last round it is; None: it is gone."""
        super().__init__(columns)
        self._run = run

    @property
    def params(self) -> Params:
        """The trained tensors after this round by global name; they are there until the next round begins.

        Raises:
            ConfigError: The next round has begun, or `checkpoint.every` leaves this one out.
        """
        return dict(state_after_round(self._has_model()._folder, self["round"]).params)

    def model(self, *, merged: bool = False) -> nn.Module:
        """The network with the values after this round, as `Run.model` gives that of a finished run.

        Args:
            merged: As of `Run.model`.

        Raises:
            ConfigError: As of `params` and of `Run.model`.
        """
        return self._has_model()._network(self.params, merged)

    def _has_model(self) -> Run:
        if self._run is None:
            raise ConfigError("this row has no model; a row of a loop over an experiment has one")
        return self._run

    def __getattr__(self, name: str) -> Any:
        """A column by its name."""
        if name not in self:
            raise AttributeError(f"this round has no {name!r}; it has: {', '.join(self)}")
        return self[name]


def state_after_round(folder: Path, round: int) -> ServerState:
    """The state of the server after a round of a run, from its checkpoint.

    Args:
        folder: Folder of the run.
        round: Number of the round, from 1.

    Raises:
        ConfigError: There is no checkpoint of the round that can be read.
    """
    from rayfed.record.checkpoint import state_after
    from rayfed.record.readers import DamagedError

    try:
        return state_after(folder, round)
    except DamagedError as err:
        raise ConfigError(
            f"round {round}: its model is not there ({err}); ask for it before the next round begins, and "
            f"leave checkpoint.every at 1"
        ) from err


class Run:
    """A run that has ended, read from its folder.

    That of a loop that was left early (`Experiment.last`) has the model of its last finished round.

    Metrics of the last round in which models were scored are attributes, too: `run.accuracy`.

    Attributes:
        sha256: SHA-256 digest of the final tensors; empty: it ended before its last round.
        recorded: The files of its folder as they are, from which all below is read.
    """

    def __init__(
        self,
        folder: Path,
        sha256: str,
        config: Config | None = None,
        kept: tempfile.TemporaryDirectory[str] | None = None,
        setup: Setup | None = None,
    ) -> None:
        """Describe a run that has ended.

        Args:
            sha256: As of the attribute.
            config: Its config; None: the one in the folder.
            kept: The temporary folder that holds `folder` and is removed with this object; None: it stays.
            setup: Its experiment, prepared; None: it is prepared when it is needed.
        """
        self._folder = folder
        self.recorded = RecordedRun(folder)
        self._kept = kept
        self.sha256 = sha256
        self._config = config
        self._prepared = setup

    @property
    def path(self) -> Path | None:
        """Folder of the run; None where nothing was written (`output=None`)."""
        return None if self._kept is not None else self._folder

    @cached_property
    def config(self) -> Config:
        """The config of the run."""
        from rayfed.config.schema import load_run

        return self._config or load_run(self._folder).alone()

    @cached_property
    def history(self) -> pd.DataFrame:
        """One row per round: the lines of rounds.jsonl."""
        import pandas as pd

        return pd.DataFrame(self.recorded.rounds)

    @cached_property
    def metrics(self) -> dict[str, Any]:
        """The row of the last round in which models were scored."""
        return self.recorded.reported

    @cached_property
    def clients(self) -> pd.DataFrame:
        """One row per client, by id: domain, numbers of examples, and scores of the last evaluated round.

        As in `metrics`, the score of the model that the method deploys has no prefix (`deployed`). Scores of
        the other one begin with `global_` or `personal_`; clients that never train have those of the global
        model alone.
        """
        import pandas as pd

        rows = pd.DataFrame(self.recorded.partition_rows("client", "domain", "split"))
        rows = rows[rows["client"] != ""]
        table = rows.groupby(["client", "domain", "split"], observed=True).size().unstack(fill_value=0)
        table = table.reset_index("domain")
        last = self.metrics.get("round")
        scores = pd.DataFrame(list(self.recorded.rows("clients")))
        if len(scores):
            scores = scores[
                (scores["round"] == last) & scores["exchange"].isin(["report_clients", "report_unseen"])
            ]
            is_deployed = (scores["model"] == self.deployed) | (scores["exchange"] == "report_unseen")
            prefix = (scores["model"] + "_").where(~is_deployed, "")
            named = scores.assign(score=prefix + scores["metric"])
            table = table.join(named.pivot_table(index="client", columns="score", values="value"))
        table.columns.name = None
        return table

    @cached_property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes: class i is output i. Empty where outputs are numbers or tokens."""
        from rayfed.objective import LANGUAGE_MODELING, REGRESSION, TEXT_REGRESSION

        if self.recorded.fact("task") in (REGRESSION, TEXT_REGRESSION, LANGUAGE_MODELING):
            return ()
        return tuple(self.recorded.about_partition["classes"])

    @cached_property
    def measured(self) -> pd.DataFrame:
        """Values that clients sent besides their tensors, such as those of `client.measure` in a method.

        One row per round, exchange and client that sent any, in this order, with the columns `round`,
        `exchange` (`fit` is training), `client` and `domain`, and one for each name. A value is the mean of
        all calls of `client.measure` in an exchange, in the unit of the method; NaN where a client sent none.
        """
        import pandas as pd

        from rayfed.record.readers import SENT

        keys = ["round", "exchange", "client", "domain"]
        sent = [row for row in self.recorded.rows("clients") if row["model"] == SENT]
        rows: dict[tuple[Any, ...], dict[str, Any]] = {}
        for row in sent:
            at = tuple(row[key] for key in keys)
            rows.setdefault(at, dict(zip(keys, at, strict=True)))[row["metric"]] = row["value"]
        return pd.DataFrame(list(rows.values()), columns=None if rows else keys)

    @property
    def deployed(self) -> str:
        """The models that scores without prefix are about: `global`, or the clients' own ones: `personal`."""
        return self.recorded.deployed

    @property
    def params(self) -> Params:
        """The final trainable tensors by global name."""
        if (self._folder / TENSORS).exists():
            return self.recorded.tensors
        return dict(state_after_round(self._folder, self.recorded.final_round).params)

    def model(self, *, merged: bool = False) -> nn.Module:
        """The network with the final values, in evaluation mode: the user's own one, if there is one.

        It maps a batch of inputs to outputs. Images (of Pillow, of files, arrays of bytes), arrays and texts,
        one or a list of them, become what training gave it. Tensors are given to it as they are: normalized
        images, or token ids with -1 for pads. One of texts also takes what the tokenizer of the model
        returns, padded on the right, as it is or by name (`model(**tokenizer(text, return_tensors="pt"))`).

        Args:
            merged: Add the products of LoRA's factors to the weights, so that no layer of RayFed is left in
                the network; otherwise adapters are layers of it.

        Raises:
            ConfigError: There is nothing to merge, or a layer cannot hold it.
        """
        return self._network(self.params, merged)

    def personal(self, client: str, *, merged: bool = False) -> nn.Module:
        """The network that one client would use: the global one, where it keeps nothing for itself.

        Otherwise it has the client's own values of what stays there (`local.stays`), is the model that the
        client trains for itself, as in Ditto, or the global one after the steps that the method takes there.

        Args:
            client: Its id in `clients`, or the name under which its data were handed over.
            merged: As of `model`.

        Raises:
            ConfigError: There is no such client, or it keeps something in this method and never trained.
        """
        return self._network(self._params_of(client), merged)

    def _params_of(self, client: str | None) -> Params:
        """The final trainable tensors, or those that a client would use."""
        from rayfed.engine.score_finished_run import personal_params

        if client is None:
            return self.params
        return {**self.params, **personal_params(self._folder, self._id_of(client), self._setup)}

    def save_pretrained(self, folder: str | Path, *, merged: bool = True, client: str | None = None) -> Path:
        """Write the trained model in the form of its library, with the names of its classes.

        Merged, a model of transformers becomes a folder for `from_pretrained`, with `id2label` and tokenizer,
        and one of timm a folder for `timm.create_model("local-dir:FOLDER")`. Of others `model.safetensors`
        has the values by the names of the network, and `config.json` has `id2label`.

        Args:
            folder: Is made where it is not there; its files of the same names are replaced.
            merged: Put adapters into the weights; otherwise they are written alone, as by `adapter`.
            client: Write the model that this client would use, as of `personal`.

        Raises:
            ConfigError: The network of the library cannot hold what was trained, or as of `adapter`.
        """
        from rayfed.engine.record_rounds import labels_of
        from rayfed.models.saved_network import save_network

        if not merged:
            return self._write_adapter(folder, client)
        target = Path(folder).expanduser()
        backbone = self._backbone(self._params_of(client)).eval()
        self._merge(backbone)
        bare = self._setup.context.untuned()
        save_network(backbone, bare, self._setup.design.model, labels_of(self._setup), target)
        return target

    def adapter(self, path: str | Path) -> Path:
        """Write the trained adapters in PEFT's format, for `PeftModel.from_pretrained(net, path)`.

        Args:
            path: Folder for adapter_config.json and adapter_model.safetensors, and for labels.json, which has
                the names of the classes for the base model of a classifier.

        Raises:
            ConfigError: The tuning of the run has none that PEFT could read.
        """
        return self._write_adapter(path, None)

    def _write_adapter(self, path: str | Path, client: str | None) -> Path:
        """As of `adapter`, of the model of one client where one is named."""
        files = self._files_of_model(client)
        if not any(name.startswith("adapter_") for name in files):
            from rayfed.report.report_md import why_no_adapter

            why = f": {reason}" if (reason := why_no_adapter(self.recorded)) else ""
            raise ConfigError(
                f"tuning: {self.config.tuning['name']!r} has no adapters in PEFT's format{why}; run.params "
                f"has all trained tensors"
            )
        target = Path(path).expanduser()
        target.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            (target / name).write_bytes(data)
        return target

    def _files_of_model(self, client: str | None) -> Mapping[str, bytes]:
        """Contents of the files in the format of another library, and of the names of classes, by name."""
        from rayfed.engine.record_rounds import RecordSettings

        if client is None and (self._folder / TENSORS).exists():
            files = (self._folder / "model").glob("*")
            return {
                f.name: f.read_bytes() for f in files if f.name.startswith("adapter_") or f.name == LABELS
            }
        make = RecordSettings.of(self._setup, self._folder, resume=False).files
        return {} if make is None else make(self._params_of(client))

    def replay(
        self, *, round: int, client: str, exchange: str = "fit", changes: Mapping[str, Any] | None = None
    ) -> Replay:
        """Execute one call of a client again, to the bit (`rayfed.experiment.replayed_call`).

        Args:
            round: Number of the round, from 1.
            client: Its id in `clients`, or the name under which its data were handed over.
            exchange: Name of the exchange; `fit` is training.
            changes: Values of the sections `local` and `train` that are other ones in this call, such as
                `{"local.mu": 0.2}`.

        Raises:
            ConfigError: There is no such call, or a key may not be changed.
            ClientError: The client fails, as in the run.
        """
        from rayfed.experiment.replayed_call import replay

        name = self._id_of(client)
        return replay(self._folder, round, name, exchange=exchange, changes=changes, config=self.config)

    def plot(self) -> Any:
        """Draw the metric and the loss over the rounds; returns a figure of matplotlib."""
        from rayfed.columns import DEPLOYED, GLOBAL, HELD_OUT, PERSONAL, share_of
        from rayfed.report.style import shown_figure

        history, metric = self.history, self.metric
        figure = shown_figure(8, 3)
        left, right = figure.subplots(1, 2)
        for axes, name in ((left, metric), (right, "loss")):
            for column in (of + name for of in (DEPLOYED, GLOBAL, PERSONAL, HELD_OUT)):
                if column in history:
                    shown = history[["round", column]].dropna()
                    axes.plot(shown["round"], shown[column] * share_of(name), marker=".", label=column)
            axes.set_xlabel("round")
            axes.set_ylabel(f"{name} %" if share_of(name) != 1 else name)
            axes.legend()
        return figure

    def report(self, path: str | Path | None = None) -> Path:
        """Write everything on one HTML page.

        Args:
            path: The file; None: report.html in the folder of the run.

        Raises:
            ConfigError: The run has no folder and no file is given, or the file belongs to something else.
        """
        from rayfed.report.page.render import NAME, write_report

        if path is None and self.path is None:
            raise ConfigError(
                "report: the run was not written; give a file, such as run.report('report.html')"
            )
        file = Path(path).expanduser() if path is not None else self._folder / NAME
        write_report([self._folder], file)
        return file

    @property
    def metric(self) -> str:
        """Name of the metric of the task, such as `accuracy`."""
        return self.recorded.metric

    def _network(self, params: Mapping[str, Any], merged: bool) -> nn.Module:
        from rayfed.experiment.raw_inputs import RawInputs

        backbone = self._backbone(params)
        network = backbone.deployed().eval()
        if merged and not self._merge(network):
            what = self.config.tuning["name"]
            raise ConfigError(f"merged: tuning={what} has no products to merge; leave out merged=True")
        raw = RawInputs.of(self._setup, backbone, self._setup.dataset)
        network.register_forward_pre_hook(raw, with_kwargs=True)
        return network

    def _backbone(self, params: Mapping[str, Any]) -> Backbone:
        """The tuned model with these values."""
        from rayfed.tuning.base import load

        backbone = self._setup.context.build()
        load(backbone, params)
        return backbone

    def _merge(self, network: nn.Module) -> int:
        """Put adapters into the weights of a network. Returns the number of layers that had one."""
        from rayfed.models.lora_layer import merge

        own = getattr(self._setup.context.tuning, "merge", merge)
        merged: int = own(network)
        return merged

    @cached_property
    def _setup(self) -> Setup:
        from rayfed.experiment.plan import prepared

        if self._prepared is not None:
            return self._prepared
        with adding("; run.params has the trained tensors without the network"):
            return prepared(self.config)

    def _id_of(self, client: str) -> str:
        ids = list(self.clients.index)
        if client in ids:
            return str(client)
        if (known := self._ids_by_name.get(str(client))) is not None:
            return known
        matches = [each for each in ids if each.partition("-")[2] == str(client)]
        if len(matches) != 1:
            raise ConfigError(unknown("client", client, [*ids, *self._ids_by_name]))
        return matches[0]

    @cached_property
    def _ids_by_name(self) -> dict[str, str]:
        """The id of each client by the name that its data have; empty where they name no clients."""
        dataset = self._setup.dataset
        if dataset.owner_column is None or self.config.data.partition.scheme != "natural":
            return {}
        names = dataset.owners
        splits = self._setup.context.splits
        every = ((each, rows) for each in self.clients.index for rows in splits[each].values() if len(rows))
        return {names[int(rows[0])]: each for each, rows in every}

    def __getattr__(self, name: str) -> Any:
        """A metric by its name."""
        if name.startswith("_") or name not in self.metrics:
            own = f"its score is run.{self.metric}, and " if self.metric in self.metrics else ""
            raise AttributeError(f"this run has no {name!r}; {own}run.metrics has: {', '.join(self.metrics)}")
        return self.metrics[name]

    def __repr__(self) -> str:
        where = f", {self.path}" if self.path else ""
        return f"<Run: {self._subject()}, {self._score()}{where}>"

    def _subject(self) -> str:
        """Method and data, also of objects that this process does not know."""
        return f"{title(self.recorded.method)} on {self.recorded.data}"

    def _score(self) -> str:
        from rayfed.columns import share_of

        value = self.metrics.get(self.metric)
        if value is None:
            return "not scored"
        percent = "%" if share_of(self.metric) != 1 else ""
        return (
            f"{self.metric} {value * share_of(self.metric):.4g}{percent} after round {self.metrics['round']}"
        )

    def _repr_html_(self) -> str:
        """HTML for a notebook: method, data, score, and the rows of the last rounds."""
        columns = [name for name in ("round", self.metric, "loss", "seconds") if name in self.history]
        table = self.history[columns].tail().to_html(index=False, border=0)
        head = html.escape(f"{self._subject()}: {self._score()}")
        return f"<p><b>{head}</b></p>{table}"
