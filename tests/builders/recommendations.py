"""Requests for recommendations, and logs of items with texts as ids."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from builders.requests import Reply, ask

ITEM_TEXTS = [f"größe {number}" for number in range(30)] + [str(number) for number in range(7, 12)]
"""Ids of items, some of which are integers."""


def text_lists(seed: int, rows: int, *, longest: int = 14) -> list[list[str]]:
    """Return lists of items, of which the first are the most frequent."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, longest + 1, rows)
    return [
        [ITEM_TEXTS[place] for place in (len(ITEM_TEXTS) * rng.random(size) ** 2).astype(int)]
        for size in sizes
    ]


def write_items(path: Path, lists: Sequence[Sequence[Any]], **columns: Any) -> str:
    """Write lists of items as Parquet, and return the file's folder."""
    path.parent.mkdir(exist_ok=True)
    pq.write_table(pa.table({"item": lists, **columns}), path)
    return str(path.parent)


def post_recommend(app: Callable[..., Any], content: Any, **arguments: Any) -> Reply:
    headers = {"content-type": "application/json", **arguments.pop("headers", {})}
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    return ask(app, "POST", "/v1/recommend", parts=[body], headers=headers, **arguments)


def recommend(app: Callable[..., Any], rows: list[Any], **fields: Any) -> dict[str, Any]:
    reply = post_recommend(app, {"rows": rows, **fields})
    assert reply.status == 200, reply.body
    return reply.json()
