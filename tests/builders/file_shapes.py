"""Logs in the shapes of files that people have, written with values of their own."""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

NUM_ROWS = 400


@dataclass(frozen=True)
class Shape:
    """Shape of a log, and what its drafted schema must use."""

    write: Callable[[Path, random.Random], Path]
    """Writes the log into a folder; returns its path."""
    label: str | None = None
    dense: Sequence[str] = ()
    sparse: Sequence[str] = ()
    lists: Sequence[str] = ()
    num_rows: int = NUM_ROWS
    recipe: str = "clicks"
    has_lines: bool = True
    """Whether lines of the file can be sent to a server."""


def _lines(name: str, row: Callable[[int, random.Random], str], head: str = "", end: str = "\n"):
    """Return a writer of a text file with a line for each row."""

    def write(folder: Path, rng: random.Random) -> Path:
        lines = [row(number, rng) for number in range(NUM_ROWS)]
        text = end.join([*([head] if head else []), *lines]) + end
        (folder / name).write_bytes(text.encode("latin-1" if "latin" in name else "utf-8"))
        return folder / name

    return write


def _clicks_row(number: int, rng: random.Random) -> str:
    numbers = [str(int(rng.lognormvariate(3, 1.5))) if rng.random() < 0.9 else "" for _ in "abc"]
    codes = [f"{rng.randrange(30):08x}" for _ in "abc"]
    mixed = [value for pair in zip(numbers, codes, strict=True) for value in pair]
    return ",".join([str(rng.randrange(2)), *mixed])


def _ratings_row(number: int, rng: random.Random) -> str:
    genres = "|".join(rng.sample(["Action", "Comedy", "Drama", "War"], rng.randrange(1, 4)))
    age = rng.choice([1, 18, 25, 35, 45, 50, 56])
    code = f"{rng.randrange(10000, 99999):05d}"
    return (
        f"{rng.randrange(1, 300)},{rng.randrange(1, 200)},{rng.randrange(1, 6)},"
        f"{978300000 + number * 37},{rng.choice('MF')},{age},{rng.randrange(21)},{code},{genres}"
    )


def _unnamed_row(number: int, rng: random.Random) -> str:
    codes = [str(rng.choice([-1, rng.randrange(3000, 3090)])) for _ in range(12)]
    amounts = [str(rng.choice([-1, int(rng.lognormvariate(4, 1))])) for _ in range(2)]
    return "\t".join([str(rng.randrange(2)), *codes, *amounts])


def _sequence_row(number: int, rng: random.Random) -> str:
    history = "^".join(f"i{rng.randrange(40)}" for _ in range(rng.randrange(1, 9)))
    return f"{rng.randrange(2)},u{rng.randrange(50)},i{rng.randrange(40)},{history}"


def _write_parquet(folder: Path, rng: random.Random) -> Path:
    columns = {
        "user_id": [rng.randrange(10**9, 10**9 + 60) for _ in range(NUM_ROWS)],
        "item_id": [rng.randrange(90) for _ in range(NUM_ROWS)],
        "label": [float(rng.randrange(2)) for _ in range(NUM_ROWS)],
    }
    pq.write_table(pa.table(columns), folder / "log.parquet")
    return folder / "log.parquet"


def _write_vectors(folder: Path, rng: random.Random) -> Path:
    columns = {
        "label": [rng.randrange(2) for _ in range(NUM_ROWS)],
        "score": [rng.random() for _ in range(NUM_ROWS)],
        "vector": [[rng.gauss(0, 1) for _ in range(10)] for _ in range(NUM_ROWS)],
    }
    pq.write_table(pa.table(columns), folder / "log.parquet")
    return folder / "log.parquet"


def _write_arrays(folder: Path, rng: random.Random) -> Path:
    draws = np.random.default_rng(rng.randrange(100))
    np.savez(
        folder / "log.npz",
        click=draws.integers(0, 2, NUM_ROWS),
        price=draws.lognormal(size=NUM_ROWS),
        user=draws.integers(0, 40, NUM_ROWS),
        history=draws.integers(1, 40, (NUM_ROWS, 5)),
    )
    return folder / "log.npz"


def _conversions_row(number: int, rng: random.Random) -> str:
    click = rng.randrange(2)
    return f"{click},{click * rng.randrange(2)},u{rng.randrange(60)},{rng.randrange(40)}.5"


def _indexed_row(number: int, rng: random.Random) -> str:
    time_ms = 1_600_000_000_000 + number * 71_000 + rng.randrange(999)
    word = rng.choice(["手机", "电脑", "衣服", "图书"])
    return f"{number},{rng.randrange(80)},{rng.randrange(1000, 1090)},{word},{time_ms},{number % 2}"


def _atomic_row(number: int, rng: random.Random) -> str:
    return f"{rng.randrange(60)}\t{rng.randrange(90)}\t{rng.randrange(1, 6)}\t{881250949 + number}"


def _numbers(rng: random.Random, missing: float) -> list[str]:
    return ["NA" if rng.random() < missing else f"{rng.gauss(0, 1):.4f}" for _ in range(28)]


def _census_row(number: int, rng: random.Random) -> str:
    job = rng.choice(["Sales", "Tech-support", "?", "Exec-managerial"])
    gain = rng.choice([0, 0, 0, rng.randrange(100, 9999)])
    age = min(90, 17 + int(rng.lognormvariate(2.8, 0.7)))
    weight = int(rng.lognormvariate(12, 0.5))
    label = rng.choice([">50K", "<=50K", "<=50K"])
    country = rng.choice(["United-States", "Cuba", "?"])
    return f"{age}, {job}, {weight}, {gain}, {country}, {label}"


def _bank_row(number: int, rng: random.Random) -> str:
    job = rng.choice(['"admin."', '"unknown"', '"services"'])
    days = rng.choice([-1, -1, 1 + int(rng.lognormvariate(4, 1))])
    answer = rng.choice(['"yes"', '"no"', '"no"'])
    return f"{rng.randrange(18, 90)};{job};{int(rng.lognormvariate(6, 1)) - 300};{days};{answer}"


def _books_row(number: int, rng: random.Random) -> str:
    title = rng.choice(["\xc9t\xe9 au lac", "Rock &amp; Roll", "Gr\xfcn", "Plain"])
    return (
        f'"{276725 + rng.randrange(60)}";"{rng.randrange(30):010d}";"{rng.randrange(11)}";"{title}"'
    )


def _session_row(number: int, rng: random.Random) -> str:
    time = datetime(2014, 4, 1, tzinfo=UTC) + timedelta(seconds=97 * number)
    text = time.strftime("%Y-%m-%dT%H:%M:%S.277Z")
    return f"{number // 4 + 1},{text},{214536500 + rng.randrange(90)},{rng.choice('0S3')}"


def _news_row(number: int, rng: random.Random) -> str:
    time = datetime(2019, 11, 11, 9, 5, 58) + timedelta(seconds=613 * number)
    history = " ".join(f"N{rng.randrange(90)}" for _ in range(rng.randrange(6)))
    shown = " ".join(f"N{rng.randrange(90)}-{int(place == 0)}" for place in range(3))
    text = time.strftime("%m/%d/%Y %I:%M:%S %p").lstrip("0")
    return f"{number + 1}\tU{rng.randrange(70)}\t{text}\t{history}\t{shown}"


def _json_row(number: int, rng: random.Random) -> str:
    row = {
        "clicked": rng.random() < 0.5,
        "user": f"u{rng.randrange(60)}",
        "price": round(rng.lognormvariate(2, 1), 2),
        "tags": [f"t{rng.randrange(9)}" for _ in range(rng.randrange(4))],
    }
    return json.dumps(row)


def _libsvm_row(number: int, rng: random.Random) -> str:
    features = " ".join(f"{1 + 9 * n + rng.randrange(9)}:{rng.random():.3f}" for n in range(4))
    return f"{rng.randrange(2)} {features}"


def _ranked_row(number: int, rng: random.Random) -> str:
    features = " ".join(f"{1 + 9 * n + rng.randrange(9)}:{rng.random():.3f}" for n in range(4))
    return f"{rng.randrange(5)} qid:{1 + number // 10} {features}"


def _write_graded(folder: Path, rng: random.Random) -> Path:
    lines = [_ranked_row(number, rng).replace("qid:", "").split() for number in range(NUM_ROWS)]
    text = "".join(" ".join([label, *features]) + "\n" for label, _, *features in lines)
    (folder / "rank.train").write_text(text)
    (folder / "rank.train.query").write_text("10\n" * (NUM_ROWS // 10))
    return folder / "rank.train"


def _libffm_row(number: int, rng: random.Random) -> str:
    features = " ".join(f"{n}:{9 * n + rng.randrange(9)}:{rng.random():.2f}" for n in range(3))
    return f"{rng.randrange(2)} {features}"


def _vw_row(number: int, rng: random.Random) -> str:
    label = rng.choice(["1", "-1"])
    return f"{label} |user u{rng.randrange(40)} |item i{rng.randrange(90)} price:{rng.random():.2f}"


def _slots_row(number: int, rng: random.Random) -> str:
    tags = " ".join(f"tag:{rng.randrange(30)}" for _ in range(rng.randrange(1, 4)))
    return f"click:{rng.randrange(2)} user:{rng.randrange(90)} {tags}"


def _write_partitions(folder: Path, rng: random.Random) -> Path:
    for day in range(1, 5):
        part = folder / "log" / f"day=2024-05-0{day}"
        part.mkdir(parents=True)
        rows = [
            {"click": rng.randrange(2), "user": f"u{rng.randrange(40)}", "price": rng.random()}
            for _ in range(NUM_ROWS // 4)
        ]
        pd.DataFrame(rows).to_parquet(part / "part-0.parquet")
    return folder / "log"


_NUMBERS = tuple(f"c{number}" for number in range(1, 29))

SHAPES: dict[str, Shape] = {
    "interleaved numbers and codes in .txt": Shape(
        _lines("log.txt", _clicks_row, "label,I1,C1,I2,C2,I3,C3"),
        "label",
        ("I1", "I2", "I3"),
        ("C1", "C2", "C3"),
    ),
    "ratings with genres": Shape(
        _lines(
            "ratings.txt",
            _ratings_row,
            "user_id,movie_id,rating,timestamp,gender,age,occupation,zip,genres",
        ),
        "rating",
        (),
        ("user_id", "movie_id", "gender", "age", "occupation", "zip", "genres"),
        ("genres",),
    ),
    "no header, -1 for missing": Shape(
        _lines("log.tsv", _unnamed_row),
        "c0",
        ("c13", "c14"),
        tuple(f"c{number}" for number in range(1, 13)),
    ),
    "sequence joined by ^": Shape(
        _lines("log.csv", _sequence_row, "click,user,item,history"),
        "click",
        (),
        ("user", "item", "history"),
        ("history",),
    ),
    "Parquet of ids": Shape(_write_parquet, "label", (), ("user_id", "item_id"), has_lines=False),
    "Parquet of numbers and a vector": Shape(
        _write_vectors,
        "label",
        ("score", *(f"vector[{number}]" for number in range(10))),
        has_lines=False,
    ),
    "npz of a dictionary": Shape(
        _write_arrays,
        "click",
        ("price",),
        ("user", "history"),
        ("history",),
        has_lines=False,
    ),
    "clicks and conversions": Shape(
        _lines("log.csv", _conversions_row, "click,conversion,user,price"),
        "click",
        ("price",),
        ("user",),
    ),
    "unnamed index, Chinese text, milliseconds": Shape(
        _lines("log.csv", _indexed_row, ",user,item_id,category,time_stamp,clk"),
        "clk",
        (),
        ("user", "item_id", "category"),
    ),
    "atomic file": Shape(
        _lines(
            "films.inter",
            _atomic_row,
            "user_id:token\titem_id:token\trating:float\ttimestamp:float",
        ),
        "rating",
        (),
        ("user_id", "item_id"),
    ),
    "28 numbers without header": Shape(
        _lines("binary.train", lambda n, rng: "\t".join([str(n % 2), *_numbers(rng, 0)])),
        "c0",
        _NUMBERS,
    ),
    "28 numbers with NA": Shape(
        _lines("binary.train", lambda n, rng: "\t".join([str(n % 2), *_numbers(rng, 0.03)])),
        "c0",
        _NUMBERS,
    ),
    "libsvm": Shape(_lines("a9a", _libsvm_row), "label", (), ("index",), ("index",)),
    "libsvm with queries": Shape(
        _lines("rank.txt", _ranked_row),
        "label",
        (),
        ("index", "group"),
        ("index",),
    ),
    "libsvm with a query file": Shape(
        _write_graded,
        "label",
        (),
        ("index", "group"),
        ("index",),
        has_lines=False,
    ),
    "libffm": Shape(
        _lines("log.ffm", _libffm_row),
        "label",
        (),
        ("field_0", "field_1", "field_2"),
        ("field_0", "field_1", "field_2"),
    ),
    "Vowpal Wabbit": Shape(
        _lines("log.vw", _vw_row),
        "label",
        (),
        ("user", "item"),
        ("user", "item"),
    ),
    "census": Shape(_lines("adult.data", _census_row), "c5", ("c0", "c2", "c3"), ("c1", "c4")),
    "bank": Shape(
        _lines("bank.csv", _bank_row, '"age";"job";"balance";"pdays";"y"'),
        "y",
        ("age", "balance", "pdays"),
        ("job",),
    ),
    "books in latin-1": Shape(
        _lines("latin.csv", _books_row, '"User-ID";"ISBN";"Book-Rating";"Title"'),
        "Book-Rating",
        (),
        ("User-ID", "ISBN", "Title"),
    ),
    "line ends of old Macs": Shape(
        _lines("log.csv", _conversions_row, "click,conversion,user,price", end="\r"),
        "click",
        ("price",),
        ("user",),
    ),
    "news impressions": Shape(
        _lines("behaviors.tsv", _news_row),
        "click",
        (),
        ("user", "item", "history"),
        ("history",),
        num_rows=3 * NUM_ROWS,
        has_lines=False,
    ),
    "clicks of sessions": Shape(
        _lines("clicks.dat", _session_row),
        None,
        (),
        ("c2", "target", "seen"),
        ("c2", "target", "seen"),
        num_rows=NUM_ROWS // 4,
        recipe="next_item",
        has_lines=False,
    ),
    "users and items with a blank between": Shape(
        _lines("pairs.txt", lambda n, rng: f"{rng.randrange(60)} {rng.randrange(90)}"),
        None,
        (),
        ("c0", "c1"),
        recipe="two_tower",
    ),
    "JSON lines": Shape(
        _lines("log.jsonl", _json_row),
        "clicked",
        ("price",),
        ("user", "tags"),
        ("tags",),
    ),
    "slots": Shape(_lines("part-0", _slots_row), "click", (), ("user", "tag"), ("tag",)),
    "partitions": Shape(_write_partitions, "click", ("price",), ("user",), has_lines=False),
}
"""Shapes by name."""
