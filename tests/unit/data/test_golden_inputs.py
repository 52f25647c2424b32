"""Golden Preprocessors, batches, indices and positions, bit-identical for all formats, shuffles and kinds of columns.

Regenerate knowingly: RAYREC_WRITE_GOLDEN=1.
"""

import gzip
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from builders import golden_inputs as data
from builders.golden import FOLDER, check_golden
from builders.golden_inputs import SCHEMAS, Log, any_rows, criteo_lines, digests, log_of, order_of, write_csv

SHUFFLES = ("none", "files", "window", "full")

# Preprocessors --------------------------------------------------------------------------------------------------------
PREPROCESSORS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    # case: log, schema, preset, changes of its rules
    **{f"criteo {preset}": ("text", "criteo", preset, {}) for preset in data.PRESETS},
    "criteo hashed": ("text", "criteo", "rayrec", {"max_num_embeddings": 16}),
    "criteo modulo": ("text", "criteo", "mlperf-v1", {"token_modulo": 50}),
    "plain": ("csv", "plain", "rayrec", {}),
    "lists": ("parquet", "lists", "ray-template", {}),
    "shared": ("csv", "shared", "mlperf-v1", {}),
    "everything": ("parquet", "everything", "fuxictr-x1", {}),
    "texts": ("csv", "texts", "torchrec-2024", {"max_num_embeddings": 16}),
    "hashed": ("parquet", "lists", "rayrec", {"max_num_embeddings": 12}),
    "aligned": ("csv", "aligned", "rayrec", {}),
}


@pytest.mark.parametrize("case", PREPROCESSORS)
def test_preprocessor_matches_golden(case: str, tmp_path: Path) -> None:
    kind, schema, preset, changes = PREPROCESSORS[case]
    check_golden("preprocessors", data.encoded(log_of(tmp_path, kind, SCHEMAS[schema](), preset, **changes)), case=case)


# Batches --------------------------------------------------------------------------------------------------------------
SOURCES: dict[str, Callable[[Path], Log]] = {
    "text": lambda folder: log_of(folder, "text", SCHEMAS["criteo"]().replace(group="cat_3")),
    "csv": lambda folder: log_of(folder, "csv", SCHEMAS["everything"]()),
    "parquet": lambda folder: log_of(folder, "parquet", SCHEMAS["everything"]()),
    "binary": lambda folder: log_of(folder, "text", SCHEMAS["criteo"]()),
    "npy": lambda folder: log_of(folder, "parquet", SCHEMAS["plain"]()),
    "npz": lambda folder: data.adopted(folder / "arrays"),
    "preprocessed parquet": lambda folder: log_of(folder, "parquet", SCHEMAS["everything"]().replace(group=None)),
    "hexadecimal csv": lambda folder: log_of(folder, "csv", SCHEMAS["criteo"]()),
    "hexadecimal parquet": lambda folder: log_of(folder, "parquet", SCHEMAS["criteo"]()),
    "buckets": lambda folder: log_of(folder, "text", SCHEMAS["criteo"](), "fuxictr-x4"),
    "bags": lambda folder: log_of(folder, "text", SCHEMAS["criteo"](), multi_hot=data.bags()),
}
WRITTEN = {"binary": "binary", "npy": "npy", "preprocessed parquet": "parquet", "buckets": "npy"}
"""Sources that are written in a preprocessed format first."""
PAIRS = [(source, shuffle, 1 + (i + j) % 3) for i, source in enumerate(list(SOURCES)[:7]) for j, shuffle in enumerate(SHUFFLES)]
"""Each format in each order, and each of both with 1, 2 and 3 workers."""
LOADERS: dict[str, tuple[str, dict[str, Any]]] = {
    "hexadecimal csv, large batch": ("hexadecimal csv", {"batch_size": 1000}),
    "hexadecimal parquet, small batches": ("hexadecimal parquet", {"batch_size": 3}),
    "buckets in memory": ("buckets", {"in_memory": True}),
    "bags, two epochs": ("bags", {"epochs": 2}),
    "csv, some unpooled, nine steps": ("csv", {"unpooled": ("history",), "epochs": 3, "max_steps": 9}),
    "parquet, all unpooled": ("parquet", {"unpooled": ("user", "item", "shop", "history", "tags")}),
}


@pytest.fixture(scope="module")
def source_log(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Log]:
    """Write each log of SOURCES once, and once per written order."""
    made: dict[tuple[str, str], Log] = {}

    def make(source: str, shuffle: str) -> Log:
        if (source, "") not in made:
            made[source, ""] = SOURCES[source](tmp_path_factory.mktemp("log"))
        key = (source, "full" if shuffle == "full" else "none") if source in WRITTEN else (source, "")
        if key not in made:
            out = tmp_path_factory.mktemp("prepared") / "out"
            made[key] = data.prepared(made[source, ""], out, format=WRITTEN[source], shuffle=shuffle)
        return made[key]

    return make


def check_batches(log: Log, case: str, shuffle: str, workers: int, **changes: Any) -> None:
    order = order_of(log, shuffle)
    loaders = [data.click_loader(log, order, rank, workers, **changes) for rank in range(workers)]
    check_golden("batches", digests(loaders), case=case)


@pytest.mark.parametrize(("source", "shuffle", "workers"), PAIRS)
def test_batches_match_golden(source_log: Callable[[str, str], Log], source: str, shuffle: str, workers: int) -> None:
    check_batches(source_log(source, shuffle), f"{source} {shuffle} {workers}", shuffle, workers)


@pytest.mark.parametrize("case", LOADERS)
def test_batches_of_other_loaders_match_golden(source_log: Callable[[str, str], Log], case: str) -> None:
    source, changes = LOADERS[case]
    check_batches(source_log(source, "window"), case, "window", 2, **changes)


# Damaged logs ---------------------------------------------------------------------------------------------------------
def damaged_lines(change: Callable[[bytes], list[bytes]]) -> list[bytes]:
    """Return lines with every seventh replaced by the changes in turn."""
    lines = criteo_lines(90, seed=7)
    for number, place in enumerate(range(3, len(lines), 7)):
        changed = change(lines[place])
        lines[place] = changed[number % len(changed)]
    return lines


def with_field(line: bytes, column: int, *texts: bytes) -> list[bytes]:
    fields = line.rstrip(b"\n").split(b"\t")
    return [b"\t".join([*fields[:column], text, *fields[column + 1 :]]) + b"\n" for text in texts]


TEXTS: dict[str, Callable[[], list[bytes]]] = {
    "blank lines": lambda: [b"\n", *(line[:-1] + b"\r\n" for line in damaged_lines(lambda line: [b"", b"  ", line]))],
    "columns": lambda: damaged_lines(lambda line: [line.replace(b"\t", b"", 1), b"\t" + line, b"1\n", b"\t" * 39 + b"\n"]),
    "labels": lambda: damaged_lines(lambda line: with_field(line, 0, b"2", b"", b"-1", b"yes", b"1.0", b" 1")),
    "integers": lambda: damaged_lines(lambda line: with_field(line, 4, b"1.5", b"-", b"7x", b"9" * 30, b"+5", b"-9", b" 4")),
    "hexadecimals": lambda: damaged_lines(
        lambda line: with_field(line, 20, b"0123456", b"012345678", b"0000000g", b"ABCDEF01", b"\xff" * 8, b"        ")
    ),
    "long lines": lambda: damaged_lines(lambda line: [b"x" * 5000 + b"\n", with_field(line, 9, b"1" * 9000)[0]]),
    "cut off": lambda: [*criteo_lines(60, seed=8), *criteo_lines(1, seed=9)[0].partition(b"\n")[:1]],
    "nothing good": lambda: [b"label,int_0\n", b"0,1\n"] * 5,
}


def damaged_rows() -> list[dict[str, Any]]:
    """Return rows with values that no column may have, in one column each."""
    rows = any_rows(300, seed=7)
    wrong: list[tuple[str, list[Any]]] = [
        ("click", [None, 2, -1]),
        ("importance", [None, -0.5, float("nan")]),
        ("age", [float("nan"), float("inf"), 3e18]),
        ("tag_weights", [[1.0] * 9, None, [float("nan")]]),
        ("like", [3, -1]),
        ("seconds", [None, float("inf")]),
        ("at", [None]),
    ]
    places = iter(range(2, 120, 5))
    for name, values in wrong:
        for value in values:
            rows[next(places)][name] = value
    return rows


def write_damaged_csv(path: Path) -> None:
    """Write CSV rows with unmatched quotes, line ends in fields, and too few and too many fields."""
    write_csv(path, damaged_rows())
    lines = path.read_bytes().splitlines(keepends=True)
    lines[90] = b'1,"two\r\nlines",' + lines[90]
    lines[95] = lines[95].replace(b",", b',"', 1)
    lines[100], lines[103] = b"1,2\r\n", b"\r\n"
    lines[106] = lines[106].replace(b"170", b"2023-02-30T", 1)
    path.write_bytes(b"".join(lines)[:-20])


def write_packed_csv(path: Path) -> None:
    write_damaged_csv(path)
    path.write_bytes(gzip.compress(path.read_bytes(), mtime=0))


def write_packed_text(path: Path) -> None:
    path.write_bytes(gzip.compress(b"".join(TEXTS["labels"]()), mtime=0))


def write_unaligned(path: Path) -> None:
    rows = any_rows(90, seed=4)
    for row in rows[5::9]:
        row["kinds"] = [*row["kinds"], "k1"]
    data.write_parquet(path, rows)


def write_hexadecimal_csv(path: Path) -> None:
    """Write CSV of a log of hexadecimal tokens with all faults of text except those of full lines."""
    names = ",".join(SCHEMAS["criteo"]().columns).encode() + b"\n"
    lines = [line for name in ("labels", "integers", "hexadecimals") for line in TEXTS[name]()]
    data.write_text(path, [names, *(line.replace(b"\t", b",") for line in lines)])


TABLES: dict[str, tuple[str, str, Callable[[Path], None]]] = {
    # case: name of the file, schema, what writes it
    "csv": ("log.csv", "everything", write_damaged_csv),
    "packed csv": ("log.csv.gz", "lists", write_packed_csv),
    "csv of hexadecimals": ("log.csv", "criteo", write_hexadecimal_csv),
    "parquet": ("log.parquet", "everything", lambda path: data.write_parquet(path, damaged_rows())),
    "parquet in large groups": ("log.parquet", "everything", lambda path: data.write_parquet(path, damaged_rows(), 1000)),
    "unaligned lists": ("log.parquet", "aligned", write_unaligned),
    "packed text": ("log.gz", "criteo", write_packed_text),
}


@pytest.mark.parametrize("case", [*TEXTS, *TABLES])
def test_index_of_damaged_log_matches_golden(case: str, tmp_path: Path) -> None:
    if case in TEXTS:
        data.write_text(tmp_path / "log", TEXTS[case]())
        found = data.index_of(tmp_path / "log", SCHEMAS["criteo"]())
    else:
        name, schema, write = TABLES[case]
        write(tmp_path / name)
        found = data.index_of(tmp_path / name, SCHEMAS[schema]())
    check_golden("damaged_logs", found, case=case)


# Positions ------------------------------------------------------------------------------------------------------------
MOVES = ((2, 2), (3, 1), (3, 1), (1, 3))
"""Workers and the steps that they take from where those before stopped."""


def resumed(make: Callable[..., Any], **changes: Any) -> dict[str, Any]:
    """Return states, tallies and batches of workers that resume with varying numbers of workers."""
    state, moves = None, []
    for workers, steps in MOVES:
        loaders = [make(rank, workers, state=state, max_steps=steps, **changes) for rank in range(workers)]
        rows = [loaders[0].rows(step) for step in range(steps + 1)]
        batches = digests(loaders)["batches"]
        states = [loader.state() for loader in loaders]
        assert all(other == states[0] for other in states)
        state = json.loads(json.dumps(states[0]))
        tally = loaders[0].trained_rows()
        moves.append({"state": state, "rows": rows, "behind": [tally.rows, *tally.checksums], "batches": batches})
    whole = make(0, 2, state=state)
    return {"moves": moves, "left": [whole.steps, whole.steps_per_epoch, whole.rows(whole.steps)]}


RESUMED = [("text", "window"), ("text", "none"), ("parquet", "files"), ("npy", "full"), ("csv", "window")]


@pytest.mark.parametrize(("source", "shuffle"), RESUMED)
def test_click_positions_match_golden(source_log: Callable[[str, str], Log], source: str, shuffle: str) -> None:
    log = source_log(source, shuffle)
    order = order_of(log, shuffle)

    def make(rank: int, workers: int, **changes: Any) -> Any:
        return data.click_loader(log, order, rank, workers, batch_size=25 + workers // 3, epochs=2, **changes)

    check_golden("positions", {"order": order.identity, **resumed(make)}, case=f"{source} {shuffle}")


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_row_positions_match_golden(shuffle: str) -> None:
    evaluated = digests([data.row_loader(shuffle, rank, 3, epochs=1, small_steps=True) for rank in range(3)])
    check_golden("positions", {"evaluated": evaluated, **resumed(partial(data.row_loader, shuffle))}, case=f"rows {shuffle}")


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_identity_of_order_matches_golden(shuffle: str) -> None:
    order = data.made_up_order(shuffle)
    blocks = [[block.order().tolist() for block in order.blocks(epoch)] for epoch in range(2)]
    check_golden("positions", {"order": order.identity, "blocks": blocks}, case=f"made-up {shuffle}")


CASES = {
    "preprocessors": set(PREPROCESSORS),
    "batches": {*(f"{source} {shuffle} {workers}" for source, shuffle, workers in PAIRS), *LOADERS},
    "damaged_logs": {*TEXTS, *TABLES},
    "positions": {
        *(f"{source} {shuffle}" for source, shuffle in RESUMED),
        *(f"{kind} {shuffle}" for kind in ("rows", "made-up") for shuffle in SHUFFLES),
    },
}


@pytest.mark.parametrize("name", CASES)
def test_golden_has_present_cases_only(name: str) -> None:
    assert set(json.loads((FOLDER / f"{name}.json").read_text())) == CASES[name]
