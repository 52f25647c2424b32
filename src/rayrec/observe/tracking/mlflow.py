"""MLflow tracker: parameters, metrics, tags and status. Requires the extra `mlflow`."""

import os
from collections.abc import Iterator, Mapping
from typing import Any, Final, final

from mlflow.entities import Metric, Param, RunTag
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from rayrec.observe.run_summary import RunSummary, series
from rayrec.observe.tracking.tracker import run_identity, scalars

IDENTITY: Final = "rayrec.run"
"""Tag that a resuming driver uses to find the MLflow run."""
_MAX_METRICS: Final = 1000
_MAX_PARAMS: Final = 100
"""MLflow's limits per request."""
_PARAM_LENGTH: Final = 6000
_STATUSES: Final = {
    "run": "RUNNING",
    "start": "RUNNING",
    "finish": "FINISHED",
    "stop": "KILLED",
    "failure": "FAILED",
}


@final
class MlflowTracker:
    """MLflow tracker. Sends each measure once, in batches of 1000, as MLflow cannot delete points:
    repeated steps are skipped.
    """

    def __init__(self, uri: str | None, *, experiment: str, config: Mapping[str, Any]) -> None:
        # MLflow rejects folders without this setting. It prefers databases, but its client-only
        # package has no drivers for them.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        self._client = MlflowClient(tracking_uri=uri)
        self._experiment = experiment
        self._config = config
        self._identity = ""
        self._run_id: str | None = None
        self._tags: dict[str, str] = {}
        self._waiting: list[dict[str, Any]] = []
        self._metrics: list[Metric] = []
        self._sent: dict[tuple[str, str], int] = {}
        """Last step of each series sent by an earlier driver."""
        self._status = "RUNNING"

    def update(self, event: dict[str, Any], run: RunSummary) -> None:
        kind = event["kind"]
        if not self._identity:
            self._identity = run_identity(self._config["name"], event["time"])
        if kind == "run":
            self._tags["rayrec.config_hash"] = str(event["config_hash"])
            self._tags |= {
                f"version.{name}": str(version) for name, version in event["versions"].items()
            }
        self._status = _STATUSES.get(kind, self._status)
        if "step" in event and not run.is_repeat and scalars(event):
            self._waiting.append(event)

    def flush(self) -> None:
        if not self._identity:
            return
        if self._run_id is None:
            self._run_id = self._open_run()
        while self._waiting:
            event = self._waiting[0]
            if series(event) not in self._sent:
                self._sent[series(event)] = self._last_step(next(iter(scalars(event))))
            if event["step"] > self._sent[series(event)]:
                time_ms = int(event["time"] * 1000)
                self._metrics += [
                    Metric(name, value, time_ms, event["step"])
                    for name, value in scalars(event).items()
                ]
            del self._waiting[0]
        while self._metrics:
            self._client.log_batch(self._run_id, metrics=self._metrics[:_MAX_METRICS])
            del self._metrics[:_MAX_METRICS]

    def close(self) -> None:
        self.flush()
        if self._run_id is not None:
            self._client.set_terminated(self._run_id, status=self._status)

    def _open_run(self) -> str:
        """Find or create the MLflow run, log parameters and tags, and return its id."""
        experiment = self._client.get_experiment_by_name(self._experiment)
        number = (
            experiment.experiment_id
            if experiment
            else self._client.create_experiment(self._experiment)
        )
        runs = self._client.search_runs(
            [number], f"tags.`{IDENTITY}` = '{self._identity}'", max_results=1
        )
        run = (
            runs[0]
            if runs
            else self._client.create_run(
                number, run_name=self._config["name"], tags={IDENTITY: self._identity}
            )
        )
        run_id = run.info.run_id
        self._client.update_run(run_id, status="RUNNING")
        tags = [RunTag(key, value) for key, value in self._tags.items()]
        params = [
            Param(key, value)
            for key, value in parameters(self._config)
            if key not in run.data.params
        ]
        self._client.log_batch(run_id, tags=tags)
        for first in range(0, len(params), _MAX_PARAMS):
            self._client.log_batch(run_id, params=params[first : first + _MAX_PARAMS])
        return run_id

    def _last_step(self, key: str) -> int:
        assert self._run_id is not None
        try:
            history = self._client.get_metric_history(self._run_id, key)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return -1
        return max((metric.step for metric in history), default=-1)


def parameters(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield the configuration fields as dotted names with values of at most 6000 characters."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from parameters(item, f"{name}.{key}" if name else str(key))
    else:
        yield name, str(value)[:_PARAM_LENGTH]
