"""The models in a replica's memory, and how the replica changes from one to another while it answers."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, final

import numpy as np

from rayrec.config import InputError
from rayrec.data.columns import RawColumns, RawSparse
from rayrec.data.parsing import RawRows
from rayrec.metrics.binary import sigmoid
from rayrec.serve.counters import Counters
from rayrec.serve.requests import Body, RequestError
from rayrec.serve.responses import BatchScorer, ScoreResponse
from rayrec.serve.row_readers import Raw

if TYPE_CHECKING:
    from rayrec.inference.model import ServedModel

_log = logging.getLogger(__name__)
_SHADOW_BATCHES: Final = 8
"""Batches that may wait for the shadow model."""
_SHADOW_BYTES: Final = 64 << 20
"""Memory that these may take."""
_LOWEST_PRIORITY: Final = 19


@dataclass(frozen=True)
class Source:
    """Where a model lies, as it was at one time."""

    serial: int
    """Grows with every wish for a model, also for the same path."""
    path: str
    """Of a checkpoint or an export."""


@dataclass(frozen=True)
class Configured:
    """Models as an application's configuration names them."""

    model: str
    shadow: str | None = None


@dataclass(frozen=True)
class Wanted:
    """What all replicas shall serve."""

    generation: int
    """Grows with every change."""
    model: Source
    previous: Source | None = None
    """What to go back to."""
    shadow: Source | None = None
    configured: Configured | None = None
    """What the application's configuration named last."""


@dataclass(frozen=True)
class Status:
    """What a replica does."""

    model: Source | None = None
    version: str = ""
    preprocessor: str = ""
    shadow: Source | None = None
    shadow_version: str = ""
    failures: dict[int, str] = field(default_factory=dict)
    """Why models were not taken, by serial."""


@final
class ReplicaModels:
    """Answers with one model; the one before it is kept in memory, so that going back takes no time. Never more than these two
    are there, and a shadow model; while the next one is loaded, the one before is let go."""

    def __init__(self, load: Callable[[str], ServedModel], counters: Counters) -> None:
        """`load` opens a checkpoint or an export, see `open_served`."""
        self._load, self._counters = load, counters
        self._model: tuple[Source, BatchScorer] | None = None
        self._previous: tuple[Source, BatchScorer] | None = None
        self._shadow: tuple[Source, Shadow] | None = None
        self._failures: dict[int, str] = {}

    @property
    def ready(self) -> bool:
        return self._model is not None

    @property
    def model(self) -> ServedModel:
        assert self._model is not None, "a model is applied before anything is asked"
        return self._model[1].model

    def answer(self, bodies: Sequence[Body]) -> list[ScoreResponse | RequestError]:
        """In the order of the bodies, all by the same model."""
        assert self._model is not None, "a model is applied before anything is asked"
        answers, raw, logits = self._model[1].answer(bodies)
        shadow = self._shadow
        if shadow is not None and len(logits):
            shadow[1].offer(raw, logits)
        return answers

    def apply(self, wanted: Wanted) -> None:
        """Loads what is wanted and is not there, then changes over at once. What cannot be loaded, or takes other columns,
        changes nothing and is in `status`."""
        self._apply_model(wanted)
        self._apply_shadow(wanted.shadow)

    def status(self) -> Status:
        model, shadow = self._model, self._shadow
        return Status(
            model=model[0] if model else None,
            version=model[1].model.version if model else "",
            preprocessor=model[1].model.preprocessor_hash if model else "",
            shadow=shadow[0] if shadow else None,
            shadow_version=shadow[1].version if shadow else "",
            failures=dict(self._failures),
        )

    def close(self) -> None:
        self._apply_shadow(None)

    def _apply_model(self, wanted: Wanted) -> None:
        source, before = wanted.model, self._model
        if (before and before[0] == source) or source.serial in self._failures:
            return
        if self._previous and self._previous[0] == source:
            found = self._previous
        else:
            self._previous = None  # its memory is needed
            answerer = self._open(source)
            if answerer is None:
                return
            found = (source, answerer)
        self._model, self._previous = found, before
        self._counters.replicas.clear()
        told = found[1].model
        self._counters.replicas.labels(told.version, told.preprocessor_hash).set(1)
        if before:
            self._counters.swaps.labels("done").inc()

    def _apply_shadow(self, source: Source | None) -> None:
        before = self._shadow
        if (before[0] if before else None) == source or (source and source.serial in self._failures):
            return
        self._shadow = None
        if before:
            before[1].close()
        if source and (answerer := self._open(source)):
            self._shadow = (source, Shadow(answerer, self._counters))

    def _open(self, source: Source) -> BatchScorer | None:
        try:
            # Of its own counts none are of requests.
            answerer = BatchScorer(self._load(source.path), self._counters)
            if self._model:
                _require_same_columns(answerer.model, self._model[1].model)
            answerer.warm()
        except Exception as error:  # whatever is wrong with it, the one before goes on
            if not isinstance(error, InputError):
                _log.exception("%s was not loaded", source.path)
            self._failures[source.serial] = " ".join(f"{error}".split()) or type(error).__name__
            self._counters.swaps.labels("failed").inc()
            return None
        return answerer


def _require_same_columns(model: ServedModel, before: ServedModel) -> None:
    new, old = model.preprocessor.schema, before.preprocessor.schema
    if new != old:
        changed = [name for name, value in new.to_dict().items() if value != old.to_dict()[name]]
        raise InputError(
            f"{model.source}: its rows are not those of {before.source} (the schemas differ in {', '.join(changed)}), so "
            "clients would have to change; serve it at another port"
        )


@final
class Shadow:
    """Scores rows that were answered with another model, as far as it keeps up, and notes how far the scores differ."""

    def __init__(self, answerer: BatchScorer, counters: Counters) -> None:
        self._answerer, self._counters = answerer, counters
        self._batches: queue.Queue[tuple[Raw, np.ndarray] | None] = queue.Queue(_SHADOW_BATCHES)
        self._lock = threading.Lock()
        self._waiting_bytes = 0
        self._thread = threading.Thread(target=self._run, name="shadow", daemon=True)
        self._thread.start()

    @property
    def version(self) -> str:
        return self._answerer.model.version

    def offer(self, raw: Raw, logits: np.ndarray) -> None:
        """Never waits."""
        num_bytes = _num_bytes(raw)
        try:
            if self._waiting_bytes + num_bytes > _SHADOW_BYTES:
                raise queue.Full
            self._batches.put_nowait((raw, logits))
            self._add(num_bytes)
        except queue.Full:
            self._counters.shadow_dropped_rows.inc(len(logits))

    def _add(self, num_bytes: int) -> None:
        with self._lock:
            self._waiting_bytes += num_bytes

    def close(self) -> None:
        """What waits is left out."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._batches.get_nowait()
        self._batches.put(None)
        self._thread.join()

    def _run(self) -> None:
        # Of Linux, where a thread has a priority of its own: cores that answering needs are left to it.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
        while (batch := self._batches.get()) is not None:
            raw, logits = batch
            self._add(-_num_bytes(raw))
            try:
                scores = sigmoid(self._answerer.score(raw))
            except Exception:  # it must not harm what is answered
                _log.exception("the shadow model failed")
                self._counters.shadow_failures.inc()
                continue
            self._counters.shadow_rows.labels(self.version).inc(len(logits))
            difference = np.abs(scores - sigmoid(logits)).astype(np.float64)
            self._counters.shadow_score_difference.observe(difference)


def _num_bytes(raw: object) -> int:
    """Of all the arrays in it."""
    if isinstance(raw, np.ndarray):
        return raw.nbytes
    parts = (
        raw
        if isinstance(raw, tuple)
        else vars(raw).values()
        if isinstance(raw, RawRows | RawColumns | RawSparse)
        else ()
    )
    return sum(map(_num_bytes, parts))
