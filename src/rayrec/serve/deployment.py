"""The HTTP application as a deployment of Ray Serve: for `rayrec serve`, `serve run` or a Serve configuration file."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, final

import yaml

from rayrec.cluster import connection
from rayrec.config import InputError
from rayrec.imports import function_in_file
from rayrec.inference.model import source_of
from rayrec.serve.app import ScoringApp
from rayrec.serve.config import ServeConfig
from rayrec.serve.coordinator import Coordinator
from rayrec.serve.counters import Counters, Snapshot
from rayrec.serve.ingress import WILDCARDS
from rayrec.serve.protocol import Configured, Wanted
from rayrec.serve.replica_models import ReplicaModels
from rayrec.workloads.base import TrainConfig
from rayrec.workloads.recsys.workload import ClickWorkload

if TYPE_CHECKING:
    from ray.serve import Application

    from rayrec.inference.model import ServedModel
    from rayrec.models.base import ClickModelConfig
    from rayrec.serve.listener import Listener


_log = logging.getLogger(__name__)

CoordinatorHandle = Any
"""Of the Ray actor `Coordinator`; Ray's own type knows nothing of its methods."""

APPLICATION: Final = "rayrec"
COORDINATOR: Final = "rayrec-serve-coordinator"
NAMESPACE: Final = "rayrec"
EXCHANGE_EVERY_S: Final = 0.5
_RETRY_BEATS: Final = 30
"""Exchanges between attempts to load an accepted model that could not be loaded."""
_START_S: Final = 120.0
"""How long the coordinator may take to start."""
_ANSWER_S: Final = 5.0
"""How long the coordinator may take to answer."""
_SPARE_REQUESTS: Final = 64
"""Requests of other paths beside those that wait and those that are scored."""


def start_coordinator(path: str, *, started_serve: bool = False) -> CoordinatorHandle:
    """Starts the coordinator of a new server. `started_serve`: whether Ray Serve ends with it. Raises InputError if the cluster
    already has a server."""
    import ray
    from ray import serve

    left = find_coordinator()
    if left is not None:
        if APPLICATION in serve.status().applications:
            raise InputError(
                "this Ray cluster runs a `rayrec serve` already; --swap gives it another model, --stop ends it (both with "
                "--cluster.address)"
            )
        end_coordinator(left)  # of a server that was killed, and whose replicas somebody removed
    coordinator = make_coordinator(APPLICATION, path, started_serve=started_serve)
    ray.get(coordinator.describe.remote(), timeout=_START_S)  # replicas do not wait long for it
    return coordinator


def make_coordinator(
    application: str, path: str, *, started_serve: bool = False, restarted: bool = False
) -> CoordinatorHandle:
    """The coordinator of an application of Ray Serve, started for a model at `path` if it has none. `restarted`: in place of one
    that ended, so replicas know what is wanted."""
    import ray

    actor: Any = ray.remote(Coordinator)
    actor = actor.options(
        name=f"{COORDINATOR}-{application}",
        namespace=NAMESPACE,
        num_cpus=0,
        max_restarts=-1,
        lifetime="detached",
        get_if_exists=True,
    )
    return actor.remote(path, started_serve=started_serve, restarted=restarted)


def find_coordinator() -> CoordinatorHandle | None:
    """The coordinator of the `rayrec serve` that runs on the cluster; None if there is none."""
    import ray

    try:
        return ray.get_actor(f"{COORDINATOR}-{APPLICATION}", namespace=NAMESPACE)
    except ValueError:
        return None


def end_coordinator(coordinator: CoordinatorHandle) -> None:
    """Returns once its name is free."""
    import ray

    ray.kill(coordinator)
    deadline_s = time.monotonic() + _START_S
    while find_coordinator() is not None and time.monotonic() < deadline_s:
        time.sleep(0.05)


def end_serve(coordinator: CoordinatorHandle | None) -> None:
    """Ends Ray Serve if it was started for this coordinator's server and runs nothing else."""
    import ray
    from ray import serve

    if coordinator is not None and ray.get(coordinator.started_serve.remote()) and not serve.status().applications:
        serve.shutdown()


def make_application(
    config: ServeConfig,
    *,
    token_digest: bytes | None,
    model: str,
    shadow: str | None = None,
    autoscaling: Mapping[str, Any] | None = None,
) -> Application:
    """What `serve.run` takes: an application that loads `model`, which Ray Serve may later change by `user_config`.

    `autoscaling`: Ray Serve's autoscaling_config, in place of `config.replicas`."""
    from ray import serve
    from ray.serve.schema import LoggingConfig

    taken = config.max_waiting_requests + _SPARE_REQUESTS
    deployment: Any = serve.deployment(
        _ListeningReplica if config.ingress == "direct" else serve.ingress()(_Replica),
        name=APPLICATION,
        num_replicas=config.replicas if autoscaling is None else None,
        autoscaling_config=None if autoscaling is None else dict(autoscaling),
        user_config={"model": model, "shadow": shadow},
        ray_actor_options={
            "num_cpus": config.cpus_per_replica,
            "num_gpus": 1 if config.device == "cuda" else 0,
        },
        # Beyond what the application refuses itself, with a message of its own.
        max_ongoing_requests=2 * taken,
        max_queued_requests=2 * taken,
        graceful_shutdown_wait_loop_s=0.2,
        graceful_shutdown_timeout_s=config.time_limit_s + 5,
        health_check_period_s=2,
        max_constructor_retry_count=1,
        logging_config=LoggingConfig(enable_access_log=False, log_level="WARNING"),
    )
    return deployment.bind(config, token_digest, own_network(config.recipe))


def own_network(recipe: str | None) -> type[ClickModelConfig] | None:
    """The class of the settings of a network that is not rayrec's, from FILE.py:FUNCTION; the file goes to the replicas as code.
    Raises InputError if there is none."""
    if recipe is None:
        return None
    config = function_in_file(recipe, returns=TrainConfig)()
    if not isinstance(config.workload, ClickWorkload):
        raise InputError(f"recipe: {recipe} trains no click model; only those are served")
    connection.ship_code(config)
    return type(config.workload.model)


class _Replica:
    """A process that answers requests. A thread asks the coordinator which model to load, and changes to it."""

    def __init__(
        self, config: ServeConfig, token_digest: bytes | None, network: type[ClickModelConfig] | None = None
    ) -> None:
        self._held = _ReplicaProcess(config, token_digest, network)

    def __serve_build_asgi_app__(self) -> ScoringApp:
        return self._held.app

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Ray Serve calls it before a replica takes requests, and when the configuration changes."""
        await asyncio.to_thread(self._held.configure, user_config)

    def check_health(self) -> None:
        """Ray Serve asks now and then, and replaces a replica that raises."""
        self._held.check_health()


@final
class _ListeningReplica:
    """One that takes requests itself, at the port of its node."""

    def __init__(
        self, config: ServeConfig, token_digest: bytes | None, network: type[ClickModelConfig] | None = None
    ) -> None:
        self._listener: Listener | None = None  # first, for __del__
        self._config, self._held = config, _ReplicaProcess(config, token_digest, network)

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """As above; the replica listens once it has a model."""
        await asyncio.to_thread(self._held.configure, user_config)
        if self._listener is None:
            self._listener = await asyncio.to_thread(self._listen)

    def _listen(self) -> Listener:
        from rayrec.serve.listener import Listener

        config = self._config
        end_s = config.time_limit_s + 1
        return Listener(
            self._held.app, host=config.host, port=config.port, max_body_bytes=config.max_body_bytes, end_s=end_s
        )

    def check_health(self) -> None:
        """As above."""
        self._held.check_health()
        if self._listener is None or not self._listener.alive:
            raise RuntimeError("the HTTP server has ended")

    def __del__(self) -> None:
        """Ray Serve calls it when it ends a replica, and waits."""
        if self._listener is not None:
            self._listener.close()
            self._held.app.close()


def read_user_config(user_config: Mapping[str, Any]) -> Configured:
    """What Ray Serve's `user_config` names. Raises InputError for anything but a model and perhaps a shadow model."""
    unknown = sorted(user_config.keys() - {"model", "shadow"})
    model, shadow = user_config.get("model"), user_config.get("shadow")
    if unknown:
        raise InputError(f"user_config: unknown field {unknown[0]}; it has model and shadow")
    if not isinstance(model, str) or not model:
        raise InputError("user_config: model must be the path of a checkpoint, a run or an export")
    if shadow is not None and not isinstance(shadow, str):
        raise InputError("user_config: shadow must be the path of a checkpoint, a run or an export, or null")
    return Configured(model, shadow)


@final
class _ReplicaProcess:
    """The model and the application of a replica."""

    def __init__(self, config: ServeConfig, token_digest: bytes | None, network: type[ClickModelConfig] | None) -> None:
        import torch
        from ray import serve

        from rayrec.inference.model import open_served

        torch.set_num_threads(max(1, int(config.cpus_per_replica)))
        context = serve.get_replica_context()
        self._name, self._application = context.replica_id.unique_id, context.app_name
        self._coordinator: CoordinatorHandle = None
        counters = Counters()

        def load(path: str) -> ServedModel:
            return open_served(path, device=config.device, own=network)

        self._models = ReplicaModels(load, counters)
        self._wanted: Wanted | None = None
        self._exchanging = threading.Lock()
        self._path = ""
        self.app = ScoringApp(self._models, counters, config=config, token_digest=token_digest, collect=self._collect)

    def configure(self, user_config: dict[str, Any]) -> None:
        """Registers the configured models at the coordinator. The first call also loads the model, and raises if it cannot.
        Later the replica changes its model while it answers, and keeps its model if the new one cannot be loaded."""
        configured = read_user_config(user_config)
        if self._coordinator is not None:
            try:
                self._register(configured)
            except InputError as error:
                _log.error("user_config: %s; this replica continues with its model", error)
            return
        self._path = source_of(configured.model)
        self._coordinator = make_coordinator(self._application, self._path)
        self._register(configured)
        self._start()

    def _register(self, configured: Configured) -> None:
        model, shadow = source_of(configured.model), source_of(configured.shadow) if configured.shadow else None
        while not self._ask("configure", configured, model, shadow):
            time.sleep(EXCHANGE_EVERY_S)  # the coordinator was restarted, and has yet to hear of other replicas

    def check_health(self) -> None:
        if not self._models.ready:
            raise RuntimeError("no model is loaded")

    def _start(self) -> None:
        """Wait until a thread has loaded a model. Raises if none can be loaded."""
        threading.Thread(target=self._follow, name="coordinator", daemon=True).start()
        while not (self._models.ready or self._models.failed):
            time.sleep(0.02)
        self._exchange()  # the process that started the server asks the coordinator for this status
        if not self._models.ready:
            raise RuntimeError("; ".join(self._models.status().failures.values()))

    def _ask(self, method: str, *arguments: Any) -> Any:
        """Calls the coordinator; one that has ended is started again, and learns from the replicas what is wanted."""
        import ray

        try:
            return ray.get(getattr(self._coordinator, method).remote(*arguments), timeout=_ANSWER_S)
        except ray.exceptions.ActorDiedError:
            self._coordinator = make_coordinator(self._application, self._path, restarted=True)
            return ray.get(getattr(self._coordinator, method).remote(*arguments), timeout=_ANSWER_S)

    def _exchange(self) -> None:
        with self._exchanging:
            wanted = self._ask("exchange", self._name, self._wanted, self._models.status(), self.app.snapshot())
            if wanted is not None:
                self._wanted = wanted
                self._models.hear(wanted)

    def _follow(self) -> None:
        """Exchange status and wanted models with the coordinator, also while a model is loaded."""
        silent = False
        loading = ThreadPoolExecutor(1, thread_name_prefix="load")
        load: Future[None] | None = None
        for beat in itertools.count():
            try:
                self._exchange()
                silent = False
            except Exception as error:  # Ray restarts it, or this replica does; what is served stays
                if not silent:
                    _log.warning("the coordinator does not answer (%s); this replica continues with its model", error)
                silent = True
            if load is None or load.done():
                load = loading.submit(self._models.load, retry=beat % _RETRY_BEATS == 0)
                load.add_done_callback(_log_failure)
            time.sleep(EXCHANGE_EVERY_S)

    async def _collect(self) -> Snapshot:
        return await self._coordinator.collect.remote(self._name, self.app.snapshot())


def _log_failure(load: Future[None]) -> None:
    if (error := load.exception()) is not None:
        _log.error("a change of the model failed", exc_info=error)


def quieten() -> None:
    """What Ray Serve logs goes to its files, not to the terminal. To be called before Ray starts, whose processes inherit it."""
    os.environ.setdefault("RAY_SERVE_LOG_TO_STDERR", "0")
    for name in ("ray", "ray.serve"):
        logging.getLogger(name).setLevel(logging.ERROR)


def http_options(config: ServeConfig) -> dict[str, Any]:
    """Of Ray Serve's proxy. Its time limit is a second line behind the application's own."""
    return {
        "host": config.host,
        "port": config.port,
        "request_timeout_s": 2 * config.time_limit_s + 5,
        "keep_alive_timeout_s": 90,
    }


_PROXY_FIELDS: Final = ("host", "port")
_TEXT_FIELDS: Final = ("token_file", "token_env", "device", "ingress", "host", "recipe")


def build_application(args: Mapping[str, Any]) -> Application:
    """See `rayrec.serve.build`."""
    values = dict(args)
    configured = read_user_config({name: values.pop(name, None) for name in ("model", "shadow")})
    autoscaling = _parsed("autoscaling", values.pop("autoscaling", None))
    values = {name: _parsed(name, value) for name, value in values.items()}
    config = ServeConfig(ingress="serve").updated(values)
    if config.ingress == "auto":
        config = config.replace(ingress="serve")
    _check(config, values, autoscaling)
    if config.ingress == "serve":
        config = config.replace(host=WILDCARDS[0])  # http_options has it
    return make_application(
        config,
        token_digest=config.token_digest(),
        model=configured.model,
        shadow=configured.shadow,
        autoscaling=autoscaling,
    )


def _parsed(name: str, value: Any) -> Any:
    """`serve run` gives every value as text."""
    if not isinstance(value, str) or name in _TEXT_FIELDS:
        return value
    try:
        return yaml.safe_load(value)
    except yaml.YAMLError:
        raise InputError(f"{name}: {value!r} cannot be read as YAML") from None


def _check(config: ServeConfig, given: Mapping[str, Any], autoscaling: Any) -> None:
    if autoscaling is not None and not isinstance(autoscaling, Mapping):
        raise InputError("autoscaling: must be a mapping, such as {min_replicas: 1, max_replicas: 8}")
    if autoscaling is not None and "replicas" in given:
        raise InputError("autoscaling: excludes replicas; give min_replicas and max_replicas in autoscaling")
    if autoscaling is not None and config.ingress == "direct":
        raise InputError("autoscaling: Ray Serve does not see the requests of the direct ingress; leave ingress out")
    if config.ingress == "serve":
        for name in _PROXY_FIELDS:
            if name in given:
                raise InputError(
                    f"{name}: Ray Serve's proxies listen; set it in http_options of the Serve configuration file"
                )
