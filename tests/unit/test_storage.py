"""Files are found in numeric order, read in pieces, and appear whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from rayrec import storage
from rayrec.config import InputError


def test_folders_list_data_files_in_numeric_order(tmp_path: Path) -> None:
    for name in ("day_10", "day_2", "day_1", "truth.json", ".hidden", "_SUCCESS", "day_3.0a.partial"):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "day_0").write_bytes(b"x")
    expected = [str(tmp_path / name) for name in ("day_1", "day_2", "day_10")]
    assert [file.path for file in storage.list_files(str(tmp_path))] == expected
    assert [file.path for file in storage.list_files(f"{tmp_path}/day_*")] == expected
    assert [file.path for file in storage.list_files(f"{tmp_path}/day_?")] == expected[:2]
    assert [file.path for file in storage.list_files(f"{tmp_path}/truth.json")] == [f"{tmp_path}/truth.json"]


def test_digits_of_any_script_sort(tmp_path: Path) -> None:
    for name in ("a1²3", "a²", "a2"):
        (tmp_path / name).write_bytes(b"x")
    assert len(storage.list_files(str(tmp_path))) == 3


def test_nothing_there_is_said(tmp_path: Path) -> None:
    (tmp_path / "only.json").write_bytes(b"{}")
    with pytest.raises(InputError, match="no such file or folder"):
        storage.list_files(str(tmp_path / "absent"))
    with pytest.raises(InputError, match="holds no data files"):
        storage.list_files(str(tmp_path))
    with pytest.raises(InputError, match="holds no data files"):
        storage.list_files(f"{tmp_path}/*.gz")
    with pytest.raises(InputError, match="no such file"):
        storage.read_bytes(str(tmp_path / "absent"))
    with pytest.raises(InputError, match="no such file"):
        storage.read_into(str(tmp_path / "absent"), 0, np.zeros(1, np.uint8))
    with pytest.raises(InputError, match="s3://bucket/key"):
        storage.resolve("nosuch://x/y")


def test_urls_name_the_same_files(tmp_path: Path) -> None:
    (tmp_path / "day_1").write_bytes(b"abc")
    url = f"file://{tmp_path}"
    assert [file.path for file in storage.list_files(url)] == [f"{url}/day_1"]
    assert [file.path for file in storage.list_files(f"{url}/day_*")] == [f"{url}/day_1"]
    assert storage.read_bytes(f"{url}/day_1") == b"abc"
    storage.write_bytes(f"{url}/new", b"xyz")
    assert (tmp_path / "new").read_bytes() == b"xyz"
    with storage.writing_folder(f"{url}/folder") as folder:
        Path(folder, "inside").write_bytes(b"1")
    assert (tmp_path / "folder" / "inside").read_bytes() == b"1"


def test_ranges_are_read_up_to_the_end(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(100)))
    buffer = np.zeros(30, np.uint8)
    assert storage.read_into(str(path), 10, buffer) == 30
    assert buffer.tolist() == list(range(10, 40))
    assert storage.read_into(str(path), 90, buffer) == 10
    assert buffer[:10].tolist() == list(range(90, 100))
    assert storage.read_into(str(path), 100, buffer) == 0


def test_a_failed_write_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file"
    storage.write_bytes(str(path), b"old")

    def fail() -> None:
        with storage.writing(str(path)) as local:
            Path(local).write_bytes(b"half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert path.read_bytes() == b"old"
    assert os.listdir(path.parent) == ["file"]
    storage.write_bytes(str(path), b"new")
    assert path.read_bytes() == b"new"


def test_folders_appear_whole_and_are_never_overwritten(tmp_path: Path) -> None:
    target = str(tmp_path / "folder")

    def fail() -> None:
        with storage.writing_folder(target) as folder:
            Path(folder, "a").write_bytes(b"1")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert os.listdir(tmp_path) == []
    with storage.writing_folder(target) as folder:
        Path(folder, "a").write_bytes(b"1")
        assert not os.path.exists(target)
    assert os.listdir(target) == ["a"]
    with pytest.raises(InputError, match="exists already"), storage.writing_folder(target):
        pass


def test_json_round_trip_and_damage(tmp_path: Path) -> None:
    path = str(tmp_path / "value.json")
    storage.write_json(path, {"ä": [1, None]})
    assert storage.read_json(path) == {"ä": [1, None]}
    for damaged in (b'{"a": ', b"\xff\xfe\x00"):
        Path(path).write_bytes(damaged)
        with pytest.raises(InputError, match=r"value\.json: damaged"):
            storage.read_json(path)
