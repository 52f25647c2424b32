"""Background saves: copy tensors to host memory, write them to storage in a thread, apply the
retention policy.
"""

from __future__ import annotations

import contextlib
import json
import math
import queue
import threading
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, final

from rayrec import storage
from rayrec.checkpoint.communicator import Communicator, attempt, raise_most_severe
from rayrec.checkpoint.discovery import (
    Checkpoint,
    committed,
    file_sizes,
    step_folder,
    uncommitted_folders,
)
from rayrec.checkpoint.format import (
    MANIFEST,
    DamagedError,
    UnreadableError,
    data_file,
    is_data_file,
)
from rayrec.checkpoint.lease import Lease
from rayrec.checkpoint.plan import HostCopy, LocalTensors, make_plan
from rayrec.checkpoint.save_retry import RetryPolicy, SaveStats, log_cleanup_errors
from rayrec.checkpoint.writer import ExtraFiles, Source, WrittenFile, commit, write_rank
from rayrec.config import InputError

Log = Callable[[str, dict[str, Any]], None]

CLOSE_S = 30.0
"""Seconds that `close` waits for the current save. The save is valuable, but other ranks may be
gone and never answer.
"""
_PATIENCE_S = 1800.0
"""Seconds that ranks wait for each other, in addition to an outage on one of them."""


@dataclass(frozen=True)
class _Job:
    """One save after its copy to host memory."""

    step: int
    folder: str
    tag: str
    """Tag of its data files, unique over all attempts at this step, in any process."""
    copy: HostCopy
    state: dict[str, Any]
    score: float | None
    start_s: float = field(default_factory=time.monotonic)


# A save, on three kinds of threads. Collectives of the caller and of the saver threads have a
# group each, because the two overlap in any order.
#
#   caller, every rank     begin: agree on busy, changed and failed (one all-reduce)
#                          fill the copy in host memory, then training continues
#   saver, every rank      wait for rank 0's removal of old files, write the rank's file
#                          gather the results on rank 0
#   saver, rank 0          write the extra files, check the lease, write the manifest: the save is
#                          complete from this moment on
#   saver, every rank      receive the outcome; remove the rank's file if it failed
#   saver, rank 0          apply the retention policy
#
# A failure stays in `_failure` until the next `begin` or `wait`, which raise it on every rank. A
# rank that was killed leaves a folder without a manifest, which the next attempt removes.
@final
class Saver:
    """Background checkpoint writer of a run: one save at a time, then removal according to the
    retention policy. The constructor, `begin` and `wait` are collective; all ranks see equal saves.
    Needs a thread and a copy of the rank's data.
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
        damaged: Collection[int] = (),
        stats: SaveStats | None = None,
    ) -> None:
        """Create a saver and start its thread. `lease` is None on all ranks except 0. `extra_files`
        are stored with the weights, by name: content, or path of a constant file, copied by rank 0.
        The run fails after a storage outage of `max_outage_s` seconds. The thread also calls `log`,
        and removes uncommitted saves of earlier attempts. `damaged`:
        steps of damaged checkpoints skipped at the start, on rank 0. The first later save removes
        them. The thread updates `stats`.
        """
        self.last: Checkpoint | None = None
        """Newest checkpoint committed by this saver."""
        self.stats = stats or SaveStats()
        self._folder = run_folder
        self._lease = lease
        self._retention = retention
        self._extra_files = ExtraFiles(extra_files)
        self._max_outage_s = max_outage_s
        self._log = log
        timeout_s = max_outage_s + _PATIENCE_S
        # Ranks arrive late if one of them waits out an outage, so the groups' timeout covers it.
        self._caller = Communicator.with_new_group(timeout_s=timeout_s)
        self._thread_ranks = Communicator.with_new_group(timeout_s=timeout_s)
        assert (lease is not None) == self._caller.first
        self._tag = self._caller.broadcast(lease.name[:15] if lease else "")
        self._num_saves = 0
        self._scores: dict[int, float | None] = {}
        self._damaged = set(damaged)
        self._signature: Hashable = None
        self._copy: HostCopy | None = None
        self._failure: Exception | None = None
        # Set while no save runs. The saver thread sets it, also after a failure, or `wait` would
        # block.
        self._idle = threading.Event()
        # Set by `close`. It ends the pauses between retries, so that a process with an unreachable
        # store ends within seconds.
        self._ended = threading.Event()
        self._idle.set()
        self._stall_so_far: tuple[float, float | None] = (0.0, None)
        """Seconds of finished stalls, and the start of the current one. A single value, because the
        thread reads it.
        """
        self._told_stall_s = 0.0
        # Holds at most one job and None, which ends the thread. `begin` reports busy instead of
        # adding a second one.
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        # Daemon, so that a failed rank can exit while the others are gone.
        self._thread = threading.Thread(target=self._work, name="checkpoint-save", daemon=True)
        self._thread.start()

    @property
    def stalled_s(self) -> float:
        """Seconds that `begin` and `wait` have blocked the caller so far, on this rank."""
        total_s, since_s = self._stall_so_far
        return total_s + (time.monotonic() - since_s if since_s is not None else 0.0)

    def begin(
        self, step: int, tensors: dict[str, Any], *, state: dict[str, Any], score: float | None
    ) -> bool:
        """Start a save, and return once `tensors` may change; collective. `score` is None if these
        weights were not evaluated; see `rayrec.checkpoint.save`. Returns False if a save still runs
        on some rank. Raises the failure of the previous save.
        """
        with self._stall():
            busy = not self._idle.is_set()
            ready, failure = (None, None) if busy else attempt(lambda: self._ready(tensors, state))
            changed = ready is not None and ready[0].signature() != self._signature
            # One collective for all three decisions. Every rank must take the same branch below,
            # since each branch has collectives of its own.
            busy, changed, unfit = self._caller.any(busy, changed, failure is not None)
            if busy:
                return False
            self._raise_failure()
            if unfit:
                raise_most_severe(self._caller.all_gather(failure))
            assert ready is not None
            local, plain = ready
            if changed:
                self._signature = None
                if self._copy is not None:
                    self._copy.free()
                    self._copy = None
                # Shapes or placement changed, as after a resize. The old copy goes first: host
                # memory may not have room for two.
                plan = make_plan(local, self._caller)
                self._copy = self._caller.run_on_all_ranks(lambda: HostCopy(plan, local.data))
                self._signature = local.signature()
            assert self._copy is not None
            self._copy.fill(local.data)
            self._num_saves += 1
            tag = f"{self._tag}-{self._num_saves:04d}"
            self._idle.clear()
            self._jobs.put(
                _Job(step, step_folder(self._folder, step), tag, self._copy, plain, score)
            )
        return True

    def wait(self) -> None:
        """Wait until no save is running; collective. Raises the failure of the previous save."""
        with self._stall():
            self._idle.wait()
            self._raise_failure()

    def close(self) -> None:
        """End the thread after the current save, without waiting out an outage. Raises nothing. Not
        collective.
        """
        self._ended.set()
        self._jobs.put(None)
        # The thread reads the copy until it ends. If it does not end in time, the copy is left to
        # the process's end, because freed memory must not be written to storage.
        self._thread.join(CLOSE_S)
        if self._copy is not None and not self._thread.is_alive():
            self._copy.free()
            self._copy = None

    def _ready(
        self, tensors: dict[str, Any], state: dict[str, Any]
    ) -> tuple[LocalTensors, dict[str, Any]]:
        # Serializing the state here copies it before the caller changes it, and detects invalid
        # values early.
        return LocalTensors(tensors), json.loads(json.dumps(state)) if self._caller.first else {}

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

    def _work(self) -> None:
        if self._lease is not None:
            with log_cleanup_errors(f"Cannot remove uncommitted saves in {self._folder}"):
                for folder in uncommitted_folders(self._folder):
                    if self._lease.valid():
                        storage.remove_folder(folder)
        while (job := self._jobs.get()) is not None:
            try:
                self._save(job)
            except Exception as error:  # a process group error or a bug, which the caller must see
                self._failure = error
            finally:
                self._idle.set()

    def _save(self, job: _Job) -> None:
        ranks = self._thread_ranks
        # wait for rank 0's cleanup, which could mistake a file of this save for an uncommitted one
        ranks.barrier()
        causes: list[str] = []
        policy = self._retry_policy(job, causes)
        write = partial(
            write_rank, job.folder, job.copy, rank=ranks.rank, tag=job.tag, on_write=self._count
        )
        file, failure = attempt(lambda: policy.run(write))
        # Every rank takes part, even if its own file failed. Otherwise the others would wait for
        # the timeout.
        results = ranks.gather((file, failure, causes[:1]))
        outcome = ranks.broadcast(
            attempt(lambda: self._commit(job, results, policy, causes)) if ranks.first else None
        )
        assert outcome is not None
        _, failure = outcome
        if failure is not None:
            # The folder stays, because another process may write to it now.
            with contextlib.suppress(OSError, InputError), storage.retry_timeout(0):
                storage.remove_file(storage.join(job.folder, data_file(ranks.rank, job.tag)))
            raise failure
        self.last = Checkpoint(job.folder)
        self.stats.write_s = time.monotonic() - job.start_s
        if ranks.first:
            self._clean(job, [part.file for part, _, _ in results if part is not None])

    def _count(self, size_bytes: int) -> None:
        self.stats.written_bytes += size_bytes

    def _retry_policy(self, job: _Job, causes: list[str]) -> RetryPolicy:
        def on_failure(cause: str) -> None:
            if not causes:
                self._log("checkpoint_late", {"step": job.step, "cause": cause})
            causes.append(cause)

        return RetryPolicy(
            path=job.folder,
            max_outage_s=self._max_outage_s,
            ended=self._ended,
            on_failure=on_failure,
        )

    def _commit(
        self,
        job: _Job,
        results: list[tuple[WrittenFile | None, Exception | None, list[str]]],
        policy: RetryPolicy,
        causes: list[str],
    ) -> None:
        """Commit the save on rank 0, given the results of all ranks."""
        elsewhere = [cause for _, _, late in results[1:] for cause in late]
        if elsewhere and not causes:
            policy.on_failure(elsewhere[0])  # only rank 0 writes a log
        raise_most_severe([failure for _, failure, _ in results])
        files = [part for part, _, _ in results if part is not None]
        save = partial(
            commit, job.folder, files, shapes=job.copy.plan.shapes, state=job.state, score=job.score
        )
        size_bytes = policy.run(
            lambda: save(extra_files=self._extra_files.write, lease=self._lease)
        )
        stalled_s = self.stalled_s
        fields = {
            "step": job.step,
            "path": job.folder,
            "bytes": size_bytes,
            "stall_s": stalled_s - self._told_stall_s,
        }
        self._told_stall_s = stalled_s
        self._log("checkpoint", {**fields, "write_s": time.monotonic() - job.start_s})

    def _clean(self, job: _Job, referenced: list[str]) -> None:
        self._scores[job.step] = job.score
        self._damaged.discard(job.step)  # overwritten by this save
        with log_cleanup_errors(f"Cannot remove old checkpoints in {self._folder}"):
            assert self._lease is not None
            if self._lease.valid():
                # Data files of earlier attempts at this step. A newer attempt may be writing files
                # with later tags.
                for name in file_sizes(job.folder).keys() - set(referenced):
                    if (
                        is_data_file(name)
                        and name.split(".", maxsplit=1)[0].partition("-")[2] < job.tag
                    ):
                        storage.remove_file(storage.join(job.folder, name))
                apply_retention(
                    self._folder,
                    self._retention,
                    newest=job.step,
                    scores=self._scores,
                    damaged=self._damaged,
                )


def apply_retention(
    run_folder: str,
    retention: Retention,
    *,
    newest: int,
    scores: dict[int, float | None],
    damaged: Collection[int] = (),
) -> None:
    """Remove checkpoints that the retention policy does not keep, after step `newest` was
    committed. Leaves steps after `newest`: a restart has skipped them and will write them again.
    Extends `scores`, the known scores by step. Removes `damaged` steps, which were skipped and not
    written again, and do not count as kept.
    """
    present = {}
    removed = []
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
                del present[checkpoint.step]  # may be readable later
            except DamagedError:
                removed.append(checkpoint.step)  # useless, and logged when it was skipped
            except InputError:
                del present[checkpoint.step]  # another version, which this one cannot judge
    scored = [(step, scores[step]) for step in present if step in scores and step not in removed]
    for step in [*removed, *to_remove(scored, retention, in_use={newest})]:
        # The manifest is removed first, so that a crash in between leaves no checkpoint.
        storage.remove_file(storage.join(present[step].path, MANIFEST))
        storage.remove_folder(present[step].path)
        scores.pop(step, None)


@dataclass(frozen=True)
class Retention:
    """Retention policy for a run's checkpoints, in addition to those in use."""

    num_to_keep: int = 2
    """Number of newest checkpoints to keep."""
    keep_best: int = 1
    """Number of checkpoints with the best scores to keep."""
    keep_every: int | None = None
    """Interval of checkpoints to keep permanently, in steps. None keeps none permanently."""


def to_remove(
    saved: Sequence[tuple[int, float | None]], retention: Retention, *, in_use: Collection[int]
) -> list[int]:
    """Return the steps to remove, ascending, given (step, score) of all checkpoints. Higher scores
    are better; of equal scores the later step wins. Scores of None or NaN (not evaluated) are never
    best.
    """
    newest = (
        sorted(step for step, _ in saved)[-retention.num_to_keep :] if retention.num_to_keep else []
    )
    scored = sorted(
        (score, step) for step, score in saved if score is not None and not math.isnan(score)
    )
    best = [step for _, step in scored[-retention.keep_best :]] if retention.keep_best else []
    permanent = [
        step
        for step, _ in saved
        if retention.keep_every is not None and step % retention.keep_every == 0
    ]
    return sorted({step for step, _ in saved} - {*newest, *best, *permanent, *in_use})
