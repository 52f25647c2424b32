"""Requests for recommendations and their answers."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np
import orjson
import pyarrow as pa
import torch

from rayrec.data.encoded_rows import EncodedRows, JaggedIds
from rayrec.data.encoding.known_categories import ValueTokens
from rayrec.data.raw_block import RawBlock
from rayrec.serve.histories import (
    TIME,
    TIMES,
    USER,
    Histories,
    History,
    ItemTimes,
    user_column,
)
from rayrec.serve.requests import RequestBody, RequestError, parse_object, shorten
from rayrec.serve.row_readers import AnyReader, kind_of, token_text
from rayrec.workloads.recsys.candidates import candidate_rows
from rayrec.workloads.recsys.items.recommender import Recommender, TopItems

if TYPE_CHECKING:
    from rayrec.inference.model import ServedModel
    from rayrec.serve.config import ServeConfig
    from rayrec.serve.counters import Counters

HISTORY: Final = "history"
"""Field of a request's row with its items in chronological order."""
FIELDS: Final = ("rows", "k", "exclude_seen", "exclude", "among")
DEFAULT_K: Final = 20
MAX_IDS: Final = 1_000_000
"""Maximum number of ids in the lists of a request."""
MAX_ANSWERS: Final = 1_000_000
"""Maximum number of rows times k of a request."""
POPULARITY: Final = "popularity"
_ITEM_BYTES: Final = 16
"""Bytes of an item in a JSON answer: its id and score."""


@final
@dataclass(frozen=True)
class RecommendBody:
    """Request for recommendations, of which the lists of ids are not parsed."""

    rows: list[Any]
    received_bytes: int
    k: int = DEFAULT_K
    exclude_seen: bool = True
    exclude: list[Any] | None = None
    """Ids that each row must not get, a list a row."""
    among: list[Any] | None = None
    """Ids that a row may get, a list a row, or one list for all. None: all ids."""

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    @property
    def num_bytes(self) -> int:
        """Number of received bytes, and about those of the items in the answer."""
        return self.received_bytes + _ITEM_BYTES * self.k * len(self.rows)


def open_recommendation(content: bytes, *, config: ServeConfig) -> RecommendBody:
    """Check the outline of a request's JSON. Raises RequestError."""
    parsed = parse_object(content, fields=FIELDS)
    rows = parsed["rows"]
    if not rows:
        raise RequestError(400, "the request has no rows", field="rows")
    if len(rows) > config.max_rows:
        raise RequestError(
            413,
            f"{len(rows)} rows in one request, more than the limit of {config.max_rows}; send "
            "them in several requests",
        )
    k = parsed.get("k", min(DEFAULT_K, config.max_k))
    if type(k) is not int or not 1 <= k <= config.max_k:
        raise RequestError(400, f"k must be an integer from 1 to {config.max_k}", field="k")
    if k * len(rows) > MAX_ANSWERS:
        raise RequestError(
            413,
            f"{len(rows)} rows of {k} items are more than {MAX_ANSWERS} items; send fewer rows",
        )
    exclude_seen = parsed.get("exclude_seen", True)
    if type(exclude_seen) is not bool:
        raise RequestError(400, "exclude_seen must be true or false", field="exclude_seen")
    exclude = parsed.get("exclude")
    if exclude is not None:
        exclude = _lists_of_rows(exclude, "exclude", len(rows))
    among = parsed.get("among")
    if type(among) is list and not any(type(each) is list for each in among):
        among = [among]
    elif among is not None:
        among = _lists_of_rows(among, "among", len(rows))
    return RecommendBody(rows, len(content), k, exclude_seen, exclude, among)


def _lists_of_rows(value: Any, field: str, rows: int) -> list[Any]:
    """Return a request's lists, null as empty ones. Raises RequestError unless there is one a
    row.
    """
    if type(value) is not list or any(type(each) not in (list, type(None)) for each in value):
        raise RequestError(400, f"{field} must have a list of ids for each row", field=field)
    if len(value) != rows:
        raise RequestError(
            400,
            f"{field} must have a list for each of {rows} rows, got {len(value)}",
            field=field,
        )
    return [each or [] for each in value]


@final
@dataclass(frozen=True)
class RecommendResponse:
    """Items of one request's rows."""

    items: list[list[Any]]
    """Users' ids of each row, the best first."""
    scores: list[np.ndarray]
    """Their scores, float32 [items] each."""
    fallback: list[str | None]
    """Source of each answer in place of the model, None for the model."""
    model: str
    preprocessor: str

    def to_json(self) -> bytes:
        return orjson.dumps(
            {
                "items": self.items,
                "scores": self.scores,
                "fallback": self.fallback,
                "model": self.model,
                "preprocessor": self.preprocessor,
            },
            option=orjson.OPT_SERIALIZE_NUMPY,
        )


@dataclass(frozen=True)
class _Rows:
    """Parsed rows of one request."""

    body: RecommendBody
    raw: RawBlock
    excluded: tuple[JaggedIds, JaggedIds]
    """Lists of items that the rows must not get, as candidate numbers, -1 for other items: those in
    `exclude`, and unless they may be repeated all items of the histories.
    """
    among: JaggedIds | None
    """Lists of items that the rows may get, as candidate numbers, or one for all rows. None: all
    items.
    """

    @property
    def num_items(self) -> int:
        """Number of items in all lists."""
        lists = [*self.excluded] if self.among is None else [*self.excluded, self.among]
        return sum(len(each.values) for each in lists)

    def allowed(self, row: int) -> np.ndarray | None:
        """Return the candidates that a row may get, ascending, int32 [items]. None: all."""
        if self.among is None:
            return None
        if len(self.among.lengths) == 1:
            return self._allowed_in_all
        return _candidates(self.among.cut(row, row + 1))

    @cached_property
    def _allowed_in_all(self) -> np.ndarray:
        assert self.among is not None
        return _candidates(self.among)


# All rows of a batch are encoded and searched together. Requests with an allow-list are searched
# alone, because it masks scores:
#
#   JSON        rows -> AnyReader -> RawBlock; history -> tokens, which are the list of items of a
#               next-item model, and of which all are left out; ids -> candidate numbers
#   times       of items, for models that read them -> seconds between the items
#   users       of --histories -> tokens and seconds, as if they were in the request
#   search      RawBlock -> ids -> queries -> items
#   fallback    rows without a known item or a known category -> the most frequent items
@final
class RequestRecommender:
    """Recommender with its request parser and counters. Call `answer` from one thread at a
    time.
    """

    def __init__(
        self,
        model: ServedModel,
        counters: Counters,
        *,
        histories: Histories | None = None,
    ) -> None:
        """Create a recommender of a model. Raises InputError if it cannot recommend."""
        self.model = model
        self._recommender: Recommender = model.recommender
        self._counters = counters
        self._histories = histories
        self._schema = model.preprocessor.schema
        self._reader = AnyReader(self._schema)
        self._user = user_column(self._schema)
        self._columns = set(self._schema.unlabelled().columns)
        self._user_tokens = ValueTokens(self._user, self._schema)
        self._item_tokens = ValueTokens(self._recommender.feature, self._schema)
        self._aligned = [
            name
            for name in self._schema.lists
            if self._schema.feature(name).aligned_with == self._recommender.feature
        ]
        self._ages = self._recommender.ages
        self._times = ItemTimes(reads_request_time=self._recommender.reads_request_time)

    def answer(self, bodies: Sequence[RecommendBody]) -> list[RecommendResponse | RequestError]:
        """Return one answer per body, in order."""
        answers: list[RecommendResponse | RequestError] = []
        for group in _groups(self._outcome(body) for body in bodies):
            answers += self._answered(group)
        return answers

    def _outcome(self, body: RecommendBody) -> _Rows | RequestError:
        try:
            return self._parsed(body)
        except RequestError as error:
            return error

    def _answered(
        self,
        outcomes: Sequence[_Rows | RequestError],
    ) -> list[RecommendResponse | RequestError]:
        """Return the answers of parsed requests, and the errors of others, in order."""
        start = time.perf_counter()
        parsed = [outcome for outcome in outcomes if isinstance(outcome, _Rows)]
        if not parsed:
            return [outcome for outcome in outcomes if isinstance(outcome, RequestError)]
        answers = iter(self._answers(parsed))
        rows = sum(each.raw.rows for each in parsed)
        self._counters.rows.labels(self.model.version).inc(rows)
        self._counters.batch_rows.observe(rows)
        self._counters.forward_seconds.observe(time.perf_counter() - start)
        return [
            outcome if isinstance(outcome, RequestError) else next(answers) for outcome in outcomes
        ]

    def warm(self) -> None:
        """Answer an empty row, so that the first request is not slowed down by initialization."""
        answers = self._answers([self._parsed(RecommendBody([{HISTORY: []}], 0))])
        assert isinstance(answers[0], RecommendResponse)

    # -- rows of a request

    def _parsed(self, body: RecommendBody) -> _Rows:
        """Parse the rows and lists of a request. Raises RequestError."""
        _check_number_of_ids(body)
        for number, row in enumerate(body.rows):
            if type(row) is not dict:
                message = f"row {number} is {kind_of(row)}, not an object"
                raise RequestError(400, message, row=number)
        rows = [self._columns_of(row, number) for number, row in enumerate(body.rows)]
        json_body = RequestBody("json", len(rows), body.received_bytes, rows=rows)
        raw, (outcome,) = self._reader.read([json_body])
        if isinstance(outcome, RequestError):
            raise outcome
        history = self._histories_of(body.rows)
        if self._recommender.is_list:
            raw = self._with_history(raw, history)
        among = None
        if body.among is not None:
            among = self._numbers(self._tokens(body.among, "among"))
        exclude = self._numbers(self._tokens(body.exclude or [[]] * len(rows), "exclude"))
        seen = self._numbers(history)
        if not body.exclude_seen:
            seen = seen.last(0)
        return _Rows(body, raw, (exclude, seen), among)

    def _columns_of(self, row: dict[str, Any], number: int) -> dict[str, Any]:
        """Return the fields of a row that are columns of the log, for the reader."""
        feature = self._recommender.feature
        ignored = {HISTORY, USER, self._user} - self._columns
        if self._user in self._columns and USER in row:
            row = {self._user: row[USER], **row}
        if self._recommender.is_list:
            ignored |= {HISTORY, TIMES, TIME, feature}
            for column, field in ((feature, HISTORY), (self._ages, TIMES)):
                if column in row and column not in (HISTORY, TIMES):
                    raise RequestError(
                        400,
                        f"row {number} has a column {shorten(column)}; send its items as {field}",
                        row=number,
                        field=shorten(column),
                    )
        columns = {name: value for name, value in row.items() if name not in ignored}
        # The reader compares the places of categories with those of the items
        if any(name in columns for name in self._aligned):
            columns[feature] = row.get(HISTORY)
        return columns

    def _histories_of(self, rows: Sequence[dict[str, Any]]) -> JaggedIds:
        """Return the tokens of the rows' items: those in `history`, else those of the user, with
        the seconds between them if the model reads times.
        """
        lists = []
        for number, row in enumerate(rows):
            values = row.get(HISTORY)
            if values is not None and type(values) is not list:
                message = f"row {number}: {HISTORY} is {kind_of(values)}, not a list"
                raise RequestError(400, message, row=number, field=HISTORY)
            lists.append(values or [])
        tokens, is_id = self._read(lists, HISTORY)
        sizes = [len(values) for values in lists]
        gaps = None
        if self._ages is not None:
            gaps = self._times.gaps(rows, sizes, is_id)
        requested = JaggedIds(tokens, _lengths(sizes, is_id), gaps)
        named = [number for number, row in enumerate(rows) if row.get(HISTORY) is None]
        if self._histories is None or not named:
            return requested
        return self._with_stored(requested, self._histories, rows, named)

    def _with_stored(
        self,
        requested: JaggedIds,
        histories: Histories,
        rows: Sequence[dict[str, Any]],
        named: Sequence[int],
    ) -> JaggedIds:
        """Return the items of rows with the stored ones of those that name a user. Raises
        RequestError if there are too many.
        """
        stored = self._items_of_users(histories, rows, named)
        count = len(requested.values) + sum(len(history.tokens) for history in stored)
        # Of any length, the history of one user is answered
        if count > MAX_IDS and len(rows) > 1:
            raise RequestError(
                413,
                f"the histories of these users have {count} items, more than the limit of "
                f"{MAX_IDS} in one request; send fewer rows",
            )
        lists = [requested.cut(row, row + 1) for row in range(len(rows))]
        all_gaps: Sequence[np.ndarray | None] = [None] * len(named)
        if self._ages is not None:
            all_gaps = self._times.stored(rows, dict(zip(named, stored, strict=True)))
        for number, history, gaps in zip(named, stored, all_gaps, strict=True):
            lengths = np.array([len(history.tokens)], np.int32)
            lists[number] = JaggedIds(history.tokens, lengths, gaps)
        return JaggedIds.concatenated(lists)

    def _items_of_users(
        self,
        histories: Histories,
        rows: Sequence[dict[str, Any]],
        named: Sequence[int],
    ) -> list[History]:
        """Return the items of the users that some rows name."""
        texts = []
        for number in named:
            user = rows[number].get(self._user, rows[number].get(USER))
            # A column of the model with that name may have lists, which name no user
            is_user = self._user not in self._schema.lists
            texts.append(token_text(user, USER, number) if is_user else None)
        tokens, has_user = self._user_tokens.read(pa.array(texts, pa.large_string()))
        all_histories = iter([histories.find(token) for token in tokens.tolist()])
        unknown = History(np.zeros(0, np.uint64))
        return [(next(all_histories) if has else None) or unknown for has in has_user.tolist()]

    def _read(self, lists: Sequence[list[Any]], field: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of the ids in each row's list, uint64 [ids], and which values are ids,
        bool [values].
        """
        texts = [
            token_text(value, field, number)
            for number, values in enumerate(lists)
            for value in values
        ]
        return self._item_tokens.read(pa.array(texts, pa.large_string()))

    def _tokens(self, lists: Sequence[list[Any]], field: str) -> JaggedIds:
        """Return the tokens of the ids in each row's list."""
        tokens, is_id = self._read(lists, field)
        return JaggedIds(tokens, _lengths([len(values) for values in lists], is_id))

    def _numbers(self, tokens: JaggedIds) -> JaggedIds:
        """Return the candidate numbers of tokens, -1 for unknown ones."""
        return JaggedIds(self._recommender.lookup.numbers(tokens.values), tokens.lengths)

    def _with_history(self, raw: RawBlock, items: JaggedIds) -> RawBlock:
        """Return rows with their newest items, as many as the model reads."""
        name = self._recommender.feature
        length = self._schema.feature(name).max_length
        names = [each for each in raw.schema.sparse if each in raw.schema.lists]
        lists = list(raw.lists)
        lists[names.index(name)] = items if length is None else items.last(length)
        return replace(raw, lists=tuple(lists))

    def _with_aligned(self, encoded: EncodedRows) -> EncodedRows:
        """Return rows whose lists that are aligned with the items are as long as these. Rows with a
        history alone have missing values there.
        """
        inputs = self.model.preprocessor.inputs
        ids = list(encoded.ids)
        items = ids[inputs.sparse.index(self._recommender.feature)]
        for name in self._aligned:
            number = inputs.sparse.index(name)
            lists = ids[number]
            assert isinstance(items, JaggedIds)
            assert isinstance(lists, JaggedIds)
            is_equal = lists.lengths == items.lengths
            missing = self.model.preprocessor.sparse[number].missing_id
            values = np.full(len(items.values), missing, lists.values.dtype)
            values[np.repeat(is_equal, items.lengths)] = lists.values[
                np.repeat(is_equal, lists.lengths)
            ]
            ids[number] = JaggedIds(values, items.lengths)
        return replace(encoded, ids=ids) if self._aligned else encoded

    # -- answers

    def _answers(self, parsed: Sequence[_Rows]) -> list[RecommendResponse | RequestError]:
        """Return the answers of requests, whose rows are encoded together."""
        raw = RawBlock.concatenated([each.raw for each in parsed])
        encoded = self._with_aligned(self.model.preprocessor.encode(raw))
        queries = self._recommender.queries(encoded)
        has_input = self._has_input(raw, encoded)
        answers: list[RecommendResponse | RequestError] = []
        starts = np.cumsum([0, *(each.raw.rows for each in parsed)]).tolist()
        tops = self._tops(parsed, starts, queries)
        for number, (each, top) in enumerate(zip(parsed, tops, strict=True)):
            rows = slice(starts[number], starts[number + 1])
            is_finite = queries[rows].isfinite().all(1)
            if not bool(is_finite.all()):
                row = int(is_finite.int().argmin())
                message = f"row {row} has no finite score; its numbers are too large"
                answers.append(RequestError(422, message, row=row))
            else:
                answers.append(self._response(each, top, has_input[rows]))
        return answers

    def _tops(
        self,
        parsed: Sequence[_Rows],
        starts: Sequence[int],
        queries: torch.Tensor,
    ) -> list[TopItems]:
        """Return the best items of each request."""
        if len(parsed) > 1 and any(each.among is None for each in parsed):
            together = [number for number, each in enumerate(parsed) if each.among is None]
        else:
            together = []
        tops = self._tops_together(
            [parsed[number] for number in together],
            [queries[starts[number] : starts[number + 1]] for number in together],
        )
        results = dict(zip(together, tops, strict=True))
        for number, each in enumerate(parsed):
            if number not in results:
                results[number] = self._recommender.top(
                    queries[starts[number] : starts[number + 1]],
                    each.body.k,
                    excluded=each.excluded,
                    allowed=each.among,
                )
        return [results[number] for number in range(len(parsed))]

    def _tops_together(
        self,
        parsed: Sequence[_Rows],
        queries: Sequence[torch.Tensor],
    ) -> list[TopItems]:
        """Return the best items of requests without an allow-list, from one search."""
        if not parsed:
            return []
        results = self._recommender.top(
            torch.cat(list(queries)),
            max(each.body.k for each in parsed),
            excluded=[
                JaggedIds.concatenated(lists)
                for lists in zip(*(each.excluded for each in parsed), strict=True)
            ],
        )
        tops = []
        start = 0
        for each in parsed:
            stop = start + each.raw.rows
            k = each.body.k
            tops.append(TopItems(results.numbers[start:stop, :k], results.scores[start:stop, :k]))
            start = stop
        return tops

    def _response(self, rows: _Rows, top: TopItems, has_input: np.ndarray) -> RecommendResponse:
        """Return the answer to one request. `has_input` tells which rows the model knows something
        of, bool [rows].
        """
        fallback: list[str | None] = [None] * len(has_input)
        if self._recommender.has_popularity:
            for row in np.flatnonzero(~has_input).tolist():
                self._put_popular(rows, top, row)
                fallback[row] = POPULARITY
        items = self._recommender.lists(top)[0].to_pylist()
        counts = (top.numbers >= 0).sum(1).tolist()
        scores = [values[:count] for values, count in zip(top.scores, counts, strict=True)]
        return RecommendResponse(
            items,
            scores,
            fallback,
            self.model.version,
            self.model.preprocessor_hash,
        )

    def _put_popular(self, rows: _Rows, top: TopItems, row: int) -> None:
        """Replace the items of a row by as many of the most frequent ones."""
        excluded = [lists.cut(row, row + 1).values for lists in rows.excluded]
        numbers, scores = self._recommender.popular(
            rows.body.k,
            excluded=np.concatenate(excluded),
            allowed=rows.allowed(row),
        )
        top.numbers[row, : len(numbers)] = numbers
        top.scores[row, : len(numbers)] = scores

    def _has_input(self, raw: RawBlock, encoded: EncodedRows) -> np.ndarray:
        """Return which rows the model knows something of, bool [rows]. A model of lists knows an
        item of those that it reads, or a user with a vector, another one a category or a number.
        """
        inputs = self.model.preprocessor.inputs
        feature = self._recommender.feature
        names = inputs.sparse
        if self._recommender.is_list:
            names = self._recommender.described_by
        else:
            names = tuple(name for name in names if name != feature)
        has_input = np.zeros(raw.rows, bool)
        for name in names:
            ids = encoded.ids[inputs.sparse.index(name)]
            candidates = self._candidates[name]
            if isinstance(ids, JaggedIds):
                row_of = np.repeat(np.arange(raw.rows), ids.lengths)
                has_input[row_of[candidates.contains(ids.values)]] = True
            else:
                has_input |= candidates.contains(ids).reshape(raw.rows)
        if not self._recommender.is_list:
            for name in raw.schema.dense:
                has_input |= ~raw.is_missing(name)
        return has_input

    @cached_property
    def _candidates(self) -> Mapping[str, Any]:
        """Table rows of each column's known categories."""
        return dict(candidate_rows(self.model.preprocessor))


# A batch has a bounded number of rows, but any of its requests may ask for the largest k, and name
# users with long histories.
def _groups(outcomes: Iterable[_Rows | RequestError]) -> Iterator[list[_Rows | RequestError]]:
    """Yield requests that are answered together, with the memory of a large one: their rows times
    the largest k, and their items.
    """
    group: list[_Rows | RequestError] = []
    rows = 0
    k = 0
    items = 0
    for outcome in outcomes:
        if isinstance(outcome, _Rows):
            rows += outcome.raw.rows
            k = max(k, outcome.body.k)
            items += outcome.num_items
            if group and (rows * k > MAX_ANSWERS or items > MAX_IDS):
                yield group
                group = []
                rows = outcome.raw.rows
                k = outcome.body.k
                items = outcome.num_items
        group.append(outcome)
    yield group


def _lengths(sizes: Sequence[int], is_id: np.ndarray) -> np.ndarray:
    """Return the number of ids among the values of each list, int32 [lists]."""
    row_of = np.repeat(np.arange(len(sizes)), sizes)[is_id]
    return np.bincount(row_of, minlength=len(sizes)).astype(np.int32)


def _candidates(lists: JaggedIds) -> np.ndarray:
    """Return the distinct candidates in lists, ascending, int32 [candidates]."""
    return np.unique(lists.values[lists.values >= 0])


def _check_number_of_ids(body: RecommendBody) -> None:
    """Raise RequestError if the lists of a request have too many ids."""
    lists = [*(body.exclude or ()), *(body.among or ())]
    lists += [row.get(HISTORY) for row in body.rows if type(row) is dict]
    count = sum(len(each) for each in lists if type(each) is list)
    if count > MAX_IDS:
        raise RequestError(
            413,
            f"{count} ids in one request, more than the limit of {MAX_IDS}; send fewer",
        )
