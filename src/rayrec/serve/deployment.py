"""Ray Serve deployment of the HTTP application, for `rayrec serve`, `serve run` or a Serve
configuration file.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, final

import yaml

from rayrec import storage
from rayrec.checkpoint.discovery import resolve_source
from rayrec.cluster import connection, worker_pool
from rayrec.compat import ray_compat
from rayrec.config import InputError
from rayrec.imports import function_in_file
from rayrec.serve.config import WILDCARDS, ServeConfig
from rayrec.serve.control import (
    APPLICATION,
    CALL_S,
    REGISTER,
    ConfiguredModels,
    Control,
    DesiredState,
    ModelSource,
    Register,
    apply_configuration,
    configured_tables,
    keep_models,
)
from rayrec.serve.counters import Counters
from rayrec.serve.listener import Listener
from rayrec.workloads.base import TrainConfig
from rayrec.workloads.recsys.workload import ClickWorkload

if TYPE_CHECKING:
    from ray.serve import Application

    from rayrec.inference.model import ServedModel
    from rayrec.models.base import ClickModelConfig
    from rayrec.serve.app import ScoringApp

_log = logging.getLogger(__name__)

_REPLICA_MODULES: Final = (
    "rayrec.inference.model",
    "rayrec.serve.app",
    "rayrec.serve.deployment",
    "ray.serve",
)
"""Modules that a replica imports."""
_ANSWER_S: Final = 5.0
"""Maximum seconds for the register to answer."""
_SPARE_REQUESTS: Final = 64
"""Maximum concurrent requests in addition to waiting ones, for batches being scored and for other
paths.
"""


def make_application(
    config: ServeConfig,
    *,
    token_digest: bytes | None,
    model: str,
    shadow: str | None = None,
    tables: Mapping[str, str] | None = None,
    autoscaling: Mapping[str, Any] | None = None,
    started_serve: bool = False,
    announced: bool = True,
) -> Application:
    """Build the application for `serve.run`. It loads `model`, which `user_config` can change
    later. `tables` are files by the names of side tables, which they replace. `autoscaling`,
    Ray Serve's autoscaling_config, replaces `config.replicas`. `started_serve`: whether Ray Serve
    was started for it. Unless `announced`, `rayrec.serve.control.announce` makes it ready.
    """
    from ray import serve
    from ray.serve.schema import LoggingConfig

    max_requests = config.max_waiting_requests + _SPARE_REQUESTS
    variables = replica_variables(os.environ)
    deployment: Any = serve.deployment(
        _ListeningReplica if config.ingress == "direct" else serve.ingress()(_Replica),
        name=APPLICATION,
        num_replicas=config.replicas if autoscaling is None else None,
        autoscaling_config=None if autoscaling is None else dict(autoscaling),
        user_config={
            "model": model,
            "shadow": shadow,
            "tables": dict(tables or {}),
        },
        ray_actor_options={
            "num_cpus": config.cpus_per_replica,
            "num_gpus": 1 if config.device == "cuda" else 0,
            **({"runtime_env": {"env_vars": variables}} if variables else {}),
        },
        # Larger than the application's own limits, which answer with a clear message.
        max_ongoing_requests=2 * max_requests,
        max_queued_requests=2 * max_requests,
        graceful_shutdown_wait_loop_s=0.2,
        graceful_shutdown_timeout_s=config.time_limit_s + 5,
        health_check_period_s=2,
        max_constructor_retry_count=1,
        logging_config=LoggingConfig(enable_access_log=False, log_level="WARNING"),
        **ray_compat.shared_actor(REGISTER, Register, started_serve=started_serve),
    )
    return deployment.bind(config, token_digest, custom_network_class(config.recipe), announced)


def replica_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the replicas' environment, given this process's. Empty if no process
    is started ahead.
    """
    return worker_pool.worker_variables(environment, _REPLICA_MODULES)


def custom_network_class(recipe: str | None) -> type[ClickModelConfig] | None:
    """Return the config class of a custom network from its recipe FILE.py:FUNCTION, None without a
    recipe. Ships the file to the replicas. Raises InputError if the recipe does not train a click
    model.
    """
    if recipe is None:
        return None
    config = function_in_file(recipe, returns=TrainConfig)()
    if not isinstance(config.workload, ClickWorkload):
        raise InputError(
            f"recipe: {recipe} does not train a click model. Only click and retrieval models can "
            "be served."
        )
    connection.ship_code(config)
    return type(config.workload.model)


class _Replica:
    """Serving process behind Ray Serve's proxies. `Control` calls its methods on all replicas."""

    def __init__(
        self,
        config: ServeConfig,
        token_digest: bytes | None,
        network: type[ClickModelConfig] | None = None,
        announced: bool = True,
    ) -> None:
        # Here, not in the command, which needs no torch and starts sooner without.
        import torch
        from ray import serve

        from rayrec.inference.model import open_served
        from rayrec.serve.app import ScoringApp
        from rayrec.serve.replica_models import ReplicaModels

        torch.set_num_threads(max(1, int(config.cpus_per_replica)))
        context = serve.get_replica_context()
        self._name = context.replica_id.unique_id
        self._application = context.app_name
        self._config = config
        self._announced = announced
        counters = Counters()

        def load(path: str) -> ServedModel:
            return open_served(path, device=config.device, own=network)

        self._models = ReplicaModels(load, counters, histories=config.histories)
        self._configured: ConfiguredModels | None = None
        """Newest application configuration, until the register has accepted it."""
        self._control = Control(self._application, partial(ray_compat.get_shared_actor, REGISTER))
        self._silent = False
        # Held while models are loaded in a thread. Health checks come every 2 s, and loading may
        # take minutes, so a second thread must not start: it would load the same models.
        self._mending = threading.Lock()
        self._scoring = ScoringApp(
            self._models,
            counters,
            config=config,
            token_digest=token_digest,
            collect=lambda: self._call_register("collect", self._name, self._scoring.snapshot()),
        )

    def __serve_build_asgi_app__(self) -> ScoringApp:
        return self._scoring

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Apply a configuration. Ray Serve calls it before a replica takes requests, and on
        changes. The first call loads the model, and raises if it cannot. Later calls return
        immediately, because Ray Serve sends no requests meanwhile: after the next report one
        replica changes all replicas, as `--swap` does.
        """
        self._configured = configured = read_user_config(user_config)
        if self._models.desired is None:
            await self._begin(configured)

    async def _begin(self, configured: ConfiguredModels) -> None:
        # A table's file may have changed since the server started, which only the register knows.
        accepted = None
        with contextlib.suppress(Exception):  # It does not answer the report either then
            accepted = await self._call_register("desired", timeout_s=CALL_S)
        if accepted is not None and accepted.configured == configured:
            self._models.set_desired(accepted)
        else:
            first = await asyncio.to_thread(_first_models, configured)
            self._models.set_desired(replace(first, announced=self._announced))
        await self._report(timeout_s=CALL_S)
        while self._models.incomplete:
            cause = await asyncio.to_thread(self._models.switch)
            await self._report()
            if cause and not self._models.ready:
                raise InputError(cause)

    async def check_health(self) -> None:
        """Report to the register, and apply its answer. Ray Serve calls it every 2 s and replaces a
        replica that raises.
        """
        if not self._models.ready:
            raise RuntimeError("no model is loaded")
        await self._report()

    async def load(self, desired: DesiredState) -> tuple[str, str]:
        """Return the replica name and the result of `ReplicaModels.load`. `switch` and `drop` do
        the same.
        """
        return self._name, await asyncio.to_thread(self._models.load, desired)

    async def switch(self, desired: DesiredState) -> tuple[str, str]:
        self._models.set_desired(desired)
        cause = await asyncio.to_thread(self._models.switch)
        await self._report()
        return self._name, cause

    async def drop(self, rejected: DesiredState) -> tuple[str, str]:
        await asyncio.to_thread(self._models.drop, rejected)
        return self._name, ""

    async def _call_register(
        self,
        method: str,
        *arguments: Any,
        timeout_s: float = _ANSWER_S,
    ) -> Any:
        return await asyncio.to_thread(
            self._control.call_register,
            method,
            *arguments,
            timeout_s=timeout_s,
        )

    async def _report(self, *, timeout_s: float = _ANSWER_S) -> None:
        """Report the status to the register, and start a thread to load missing models. Keep the
        models if it does not answer.
        """
        models = self._models
        state = (
            self._name,
            models.desired,
            models.status(),
            self._scoring.snapshot(),
            self._configured,
        )
        try:
            desired, leads = await self._call_register("report", *state, timeout_s=timeout_s)
            models.set_desired(desired)
            if self._configured == desired.configured:
                self._configured = None
            self._silent = False
        except Exception as error:
            if not self._silent:
                _log.warning(
                    "Keeping the model of this replica, because the register does not answer (%s)",
                    error,
                )
            self._silent = True
            return
        if models.ready and (leads or models.incomplete) and self._mending.acquire(blocking=False):
            # Not in the event loop, which answers requests meanwhile. Daemon: a replica that Ray
            # Serve ends must not wait for a model to load.
            threading.Thread(target=self._mend, args=(leads,), name="models", daemon=True).start()

    def _mend(self, leads: bool) -> None:
        """Load missing models. The leading replica applies the application's configuration to
        all.
        """
        configured = self._configured
        try:
            if not leads:
                self._models.switch()
            elif configured is not None:
                try:
                    self._control.change(lambda desired: apply_configuration(desired, configured))
                except InputError as error:
                    _log.error("Keeping the models of all replicas. user_config: %s", error)
                    self._control.change(lambda desired: keep_models(desired, configured))
        except Exception:
            _log.exception("Model change failed")
        finally:
            self._mending.release()


@final
class _ListeningReplica(_Replica):
    """Replica that listens itself, at a port of its node."""

    _listener: Listener | None = None

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Apply a configuration, and listen once there is a model."""
        await super().reconfigure(user_config)
        if self._listener is None:
            config = self._config
            listen = partial(
                Listener,
                self._scoring,
                host=config.host,
                port=config.port,
                max_body_bytes=config.max_body_bytes,
            )
            self._listener = await asyncio.to_thread(listen, end_s=config.time_limit_s + 1)

    async def check_health(self) -> None:
        """Report to the register, and check the listener."""
        await super().check_health()
        if self._listener is None or not self._listener.alive:
            raise RuntimeError("the HTTP server has ended")

    def __del__(self) -> None:
        """Stop listening. Ray Serve calls it to stop a replica, and waits."""
        if self._listener is not None:
            self._listener.close()
            self._scoring.close()


def _first_models(configured: ConfiguredModels) -> DesiredState:
    """Return the models of an application's configuration."""
    path = resolve_source(configured.model)
    tables = configured_tables(path, configured)
    shadow = None
    if configured.shadow:
        shadow = ModelSource(0, resolve_source(configured.shadow))
    return DesiredState(
        0,
        ModelSource(0, path, tables),
        shadow=shadow,
        configured=configured,
    )


def read_user_config(user_config: Mapping[str, Any]) -> ConfiguredModels:
    """Parse Ray Serve's `user_config`. Raises InputError unless it has a model, and at most a
    shadow model and files of side tables.
    """
    unknown = sorted(user_config.keys() - {"model", "shadow", "tables"})
    model = user_config.get("model")
    shadow = user_config.get("shadow")
    tables = user_config.get("tables") or {}
    if unknown:
        raise InputError(f"user_config: fields must be model, shadow and tables, got {unknown[0]}")
    if not isinstance(model, str) or not model:
        raise InputError("user_config: model must be the path of a checkpoint, a run or an export")
    if shadow is not None and not isinstance(shadow, str):
        raise InputError(
            "user_config: shadow must be the path of a checkpoint, a run or an export, or null"
        )
    return ConfiguredModels(model, shadow, _table_files(tables))


def _table_files(tables: object) -> tuple[tuple[str, str], ...]:
    """Return the names of configured side tables and their absolute files, sorted. Raises
    InputError for another type.
    """
    error = InputError(
        "user_config: tables must be a mapping of side tables to files, such as "
        f"{{items: /models/items.csv}}, got {tables!r}"
    )
    if not isinstance(tables, Mapping):
        raise error
    files = []
    for name, path in tables.items():
        if not isinstance(name, str) or not isinstance(path, str):
            raise error
        files.append((name, storage.absolute(path)))
    return tuple(sorted(files))


_MODEL_FIELDS: Final = ("model", "shadow", "tables")
_TEXT_FIELDS: Final = (
    "token_file",
    "token_env",
    "device",
    "ingress",
    "host",
    "recipe",
    "histories",
)


def build_application(args: Mapping[str, Any]) -> Application:
    """Build the application of `rayrec.serve.build`."""
    values = dict(args)
    values["tables"] = _parsed("tables", values.get("tables"))
    configured = read_user_config({name: values.pop(name, None) for name in _MODEL_FIELDS})
    autoscaling = _parsed("autoscaling", values.pop("autoscaling", None))
    values = {name: _parsed(name, value) for name, value in values.items()}
    config = ServeConfig(ingress="serve").updated(values)
    if config.ingress == "auto":
        config = config.replace(ingress="serve")
    if autoscaling is not None:
        if not isinstance(autoscaling, Mapping):
            raise InputError(
                "autoscaling: must be a mapping, such as {min_replicas: 1, max_replicas: 8}"
            )
        if "replicas" in values:
            raise InputError(
                "autoscaling: must not be set together with replicas. Set its min_replicas and "
                "max_replicas."
            )
        if config.ingress == "direct":
            raise InputError(
                "autoscaling: Ray Serve does not see the requests of the direct ingress. Leave "
                "ingress out."
            )
    if config.ingress == "serve":
        for name in ("host", "port"):
            if name in values:
                raise InputError(
                    f"{name}: Ray Serve's proxies listen. Set it in http_options of the Serve "
                    "configuration file."
                )
        config = config.replace(host=WILDCARDS[0])  # Set by http_options
    return make_application(
        config,
        token_digest=config.token_digest(),
        model=configured.model,
        shadow=configured.shadow,
        tables=dict(configured.tables),
        autoscaling=autoscaling,
    )


def _parsed(name: str, value: Any) -> Any:
    """Parse a value. `serve run` passes every value as text."""
    if not isinstance(value, str) or name in _TEXT_FIELDS:
        return value
    try:
        return yaml.safe_load(value)
    except yaml.YAMLError:
        raise InputError(f"{name}: must be YAML, got {value!r}") from None
