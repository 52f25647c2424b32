"""Configuration of trackers: TensorBoard, Prometheus, MLflow, Weights & Biases, and two log file
formats.
"""

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal
from urllib.parse import urlsplit

from annotated_types import MinLen

from rayrec.config import Config, InputError
from rayrec.imports import require
from rayrec.observe.event_json import redact_credentials
from rayrec.observe.tracking.tracker import Tracker

Makers = dict[str, Callable[[], Tracker]]
_DATABASES: Final = ("sqlite", "mysql", "postgresql", "mssql")
_MLFLOW_SCHEMES: Final = ("http", "https", "databricks", "file", "")


@dataclass(frozen=True, kw_only=True)
class TrackersConfig(Config):
    """Experiment trackers, in addition to the console and the report."""

    tensorboard: bool = True
    """Whether to write TensorBoard curves to RUN/tensorboard."""
    prometheus: bool = True
    """Whether to export metrics to Ray's Prometheus endpoint during the run. deploy/grafana
    contains a dashboard.
    """
    mlflow: bool = False
    """Whether to log parameters and metrics to MLflow, at mlflow_uri or MLFLOW_TRACKING_URI."""
    mlflow_uri: str | None = None
    """MLflow server (http://host:port), local folder (file:/path) or database (sqlite:///file.db),
    which needs the full mlflow package. None: MLFLOW_TRACKING_URI. Set credentials in
    MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD.
    """
    wandb: Literal["off", "offline", "online"] = "off"
    """Whether to log configuration and metrics to Weights & Biases. offline: in RUN/wandb, for
    `wandb sync`.
    """
    project: Annotated[str, MinLen(1)] = "rayrec"
    """MLflow experiment or Weights & Biases project."""
    mllog: bool = False
    """Whether to write an MLPerf log (:::MLLOG lines) to RUN/mllog.log."""
    iteration_lines: bool = False
    """Whether to write the lines of the original DLRM to RUN/iterations.log: `Finished training it
    16/150 of epoch 0, ...`, `Testing at - ...` and `Test time:...`.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mlflow_uri and (
            urlsplit(self.mlflow_uri).username or urlsplit(self.mlflow_uri).password
        ):
            raise InputError(
                "trackers.mlflow_uri: must not contain a user or password, because it is saved in "
                "config.yaml. Use MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD."
            )

    def check(self, environment: Mapping[str, str]) -> None:
        """Raise InputError for a missing package or address, before anything is started."""
        if self.mlflow:
            require("mlflow", extra="mlflow")
            uri = self.mlflow_uri or environment.get("MLFLOW_TRACKING_URI")
            if not uri:
                raise InputError(
                    "trackers.mlflow: missing server. Set --trackers.mlflow-uri or "
                    "MLFLOW_TRACKING_URI."
                )
            _check_mlflow_uri(uri)
        if self.wandb != "off":
            require("wandb", extra="wandb")

    def build(self, folder: str, config: Config) -> Makers:
        """Return a factory for each tracker by name, except Prometheus (see
        `rayrec.training.launchers.ray_metrics`). `folder` is the run folder and `config` the full
        configuration. Factories import and connect only when called.
        """
        values = config.to_dict()
        makers = Makers()
        if self.tensorboard:
            makers["TensorBoard"] = _maker(
                "tensorboard", "TensorBoardTracker", folder, config=config.to_yaml()
            )
        if self.mlflow:
            makers["MLflow"] = _maker(
                "mlflow", "MlflowTracker", self.mlflow_uri, experiment=self.project, config=values
            )
        if self.wandb != "off":
            makers["Weights & Biases"] = _maker(
                "wandb",
                "WandbTracker",
                folder,
                project=self.project,
                offline=self.wandb == "offline",
                config=values,
            )
        if self.mllog:
            makers["MLLOG"] = _maker("log_files", "MlLogTracker", folder, config=values)
        if self.iteration_lines:
            makers["iteration lines"] = _maker("log_files", "IterationTracker", folder)
        return makers


def _maker(module: str, cls: str, *arguments: Any, **named: Any) -> Callable[[], Tracker]:
    """Return a factory that imports a tracker module and creates its tracker."""
    return lambda: getattr(importlib.import_module(f"rayrec.observe.tracking.{module}"), cls)(
        *arguments, **named
    )


def _check_mlflow_uri(uri: str) -> None:
    """Raise InputError for an address that the installed MLflow cannot write to."""
    scheme = urlsplit(uri).scheme.partition("+")[0]  # postgresql+psycopg2
    if scheme in _DATABASES:
        missing = [
            module
            for module in ("sqlalchemy", "alembic")
            if importlib.util.find_spec(module) is None
        ]
        if missing:
            raise InputError(
                f"trackers.mlflow_uri: {redact_credentials(uri)}: databases require the full "
                "package, but only mlflow-skinny is installed. Run `pip install mlflow`, or use a "
                "server (http://host:port) or a folder (file:/path)."
            )
    elif scheme not in _MLFLOW_SCHEMES:
        raise InputError(
            f"trackers.mlflow_uri: {redact_credentials(uri)}: MLflow does not support {scheme}:. "
            "Use a server (http://host:port),"
            " a folder (file:/path) or a database (sqlite:///file.db)."
        )
