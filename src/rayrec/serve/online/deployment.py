"""The HTTP application as a deployment of Ray Serve, and the board its replicas share."""

from __future__ import annotations

import logging
import os
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, final

from rayrec.config import InputError
from rayrec.serve.online.app import ScoringApp
from rayrec.serve.online.board import Board
from rayrec.serve.online.counters import Counters, Snapshot
from rayrec.serve.online.hosting import Hosting, Wanted
from rayrec.serve.online.settings import ServeConfig

if TYPE_CHECKING:
    from ray.serve import Application

    from rayrec.serve.served import ServedModel

_log = logging.getLogger(__name__)

BoardHandle = Any
"""Of the Ray actor `Board`; Ray's own type knows nothing of its methods."""

APPLICATION: Final = "rayrec"
BOARD: Final = "rayrec-serve-board"
NAMESPACE: Final = "rayrec"
EXCHANGE_EVERY_S: Final = 0.5
_START_S: Final = 120.0
"""How long the board may take to start."""
_ANSWER_S: Final = 5.0
"""How long the board may take to answer."""
_SPARE_REQUESTS: Final = 64
"""Requests of other paths beside those that wait and those that are scored."""


def start_board(path: str) -> BoardHandle:
    """The board of a new server. Raises InputError where the cluster has a server already."""
    import ray
    from ray import serve

    left = find_board()
    if left is not None:
        if APPLICATION in serve.status().applications:
            raise InputError(
                "this Ray cluster runs a `rayrec serve` already; --swap gives it another model, --stop ends it (both with "
                "--cluster.address)"
            )
        end_board(left)  # of a server that was killed, and whose replicas somebody removed
    actor: Any = ray.remote(Board)
    actor = actor.options(name=BOARD, namespace=NAMESPACE, num_cpus=0, max_restarts=-1, lifetime="detached")
    board = actor.remote(path)
    ray.get(board.describe.remote(), timeout=_START_S)  # replicas do not wait long for it
    return board


def find_board() -> BoardHandle | None:
    """The board of the server that runs on the cluster, None where none does."""
    import ray

    try:
        return ray.get_actor(BOARD, namespace=NAMESPACE)
    except ValueError:
        return None


def end_board(board: BoardHandle) -> None:
    """Returns once its name is free."""
    import ray

    ray.kill(board)
    deadline_s = time.monotonic() + _START_S
    while find_board() is not None and time.monotonic() < deadline_s:
        time.sleep(0.05)


def make_application(config: ServeConfig, *, token_digest: bytes | None) -> Application:
    """What `serve.run` takes. The board must be there."""
    from ray import serve
    from ray.serve.schema import LoggingConfig

    taken = config.max_waiting_requests + _SPARE_REQUESTS
    deployment: Any = serve.deployment(
        serve.ingress()(_Replica) if config.ingress == "serve" else _ListeningReplica,
        name=APPLICATION,
        num_replicas=config.replicas,
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
    return deployment.bind(config, token_digest)


class _Replica:
    """One process that answers. A thread asks the board what is wanted, and changes over."""

    def __init__(self, config: ServeConfig, token_digest: bytes | None) -> None:
        self._held = _Held(config, token_digest)

    def __serve_build_asgi_app__(self) -> ScoringApp:
        return self._held.app

    def check_health(self) -> None:
        """Ray Serve asks now and then, and replaces a replica that raises."""
        self._held.check_health()


@final
class _ListeningReplica:
    """One that takes requests itself, at the port of its node."""

    def __init__(self, config: ServeConfig, token_digest: bytes | None) -> None:
        from rayrec.serve.online.listening import Listener

        self._held = _Held(config, token_digest)
        end_s = config.time_limit_s + 1
        self._listener = Listener(
            self._held.app, host=config.host, port=config.port, max_body_bytes=config.max_body_bytes, end_s=end_s
        )

    def check_health(self) -> None:
        """As above."""
        self._held.check_health()
        if not self._listener.alive:
            raise RuntimeError("the HTTP server has ended")

    def __del__(self) -> None:
        """Ray Serve calls it when it ends a replica, and waits."""
        if hasattr(self, "_listener"):  # else it never came to listen
            self._listener.close()
            self._held.app.close()


@final
class _Held:
    """The model and the application of a replica."""

    def __init__(self, config: ServeConfig, token_digest: bytes | None) -> None:
        import ray
        import torch
        from ray import serve

        from rayrec.serve.served import open_served

        torch.set_num_threads(max(1, int(config.cpus_per_replica)))
        self._name = serve.get_replica_context().replica_id.unique_id
        self._board = ray.get_actor(BOARD, namespace=NAMESPACE)
        counters = Counters()

        def load(path: str) -> ServedModel:
            return open_served(path, device=config.device)

        self._hosting = Hosting(load, counters)
        self._wanted: Wanted | None = None
        self.app = ScoringApp(self._hosting, counters, config=config, token_digest=token_digest, collect=self._collect)
        self._start()
        threading.Thread(target=self._follow, name="board", daemon=True).start()

    def check_health(self) -> None:
        if not self._hosting.ready:
            raise RuntimeError("no model is loaded")

    def _start(self) -> None:
        """Loads what is wanted; where that fails and there was one before, that."""
        for _ in range(2):
            self._exchange()
            assert self._wanted is not None
            self._hosting.apply(self._wanted)
            if self._hosting.ready:
                return
        self._exchange()  # so that whoever started the server hears why
        raise RuntimeError("; ".join(self._hosting.status().failures.values()))

    def _exchange(self) -> None:
        import ray

        told: Any = self._board.exchange.remote(self._name, self._wanted, self._hosting.status(), self.app.snapshot())
        self._wanted = ray.get(told, timeout=_ANSWER_S)

    def _follow(self) -> None:
        """Tells and hears, also while a model is loaded."""
        import ray

        silent = False
        changing = ThreadPoolExecutor(1, thread_name_prefix="change")
        applied, change = self._wanted, Future[None]()
        change.set_result(None)
        while True:
            time.sleep(EXCHANGE_EVERY_S)
            try:
                self._exchange()
                silent = False
            except (ray.exceptions.RayError, TimeoutError) as error:
                if not silent:  # it is started anew by Ray; what is served goes on
                    _log.warning("the board does not answer (%s); this replica goes on with its model", error)
                silent = True
                continue
            assert self._wanted is not None
            if self._wanted != applied and change.done():
                applied = self._wanted
                change = changing.submit(self._hosting.apply, applied)
                change.add_done_callback(_log_failure)

    async def _collect(self) -> Snapshot:
        return await self._board.collect.remote(self._name, self._wanted, self._hosting.status(), self.app.snapshot())


def _log_failure(change: Future[None]) -> None:
    if (error := change.exception()) is not None:
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
