"""Bytes of what commands write, ids of exports, data reports, losses and orders of rows: the same
as ever.
"""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow as pa
import pyarrow.csv as arrow_csv
import pytest
from builders import golden_inputs as data
from builders import golden_outputs as outputs
from builders.click_models import multi_hot_preprocessor
from builders.digits import idx
from builders.golden import FOLDER, check_golden
from builders.golden_inputs import SCHEMAS, Log, digests, log_of, order_of

import rayrec
from rayrec import recipes
from rayrec.schema import Schema

pytestmark = pytest.mark.usefixtures("own_cache")


def test_outputs_of_threads_are_golden(tmp_path: Path) -> None:
    made: dict[str, Any] = {}
    for name, make in outputs.output_makers(tmp_path).items():
        make(tmp_path / name, "threads")
        made[name] = outputs.digests(tmp_path / name, root=tmp_path)
    check_golden("outputs", made)


@pytest.mark.parametrize("name", ["criteo", "own"])
def test_predictions_of_threads_are_golden(name: str, tmp_path: Path) -> None:
    check_golden(
        f"predictions_{name}", outputs.predictions(name, tmp_path, address="none"), tolerance=1e-4
    )


# -- Exports' encode.py
ROWS = 4_000
CRITEO = outputs.CRITEO
OWN = outputs.OWN
QUIET = outputs.QUIET
HEXADECIMAL = CRITEO.replace(dense=CRITEO.dense[:4], sparse=CRITEO.sparse[:6])
EXPORTED = OWN.replace(
    label="click",
    labels=(),
    weight=None,
    timestamp=None,
    features=OWN.features[:2],
    optional=("price",),
)
"""Without weights of lists, which exports refuse."""
ENCODERS: dict[str, tuple[Schema, dict[str, Any]]] = {
    "rayrec": (HEXADECIMAL, {}),
    "rayrec, hashed": (HEXADECIMAL, {"max_num_embeddings": 30}),
    "mlperf-v1": (HEXADECIMAL, {"token_modulo": 40}),
    "torchrec": (HEXADECIMAL, {"max_num_embeddings": 50}),
    "torchrec-2024": (HEXADECIMAL, {}),
    "ray-template": (HEXADECIMAL, {}),
    "nvt": (CRITEO, {}),
    "fuxictr-x4": (HEXADECIMAL, {}),
    "own": (EXPORTED, {}),
    "own, hashed": (EXPORTED, {"max_num_embeddings": 25}),
    "own, fuxictr-x1": (EXPORTED.replace(nan="fault", category_rules=1), {"preset": "fuxictr-x1"}),
}


def _criteo_frame(schema: Schema) -> pandas.DataFrame:
    rng = np.random.default_rng(1)

    def some(values: list[Any]) -> list[Any]:
        return [
            value if keep else None
            for value, keep in zip(values, rng.random(ROWS) < 0.9, strict=True)
        ]

    columns: dict[str, Any] = {"label": rng.integers(0, 2, ROWS)}
    for name in schema.dense:
        columns[name] = pandas.array(
            some(np.rint(rng.standard_cauchy(ROWS) * 9).astype(int).tolist()), "Int64"
        )
    for number, name in enumerate(schema.sparse):
        columns[name] = some(
            [f"{(n * 2654435761 + number) % 2**32:08x}" for n in rng.zipf(1.3, ROWS) % 5000]
        )
    return pandas.DataFrame(columns)


def _own_frame(schema: Schema) -> pandas.DataFrame:
    table = outputs.own_table(ROWS).select(list(schema.columns))
    if schema.nan == "fault":
        table = table.set_column(
            table.column_names.index("price"), "price", pa.array(np.arange(ROWS) / 7)
        )
    return table.to_pandas(date_as_object=True, integer_object_nulls=True)


def _check_encoder(preprocessor: Path, frame: pandas.DataFrame) -> dict[str, str]:
    """Digests of what an export's encode.py makes of rows, which is what `rayrec.transform` makes
    of them.
    """
    encoder = outputs.exported_encoder(preprocessor)
    rows = [
        {name: None if x is pandas.NA else x for name, x in row.items()}
        for row in frame.to_dict("records")
    ]
    dense, ids = encoder.encode(rows)
    inputs = rayrec.transform(str(preprocessor), frame)
    names = [name for name in inputs.columns if name not in ("label", "click")]
    for number in range(dense.shape[1]):
        np.testing.assert_allclose(
            dense[:, number], inputs[names[number]], rtol=1e-6, atol=1e-6, err_msg=names[number]
        )
    numbers = hashlib.sha256(np.where(np.isnan(dense), np.float32(np.nan), dense).tobytes())
    categories = hashlib.sha256()
    for name, found in zip(names[dense.shape[1] :], ids, strict=True):
        values, lengths = (
            found if isinstance(found, tuple) else (found, np.full(ROWS, found[0].size))
        )
        expected = [np.atleast_1d(value) for value in inputs[name]]
        np.testing.assert_array_equal(values.reshape(-1), np.concatenate(expected), err_msg=name)
        np.testing.assert_array_equal(
            lengths, [len(row_values) for row_values in expected], err_msg=name
        )
        categories.update(values.astype(np.int64).tobytes() + lengths.astype(np.int64).tobytes())
    return {"numbers": numbers.hexdigest()[:32], "ids": categories.hexdigest()[:32]}


def test_export_encoders_match_goldens_and_kernels(tmp_path: Path) -> None:
    made: dict[str, Any] = {}
    for name, (schema, options) in ENCODERS.items():
        folder = tmp_path / name
        folder.mkdir()
        if schema.tokens == "hexadecimal":
            frame = _criteo_frame(schema)
            log = folder / "log.tsv"
            frame.to_csv(
                log,
                sep="\t",
                header=False,
                index=False,
            )
            options = {"preset": name.partition(",")[0], **options}
        else:
            frame = _own_frame(schema)
            log = folder / "log.parquet"
            frame.to_parquet(log)
        outputs.counted(schema, str(log), folder / "preprocessor", **options)
        made[name] = _check_encoder(folder / "preprocessor", frame)
    for distribution in ("uniform", "pareto"):
        given = multi_hot_preprocessor(6)
        given = dataclasses.replace(
            given, multi_hot=given.multi_hot.replace(distribution=distribution)
        )
        folder = tmp_path / distribution / "preprocessor"
        folder.parent.mkdir()
        given.save(str(folder))
        made[f"multi-hot, {distribution}"] = _check_encoder(folder, _criteo_frame(given.schema))
    check_golden("encoders", made)


# -- Data reports
def test_data_reports_are_golden(tmp_path: Path) -> None:
    criteo = outputs.write_criteo_log(tmp_path, rows=1200, faults=True)
    own = outputs.write_own_log(tmp_path / "own", rows=800)
    table = outputs.own_table(500, seed=6)
    texts = {
        name: table[name]
        for name in (
            "click",
            "age",
            "price",
            "user",
            "item",
            "flag",
        )
    }
    arrow_csv.write_csv(pa.table(texts), tmp_path / "own.csv")
    lines = (tmp_path / "own.csv").read_bytes().splitlines(keepends=True)
    lines[9:9] = [
        b"1,x,2,u,3,true\n",
        b"2,1,2,u,3,true\n",
        b"1,1,2,u,1.5,true\n",
        b"1,1\n",
        lines[5],
        lines[5],
    ]
    (tmp_path / "own.csv").write_bytes(b"".join(lines))
    text = Schema(
        label="click",
        dense=("age", "price"),
        sparse=("user", "item", "flag"),
        integers=("item",),
        nan="missing",
        delimiter=",",
        tokens="any",
    )
    outputs.counted(
        OWN,
        outputs.write_own_log(tmp_path / "earlier", rows=300, seed=7),
        tmp_path / "preprocessor",
    )
    outputs.counted(
        CRITEO, criteo, tmp_path / "buckets", preset="fuxictr-x4", max_bad_fraction=0.1, min_count=4
    )
    gates = rayrec.Gates(
        max_unknown_rate=0.2,
        max_drift=0.1,
        max_missing_rate=0.2,
        max_duplicate_rate=0.001,
        min_rows=10**6,
    )
    validate = functools.partial(rayrec.validate, console=QUIET, engine="threads")
    reports = {
        "criteo": validate(criteo, block_bytes=1 << 16, segments_per_block=4),
        "criteo, buckets": validate(criteo, gates=gates, preprocessor=str(tmp_path / "buckets")),
        "own": validate(own, schema=OWN, min_count=2),
        "own, known": validate(
            own, schema=OWN, preprocessor=str(tmp_path / "preprocessor"), gates=gates
        ),
        "csv": validate(str(tmp_path / "own.csv"), schema=text),
    }
    plain = json.dumps({name: report.to_dict() for name, report in reports.items()}).replace(
        str(tmp_path), "FOLDER"
    )
    check_golden("data_reports", json.loads(plain), tolerance=1e-6)


# -- Losses and orders
def _images(folder: Path, rows: int) -> rayrec.TrainConfig:
    for part in ("train", "t10k"):
        images = np.zeros((rows, 2, 2), np.uint8)
        images[:, 0] = np.stack(divmod(np.arange(rows), 256), axis=1)
        (folder / f"{part}-images-idx3-ubyte").write_bytes(idx(images))
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(
            idx((np.arange(rows) % 10).astype(np.uint8))
        )
    return recipes.mnist_resnet18(str(folder)).replace(batch_size=7)


def _text(folder: Path, rows: int) -> rayrec.TrainConfig:
    characters = "".join(chr(97 + n) for n in range(20))
    text = "".join(
        f"{characters[n // 20]}{characters[n % 20]}" + "rayrec is here"[:13] + "\n"
        for n in range(rows)
    )
    (folder / "log.txt").write_text(text)
    rayrec.preprocess(
        str(folder / "log.txt"),
        out=str(folder / "tokens"),
        format="mds",
        console=QUIET,
        tokenizer="characters",
        block_size=16,
        part_bytes=1024,
        shard_bytes=1024,
    )
    return recipes.gpt2_tiny(str(folder / "tokens")).replace(
        batch_size=7, workload={"model": {"n_positions": 16}}
    )


@pytest.mark.parametrize("make", [_images, _text], ids=["images", "text"])
def test_orders_of_rows_are_golden(
    make: Callable[[Path, int], rayrec.TrainConfig], tmp_path: Path
) -> None:
    config = make(tmp_path, 121)
    found = {}
    for shuffle in ("none", "files", "window", "full"):
        for world_size in (1, 3):
            given = config.replace(
                train_data={"shuffle": shuffle}, epochs=2, scaling={"num_workers": world_size}
            )
            found[f"{shuffle}, {world_size}"] = outputs.rows_in_order(given, world_size=world_size)
    check_golden(f"order_of{make.__name__}", found)


# -- Preprocessors, batches and positions, bit-identical for all formats, shuffles and kinds of
# columns
SHUFFLES = ("none", "files", "window", "full")

# -- Preprocessors
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
    check_golden(
        "preprocessors",
        data.encoded(log_of(tmp_path, kind, SCHEMAS[schema](), preset, **changes)),
        case=case,
    )


# -- Batches
SOURCES: dict[str, Callable[[Path], Log]] = {
    "text": lambda folder: log_of(folder, "text", SCHEMAS["criteo"]().replace(group="cat_3")),
    "csv": lambda folder: log_of(folder, "csv", SCHEMAS["everything"]()),
    "parquet": lambda folder: log_of(folder, "parquet", SCHEMAS["everything"]()),
    "binary": lambda folder: log_of(folder, "text", SCHEMAS["criteo"]()),
    "npy": lambda folder: log_of(folder, "parquet", SCHEMAS["plain"]()),
    "npz": lambda folder: data.adopted(folder / "arrays"),
    "preprocessed parquet": lambda folder: log_of(
        folder, "parquet", SCHEMAS["everything"]().replace(group=None)
    ),
    "hexadecimal csv": lambda folder: log_of(folder, "csv", SCHEMAS["criteo"]()),
    "hexadecimal parquet": lambda folder: log_of(folder, "parquet", SCHEMAS["criteo"]()),
    "buckets": lambda folder: log_of(folder, "text", SCHEMAS["criteo"](), "fuxictr-x4"),
    "bags": lambda folder: log_of(folder, "text", SCHEMAS["criteo"](), multi_hot=data.bags()),
}
WRITTEN = {
    "binary": "binary",
    "npy": "npy",
    "preprocessed parquet": "parquet",
    "buckets": "npy",
}
"""Sources that are written in a preprocessed format first."""
PAIRS = [
    (source, shuffle, 1 + (i + j) % 3)
    for i, source in enumerate(list(SOURCES)[:7])
    for j, shuffle in enumerate(SHUFFLES)
]
"""Each format in each order, and each of both with 1, 2 and 3 workers."""
LOADERS: dict[str, tuple[str, dict[str, Any]]] = {
    "hexadecimal csv, large batch": ("hexadecimal csv", {"batch_size": 1000}),
    "hexadecimal parquet, small batches": ("hexadecimal parquet", {"batch_size": 3}),
    "buckets in memory": ("buckets", {"in_memory": True}),
    "bags, two epochs": ("bags", {"epochs": 2}),
    "csv, some unpooled, nine steps": (
        "csv",
        {"unpooled": ("history",), "epochs": 3, "max_steps": 9},
    ),
    "parquet, all unpooled": ("parquet", {"unpooled": ("user", "item", "shop", "history", "tags")}),
}


@pytest.fixture(scope="module")
def source_log(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Log]:
    """Write each log of SOURCES once, and once per written order."""
    made: dict[tuple[str, str], Log] = {}

    def make(source: str, shuffle: str) -> Log:
        if (source, "") not in made:
            made[source, ""] = SOURCES[source](tmp_path_factory.mktemp("log"))
        key = (
            (source, "full" if shuffle == "full" else "none") if source in WRITTEN else (source, "")
        )
        if key not in made:
            out = tmp_path_factory.mktemp("prepared") / "out"
            made[key] = data.prepared(
                made[source, ""], out, format=WRITTEN[source], shuffle=shuffle
            )
        return made[key]

    return make


def check_batches(log: Log, case: str, shuffle: str, workers: int, **changes: Any) -> None:
    order = order_of(log, shuffle)
    loaders = [data.click_loader(log, order, rank, workers, **changes) for rank in range(workers)]
    check_golden("batches", digests(loaders), case=case)


@pytest.mark.parametrize(("source", "shuffle", "workers"), PAIRS)
def test_batches_match_golden(
    source_log: Callable[[str, str], Log], source: str, shuffle: str, workers: int
) -> None:
    check_batches(source_log(source, shuffle), f"{source} {shuffle} {workers}", shuffle, workers)


@pytest.mark.parametrize("case", LOADERS)
def test_batches_of_other_loaders_match_golden(
    source_log: Callable[[str, str], Log], case: str
) -> None:
    source, changes = LOADERS[case]
    check_batches(source_log(source, "window"), case, "window", 2, **changes)


# -- Positions
MOVES = ((2, 2), (3, 1), (3, 1), (1, 3))
"""Workers and the steps that they take from where those before stopped."""


def resumed(make: Callable[..., Any], **changes: Any) -> dict[str, Any]:
    """Return states, tallies and batches of workers that resume with varying numbers of workers."""
    state = None
    moves = []
    for workers, steps in MOVES:
        loaders = [
            make(
                rank,
                workers,
                state=state,
                max_steps=steps,
                **changes,
            )
            for rank in range(workers)
        ]
        rows = [loaders[0].rows(step) for step in range(steps + 1)]
        batches = digests(loaders)["batches"]
        states = [loader.state() for loader in loaders]
        assert all(other == states[0] for other in states)
        state = json.loads(json.dumps(states[0]))
        tally = loaders[0].trained_rows()
        moves.append(
            {
                "state": state,
                "rows": rows,
                "behind": [tally.rows, *tally.checksums],
                "batches": batches,
            }
        )
    whole = make(0, 2, state=state)
    return {"moves": moves, "left": [whole.steps, whole.steps_per_epoch, whole.rows(whole.steps)]}


RESUMED = [
    ("text", "window"),
    ("text", "none"),
    ("parquet", "files"),
    ("npy", "full"),
    ("csv", "window"),
]


@pytest.mark.parametrize(("source", "shuffle"), RESUMED)
def test_click_positions_match_golden(
    source_log: Callable[[str, str], Log], source: str, shuffle: str
) -> None:
    log = source_log(source, shuffle)
    order = order_of(log, shuffle)

    def make(rank: int, workers: int, **changes: Any) -> Any:
        return data.click_loader(
            log, order, rank, workers, batch_size=25 + workers // 3, epochs=2, **changes
        )

    check_golden(
        "positions", {"order": order.identity, **resumed(make)}, case=f"{source} {shuffle}"
    )


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_row_positions_match_golden(shuffle: str) -> None:
    evaluated = digests(
        [data.row_loader(shuffle, rank, 3, epochs=1, small_steps=True) for rank in range(3)]
    )
    check_golden(
        "positions",
        {"evaluated": evaluated, **resumed(partial(data.row_loader, shuffle))},
        case=f"rows {shuffle}",
    )


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_identity_of_order_matches_golden(shuffle: str) -> None:
    order = data.made_up_order(shuffle)
    blocks = [[block.order().tolist() for block in order.blocks(epoch)] for epoch in range(2)]
    check_golden(
        "positions", {"order": order.identity, "blocks": blocks}, case=f"made-up {shuffle}"
    )


CASES = {
    "preprocessors": set(PREPROCESSORS),
    "batches": {*(f"{source} {shuffle} {workers}" for source, shuffle, workers in PAIRS), *LOADERS},
    "positions": {
        *(f"{source} {shuffle}" for source, shuffle in RESUMED),
        *(f"{kind} {shuffle}" for kind in ("rows", "made-up") for shuffle in SHUFFLES),
    },
}


@pytest.mark.parametrize("name", CASES)
def test_golden_has_present_cases_only(name: str) -> None:
    assert set(json.loads((FOLDER / f"{name}.json").read_text())) == CASES[name]
