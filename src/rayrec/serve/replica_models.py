"""Models of a replica: joint scoring of requests, the response to each, and switches to other
models meanwhile.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias, final

import numpy as np
import orjson

from rayrec.config import InputError
from rayrec.data.encoding.clipping import ClipCounter
from rayrec.data.encoding.known_categories import OOVCounter, ids_by_row
from rayrec.data.features.lookups import current_tables
from rayrec.data.raw_block import RawBlock
from rayrec.metrics.binary import sigmoid
from rayrec.serve.control import DesiredState, ModelSource, Status
from rayrec.serve.counters import Counters
from rayrec.serve.histories import open_histories
from rayrec.serve.recommendations import RecommendBody, RecommendResponse, RequestRecommender
from rayrec.serve.requests import RequestBody, RequestError
from rayrec.serve.row_readers import Outcome, make_reader

if TYPE_CHECKING:
    from prometheus_client import Counter

    from rayrec.inference.model import ServedModel
    from rayrec.schema import Schema


@dataclass(frozen=True)
class ScoreResponse:
    """Scores of one request."""

    fields: Mapping[str, np.ndarray]
    """Answer fields of the heads, by name [rows, ...]."""
    unknown: np.ndarray
    """Number of unknown categories, int32 [rows, num_sparse]."""
    columns: tuple[str, ...]
    """Names of the sparse columns."""
    model: str
    preprocessor: str

    def to_json(self, *, columns: bool) -> bytes:
        """Return the response body. `columns` adds the names of the columns with unknown
        categories, row by row.
        """
        fields: dict[str, Any] = {
            **{name: _json_values(field) for name, field in self.fields.items()},
            "unknown": self.unknown.sum(axis=1, dtype=np.int32),
            "model": self.model,
            "preprocessor": self.preprocessor,
        }
        if columns:
            fields["unknown_columns"] = [
                [self.columns[i] for i in np.flatnonzero(row).tolist()] for row in self.unknown
            ]
        return orjson.dumps(fields, option=orjson.OPT_SERIALIZE_NUMPY)


def _json_values(field: np.ndarray) -> np.ndarray | list[Any]:
    """Return values that orjson takes: texts as a list."""
    return field.tolist() if field.dtype == object else field


@final
class BatchScorer:
    """Model with its request reader and counters. Call `answer` from one thread at a time."""

    def __init__(
        self,
        model: ServedModel,
        counters: Counters,
        *,
        histories: str | None = None,
    ) -> None:
        """Create a scorer. `histories` is the path of users' items, for a retrieval model. Raises
        InputError for unusable ones.
        """
        self.model = model
        self.recommender: RequestRecommender | None = None
        """Recommender of a retrieval model."""
        self.no_items = ""
        """Reason for its absence."""
        self._set_recommender(counters, histories)
        schema = model.preprocessor.schema
        self.contents = {table.name: table.content for table in schema.tables}
        """Content hash of each side table, by name."""
        self._reader = make_reader(schema)
        self._unknown = OOVCounter(model.preprocessor)
        self._clips = ClipCounter(model.preprocessor)
        self._columns = model.preprocessor.inputs.sparse
        self._tokens = functools.cache(functools.partial(ids_by_row, model.preprocessor))
        self._counters = counters
        self._unknown_counter = functools.cache(counters.unknown.labels)

    def _set_recommender(self, counters: Counters, histories: str | None) -> None:
        try:
            if self.model.preprocessor.schema.tokens == "hexadecimal":
                raise InputError("the model is of a log in Criteo's format, without lists of items")
            feature = self.model.recommender.feature
        except InputError as error:
            if histories is not None:
                raise InputError(f"histories: {error}") from None
            self.no_items = f"{error}"
            return
        schema = self.model.preprocessor.schema
        opened = None
        if histories is not None:
            needs_time = self.model.scorer.model.reads_request_time
            opened = open_histories(histories, schema, feature, needs_time=needs_time)
        self.recommender = RequestRecommender(self.model, counters, histories=opened)
        if not self.model.recommender.ids.is_known:
            _log.warning(
                "%s: its Preprocessor does not have the texts of column %s, so items are answered "
                "as tokens: integers as they are, texts as 64-bit hashes. Train it again.",
                self.model.source,
                feature,
            )

    def answer(
        self,
        bodies: Sequence[RequestBody],
    ) -> tuple[list[ScoreResponse | RequestError], RawBlock, np.ndarray]:
        """Return one answer per body, the rows of all valid bodies, and the values of their main
        head, such as logits.
        """
        start = time.perf_counter()
        raw, outcomes = self._reader.read(bodies)
        if not raw.rows:
            return (
                [outcome for outcome in outcomes if isinstance(outcome, RequestError)],
                raw,
                np.empty(0, np.float32),
            )
        encoded = self.model.preprocessor.encode(raw)
        heads = self.model.scorer.heads
        values = self.model.scorer.predict(encoded)
        fields = {
            name: field
            for head in heads
            for name, field in head.answer(values, self._tokens).items()
        }
        unknown = self._unknown.count(raw, encoded)
        answers = [self._answer(outcome, fields, unknown) for outcome in outcomes]
        self._count(
            raw.rows,
            unknown,
            self._clips.count(encoded.dense),
            time.perf_counter() - start,
        )
        return answers, raw, values[heads[0].name]

    def read(self, bodies: Sequence[RequestBody]) -> RawBlock:
        """Return the rows of all valid bodies, with lookups in this model's side tables."""
        raw, _ = self._reader.read(bodies)
        return raw

    def score(self, raw: RawBlock) -> np.ndarray:
        """Return the logits of parsed rows, float32 [rows]."""
        return self.model.score(self.model.preprocessor.encode(raw))

    def warm(self) -> None:
        """Score empty rows, so that the first request is not slowed down by initialization."""
        for num_rows in (1, 64):
            raw, _ = self._reader.read([RequestBody("json", num_rows, 0, rows=[{}] * num_rows)])
            encoded = self.model.preprocessor.encode(raw)
            self.model.scorer.predict(encoded)
            self._unknown.count(raw, encoded)
        if self.recommender is not None:
            self.recommender.warm()

    def _answer(
        self,
        outcome: Outcome,
        fields: Mapping[str, np.ndarray],
        unknown: np.ndarray,
    ) -> ScoreResponse | RequestError:
        if isinstance(outcome, RequestError):
            return outcome
        body_fields = {name: np.ascontiguousarray(field[outcome]) for name, field in fields.items()}
        for field in body_fields.values():
            if field.dtype == object:  # Texts
                continue
            if np.count_nonzero(np.isfinite(field)) < field.size:  # In 0.5 µs; `all` takes 2 µs
                row = int(np.isfinite(field).reshape(len(field), -1).all(axis=1).argmin())
                return RequestError(
                    422,
                    f"row {row} has no finite score; its numbers are too large",
                    row=row,
                )
        body_unknown = np.ascontiguousarray(unknown[outcome])
        return ScoreResponse(
            body_fields,
            body_unknown,
            self._columns,
            self.model.version,
            self.model.preprocessor_hash,
        )

    def _count(self, rows: int, unknown: np.ndarray, numbers: np.ndarray, seconds: float) -> None:
        self._row_counter.inc(rows)
        self._counters.batch_rows.observe(rows)
        self._counters.forward_seconds.observe(seconds)
        unknown_counts = unknown.sum(axis=0)
        for column in np.flatnonzero(unknown_counts).tolist():
            self._unknown_counter(self._columns[column]).inc(int(unknown_counts[column]))
        for (all_values, all_clipped), (values, clipped) in zip(
            self._clip_counters,
            numbers.tolist(),
            strict=True,
        ):
            all_values.inc(values)
            if clipped:
                all_clipped.inc(clipped)

    # Counters of labels are found once, since each look takes 2 µs, but not before the first batch.

    @functools.cached_property
    def _row_counter(self) -> Counter:
        return self._counters.rows.labels(self.model.version)

    @functools.cached_property
    def _clip_counters(self) -> list[tuple[Counter, Counter]]:
        """Counters of values and of clipped values, by column."""
        return [
            (self._counters.numbers.labels(name), self._counters.clipped.labels(name))
            for name in self._clips.names
        ]


_log = logging.getLogger(__name__)
RETRY_S: Final = 15.0
"""Seconds between attempts to load an accepted model."""
_SHADOW_BATCHES: Final = 8
"""Maximum batches in the queue of the shadow model."""
_SHADOW_BYTES: Final = 64 << 20
"""Maximum memory of that queue, in bytes."""
_BODY_FACTOR: Final = 16
"""Memory of an unparsed request body, as a multiple of its received bytes."""
_IDLE_PRIORITY: Final = 19


@dataclass(frozen=True)
class LoadedModel:
    """Model in memory, and the source that it was loaded from."""

    source: ModelSource
    trained: ServedModel
    """Model with the side tables of training."""
    scorer: BatchScorer
    """Scorer of the model with the source's tables."""


@dataclass(frozen=True)
class LoadFailure:
    source: ModelSource
    cause: str
    at_s: float
    """Time on the monotonic clock."""


# A replica's models, and the changes of their roles:
#
# Role      Filled by                                   Emptied by
# --------  ------------------------------------------  ------------------------------------------
# serving   `switch`, from standby.                     Never. `switch` makes the former standby.
# standby   `load` of the next model; `switch`.         `drop`, or a `load` or `switch` of others.
# shadow    `load` and `switch`, if one is desired.     `close`, or a change of the desired shadow.
@final
class ReplicaModels:
    """Models of a replica: serving, standby and shadow. Changes run one at a time and do not block
    requests.
    """

    def __init__(
        self,
        load: Callable[[str], ServedModel],
        counters: Counters,
        *,
        histories: str | None = None,
    ) -> None:
        """`load` opens a checkpoint or export, such as `open_served`. `histories` is the path of
        users' items.
        """
        self._open_model = load
        self._histories = histories
        self._counters = counters
        self.desired: DesiredState | None = None
        """Newest known desired models."""
        # Held by changes, which take long, so that they run one at a time. `answer` and `status`
        # do not wait for it: they read each role once, and a role is replaced as one value.
        self._changing = threading.Lock()
        self._serving: LoadedModel | None = None
        self._standby: LoadedModel | None = None
        """Next or previous model."""
        self._shadow: Shadow | None = None
        self._failure: LoadFailure | None = None
        """Last model that could not be loaded."""

    @property
    def ready(self) -> bool:
        return self._serving is not None

    @property
    def announced(self) -> bool:
        return self.desired is not None and self.desired.announced

    @property
    def scorer(self) -> BatchScorer:
        """Scorer of the served model. A switch replaces it at any time, so values that belong
        together are read from one.
        """
        assert self._serving is not None, "a model is loaded before anything is asked"
        return self._serving.scorer

    @property
    def model(self) -> ServedModel:
        return self.scorer.model

    def answer(self, bodies: Sequence[RequestBody]) -> list[ScoreResponse | RequestError]:
        """Score bodies, all with the same model. Returns one answer per body, in order."""
        serving = self._serving
        assert serving is not None, "a model is loaded before anything is asked"
        answers, raw, logits = serving.scorer.answer(bodies)
        shadow = self._shadow
        if shadow is not None and len(logits):
            # The rows have lookups in the served model's tables. A shadow model with others reads
            # the bodies again.
            if shadow.contents == serving.scorer.contents:
                shadow.offer(raw, logits)
            else:
                shadow.offer(bodies, logits)
        return answers

    def recommend(
        self,
        bodies: Sequence[RecommendBody],
    ) -> Sequence[RecommendResponse | RequestError]:
        """Recommend for bodies, all with the same model. Returns one answer per body, in order."""
        scorer = self.scorer
        if scorer.recommender is None:
            return [RequestError(404, scorer.no_items)] * len(bodies)
        return scorer.recommender.answer(bodies)

    def load(self, desired: DesiredState) -> str:
        """Load missing models as standby and shadow, without a switch. Returns why one cannot be
        served, else an empty string.
        """
        with self._changing:
            cause = self._load(desired, is_proposed=True)
            if cause:
                return cause
            return self._load_shadow(desired, is_proposed=True)

    def set_desired(self, desired: DesiredState) -> None:
        """Record the desired models, unless newer ones are known."""
        if self.desired is None or desired.rank >= self.desired.rank:
            self.desired = desired

    def switch(self) -> str:
        """Switch to the desired models, after loading missing ones. Returns why one cannot be
        served, else an empty string.
        """
        with self._changing:
            desired = self.desired
            assert desired is not None
            if cause := self._load(desired):
                return cause
            if not self._serves(desired.model):
                assert self._standby is not None
                # One assignment each: a request reads `_serving` once, so it has the old or the new
                # model.
                before, self._serving, self._standby = self._serving, self._standby, self._serving
                model = self._serving.scorer.model
                self._counters.replicas.clear()
                self._counters.replicas.labels(model.version, model.preprocessor_hash).set(1)
                self._count_tables(model)
                if before:
                    self._counters.swaps.labels(
                        "rolled_back" if desired.is_rollback else "done"
                    ).inc()
            self._drop_standby(keep=desired.previous)
            return self._load_shadow(desired)

    def _count_tables(self, model: ServedModel) -> None:
        """Set the gauge of side tables."""
        gauge = self._counters.tables
        gauge.clear()
        for name, content in model.tables.items():
            gauge.labels(name, content).set(1)

    def drop(self, rejected: DesiredState) -> None:
        """Free the memory of models that were not accepted."""
        with self._changing:
            if self._standby and self._standby.source == rejected.model:
                self._standby = None
            if self._shadow and self._shadow.source == rejected.shadow:
                self.close()

    @property
    def incomplete(self) -> bool:
        """Return whether a desired model is missing and has not failed recently."""
        shadow = self._shadow.source if self._shadow else None
        desired = self.desired
        assert desired is not None
        missing = None if self._serves(desired.model) else desired.model
        if missing is None and shadow == desired.shadow:
            return False
        failure = self._failure
        if failure is None or failure.source != (missing or desired.shadow):
            return True
        return time.monotonic() > failure.at_s + RETRY_S

    def status(self) -> Status:
        serving = self._serving
        shadow = self._shadow
        failure = self._failure
        model = serving.scorer.model if serving else None
        return Status(
            model=serving.source if serving else None,
            version=model.version if model else "",
            schema=model.preprocessor.schema if model else None,
            shadow=shadow.source if shadow else None,
            shadow_version=shadow.version if shadow else "",
            failed=failure.source if failure else None,
            cause=failure.cause if failure else "",
        )

    def close(self) -> None:
        """Stop the shadow model."""
        before, self._shadow = self._shadow, None
        if before:
            before.close()

    def _serves(self, source: ModelSource) -> bool:
        return self._serving is not None and self._serving.source == source

    def _drop_standby(self, *, keep: ModelSource | None) -> None:
        if self._standby and self._standby.source != keep:
            self._standby = None

    def _load(self, desired: DesiredState, *, is_proposed: bool = False) -> str:
        if self._serves(desired.model):
            return ""
        self._drop_standby(keep=desired.model)
        if self._standby is None:
            loaded = self._open(desired.model, desired, is_proposed=is_proposed)
            if isinstance(loaded, LoadFailure):
                return loaded.cause
            self._standby = loaded
        return ""

    def _load_shadow(self, desired: DesiredState, *, is_proposed: bool = False) -> str:
        if (self._shadow.source if self._shadow else None) == desired.shadow:
            return ""
        self.close()
        if desired.shadow is None:
            return ""
        loaded = self._open(desired.shadow, desired, is_proposed=is_proposed)
        if isinstance(loaded, LoadFailure):
            return loaded.cause
        self._shadow = Shadow(loaded, self._counters)
        return ""

    def _open(
        self,
        source: ModelSource,
        desired: DesiredState,
        *,
        is_proposed: bool,
    ) -> LoadedModel | LoadFailure:
        """Open a model of the desired ones, which may be only proposed. Returns the failure if it
        cannot be served.
        """
        schema = desired.schema
        if schema is None and self._serving:
            schema = self.model.preprocessor.schema
        is_first = desired.schema is None
        is_new = is_proposed and source.serial == desired.serial
        try:
            trained = self._opened_model(source, is_new=is_first or is_new)
            model = trained.with_tables(source.tables)
            histories = None if self._shadows(desired, source) else self._histories
            scorer = BatchScorer(model, self._counters, histories=histories)
            if schema is not None:
                _require_columns(scorer.model, schema)
            scorer.warm()
        except Exception as error:  # The old model continues in any case
            if not isinstance(error, InputError):
                _log.exception("Failed to load %s", source.path)
            self._counters.swaps.labels("failed").inc()
            cause = " ".join(f"{error}".split()) or type(error).__name__
            failure = LoadFailure(source, cause, time.monotonic())
            self._failure = failure
            return failure
        if self._failure and self._failure.source == source:
            self._failure = None
        return LoadedModel(source, trained, scorer)

    @staticmethod
    def _shadows(desired: DesiredState, source: ModelSource) -> bool:
        return source == desired.shadow and source != desired.model

    def _opened_model(self, source: ModelSource, *, is_new: bool) -> ServedModel:
        """Return the model of a source with the side tables of training. The served one is taken if
        it has the same weights. Of a new model, tables that are not swapped must be as in training.
        """
        serving = self._serving
        if serving is not None and serving.source.weights == source.weights:
            return serving.trained
        model = self._open_model(source.path)
        if is_new:
            _require_trained_tables(model, source)
        return model


# Content of a model's side tables, and what its files must be. A version has one content of each
# table, so that its answers do not depend on when a replica started:
#
#   start, new model        that of training     the same as in training; an export has a copy
#   swapped table           that of its file     read by the command, which pins the hash of the
#                                                content in the source
#   replica that starts     as accepted          not compared, if the content is built in the cache
#   later, rollback                              folder; else they must have it
def _require_trained_tables(model: ServedModel, source: ModelSource) -> None:
    """Check that the files of side tables have not changed since the training, except of swapped
    ones. An export has a copy of its tables. Raises InputError.
    """
    if model.kind == "export":
        return
    schema = model.preprocessor.schema
    swapped = {table.name for table in source.tables}
    current_tables(schema, {*schema.table_names} - swapped)


def _require_columns(model: ServedModel, schema: Schema) -> None:
    new = model.preprocessor.schema
    old = schema
    values = new.to_dict()
    changed = [
        name
        for name, value in old.to_dict().items()
        if value != values[name] and name != "tables" and not name.startswith("header")
    ]
    # Rows have the columns that formulas read, whatever the tables are, and times for timed ones.
    if old.has_timed_tables != new.has_timed_tables:
        changed.append("tables")
    # A model without an order rejects lines without a header, which clients notice. With another
    # order it would read them wrong.
    if old.line_forms and new.line_forms and _scored_lines(old) != _scored_lines(new):
        changed.append("header")
    if changed:
        raise InputError(
            f"{model.source}: rows do not match the served model (schemas differ in "
            f"{', '.join(changed)}), so clients would have to change. Serve it at another port."
        )


def _scored_lines(schema: Schema) -> list[list[str]]:
    """Return the columns that are read from each field of a line without a header, empty if
    none.
    """
    scored = schema.unlabelled().columns
    return [[name if name in scored else "" for name in form] for form in schema.line_forms]


_Rows: TypeAlias = RawBlock | Sequence[RequestBody]
"""Answered rows, or the bodies that have them."""


def _size_of(rows: _Rows) -> int:
    """Return the memory of rows in bytes, of bodies about."""
    if not isinstance(rows, Sequence):
        return rows.nbytes
    return _BODY_FACTOR * sum(body.num_bytes for body in rows)


@final
class Shadow:
    """Background scoring of answered rows with another model. Counts score differences, and drops
    rows when it is too slow.
    """

    def __init__(self, loaded: LoadedModel, counters: Counters) -> None:
        self.source = loaded.source
        self._answerer = loaded.scorer
        self._counters = counters
        # Bounded, so that a slow shadow costs memory for eight batches at most, and never delays an
        # answer.
        self._batches: queue.Queue[tuple[_Rows, np.ndarray] | None] = queue.Queue(_SHADOW_BATCHES)
        # Both the scoring thread and the shadow's thread change the number of bytes.
        self._lock = threading.Lock()
        self._waiting_bytes = 0
        # In a thread, since answers must not wait for a second model.
        self._thread = threading.Thread(target=self._run, name="shadow", daemon=True)
        self._thread.start()

    @property
    def version(self) -> str:
        return self._answerer.model.version

    @property
    def contents(self) -> Mapping[str, str | None]:
        """`BatchScorer.contents`."""
        return self._answerer.contents

    def offer(self, rows: _Rows, logits: np.ndarray) -> None:
        """Queue answered rows, or the bodies that have them, without waiting. Drops them if the
        queue is full.
        """
        num_bytes = _size_of(rows)
        try:
            if self._waiting_bytes + num_bytes > _SHADOW_BYTES:
                raise queue.Full
            self._batches.put_nowait((rows, logits))
            self._add(num_bytes)
        except queue.Full:
            self._counters.shadow_dropped_rows.inc(len(logits))

    def _add(self, num_bytes: int) -> None:
        with self._lock:
            self._waiting_bytes += num_bytes

    def close(self) -> None:
        """Stop the thread, and drop the queue."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._batches.get_nowait()
        # None ends the thread after the batch that it scores.
        self._batches.put(None)
        self._thread.join()

    def _run(self) -> None:
        # On Linux threads have separate priorities. The lowest leaves the cores to answering.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _IDLE_PRIORITY)
        while (batch := self._batches.get()) is not None:
            rows, logits = batch
            self._add(-_size_of(rows))
            try:
                if isinstance(rows, Sequence):
                    rows = self._answerer.read(rows)
                scores = sigmoid(self._answerer.score(rows))
                if len(scores) != len(logits):
                    raise ValueError(f"{len(scores)} of {len(logits)} rows can be read")
            except Exception:  # Must not affect answers
                _log.exception("Failed to score with the shadow model")
                self._counters.shadow_failures.inc()
                continue
            self._counters.shadow_rows.labels(self.version).inc(len(logits))
            self._counters.shadow_score_difference.observe(
                np.abs(scores - sigmoid(logits)).astype(np.float64)
            )
