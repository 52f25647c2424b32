"""Which trackers show a run, and what each needs: TensorBoard, Prometheus, MLflow, Weights & Biases, and two old kinds of log."""

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal
from urllib.parse import urlsplit

from annotated_types import MinLen

from rayrec.config import Config, InputError
from rayrec.imports import require
from rayrec.observe.event_lines import without_users
from rayrec.observe.tracking.tracker import Tracker

Makers = dict[str, Callable[[], Tracker]]
_DATABASES: Final = ("sqlite", "mysql", "postgresql", "mssql")
_MLFLOW_SCHEMES: Final = ("http", "https", "databricks", "file", "")


@dataclass(frozen=True, kw_only=True)
class TrackersConfig(Config):
    """Where else a run can be looked at, beside the console and the report."""

    tensorboard: bool = True
    """Curves for TensorBoard, in RUN/tensorboard."""
    prometheus: bool = True
    """Metrics at Ray's own Prometheus endpoint, while the driver lives; deploy/grafana has a dashboard of them."""
    mlflow: bool = False
    """Parameters and metrics to the MLflow server, folder or database that mlflow_uri or MLFLOW_TRACKING_URI names."""
    mlflow_uri: str | None = None
    """Address of an MLflow server (http://host:port), a local folder (file:/path), or a database (sqlite:///file.db), which needs
    the whole package mlflow; None: MLFLOW_TRACKING_URI. User and password belong into MLFLOW_TRACKING_USERNAME and
    MLFLOW_TRACKING_PASSWORD."""
    wandb: Literal["off", "offline", "online"] = "off"
    """Configuration and metrics to Weights & Biases; offline: kept in RUN/wandb, for `wandb sync`."""
    project: Annotated[str, MinLen(1)] = "rayrec"
    """Experiment of MLflow, project of Weights & Biases."""
    mllog: bool = False
    """Lines of MLPerf's log (:::MLLOG) in RUN/mllog.log."""
    iteration_lines: bool = False
    """Lines such as `Finished training it 16/150 of epoch 0, 439.75 ms/it, loss 0.5` in RUN/iterations.log."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mlflow_uri and (urlsplit(self.mlflow_uri).username or urlsplit(self.mlflow_uri).password):
            raise InputError(
                "trackers.mlflow_uri: holds a user or a password, which would be written into config.yaml; give them as "
                "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
            )

    def check(self, environment: Mapping[str, str]) -> None:
        """Raises InputError where a package or an address is missing, before anything is started."""
        if self.mlflow:
            require("mlflow", extra="mlflow")
            uri = self.mlflow_uri or environment.get("MLFLOW_TRACKING_URI")
            if not uri:
                raise InputError(
                    "trackers.mlflow: which server? give --trackers.mlflow-uri or set MLFLOW_TRACKING_URI in the environment"
                )
            _check_mlflow_uri(uri)
        if self.wandb != "off":
            require("wandb", extra="wandb")

    def build(self, folder: str, config: Config) -> Makers:
        """What makes each tracker of the run in `folder` (its whole configuration is `config`), by its name; that for
        Prometheus, which needs Ray, is in `rayrec.training.launchers.ray_metrics`. Nothing is imported or reached before they
        are called."""
        values, makers = config.to_dict(), Makers()
        if self.tensorboard:
            makers["TensorBoard"] = _maker("tensorboard", "TensorBoardTracker", folder, config=config.to_yaml())
        if self.mlflow:
            makers["MLflow"] = _maker("mlflow", "MlflowTracker", self.mlflow_uri, experiment=self.project, config=values)
        if self.wandb != "off":
            offline = self.wandb == "offline"
            makers["Weights & Biases"] = _maker(
                "wandb", "WandbTracker", folder, project=self.project, offline=offline, config=values
            )
        if self.mllog:
            makers["MLLOG"] = _maker("log_files", "MlLogTracker", folder, config=values)
        if self.iteration_lines:
            makers["iteration lines"] = _maker("log_files", "IterationTracker", folder)
        return makers


def _maker(module: str, cls: str, *arguments: Any, **named: Any) -> Callable[[], Tracker]:
    """What imports a module of this room, and makes its tracker."""
    return lambda: getattr(importlib.import_module(f"rayrec.observe.tracking.{module}"), cls)(*arguments, **named)


def _check_mlflow_uri(uri: str) -> None:
    """Raises InputError for an address that the installed MLflow cannot write to."""
    scheme = urlsplit(uri).scheme.partition("+")[0]  # postgresql+psycopg2
    if scheme in _DATABASES:
        missing = [module for module in ("sqlalchemy", "alembic") if importlib.util.find_spec(module) is None]
        if missing:
            raise InputError(
                f"trackers.mlflow_uri: {without_users(uri)}: databases need the whole package, `pip install mlflow`, and only "
                "its client (mlflow-skinny) is installed; or give a server (http://host:port) or a folder (file:/path)"
            )
    elif scheme not in _MLFLOW_SCHEMES:
        raise InputError(
            f"trackers.mlflow_uri: {without_users(uri)}: MLflow does not know {scheme}:; give a server (http://host:port), a "
            "folder (file:/path) or a database (sqlite:///file.db)"
        )
