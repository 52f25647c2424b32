"""Comparison of an export's scores with its checkpoint: rows, differences and limits."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rayrec.config import InputError
from rayrec.data.encoded_rows import EncodedRows, Ids, JaggedIds
from rayrec.data.log_source import LogSource
from rayrec.data.logs.index import LogIndex, SegmentRange
from rayrec.data.logs.parquet import read_rows
from rayrec.data.logs.reading import good_lines, line_starts
from rayrec.data.logs.table_parser import parse_table
from rayrec.data.logs.text_log import read_text
from rayrec.data.logs.text_parser import parse
from rayrec.data.raw_block import RawBlock
from rayrec.humanize import json_values
from rayrec.inference.config import LARGEST_LOGIT_DIFFERENCE, ExportConfig
from rayrec.metrics.binary import auroc
from rayrec.schema import Schema
from rayrec.workloads.recsys.scoring import BATCH_ROWS, encode_parts, open_run_log
from rayrec.workloads.recsys.workload import ClickWorkload

if TYPE_CHECKING:
    from rayrec.data.encoding.preprocessor import Preprocessor
    from rayrec.models.scoring_tables import Quantization
    from rayrec.workloads.base import TrainConfig

_SPEED_S: Final = 0.2
"""Seconds to measure a model's speed for."""
_RANDOM_ROWS: Final = 2000
"""Number of rows of random raw values."""
_ENCODED_ROWS: Final = 10_000
"""Maximum number of rows that `encode.py` encodes, value by value, to compare it."""
_MAX_RANDOM_IDS: Final = 3
"""Maximum number of ids per random row in a list column."""

Score = Callable[[EncodedRows], np.ndarray]


@dataclass(frozen=True)
class ParityRows:
    """Rows to compare two models on."""

    origin: str
    """Description of the rows for messages."""
    batches: tuple[EncodedRows, ...]
    fault: str | None = None
    """Reason why the rows cannot prove the quality of an export. None if they can."""
    parts: tuple[SegmentRange, ...] = ()
    """Ranges of the log that contain the rows. Empty for random rows."""

    @property
    def rows(self) -> int:
        return sum(len(batch) for batch in self.batches)

    def score(self, score: Score) -> np.ndarray:
        """Return the logits, float32 [rows]."""
        return np.concatenate([score(batch) for batch in self.batches])

    def labels(self) -> np.ndarray | None:
        """Return the labels, float32 [rows], None for random rows."""
        return (
            np.concatenate([batch.label for batch in self.batches])
            if self.batches[0].labels
            else None
        )

    def rows_per_s(self, score: Score) -> float:
        """Measure the speed of one caller with one batch, the best within a moment, as other load
        only slows it.
        """
        batch = self.batches[0]
        best_s = math.inf
        end = time.perf_counter() + _SPEED_S
        while (start := time.perf_counter()) < end or best_s == math.inf:
            score(batch)
            best_s = min(best_s, time.perf_counter() - start)
        return len(batch) / best_s


# Rows that prove an export, best first:
#
#   parity_path             given; must be labelled
#   test or evaluation rows of the run, if there are enough
#   rows of the run's log   training rows compare two models as well
#   random rows             only with ignore_parity; `fault` says so in the report
def parity_rows(
    config: TrainConfig, preprocessor: Preprocessor, *, settings: ExportConfig, cache: str
) -> ParityRows:
    """Read the rows to compare an export on: from `settings.parity_path`, else from the run's
    evaluation log (--eval-data.path, or the test rows if there are enough). If the log is
    unreadable and `settings.ignore_parity` is set, returns random rows with a `fault`. Folder
    `cache` stores the index. Raises InputError without rows, or if parity_path is unusable or
    unlabelled.
    """
    if settings.parity_path is not None:
        path = settings.parity_path
        if not LogSource.at(path).is_labelled(preprocessor.schema):
            raise InputError(
                f"{path}: labels not found, but needed to compare the AUROC. Use a labelled log."
            )
        index = open_run_log(
            config.train_data.replace(path=path, files=()), preprocessor, cache=cache
        )
        return _read(index, (0, index.rows), preprocessor, settings, origin=f"rows of {path}")
    try:
        return _run_rows(config, preprocessor, settings, cache)
    except (InputError, OSError) as error:  # The log may be moved, removed or unavailable
        path = config.eval_data.path or config.train_data.path or "none"
        fault = (
            f"no rows of the run's log {path}, which cannot be read "
            f"({' '.join(str(error).split())})"
        )
        if not settings.ignore_parity:
            raise InputError(
                f"export: found {fault} to compare. Set --parity-path to a labelled log, or "
                "--ignore-parity for random rows."
            ) from None
        return replace(random_rows(preprocessor, rows=settings.parity_rows), fault=fault)


def _run_rows(
    config: TrainConfig, preprocessor: Preprocessor, settings: ExportConfig, cache: str
) -> ParityRows:
    assert isinstance(config.workload, ClickWorkload)
    data = config.evaluated_data
    index = open_run_log(data, preprocessor, cache=cache)
    if config.eval_data.path is None:
        name, (start, stop) = config.workload.evaluation_rows(config, index)
        if stop - start >= settings.parity_rows:
            return _read(
                index, (start, stop), preprocessor, settings, origin=f"{name} rows of {data.path}"
            )
        # Training rows are as good for a comparison, and an AUROC of few rows is noise.
    return _read(index, (0, index.rows), preprocessor, settings, origin=f"rows of {data.path}")


def _read(
    index: LogIndex,
    rows: tuple[int, int],
    preprocessor: Preprocessor,
    settings: ExportConfig,
    *,
    origin: str,
) -> ParityRows:
    parts = tuple(spread(list(index.parts(*rows)), rows=settings.parity_rows))
    return ParityRows(origin, tuple(encode_parts(parts, preprocessor)), parts=parts)


def spread(ranges: Sequence[SegmentRange], *, rows: int) -> list[SegmentRange]:
    """Choose at most `rows` rows from evenly spaced segments. Pure."""
    num_parts = max(1, math.ceil(len(ranges) * min(1.0, rows / sum(part.rows for part in ranges))))
    selected = [ranges[index * len(ranges) // num_parts] for index in range(num_parts)]
    parts = []
    left = rows
    for number, part in enumerate(selected):
        take = min(part.rows, -(-left // (len(selected) - number)))
        if take:
            parts.append(replace(part, stop=part.start + take))
        left -= take
    return parts


def random_rows(preprocessor: Preprocessor, *, rows: int, seed: int = 0) -> ParityRows:
    """Generate rows without labels: normal dense features, uniform ids."""
    rng = np.random.default_rng(seed)
    batches = []
    for start in range(0, rows, BATCH_ROWS):
        count = min(BATCH_ROWS, rows - start)
        dense = rng.standard_normal((count, len(preprocessor.inputs.dense)), np.float32)
        lengths_of = _random_lengths(rng, preprocessor.schema, count)
        dtype = preprocessor.id_dtype
        columns = zip(
            preprocessor.inputs.sparse,
            preprocessor.num_embeddings,
            preprocessor.hotness,
            strict=True,
        )
        ids: list[Ids] = []
        for name, num_embeddings, hotness in columns:
            if hotness is None:
                lengths = lengths_of(name).astype(np.int32)
                ids.append(
                    JaggedIds(rng.integers(0, num_embeddings, int(lengths.sum()), dtype), lengths)
                )
            else:
                ids.append(
                    rng.integers(
                        0, num_embeddings, count if hotness == 1 else (count, hotness), dtype
                    )
                )
        batches.append(EncodedRows(dense, ids))
    return ParityRows(
        "rows drawn at random, their labels by the checkpoint's own scores", tuple(batches)
    )


def _random_lengths(
    rng: np.random.Generator, schema: Schema, rows: int
) -> Callable[[str], np.ndarray]:
    """Return a function from list names to random lengths, equal for aligned lists, int64
    [rows].
    """
    draw = functools.cache(lambda first: rng.integers(0, _MAX_RANDOM_IDS + 1, rows))
    return lambda name: draw(schema.feature(name).aligned_with or name)


def compare_encoder(encoder: Any, preprocessor: Preprocessor, rows: ParityRows) -> dict[str, Any]:
    """Compare the Encoder of an export's `encode.py` with the Preprocessor, on raw values spread
    over `rows`, or on random values if there are no raw ones, as in preprocessed data. Returns
    `rows`, `origin`, and `failure`: the first difference or None.
    """
    is_random = not rows.parts or rows.parts[0].segment.format not in ("text", "table")
    random = [_as_table_rows(_random_table(preprocessor), preprocessor.schema)] if is_random else []
    parts = spread(rows.parts, rows=_ENCODED_ROWS) if rows.parts else ()
    batches = random or _raw_rows(parts, encoder, preprocessor)
    count = 0
    failure = None
    for raw, values in batches:
        failure = _encoder_failure(encoder, preprocessor, raw, values)
        count += len(values)
        if failure:
            break
    return {
        "rows": count,
        "origin": "drawn values" if is_random else rows.origin,
        "failure": failure,
    }


RawValues = tuple[RawBlock, list[dict[str, Any]]]
"""Rows as input of the Preprocessor, and as input of an Encoder."""


def _raw_rows(
    parts: Sequence[SegmentRange], encoder: Any, preprocessor: Preprocessor
) -> Iterator[RawValues]:
    schema = preprocessor.schema
    for part in parts:
        segment = part.segment
        good = good_lines(segment, schema)[part.start : part.stop]
        if segment.format == "table":
            table, _ = read_rows(segment.path, segment.start, segment.stop, schema)
            yield _as_table_rows(table.take(good), schema)
            continue
        text = read_text(segment)
        starts = np.append(
            line_starts(text, segment.stop - segment.start), segment.stop - segment.start
        )
        lines = [text[starts[number] : starts[number + 1]].tobytes() for number in good]
        raw, _ = parse(schema, b"".join(lines))
        yield raw, encoder.parse(line.decode() for line in lines)


def _as_table_rows(table: pa.Table, schema: Schema) -> RawValues:
    raw, _ = parse_table(table, schema.unlabelled())
    values = table.select(
        [name for name in schema.unlabelled().columns if name in table.column_names]
    )
    for index, field in enumerate(values.schema):
        if pa.types.is_timestamp(field.type):  # Python's datetime has no nanoseconds
            kind = pa.timestamp("us", field.type.tz)
            values = values.set_column(
                index, field.name, values.column(index).cast(kind, safe=False)
            )
    return raw, values.to_pylist()


def _random_table(preprocessor: Preprocessor) -> pa.Table:
    """Generate raw values of every column: numbers, known and unknown categories, missing
    values.
    """
    schema = preprocessor.schema
    rng = np.random.default_rng(0)
    hexadecimal = schema.tokens == "hexadecimal"
    lengths_of = _random_lengths(rng, schema, _RANDOM_ROWS)

    def present() -> np.ndarray:
        return rng.random(_RANDOM_ROWS) < 0.9

    columns: dict[str, pa.Array] = {
        name: pa.array(
            np.rint(rng.standard_cauchy(_RANDOM_ROWS) * 20).clip(-1e9, 1e9).astype(np.int64),
            mask=~present(),
        )
        for name in schema.dense
    }
    for number, name in enumerate(preprocessor.inputs.sparse):
        if name not in schema.sparse:
            continue
        lengths = lengths_of(name) if name in schema.lists else np.ones(_RANDOM_ROWS, np.int64)
        dtype = np.uint32 if hexadecimal else np.uint64
        vocabulary = preprocessor.vocabulary(number)
        tokens = rng.integers(0, np.iinfo(dtype).max, int(lengths.sum()), dtype, endpoint=True)
        if len(vocabulary):
            tokens = np.where(
                rng.random(len(tokens)) < 0.8,
                vocabulary[rng.integers(0, len(vocabulary), len(tokens))],
                tokens,
            )
        texts = (
            [f"{token:08x}" for token in tokens.tolist()]
            if hexadecimal
            else tokens.view(np.int64).astype(str).tolist()
        )
        values = pa.array(texts, pa.large_string())
        if name in schema.lists:
            offsets = np.concatenate([[0], np.cumsum(lengths)])
            columns[name] = pa.LargeListArray.from_arrays(offsets, values)
            numbers = schema.feature(name).weights or schema.feature(name).ages
            if numbers is not None:
                random_numbers = pa.array(rng.random(len(tokens)))
                columns[numbers] = pa.LargeListArray.from_arrays(offsets, random_numbers)
        else:
            columns[name] = pc.if_else(
                pa.array(present()), values, pa.scalar(None, pa.large_string())
            )
    return pa.table(columns)


def _encoder_failure(
    encoder: Any, preprocessor: Preprocessor, raw: RawBlock, values: list[dict[str, Any]]
) -> str | None:
    """Return the first difference between the results of an Encoder and the Preprocessor, None if
    they are equal.
    """
    expected = preprocessor.encode(raw)
    inputs = preprocessor.inputs
    try:
        dense, ids = encoder.encode(values)
    except ValueError as error:
        return f"it rejects a row ({error})"
    for number, name in enumerate(inputs.dense):
        pair = dense[:, number], expected.dense[:, number]
        # Logarithms of NumPy and the C library differ in the last bit.
        different = ~np.isclose(*pair, rtol=1e-6, atol=1e-6, equal_nan=True)
        if different.any():
            row = int(different.argmax())
            return (
                f"it encodes {values[row].get(name)!r} of {name} as {pair[0][row]} instead of "
                f"{pair[1][row]}"
            )
    for name, column, expected_column in zip(inputs.sparse, ids, expected.ids, strict=True):
        actual = column if isinstance(column, tuple) else (column,)
        required: tuple[np.ndarray, ...] = (
            (expected_column.values, expected_column.lengths)
            if isinstance(expected_column, JaggedIds)
            else (expected_column,)
        )
        if isinstance(expected_column, JaggedIds) and expected_column.weights is not None:
            required += (expected_column.weights,)
        if len(actual) != len(required) or not all(map(np.array_equal, actual, required)):
            return f"its ids of column {name} differ"
    return None


@dataclass(frozen=True)
class Comparison:
    """Differences between logits of an export and its checkpoint, on the same rows."""

    rows: int
    origin: str
    max_logit_difference: float
    max_relative_difference: float
    """Maximum of difference / max(1, |logit|)."""
    mean_logit_difference: float
    auroc_checkpoint: float
    auroc_export: float

    @property
    def auroc_difference(self) -> float:
        """Absolute difference, NaN if all rows have the same label."""
        return abs(self.auroc_checkpoint - self.auroc_export)

    def to_dict(self) -> dict[str, Any]:
        return json_values({**vars(self), "auroc_difference": self.auroc_difference})

    def failure(
        self, quantization: Quantization, *, auroc_limit: float, relative: bool = False
    ) -> str | None:
        """Describe the first exceeded limit, or None. `relative` admits larger differences of large
        logits. Pure.
        """
        if not math.isfinite(self.max_logit_difference):
            return "logits that are not finite"
        largest = self.max_relative_difference if relative else self.max_logit_difference
        if quantization == "fp32" and largest > LARGEST_LOGIT_DIFFERENCE:
            return (
                f"a logit that differs by {largest:.2g}{relative * ' of it'}, more than "
                f"{LARGEST_LOGIT_DIFFERENCE:g}"
            )
        if quantization != "fp32" and math.isnan(self.auroc_difference):
            return "no AUROC to compare (the rows are of one class)"
        if self.auroc_difference > auroc_limit:
            return (
                f"an AUROC that differs by {self.auroc_difference:.2g}, more than {auroc_limit:g}"
            )
        return None


def compare(
    origin: str, labels: np.ndarray | None, checkpoint: np.ndarray, export: np.ndarray
) -> Comparison:
    """Compare logits, float32 [rows]. Missing labels are sampled from the checkpoint's scores, with
    a fixed seed.
    """
    differences = np.abs(checkpoint.astype(np.float64) - export.astype(np.float64))
    if not np.isfinite(differences).all():
        return Comparison(len(checkpoint), origin, math.inf, math.inf, math.inf, math.nan, math.nan)
    if labels is None:
        chances = 1 / (1 + np.exp(-np.clip(checkpoint.astype(np.float64), -500, 500)))
        labels = (np.random.default_rng(0).random(len(checkpoint)) < chances).astype(np.float32)
    return Comparison(
        rows=len(checkpoint),
        origin=origin,
        max_logit_difference=float(differences.max()),
        max_relative_difference=float((differences / np.maximum(1.0, np.abs(checkpoint))).max()),
        mean_logit_difference=float(differences.mean()),
        auroc_checkpoint=auroc(checkpoint, labels),
        auroc_export=auroc(export, labels),
    )
