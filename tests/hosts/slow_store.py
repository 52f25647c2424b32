"""A store at slow://, over local files, that answers each call late, counts calls, and sees how
many come at the same time.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Self

import pytest
from pyarrow import NativeFile
from pyarrow import fs as arrow_fs

from rayrec.storage import filesystems


class SlowStore(arrow_fs.FileSystemHandler):
    """Use `installed`. Listing, opening, sizing, writing and copying within the store are a call
    each.
    """

    def __init__(self, latency_s: float) -> None:
        self.latency_s = latency_s
        self.calls = Counter[str]()
        self.most_at_once = 0
        self._now = 0
        self._lock = threading.Lock()
        self._local = arrow_fs.LocalFileSystem()
        self._filesystem = arrow_fs.PyFileSystem(self)

    def installed(self, monkeypatch: pytest.MonkeyPatch) -> Self:
        """Makes URLs slow:///PATH lead here."""
        resolve = filesystems._resolve

        def resolved(path: str, *, patient: bool) -> tuple[arrow_fs.FileSystem, str]:
            if path.startswith("slow://"):
                return self._filesystem, path.removeprefix("slow://")
            return resolve(path, patient=patient)

        monkeypatch.setattr(filesystems, "_resolve", resolved)
        return self

    def reset(self) -> None:
        self.calls.clear()
        self.most_at_once = 0

    def _called(self, name: str, call: Callable[[], Any]) -> Any:
        with self._lock:
            self.calls[name] += 1
            self._now += 1
            self.most_at_once = max(self.most_at_once, self._now)
        try:
            time.sleep(self.latency_s)
            return call()
        finally:
            with self._lock:
                self._now -= 1

    def get_type_name(self) -> str:
        return "slow"

    def normalize_path(self, path: str) -> str:
        return path

    def get_file_info(self, paths: list[str]) -> list[arrow_fs.FileInfo]:
        return [
            self._called(
                "info",
                lambda path=path: self._local.get_file_info(path),  # type: ignore[misc]
            )
            for path in paths
        ]

    def get_file_info_selector(self, selector: arrow_fs.FileSelector) -> list[arrow_fs.FileInfo]:
        return self._called("list", lambda: self._local.get_file_info(selector))

    def open_input_file(self, path: str) -> NativeFile:
        return self._called("open", lambda: self._local.open_input_file(path))

    def open_input_stream(self, path: str) -> NativeFile:
        return self._called("open", lambda: self._local.open_input_stream(path, compression=None))

    def put(self, path: str, chunks: Iterable[memoryview]) -> None:
        file = Path(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        self._called("write", lambda: file.write_bytes(b"".join(chunks)))

    def create_dir(self, path: str, recursive: bool) -> None:
        self._local.create_dir(path, recursive=recursive)

    def delete_file(self, path: str) -> None:
        self._called("delete", lambda: self._local.delete_file(path))

    def delete_dir(self, path: str) -> None:
        self._called("delete", lambda: self._local.delete_dir(path))

    def copy_file(self, src: str, dest: str) -> None:
        self._called("copy", lambda: self._local.copy_file(src, dest))

    def _unsupported(self, *_: object, **__: object) -> Any:
        raise NotImplementedError

    delete_dir_contents = delete_root_dir_contents = move = _unsupported
    open_output_stream = open_append_stream = _unsupported
