"""Hive folders, which each command reads like other files, in every format, locally and at a URL;
folders of table formats.
"""

import gzip
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as arrow_csv
import pyarrow.parquet as pq
import pytest
from builders.engines import LoopEngine
from builders.faults import rejects
from builders.logs import open_index
from builders.runs import LEAN, train
from builders.tables import create_iceberg, write_delta
from hosts.slow_store import SlowStore

from rayrec import cli, recipes, storage
from rayrec.data.encoding.preprocessor import Preprocessor
from rayrec.data.engine import TaskContext
from rayrec.data.formats.columns import parse_partitions
from rayrec.data.log_source import LogSource
from rayrec.data.logs.partitions import with_sampled_partitions
from rayrec.data.logs.reading import read_raw
from rayrec.schema import Schema, load_schema

SCHEMA = Schema(
    label="click",
    dense=("price", "level"),
    sparse=("user", "city", "hour"),
    timestamp="dt",
    tokens="any",
)
CITIES = (
    ("S%C3%A3o%20Paulo%2FSP", "São Paulo/SP"),
    ("Rio", "Rio"),
    ("__HIVE_DEFAULT_PARTITION__", None),
)
"""Names of folders, and the values they mean."""
LEVELS = (
    ("0.5", 0.5),
    ("3", 3.0),
    ("__HIVE_DEFAULT_PARTITION__", None),
)
FOLDERS = [
    (
        f"dt=2026-01-{1 + number // 2:02d}/click={number % 2}/level={LEVELS[number % 3][0]}/"
        f"hour={number:02d}/city={CITIES[number // 2 % 3][0]}",
        (
            f"2026-01-{1 + number // 2:02d}",
            number % 2,
            LEVELS[number % 3][1],
            f"{number:02d}",
            CITIES[number // 2 % 3][1],
        ),
    )
    for number in range(20)
]
"""Folders of partitions in path order, and the values of their columns dt, click, level, hour and
city.
"""
TYPES = {
    "dt": pa.string(),
    "click": pa.int64(),
    "level": pa.float64(),
    "hour": pa.string(),
    "city": pa.string(),
}
ROWS = 12
"""Rows of each folder."""
USERS = Schema(label="click", sparse=("user",), delimiter=",")


def part_of(number: int) -> pa.Table:
    rows = range(number * ROWS, (number + 1) * ROWS)
    return pa.table(
        {"price": [row % 7 / 2 for row in rows], "user": [f"u{row * 7 % 11}" for row in rows]}
    )


def write(table: pa.Table, folder: Path, kind: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "parquet":
        pq.write_table(table, folder / "part.parquet")
        return
    text = pa.BufferOutputStream()
    arrow_csv.write_csv(table, text)
    data = text.getvalue().to_pybytes()
    (folder / f"part.{kind}").write_bytes(gzip.compress(data) if kind == "csv.gz" else data)


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch) -> SlowStore:
    return SlowStore(latency_s=0).installed(monkeypatch)


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders with the same rows: `flat`, with all columns in the files, and one for each format
    with partitions. A model.
    """
    root = tmp_path_factory.mktemp("hive")
    (root / "flat").mkdir()
    for number, (folder, values) in enumerate(FOLDERS):
        part = part_of(number)
        for kind in ("parquet", "csv", "csv.gz"):
            write(part, root / kind / folder, kind)
        for (name, kind), value in zip(TYPES.items(), values, strict=True):
            part = part.append_column(name, pa.array([value] * ROWS, kind))
        pq.write_table(part, root / "flat" / f"part_{number:02d}.parquet")
    columns = "label: click, dense: [price, level], sparse: [user, city, hour], timestamp: dt"
    (root / "schema.yaml").write_text(f"{{{columns}, delimiter: ','}}")
    config = recipes.clicks(str(root / "flat"), schema=SCHEMA).replace(
        storage_path=str(root),
        name="model",
        steps=2,
        **LEAN,
    )
    train(config)
    return root


class Commands:
    """Commands on a log, by name. The result of each must not depend on the log's layout."""

    def __init__(self, logs: Path, folder: Path, capsys: Any) -> None:
        self._schema = ("--schema", str(logs / "schema.yaml"))
        self._folder = folder
        self._capsys = capsys
        self._model = str(logs / "model")

    def _run(self, *arguments: str) -> Any:
        self._capsys.readouterr()
        status = cli.run([*arguments, "-q"])
        printed = self._capsys.readouterr()
        assert status == 0, printed.err
        return json.loads(printed.out) if printed.out.startswith("{") else printed.out

    def _out(self, name: str) -> str:
        return str(self._folder / name)

    def _train(self, command: str, path: str, *arguments: str) -> Any:
        return self._run(
            command,
            "clicks",
            "--data",
            path,
            *self._schema,
            "--storage-path",
            self._out("runs"),
            "--name",
            "run",
            "--steps",
            "2",
            *arguments,
        )

    def train(self, path: str) -> Any:
        summary = self._train("train", path)
        return [summary[name] for name in ("bad_rows", "metrics", "validation", "weights_sha256")]

    def warm_start(self, path: str) -> Any:
        return self._train("train", path, "--init-from", self._model)["weights_sha256"]

    def tune(self, path: str) -> Any:
        Path(self._out("space.yaml")).write_text(
            "workload.dense_optimizer.learning_rate: {grid: [0.001]}"
        )
        return [
            trial["best"]
            for trial in self._train(
                "tune",
                path,
                "--search",
                self._out("space.yaml"),
                "--cluster.address",
                "none",
            )["trials"]
        ]

    def plan(self, path: str) -> Any:
        arguments = (
            "--data",
            path,
            *self._schema,
            "--workload.preprocessor",
            f"{self._model}/preprocessor",
        )
        return self._run("plan", "clicks", *arguments).splitlines()[:4]

    def validate(self, path: str) -> Any:
        report = self._run("validate", path, *self._schema)
        return [
            report[name]
            for name in (
                "rows",
                "bad_rows",
                "label",
                "dense",
                "sparse",
            )
        ]

    def vocabulary(self, path: str) -> Any:
        self._run("vocabulary", path, *self._schema, "--out", self._out("vocabulary"))
        preprocessor = Preprocessor.load(self._out("vocabulary"))
        # The order of a file's columns depends on the layout
        schema = preprocessor.schema.replace(header=None, header_row=False)
        return replace(preprocessor, schema=schema).hash()

    def preprocess(self, path: str) -> Any:
        self._run(
            "preprocess",
            path,
            *self._schema,
            "--out",
            self._out("encoded"),
            "--format",
            "parquet",
        )
        return self._columns("encoded")

    def split(self, path: str) -> Any:
        self._run(
            "split",
            path,
            *self._schema,
            "--out",
            self._out("parts"),
            "--by",
            "group",
            "--group",
            "hour",
        )
        index = open_index(self._out("parts"), SCHEMA, cache=self._out("cache"))
        raw = read_raw(index.segments, SCHEMA)
        return (
            raw.numbers.tolist(),
            raw.categories.tolist(),
            raw.labels["click"].tolist(),
            raw.times.tolist(),
        )

    def evaluate(self, path: str) -> Any:
        return self._run("evaluate", self._model, path)

    def compare(self, path: str) -> Any:
        return [
            (model["auroc"], model["logloss"])
            for model in self._run("compare", self._model, self._model, path)["models"]
        ]

    def predict(self, path: str) -> Any:
        self._run("predict", self._model, path, "--out", self._out("scores"))
        return self._columns("scores")

    def _columns(self, folder: str) -> Any:
        files = sorted(Path(self._out(folder)).rglob("*.parquet"))
        return pa.concat_tables(
            [pq.read_table(file, partitioning=None) for file in files]
        ).to_pydict()


LAYOUTS = {
    "local-parquet": ("", "parquet"),
    "local-csv.gz": ("", "csv.gz"),
    "file-csv": ("file://", "csv"),
    "store-parquet": ("slow://", "parquet"),
    "store-csv": ("slow://", "csv"),
    "local-delta": ("", "delta"),
    "local-iceberg": ("", "iceberg"),
    "store-iceberg": ("slow://", "iceberg"),
}
"""Scheme and format of each layout."""
SHORT = ("schema", "train", "evaluate", "predict")
"""Commands on tables that CI runs first; the others read them the same way."""


def marks_of(command: str, name: str) -> list[pytest.MarkDecorator]:
    is_long = name.endswith(("delta", "iceberg")) and command not in SHORT
    return [pytest.mark.extended] if is_long else []


CASES = [
    pytest.param(command, *layout, id=f"{command}-{name}", marks=marks_of(command, name))
    for command in vars(Commands)
    for name, layout in LAYOUTS.items()
    if not command.startswith("_")
    and (command != "tune" or name in ("local-csv.gz", "store-parquet", "local-delta"))
]


@pytest.fixture(scope="module")
def lakes(logs: Path) -> Path:
    """Tables beside the logs, with the same rows after some commits, and files that are not
    theirs.
    """
    rows = pa.concat_tables(
        pq.read_table(logs / "flat" / f"part_{number:02d}.parquet")
        for number in range(len(FOLDERS))
    )
    by = ["dt", "click", "level", "hour", "city"]
    old = rows.slice(0, 5 * ROWS)
    write_delta(old, logs / "delta", by=by)
    write_delta(rows.slice(9 * ROWS), logs / "delta", by=by, mode="overwrite")
    write_delta(rows.slice(0, 9 * ROWS), logs / "delta", by=by)
    table = create_iceberg(logs / "iceberg", rows.schema, by=by)
    table.append(old)
    table.overwrite(rows.slice(9 * ROWS))
    table.append(rows.slice(0, 9 * ROWS))
    for folder in ("delta", "iceberg"):
        live = next((logs / folder).rglob("*.parquet"))
        shutil.copy(live, live.with_name("uncommitted.parquet"))
    return logs


def lake(request: pytest.FixtureRequest, kind: str) -> None:
    """Have the tables written if the log is one."""
    if kind in ("delta", "iceberg"):
        request.getfixturevalue("lakes")


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    """Results of commands on the log without partitions, by name."""
    return {}


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize(("command", "scheme", "kind"), CASES)
def test_commands_read_partitions_like_columns(
    logs: Path,
    tmp_path: Path,
    capsys: Any,
    expected: dict[str, Any],
    request: pytest.FixtureRequest,
    command: str,
    scheme: str,
    kind: str,
) -> None:
    lake(request, kind)
    if command not in expected:
        (tmp_path / "flat").mkdir()
        expected[command] = getattr(Commands(logs, tmp_path / "flat", capsys), command)(
            f"{logs}/flat"
        )
    assert (
        getattr(Commands(logs, tmp_path, capsys), command)(f"{scheme}{logs}/{kind}")
        == expected[command]
    )


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize(("scheme", "kind"), LAYOUTS.values(), ids=LAYOUTS)
def test_drafted_schema_names_partition_columns(
    logs: Path,
    tmp_path: Path,
    capsys: Any,
    request: pytest.FixtureRequest,
    scheme: str,
    kind: str,
) -> None:
    lake(request, kind)
    assert (
        cli.run(["schema", f"{scheme}{logs}/{kind}", "--out", str(tmp_path / "draft.yaml")]) == 0
    ), capsys.readouterr().err
    schema = load_schema((tmp_path / "draft.yaml").read_text(), "draft")
    assert (schema.label, set(schema.columns)) == ("click", {"click", "price", "user", *TYPES})
    assert open_index(
        f"{scheme}{logs}/{kind}",
        schema,
        cache=tmp_path / "cache",
    ).rows == ROWS * len(FOLDERS)


@pytest.mark.parametrize(
    "kind",
    [
        "parquet",
        "csv",
    ],
)
def test_file_column_overrides_partition(kind: str, tmp_path: Path) -> None:
    write(pa.table({"click": [0, 1], "user": ["a", "b"]}), tmp_path / kind / "user=c", kind)
    index = open_index(tmp_path / kind, USERS, cache=tmp_path / "cache")
    assert (
        read_raw(index.segments, USERS).categories[0, 0]
        != read_raw(index.segments, USERS).categories[1, 0]
    )


@pytest.mark.parametrize("kind", ["parquet", "csv"])
@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (
            USERS.replace(dense=("land",)),
            "column land is the partition land=de, which is not a number; add it to the sparse",
        ),
        (
            USERS.replace(weight="land"),
            "column land is the partition land=de, which is not a number; add it to the sparse",
        ),
        (
            USERS.replace(timestamp="land"),
            "column land is the partition land=de, which is not a time; name another column",
        ),
    ],
    ids=["dense", "weight", "timestamp"],
)
def test_unusable_partition_values_are_rejected(
    tmp_path: Path,
    kind: str,
    schema: Schema,
    message: str,
) -> None:
    write(pa.table({"click": [0, 1] * 4, "user": ["a", "b"] * 4}), tmp_path / "land=de", kind)
    for labelled in (schema, schema.replace(label=None)):
        rejects(message, LogSource.at(str(tmp_path)).check_head, labelled)
    context = TaskContext(LoopEngine(), str(tmp_path / "cache"))
    rejects(message, LogSource.at(str(tmp_path)).index, schema, segment_bytes=1000, context=context)
    assert not (tmp_path / "cache").exists()  # nothing was rewritten before


def test_partition_columns_of_paths() -> None:
    folder = "a%20b=S%C3%A3o/c=__HIVE_DEFAULT_PARTITION__/d="
    values = {"a b": "São", "c": None, "d": None}
    assert parse_partitions(f"/x=1/log/{folder}/part.parquet") == values
    assert parse_partitions(f"s3://bucket/log/{folder}/part.parquet?region=eu") == values
    assert parse_partitions(f"file:///log/{folder.replace('%', '%25')}/part.parquet") == values


@pytest.mark.parametrize(
    ("num_files", "rows", "days"),
    [
        pytest.param(8, 4, ["0", "2", "4", "6"], id="more files"),
        pytest.param(2, 4, ["0", "1", "0", "1"], id="more rows"),
        pytest.param(2, 0, [], id="no rows"),
    ],
)
def test_partitions_of_samples_are_spread_over_files(
    num_files: int,
    rows: int,
    days: list[str],
) -> None:
    files = [storage.File(f"/log/day={number}/a.parquet", 1, 0) for number in range(num_files)]
    sample = with_sampled_partitions(pa.table({"x": list(range(rows))}), files)
    assert sample["day"].to_pylist() == days


TABLES = {
    "Delta": ("_delta_log/00000000000000000000.json", ""),
    "Hudi": (".hoodie/hoodie.properties", ""),
    "Iceberg": ("metadata/00000-1b2c.metadata.json", "data/"),
}
"""A file that makes a folder a table of a format, and the folder of its data files."""


def write_lake(folder: Path, kind: str) -> str:
    """Write a partitioned table of a format, and return the folder of its data files relative to
    it.
    """
    marker, inside = TABLES[kind]
    (folder / marker).parent.mkdir(parents=True)
    (folder / marker).write_text("{}")
    for day in (1, 2):
        write(
            part_of(0).append_column("click", pa.array([0, 1] * (ROWS // 2))),
            folder / inside / f"dt=2026-01-0{day}",
            "parquet",
        )
    return inside


@pytest.mark.parametrize("scheme", ["", "file://", "slow://"])
@pytest.mark.parametrize("kind", TABLES)
def test_paths_in_table_formats_are_rejected(tmp_path: Path, kind: str, scheme: str) -> None:
    inside = write_lake(tmp_path / "lake", kind)
    table = f"{'' if scheme == 'file://' else scheme}{tmp_path}/lake"
    is_read = kind != "Hudi"
    fix = (
        "Use the table's folder itself, .*/lake, as a click log"
        if is_read
        else "Write its current rows as Parquet, or pass ray.data.read_hudi"
    )
    for path in (
        "",
        "/",
        f"/{inside}",
        f"/{inside}dt=2026-01-01",
        f"/{inside}dt=2026-01-02/part.parquet",
        f"/{inside}dt=*",
        "/**/*.parquet",
    ):
        line = rejects(
            f"{kind} table.*as plain files.* {fix}",
            storage.list_files,
            f"{scheme}{tmp_path}/lake{path}",
        )
        assert table in line
        # Click logs are of whole tables
        if not is_read or path.strip("/"):
            rejects(fix, LogSource.at(f"{scheme}{tmp_path}/lake{path}").raw_files)


@pytest.mark.parametrize("scheme", ["", "slow://"])
def test_tables_in_partitions_are_rejected(tmp_path: Path, scheme: str) -> None:
    write(part_of(0), tmp_path / "log" / "land=de" / "dt=1", "parquet")
    write_lake(tmp_path / "log" / "land=fr", "Delta")
    rejects(
        "the Delta table .*log/land=fr as plain files",
        storage.list_files,
        f"{scheme}{tmp_path}/log",
    )


def test_folders_of_globs_are_checked_evenly(tmp_path: Path) -> None:
    """Every second of 32 folders is checked for a table, also among the last."""
    for number in range(32):
        (tmp_path / f"day_{number:02}").mkdir()
        (tmp_path / f"day_{number:02}" / "a.parquet").touch()
    assert len(storage.list_files(f"{tmp_path}/*/a.parquet")) == 32
    (tmp_path / "day_30" / "_delta_log").mkdir()
    rejects(
        "the Delta table .*/day_30 as plain files",
        storage.list_files,
        f"{tmp_path}/*/a.parquet",
    )


@pytest.mark.parametrize("scheme", ["", "slow://"])
def test_folders_beside_tables_are_listed(tmp_path: Path, scheme: str) -> None:
    write(part_of(0), tmp_path / "log", "parquet")
    write_lake(tmp_path / "log" / "old", "Delta")
    (tmp_path / "log" / "metadata").mkdir()
    (tmp_path / "log" / "metadata" / "notes.json").write_text("{}")
    assert [file.path for file in storage.list_files(f"{scheme}{tmp_path}/log")] == [
        f"{scheme}{tmp_path}/log/part.parquet"
    ]


def test_store_lookups_for_tables_are_bounded(tmp_path: Path, store: SlowStore) -> None:
    for number in range(200):
        write(part_of(0), tmp_path / "log" / f"dt={number}", "parquet")
    assert len(storage.list_files(f"slow://{tmp_path}/log/dt=*/*")) == 200
    assert store.calls["info"] < 60, store.calls
    store.reset()
    (tmp_path / "day.csv").write_text("click,user\n1,a\n")
    storage.list_files(f"slow://{tmp_path}/day.csv")
    # only Parquet, ORC and Avro files can be a table's
    assert store.calls.total() == 1, store.calls


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("command", [name for name in vars(Commands) if not name.startswith("_")])
def test_commands_reject_hudi_tables(logs: Path, tmp_path: Path, capsys: Any, command: str) -> None:
    write_lake(tmp_path / "lake", "Hudi")
    with pytest.raises(AssertionError, match="this Hudi table as plain files"):
        getattr(Commands(logs, tmp_path, capsys), command)(str(tmp_path / "lake"))
