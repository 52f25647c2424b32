"""The models in a replica's memory, and how the replica changes from one to another while it answers."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, final

import numpy as np

from rayrec.config import InputError
from rayrec.data.raw_block import RawBlock
from rayrec.metrics.binary import sigmoid
from rayrec.serve.counters import Counters
from rayrec.serve.requests import Body, RequestError
from rayrec.serve.responses import BatchScorer, ScoreResponse

if TYPE_CHECKING:
    from rayrec.inference.model import ServedModel
    from rayrec.schema import Schema

_log = logging.getLogger(__name__)
RETRY_S: Final = 15.0
"""Seconds between attempts to load an accepted model that could not be loaded."""
_SHADOW_BATCHES: Final = 8
"""Batches that may wait for the shadow model."""
_SHADOW_BYTES: Final = 64 << 20
"""Memory that these may take."""
_LOWEST_PRIORITY: Final = 19


@dataclass(frozen=True)
class Source:
    """Path of a model at the time of a change. Replicas that loaded equal sources have the same model."""

    serial: int
    """Serial of the change that named the path."""
    path: str
    """Checkpoint or export."""


@dataclass(frozen=True)
class Configured:
    """Models in an application's configuration, as written there."""

    model: str
    shadow: str | None = None


@dataclass(frozen=True)
class Wanted:
    """Models that all replicas should have. Every replica has loaded them before they are accepted."""

    serial: int
    """Number of the change, larger than that of the change before. 0: the configuration of the application."""
    model: Source
    """Model that answers requests."""
    previous: Source | None = None
    """Model before this one, to go back to."""
    shadow: Source | None = None
    configured: Configured | None = None
    """Newest configuration of the application."""
    schema: Schema | None = None
    """Columns that clients send. None until a replica serves the first model."""

    @property
    def rank(self) -> tuple[int, bool]:
        """Order of what replicas know: the highest is the newest."""
        return self.serial, self.schema is not None


@dataclass(frozen=True)
class Status:
    """Models of a replica."""

    model: Source | None = None
    version: str = ""
    schema: Schema | None = None
    """Columns of the model."""
    shadow: Source | None = None
    shadow_version: str = ""
    failed: Source | None = None
    """Model that could not be loaded last."""
    cause: str = ""
    """Why it could not."""


@final
class ReplicaModels:
    """Models of a replica. One answers; the next or the previous one is in memory too, and a shadow model. Changes wait for each
    other; requests do not wait for them."""

    def __init__(self, load: Callable[[str], ServedModel], counters: Counters) -> None:
        """`load` opens a checkpoint or an export, see `open_served`."""
        self._open_model, self._counters = load, counters
        self.wanted: Wanted | None = None
        """Newest that is known."""
        self._changing = threading.Lock()
        self._serving: tuple[Source, BatchScorer] | None = None
        self._standby: tuple[Source, BatchScorer] | None = None
        """Loaded model that does not answer: the next or the previous one."""
        self._shadow: tuple[Source, Shadow] | None = None
        self._failure: tuple[Source, str, float] | None = None
        """Model that could not be loaded last, the cause, and when."""

    @property
    def ready(self) -> bool:
        return self._serving is not None

    @property
    def model(self) -> ServedModel:
        assert self._serving is not None, "a model is loaded before anything is asked"
        return self._serving[1].model

    def answer(self, bodies: Sequence[Body]) -> list[ScoreResponse | RequestError]:
        """In the order of the bodies, all by the same model."""
        assert self._serving is not None, "a model is loaded before anything is asked"
        answers, raw, logits = self._serving[1].answer(bodies)
        shadow = self._shadow
        if shadow is not None and len(logits):
            shadow[1].offer(raw, logits)
        return answers

    def load(self, wanted: Wanted) -> str:
        """Load the models that are missing, in the memory of the standby and the shadow. Returns why one cannot be loaded, or has
        other columns; what answers stays."""
        with self._changing:
            return self._load(wanted) or self._load_shadow(wanted)

    def hear(self, wanted: Wanted) -> None:
        """Take in what all replicas should have, unless something newer is known."""
        if self.wanted is None or wanted.rank >= self.wanted.rank:
            self.wanted = wanted

    def switch(self) -> str:
        """Answer by the wanted model, and load what is missing first. Returns why a model cannot be loaded."""
        with self._changing:
            wanted = self.wanted
            assert wanted is not None
            if cause := self._load(wanted):
                return cause
            if not self._serves(wanted.model):
                assert self._standby is not None
                before, self._serving, self._standby = self._serving, self._standby, self._serving
                model = self._serving[1].model
                self._counters.replicas.clear()
                self._counters.replicas.labels(model.version, model.preprocessor_hash).set(1)
                if before:
                    self._counters.swaps.labels("done").inc()
            self._drop_standby(keep=wanted.previous)
            return self._load_shadow(wanted)

    def drop(self, refused: Wanted) -> None:
        """Free the memory of models that were not accepted."""
        with self._changing:
            if self._standby and self._standby[0] == refused.model:
                self._standby = None
            if self._shadow and self._shadow[0] == refused.shadow:
                self._close_shadow()

    @property
    def incomplete(self) -> bool:
        """Whether a wanted model is missing, and was not tried in vain a moment ago."""
        shadow, wanted = self._shadow[0] if self._shadow else None, self.wanted
        assert wanted is not None
        missing = None if self._serves(wanted.model) else wanted.model
        if missing is None and shadow == wanted.shadow:
            return False
        failed, _, at_s = self._failure or (None, "", 0.0)
        return failed != (missing or wanted.shadow) or time.monotonic() > at_s + RETRY_S

    def status(self) -> Status:
        serving, shadow, failure = self._serving, self._shadow, self._failure
        model = serving[1].model if serving else None
        return Status(
            model=serving[0] if serving else None,
            version=model.version if model else "",
            schema=model.preprocessor.schema if model else None,
            shadow=shadow[0] if shadow else None,
            shadow_version=shadow[1].version if shadow else "",
            failed=failure[0] if failure else None,
            cause=failure[1] if failure else "",
        )

    def close(self) -> None:
        self._close_shadow()

    def _serves(self, source: Source) -> bool:
        return self._serving is not None and self._serving[0] == source

    def _drop_standby(self, *, keep: Source | None) -> None:
        if self._standby and self._standby[0] != keep:
            self._standby = None

    def _load(self, wanted: Wanted) -> str:
        if self._serves(wanted.model):
            return ""
        self._drop_standby(keep=wanted.model)
        if self._standby is None:
            found = self._open(wanted.model, wanted.schema)
            if isinstance(found, str):
                return found
            self._standby = (wanted.model, found)
        return ""

    def _load_shadow(self, wanted: Wanted) -> str:
        if (self._shadow[0] if self._shadow else None) == wanted.shadow:
            return ""
        self._close_shadow()
        if wanted.shadow is None:
            return ""
        found = self._open(wanted.shadow, wanted.schema)
        if isinstance(found, str):
            return found
        self._shadow = (wanted.shadow, Shadow(found, self._counters))
        return ""

    def _close_shadow(self) -> None:
        before, self._shadow = self._shadow, None
        if before:
            before[1].close()

    def _open(self, source: Source, schema: Schema | None) -> BatchScorer | str:
        """Return the opened model, or the cause why it cannot be served."""
        if schema is None and self._serving:
            schema = self.model.preprocessor.schema
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
            cause = " ".join(f"{error}".split()) or type(error).__name__
            self._failure = (source, cause, time.monotonic())
            return cause
        if self._failure and self._failure[0] == source:
            self._failure = None
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
