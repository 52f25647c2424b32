"""One process of a group of one or several: how the processes find each other, and the worker of each."""

import contextlib
import dataclasses
import json
import pickle
import platform
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any, Final, Self, final

import torch
from torch import distributed

from rayrec import storage
from rayrec.cluster.layout import Launched
from rayrec.collectives import group_arguments, use_device
from rayrec.config import InputError, line_of
from rayrec.data.engine import STOP_ASKED, ThreadEngine
from rayrec.training.launchers.base import AttemptContext, PreparedRun
from rayrec.training.profiling import watched_requests
from rayrec.training.stop_monitor import Grace, ProfileRequest, Signals
from rayrec.training.worker import run_worker
from rayrec.training.worker_logs import worker_logs
from rayrec.workloads.base import TrainConfig, WorkerContext

_LOOK_S: Final = 0.1
_REQUESTS_S: Final = 1.0
_JOIN: Final = timedelta(minutes=30)
"""For which processes wait until the first one is there."""
_LEAVE_S: Final = 30.0
"""For which the first process, which may hold the store, waits until the others have read how the run ended."""
_ATTEMPT, _TAKEN, _ENDED, _LEFT = "attempt", "taken", "ended", "left"
_CAUSE, _WROTE, _REQUESTS = "cause", "wrote", "requests"
_PIECE: Final = 4 << 20


@final
class StoreRendezvous:
    """What the processes of a run leave for each other in torch's key-value store."""

    def __init__(self, env: Launched, store: distributed.Store) -> None:
        self.env = env
        # torchrun may keep the store over restarts, with all that the processes before have left in it.
        attempt = f"attempt_{env.restarts}"
        self.group_store = distributed.PrefixStore(f"{attempt}/group", store)
        own = store.clone()  # type: ignore[attr-defined]  # torch's stubs do not know it
        self._store, self._lock = distributed.PrefixStore(f"{attempt}/rayrec", own), threading.Lock()
        self._closed = False

    @classmethod
    def join(cls, env: Launched) -> Self:
        """Meet the other processes, in the store that torchrun or the first process holds; a process that trains alone holds its
        own. Raises RuntimeError if the first process is not there within half an hour."""
        if not env.is_torchrun:
            return cls(env, distributed.HashStore())
        store, _, _ = next(distributed.rendezvous("env://", env.rank, env.world_size, timeout=_JOIN))
        return cls(env, store)

    def publish(self, key: str, value: bytes) -> None:
        """Of any size: torch's store refuses a message of more than 8 MiB, which a vocabulary may be."""
        pieces = [value[start : start + _PIECE] for start in range(0, len(value), _PIECE)]
        with self._open():
            for number, piece in enumerate(pieces):
                self._store.set(f"{key}/{number}", piece)  # type: ignore[arg-type]  # bytes too, which torch's stubs do not know
            self._store.set(key, str(len(pieces)))  # last: then all of them are there

    def found(self, key: str) -> bytes | None:
        """What was published; None: nothing yet. Raises RuntimeError if the store is gone."""
        with self._open():
            if not self._store.check([key]):
                return None
            return b"".join(self._store.get(f"{key}/{number}") for number in range(int(self._store.get(key))))

    def remove(self, key: str) -> None:
        """What was published and nobody looks for any more."""
        with self._open():
            pieces = int(self._store.get(key))
            for name in (key, *(f"{key}/{number}" for number in range(pieces))):
                self._store.delete_key(name)

    def add(self, key: str, amount: int) -> int:
        """Adds to a counter -> its new value."""
        with self._open():
            return self._store.add(key, amount)

    def close(self) -> None:
        """Before the process ends: from now on every call raises OSError. A thread that is inside the store's C++ while Python
        shuts down ends the process by `std::terminate` (status 134)."""
        with self._lock:
            self._closed = True

    @contextlib.contextmanager
    def _open(self) -> Iterator[None]:
        with self._lock:
            if self._closed:
                raise OSError("the run of this process is over")
            yield


@final
class StoreControlChannel:
    """A `ControlChannel` that all processes of a run reach; a stop may be requested by any of them."""

    def __init__(self, rendezvous: StoreRendezvous) -> None:
        self._rendezvous = rendezvous

    def request_stop(self, cause: str) -> None:
        """Request a stop; the first cause stays."""
        if self.stop_reason() is None:
            self._rendezvous.publish(_CAUSE, cause.encode())

    def stop_reason(self) -> str | None:
        cause = self._found(_CAUSE)
        return None if cause is None else cause.decode()

    def report_bytes_written(self, rank: int, written_bytes: int) -> None:
        self._rendezvous.publish(f"{_WROTE}/{rank}", str(written_bytes).encode())

    def written_bytes(self) -> int:
        """Return the bytes written by the saves of all workers."""
        return sum(int(self._found(f"{_WROTE}/{rank}") or b"0") for rank in range(self._rendezvous.env.world_size))

    def send_profile_request(self, request: ProfileRequest) -> None:
        number = self._rendezvous.add(_REQUESTS, 1)
        self._rendezvous.publish(f"{_REQUESTS}/{number}", json.dumps(request).encode())

    def subscribe(self, requested: Callable[[ProfileRequest], None]) -> None:
        threading.Thread(target=self._watch, args=(requested,), name="profile-requests", daemon=True).start()

    def _watch(self, requested: Callable[[ProfileRequest], None]) -> None:
        seen = 0
        with contextlib.suppress(OSError):  # the run is over
            while True:
                given = self._found(f"{_REQUESTS}/{seen + 1}")
                if given is None:
                    time.sleep(_REQUESTS_S)
                else:
                    requested(json.loads(given))
                    seen += 1

    def _found(self, key: str) -> bytes | None:
        try:
            return self._rendezvous.found(key)
        except RuntimeError as error:
            raise OSError(f"the store of the run's processes is gone ({line_of(error)})") from None


def train_first(
    run: PreparedRun, signals: Signals, rendezvous: StoreRendezvous, *, pause_at: float | None = None
) -> dict[str, Any] | None:
    """Train as the first process, and publish what the others need; return `run_worker`'s result, or None if a signal ended the
    run and the worker did not save within its `Grace`."""
    env, config = rendezvous.env, run.config
    threads = env.cpus if env.is_torchrun else max(1, int(run.layout.per_worker.max_cpus or 1))
    attempt = AttemptContext.of(run, _engine(config, threads), StoreControlChannel(rendezvous), pause_at=pause_at)
    if env.world_size > 1:
        # What a process cannot share each of them makes again; the configuration is compared with what it was started with.
        shared = dataclasses.replace(attempt, config=None, engine=None, channel=None)  # type: ignore[arg-type]
        rendezvous.publish(_ATTEMPT, pickle.dumps((config.to_dict(), shared)))
    return _train(attempt, rendezvous, signals)


def train_other(config: TrainConfig, rendezvous: StoreRendezvous) -> dict[str, Any]:
    """Train as a process that is not the first one; return what the first one gave `end`."""
    with Signals() as signals:
        while (ended := rendezvous.found(_ENDED)) is None:
            given = rendezvous.found(_ATTEMPT)
            if given is not None:
                # Written by the first process of this very run, as torch's own collectives of objects are.
                values, shared = pickle.loads(given)
                if rendezvous.add(_TAKEN, 1) == rendezvous.env.world_size - 1:
                    rendezvous.remove(_ATTEMPT)  # nobody else needs it, and torchrun's agent would keep it
                config = config.updated(values)
                engine, channel = _engine(config, rendezvous.env.cpus), StoreControlChannel(rendezvous)
                attempt = dataclasses.replace(shared, config=config, engine=engine, channel=channel)
                _train(attempt, rendezvous, signals)
                break
            time.sleep(_LOOK_S)
        while (ended := rendezvous.found(_ENDED)) is None:
            time.sleep(_LOOK_S)
    rendezvous.add(_LEFT, 1)
    found: dict[str, Any] = json.loads(ended)
    return found


def end(rendezvous: StoreRendezvous, how: dict[str, Any]) -> None:
    """Says how the run ended, in plain JSON values, and waits for a while until all other processes know."""
    rendezvous.publish(_ENDED, storage.json_text(how).encode())
    deadline_s = time.monotonic() + _LEAVE_S
    while rendezvous.add(_LEFT, 0) < rendezvous.env.world_size - 1 and time.monotonic() < deadline_s:
        time.sleep(_LOOK_S)


def _engine(config: TrainConfig, threads: int) -> ThreadEngine:
    return ThreadEngine(threads, max_outage_s=config.failure.max_outage_s)


def device_of(env: Launched, *, use_gpu: bool) -> torch.device:
    """The device of a process: its GPU by its number among the processes of its machine, or the current one of a process that
    trains alone. Raises InputError if the process sees no GPU of this number."""
    if not use_gpu:
        return torch.device("cpu")
    if not env.is_torchrun:
        return torch.device("cuda", torch.cuda.current_device())
    seen = torch.cuda.device_count()
    if env.local_rank >= seen:
        raise InputError(
            f"LOCAL_RANK={env.local_rank} on {platform.node()}: this process sees {seen} GPUs; start one process for each "
            "GPU, and let each see all of its machine (srun --gpu-bind=none, no CUDA_VISIBLE_DEVICES)"
        )
    return torch.device("cuda", env.local_rank)


def _train(attempt: AttemptContext, rendezvous: StoreRendezvous, signals: Signals) -> dict[str, Any] | None:
    """Run this process's worker in a thread, so that this one can pass on signals and, of the first process, requests for a
    profile; return None if a signal ended it and the worker did not save within its `Grace`."""
    config, env, channel = attempt.config, rendezvous.env, StoreControlChannel(rendezvous)
    device = device_of(env, use_gpu=config.scaling.use_gpu)
    use_device(device)
    future: Future[dict[str, Any]] = Future()

    def work() -> None:
        try:
            future.set_result(_work(attempt, rendezvous, device))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, name="worker", daemon=True).start()
    grace: Grace | None = None
    requests = watched_requests(attempt.folder, channel) if env.rank == 0 else contextlib.nullcontext()
    with signals.held(), requests:
        while not future.done():
            wait([future], timeout=_LOOK_S)
            if signals.cause is not None:
                grace = grace or Grace(config.failure, now_s=time.monotonic())
                channel.request_stop(signals.cause)
                if not future.done() and grace.over(time.monotonic(), written_bytes=channel.written_bytes()):
                    return None
    return future.result()


def _work(attempt: AttemptContext, rendezvous: StoreRendezvous, device: torch.device) -> dict[str, Any]:
    """The worker of this process, in this thread."""
    use_device(device)
    env, stopwatch, threads = rendezvous.env, attempt.stopwatch(), torch.get_num_threads()
    context = WorkerContext(attempt.config, env.rank, env.world_size, device, attempt.engine, node=platform.node(), cpus=env.cpus)
    log = storage.join(attempt.folder, "logs", f"worker_{env.rank}.log")
    try:
        with worker_logs(log, rank=env.rank), _process_group(attempt.config, rendezvous, device):
            stopwatch.lap("process_group")
            return run_worker(attempt, context, stopwatch=stopwatch)
    finally:
        torch.set_num_threads(threads)
        STOP_ASKED.clear()  # what this process does next waits for its data


@contextlib.contextmanager
def _process_group(config: TrainConfig, rendezvous: StoreRendezvous, device: torch.device) -> Iterator[None]:
    """The group of all processes. A process that trains alone uses that of the caller if it has one."""
    env = rendezvous.env
    if not env.is_torchrun and distributed.is_initialized():
        yield
        return
    distributed.init_process_group(
        store=rendezvous.group_store,
        rank=env.rank,
        world_size=env.world_size,
        **group_arguments(device, timeout_s=config.failure.max_outage_s + config.failure.collective_timeout_s),
    )
    try:
        yield
    except BaseException:
        # NCCL would wait for the others, which wait for this process; its end tells them.
        if device.type != "cuda" or env.world_size == 1:
            distributed.destroy_process_group()
        raise
    distributed.destroy_process_group()
