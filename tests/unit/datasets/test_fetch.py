"""Files are fetched whole and checked, from servers that behave and from those that do not."""

from __future__ import annotations

import base64
import bz2
import gzip
import hashlib
import io
import json
import lzma
import os
import random
import shutil
import tarfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pooch
import pytest
from builders.faults import rejects

from rayrec import storage
from rayrec.datasets import criteo, download
from rayrec.datasets.fetch import PUBLISHED, fetch, files_of
from rayrec.datasets.published_files import RemoteFile, names_text, require_files

BODY = random.Random(0).randbytes(3_000_000)
OTHER = random.Random(1).randbytes(3_000_000)


def md5(data: bytes) -> str:
    return hashlib.md5(data).hexdigest()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@dataclass
class Served:
    """How the server answers for one path."""

    body: bytes = BODY
    length: bool = True
    google: str | None = None
    drops: list[int] = field(default_factory=list)
    """For each request in turn, after how many bytes the connection is cut."""
    statuses: list[int] = field(default_factory=list)
    """For each request in turn, an error to answer with."""
    headers: dict[str, str] = field(default_factory=dict)
    before: Callable[[Served, int], None] = lambda served, number: None
    requests: list[dict[str, str]] = field(default_factory=list)


class Server(NamedTuple):
    url: str
    files: dict[str, Served]

    def file(self, name: str = "a.gz", **known: Any) -> RemoteFile:
        return RemoteFile(name=name, url=f"{self.url}/{name}", **known)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    files: dict[str, Served]

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.close_connection = True
        served = self.files.get(self.path.removeprefix("/"))
        if served is None:
            self.send_error(404)
            return
        number = len(served.requests)
        served.requests.append(dict(self.headers))
        served.before(served, number)
        if number < len(served.statuses):
            self.answer(served.statuses[number], [*served.headers.items(), ("Content-Length", "0")])
            return
        headers = [*served.headers.items()]
        if served.google:
            known = base64.b64encode(bytes.fromhex(served.google)).decode()
            headers += [("x-goog-hash", "crc32c=AAAAAA=="), ("x-goog-hash", f"md5={known}")]
        headers += [("Content-Length", str(len(served.body)))] * served.length
        sent = served.drops[number] if number < len(served.drops) else None
        self.answer(200, headers, served.body[:sent])

    def answer(self, status: int, headers: list[tuple[str, Any]], body: bytes = b"") -> None:
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


class QuietServer(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients here leave in the middle."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """On the loopback interface; `files` says what it has."""
    monkeypatch.setenv("no_proxy", "*")
    files: dict[str, Served] = {}
    with QuietServer(
        ("127.0.0.1", 0),
        type("BoundHandler", (Handler,), {"files": files}),
    ) as running:
        thread = threading.Thread(
            target=running.serve_forever,
            kwargs={"poll_interval": 0.02},
            daemon=True,
        )
        thread.start()
        yield Server(f"http://127.0.0.1:{running.server_address[1]}", files)
        running.shutdown()
        thread.join()


def test_fetch_checks_and_records_file(server: Server, tmp_path: Path) -> None:
    server.files["a.gz"] = Served()
    folder = tmp_path / "deep" / "folder"
    seen: list[tuple[int, int | None]] = []
    file = server.file(size_bytes=len(BODY), md5=md5(BODY))
    [result] = fetch([file], str(folder), progress=lambda _, *progress: seen.append(progress))
    file_entry = {
        "name": "a.gz",
        "bytes": len(BODY),
        "sha256": sha256(BODY),
        "url": f"{server.url}/a.gz",
    }
    assert result == {**file_entry, "status": "fetched", "verified": "published md5"}
    assert (folder / "a.gz").read_bytes() == BODY
    assert seen[-1] == (len(BODY), len(BODY))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    record = json.loads((folder / "fetched.json").read_text())["files"]
    assert record == [{key: value for key, value in result.items() if key != "status"}]
    # Nothing is left over that a reader of the folder would take for data.
    assert [file.path for file in storage.list_files(str(folder))] == [str(folder / "a.gz")]
    assert sorted(os.listdir(folder)) == [".fetch.lock", "a.gz", "fetched.json"]


def test_present_files_are_skipped(server: Server, tmp_path: Path) -> None:
    served = server.files["a.gz"] = Served()
    file = server.file(md5=md5(BODY))
    [first] = fetch([file], str(tmp_path))
    assert fetch([file], str(tmp_path)) == [{**first, "status": "present"}]
    assert fetch([file], str(tmp_path), verify=True) == [{**first, "status": "present"}]
    file_entry = ('{"name": "a.gz"}', '{"name": "a.gz", "bytes": "x", "sha256": 1}')
    for damaged in ("{ damaged", *(f'{{"files": [{text}]}}' for text in file_entry)):
        (tmp_path / "fetched.json").write_text(damaged)
        assert fetch([file], str(tmp_path)) == [{**first, "url": None, "status": "present"}]
    assert len(served.requests) == 1
    (tmp_path / "a.gz").write_bytes(OTHER)
    assert fetch([file], str(tmp_path))[0]["status"] == "present"  # the size is right
    changed = r"a\.gz: sha256 must be .* as fetched, got \w+\. Remove it to fetch it again"
    rejects(changed, fetch, [file], str(tmp_path), verify=True)
    (tmp_path / "a.gz").write_bytes(BODY[:-1])
    rejects(
        r"size must be 3,000,000 bytes as fetched, got 2,999,999\. Remove it",
        fetch,
        [file],
        str(tmp_path),
    )
    (tmp_path / "fetched.json").unlink()
    sized = server.file(size_bytes=len(BODY))
    rejects(
        r"size must be 3,000,000 bytes as published, got 2,999,999\. Remove it",
        fetch,
        [sized],
        str(tmp_path),
    )
    rejects(r"md5 must be \w+ as published, got \w+\. Remove it", fetch, [file], str(tmp_path))


@pytest.fixture
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pooch try again at once."""
    monkeypatch.setattr(pooch.core, "time", SimpleNamespace(sleep=lambda seconds: None))


def test_broken_connection_starts_over(server: Server, tmp_path: Path, no_waits: None) -> None:
    """Also if the file has changed, so that two versions are never joined."""

    def change(served: Served, number: int) -> None:
        served.body = (BODY, OTHER, OTHER[:2_500_000])[number]

    served = server.files["a.gz"] = Served(drops=[1_200_000, 700_000], before=change)
    seen: list[int] = []
    [result] = fetch([server.file()], str(tmp_path), progress=lambda _, done, __: seen.append(done))
    assert (tmp_path / "a.gz").read_bytes() == OTHER[:2_500_000]
    assert (result["sha256"], seen[-1]) == (sha256(OTHER[:2_500_000]), 2_500_000)
    assert len(served.requests) == 3
    assert not any("Range" in request for request in served.requests)


def test_interrupted_fetch_starts_over(server: Server, tmp_path: Path) -> None:
    served = server.files["a.gz"] = Served(drops=[1_000_000])
    rejects("1000000 bytes read", fetch, [server.file()], str(tmp_path), attempts=1)
    assert os.listdir(tmp_path) == [".fetch.lock"]
    (tmp_path / ".fetch").mkdir()
    (tmp_path / ".fetch" / "tmp1").write_bytes(OTHER)  # of a killed process
    rejects("contains no data files", storage.list_files, str(tmp_path))
    fetch([server.file()], str(tmp_path), attempts=1)
    assert (tmp_path / "a.gz").read_bytes() == BODY
    assert sorted(os.listdir(tmp_path)) == [".fetch.lock", "a.gz", "fetched.json"]
    assert len(served.requests) == 2


def test_checksums_of_publisher_and_server(server: Server, tmp_path: Path, no_waits: None) -> None:
    notes: list[str] = []

    def verified(served: Served, **known: Any) -> str:
        server.files["a.gz"] = served
        folder = tmp_path / str(len(os.listdir(tmp_path)))
        notes.clear()
        [result] = fetch([server.file(**known)], str(folder), note=notes.append)
        return str(result["verified"])

    assert verified(Served(), sha256=sha256(BODY), md5="0" * 32) == "published sha256"
    assert verified(Served(google=md5(BODY))) == "md5 the server gives"
    assert notes == ["Fetched a.gz, 3 MB, checked by the md5 the server gives"]
    assert verified(Served(google=md5(BODY), drops=[1_000_000])) == "md5 the server gives"
    assert verified(Served()) == "length"
    assert "only its length was checked" in notes[0]
    assert verified(Served(length=False)) == "nothing"
    assert "nothing was checked" in notes[0]
    # Unpacked on its way, so that the server's md5 is of something else.
    assert (
        verified(Served(google=md5(OTHER), headers={"x-goog-stored-content-encoding": "gzip"}))
        == "length"
    )
    rejects(r"md5 must be \w+ by the server", verified, Served(google=md5(OTHER)))


@pytest.mark.parametrize(
    ("known", "why"),
    [
        ({"md5": md5(OTHER)}, r"md5 must be \w+ as published, got \w+"),
        ({"sha256": sha256(OTHER)}, r"sha256 must be \w+ as published, got \w+"),
        ({"size_bytes": 3_000_001}, r"size must be 3,000,001 bytes as published, got 3,000,000"),
        (
            {"about_bytes": 30_000_000},
            r"size must be about 30,000,000 bytes as published, got 3,000,000",
        ),
    ],
)
def test_fetch_rejects_unpublished_content(
    server: Server,
    tmp_path: Path,
    known: dict[str, Any],
    why: str,
) -> None:
    served = server.files["a.gz"] = Served(google=md5(BODY))
    file = server.file(page="https://example.org/a", **known)
    by_hand = "by hand from https://example.org/a"
    rejects(f"a.gz: cannot be fetched .*{why}.*{by_hand}", fetch, [file], str(tmp_path))
    assert len(served.requests) == 1  # another attempt would bring the same
    assert not (tmp_path / "a.gz").exists()


def test_proxy_of_environment_is_used(
    server: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = "http://logs.invalid/a.gz"
    server.files[url] = Served()
    monkeypatch.setenv("no_proxy", "")
    monkeypatch.setenv("http_proxy", server.url)
    fetch([RemoteFile(name="a.gz", url=url, md5=md5(BODY))], str(tmp_path))
    assert (tmp_path / "a.gz").read_bytes() == BODY
    assert [request["Host"] for request in server.files[url].requests] == ["logs.invalid"]


def test_system_certificates_are_used(
    server: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A proxy may have a certificate that only the system knows."""
    (tmp_path / "certificates.pem").write_text("none")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "certificates.pem"))
    file = RemoteFile(name="a.gz", url=f"{server.url.replace('http', 'https')}/a.gz")
    rejects("no certificate or crl found", fetch, [file], str(tmp_path), attempts=1)


def test_unreachable_hosts_raise(
    server: Server,
    tmp_path: Path,
    no_waits: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refused = RemoteFile(name="a.gz", url="http://127.0.0.1:1/a.gz", page="https://example.org/a")
    by_hand = r"Connection refused.*put it into .* by hand from https://example\.org/a\."
    rejects(by_hand, fetch, [refused], str(tmp_path))
    release = threading.Event()
    server.files["a.gz"] = Served(before=lambda served, number: release.wait(60) and None)
    with monkeypatch.context() as patch:
        patch.setattr(download, "_TIMEOUT_S", 0.1)
        rejects("Read timed out", fetch, [server.file()], str(tmp_path), attempts=1)
    release.set()
    server.files["a.gz"] = Served(headers={"Content-Encoding": "gzip"})
    rejects("response is gzip-encoded", fetch, [server.file()], str(tmp_path))


def test_redirect_is_followed_and_checked(server: Server, tmp_path: Path) -> None:
    moved = {"Location": f"{server.url}/b.gz", "Connection": "close"}
    server.files["a.gz"] = Served(statuses=[302], headers=moved)
    server.files["b.gz"] = Served(google=md5(BODY))
    [result] = fetch([server.file()], str(tmp_path))
    assert (result["name"], result["verified"]) == ("a.gz", "md5 the server gives")


@pytest.mark.parametrize(("status", "attempts"), [(503, 4), (403, 1)])
def test_only_temporary_errors_are_retried(
    server: Server,
    tmp_path: Path,
    no_waits: None,
    status: int,
    attempts: int,
) -> None:
    served = server.files["a.gz"] = Served(statuses=[status] * 10)
    rejects(f"a.gz: cannot be fetched .*{status}", fetch, [server.file()], str(tmp_path))
    assert len(served.requests) == attempts


def test_fetch_runs_two_transfers(server: Server, tmp_path: Path) -> None:
    lock = threading.Lock()
    running = 0
    maximum = 0

    def count(served: Served, number: int) -> None:
        nonlocal running, maximum
        with lock:
            running += 1
            maximum = max(maximum, running)
        time.sleep(0.1)
        with lock:
            running -= 1

    names = [f"day_{day}.gz" for day in range(5)]
    for name in names:
        server.files[name] = Served(body=BODY[:1000], before=count)
    assert [
        result["name"] for result in fetch([server.file(name) for name in names], str(tmp_path))
    ] == names
    assert maximum == 2


def test_failure_stops_other_downloads(server: Server, tmp_path: Path) -> None:
    slow = server.files["a.gz"] = Served(drops=[1_000_000])
    later = server.files["c.gz"] = Served()
    files = [server.file("a.gz"), server.file("b.gz"), server.file("c.gz")]
    rejects(r"b\.gz: cannot be fetched .*404 Not Found", fetch, files, str(tmp_path))
    assert len(slow.requests) <= 2
    assert not later.requests
    server.files["b.gz"] = Served()
    slow.drops = []
    assert [result["status"] for result in fetch(files, str(tmp_path))] == ["fetched"] * 3


def test_full_disk_raises_before_download(
    server: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served = server.files["a.gz"] = Served()
    usage = type(shutil.disk_usage(tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10_000_000, 8_000_000, 2_000_000))
    larger = server.file(about_bytes=3_000_000)
    rejects(
        r"a\.gz needs 3 MB, 2 MB are free\. Free space there",
        fetch,
        [larger],
        str(tmp_path),
    )
    assert not served.requests
    # as the server says
    rejects(r"a\.gz needs 3 MB", fetch, [server.file()], str(tmp_path))
    assert os.listdir(tmp_path) == [".fetch.lock"]


def test_concurrent_fetch_raises(server: Server, tmp_path: Path) -> None:
    inside = threading.Event()
    release = threading.Event()

    def hold(served: Served, number: int) -> None:
        inside.set()
        release.wait(60)

    server.files["a.gz"] = Served(before=hold)
    thread = threading.Thread(target=fetch, args=([server.file()], str(tmp_path)))
    thread.start()
    assert inside.wait(60)
    rejects("another fetch is writing there", fetch, [server.file()], str(tmp_path))
    release.set()
    thread.join()
    assert (tmp_path / "a.gz").read_bytes() == BODY


def _archive(members: dict[str, bytes | tarfile.TarInfo]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in members.items():
            if isinstance(content, tarfile.TarInfo):
                tar.addfile(content)
            else:
                info = tarfile.TarInfo(name)
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def _link(name: str, target: str) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = tarfile.SYMTYPE
    info.linkname = target
    return info


def test_archive_extracts_wanted_members_only(server: Server, tmp_path: Path) -> None:
    train = b"1\ttrain\n" * 1000
    test = b"test\n" * 1000
    others = {
        "readme.txt": b"read me",
        "../evil.txt": b"evil",
        "x/train.txt": _link("x/train.txt", "/etc/passwd"),
    }
    packed = _archive({**others, "./train.txt": train, "../../test.txt": test})
    served = server.files["all.tar.gz"] = Served(body=packed)
    archive = server.file("all.tar.gz", md5=md5(packed), terms="Not for sale")
    files = [RemoteFile(name="train.txt", archive=archive, md5=md5(train), rows=1000)]
    files += [RemoteFile(name="test.txt", archive=archive)]
    folder = tmp_path / "folder"
    notes = []
    results = fetch(files, str(folder), note=notes.append)
    found = [(result["name"], result["verified"], result["url"]) for result in results]
    assert found == [
        ("train.txt", "published md5", archive.url),
        ("test.txt", "length", archive.url),
    ]
    assert ((folder / "train.txt").read_bytes(), (folder / "test.txt").read_bytes()) == (
        train,
        test,
    )
    assert not (folder / "train.txt").is_symlink()
    assert sorted(os.listdir(folder)) == [".fetch.lock", "fetched.json", "test.txt", "train.txt"]
    assert (os.listdir(tmp_path), notes[0]) == (["folder"], "Not for sale")
    assert [result["status"] for result in fetch(files, str(folder), verify=True)] == [
        "present",
        "present",
    ]
    assert len(served.requests) == 1
    # One that the user put there by hand is used, and stays.
    by_hand = tmp_path / "by_hand"
    by_hand.mkdir()
    (by_hand / "all.tar.gz").write_bytes(packed)
    [result] = fetch(files[:1], str(by_hand))
    assert (result["sha256"], len(served.requests)) == (sha256(train), 1)
    assert sorted(os.listdir(by_hand)) == [".fetch.lock", "all.tar.gz", "fetched.json", "train.txt"]


def test_zip_members_are_extracted(server: Server, tmp_path: Path) -> None:
    rows = b"1\t2\t5\t881250949\n" * 1000
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as zipped:
        zipped.writestr("ml/", b"")
        zipped.writestr("ml/readme", b"read me")
        zipped.writestr("../../u.data", rows)
    packed = buffer.getvalue()
    server.files["ml.zip"] = Served(body=packed)
    archive = server.file("ml.zip", md5=md5(packed))
    folder = tmp_path / "ml"
    [result] = fetch([RemoteFile(name="u.data", archive=archive, md5=md5(rows))], str(folder))
    assert (result["verified"], (folder / "u.data").read_bytes()) == ("published md5", rows)
    assert sorted(os.listdir(folder)) == [".fetch.lock", "fetched.json", "u.data"]
    assert os.listdir(tmp_path) == ["ml"]


def test_fetch_rejects_damaged_zip_archives(server: Server, tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as zipped:
        zipped.writestr("u.data", b"a" * 100_000)
    packed = buffer.getvalue().replace(b"aaaa", b"abaa", 1)
    server.files["ml.zip"] = Served(body=packed)
    file = RemoteFile(name="u.data", archive=server.file("ml.zip"))
    rejects("damaged archive .*CRC", fetch, [file], str(tmp_path / "ml"))
    assert not (tmp_path / "ml" / "u.data").exists()


def test_fetch_rejects_invalid_archives(server: Server, tmp_path: Path) -> None:
    def fails(body: bytes, match: str, **known: Any) -> None:
        folder = tmp_path / str(len(os.listdir(tmp_path)))
        server.files["all.tar.gz"] = Served(body=body)
        file = RemoteFile(name="train.txt", archive=server.file("all.tar.gz"), **known)
        rejects(match, fetch, [file], str(folder))
        assert not [name for name in os.listdir(folder) if name.startswith("train.txt")]

    whole = _archive({"train.txt": BODY[:1_000_000]})
    fails(_archive({"other.txt": b"x"}), r"file train\.txt not found")
    fails(_archive({"train.txt": _link("train.txt", "/etc/passwd")}), r"file train\.txt not found")
    fails(whole[: len(whole) // 2], "damaged archive")
    fails(b"nothing", "damaged archive")
    for compressed in (lzma.compress(gzip.decompress(whole)), bz2.compress(gzip.decompress(whole))):
        middle = len(compressed) // 2
        fails(
            compressed[:middle] + b" " * 100_000 + compressed[middle + 100_000 :],
            "damaged archive",
        )
    fails(whole, r"train\.txt of .*: md5 must be \w+ as published", md5=md5(OTHER))


# -- The published files are described as they were published, and a folder is asked for them by
# name
def test_row_counts_match_benchmarks() -> None:
    rows = [file.rows or 0 for file in criteo.FULL_DAYS]
    assert (len(rows), sum(rows[:23]), rows[23]) == (24, 4_195_197_692, 178_274_637)
    assert [file.rows for file in criteo.KAGGLE_FILES] == [45_840_617, 6_042_135]
    assert [file.plain_name for file in criteo.SMALL_DAYS] == [
        "day_0",
        "day_1",
        "day_2",
        "day_3",
        "day_23",
    ]
    for file in criteo.FULL_DAYS:  # a slip in one of the tables would stand out
        assert 245 < file.unpacked_about_bytes / file.rows < 262
        assert 0.31 < file.about_bytes / file.unpacked_about_bytes < 0.345


def test_published_files_are_valid() -> None:
    for files in PUBLISHED.values():
        names = [file.name for file in files]
        assert len(set(names)) == len(names)
        for file in files:
            source = file.archive or file
            assert source.url.startswith("https://")
            assert file.published_at.startswith("https://")
            for checksum in (file.md5, source.md5):
                assert checksum is None or (len(checksum) == 32 and int(checksum, 16))
    checksums = {file.md5 for files in PUBLISHED.values() for file in files if file.md5}
    assert len(checksums) == 2 + 24 + 4
    rejects("did you mean 'criteo_small'", files_of, "criteo_smal")
    rejects("there are criteo_kaggle, criteo_small, criteo_full, mnist", files_of, "zzz")


def test_published_files_are_accepted_in_any_form(tmp_path: Path) -> None:
    def found(names: list[str], desired: tuple[RemoteFile, ...]) -> list[str]:
        for name in names:
            (tmp_path / name).touch()
            os.truncate(tmp_path / name, 15_000_000_000)
        notes.clear()
        return [
            Path(path).name
            for path in require_files(str(tmp_path), desired, fetch_name="x", note=notes.append)
        ]

    notes: list[str] = []
    days = ["day_0", "day_1.gz", "day_2.parquet", "day_23.gz"]
    rejects(r"missing day_3 \(", found, [*days, "day_3.gz.old"], criteo.SMALL_DAYS)
    assert found([*days, "day_3.parquet"], criteo.SMALL_DAYS) == [
        *days[:3],
        "day_3.parquet",
        "day_23.gz",
    ]
    assert notes == [f"{tmp_path}/day_0: 15 GB, but 49.8 GB are published"]
    assert found(["train.parquet", "test.txt.gz"], criteo.KAGGLE_FILES) == [
        "train.parquet",
        "test.txt.gz",
    ]
    rejects(
        r"more than once \(test\.txt and test\.txt\.gz\)\. Keep one of each",
        found,
        ["test.txt"],
        criteo.KAGGLE_FILES,
    )


def test_require_files_returns_all_paths(tmp_path: Path) -> None:
    for file in criteo.SMALL_DAYS:
        (tmp_path / file.plain_name).write_bytes(b"1\n")
    (tmp_path / "day_7").write_bytes(b"1\n")  # not wanted
    notes = []
    desired = files_of("criteo_small")
    expected = [str(tmp_path / f"day_{day}") for day in (0, 1, 2, 3, 23)]
    assert (
        require_files(str(tmp_path), desired, fetch_name="criteo_small", note=notes.append)
        == expected
    )
    assert (notes[0], len(notes)) == (f"{tmp_path}/day_0: 2 B, but 49.8 GB are published", 5)
    (tmp_path / "day_3").rename(tmp_path / "day_3.gz.partial")
    assert rejects("", require_files, str(tmp_path), desired, fetch_name="criteo_small") == (
        f"{tmp_path}: missing day_3 (181,115,208 rows, about 15.1 GB as .gz, 45.9 GB unpacked); "
        "published at https://ailab.criteo.com/download-criteo-1tb-click-logs-dataset. Run `rayrec "
        f"fetch criteo_small --out {tmp_path}`."
    )


def test_require_files_reports_missing_files(tmp_path: Path) -> None:
    for name, why in (
        (
            "criteo_full",
            r"day_0 to day_23 \(24 files, 4,373,472,329 rows, about 367 GB as \.gz, 1\.11 TB "
            r"unpacked\)",
        ),
        ("criteo_kaggle", r"train\.txt \(45,840,617 rows, about 11\.1 GB\)"),
        ("mnist", r".*train-images-idx3-ubyte \(60,000 rows, 9,912,422 bytes, 47 MB unpacked\)"),
        ("y", r"x \(number of rows not published, size not published\)\. Run `rayrec fetch y"),
    ):
        files = [RemoteFile(name="x")] if name == "y" else files_of(name)
        for path in (tmp_path, tmp_path / "absent"):
            rejects(f"missing {why}", require_files, str(path), files, fetch_name=name)


def test_names_are_readable() -> None:
    assert names_text(["day_0", "day_1", "day_2", "day_5", "day_7", "day_8", "x"]) == (
        "day_0 to day_2, day_5, day_7, day_8, x"
    )
