"""Random rows without a log: those of `rayrec generate`, in any pieces, for every command."""

from pathlib import Path

import numpy as np
import pytest
from builders.runs import QUIET, check_same_in_two_parts, one_worker, train

import rayrec
from rayrec import recipes
from rayrec.config import InputError
from rayrec.data.engine import TaskContext
from rayrec.data.log_source import LogSource
from rayrec.data.logs.index import LogIndex
from rayrec.data.logs.reading import read_raw
from rayrec.data.logs.text_parser import parse
from rayrec.datasets.criteo import SCHEMA
from rayrec.schema import Schema
from rayrec.workloads.recsys import planning
from rayrec.workloads.recsys.workload import ClickWorkload

PATH = "random:20000:1"


def index_of(path: str, *, segment_bytes: int, schema: Schema = SCHEMA) -> LogIndex:
    context = TaskContext(None, None, lambda text: None)  # type: ignore[arg-type]  # no task is needed
    return LogSource.at(path).index(schema, segment_bytes=segment_bytes, context=context)


@pytest.mark.parametrize("segment_bytes", [2 << 20, 150_000])
def test_rows_match_generated_log(click_log: Path, segment_bytes: int) -> None:
    raw, _ = parse(SCHEMA, (click_log / "train.txt").read_bytes())
    index = index_of(PATH, segment_bytes=segment_bytes)
    made = read_raw(index.segments, SCHEMA)
    for name in ("numbers", "categories", "missing"):
        ours, theirs = getattr(made, name), getattr(raw, name)
        assert ours.dtype == theirs.dtype
        assert ours.flags.c_contiguous
        np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(made.labels["label"], raw.labels["label"])
    last = read_raw(index.segments[-1:], SCHEMA.unlabelled())
    np.testing.assert_array_equal(last.categories, raw.categories[-last.rows :])
    assert not last.labels


def test_run_matches_generated_log_and_resumes(click_log: Path, tmp_path: Path) -> None:
    """The weights are those of the log, bit by bit; a run resumes exactly, and other commands take the rows too."""
    config = one_worker(click_log, tmp_path, train_data={"shuffle": "none"})
    of_log = train(config, name="log")
    of_random = train(config, name="random", train_data={"path": PATH})
    assert of_random.summary["weights_sha256"] == of_log.summary["weights_sha256"]
    constant = {"schedule": {"decay_fraction": 0.0}}  # A decay depends on the number of steps.
    shuffled = config.replace(train_data={"path": PATH, "shuffle": "window"}, workload=constant)
    check_same_in_two_parts(shuffled, train(shuffled, name="run"), steps=7)
    of_log_rows = rayrec.evaluate(of_log.folder, str(click_log / "train.txt"), console=QUIET)
    assert rayrec.evaluate(of_log.folder, PATH, console=QUIET)["auroc"] == of_log_rows["auroc"]
    made = rayrec.preprocess(PATH, out=str(tmp_path / "ready"), format="binary", split="last_file", console=QUIET)
    assert made["rows"] == 20_000
    assert rayrec.export(of_random.folder, out=str(tmp_path / "exported"))
    assert isinstance(config.workload, ClickWorkload)
    assert planning._read_slice(config.workload, config.replace(train_data={"path": PATH})).rows_of_log == 20_000


def test_unsuitable_paths_and_schemas_raise(tmp_path: Path) -> None:
    for path in ("random:", "random:0", "random:9:x", "random:1e6"):
        with pytest.raises(InputError, match="must be random:ROWS or random:ROWS:SEED"):
            train(recipes.criteo_demo(path).replace(storage_path=str(tmp_path)))
    with pytest.raises(InputError, match="the columns of Criteo's logs, 13 dense and 26 sparse"):
        LogSource.at("random:100").check_head(Schema(dense=("a",), sparse=("b",)))
    assert [segment.rows for segment in index_of("random:3", segment_bytes=1).segments] == [1, 1, 1]
