"""Labels other than 0 and 1: detected in the first scan, with the values and a fix."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders.faults import rejects

from rayrec import cli
from rayrec.data.log_source import LogSource
from rayrec.data.logs.faults import Faults
from rayrec.data.logs.index import LogIndex
from rayrec.data.logs.text_parser import parse
from rayrec.schema import Schema

SCHEMA = Schema(label="rating", sparse=("user",), tokens="any", delimiter=",")
FOUND: dict[str, tuple[list[Any], str]] = {
    "stars": ([1, 5, 3, 2, 4], "found 1, 2, 3, 4, 5 in column rating; derive one, such as rating >= 4"),
    "signs": ([-1, -1, 1], "found -1, 1 in column rating; derive one, such as rating >= 1"),
    "one and two": ([2, 2, 1], "found 1, 2 in column rating; derive one, such as rating >= 2"),
    "halves": ([0.5, 0.25, 1.0], "found 0.25, 0.5, 1 in column rating; derive one, such as rating >= 0.5"),
    "words": (["yes", "no"], "found no, yes in column rating; derive one, such as rating == 'yes'"),
    "unknown words": (["a", "b"], "found a, b in column rating; derive one, such as rating == 'b'"),
    "many": (list(range(10, 40)), "found 10, 11, 12, 13, 14, 15, 16, 17 and others in column rating; derive one"),
}


def write(folder: Path, values: list[Any], kind: str, *, good: int = 0) -> Path:
    """Write a table whose labels repeat `values`, after some valid ones."""
    labels = [type(values[0])(1)] * good + [values[row % len(values)] for row in range(100)]
    table = pa.table({"rating": labels, "user": [f"u{row % 9}" for row in range(len(labels))]})
    if kind == "parquet":
        pq.write_table(table, folder / "log.parquet")
        return folder / "log.parquet"
    lines = [f"{label:g},u" if isinstance(label, float) else f"{label},u" for label in labels]
    (folder / "log.csv").write_text("rating,user\n" + "\n".join(lines) + "\n")
    return folder / "log.csv"


@pytest.mark.parametrize("kind", ["parquet", "csv"])
@pytest.mark.parametrize("name", FOUND)
def test_check_head_rejects_wrong_labels(tmp_path: Path, name: str, kind: str) -> None:
    values, expected = FOUND[name]
    line = rejects("", LogSource.at(str(write(tmp_path, values, kind))).check_head, SCHEMA)
    assert f"log.{kind}: labels must be 0 or 1, {expected}" in line


@pytest.mark.parametrize("kind", ["parquet", "csv"])
@pytest.mark.parametrize("values", [[True, False], ["true", "False"], [0.0, 1.0], ["1", "0.0"]])
def test_boolean_labels_are_accepted(tmp_path: Path, values: list[Any], kind: str) -> None:
    LogSource.at(str(write(tmp_path, values, kind))).check_head(SCHEMA)


def test_allowed_fraction_of_wrong_labels_passes(tmp_path: Path) -> None:
    path = str(write(tmp_path, [1, 2, 3, 4, 5], "csv"))
    LogSource.at(path).check_head(SCHEMA, max_bad_fraction=0.8)
    rejects("found 1, 2, 3, 4, 5", LogSource.at(path).check_head, SCHEMA, max_bad_fraction=0.7)


@pytest.mark.parametrize("good", [0, 2000], ids=["from the start", "later"])
def test_commands_name_labels_and_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], good: int
) -> None:
    """Includes labels beyond the first rows; no message suggests skipping more rows."""
    monkeypatch.setenv("RAYREC_CACHE", str(tmp_path / "cache"))
    (tmp_path / "schema.yaml").write_text("{label: rating, sparse: [user], tokens: any, delimiter: ','}")
    write(tmp_path, [1, 2, 3, 4, 5], "csv", good=good)
    log, schema = str(tmp_path / "log.csv"), ["--schema", str(tmp_path / "schema.yaml")]
    for command in (
        ["train", "clicks", "--train-data.path", log, "--storage-path", str(tmp_path / "runs"), *schema],
        ["vocabulary", log, "--out", str(tmp_path / "v"), *schema],
        ["preprocess", log, "--out", str(tmp_path / "p"), "--format", "parquet", *schema],
        ["split", log, "--out", str(tmp_path / "s"), "--by", "rows", *schema],
        ["validate", log, *schema],
    ):
        assert cli.run(command) == 2
        line = capsys.readouterr().err.splitlines()[-1]
        assert "labels must be 0 or 1, found 1, 2, 3, 4, 5 in column rating; derive one, such as rating >= 4" in line
        assert command[0] == "validate" or "max-bad-fraction" not in line  # validate names another broken gate


TEXT = Schema(tokens="hexadecimal", label="click", dense=("age",), sparse=("user",))


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (["1", "2", "3"], "found 1, 2, 3 in column click; derive one, such as click >= 2"),
        (["-1", "1"], "found -1, 1 in column click; derive one, such as click >= 1"),
        (["0.0", "1.0"], "found 0.0, 1.0 in column click; write them as 0 and 1"),
        (["no", "yes"], "found no, yes in column click; derive one, such as click == 'yes'"),
    ],
)
def test_labels_of_text_are_named(tmp_path: Path, labels: list[str], expected: str) -> None:
    text = "".join(f"{labels[row % len(labels)]}\t3\t0000000a\n" for row in range(60)).encode()
    (tmp_path / "log.txt").write_bytes(text)
    faults = parse(TEXT, text, path=str(tmp_path / "log.txt"))[1]
    line = rejects("labels must be 0 or 1, ", LogIndex((), Faults.from_dict(faults.to_dict())).check, 0.001, "log")
    assert line.endswith(expected)
    rejects("labels must be 0 or 1", LogSource.at(str(tmp_path / "log.txt")).check_head, TEXT)


def test_faults_of_several_tasks_name_all_labels() -> None:
    total = Faults.merged(parse(TEXT, f"{label}\t3\t0000000a\n".encode())[1] for label in (5, 10, 9, 5))
    assert total.labels == {"click": ["5", "9", "10"]}
    total.add(Faults({"too few columns": 5}))  # most lines have another fault
    assert total.wrong_labels() is None
    assert Faults.from_dict({"counts": {}, "first": []}).labels == {}  # of an index of an earlier version
