"""Scoring of several requests in one batch, and the response of each."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import numpy as np
import orjson

from rayrec.data.encoding.known_categories import OOVCounter, tokens_by_id
from rayrec.data.raw_block import RawBlock
from rayrec.serve.counters import Counters
from rayrec.serve.requests import RequestBody, RequestError
from rayrec.serve.row_readers import Outcome, make_reader

if TYPE_CHECKING:
    from rayrec.inference.model import ServedModel


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
        """Return the response body. `columns` adds the names of the columns with unknown categories, row by row."""
        fields: dict[str, Any] = {
            **self.fields,
            "unknown": self.unknown.sum(axis=1, dtype=np.int32),
            "model": self.model,
            "preprocessor": self.preprocessor,
        }
        if columns:
            fields["unknown_columns"] = [[self.columns[i] for i in np.flatnonzero(row).tolist()] for row in self.unknown]
        return orjson.dumps(fields, option=orjson.OPT_SERIALIZE_NUMPY)


@final
class BatchScorer:
    """Model with its request reader and counters. Call `answer` from one thread at a time."""

    def __init__(self, model: ServedModel, counters: Counters) -> None:
        self.model = model
        self._reader = make_reader(model.preprocessor.schema)
        self._unknown = OOVCounter(model.preprocessor)
        self._columns = model.preprocessor.inputs.sparse
        self._tokens = functools.cache(functools.partial(tokens_by_id, model.preprocessor))
        self._counters = counters

    def answer(self, bodies: Sequence[RequestBody]) -> tuple[list[ScoreResponse | RequestError], RawBlock, np.ndarray]:
        """Return one answer per body, the rows of all valid bodies, and the values of their main head, such as logits."""
        start = time.perf_counter()
        raw, outcomes = self._reader.read(bodies)
        if not raw.rows:
            return [outcome for outcome in outcomes if isinstance(outcome, RequestError)], raw, np.empty(0, np.float32)
        encoded = self.model.preprocessor.encode(raw)
        heads, values = self.model.scorer.heads, self.model.scorer.predict(encoded)
        fields = {name: field for head in heads for name, field in head.answer(values, self._tokens).items()}
        unknown = self._unknown.count(raw, encoded)
        answers = [self._answer(outcome, fields, unknown) for outcome in outcomes]
        self._count(raw.rows, unknown, time.perf_counter() - start)
        return answers, raw, values[heads[0].name]

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

    def _answer(self, outcome: Outcome, fields: Mapping[str, np.ndarray], unknown: np.ndarray) -> ScoreResponse | RequestError:
        if isinstance(outcome, RequestError):
            return outcome
        body_fields = {name: np.ascontiguousarray(field[outcome]) for name, field in fields.items()}
        for field in body_fields.values():
            bad = np.flatnonzero(~np.isfinite(field).reshape(len(field), -1).all(axis=1))
            if len(bad):
                return RequestError(422, f"row {bad[0]} has no finite score; its numbers are too large", row=int(bad[0]))
        body_unknown = np.ascontiguousarray(unknown[outcome])
        return ScoreResponse(body_fields, body_unknown, self._columns, self.model.version, self.model.preprocessor_hash)

    def _count(self, rows: int, unknown: np.ndarray, seconds: float) -> None:
        self._counters.rows.labels(self.model.version).inc(rows)
        self._counters.batch_rows.observe(rows)
        self._counters.forward_seconds.observe(seconds)
        of_columns = unknown.sum(axis=0)
        for column in np.flatnonzero(of_columns).tolist():
            self._counters.unknown.labels(self._columns[column]).inc(int(of_columns[column]))
