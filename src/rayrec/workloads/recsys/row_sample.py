"""Sample of the training rows with one label (`Schema.sample`): the order of its rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

import pyarrow as pa

from rayrec import storage
from rayrec.config import InputError, json_hash
from rayrec.data.arrow import json_reply, parse_reply
from rayrec.data.engine import Engine
from rayrec.data.logs.index import LogIndex, SegmentSample
from rayrec.data.logs.reading import read_clicks
from rayrec.data.materialized.dataset import read_clicks as read_preprocessed_clicks
from rayrec.data.sampled_rows import sampled_parts, segment_samples, select_rows
from rayrec.ingest.block_order import BlockOrder
from rayrec.schema import RowSample, Schema

RECORD: Final = "sample.json"
"""File in the run folder with the numbers of kept rows by part of the log, so that a resumed
run need not count them again.
"""
_TASK_SEGMENTS: Final = 8
"""Segments per counting task."""


# An epoch's order needs the number of its rows, and which rows are kept depends on their labels:
#
#   driver       one pass over the labels in data tasks: kept rows per segment
#   order        the kept rows are a log of their own, numbered from 0. Steps, positions and the
#                record of trained rows know no other
#   data tasks   read segments of the log, and drop the other rows before they are encoded
def sample_order(
    order: BlockOrder,
    index: LogIndex,
    rule: RowSample,
    *,
    schema: Schema,
    engine: Engine,
    folder: str,
    progress: Callable[[str, int, int | None], None] = lambda name, done, total: None,
) -> BlockOrder:
    """Return the order of the rows that a sample keeps. Raises InputError if there are none.

    Args:
        order: Order of a training set.
        index: Index of its log, which may have more rows.
        rule: Sample.
        schema: Columns of the log.
        engine: Engine that counts kept rows.
        folder: Run folder, for the record of the counts.
        progress: Receiver of (name, rows done, all rows).
    """
    samples = list(segment_samples(order.parts, index, rule))
    record = storage.join(folder, RECORD)
    key = json_hash({"order": order.identity, "sample": rule.to_dict()})
    stored = storage.read_json(record) if storage.exists(record) else {}
    if stored.get("key") == key:
        counts = stored["rows"]
    else:
        done = partial(progress, "sample (rows)")
        counts = _count_rows(samples, schema, engine, lambda rows: done(rows, order.rows))
        storage.write_json(record, {"key": key, "rows": counts})
    if not sum(counts):
        raise InputError(
            f"schema: sample keeps none of the {order.rows:,} training rows. Raise keep."
        )
    return replace(order, parts=tuple(sampled_parts(samples, counts)))


def _count_rows(
    samples: Sequence[SegmentSample],
    schema: Schema,
    engine: Engine,
    progress: Callable[[int], None],
) -> list[int]:
    """Return the number of kept rows of each sample, counted in data tasks."""
    groups = [
        samples[first : first + _TASK_SEGMENTS] for first in range(0, len(samples), _TASK_SEGMENTS)
    ]
    count = partial(_count_task, schema=schema)
    replies = engine.run("sample", count, groups, block_bytes=1 << 12)
    counts: list[int] = []
    done = 0
    for group, reply in zip(groups, replies, strict=True):
        counts += parse_reply(reply)
        done += sum(sample.part.rows for sample in group)
        progress(done)
    return counts


def _count_task(samples: Sequence[SegmentSample], *, schema: Schema) -> pa.Table:
    """Count the kept rows of each sample, from the labels of its segment."""
    segments = [sample.part.segment for sample in samples]
    if segments[0].is_preprocessed:
        labels = read_preprocessed_clicks(segments, schema.label_names[0])
    else:
        labels = read_clicks(segments, schema)
    counts = []
    first = 0
    for sample in samples:
        stop = first + sample.part.segment.rows
        counts.append(len(select_rows(sample, labels[first:stop])))
        first = stop
    return json_reply(counts)
