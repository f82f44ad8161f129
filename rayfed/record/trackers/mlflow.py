"""MLflow: config as parameters, rounds as steps of metrics."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from rayfed.errors import ConfigError
from rayfed.record.trackers.tracker import (
    MARK,
    PROJECT,
    Ending,
    Tracker,
    flat,
    home_of,
    temporary_environment,
    without_secrets,
)

DATABASE = "mlflow.db"
URI, EXPERIMENT = "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"
PREFIXES = ("MLFLOW_",)


class MLflow(Tracker):
    """A run of MLflow, on the server of MLFLOW_TRACKING_URI or in a database next to the run's folder."""

    library: ClassVar[str] = "mlflow"
    variables: ClassVar[tuple[str, ...]] = PREFIXES

    @classmethod
    def check(cls, environment: Mapping[str, str], key: str) -> None:
        if environment.get(URI):
            _check_server(environment)

    def open(self) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        home = home_of(self.run)
        uri = self.environment.get(URI) or f"sqlite:///{home / DATABASE}"
        self._client = MlflowClient(uri)
        run = self._find_run()
        if run is None:
            name = self.run.relative_to(home).as_posix()
            run = self._client.create_run(self._experiment(uri), run_name=name)
            self.id = run.info.run_id
        else:
            self._client.update_run(self.id, status="RUNNING")
        self.step = max((m.step for m in self._client.get_metric_history(self.id, MARK)), default=0)
        if not run.data.params:
            params = [Param(_allowed_name(k), v[:6000]) for k, v in flat(self.config) if v]
            for i in range(0, len(params), 100):  # the most it takes at a time
                self._client.log_batch(self.id, params=params[i : i + 100])

    def _find_run(self) -> Any:
        """The MLflow run that is continued; None if there is none, or it was deleted."""
        from mlflow.exceptions import MlflowException

        try:
            run = self._client.get_run(self.id) if self.id else None
        except MlflowException as err:
            if err.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return None
        return run if run is not None and run.info.lifecycle_stage == "active" else None

    def _experiment(self, uri: str) -> str:
        from mlflow.exceptions import MlflowException

        name = self.environment.get(EXPERIMENT) or PROJECT
        found = self._client.get_experiment_by_name(name)
        if found is None:
            file = uri.removeprefix("sqlite:///")
            # Without a server, MLflow's default is a folder in the current folder of the process.
            place = None if file == uri else Path(file).with_name("mlartifacts").as_uri()
            try:
                return str(self._client.create_experiment(name, artifact_location=place))
            except MlflowException:  # another run has created it meanwhile
                found = self._client.get_experiment_by_name(name)
        return str(found.experiment_id)

    def send(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        keys = sorted(values, key=lambda key: key == MARK)
        metrics = [Metric(_allowed_name(key), values[key], now, step) for key in keys]
        for i in range(0, len(metrics), 1000):  # the most it takes at a time
            self._client.log_batch(self.id, metrics=metrics[i : i + 1000])

    def end(self, ending: Ending) -> None:
        self._client.set_terminated(self.id, ending.upper())


def _check_server(environment: Mapping[str, str]) -> None:
    name = environment.get(EXPERIMENT) or PROJECT
    place = without_secrets(environment[URI], environment)
    try:
        with temporary_environment(environment, PREFIXES):
            from mlflow import MlflowClient

            found = MlflowClient(tracking_uri=environment[URI]).get_experiment_by_name(name)
    except Exception as err:
        raise ConfigError(
            f"{URI}: {place} cannot be used: {without_secrets(err, environment)}; correct it or start that "
            f"server, or unset it to use {DATABASE} next to the run"
        ) from None
    if found is not None and found.lifecycle_stage == "deleted":
        raise ConfigError(f"{EXPERIMENT}: {name!r} was deleted; restore it in MLflow or choose another name")


def _allowed_name(key: str) -> str:
    """A name with only the characters that MLflow allows."""
    return re.sub(r"[^\w\-. :/]", lambda character: f"_{ord(character[0]):x}_", key)[:250]


TRACKER = MLflow
