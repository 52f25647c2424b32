"""A full shuffle is one permutation of the training rows, in any portions and tasks; how evenly orders mix days."""

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from builders.click_models import hashed_preprocessor
from builders.engines import LoopEngine
from builders.logs import open_index
from hypothesis import given
from hypothesis import strategies as st

from rayrec.data.encoded_rows import EncodedRows
from rayrec.data.encoding.rules import DenseColumn
from rayrec.data.logs.index import LogIndex, SegmentRange, numbered
from rayrec.data.logs.splits import Split
from rayrec.data.materialized import write_tasks
from rayrec.data.materialized.dataset import PreprocessedDataset, open_preprocessed
from rayrec.data.materialized.dataset import read as read_preprocessed
from rayrec.data.materialized.formats import WRITABLE_FORMATS
from rayrec.data.materialized.write_tasks import Permutation, gather_runs, write_run
from rayrec.data.materialized.writer import preprocess
from rayrec.ingest.block_order import BlockOrder

PREPROCESSOR = hashed_preprocessor([2**28] * 26, dense=(DenseColumn(),) * 13)


@pytest.fixture(scope="module")
def index(click_log: Path, tmp_path_factory: pytest.TempPathFactory) -> LogIndex:
    lines = (click_log / "train.txt").read_bytes().splitlines(keepends=True)[:2000]
    folder = tmp_path_factory.mktemp("days")
    for day in range(4):
        (folder / f"day_{day}").write_bytes(b"".join(lines[day * 500 : day * 500 + 500]))
    return open_index(folder)


def all_rows(index: LogIndex, start: int, stop: int) -> EncodedRows:
    return read_preprocessed(index.segments, np.arange(start, stop), PREPROCESSOR)


def keys(rows: EncodedRows) -> list[bytes]:
    ids = np.stack(rows.ids, 1)
    return [a.tobytes() + b.tobytes() + c.tobytes() for a, b, c in zip(rows.dense, ids, rows.label, strict=True)]


def shuffled(index: LogIndex, out: Path, **changes: Any) -> PreprocessedDataset:
    arguments: dict[str, Any] = {"format": "binary", "sets": Split(kind="last_file").rows(index), "shuffle": "full", "seed": 1}
    preprocess(index, preprocessor=PREPROCESSOR, out=str(out), engine=LoopEngine(), **{**arguments, **changes})
    return open_preprocessed(str(out), verify=True)


@given(st.integers(1, 3000), st.integers(0, 2**40))
def test_permutation_is_bijective(size: int, seed: int) -> None:
    places = Permutation(size, seed=seed)(np.arange(size))
    assert places.dtype == np.int64
    assert (np.sort(places) == np.arange(size)).all()


def test_permutations_are_uniform_and_computed_for_distant_rows() -> None:
    large = Permutation(4_195_197_692, seed=7)
    rows = np.array([0, 1, 2**31, 4_195_197_691])
    places = large(rows)
    assert len(set(places.tolist())) == 4
    assert (places < 4_195_197_692).all()
    assert (large(rows[::-1]) == places[::-1]).all()
    assert (Permutation(4_195_197_692, seed=8)(rows) != places).any()
    # chi-squared with 23 degrees of freedom: 49.7 at p = 0.001.
    tries = 12_000
    counts = Counter(tuple(Permutation(4, seed=seed)(np.arange(4)).tolist()) for seed in range(tries))
    assert len(counts) == 24
    assert sum((count - tries / 24) ** 2 / (tries / 24) for count in counts.values()) < 49.7


def test_permutation_separates_neighbours() -> None:
    places = Permutation(1_000_000, seed=0)(np.arange(1_000_000))
    assert abs(np.corrcoef(np.arange(len(places)), places)[0, 1]) < 0.005
    assert abs(np.corrcoef(places[:-1], places[1:])[0, 1]) < 0.005
    steps = np.bincount(np.abs(np.diff(places)) * 20 // 1_000_000, minlength=20)
    expected = np.diff(1 - (1 - np.arange(21) / 20) ** 2) * 999_999  # of two independent places
    assert (np.abs(steps - expected) < 6 * np.sqrt(expected)).all()


def test_gather_runs_restores_positions(tmp_path: Path) -> None:
    places = np.random.default_rng(0).permutation(1000)
    lists = pa.array([[i] * (i % 3) for i in range(1000)], pa.large_list(pa.int32()))
    table = pa.table({"lists": lists, "pairs": pa.FixedSizeListArray.from_arrays(pa.array(np.arange(2000)), 2)})
    paths = []
    for number, start in enumerate(range(0, 1000, 250)):
        paths.append(str(tmp_path / f"{number}.arrow"))
        write_run([table.slice(start, 100), table.slice(start + 100, 150)], places[start : start + 250], paths[-1])
    for start, stop in ((0, 1000), (0, 1), (333, 650), (999, 1000)):
        assert gather_runs(paths, start, stop).equals(table.take(pa.array(np.argsort(places)[start:stop])))


def test_shuffle_moves_training_rows_only(index: LogIndex, tmp_path: Path) -> None:
    plain, mixed = shuffled(index, tmp_path / "plain", shuffle="none"), shuffled(index, tmp_path / "mixed")
    start, stop = mixed.sets["train"]
    assert (start, stop) == (0, 1500)
    before, after = keys(all_rows(plain.index, 0, 2000)), keys(all_rows(mixed.index, 0, 2000))
    assert (before[stop:], sorted(before[:stop])) == (after[stop:], sorted(after[:stop]))
    assert [after[place] for place in Permutation(1500, seed=1)(np.arange(1500))] == before[:stop]
    sizes = [[(s.start, s.stop, s.rows) for s in made.index.segments] for made in (plain, mixed)]
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("format", WRITABLE_FORMATS)
def test_shuffle_matches_for_any_tasks(index: LogIndex, tmp_path: Path, format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = keys(all_rows(shuffled(index, tmp_path / "expected").index, 0, 2000))
    for segments_per_task in (1, 4, 1000):
        made = shuffled(index, tmp_path / str(segments_per_task), format=format, segments_per_task=segments_per_task)
        assert keys(all_rows(made.index, 0, 2000)) == expected
    monkeypatch.setattr("rayrec.data.materialized.writer.MAX_SHUFFLE_TASKS", 2)
    made = shuffled(index, tmp_path / "few", format=format, segments_per_task=1)
    assert keys(all_rows(made.index, 0, 2000)) == expected
    assert keys(all_rows(shuffled(index, tmp_path / "other", format=format, seed=2).index, 0, 2000)) != expected


def unevenness(days: np.ndarray, batch_size: int) -> float:
    """0 where each batch has all days' shares, 1 where each is of one of equally many days."""
    count = len(np.unique(days))
    batches = days[: len(days) // batch_size * batch_size].reshape(-1, batch_size)
    shares = np.stack([(batches == day).mean(1) for day in range(count)], 1)
    return float(np.abs(shares - 1 / count).sum(1).mean() / 2 / (1 - 1 / count))


def orders_of_days(shuffle: str, *, days: int, segments: int, rows: int, segments_per_block: int) -> np.ndarray:
    """The day of each row in an epoch's order of a log of `days` files of `segments` segments of `rows` rows."""
    index = numbered((f"day_{day}", 0, rows, rows) for day in range(days) for _ in range(segments))
    total = days * segments * rows
    if shuffle == "full":
        day_of_row = np.arange(total) // (segments * rows)
        return day_of_row[np.argsort(Permutation(total, seed=1)(np.arange(total)))]
    parts = tuple(SegmentRange(segment, 0, rows) for segment in index)
    blocks = BlockOrder(parts, shuffle, seed=1, segments_per_block=segments_per_block).blocks(0)
    day_of_part = [np.repeat([int(part.segment.path.removeprefix("day_")) for part in block.parts], rows) for block in blocks]
    return np.concatenate([of_block[block.order()] for of_block, block in zip(day_of_part, blocks, strict=True)])


def test_shuffles_mix_days() -> None:
    """Seven days of 200 segments of 100 rows in batches of 256."""
    size = {"days": 7, "segments": 200, "rows": 100}
    found = {
        (shuffle, per_block): unevenness(orders_of_days(shuffle, **size, segments_per_block=per_block), 256)
        for shuffle, per_block in (*((name, 8) for name in ("none", "files", "full")), *(("window", n) for n in (8, 32, 128)))
    }
    assert found["none", 8] > 0.98
    assert found["files", 8] > 0.98
    assert 0.45 > found["window", 8] > found["window", 32] > found["window", 128]
    chance = found["full", 8]
    assert 0.06 < chance < 0.09
    assert found["window", 128] < chance + 0.07


def test_gather_reads_needed_pages_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The column of places is searched where it is mapped."""
    rows = 500_000
    places = np.random.default_rng(0).permutation(rows)
    path = str(tmp_path / "run.arrow")
    write_run([pa.table({"value": places})], places, path)
    allocated: list[int] = []

    def searchsorted(*arguments: Any) -> Any:
        allocated.append(pa.total_allocated_bytes())
        return np.searchsorted(*arguments)

    monkeypatch.setattr(write_tasks, "np", SimpleNamespace(**{**vars(np), "searchsorted": searchsorted}))
    before = pa.total_allocated_bytes()
    assert gather_runs([path], 1000, 1100).column("value").to_pylist() == list(range(1000, 1100))
    assert len(allocated) == 1
    assert allocated[0] - before < 8 * rows // 4
