"""Logs made from seeds, and their opening, encoding and batching: tests of goldens name no class of
the data side.
"""

import csv
import hashlib
import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from builders.logs import learn, open_index

import rayrec
from rayrec.batch import Batch
from rayrec.data.encoding.encoder import MultiHot
from rayrec.data.encoding.preprocessor import Preprocessor
from rayrec.data.encoding.presets import ALL
from rayrec.data.engine import InProcess, ThreadEngine
from rayrec.data.logs.index import MAPPED, LogIndex, Segment, SegmentRange
from rayrec.data.materialized.writer import preprocess
from rayrec.data.numbered_rows import ArrayRows
from rayrec.datasets.criteo import SCHEMA as CRITEO
from rayrec.ingest.batches import ArrayBatches, ClickBatches
from rayrec.ingest.block_order import BatchSharding, BlockOrder
from rayrec.ingest.loader import Loader
from rayrec.ingest.row_order import RowOrder
from rayrec.ingest.stream import MappedSource, TaskSource
from rayrec.observe.console import Console
from rayrec.schema import Feature, Label, Schema

PRESETS = tuple(ALL)
SEGMENT_BYTES = 8 << 10
BATCH_SIZE = 40
Arrays = Iterable[tuple[str, np.ndarray]]


def digest(arrays: Arrays) -> str:
    """Return 16 hex digits of names, dtypes, shapes and bytes of arrays."""
    total = hashlib.sha256()
    for name, array in arrays:
        total.update(repr((name, array.dtype.str, array.shape)).encode())
        total.update(array.tobytes())
    return total.hexdigest()[:16]


# -- Logs
def criteo_lines(rows: int, seed: int) -> list[bytes]:
    chance = random.Random(seed)

    def number() -> str:
        return (
            ""
            if chance.random() < 0.15
            else str(int(chance.random() * chance.choice((3, 20, 3000))) - 2)
        )

    def category(column: int) -> str:
        rank = int(chance.random() * chance.random() * 40)  # 0 is the category 00000000
        return "" if chance.random() < 0.1 else f"{rank * (2_654_435_761 + column) % 2**32:08x}"

    def line() -> str:
        return "\t".join(
            [
                str(chance.getrandbits(1)),
                *(number() for _ in CRITEO.dense),
                *map(category, range(26)),
            ]
        )

    return [line().encode() + b"\n" for _ in range(rows)]


def any_rows(rows: int, seed: int) -> list[dict[str, Any]]:
    """Return rows with a column of every kind; None is a missing value."""
    chance = random.Random(seed)

    def maybe(value: Any) -> Any:
        return None if chance.random() < 0.1 else value

    def rank(ranks: int) -> int:
        return int(chance.random() * chance.random() * ranks)

    def row(number: int) -> dict[str, Any]:
        history = [rank(30) for _ in range(rank(8))]
        tags = [("red", "blue", "naïve", "7", "07")[rank(5)] for _ in range(rank(5))]
        return {
            "click": chance.getrandbits(1),
            "importance": rank(8) / 4,
            "age": maybe(rank(90) - 2),
            "price": maybe(rank(100_000) / 64),
            "user": maybe((rank(25), -5, 2**40 + rank(3))[rank(3)]),
            "item": maybe(rank(30)),
            "shop": maybe(
                ("7", "07", "+7", "a,b", 'say "x"', "ünï", " blank ", "true", "x" * 40)[rank(9)]
            ),
            "history": history,
            "kinds": [f"k{item % 4}" for item in history],
            "tags": tags,
            "tag_weights": [rank(9) / 8 for _ in tags],
            "like": maybe(chance.getrandbits(1)),
            "seconds": rank(500) / 8,
            "at": 1_700_000_000 + 1000 * number + rank(1000),
        }

    return [row(number) for number in range(rows)]


LISTS = (Feature(name="history", max_length=3), Feature(name="tags", weights="tag_weights"))
PLAIN = Schema(
    label="click",
    dense=("age", "price"),
    sparse=("user", "item", "shop"),
    tokens="any",
    delimiter=",",
)
WITH_LISTS = PLAIN.replace(
    sparse=(*PLAIN.sparse, "history", "tags"), lists=("history", "tags"), features=LISTS
)
EVERYTHING = WITH_LISTS.replace(
    weight="importance",
    labels=(Label(name="like"), Label(name="seconds", kind="number", missing="fault")),
    timestamp="at",
    group="user",
    features=(Feature(name="history", vocabulary="item", max_length=3), LISTS[1]),
)
SCHEMAS: dict[str, Callable[[], Schema]] = {
    "criteo": lambda: CRITEO,
    "plain": lambda: PLAIN,
    "lists": lambda: WITH_LISTS,
    "shared": lambda: PLAIN.replace(
        sparse=("user", "item", "history"),
        lists=("history",),
        features=(Feature(name="history", vocabulary="item"),),
    ),
    "everything": lambda: EVERYTHING,
    "texts": lambda: PLAIN.replace(
        sparse=(*PLAIN.sparse, "flag"),
        integers=("item",),
        optional=("price", "flag"),
        nan="missing",
        category_rules=1,
    ),
    "aligned": lambda: PLAIN.replace(
        sparse=("item", "history", "kinds"),
        lists=("history", "kinds"),
        features=(
            Feature(name="history", max_length=2),
            Feature(name="kinds", aligned_with="history", max_length=2),
        ),
    ),
}
"""Columns of logs, made when they are asked for: an earlier version knows fewer fields."""


def write_text(path: Path, lines: Iterable[bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(lines))


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(rows[0])
        writer.writerows(
            [
                ["|".join(map(str, v)) if isinstance(v, list) else v for v in row.values()]
                for row in rows
            ]
        )


def write_parquet(path: Path, rows: list[dict[str, Any]], row_group_size: int = 40) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pylist(rows)
    if "at" in table.column_names:
        table = table.set_column(
            table.column_names.index("at"), "at", table["at"].cast(pa.timestamp("s"))
        )
    pq.write_table(table, path, row_group_size=row_group_size)


def write_arrays(folder: Path, rows: int, files: int) -> None:
    """Write arrays as TorchRec's scripts do, with bags of one to three ids."""
    folder.mkdir(parents=True)
    chance = random.Random(5)
    for day in range(files):

        def ids(columns: int, size: int) -> np.ndarray:
            return np.array(
                [[chance.getrandbits(16) % size for _ in range(columns)] for _ in range(rows)],
                np.int32,
            )

        np.save(folder / f"day_{day}_dense.npy", ids(3, 1000).astype(np.float32) / 8)
        np.save(folder / f"day_{day}_labels.npy", ids(1, 2))
        np.savez(
            folder / f"day_{day}_sparse_multi_hot.npz",
            **{str(i): ids(i + 1, 20 + i) for i in range(3)},
        )


def write_log(folder: Path, kind: str, schema: Schema) -> None:
    for number in range(3):
        lines = criteo_lines(90, seed=number)
        rows = any_rows(90, seed=number)
        rows[33]["click"] = 2  # a fault
        if kind == "text":
            write_text(folder / f"day_{number}", [*lines[:50], b"a faulty line\n", *lines[50:]])
            continue
        if schema.tokens == "hexadecimal":
            values = [
                [text or None for text in line.decode().rstrip("\n").split("\t")] for line in lines
            ]
            rows = [dict(zip(CRITEO.columns, row, strict=True)) for row in values]
        (write_csv if kind == "csv" else write_parquet)(folder / f"part_{number}.{kind}", rows)


# -- The data side
class Log(NamedTuple):
    index: LogIndex
    preprocessor: Preprocessor


def opened(path: Path, schema: Schema) -> LogIndex:
    return open_index(
        path,
        schema,
        segment_bytes=SEGMENT_BYTES,
        engine=ThreadEngine(2),
        cache=path.parent / "cache",
    )


def bags() -> MultiHot:
    return MultiHot(sizes=(3, 1, 2, *[1] * 23), distribution="pareto", seed=4)


def log_of(folder: Path, kind: str, schema: Schema, preset: str = "rayrec", **changes: Any) -> Log:
    write_log(folder / kind, kind, schema)
    index = opened(folder / kind, schema)
    return Log(index, learn(index, schema, ALL[preset].replace(**changes)))


def prepared(log: Log, out: Path, *, format: str, shuffle: str) -> Log:
    """Write a log in a preprocessed format and open it. A full shuffle is one of the whole log."""
    preprocess(
        log.index,
        preprocessor=log.preprocessor,
        out=str(out),
        format=format,
        engine=ThreadEngine(2),
        segments_per_task=2,
        shuffle="full" if shuffle == "full" else "none",
        seed=9,
    )
    return Log(opened(out, log.preprocessor.schema), Preprocessor.load(str(out / "preprocessor")))


def adopted(folder: Path) -> Log:
    write_arrays(folder, rows=90, files=3)
    rayrec.adopt(
        str(folder),
        split="none",
        rows_per_segment=20,
        console=Console(quiet=True),
    )
    preprocessor = Preprocessor.load(str(folder / "preprocessor"))
    return Log(opened(folder, preprocessor.schema), preprocessor)


def order_of(log: Log, shuffle: str, *, but: int = 1) -> BlockOrder:
    """Return an order of a log's rows but so many at both ends, which cut segments."""
    return BlockOrder(tuple(log.index.parts(but, log.index.rows - but)), shuffle, 3, 3)


def click_loader(
    log: Log,
    order: BlockOrder,
    rank: int = 0,
    world_size: int = 1,
    *,
    state: dict[str, Any] | None = None,
    **changes: Any,
) -> Loader:
    """Return a worker's loader; `state`: that of a loader of any number of workers."""
    settings: dict[str, Any] = {"epochs": 1, "batch_size": BATCH_SIZE, **changes}
    in_memory = settings.pop("in_memory", False)
    reader_options = {
        name: settings.pop(name) for name in ("targets", "unpooled") if name in settings
    }
    inputs = log.preprocessor.inputs
    source = MappedSource(log.preprocessor, in_memory, prefetch_blocks=1)
    if log.index.format not in MAPPED:
        source = TaskSource(
            InProcess(log.preprocessor),
            ThreadEngine(2),
            inputs,
            order.max_block_rows,
            prefetch_blocks=1,
        )
    sharding = BatchSharding(rank, world_size, settings.pop("batch_size"))
    return Loader(
        order, ClickBatches(source, inputs, **reader_options), sharding, state=state, **settings
    )


def row_loader(
    order: str,
    rank: int = 0,
    world_size: int = 1,
    *,
    state: dict[str, Any] | None = None,
    **changes: Any,
) -> Loader:
    """Return a worker's loader of 101 numbered rows in five chunks."""
    settings: dict[str, Any] = {"epochs": 2, "batch_size": 8, **changes}
    small_steps = settings.pop("small_steps", False)
    rows = RowOrder((20, 31, 7, 25, 18), order, 3, 2, small_steps, data_hash="0a1b2c")
    source = ArrayRows(
        {"number": np.arange(101), "image": np.arange(404, dtype=np.float32).reshape(101, 2, 2)}
    )
    sharding = BatchSharding(rank, world_size, settings.pop("batch_size"))
    return Loader(rows, ArrayBatches(source), sharding, state=state, **settings)


def fields(batch: Batch) -> Iterator[tuple[str, np.ndarray]]:
    """The arrays of a batch by name; ids, their lengths and weights feature by feature."""
    yield from ((name, tensor.numpy()) for name, tensor in batch.tensors.items())
    for prefix, features in (("ids", batch.sparse_features), ("sequence", batch.sequence_features)):
        for key in features.keys() if features is not None else ():
            yield f"{prefix} {key}", features[key].values().numpy()
            yield f"{prefix} {key} lengths", features[key].lengths().numpy()
            if features[key].weights_or_none() is not None:
                yield f"{prefix} {key} weights", features[key].weights().numpy()
    yield from ((f"label {name}", values.numpy()) for name, values in batch.labels.items())
    for name in ("weights", "groups", "timestamps"):
        if (values := getattr(batch, name)) is not None:
            yield name, values.numpy()
    assert batch.row_numbers is not None
    yield "row numbers", batch.row_numbers.numbers
    yield "epoch, loss weight", np.array([batch.row_numbers.epoch, batch.loss_weight])


def digests(loaders: Iterable[Iterator[Batch]]) -> dict[str, Any]:
    """Digests of every batch of every worker, and of each of the fields over all of them."""
    batches = []
    field_arrays = {}
    for loader in loaders:
        batches.append([])
        for batch in loader:
            arrays = list(fields(batch))
            batches[-1].append(digest(arrays))
            for name, array in arrays:
                field_arrays.setdefault(name, []).append((name, array))
        loader.close()
    return {
        "batches": batches,
        "fields": {name: digest(arrays) for name, arrays in field_arrays.items()},
    }


def encoded(log: Log) -> dict[str, Any]:
    """Digests of all rows in the order of the log, and of what encoded them."""
    rows = digests([click_loader(log, order_of(log, "none", but=0), batch_size=log.index.rows)])[
        "fields"
    ]
    known = [
        ("tokens", log.preprocessor.tokens),
        ("tables", np.array(log.preprocessor.num_embeddings)),
    ]
    return {"preprocessor": log.preprocessor.hash(), "known": digest(known), "rows": rows}


def made_up_order(shuffle: str, segment_bytes: int = 100) -> BlockOrder:
    """Return an order of segments that exist nowhere: the identity of orders is that of earlier
    checkpoints.
    """
    segments = [
        Segment(f"day_{i // 4}", segment_bytes * i, segment_bytes * (i + 1), 8 * i, 8)
        for i in range(12)
    ]
    return BlockOrder(
        tuple(SegmentRange(segment, i % 3, 4 + i % 3) for i, segment in enumerate(segments)),
        shuffle,
        7,
        2,
    )
