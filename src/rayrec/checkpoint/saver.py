"""Saves while training continues: a copy in host memory, which a thread brings to storage, and the removal of what is old."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from rayrec import storage
from rayrec.checkpoint.communicator import Ranks, attempt, raise_worst
from rayrec.checkpoint.discovery import Checkpoint, committed, file_sizes, folder_of, torn
from rayrec.checkpoint.format import MANIFEST, DamagedError, UnreadableError, data_file, is_data_file
from rayrec.checkpoint.lease import Lease
from rayrec.checkpoint.plan import HostCopy, LocalTensors, make_plan
from rayrec.checkpoint.save_retry import Persistence, tolerated
from rayrec.checkpoint.writer import ExtraFiles, Source, Written, commit, write_rank
from rayrec.config import InputError

Log = Callable[[str, dict[str, Any]], None]

CLOSE_S = 30.0
"""For which `close` waits for a save under way: it is worth having, but others may be gone and never answer."""
_PATIENCE_S = 1800.0
"""For which ranks wait for each other, beside the outage that one of them may see: none writes for so long."""


@dataclass(frozen=True)
class _Job:
    """One save, from the copy on."""

    step: int
    folder: str
    tag: str
    """Of its data files: no other attempt at this step, of this process or another, has the same."""
    copy: HostCopy
    state: dict[str, Any]
    score: float | None
    begun_s: float = field(default_factory=time.monotonic)


@final
class Saver:
    """Saves a run's checkpoints in the background, one at a time, and removes those that retention does not keep.

    `begin`, `wait` and the making of a Saver are collective; all ranks see the same saves and the same failures. Costs host
    memory as large as what the rank writes, and a thread.
    """

    def __init__(
        self,
        run_folder: str,
        *,
        lease: Lease | None,
        retention: Retention,
        extra_files: Mapping[str, Source],
        max_outage_s: float,
        log: Log,
        sweep: bool = True,
        damaged: Collection[int] = (),
    ) -> None:
        """`lease`: rank 0's, None on others. `extra_files`: what belongs with the weights, by name in a checkpoint's folder: the
        content, or the path of a file that stays as it is; rank 0 copies them. `max_outage_s`: how long a save may fail for
        before the run ends. `log` is called in the thread too. `sweep`: remove torn saves of earlier attempts, in the thread.
        `damaged`: on rank 0, steps of checkpoints that a start has passed over; they go with the first later save."""
        self.last: Checkpoint | None = None
        """The newest one that this saver has committed."""
        self.written_bytes = 0
        """By all saves of this rank so far; grows while one is under way."""
        self.write_s = 0.0
        """Seconds that the last save took, from the copy to the manifest."""
        self._folder, self._lease, self._retention = run_folder, lease, retention
        self._extra_files = ExtraFiles(extra_files)
        self._max_outage_s, self._log, self._sweep = max_outage_s, log, sweep
        timeout_s = max_outage_s + _PATIENCE_S
        self._caller = Ranks.in_group_of_their_own(timeout_s=timeout_s)
        self._thread_ranks = Ranks.in_group_of_their_own(timeout_s=timeout_s)
        assert (lease is not None) == self._caller.first
        self._tag = self._caller.share(lease.name[:15] if lease else "")
        self._num_saves = 0
        self._scores: dict[int, float | None] = {}
        self._damaged = set(damaged)
        self._signature: Hashable = None
        self._copy: HostCopy | None = None
        self._failure: Exception | None = None
        self._idle, self._ended = threading.Event(), threading.Event()
        self._idle.set()
        self._stall_so_far: tuple[float, float | None] = (0.0, None)
        """Seconds of stalls that are over, and when the present one began; one value, since the thread reads it."""
        self._told_stall_s = 0.0
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        # A daemon: a rank that fails must be able to leave while the others are gone.
        self._thread = threading.Thread(target=self._work, name="checkpoint-save", daemon=True)
        self._thread.start()

    @property
    def stalled_s(self) -> float:
        """Seconds for which `begin` and `wait` have held up the caller so far, on this rank."""
        over_s, since_s = self._stall_so_far
        return over_s + (time.monotonic() - since_s if since_s is not None else 0.0)

    def begin(self, step: int, tensors: dict[str, Any], *, state: dict[str, Any], score: float | None) -> bool:
        """Begins to save, and returns when `tensors` may change again; collective.

        False where the save before is still under way on some rank: then nothing is done. `tensors`: name -> tensor,
        ShardedTensor or DTensor; `state`: plain JSON values of rank 0; `score`: None where these weights were not evaluated.
        Raises what the save before failed with.
        """
        with self._stall():
            busy = not self._idle.is_set()
            ready, failure = (None, None) if busy else attempt(lambda: self._ready(tensors, state))
            changed = ready is not None and ready[0].signature() != self._signature
            busy, changed, unfit = self._caller.any(busy, changed, failure is not None)
            if busy:
                return False
            self._raise_failure()
            if unfit:
                raise_worst(self._caller.gather_all(failure))
            assert ready is not None
            local, plain = ready
            if changed:
                self._make_copy(local)
            assert self._copy is not None
            self._copy.fill(local)
            self._num_saves += 1
            tag = f"{self._tag}-{self._num_saves:04d}"
            self._idle.clear()
            self._jobs.put(_Job(step, folder_of(self._folder, step), tag, self._copy, plain, score))
        return True

    def wait(self) -> None:
        """Returns when no save is under way; collective. Raises what the save before failed with."""
        with self._stall():
            self._idle.wait()
            self._raise_failure()

    def close(self) -> None:
        """Ends the thread, after the save under way but not after an outage. Raises nothing, and is not collective."""
        self._ended.set()
        self._jobs.put(None)
        self._thread.join(CLOSE_S)
        if self._copy is not None and not self._thread.is_alive():
            self._copy.free()
            self._copy = None

    def _ready(self, tensors: dict[str, Any], state: dict[str, Any]) -> tuple[LocalTensors, dict[str, Any]]:
        # The state goes through JSON at once: the caller may change it later, and what does not fit is found here.
        return LocalTensors(tensors), json.loads(json.dumps(state)) if self._caller.first else {}

    def _make_copy(self, local: LocalTensors) -> None:
        self._signature = None
        if self._copy is not None:
            self._copy.free()
            self._copy = None
        plan = make_plan(local, self._caller)
        self._copy = self._caller.together(lambda: HostCopy(plan, local))
        self._signature = local.signature()

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    @contextlib.contextmanager
    def _stall(self) -> Iterator[None]:
        self._stall_so_far = (self.stalled_s, time.monotonic())
        try:
            yield
        finally:
            self._stall_so_far = (self.stalled_s, None)

    # In the thread ----------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        if self._sweep and self._lease is not None:
            with tolerated(f"{self._folder}: torn saves are left"):
                sweep(self._folder, self._lease)
        while (job := self._jobs.get()) is not None:
            try:
                self._save(job)
            except Exception as error:  # of the ranks' group, or a defect: the caller is to know
                self._failure = error
            finally:
                self._idle.set()

    def _save(self, job: _Job) -> None:
        ranks = self._thread_ranks
        ranks.barrier()  # rank 0 is through with sweeping: it might have taken a file of this save for a torn one's
        causes: list[str] = []
        persistence = self._persistence(job, causes)
        written, failure = attempt(
            lambda: persistence.run(lambda: write_rank(job.folder, job.copy, rank=ranks.rank, tag=job.tag, wrote=self._count))
        )
        results = ranks.gather((written, failure, causes[:1]))
        outcome = ranks.share(attempt(lambda: self._commit(job, results, persistence, causes)) if ranks.first else None)
        assert outcome is not None
        _, failure = outcome
        if failure is not None:
            self._discard(job, ranks.rank)
            raise failure
        self.last = Checkpoint(job.folder)
        self.write_s = time.monotonic() - job.begun_s
        if ranks.first:
            self._clean(job, [part.file for part, _, _ in results if part is not None])

    def _count(self, size_bytes: int) -> None:
        self.written_bytes += size_bytes

    def _persistence(self, job: _Job, causes: list[str]) -> Persistence:
        def late(cause: str) -> None:
            if not causes:
                self._log("checkpoint_late", {"step": job.step, "cause": cause})
            causes.append(cause)

        return Persistence(
            place=job.folder,
            max_outage_s=self._max_outage_s,
            seed=f"{job.folder} {self._thread_ranks.rank}",
            ended=self._ended,
            late=late,
        )

    def _commit(
        self,
        job: _Job,
        results: list[tuple[Written | None, Exception | None, list[str]]],
        persistence: Persistence,
        causes: list[str],
    ) -> None:
        """On rank 0, with what all ranks have written."""
        elsewhere = [cause for _, _, told in results[1:] for cause in told]
        if elsewhere and not causes:
            persistence.late(elsewhere[0])  # the log of the others goes nowhere
        raise_worst([failure for _, failure, _ in results])
        written = [part for part, _, _ in results if part is not None]
        size_bytes = persistence.run(
            lambda: commit(
                job.folder,
                written,
                shapes=job.copy.plan.shapes,
                state=job.state,
                score=job.score,
                extra_files=self._extra_files.write,
                lease=self._lease,
            )
        )
        stalled_s = self.stalled_s
        fields = {
            "step": job.step,
            "path": job.folder,
            "bytes": size_bytes,
            "stall_s": stalled_s - self._told_stall_s,
            "write_s": time.monotonic() - job.begun_s,
        }
        self._told_stall_s = stalled_s
        self._log("checkpoint", fields)

    def _discard(self, job: _Job, rank: int) -> None:
        """Frees the space of a save that failed. The folder stays: another process may be writing to it by now."""
        with contextlib.suppress(OSError, InputError), storage.patience(0):
            storage.remove_file(storage.join(job.folder, data_file(rank, job.tag)))

    def _clean(self, job: _Job, referenced: list[str]) -> None:
        self._scores[job.step] = job.score
        self._damaged.discard(job.step)  # written again
        with tolerated(f"{self._folder}: checkpoints that could go are left"):
            assert self._lease is not None
            if self._lease.valid():
                remove_unreferenced(job.folder, referenced, tag=job.tag)
                prune(self._folder, self._retention, newest=job.step, scores=self._scores, damaged=self._damaged)


_logger = logging.getLogger(__name__)


def sweep(run_folder: str, lease: Lease) -> None:
    """Removes the folders of saves that were never committed, as long as the run is ours."""
    for folder in torn(run_folder):
        if lease.valid():
            storage.remove_folder(folder)


def prune(
    run_folder: str, retention: Retention, *, newest: int, scores: dict[int, float | None], damaged: Collection[int] = ()
) -> None:
    """Removes what retention does not keep, after step `newest` was committed. `scores` holds those known, by step, and is
    added to. `damaged`: steps that were passed over and not written again; they go, and stand in for no good one.

    Later steps than `newest` are left alone: a restart passed over them, and will come to write them again.
    """
    present, removed = {}, []
    for checkpoint in committed(run_folder):
        if checkpoint.step > newest:
            continue
        present[checkpoint.step] = checkpoint
        if checkpoint.step in damaged:
            removed.append(checkpoint.step)
        elif checkpoint.step not in scores:
            try:
                scores[checkpoint.step] = checkpoint.manifest()["score"]
            except UnreadableError:
                del present[checkpoint.step]  # it may be readable tomorrow
            except DamagedError:
                removed.append(checkpoint.step)  # no use to anyone, and was told when it was passed over
            except InputError:
                del present[checkpoint.step]  # of another version: not ours to judge
    known = [(step, scores[step]) for step in present if step in scores and step not in removed]
    for step in [*removed, *to_remove(known, retention, in_use={newest})]:
        # The manifest goes first: what is left by a crash in between is no checkpoint any more.
        storage.remove_file(storage.join(present[step].path, MANIFEST))
        storage.remove_folder(present[step].path)
        scores.pop(step, None)


def remove_unreferenced(folder: str, referenced: Iterable[str], *, tag: str) -> None:
    """Removes the data files of earlier attempts at the same step from a committed checkpoint; `tag` is this one's.

    Those of later tags stay: a successor of ours may be writing them.
    """
    for name in file_sizes(folder).keys() - set(referenced):
        if is_data_file(name) and tag_of(name) < tag:
            storage.remove_file(storage.join(folder, name))


def tag_of(name: str) -> str:
    """Of a data file, finished or not."""
    return name.split(".", maxsplit=1)[0].partition("-")[2]


@dataclass(frozen=True)
class Retention:
    """What is kept of a run's checkpoints, beside those in use."""

    num_to_keep: int = 2
    """Newest ones."""
    keep_best: int = 1
    """Those with the best scores."""
    keep_every: int | None = None
    """Steps whose multiples are kept for good; None: none."""


def to_remove(saved: Sequence[tuple[int, float | None]], retention: Retention, *, in_use: Collection[int]) -> list[int]:
    """The steps to remove, lowest first, of (step, score) of the checkpoints there are.

    Higher scores are better, of equal ones the later is; None (or NaN) was not evaluated and is never among the best.
    """
    newest = sorted(step for step, _ in saved)[-retention.num_to_keep :] if retention.num_to_keep else []
    scored = sorted((score, step) for step, score in saved if score is not None and not math.isnan(score))
    best = [step for _, step in scored[-retention.keep_best :]] if retention.keep_best else []
    kept = {*newest, *best, *in_use}
    return sorted(
        step for step, _ in saved if step not in kept and (retention.keep_every is None or step % retention.keep_every != 0)
    )
