"""Worker in one of several existing processes, and the rendezvous of these processes."""

import contextlib
import dataclasses
import functools
import json
import pickle
import platform
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Final, Self, final

import torch
from torch import distributed

from rayrec import host_resources, storage
from rayrec.cluster.layout import TorchrunEnv
from rayrec.collectives import group_arguments, use_device
from rayrec.config import InputError, error_line
from rayrec.data.engine import ThreadEngine
from rayrec.process_state import preserved_process
from rayrec.training.launchers.base import AttemptContext, PreparedRun, follow_attempt, worker_logs
from rayrec.training.profiling import watched_requests
from rayrec.training.stop_monitor import ProfileRequest, Signals
from rayrec.training.worker import run_worker
from rayrec.workloads.base import TrainConfig, WorkerContext

_POLL_S: Final = 0.1
_REQUESTS_S: Final = 1.0
_JOIN: Final = timedelta(minutes=30)
_LEAVE_S: Final = 30.0
"""Seconds that the first process, which may host the store, waits for the others to read the
result.
"""
_JOIN_S: Final = 5.0
"""Maximum wait for a watcher, in seconds, which may be in a call to a lost store."""
_ATTEMPT = "attempt"
_RECEIVED = "taken"
_ENDED = "ended"
_LEFT = "left"
_CAUSE = "cause"
_BYTES = "wrote"
_REQUESTS = "requests"
_CHUNK: Final = 4 << 20


# Keys of a run in torch's store, below attempt_N/rayrec. A value is published as chunks KEY/0, ...,
# then their number as KEY, so that a reader who sees KEY finds all chunks.
#
#   process 0            others                             key
#   publishes input      poll, then count themselves        attempt, taken
#   (the last reader removes the input)
#   all: collectives in a group of their own                attempt_N/group
#   any: stop reason, bytes saved, profile requests         cause, wrote/RANK, requests/NUMBER
#   publishes result     poll, then count themselves        ended, left
#   waits for `left`, since its end may end the store
@final
class StoreRendezvous:
    """Messages between the processes of a run, in torch's key-value store."""

    def __init__(self, env: TorchrunEnv, store: distributed.Store) -> None:
        self.env = env
        # torchrun may keep the store, with earlier processes' values, across restarts.
        attempt = f"attempt_{env.restarts}"
        self.group_store = distributed.PrefixStore(f"{attempt}/group", store)
        # A second connection: torch's group may block its own in a wait, for as long as a
        # collective takes.
        cloned = store.clone()  # type: ignore[attr-defined]  # torch's stubs do not know it
        self._store = distributed.PrefixStore(f"{attempt}/rayrec", cloned)
        # One call to the connection at a time. `close` takes it too, so that no call is in C++ code
        # after it.
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._watchers: list[threading.Thread] = []

    @classmethod
    def join(cls, env: TorchrunEnv) -> Self:
        """Join the other processes in the store of torchrun or the first process; a process that
        trains alone has its own. Raises RuntimeError if the first process does not appear within
        half an hour.
        """
        if not env.is_torchrun:
            return cls(env, distributed.HashStore())
        store, _, _ = next(
            distributed.rendezvous("env://", env.rank, env.world_size, timeout=_JOIN)
        )
        return cls(env, store)

    def publish(self, key: str, value: bytes) -> None:
        """Publish a value of any size. Torch's store rejects messages over 8 MiB, which a
        vocabulary may exceed.
        """
        chunks = [value[start : start + _CHUNK] for start in range(0, len(value), _CHUNK)]
        with self._open():
            for number, chunk in enumerate(chunks):
                # Bytes too, which torch's stubs do not know
                self._store.set(f"{key}/{number}", chunk)  # type: ignore[arg-type]
            self._store.set(key, str(len(chunks)))  # written last, after all pieces

    def get(self, key: str) -> bytes | None:
        """Return a published value, or None if it is not published yet. Raises RuntimeError if the
        store is gone.
        """
        with self._open():
            if not self._store.check([key]):
                return None
            return b"".join(
                self._store.get(f"{key}/{number}") for number in range(int(self._store.get(key)))
            )

    def remove(self, key: str) -> None:
        """Remove a published value that no process needs."""
        with self._open():
            for name in (key, *(f"{key}/{number}" for number in range(int(self._store.get(key))))):
                self._store.delete_key(name)

    def add(self, key: str, amount: int) -> int:
        with self._open():
            return self._store.add(key, amount)

    def close(self) -> None:
        """Make later calls raise OSError, and wait for the watchers; called before the process
        ends. A thread in the store's C++ code during Python's shutdown would abort the process
        (`std::terminate`, status 134).
        """
        with self._lock:
            self._closed.set()
        for watcher in self._watchers:
            watcher.join(_JOIN_S)

    def watch(self, target: Callable[[threading.Event], None], name: str) -> None:
        """Call `target` in a thread, with the event of the end, which it must heed."""
        self._watchers.append(
            # Daemon: `close` waits for it, but not for one that is in a call to a lost store.
            threading.Thread(target=target, args=(self._closed,), name=name, daemon=True)
        )
        self._watchers[-1].start()

    @contextlib.contextmanager
    def _open(self) -> Iterator[None]:
        with self._lock:
            if self._closed.is_set():
                raise OSError("the run of this process has ended")
            yield


@final
class StoreControlChannel:
    """Control channel between all processes of a run; any of them may request a stop."""

    def __init__(self, rendezvous: StoreRendezvous) -> None:
        self._rendezvous = rendezvous

    def request_stop(self, cause: str) -> None:
        """Request a stop. The first cause is kept."""
        if self.stop_reason() is None:
            self._rendezvous.publish(_CAUSE, cause.encode())

    def stop_reason(self) -> str | None:
        cause = self._get(_CAUSE)
        return None if cause is None else cause.decode()

    def report_saved_bytes(self, rank: int, saved_bytes: int) -> None:
        self._rendezvous.publish(f"{_BYTES}/{rank}", str(saved_bytes).encode())

    def saved_bytes(self) -> int:
        return sum(
            int(self._get(f"{_BYTES}/{rank}") or b"0")
            for rank in range(self._rendezvous.env.world_size)
        )

    def send_profile_request(self, request: ProfileRequest) -> None:
        self._rendezvous.publish(
            f"{_REQUESTS}/{self._rendezvous.add(_REQUESTS, 1)}", json.dumps(request).encode()
        )

    def subscribe(self, requested: Callable[[ProfileRequest], None]) -> None:
        self._rendezvous.watch(functools.partial(self._watch, requested), "profile-requests")

    def _watch(self, requested: Callable[[ProfileRequest], None], ended: threading.Event) -> None:
        seen = 0
        with contextlib.suppress(OSError):  # the run has ended
            while not ended.is_set():
                value = self._get(f"{_REQUESTS}/{seen + 1}")
                if value is None:
                    ended.wait(_REQUESTS_S)
                else:
                    requested(json.loads(value))
                    seen += 1

    def _get(self, key: str) -> bytes | None:
        try:
            return self._rendezvous.get(key)
        except RuntimeError as error:
            raise OSError(
                f"the store of the run's processes is gone ({error_line(error)})"
            ) from None


def train_first(
    run: PreparedRun,
    signals: Signals,
    rendezvous: StoreRendezvous,
    *,
    pause_at: float | None = None,
) -> dict[str, Any] | None:
    """Train as the first process and publish the other processes' input. Returns `run_worker`'s
    result, or None if a signal ended the run and the worker did not save within its
    `GracePeriod`.
    """
    env = rendezvous.env
    config = run.config
    threads = env.cpus if env.is_torchrun else max(1, int(run.layout.per_worker.max_cpus or 1))
    attempt = AttemptContext.create(
        run, _engine(config, threads), StoreControlChannel(rendezvous), pause_at=pause_at
    )
    if env.world_size > 1:
        # Each process recreates unshareable parts, and compares the configuration with its own.
        unshareable: dict[str, Any] = {"config": None, "engine": None, "channel": None}
        shared = dataclasses.replace(attempt, **unshareable)
        rendezvous.publish(_ATTEMPT, pickle.dumps((config.to_dict(), shared)))
    return _train(attempt, rendezvous, signals)


def train_other(config: TrainConfig, rendezvous: StoreRendezvous) -> dict[str, Any]:
    """Train as another process than the first one. Returns the result that the first process passed
    to `end`.
    """
    with Signals() as signals:
        # The run may end before it begins, such as with an error of the first process. So this
        # waits for either key.
        while (ended := rendezvous.get(_ENDED)) is None:
            value = rendezvous.get(_ATTEMPT)
            if value is not None:
                # Trusted: pickled by the first process of this run, as in torch's object
                # collectives.
                values, shared = pickle.loads(value)
                if rendezvous.add(_RECEIVED, 1) == rendezvous.env.world_size - 1:
                    # all have read it, and torchrun's agent would keep it
                    rendezvous.remove(_ATTEMPT)
                config = config.updated(values)
                engine = _engine(config, rendezvous.env.cpus)
                channel = StoreControlChannel(rendezvous)
                _train(
                    dataclasses.replace(shared, config=config, engine=engine, channel=channel),
                    rendezvous,
                    signals,
                )
                break
            time.sleep(_POLL_S)
        while (ended := rendezvous.get(_ENDED)) is None:
            time.sleep(_POLL_S)
    rendezvous.add(_LEFT, 1)
    result: dict[str, Any] = json.loads(ended)
    return result


def end(rendezvous: StoreRendezvous, how: dict[str, Any]) -> None:
    """Publish the run's result as JSON, and wait for a limited time until all other processes have
    read it.
    """
    rendezvous.publish(_ENDED, storage.json_text(how).encode())
    # Limited, because a process that was killed never counts itself.
    deadline_s = time.monotonic() + _LEAVE_S
    while (
        rendezvous.add(_LEFT, 0) < rendezvous.env.world_size - 1 and time.monotonic() < deadline_s
    ):
        time.sleep(_POLL_S)


def _engine(config: TrainConfig, threads: int) -> ThreadEngine:
    return ThreadEngine(threads, max_outage_s=config.failure.max_outage_s)


def select_device(env: TorchrunEnv, *, use_gpu: bool) -> torch.device:
    """Return the GPU of a process's local rank, or the current one if it trains alone. Raises
    InputError without such a GPU.
    """
    if not use_gpu:
        return torch.device("cpu")
    if not env.is_torchrun:
        return torch.device("cuda", torch.cuda.current_device())
    seen = torch.cuda.device_count()
    if env.local_rank >= seen:
        raise InputError(
            f"LOCAL_RANK={env.local_rank} on {platform.node()}: this process sees {seen} GPUs. "
            "Start one process for each GPU, and let each see all of its machine (srun "
            "--gpu-bind=none, no CUDA_VISIBLE_DEVICES)"
        )
    return torch.device("cuda", env.local_rank)


def _train(
    attempt: AttemptContext, rendezvous: StoreRendezvous, signals: Signals
) -> dict[str, Any] | None:
    """Run this process's worker in a thread, so that the main thread can pass on signals and, on
    rank 0, profile requests. Returns None if a signal ended the run and the worker did not save
    within its `GracePeriod`.
    """
    config = attempt.config
    env = rendezvous.env
    channel = StoreControlChannel(rendezvous)
    device = select_device(env, use_gpu=config.scaling.use_gpu)
    use_device(device)
    with watched_requests(attempt.folder, channel) if env.rank == 0 else contextlib.nullcontext():
        return follow_attempt(
            functools.partial(_work, attempt, rendezvous, device),
            signals,
            config.failure,
            request_stop=channel.request_stop,
            saved_bytes=channel.saved_bytes,
        )


def _work(
    attempt: AttemptContext, rendezvous: StoreRendezvous, device: torch.device
) -> dict[str, Any]:
    use_device(device)
    env = rendezvous.env
    stopwatch = attempt.stopwatch()
    context = WorkerContext(
        attempt.config,
        env.rank,
        env.world_size,
        device,
        attempt.engine,
        node=platform.node(),
        cpus=env.cpus,
    )
    log = storage.join(attempt.folder, "logs", f"worker_{env.rank}.log")
    is_bound = attempt.config.scaling.bind_cores
    cores = (
        host_resources.bound_to_cores(env.local_rank, env.local_world_size)
        if is_bound
        else contextlib.nullcontext()
    )
    # Here too, because the caller may not have loaded torch, and may return before an abandoned
    # worker does.
    with (
        preserved_process(),
        cores,
        worker_logs(log, rank=env.rank),
        _process_group(attempt.config, rendezvous, device),
    ):
        stopwatch.lap("process_group")
        return run_worker(attempt, context, stopwatch=stopwatch)


# Python has one default group per process, and runs of several threads may begin and end at once.
_group_lock: Final = threading.Lock()
_num_group_users = 0
"""Number of runs that train alone in this process at the moment, and share torch's one default
group.
"""


@contextlib.contextmanager
def _process_group(
    config: TrainConfig, rendezvous: StoreRendezvous, device: torch.device
) -> Iterator[None]:
    """Join the group of all processes. A process that trains alone uses its caller's group, if any,
    and shares it with the runs of other threads, the last of which ends it.
    """
    global _num_group_users
    env = rendezvous.env
    is_alone = not rendezvous.env.is_torchrun
    with _group_lock:
        is_callers = is_alone and distributed.is_initialized() and not _num_group_users
        if not is_callers:
            if not _num_group_users:
                _init_group(config, rendezvous, device)
            _num_group_users += 1
    failed = True
    try:
        yield
        failed = False
    finally:
        with _group_lock:
            _num_group_users -= not is_callers
            # After an error, NCCL would wait for the other processes, which notice the failure only
            # when this process ends.
            must_wait = failed and device.type == "cuda" and env.world_size > 1
            if not is_callers and not _num_group_users and not must_wait:
                distributed.destroy_process_group()


def _init_group(config: TrainConfig, rendezvous: StoreRendezvous, device: torch.device) -> None:
    distributed.init_process_group(
        store=rendezvous.group_store,
        rank=rendezvous.env.rank,
        world_size=rendezvous.env.world_size,
        **group_arguments(
            device, timeout_s=config.failure.max_outage_s + config.failure.collective_timeout_s
        ),
    )
