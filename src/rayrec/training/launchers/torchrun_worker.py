"""The processes of a run that torchrun has started: how they find each other, and the worker of each."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pickle
import platform
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Final, final

import torch
from torch import distributed

from rayrec import storage
from rayrec.checkpoint import write_token
from rayrec.cluster.layout import Launched
from rayrec.collectives import group_arguments, use_device
from rayrec.config import InputError, line_of
from rayrec.data.threads import ThreadEngine
from rayrec.training.launchers.assignment import Assignment, Launch
from rayrec.training.launchers.process_worker import watched, work
from rayrec.training.mailbox import LocalMailbox, Wish
from rayrec.training.signals import Signals
from rayrec.training.worker import Seat
from rayrec.workloads.base import TrainConfig

_LOOK_S: Final = 0.1
_WISH_S: Final = 1.0
_JOIN: Final = timedelta(minutes=30)
"""For which processes wait until the first one is there."""
_LEAVE_S: Final = 30.0
"""For which the first process, which may hold the store, waits until the others have read how the run ended."""
_ASSIGNMENT, _TAKEN, _ENDED, _LEFT = "assignment", "taken", "ended", "left"
_CAUSE, _WROTE, _WISHES = "cause", "wrote", "wishes"
_PIECE: Final = 4 << 20


@final
class Meeting:
    """What the processes leave for each other in torch's key-value store, which torchrun or the first process holds."""

    def __init__(self, launched: Launched) -> None:
        """Raises RuntimeError if the first process is not there within half an hour."""
        rendezvous = distributed.rendezvous("env://", launched.rank, launched.world_size, timeout=_JOIN)
        store, _, _ = next(rendezvous)
        # torchrun may keep the store over restarts, with all that the processes before have left in it.
        attempt = f"attempt_{launched.restarts}"
        self.group_store = distributed.PrefixStore(f"{attempt}/group", store)
        self._store, self._lock = distributed.PrefixStore(f"{attempt}/rayrec", store.clone()), threading.Lock()
        self._closed = False

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
class StoreMailbox:
    """A mailbox that all processes of a run reach; a stop may be asked for by any of them."""

    def __init__(self, meeting: Meeting, launched: Launched) -> None:
        self._meeting, self._launched = meeting, launched

    def send(self, cause: str) -> None:
        """Asks for a stop; the first cause stays."""
        if self.read() is None:
            self._meeting.publish(_CAUSE, cause.encode())

    def read(self) -> str | None:
        cause = self._found(_CAUSE)
        return None if cause is None else cause.decode()

    def wrote(self, rank: int, written_bytes: int) -> None:
        self._meeting.publish(f"{_WROTE}/{rank}", str(written_bytes).encode())

    def written_bytes(self) -> int:
        """By the saves of all workers."""
        return sum(int(self._found(f"{_WROTE}/{rank}") or b"0") for rank in range(self._launched.world_size))

    def ask(self, wish: Wish) -> None:
        self._meeting.publish(f"{_WISHES}/{self._meeting.add(_WISHES, 1)}", json.dumps(wish).encode())

    def watch(self, wished: Callable[[Wish], None]) -> None:
        threading.Thread(target=self._watch, args=(wished,), name="profile-wishes", daemon=True).start()

    def _watch(self, wished: Callable[[Wish], None]) -> None:
        seen = 0
        with contextlib.suppress(OSError):  # the run is over
            while True:
                given = self._found(f"{_WISHES}/{seen + 1}")
                if given is None:
                    time.sleep(_WISH_S)
                else:
                    wished(json.loads(given))
                    seen += 1

    def _found(self, key: str) -> bytes | None:
        try:
            return self._meeting.found(key)
        except RuntimeError as error:
            raise OSError(f"the store of the run's processes is gone ({line_of(error)})") from None


def train_first(config: TrainConfig, launch: Launch, *, launched: Launched, meeting: Meeting) -> dict[str, Any] | None:
    """The first process's worker, and what the others need for theirs; see
    `rayrec.training.launchers.process_worker.train_here`."""
    token = write_token(launch.folder, max_outage_s=config.failure.max_outage_s)
    mailbox, engine = StoreMailbox(meeting, launched), _engine(config, launched)
    assignment = Assignment.of(launch, config, engine, mailbox, token)
    # What a process cannot share each of them makes again; the configuration is compared with what it was started with.
    shared = dataclasses.replace(assignment, config=None, engine=None, mailbox=None)  # type: ignore[arg-type]
    if launched.world_size > 1:
        meeting.publish(_ASSIGNMENT, pickle.dumps((config.to_dict(), shared)))
    return _work_of(assignment, launched, meeting, mailbox, launch.signals)


def train_other(config: TrainConfig, launched: Launched, meeting: Meeting) -> dict[str, Any]:
    """The worker of a process that is not the first one -> what the first one gave `end`."""
    with Signals() as signals:
        while (ended := meeting.found(_ENDED)) is None:
            given = meeting.found(_ASSIGNMENT)
            if given is not None:
                # Written by the first process of this very run, as torch's own collectives of objects are.
                values, shared = pickle.loads(given)
                if meeting.add(_TAKEN, 1) == launched.world_size - 1:
                    meeting.remove(_ASSIGNMENT)  # nobody else needs it, and torchrun's agent would keep it
                mailbox = StoreMailbox(meeting, launched)
                config = config.updated(values)
                assignment = dataclasses.replace(
                    shared, config=config, engine=_engine(config, launched), mailbox=mailbox
                )
                _work_of(assignment, launched, meeting, mailbox, signals)
                break
            time.sleep(_LOOK_S)
        while (ended := meeting.found(_ENDED)) is None:
            time.sleep(_LOOK_S)
    meeting.add(_LEFT, 1)
    found: dict[str, Any] = json.loads(ended)
    return found


def end(meeting: Meeting, launched: Launched, how: dict[str, Any]) -> None:
    """Says how the run ended, in plain JSON values, and waits for a while until all other processes know."""
    meeting.publish(_ENDED, storage.json_text(how).encode())
    deadline_s = time.monotonic() + _LEAVE_S
    while meeting.add(_LEFT, 0) < launched.world_size - 1 and time.monotonic() < deadline_s:
        time.sleep(_LOOK_S)


def _engine(config: TrainConfig, launched: Launched) -> ThreadEngine:
    return ThreadEngine(launched.cpus, max_outage_s=config.failure.max_outage_s)


def device_of(launched: Launched, *, use_gpu: bool) -> torch.device:
    """The device of a process, its GPU by its number among the processes of its machine. Raises InputError if the process sees no
    GPU of this number."""
    if not use_gpu:
        return torch.device("cpu")
    seen = torch.cuda.device_count()
    if launched.local_rank >= seen:
        raise InputError(
            f"LOCAL_RANK={launched.local_rank} on {platform.node()}: this process sees {seen} GPUs; start one process for each "
            "GPU, and let each see all of its machine (srun --gpu-bind=none, no CUDA_VISIBLE_DEVICES)"
        )
    return torch.device("cuda", launched.local_rank)


def _work_of(
    assignment: Assignment, launched: Launched, meeting: Meeting, mailbox: StoreMailbox | LocalMailbox, signals: Signals
) -> dict[str, Any] | None:
    config = assignment.config
    device = device_of(launched, use_gpu=config.scaling.use_gpu)
    use_device(device)

    def run() -> dict[str, Any]:
        use_device(device)
        seat = Seat(
            rank=launched.rank,
            world_size=launched.world_size,
            device=device,
            node=platform.node(),
            cpus=launched.cpus,
            stopwatch=assignment.stopwatch(),
        )
        return work(assignment, seat, lambda: _process_group(config, launched, meeting, device))

    folder = assignment.folder if launched.rank == 0 else None
    return watched(run, config, folder, mailbox=mailbox, signals=signals)


@contextlib.contextmanager
def _process_group(config: TrainConfig, launched: Launched, meeting: Meeting, device: torch.device) -> Iterator[None]:
    distributed.init_process_group(
        store=meeting.group_store,
        rank=launched.rank,
        world_size=launched.world_size,
        **group_arguments(device, timeout_s=config.failure.max_outage_s + config.failure.collective_timeout_s),
    )
    try:
        yield
    except BaseException:
        # NCCL would wait for the others, which wait for this process; its end tells them.
        if device.type != "cuda":
            distributed.destroy_process_group()
        raise
    distributed.destroy_process_group()
