"""The models in a replica's memory, and how the replica changes from one to another while it answers."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, final

import numpy as np

from rayrec.config import InputError
from rayrec.data.raw_block import RawBlock
from rayrec.metrics.binary import sigmoid
from rayrec.serve.counters import Counters
from rayrec.serve.protocol import ReplicaState, Source, Status, Wanted
from rayrec.serve.requests import Body, RequestError
from rayrec.serve.responses import BatchScorer, ScoreResponse

if TYPE_CHECKING:
    from rayrec.inference.model import ServedModel
    from rayrec.schema import Schema

_log = logging.getLogger(__name__)
_SHADOW_BATCHES: Final = 8
"""Batches that may wait for the shadow model."""
_SHADOW_BYTES: Final = 64 << 20
"""Memory that these may take."""
_LOWEST_PRIORITY: Final = 19


@final
class ReplicaModels:
    """Models of a replica. One answers; the next or the previous one is in memory too, and a shadow model. `load` is called by
    one thread at a time, all else by any."""

    def __init__(self, load: Callable[[str], ServedModel], counters: Counters) -> None:
        """`load` opens a checkpoint or an export, see `open_served`."""
        self._open_model, self._counters = load, counters
        self._lock = threading.Lock()
        self._state = ReplicaState()
        self._scorers: dict[Source, BatchScorer] = {}
        """Models of the state, all in memory."""
        self._serving: BatchScorer | None = None
        self._shadow: tuple[Source, Shadow | None] | None = None

    @property
    def ready(self) -> bool:
        return self._serving is not None

    @property
    def failed(self) -> bool:
        """Whether there is no model to serve, nor one that may be accepted."""
        return self._state.failed

    @property
    def model(self) -> ServedModel:
        assert self._serving is not None, "a model is applied before anything is asked"
        return self._serving.model

    def answer(self, bodies: Sequence[Body]) -> list[ScoreResponse | RequestError]:
        """In the order of the bodies, all by the same model."""
        assert self._serving is not None, "a model is applied before anything is asked"
        answers, raw, logits = self._serving.answer(bodies)
        shadow = self._shadow[1] if self._shadow else None
        if shadow is not None and len(logits):
            shadow.offer(raw, logits)
        return answers

    def hear(self, wanted: Wanted) -> None:
        """Switch to the accepted model at once if it is in memory. `load` loads what is missing."""
        with self._lock:
            self._enter(self._state.hear(wanted))

    def load(self, *, retry: bool = False) -> None:
        """Load all missing models. A model that cannot be loaded, or has other columns, changes nothing and is in `status`.
        `retry`: try again an accepted one that failed."""
        while True:
            with self._lock:
                self._enter(self._state.begin(retry=retry))
                source = self._state.loading
            if source is None:
                break
            retry = False
            found = self._open(source)
            with self._lock:
                if isinstance(found, str):
                    self._enter(self._state.finish(found))
                else:
                    self._scorers[source] = found
                    self._enter(self._state.finish(None))
        self._load_shadow()

    def apply(self, wanted: Wanted) -> None:
        """Change over to the wanted models; returns after they are loaded."""
        self.hear(wanted)
        self.load()

    def status(self) -> Status:
        with self._lock:
            state, model = self._state, self._serving.model if self._serving else None
        shadow = self._shadow
        return Status(
            model=state.model,
            version=model.version if model else "",
            preprocessor=model.preprocessor_hash if model else "",
            schema=model.preprocessor.schema if model else None,
            standby=state.standby,
            shadow=shadow[0] if shadow else None,
            shadow_version=shadow[1].version if shadow and shadow[1] else "",
            failures=state.failures,
        )

    def close(self) -> None:
        self._close_shadow()

    def _enter(self, state: ReplicaState) -> None:
        before, self._state = self._state.model, state
        self._scorers = {source: self._scorers[source] for source in (state.model, state.standby) if source}
        if state.model is None or state.model == before:
            return
        self._serving = self._scorers[state.model]
        model = self._serving.model
        self._counters.replicas.clear()
        self._counters.replicas.labels(model.version, model.preprocessor_hash).set(1)
        if before:
            self._counters.swaps.labels("done").inc()

    def _load_shadow(self) -> None:
        source = self._state.wanted.shadow if self._state.wanted else None
        before = self._shadow[0] if self._shadow else None
        if source == before or (source and source.request in self._state.failures):
            return
        self._close_shadow()
        if source is None:
            return
        found = self._open(source) if source.path else None
        if isinstance(found, str):
            with self._lock:
                self._state = self._state.fail(source, found)
        else:
            self._shadow = (source, Shadow(found, self._counters) if found else None)

    def _close_shadow(self) -> None:
        before, self._shadow = self._shadow, None
        if before and before[1]:
            before[1].close()

    def _open(self, source: Source) -> BatchScorer | str:
        """Return the opened model, or the cause why it cannot be served."""
        wanted = self._state.wanted
        schema = wanted.schema if wanted else None
        if schema is None and self._serving:
            schema = self._serving.model.preprocessor.schema
        try:
            # Of its own counts none are of requests.
            scorer = BatchScorer(self._open_model(source.path), self._counters)
            if schema is not None:
                _require_columns(scorer.model, schema)
            scorer.warm()
        except Exception as error:  # whatever is wrong with it, the one before goes on
            if not isinstance(error, InputError):
                _log.exception("%s was not loaded", source.path)
            self._counters.swaps.labels("failed").inc()
            return " ".join(f"{error}".split()) or type(error).__name__
        return scorer


def _require_columns(model: ServedModel, schema: Schema) -> None:
    new, old = model.preprocessor.schema.to_dict(), schema.to_dict()
    changed = [name for name, value in new.items() if value != old[name]]
    if changed:
        raise InputError(
            f"{model.source}: its rows are not those of the served model (the schemas differ in {', '.join(changed)}), so "
            "clients would have to change; serve it at another port"
        )


@final
class Shadow:
    """Scores rows that were answered with another model, as far as it keeps up, and notes how far the scores differ."""

    def __init__(self, answerer: BatchScorer, counters: Counters) -> None:
        self._answerer, self._counters = answerer, counters
        self._batches: queue.Queue[tuple[RawBlock, np.ndarray] | None] = queue.Queue(_SHADOW_BATCHES)
        self._lock = threading.Lock()
        self._waiting_bytes = 0
        self._thread = threading.Thread(target=self._run, name="shadow", daemon=True)
        self._thread.start()

    @property
    def version(self) -> str:
        return self._answerer.model.version

    def offer(self, raw: RawBlock, logits: np.ndarray) -> None:
        """Never waits."""
        num_bytes = raw.nbytes
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
            self._add(-raw.nbytes)
            try:
                scores = sigmoid(self._answerer.score(raw))
            except Exception:  # it must not harm what is answered
                _log.exception("the shadow model failed")
                self._counters.shadow_failures.inc()
                continue
            self._counters.shadow_rows.labels(self.version).inc(len(logits))
            difference = np.abs(scores - sigmoid(logits)).astype(np.float64)
            self._counters.shadow_score_difference.observe(difference)
