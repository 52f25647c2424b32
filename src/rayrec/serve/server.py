"""Lifecycle of a server: start, watch, follow a run, and stop after answering all received
requests.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn

from rayrec import storage
from rayrec.checkpoint import committed, open_checkpoint
from rayrec.checkpoint.discovery import check_files, resolve_source
from rayrec.cluster import connection, worker_pool
from rayrec.config import InputError
from rayrec.data.encoding.preprocessor import stored_schema
from rayrec.data.features.lookups import swapped_tables
from rayrec.observe.console import Console, handling_signals
from rayrec.process_state import temporary_environment
from rayrec.serve.config import LOOPBACK, WILDCARDS, ServeConfig, ServerConfig, table_paths
from rayrec.serve.control import (
    APPLICATION,
    Control,
    announce,
    end,
    follow_model,
    silence_serve_logs,
)
from rayrec.serve.deployment import custom_network_class, make_application, replica_variables
from rayrec.serve.listener import lock_port
from rayrec.serve.shutdown import CommandEnd, StopRequest, command_end

if TYPE_CHECKING:
    from ray.serve import Application

PROXY_CALLBACK_VARIABLE: Final = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
PROXY_CALLBACK: Final = "rayrec.serve.listener:sole_proxy"
"""Function that Ray Serve's HTTP proxies call, named by that environment variable."""
_ANSWER_S: Final = 30.0
_DESCRIBE_S: Final = 10.0
_TRY_S: Final = 2.0
_MAX_RESPONSE_BYTES: Final = 1 << 16
_POLL_EVERY_S: Final = 1.0
_FOLLOW_EVERY_S: Final = 5.0
_STOPPER_S: Final = 5.0
"""Seconds that a server keeps its Ray after another process, still connected to it, stopped the
server.
"""
_STORE_S: Final = 5.0
"""Maximum seconds to wait for unavailable storage when following a run."""
_ATTEMPTS: Final = 4
_RETRY_S: Final = 15.0
"""Seconds before the next attempt, doubled each time."""


@dataclass(frozen=True)
class Server:
    """Running server."""

    url: str
    control: Control
    address: str
    """Address of its Ray cluster, for `swap` and other commands."""

    def describe(self) -> dict[str, Any]:
        """Return JSON values: URL, cluster address and models."""
        return {
            "url": self.url,
            "cluster_address": self.address,
            **self.control.call_register("describe", timeout_s=_DESCRIBE_S),
        }


@contextlib.contextmanager
def serving(
    path: str,
    *,
    config: ServeConfig,
    address: str | None,
    shadow: str | None = None,
    tables: Mapping[str, str] | None = None,
    console: Console,
    is_command: bool = False,
) -> Iterator[Server]:
    """Serve a checkpoint, run or export while the context is open, on the Ray cluster at `address`
    (None: RAY_ADDRESS, else a local Ray). `tables` are files by the names of side tables, which
    they replace. Answers requests in flight before it exits. `is_command`
    removes `config.token_env` from the environment, leaves a local Ray to the end of the command,
    and the announcement to it. Raises InputError for an unusable model or address, and if the
    cluster or port already has a server.
    """
    digest = config.token_digest()
    command = command_end() if is_command else None
    if is_command and config.token_env:
        del os.environ[config.token_env]  # Before Ray starts, whose processes inherit it
    path = resolve_source(path)
    shadow = resolve_source(shadow) if shadow else None
    custom_network_class(config.recipe)  # Fails before Ray starts
    if tables:
        swapped_tables(stored_schema(path), tables)  # So does this
    if config.histories is not None:
        storage.list_files(config.histories)  # And this, if it does not exist
        config = config.replace(histories=storage.absolute(config.histories))
    if digest is None and config.host not in LOOPBACK:
        console.note(
            f"Accepting requests without a token at {config.host}:{config.port}. Set --token-file "
            "or --token-env."
        )
    silence_serve_logs()
    import ray

    requested_ray = address or os.environ.get("RAY_ADDRESS")
    private_ray = not ray.is_initialized() and requested_ray in (None, "", "local")
    make = partial(
        make_application,
        token_digest=digest,
        model=path,
        shadow=shadow,
        tables=tables,
        announced=not is_command,
    )
    with contextlib.ExitStack() as resources:
        if private_ray:
            resources.enter_context(lock_port(config.host, config.port))  # Fails before Ray starts
            if config.ingress == "serve":
                os.environ.setdefault(PROXY_CALLBACK_VARIABLE, PROXY_CALLBACK)
        if command is not None:
            # Not before, because an error above leaves the process to its caller.
            command.owns_ray = private_ray
        yield _start(
            resources, config, make, address, console, private_ray=private_ray, command=command
        )


def _start(
    resources: contextlib.ExitStack,
    config: ServeConfig,
    make: Callable[..., Application],
    address: str | None,
    console: Console,
    *,
    private_ray: bool,
    command: CommandEnd | None,
) -> Server:
    """Start the application that `make` returns for a ServeConfig, and leave its end to
    `resources`.
    """
    ends_with_process = private_ray and command is not None
    reached = resources.enter_context(
        _connected(address, console, ends_with_process=ends_with_process)
    )
    resources.enter_context(_replica_processes(config, private_ray=private_ray))
    from ray import serve  # Takes a second, in which the replicas' processes import theirs

    # A private Ray is new. Ray Serve would take what it knows of an earlier one in this process for
    # its state, and finds the difference only when it starts.
    instance = None if private_ray else find_instance(APPLICATION)
    fresh = instance is None or instance.is_empty
    ends_serve = fresh and not private_ray  # A private Ray ends anyway
    config = _agreed_config(config, instance, reached, console, private_ray=private_ray)
    if not private_ray and (fresh or config.ingress == "direct"):
        resources.enter_context(lock_port(config.host, config.port))
    if fresh and instance is not None:
        serve.shutdown()
    control = Control(APPLICATION)
    leave = partial(_end_ignoring_errors, started_serve=ends_serve)
    # A Ray that ends with the process takes a failed start along. Any other one must be left by the
    # application however far its start came.
    if not ends_with_process:
        resources.callback(leave)
    if command is not None:
        resources.callback(command.hold)
        command.withdraw = None if private_ray else leave
    url = _deploy(config, partial(make, config, started_serve=ends_serve), control)
    if ends_with_process:  # Nothing was to be answered before
        resources.callback(leave)
    return Server(url, control, reached)


def _agreed_config(
    config: ServeConfig,
    instance: ServeInstance | None,
    reached: str,
    console: Console,
    *,
    private_ray: bool,
) -> ServeConfig:
    """Return the configuration with the address that requests reach. Raises InputError if the
    cluster at `reached` has a server of rayrec, or a Ray Serve that `config` does not suit.
    """
    if instance is not None and APPLICATION in instance.applications:
        raise InputError(
            f"{reached}: this Ray cluster already runs a `rayrec serve`. Change its model "
            f"(--swap) or stop it (--stop), both with --cluster.address {reached}"
        )
    agreed = settle(config, instance, private_ray=private_ray)
    if (agreed.host, agreed.port) != (config.host, config.port):
        console.note(
            f"Using the Ray Serve of this cluster, which listens at {agreed.host}:{agreed.port}"
        )
    return agreed


@contextlib.contextmanager
def _replica_processes(config: ServeConfig, *, private_ray: bool) -> Iterator[None]:
    """Have a private Ray start the processes of the replicas while its controller starts. In the
    context, `make_application` gives the replicas the environment of these.
    """
    if not private_ray or config.device != "cpu":
        yield
        return
    with (
        storage.Scratch("replicas") as tokens,
        temporary_environment({worker_pool.TOKENS: tokens}),
    ):
        worker_pool.start_processes(config.replicas, replica_variables(os.environ))
        yield


@contextlib.contextmanager
def _connected(address: str | None, console: Console, *, ends_with_process: bool) -> Iterator[str]:
    """Yield the address of the connected Ray, and disconnect unless it was connected before or
    `ends_with_process`.
    """
    import ray

    was_connected = ray.is_initialized()
    reached = connection.connect(address, log_to_driver=console.verbose, uses_data=False)
    silence_serve_logs()  # Ray has reset its loggers
    try:
        yield reached
    finally:
        if not was_connected and not ends_with_process:
            ray.shutdown()


def _end_ignoring_errors(*, started_serve: bool) -> None:
    """Stop the application on a cluster that may have lost parts already."""
    with contextlib.suppress(Exception):
        end(started_serve=started_serve)


def _deploy(config: ServeConfig, make: Callable[[], Application], control: Control) -> str:
    """Deploy the application and return its URL. Raises InputError if no replica can load the
    model, or none answers.
    """
    from ray import serve
    from ray.serve.schema import LoggingConfig

    direct = config.ingress == "direct"
    quiet = LoggingConfig(enable_access_log=False, log_level="WARNING")
    # The proxies' timeout is a fallback, longer than the application's.
    proxies = {"request_timeout_s": 2 * config.time_limit_s + 5, "keep_alive_timeout_s": 90}
    location = "HeadOnly" if config.host in LOOPBACK else "EveryNode"
    # Ray Serve logs its start with a logger that it configures itself
    logging.disable(logging.INFO)
    try:
        serve.start(
            proxy_location="Disabled" if direct else location,
            http_options=None if direct else {"host": config.host, "port": config.port, **proxies},
            logging_config=quiet,
        )
    finally:
        logging.disable(logging.NOTSET)
    silence_serve_logs()
    try:
        serve.run(make(), name=APPLICATION, route_prefix=None if direct else "/")
    except RuntimeError as error:
        cause = control.call_register("describe")["failures"].get("0")
        if cause:
            raise InputError(cause) from None
        raise InputError(
            f"Ray Serve did not start the server: {' '.join(str(error).split())[:500]}. Its logs "
            f"are in {connection.session_logs()}/serve."
        ) from None
    instance = find_instance(APPLICATION)
    assert instance is not None
    return first_answering(
        urls(config, instance), versions=_versions(control.call_register("describe"))
    )


@dataclass(frozen=True)
class ServeInstance:
    """State of Ray Serve on a cluster."""

    with_proxies: bool
    host: str
    port: int
    """Port of its HTTP proxies, if it has any."""
    proxy_ips: tuple[str, ...]
    """IP addresses of nodes with a proxy."""
    replica_ips: tuple[str, ...]
    """IP addresses of nodes with a replica of the requested application."""
    applications: tuple[str, ...]

    @property
    def is_empty(self) -> bool:
        """Flag of an instance without applications and proxies, as a server leaves it behind. Its
        proxies cannot be enabled later.
        """
        return not (self.applications or self.with_proxies)


def find_instance(application: str) -> ServeInstance | None:
    """Return the state of Ray Serve on the connected cluster, None if it does not run."""
    from ray.serve.exceptions import RayServeException

    from rayrec.compat.ray_compat import get_global_client

    try:
        client: Any = get_global_client()
    except RayServeException:
        return None
    details: dict[str, Any] = client.get_serve_details()
    options = details.get("http_options") or {}
    deployments = (details["applications"].get(application) or {}).get("deployments", {})
    return ServeInstance(
        with_proxies=details.get("proxy_location") not in (None, "Disabled"),
        host=options.get("host") or "127.0.0.1",
        port=options.get("port") or 8000,
        proxy_ips=_distinct(details["proxies"].values()),
        replica_ips=_distinct(
            [replica for deployment in deployments.values() for replica in deployment["replicas"]]
        ),
        applications=tuple(details["applications"]),
    )


def _distinct(actors: Any) -> tuple[str, ...]:
    return tuple(dict.fromkeys(actor["node_ip"] for actor in actors if actor.get("node_ip")))


def settle(
    config: ServeConfig, instance: ServeInstance | None, *, private_ray: bool
) -> ServeConfig:
    """Resolve the ingress, and set the address of running proxies. Pure. auto becomes direct on a
    private local Ray and with a Ray Serve that runs without proxies, else serve. Raises InputError
    if the running Ray Serve conflicts with `config`.
    """
    # An idle one is restarted
    running = instance if instance is not None and instance.applications else None
    if config.ingress == "auto":
        direct = private_ray or (running is not None and not running.with_proxies)
        config = config.replace(ingress="direct" if direct else "serve")
    if config.ingress == "serve":
        if running is not None and not running.with_proxies:
            raise InputError(
                "ingress: Ray Serve runs on this cluster without HTTP proxies, for "
                f"{', '.join(running.applications)}. Use --ingress direct, or stop Ray Serve "
                "(`serve shutdown`) and retry."
            )
        if instance is not None and instance.with_proxies:
            config = config.replace(host=instance.host, port=instance.port)
    elif instance is not None and instance.with_proxies and instance.port == config.port:
        raise InputError(
            f"port: Ray Serve's HTTP proxies listen at {config.port} on this cluster. Choose "
            "another --port, or --ingress serve."
        )
    return config


def urls(config: ServeConfig, instance: ServeInstance) -> list[str]:
    """Return the URLs of proxies or, with the direct ingress, of replicas. Pure."""
    hosts: Sequence[str] = (config.host,)
    if config.host in WILDCARDS:
        hosts = instance.proxy_ips if config.ingress == "serve" else instance.replica_ips
    return [f"http://{f'[{host}]' if ':' in host else host}:{config.port}" for host in hosts]


def first_answering(
    candidates: Sequence[str], *, versions: Sequence[str], timeout_s: float = _ANSWER_S
) -> str:
    """Return the first URL whose server has loaded one of these model versions. Raises InputError
    after a timeout.
    """
    # Ignores the environment's proxies
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline_s = time.monotonic() + timeout_s
    # Replicas and proxies need some seconds to listen, and no event reports it.
    while True:
        problem = "no replica or proxy has an address"
        for url in candidates:
            try:
                with opener.open(f"{url}/healthz", timeout=_TRY_S) as response:
                    status = json.loads(response.read(_MAX_RESPONSE_BYTES))
                if isinstance(status, dict) and status.get("model") in versions:
                    return url
                problem = "something else answers"
            except (OSError, ValueError) as error:  # HTTPError is an OSError
                problem = str(error)
        if time.monotonic() > deadline_s:
            tried = " or ".join(candidates) or "any node"
            local = any(f"//{host}" in tried for host in LOOPBACK)
            hint = "; reaching it from another machine needs --host 0.0.0.0" if local else ""
            raise InputError(
                f"ingress: the server started but does not answer at {tried} ({problem}){hint}. "
                "Stopped it."
            )
        time.sleep(0.2)


def serve_forever(
    path: str,
    *,
    config: ServerConfig,
    address: str | None,
    console: Console,
    started: Callable[[dict[str, Any]], None],
) -> None:
    """Serve until Ctrl-C, SIGTERM or SIGHUP, then answer requests in flight
    (`rayrec.serve.shutdown`). With `config.follow`, `path` is a run, and the server switches to its
    newest or best checkpoints. Calls `started` when it accepts requests. Removes the variable
    `config.token_env` from the environment.
    """
    first = path
    if config.follow != "no":
        if storage.exists(storage.join(path, "manifest.json")):
            raise InputError(f"follow: must be a run's folder, got checkpoint or export {path}")
        first = choose(path, config.follow) or open_checkpoint(path).path
    with (
        serving(
            first,
            config=config,
            address=address,
            shadow=config.shadow,
            tables=table_paths(config.swap_table),
            console=console,
            is_command=True,
        ) as server,
        _stop_request() as stop,
    ):
        stop.begin_serving()
        started(server.describe())
        is_announced = _announced(server.control)
        watch = _Watch(server, console)
        last_follow_s = 0.0
        while not stop.requested.wait(_POLL_EVERY_S):
            is_announced = is_announced or _announced(server.control)
            if not watch.poll():
                console.note("Server was stopped")
                stop.requested.wait(_STOPPER_S)
                return
            if config.follow != "no" and time.monotonic() - last_follow_s > _FOLLOW_EVERY_S:
                last_follow_s = time.monotonic()
                watch.follow(path, config.follow)
        console.note("Stopping the server after answering requests in flight")


def _announced(control: Control) -> bool:
    """Make the server report that it is ready. Returns False if a lost head, register or replica
    prevents that for now.
    """
    import ray

    try:
        control.change(announce)
    except (InputError, ValueError, ray.exceptions.RayError):
        return False
    return True


@contextlib.contextmanager
def _stop_request() -> Iterator[StopRequest]:
    """Yield the stop request of the command, or else of a program that uses rayrec's functions,
    which only this context's signals stop (in the main thread only). KeyboardInterrupt ends the
    server of a program at once.
    """
    command = command_end()
    if command is not None:
        yield command.stop
        return

    def interrupt(reason: str) -> NoReturn:
        raise KeyboardInterrupt(reason)

    stop = StopRequest(interrupt)
    # After Ray has started, which sets handlers
    with handling_signals(lambda number, frame: stop.receive(number)):
        yield stop


# Checkpoints that the server follows. An entry of `_attempts` is (number, earliest time of the
# next):
#
#   newest checkpoint is new         attempt 1 now
#   InputError, such as damage       next attempt after 30 s, 60 s, ...; none after _ATTEMPTS
#   switched                         no further attempt, so that a rollback stays
#   a newer checkpoint appears       begins again, with its own entry
#   storage or head unavailable      try again at the next poll
class _Watch:
    """Watcher of a running server and of the followed run. The server keeps its models while
    storage or head is unavailable.
    """

    def __init__(self, server: Server, console: Console) -> None:
        self._server = server
        self._console = console
        description = server.describe()
        self._versions = _versions(description)
        self._served = str(description["model"])
        self._failures: dict[str, str] = {}
        self._skipped = set[str]()
        self._attempts = {self._served: (_ATTEMPTS, 0.0)}
        """Attempts to switch to each checkpoint of the followed run, and the earliest time of the
        next.
        """
        # Loading takes minutes, in which the loop must still notice signals and a stopped server.
        # One thread, because changes of one server wait for each other anyway.
        self._changing = ThreadPoolExecutor(1, thread_name_prefix="follow")
        self._change: tuple[str, Future[Any]] | None = None
        """Checkpoint that the server is switching to."""
        self._trouble = ""

    def poll(self) -> bool:
        """Print changes of the served models. Returns False if the server was stopped."""
        import ray

        try:
            description = self._server.describe()
        except InputError:
            return False
        except (ValueError, ray.exceptions.RayError):
            return True  # The head or the register restarts
        for serial, cause in description["failures"].items():
            if self._failures.get(serial) != cause:
                self._console.note(f"Keeping the model: {cause}")
        versions = _versions(description)
        if versions != self._versions:
            lost = f"nothing. If {description['model']} is gone, set another model with --swap"
            self._console.note(f"Serving {', '.join(versions) or lost}")
        self._versions = versions
        self._failures = dict(description["failures"])
        self._served = description["model"]
        return True

    def follow(self, run: str, which: Literal["newest", "best"]) -> None:
        """Switch to the run's checkpoint, with a few retries."""
        try:
            if self._change is not None:
                path, change = self._change
                if not change.done():
                    return
                self._change = None
                number, _ = self._attempts.pop(path)
                error = change.exception()
                if error is None:  # No further attempts, so that a rollback by the user stays
                    self._attempts[path] = _ATTEMPTS, 0.0
                elif isinstance(error, InputError):  # Reported by `poll`
                    self._attempts[path] = number, time.monotonic() + _RETRY_S * 2**number
                else:
                    raise error
            with storage.retry_timeout(_STORE_S):
                newest = choose(run, which, skipped=self._note_skipped)
            number, due_s = self._attempts.get(newest or "", (0, 0.0))
            if (
                newest
                and newest != self._served
                and number < _ATTEMPTS
                and time.monotonic() >= due_s
            ):
                self._attempts[newest] = number + 1, time.monotonic() + _RETRY_S * 2 ** (number + 1)
                self._change = (
                    newest,
                    self._changing.submit(
                        self._server.control.change, partial(follow_model, path=newest)
                    ),
                )
            self._trouble = ""
        except Exception as error:  # Storage or the cluster's head is unavailable
            if str(error) != self._trouble:
                self._console.note(f"Keeping the model: {' '.join(str(error).split())}")
            self._trouble = str(error)

    def _note_skipped(self, error: InputError) -> None:
        if str(error) not in self._skipped:
            self._skipped.add(str(error))
            self._console.note(f"Skipping a checkpoint: {' '.join(str(error).split())}")


def _versions(description: dict[str, Any]) -> list[str]:
    return sorted(
        {
            version
            for replica in description["replicas"].values()
            for version in replica.values()
            if version
        }
    )


def choose(
    run: str,
    which: Literal["newest", "best"],
    *,
    skipped: Callable[[InputError], None] = lambda error: None,
) -> str | None:
    """Return the absolute folder of a run's newest checkpoint, or of the one with the best
    evaluation score (the later of equal ones). None if there is none yet. Calls `skipped` with the
    error of each damaged or incompatible checkpoint.
    """
    scored: list[tuple[float, str]] = []
    for checkpoint in reversed(committed(storage.absolute(run))):
        try:
            manifest = checkpoint.manifest()
            check_files(checkpoint, manifest)
        except FileNotFoundError:  # Being removed
            continue
        except InputError as error:
            skipped(error)
            continue
        if which == "newest":
            return checkpoint.path
        if manifest["score"] is not None:
            scored.append((manifest["score"], checkpoint.path))
    # The first, so the newest of equal scores
    return max(scored, key=lambda entry: entry[0])[1] if scored else None
