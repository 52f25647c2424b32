"""Requests for recommendations and their answers."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
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
from rayrec.metrics.item_ranks import ItemNumbers
from rayrec.serve.histories import USER, Histories, user_column
from rayrec.serve.requests import RequestBody, RequestError, parse_object, shorten
from rayrec.serve.row_readers import AnyReader, kind_of, token_text
from rayrec.workloads.recsys.candidates import candidate_rows
from rayrec.workloads.recsys.items.recommender import ItemLists, Recommender, TopItems

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


@final
@dataclass(frozen=True)
class RecommendBody:
    """Request for recommendations, of which the lists of ids are not parsed."""

    rows: list[Any]
    num_bytes: int
    """Number of received bytes."""
    k: int = DEFAULT_K
    exclude_seen: bool = True
    exclude: list[Any] | None = None
    """Ids that each row must not get, a list a row."""
    among: list[Any] | None = None
    """Ids that a row may get, a list a row. None: all."""

    @property
    def num_rows(self) -> int:
        return len(self.rows)


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
        among = [among] * len(rows)
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
    seen: ItemLists
    """All items of the rows' histories."""
    exclude: ItemLists
    among: ItemLists | None


# All rows of a batch are encoded and searched together. Requests with an allow-list are searched
# alone, because it masks scores:
#
#   JSON        rows -> AnyReader -> RawBlock; history -> tokens, which are the list of items of a
#               next-item model, and of which all are left out; ids -> candidate numbers
#   users       of --histories -> tokens, as if they were in the request
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

    def answer(self, bodies: Sequence[RecommendBody]) -> list[RecommendResponse | RequestError]:
        """Return one answer per body, in order."""
        start = time.perf_counter()
        outcomes: list[_Rows | RequestError] = []
        for body in bodies:
            try:
                outcomes.append(self._parsed(body))
            except RequestError as error:
                outcomes.append(error)
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
        json_body = RequestBody("json", len(rows), body.num_bytes, rows=rows)
        raw, (outcome,) = self._reader.read([json_body])
        if isinstance(outcome, RequestError):
            raise outcome
        tokens, lengths = self._histories_of(body.rows)
        if self._recommender.is_list:
            raw = self._with_history(raw, JaggedIds(tokens, lengths.astype(np.int32)))
        seen = ItemLists.from_lengths(self._recommender.lookup.numbers(tokens), lengths)
        among = None
        if body.among is not None:
            among = self._item_lists(body.among, "among")
        exclude = self._item_lists(body.exclude or [[]] * len(rows), "exclude")
        return _Rows(body, raw, seen, exclude, among)

    def _columns_of(self, row: dict[str, Any], number: int) -> dict[str, Any]:
        """Return the fields of a row that are columns of the log, for the reader."""
        feature = self._recommender.feature
        ignored = {HISTORY, USER, self._user} - self._columns
        if self._recommender.is_list:
            ignored |= {HISTORY, feature}
            if feature in row and feature != HISTORY:
                raise RequestError(
                    400,
                    f"row {number} has a column {shorten(feature)}; send its items as {HISTORY}",
                    row=number,
                    field=shorten(feature),
                )
        return {name: value for name, value in row.items() if name not in ignored}

    def _histories_of(self, rows: Sequence[dict[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of the rows' items, uint64 [items], and their number in each row, int64
        [rows]: those in `history`, else those of the user.
        """
        lists = []
        for number, row in enumerate(rows):
            values = row.get(HISTORY)
            if values is not None and type(values) is not list:
                message = f"row {number}: {HISTORY} is {kind_of(values)}, not a list"
                raise RequestError(400, message, row=number, field=HISTORY)
            lists.append(values or [])
        tokens, lengths = self._tokens(lists, HISTORY)
        if self._histories is None:
            return tokens, lengths
        named = [number for number, row in enumerate(rows) if row.get(HISTORY) is None]
        if not named:
            return tokens, lengths
        histories = np.split(tokens, np.cumsum(lengths)[:-1])
        stored = self._items_of_users(self._histories, rows, named)
        for number, items in zip(named, stored, strict=True):
            histories[number] = items
            lengths[number] = len(items)
        return np.concatenate(histories), lengths

    def _items_of_users(
        self,
        histories: Histories,
        rows: Sequence[dict[str, Any]],
        named: Sequence[int],
    ) -> list[np.ndarray]:
        """Return the tokens of the items of the users that some rows name, uint64 [items] each."""
        texts = []
        for number in named:
            user = rows[number].get(self._user, rows[number].get(USER))
            texts.append(None if type(user) is list else token_text(user, USER, number))
        tokens, has_user = self._user_tokens.read(pa.array(texts, pa.large_string()))
        unknown = np.zeros(0, np.uint64)
        stored_items = iter(histories.items(token) for token in tokens.tolist())
        items = []
        for has in has_user.tolist():
            stored = next(stored_items) if has else None
            items.append(unknown if stored is None else np.asarray(stored))
        return items

    def _tokens(self, lists: Sequence[list[Any]], field: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of the ids in each row's list, uint64 [ids], and their number in each
        row, int64 [rows].
        """
        texts = [
            token_text(value, field, number)
            for number, values in enumerate(lists)
            for value in values
        ]
        array = pa.array(texts, pa.large_string())
        tokens, is_id = self._item_tokens.read(array)
        sizes = [len(values) for values in lists]
        row_of = np.repeat(np.arange(len(lists)), sizes)[is_id]
        return tokens, np.bincount(row_of, minlength=len(lists))

    def _item_lists(self, lists: Sequence[list[Any]], field: str) -> ItemLists:
        """Return the candidate numbers of lists of ids. Unknown ones are none."""
        tokens, lengths = self._tokens(lists, field)
        return ItemLists.from_lengths(self._recommender.lookup.numbers(tokens), lengths)

    def _with_history(self, raw: RawBlock, items: JaggedIds) -> RawBlock:
        """Return rows with their newest items, as many as the model reads."""
        name = self._recommender.feature
        length = self._schema.feature(name).max_length
        names = [each for each in raw.schema.sparse if each in raw.schema.lists]
        lists = list(raw.lists)
        lists[names.index(name)] = items if length is None else items.last(length)
        return replace(raw, lists=tuple(lists))

    # -- answers

    def _answers(self, parsed: Sequence[_Rows]) -> list[RecommendResponse | RequestError]:
        """Return the answers of requests, whose rows are encoded together."""
        raw = RawBlock.concatenated([each.raw for each in parsed])
        encoded = self.model.preprocessor.encode(raw)
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
                rows = each.raw.rows
                results[number] = self._recommender.top(
                    queries[starts[number] : starts[number + 1]],
                    each.body.k,
                    excluded=_excluded(each),
                    allowed=None if each.among is None else each.among.between(0, rows),
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
        excluded = []
        first = 0
        for each in parsed:
            items = _excluded(each)
            excluded.append(ItemNumbers(items.rows + first, items.numbers))
            first += each.raw.rows
        largest = max(each.body.k for each in parsed)
        results = self._recommender.top(
            torch.cat(list(queries)),
            largest,
            excluded=ItemNumbers.joined(*excluded),
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
        items = self._recommender.lists(top)[0].to_pylist()
        counts = (top.numbers >= 0).sum(1).tolist()
        scores = [values[:count] for values, count in zip(top.scores, counts, strict=True)]
        fallback: list[str | None] = [None] * len(items)
        if self._recommender.has_popularity:
            excluded = _excluded(rows)
            for row in np.flatnonzero(~has_input).tolist():
                allowed = None if rows.among is None else _row_items(rows.among, row)
                numbers, values = self._recommender.popular(
                    rows.body.k,
                    excluded=excluded.numbers[excluded.rows == row].numpy(),
                    allowed=allowed,
                )
                items[row] = self._recommender.ids.take(numbers).to_pylist()
                scores[row] = values
                fallback[row] = POPULARITY
        return RecommendResponse(
            items,
            scores,
            fallback,
            self.model.version,
            self.model.preprocessor_hash,
        )

    def _has_input(self, raw: RawBlock, encoded: EncodedRows) -> np.ndarray:
        """Return which rows the model knows something of, bool [rows]: a next-item model an item of
        those that it reads, another one a category or a number.
        """
        inputs = self.model.preprocessor.inputs
        feature = self._recommender.feature
        names = inputs.sparse
        if self._recommender.is_list:
            names = (feature,)
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


def _excluded(rows: _Rows) -> ItemNumbers:
    """Return the items that the rows of a request must not get."""
    lists = [rows.exclude, rows.seen] if rows.body.exclude_seen else [rows.exclude]
    return ItemNumbers.joined(*(items.between(0, rows.raw.rows) for items in lists))


def _row_items(items: ItemLists, row: int) -> np.ndarray:
    return items.between(row, row + 1).numbers.numpy()


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
