"""Preprocessors counted while the log is indexed, with a single parse of each text segment."""

import functools
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders.faults import rejects
from builders.runs import QUIET, one_worker, train

import rayrec
from rayrec import host_resources, recipes
from rayrec.cluster import connection, node_storage
from rayrec.data.encoding.counts import count_log
from rayrec.data.encoding.preprocessor import Preprocessor
from rayrec.data.encoding.presets import make_preprocessor
from rayrec.data.engine import TaskPlacement, ThreadEngine
from rayrec.data.logs.faults import Faults
from rayrec.data.logs.index import LogIndex
from rayrec.data.logs.text_parser import TextParser, parse
from rayrec.datasets.criteo import SCHEMA
from rayrec.ingest.ray_engine import RayEngine
from rayrec.observe.console import Console
from rayrec.prepare import preprocess as preparing
from rayrec.prepare.config import PreparationConfig, RecipePreparation, engine, raw_index
from rayrec.prepare.preprocess import RowOutput
from rayrec.prepare.validate import validate
from rayrec.schema import Schema, load_schema
from rayrec.storage import cache

pytestmark = pytest.mark.usefixtures("own_cache")
preprocess, vocabulary = (
    functools.partial(make, console=QUIET) for make in (preparing.preprocess, preparing.vocabulary)
)


class Parsed:
    """Parse count of each segment of a text file, by its first byte."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.segments: Counter[int] = Counter()
        parse = TextParser.parse

        def noted(parser: TextParser, *text: Any, path: str, first_byte: int = 0) -> Faults:
            self.segments[first_byte] += 1
            return parse(parser, *text, path=path, first_byte=first_byte)

        monkeypatch.setattr(TextParser, "parse", noted)

    def beyond(self, times: int) -> float:
        """Check that all segments were parsed at least N times, and return the additional parses as
        a fraction of all.
        """
        assert len(self.segments) > 50
        assert min(self.segments.values()) == times
        return self.segments.total() / len(self.segments) - times


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> Parsed:
    return Parsed(monkeypatch)


def separately(path: str, config: PreparationConfig, rows: tuple[int, int] | None) -> Preprocessor:
    """Count some rows of a log (None: all) with an existing index."""
    engine = ThreadEngine(1)
    index: LogIndex = raw_index(path, config, engine, QUIET)
    parts = list(index.parts(*(rows or (0, index.rows))))
    with count_log(config.rules.counting(config.schema), parts, engine=engine) as counts:
        return make_preprocessor(config.rules, config.schema, counts)


@pytest.mark.parametrize(
    ("options", "rows", "twice"),
    [
        ({}, None, 0.0),
        # what is close to the border, since sizes are a guess
        (
            {"split": "sevenths"},
            (0, 20_000 - 20_000 // 7),
            0.06,
        ),
        ({"split": "sevenths", "preset": "mlperf-v1"}, None, 0.0),  # counts all rows
    ],
)
def test_vocabulary_parses_text_once(
    click_log: Path,
    tmp_path: Path,
    parsed: Parsed,
    options: dict[str, Any],
    rows: tuple[int, int] | None,
    twice: float,
) -> None:
    path = str(click_log / "train.txt")
    out = str(tmp_path / "out")
    config = PreparationConfig(block_bytes=1 << 20, segments_per_block=32, **options)
    made = vocabulary(path, out=out, config=config)
    beyond = parsed.beyond(1)
    assert 0 < beyond <= twice if twice else beyond == 0
    assert Preprocessor.load(out).hash() == made["hash"] == separately(path, config, rows).hash()


def test_preprocess_parses_text_twice(click_log: Path, tmp_path: Path, parsed: Parsed) -> None:
    path = str(click_log / "train.txt")
    config = PreparationConfig(block_bytes=1 << 20, segments_per_block=32, split="sevenths")
    made = preprocess(
        path,
        out=str(tmp_path / "ready"),
        rows=RowOutput(format="binary"),
        config=config,
    )
    assert 0 < parsed.beyond(2) <= 0.08  # segments at the borders of sets are read for both
    expected = separately(path, config, (0, 20_000 - 20_000 // 7))
    assert made["preprocessor"] == expected.hash()
    expected.save(str(tmp_path / "given"))
    given = RowOutput(format="binary", preprocessor=str(tmp_path / "given"))
    assert (
        preprocess(
            path,
            out=str(tmp_path / "again"),
            rows=given,
            config=config,
        )["preprocessor"]
        == made["preprocessor"]
    )
    files = [
        file.relative_to(tmp_path / "ready")
        for file in (tmp_path / "ready").rglob("*")
        if file.is_file()
    ]
    assert files
    assert all(
        (tmp_path / "ready" / file).read_bytes() == (tmp_path / "again" / file).read_bytes()
        for file in files
    )


def test_unsuitable_rules_are_rejected_before_reading(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("label,a,b\n1,2,3\n")
    config = PreparationConfig(
        preset="fuxictr-x4",
        schema=Schema(
            label="label",
            dense=("a",),
            sparse=("b",),
            tokens="any",
        ),
    )
    rejects(
        "need a log of hexadecimal tokens",
        preprocess,
        str(tmp_path / "log.csv"),
        out=str(tmp_path / "out"),
        rows=RowOutput(format="npy"),
        config=config,
    )


COLUMNS: dict[str, Any] = {"label": "click", "dense": ("price",), "sparse": ("shop",)}


def test_schemas_of_python_and_yaml_have_same_defaults_for_plain_csv(tmp_path: Path) -> None:
    yaml_schema = load_schema("{label: click, dense: [price], sparse: [shop]}", "schema.yaml")
    assert yaml_schema == Schema(**COLUMNS)
    assert yaml_schema.tokens == Schema(**COLUMNS).tokens == "any"
    assert Schema(**COLUMNS, lists=("shop",), timestamp="at").lists == ("shop",)
    described = {"label": "click", "dense": ["price"], "sparse": ["shop"]}
    assert Schema.described(described) == Schema(**COLUMNS, tokens="hexadecimal")  # as it was
    log_path = tmp_path / "log.csv"
    log_path.write_text(
        "click,price,shop\n" + "".join(f"{n % 2},{n / 4},s{n % 3}\n" for n in range(60))
    )
    vocabulary(
        str(log_path),
        out=str(tmp_path / "out"),
        config=PreparationConfig(schema=Schema(**COLUMNS)),
    )
    made = Preprocessor.load(str(tmp_path / "out"))
    assert (made.schema.tokens, made.sparse[0].num_tokens) == ("any", 3)


def test_schema_without_tokens_reads_headerless_text(tmp_path: Path) -> None:
    log_path = tmp_path / "day_0"
    log_path.write_text("".join(f"{n % 2}\t{n}\t{n % 7:08x}\n" for n in range(60)))
    made = []
    for number, tokens in enumerate(({"tokens": "hexadecimal"}, {})):
        config = PreparationConfig(schema=Schema(**COLUMNS, **tokens))
        out = tmp_path / str(number)
        vocabulary(str(log_path), out=str(out), config=config)
        made.append(Preprocessor.load(str(out)).hash())
        preprocess(
            str(log_path),
            out=f"{out}-data",
            rows=RowOutput(format="binary"),
            config=config,
        )
        assert validate(str(log_path), config=config, console=QUIET).to_dict()["rows"] == 60
        recipe = recipes.clicks().replace(workload={"schema": config.schema})
        for path in (str(log_path), f"{out}-data"):
            workload: Any = recipe.workload.adapted(
                recipe.replace(train_data={"path": path})
            ).workload
            assert workload.schema == Schema(**COLUMNS, tokens="hexadecimal")
    assert made[0] == made[1]
    texts = tmp_path / "texts.txt"
    texts.write_text("1\t2\tshoes\n" * 9)
    for schema, path in (
        (Schema(**COLUMNS, lists=("shop",)), log_path),
        (Schema(**COLUMNS), texts),
    ):
        rejects(
            "has no column named click|looks like data, so there is no header",
            vocabulary,
            str(path),
            out=str(tmp_path / "no"),
            config=PreparationConfig(schema=schema),
        )


# -- Choice of the engine, without starting Ray
@pytest.mark.parametrize(
    ("settings", "environment", "connected", "on_ray"),
    [
        ({}, "", False, False),
        ({"engine": "auto"}, "head:6379", False, True),
        ({"engine": "auto"}, None, True, True),
        ({"address": "local"}, None, False, True),
        ({"address": "none"}, "head:6379", True, False),
        ({"engine": "threads"}, "head:6379", True, False),
        ({"engine": "ray"}, None, False, True),
        ({"engine": "ray", "address": "head:6379"}, None, False, True),
    ],
)
def test_engine_matches_config_and_environment(
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    environment: str | None,
    connected: bool,
    on_ray: bool,
) -> None:
    addresses = []
    paths = []
    monkeypatch.setattr(connection, "connect", addresses.append)
    monkeypatch.setattr(node_storage, "require_reachable", paths.append)
    monkeypatch.setattr(connection, "is_connected", lambda: connected)
    monkeypatch.setattr(connection, "is_local_ray", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if environment is not None:
        monkeypatch.setenv("RAY_ADDRESS", environment)
    with engine(PreparationConfig(**settings), Console(quiet=True), paths=("a", "b")) as chosen:
        pass
    assert chosen == (
        RayEngine(TaskPlacement()) if on_ray else ThreadEngine(host_resources.usable_cpus())
    )
    assert addresses == [settings.get("address")] * on_ray
    assert paths == [("a", "b", cache.folder())] * on_ray


def test_local_ray_inherits_access_to_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = []
    monkeypatch.setattr(connection, "connect", lambda address: address)
    monkeypatch.setattr(connection, "is_local_ray", lambda: True)
    monkeypatch.setattr(node_storage, "require_reachable", paths.append)
    with engine(PreparationConfig(engine="ray"), Console(quiet=True), paths=("s3://a",)):
        pass
    assert paths == []


@pytest.mark.parametrize("address", ["head:6379", "local", "none"])
def test_config_rejects_threads_with_address(address: str) -> None:
    rejects(
        "^engine threads: must not be used with address, because it runs in this process",
        PreparationConfig,
        engine="threads",
        address=address,
    )


def test_recipe_supplies_rules(click_log: Path, tmp_path: Path) -> None:
    log = str(click_log / "train.txt")
    named = vocabulary(
        log,
        out=str(tmp_path / "named"),
        config=PreparationConfig(min_count=2, split="sevenths"),
    )
    made = rayrec.vocabulary(
        log,
        out=str(tmp_path / "made"),
        recipe="criteo_demo",
        console=QUIET,
    )
    assert made["hash"] == named["hash"]
    changed = rayrec.vocabulary(
        log,
        out=str(tmp_path / "changed"),
        recipe="criteo_demo",
        min_count=9,
        console=QUIET,
    )
    assert changed["num_embeddings"]["cat_2"] < made["num_embeddings"]["cat_2"]
    for recipe in recipes.ALL.values():
        workload: Any = recipe().workload
        if hasattr(workload, "preset"):
            assert (
                RecipePreparation.from_preset(workload.preset, schema=workload.schema).rules
                == workload.preset
            )
    ready = {
        "out": str(tmp_path / "ready"),
        "recipe": "mlperf_dcnv2",
        "files": (),
        "split": "sevenths",
        "console": QUIET,
    }
    assert rayrec.preprocess(log, format="parquet", **ready)["rows"] == 20_000
    assert Preprocessor.load(str(tmp_path / "ready" / "preprocessor")).multi_hot is not None
    for recipe, format, problem in (
        ("mnist_resnet18", "npy", "must train a click model"),
        ("criteo_demo", "mds", "click logs"),
    ):
        rejects(
            problem,
            rayrec.preprocess,
            log,
            out=str(tmp_path / "no"),
            format=format,
            recipe=recipe,
            console=QUIET,
        )


def test_vocabulary_maps_counted_values_to_ids(click_log: Path, tmp_path: Path) -> None:
    """The tables of ray-template: each value, or none, counted three times or more has an id from
    2; rarer ones share 1.
    """
    lines = (click_log / "train.txt").read_text().splitlines()[:3000]
    (tmp_path / "train.txt").write_text("".join(f"{line}\n" for line in lines))
    out = str(tmp_path / "tables")
    made = vocabulary(
        str(tmp_path / "train.txt"),
        out=out,
        config=PreparationConfig(preset="ray-template"),
    )
    block, _ = parse(SCHEMA, (tmp_path / "train.txt").read_bytes())
    columns = list(zip(*(line.split("\t")[14:] for line in lines), strict=True))
    for name, values, ids in zip(
        SCHEMA.sparse,
        columns,
        Preprocessor.load(out).encode(block).ids,
        strict=True,
    ):
        counts = Counter(values)
        mapping = dict(zip(values, np.asarray(ids).tolist(), strict=True))
        frequent = sorted(mapping[value] for value, count in counts.items() if count >= 3)
        assert frequent == list(range(2, made["num_embeddings"][name])), name
        assert {mapping[value] for value, count in counts.items() if count < 3} <= {1}, name


@pytest.mark.parametrize(
    ("preset", "reserved", "categories"),
    [("mlperf-v1", 1, 7), ("rayrec", 2, 6)],
)
def test_mlperf_dictionary_includes_evaluation_rows(
    preset: str,
    reserved: int,
    categories: int,
    tmp_path: Path,
) -> None:
    """Each seventh has a category. The last one is for evaluation."""
    rows = [
        "\t".join(["0", *["1"] * 13, *[f"{number // 10 + 1:08x}"] * 26]) for number in range(70)
    ]
    (tmp_path / "train.txt").write_text("".join(f"{row}\n" for row in rows))
    config = PreparationConfig(preset=preset, split="sevenths", min_count=1)
    made = vocabulary(str(tmp_path / "train.txt"), out=str(tmp_path / "out"), config=config)
    assert set(made["num_embeddings"].values()) == {reserved + categories}


def test_id_tables_replace_counts(click_log: Path, tmp_path: Path, parsed: Parsed) -> None:
    """Values counted three times or more, from 2 by falling count. The log is not read, unless
    numbers need its constants.
    """
    lines = (click_log / "train.txt").read_text().splitlines()[:3000]
    columns = list(zip(*(line.split("\t")[14:] for line in lines), strict=True))
    ids: list[dict[str, int]] = []
    (tmp_path / "tables").mkdir()
    for name, values in zip(SCHEMA.sparse, columns, strict=True):
        counted = [value for value, count in Counter(values).most_common() if count >= 3]
        ids.append({value: number for number, value in enumerate(counted, 2)})
        table = pa.table({"feature_value": counted, "index": list(ids[-1].values())})
        pq.write_table(
            table,
            tmp_path
            / "tables"
            / f"criteo_tsv.gz_categorical_feature_value_counts_{name}-value_counts.parquet",
        )
    block, _ = parse(SCHEMA, "".join(f"{line}\n" for line in lines).encode())
    parsed.segments.clear()
    path = str(click_log / "train.txt")
    out = str(tmp_path / "by-tables")
    made = vocabulary(
        path,
        out=out,
        id_tables=str(tmp_path / "tables"),
        config=PreparationConfig(preset="ray-template"),
    )
    assert not parsed.segments
    assert list(made["num_embeddings"].values()) == [
        max(ids_by_value.values()) + 1 for ids_by_value in ids
    ]
    for ids_by_value, values, column in zip(
        ids,
        columns,
        Preprocessor.load(out).encode(block).ids,
        strict=True,
    ):
        np.testing.assert_array_equal(
            np.asarray(column),
            [ids_by_value.get(value, 1) for value in values],
        )
    run = train(
        one_worker(
            click_log,
            tmp_path,
            steps=2,
            evaluate_every=2,
            workload={"preprocessor": out},
        )
    )
    assert Preprocessor.load(f"{run.folder}/preprocessor").hash() == made["hash"]
    vocabulary(
        path,
        out=f"{out}-2",
        id_tables=str(tmp_path / "tables"),
        config=PreparationConfig(),
    )
    assert parsed.segments
    assert Preprocessor.load(f"{out}-2").dense[0].mean != 0


SHOPS = "value,id\n"


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({"shop.csv": "a,2\nb,2\n"}, "ID 2 belongs to several values"),
        ({"shop.csv": "a,2\na,3\n"}, "a value has several IDs"),
        ({"shop.csv": "a,2\nb,4\n"}, "no value has ID 3"),
        ({"shop.csv": "a,2\nb,-1\n"}, "IDs must be from 0"),
        ({"shop.csv": "a,1\nb,2\n"}, r"ID 1 of empty fields \(rayrec\) is a value's"),
        ({"shop.csv": "a,x\n"}, "two columns, values and integer IDs"),
        (
            {"shop.csv": "a,2\n", "store.csv": "a,2\n"},
            "its name has no column with a vocabulary. Name it after one of shop",
        ),
        ({"shop.csv": "a,2\n", "shop.2.csv": "a,2\n"}, "one table for each column, got 2 for 1"),
        ({}, "contains no data files"),
    ],
)
def test_unusable_id_tables_are_rejected(
    tmp_path: Path,
    files: dict[str, str],
    problem: str,
) -> None:
    (tmp_path / "log.csv").write_text(
        "click,price,shop\n" + "".join(f"{n % 2},{n},abc{n % 3}\n" for n in range(60))
    )
    (tmp_path / "tables").mkdir()
    for name, rows in files.items():
        (tmp_path / "tables" / name).write_text(SHOPS + rows)
    config = PreparationConfig(schema=Schema(**COLUMNS))
    options = {"out": str(tmp_path / "out"), "id_tables": str(tmp_path / "tables")}
    rejects(problem, vocabulary, str(tmp_path / "log.csv"), config=config, **options)
    counted = config.replace(min_count=2)
    rejects(
        "--min-count: an option for counted",
        vocabulary,
        str(tmp_path / "log.csv"),
        config=counted,
        **options,
    )


def test_id_table_may_have_empty_and_unknown_values(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text(
        "click,price,shop\n" + "".join(f"{n % 2},{n},a\n" for n in range(60))
    )
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "shop.csv").write_text(SHOPS + 'b,3\n"",4\nrare,0\nc,5\na,2\n')
    options = {"out": str(tmp_path / "out"), "id_tables": str(tmp_path / "tables")}
    vocabulary(
        str(tmp_path / "log.csv"),
        config=PreparationConfig(schema=Schema(**COLUMNS)),
        **options,
    )
    (column,) = Preprocessor.load(options["out"]).sparse
    assert (column.ids().tolist(), column.missing_id, column.unknown_id, column.num_embeddings) == (
        [2, 3, 5],
        4,
        0,
        6,
    )
