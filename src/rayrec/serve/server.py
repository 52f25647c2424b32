"""Starts a server, watches it and the run that it follows, and ends it after every request that it took is answered."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal

from rayrec import storage
from rayrec.checkpoint import committed, open_checkpoint
from rayrec.checkpoint.discovery import check_files
from rayrec.cluster import connection
from rayrec.config import InputError
from rayrec.inference.model import source_of
from rayrec.observe.console import Console
from rayrec.serve.config import Follow, ServeConfig
from rayrec.serve.deployment import (
    APPLICATION,
    CoordinatorHandle,
    end_serve,
    http_options,
    make_application,
    own_network,
    quieten,
    start_coordinator,
)
from rayrec.serve.ingress import (
    LOOPBACK,
    PROXY_CALLBACK,
    PROXY_CALLBACK_VARIABLE,
    find_instance,
    first_answering,
    held_port,
    settle,
    urls,
)
from rayrec.serve.protocol import Change

_POLL_EVERY_S: Final = 1.0
_FOLLOW_EVERY_S: Final = 5.0
_STORE_S: Final = 5.0
"""How long following waits for a store that is out."""
_ATTEMPTS: Final = 4
_RETRY_S: Final = 15.0
"""Doubled with each attempt."""


@dataclass(frozen=True)
class Server:
    """A server that takes requests."""

    url: str
    coordinator: CoordinatorHandle
    address: str
    """Of its Ray cluster, by which `swap` and the like reach it."""

    def describe(self) -> dict[str, Any]:
        """Plain JSON values: url, address, and what it serves."""
        import ray

        found: dict[str, Any] = ray.get(self.coordinator.describe.remote())
        return {"url": self.url, "cluster_address": self.address, **found}


@contextlib.contextmanager
def serving(
    path: str, *, config: ServeConfig, address: str | None, shadow: str | None = None, console: Console
) -> Iterator[Server]:
    """A server of a checkpoint, run or export, while it is entered, on the Ray cluster at `address` (None: RAY_ADDRESS, else a
    local Ray). On leaving, requests in flight are answered first.

    Raises InputError for an unusable model or address, and if the cluster or the port already has a server.
    """
    digest = config.token_digest()
    with _serving(path, config=config, digest=digest, address=address, shadow=shadow, console=console) as server:
        yield server


@contextlib.contextmanager
def _serving(
    path: str, *, config: ServeConfig, digest: bytes | None, address: str | None, shadow: str | None, console: Console
) -> Iterator[Server]:
    path = source_of(path)
    shadow = source_of(shadow) if shadow else None
    own_network(config.recipe)  # refused before Ray starts
    if digest is None and config.host not in LOOPBACK:
        console.note(
            f"anyone who reaches {config.host}:{config.port} may score: --token-file or --token-env asks for a token"
        )
    quieten()
    import ray
    from ray import serve

    joined = ray.is_initialized()
    own_ray = not joined and (address or os.environ.get("RAY_ADDRESS")) in (None, "", "local")
    with contextlib.ExitStack() as held:
        if own_ray:
            held.enter_context(held_port(config.host, config.port))  # refused before Ray starts
            if config.ingress == "serve":
                os.environ.setdefault(PROXY_CALLBACK_VARIABLE, PROXY_CALLBACK)
        reached = connection.connect(address, num_cpus=None, object_store_bytes=None, log_to_driver=console.verbose)
        quieten()  # Ray sets up its loggers again
        instance = find_instance(APPLICATION)
        # One without applications and proxies was left by a server, and its proxies cannot be enabled later.
        fresh = instance is None or not (instance.applications or instance.with_proxies)
        coordinator = start_coordinator(path, started_serve=fresh)
        try:
            asked, config = config, settle(config, instance, own_ray=own_ray)
            if (asked.host, asked.port) != (config.host, config.port):
                console.note(f"Ray Serve runs on this cluster already and listens at {config.host}:{config.port}")
            if not own_ray and (fresh or config.ingress == "direct"):
                held.enter_context(held_port(config.host, config.port))
            if fresh and instance is not None:
                serve.shutdown()
            yield Server(_deploy(config, digest, coordinator, path, shadow), coordinator, reached)
        finally:
            _end(coordinator, own_ray=own_ray, leave_ray=not joined)


def _deploy(
    config: ServeConfig, digest: bytes | None, coordinator: CoordinatorHandle, path: str, shadow: str | None
) -> str:
    """The URL at which the server answers. Raises InputError if no replica can load the model, or nothing answers."""
    import ray
    from ray import serve
    from ray.serve.schema import LoggingConfig

    direct = config.ingress == "direct"
    quiet = LoggingConfig(enable_access_log=False, log_level="WARNING")
    location = "HeadOnly" if config.host in LOOPBACK else "EveryNode"
    with _hushed():
        serve.start(
            proxy_location="Disabled" if direct else location,
            http_options=None if direct else http_options(config),
            logging_config=quiet,
        )
    quieten()
    try:
        application = make_application(config, token_digest=digest, model=path, shadow=shadow)
        serve.run(application, name=APPLICATION, route_prefix=None if direct else "/")
    except RuntimeError as error:
        cause = ray.get(coordinator.describe.remote())["failures"].get("0")
        if cause:
            raise InputError(cause) from None
        raise InputError(
            f"Ray Serve did not start the server: {' '.join(str(error).split())[:500]}; its logs are in "
            "/tmp/ray/session_latest/logs/serve"
        ) from None
    instance = find_instance(APPLICATION)
    assert instance is not None
    versions = _versions(ray.get(coordinator.describe.remote()))
    return first_answering(urls(config, instance), versions=versions)


@contextlib.contextmanager
def _hushed() -> Iterator[None]:
    """Without Ray Serve's logs of its start, for which it sets its logger up itself."""
    logging.disable(logging.INFO)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def _end(coordinator: CoordinatorHandle, *, own_ray: bool, leave_ray: bool) -> None:
    import ray
    from ray import serve

    with contextlib.suppress(Exception):  # whatever of it is gone already
        serve.delete(APPLICATION)
    with contextlib.suppress(Exception):
        if not own_ray:
            end_serve(coordinator)
    with contextlib.suppress(Exception):
        ray.kill(coordinator)
    if leave_ray:
        ray.shutdown()


def serve_forever(
    path: str,
    *,
    config: ServeConfig,
    address: str | None,
    follow: Follow = "no",
    shadow: str | None = None,
    console: Console,
    started: Callable[[dict[str, Any]], None],
) -> None:
    """Serves until Ctrl-C or SIGTERM; then requests in flight are answered. A second signal ends at once.

    `follow`: `path` is a run, to whose newest or best checkpoint the server changes over as they appear. `started` is called
    when the server takes requests. The variable that `config.token_env` names is taken out of the environment.
    """
    first = _first_of_run(path, follow)
    digest = config.token_digest()
    if config.token_env:
        del os.environ[config.token_env]  # before Ray starts, whose processes inherit it
    with (
        _serving(first, config=config, digest=digest, address=address, shadow=shadow, console=console) as server,
        _until_signal() as asked,  # behind Ray's start, which sets handlers of its own
    ):
        started(server.describe())
        watch = _Watch(server, console)
        last_follow_s = 0.0
        while not asked.wait(_POLL_EVERY_S):
            if not watch.poll():
                console.note("the server was stopped")
                return
            if follow != "no" and time.monotonic() - last_follow_s > _FOLLOW_EVERY_S:
                last_follow_s = time.monotonic()
                watch.follow(path, follow)
        console.note("the server ends: requests in flight are answered")


def _first_of_run(path: str, follow: Follow) -> str:
    if follow == "no":
        return path
    if storage.exists(storage.join(path, "manifest.json")):
        raise InputError(f"follow: {path} is a checkpoint or an export; give the run's folder")
    return choose(path, follow) or open_checkpoint(path).path


@contextlib.contextmanager
def _until_signal() -> Iterator[threading.Event]:
    """An event that the first Ctrl-C or SIGTERM sets; the second raises KeyboardInterrupt. Signals are handled in the main thread
    only; in other threads the event is never set."""
    asked = threading.Event()

    def note(number: int, frame: Any) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass
class _Attempt:
    """At changing over to a checkpoint of the run that is followed."""

    request: int
    number: int
    at_s: float


class _Watch:
    """Reports changes while a server runs. If the store or the coordinator is unavailable, the server keeps its models."""

    def __init__(self, server: Server, console: Console) -> None:
        self._server, self._console = server, console
        found = server.describe()
        self._versions, self._served = _versions(found), str(found["model"])
        self._failures: dict[str, str] = {}
        self._skipped = set[str]()
        self._attempts = {self._served: _Attempt(0, 1, time.monotonic())}
        self._trouble = ""

    def poll(self) -> bool:
        """Prints changes of the served models. Returns False if the server was stopped."""
        import ray

        try:
            found = self._server.describe()
        except ray.exceptions.ActorDiedError:
            return False
        except ray.exceptions.RayError:
            return True  # Ray restarts the coordinator; the next poll finds it
        for serial, cause in found["failures"].items():
            if self._failures.get(serial) != cause:
                self._console.note(f"not served: {cause}; the server keeps its model")
        versions = _versions(found)
        if versions != self._versions:
            lost = f"nothing; if {found['model']} is gone, give another model with --swap"
            self._console.note(f"serving {', '.join(versions) or lost}")
        self._versions, self._failures, self._served = versions, dict(found["failures"]), found["model"]
        return True

    def follow(self, run: str, which: Literal["newest", "best"]) -> None:
        """Changes to the run's checkpoint; if that fails, tries again a few times later."""
        import ray

        try:
            with storage.patience(_STORE_S):
                found = choose(run, which, skipped=self._note_skipped)
            if found is not None and found != self._served and self._is_due(found):
                number = self._attempts[found].number + 1 if found in self._attempts else 1
                request: int | None = ray.get(self._server.coordinator.request.remote("swap", found))
                if request is not None:  # else a later poll makes it
                    self._attempts[found] = _Attempt(request, number, time.monotonic())
            self._trouble = ""
        except (ray.exceptions.RayError, OSError, InputError) as error:
            if str(error) != self._trouble:
                self._console.note(f"follow: {' '.join(str(error).split())}; the server keeps its model")
            self._trouble = str(error)

    def _note_skipped(self, error: InputError) -> None:
        if str(error) not in self._skipped:
            self._skipped.add(str(error))
            self._console.note(f"follow: skipping a checkpoint: {' '.join(str(error).split())}")

    def _is_due(self, path: str) -> bool:
        """Return whether a checkpoint was never tried, or in vain and long enough ago, or a restart lost the request."""
        import ray

        before = self._attempts.get(path)
        if before is None:
            return True
        change: Change = ray.get(self._server.coordinator.change.remote(before.request))
        if change.state == "lost":
            return True
        failed = str(before.request) in self._failures
        return failed and before.number < _ATTEMPTS and time.monotonic() - before.at_s > _RETRY_S * 2**before.number


def _versions(found: dict[str, Any]) -> list[str]:
    return sorted({version for replica in found["replicas"].values() for version in replica.values() if version})


def choose(
    run: str, which: Literal["newest", "best"], *, skipped: Callable[[InputError], None] = lambda error: None
) -> str | None:
    """The folder, absolute, of a run's newest complete checkpoint, or of the one with the best score of an evaluation (of equal
    ones the later); None if there is none (yet). A damaged checkpoint, or one of another format version, is skipped, and
    `skipped` called with the error."""
    scored: list[tuple[float, str]] = []
    for checkpoint in reversed(committed(storage.absolute(run))):
        try:
            manifest = checkpoint.manifest()
            check_files(checkpoint, manifest)
        except FileNotFoundError:  # it is being removed
            continue
        except InputError as error:
            skipped(error)
            continue
        if which == "newest":
            return checkpoint.path
        if manifest["score"] is not None:
            scored.append((manifest["score"], checkpoint.path))
    return max(scored, key=lambda entry: entry[0])[1] if scored else None  # the first, and so the newest, of equal ones
