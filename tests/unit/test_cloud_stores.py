"""gs://, az:// and s3:// compared with local paths: atomic files, lists, ranges, outages, one-line
errors.

gs:// is Google's XML API of moto, az:// a small server of Blob REST calls (blob_server.py), and
Azurite if RAYREC_TEST_AZURITE names it, s3:// moto.
"""

import re
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from builders.faults import fails_with, rejects
from builders.savers import Run, save
from builders.tables import write_delta
from hosts import cloud_stores
from hosts.cloud_stores import CloudStore, MotoStore, S3Store

import rayrec
from rayrec import checkpoint, storage
from rayrec.checkpoint import Retention
from rayrec.data.formats.registry import find_format
from rayrec.data.log_source import LogSource
from rayrec.observe.console import Console
from rayrec.schema import Schema
from rayrec.storage import files

MIB = 1 << 20


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(kind, marks=[pytest.mark.extended] * (kind == "s3"))
        for kind in cloud_stores.KINDS
    ],
)
def store(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[CloudStore]:
    """Running store, configured by the standard variables only."""
    server = cloud_stores.KINDS[request.param](tmp_path_factory.mktemp(request.param))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        server.start()
        try:
            if isinstance(server, S3Store):
                server.url("logs")
            yield server
        finally:
            server.end() if isinstance(server, MotoStore) else server.kill()


@pytest.fixture
def folder(store: CloudStore, request: pytest.FixtureRequest) -> str:
    return f"{store.bucket}/{request.node.name.partition('[')[0]}"


def write_three_files(folder: str) -> None:
    storage.write_bytes(f"{folder}/a.txt", b"abc")
    storage.write_json(f"{folder}/deep.partial/er/100% b#1 ?.json", {"ä": 1})
    storage.write_bytes(f"{folder}/empty", b"")


def test_cloud_files_are_read_and_listed(folder: str) -> None:
    assert not storage.exists(folder)
    assert storage.list_folder(folder) == []
    storage.make_folder(folder)
    assert not storage.exists(folder)
    write_three_files(folder)
    assert storage.list_folder(folder) == ["a.txt", "deep.partial", "empty"]
    assert storage.list_folder(f"{folder}/deep.partial") == ["er"]
    assert storage.read_json(f"{folder}/deep.partial/er/100% b#1 ?.json") == {"ä": 1}
    assert [
        storage.size_of(f"{folder}/{name}") for name in ("a.txt", "empty", "deep.partial", "none")
    ] == [3, 0, None, None]
    assert list(storage.read_stream(f"{folder}/empty")) == []
    buffer = np.zeros(4, np.uint8)
    assert [storage.read_into(f"{folder}/a.txt", start, buffer) for start in (1, 3, 9)] == [2, 0, 0]
    storage.write_bytes(f"{folder}/a.txt", b"replaced")
    assert storage.read_into(f"{folder}/a.txt", 4, buffer) == 4
    assert buffer.tobytes() == b"aced"


def test_cloud_files_are_copied_and_removed(folder: str, tmp_path: Path) -> None:
    write_three_files(folder)
    assert storage.clone_file(f"{folder}/a.txt", f"{folder}2/b.txt")
    storage.copy_files(folder, str(tmp_path / "here"))
    storage.copy_files(str(tmp_path / "here"), f"{folder}3")
    storage.copy_files(f"{folder}3", f"{folder}4")
    assert storage.read_json(f"{folder}4/deep.partial/er/100% b#1 ?.json") == {"ä": 1}
    assert storage.list_folder(f"{folder}2") == ["b.txt"]
    storage.remove_file(f"{folder}/a.txt")
    storage.remove_file(f"{folder}/a.txt")
    storage.remove_folder(f"{folder}/deep.partial")
    storage.remove_folder(f"{folder}/deep.partial")
    assert storage.list_folder(folder) == ["empty"]
    rejects(r"a\.txt: no such file$", storage.read_bytes, f"{folder}/a.txt")


def test_cloud_globs_and_partitions_list_all_depths(folder: str) -> None:
    names = ["day=1/part-0", "day=1/part-1", "day=2/part-0", "day=10/part-0"]
    for name in names:
        storage.write_bytes(f"{folder}/{name}", b"x")
    for suffix, found in (("", names), ("/day=?/part-0", names[:3:2]), ("/day=1", names[:2])):
        assert [file.path for file in storage.list_files(folder + suffix)] == [
            f"{folder}/{name}" for name in found
        ]
    # "day=1/" comes before "day0" and after "day-", which is before "day/"
    storage.write_bytes(f"{folder}/day/a", b"x")
    storage.write_bytes(f"{folder}/day-/a", b"x")
    assert storage.exists(f"{folder}/day")
    assert not storage.exists(f"{folder}/da")


def test_cloud_table_formats_are_rejected(folder: str) -> None:
    for name in (
        "delta/_delta_log/0.json",
        "iceberg/metadata/0-a.metadata.json",
        "hudi/.hoodie/hoodie.properties",
    ):
        storage.write_bytes(f"{folder}/{name}", b"{}")
    for table in ("delta", "iceberg/data", "hudi"):
        storage.write_bytes(f"{folder}/{table}/day=1/a.parquet", b"x")
        for suffix in ("", "/day=1", "/day=1/a.parquet", "/*/*.parquet"):
            kind = table.partition("/")[0].capitalize()
            rejects(
                f"the {kind} table|this {kind} table",
                storage.list_files,
                f"{folder}/{table}{suffix}",
            )


def test_cloud_tables_are_read(folder: str, tmp_path: Path) -> None:
    rows = pa.table({"day": ["a b", "ü"], "click": [0, 1], "user": ["u0", "u1"]})
    write_delta(rows, tmp_path / "table", by=["day"])
    storage.copy_files(str(tmp_path / "table"), f"{folder}/table")
    for path in (f"{folder}/table", f"{folder}/table@v0"):
        files = LogSource.at(path).raw_files()
        assert [file.path.split("/")[-2] for file in files] == ["day=%C3%BC", "day=a%20b"]
        schema = Schema(label="click", sparse=("user",), tokens="any")
        (table,) = find_format(files[1].path, schema).tables(files[1].path, schema, None)
        assert table.to_pylist() == [{"click": 0, "user": "u0"}]
    rejects("cannot read version 7", LogSource.at(f"{folder}/table@v7").raw_files)


@pytest.mark.parametrize("store", [pytest.param("s3", marks=pytest.mark.extended)], indirect=True)
def test_cloud_iceberg_tables_are_read(store: CloudStore, tmp_path: Path) -> None:
    sql = pytest.importorskip("pyiceberg.catalog.sql")
    catalog = sql.SqlCatalog(
        "test",
        uri=f"sqlite:///{tmp_path}/catalog.db",
        warehouse=f"{store.bucket}/lake",
        **{
            "s3.endpoint": store.environment["AWS_ENDPOINT_URL"],
            "s3.access-key-id": store.environment["AWS_ACCESS_KEY_ID"],
            "s3.secret-access-key": store.environment["AWS_SECRET_ACCESS_KEY"],
            "s3.region": "us-east-1",
        },
    )
    catalog.create_namespace("space")
    rows = pa.table({"click": [0, 1], "user": ["u0", "u1"]})
    table = catalog.create_table("space.log", rows.schema)
    table.append(rows)
    schema = Schema(label="click", sparse=("user",), tokens="any")
    for path in (table.location(), f"{table.location()}?region=us-east-1"):
        (file,) = LogSource.at(path).raw_files()
        (read,) = find_format(file.path, schema).tables(file.path, schema, None)
        assert read.to_pydict() == rows.to_pydict()


def test_large_cloud_file_is_atomic(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_BUFFER_BYTES", MIB // 4)
    data = np.arange(5 * MIB // 8, dtype=np.int32)
    # used again for each piece
    path = f"{folder}/large"
    piece = np.zeros(MIB // 8, np.int32)
    storage.write_bytes(path, b"before")

    def pieces(last: bool) -> Iterator[memoryview]:
        for part in data.reshape(-1, MIB // 8):
            assert storage.read_bytes(path) == b"before"
            piece[:] = part
            yield memoryview(piece)
        if not last:
            raise KeyboardInterrupt

    fails_with(KeyboardInterrupt, "", storage.write_stream, path, pieces(last=False))
    assert storage.read_bytes(path) == b"before"
    assert storage.write_stream(path, pieces(last=True)) == data.nbytes
    assert storage.read_bytes(path) == data.tobytes()
    part = np.zeros(MIB, np.uint8)
    assert storage.read_into(path, MIB + 7, part) == MIB
    assert part.tobytes() == data.tobytes()[MIB + 7 : 2 * MIB + 7]
    assert storage.list_folder(folder) == ["large"]


def test_cloud_outage_is_waited_out(store: CloudStore, folder: str) -> None:
    storage.write_bytes(f"{folder}/a", b"abc")
    store.kill()
    back = threading.Timer(0.5, store.start)
    back.start()
    try:
        assert storage.read_bytes(f"{folder}/a") == b"abc"
        storage.write_bytes(f"{folder}/a", b"new")
    finally:
        back.join()
    assert storage.read_bytes(f"{folder}/a") == b"new"


def test_missing_store_or_bucket_raises_one_line_at_once(
    store: CloudStore, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, storage.retry_timeout(0):
        for name, value in store.environment.items():
            patch.setenv(name, value.replace(str(store.port), "9"))
        start = time.monotonic()
        assert "\n" not in fails_with(
            OSError,
            r"the store was unavailable for 0 s \((cannot|could not) connect to .*:9\b",
            storage.exists,
            folder,
        )
        assert time.monotonic() - start < 1
    other = store.bucket.replace("logs", "none")
    for call in (
        lambda: storage.write_bytes(f"{other}/a", b"x"),
        lambda: storage.read_bytes(f"{other}/a"),
        lambda: storage.list_files(f"{other}/a"),
    ):
        rejects(rf"^{other}: (bucket|container) not found; create it", call)


def test_checkpoint_and_log_are_read_from_cloud(
    folder: str, click_log: Path, tmp_path: Path
) -> None:
    values = {"model.a": torch.arange(100.0), "model.b": torch.ones(2, 2, dtype=torch.int64)}
    with closing(Run(folder)) as run:
        saver = run.saver(retention=Retention(num_to_keep=1), extra_files={"words.txt": b"abc"})
        for step in (1, 2):
            save(saver, step, values)
    assert run.steps() == [2]
    found = checkpoint.open_checkpoint(folder)
    assert found == run.at(2)
    target = {name: torch.zeros_like(value) for name, value in values.items()}
    checkpoint.restore(found, target)
    assert all(torch.equal(target[name], value) for name, value in values.items())
    checkpoint.verify(found)
    log = f"{folder}/train.txt"
    storage.write_bytes(
        log, b"".join((click_log / "train.txt").read_bytes().splitlines(keepends=True)[:2_000])
    )
    assert (
        rayrec.vocabulary(
            log, out=str(tmp_path / "out"), console=Console(quiet=True), engine="threads"
        )["rows"]
        == 2_000
    )


def test_wrong_credentials_raise_one_line(
    store: CloudStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    if store.bucket.startswith("gs://"):
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/none.json")
        monkeypatch.delenv("STORAGE_EMULATOR_HOST")
        url = f"gs://logs/a?endpoint_override=127.0.0.1:{store.port}"
        match = "from /none.json: No such file"
    elif store.bucket.startswith("s3://"):
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "aHVzaA==")
        url = "s3://logs/a"
        match = ""
    else:
        setting = store.environment["AZURE_STORAGE_CONNECTION_STRING"]
        monkeypatch.setenv(
            "AZURE_STORAGE_CONNECTION_STRING",
            re.sub("AccountKey=[^;]*", "AccountKey=aHVzaA==", setting),
        )
        url = "az://logs/a"
        match = "HTTP status 403"
    start = time.monotonic()
    assert "aHVzaA" not in rejects(
        f"logs: access denied .*{match}.*; set ", storage.write_bytes, url, b"x"
    )
    assert time.monotonic() - start < 1


# -- Certificates
class _OneObject(BaseHTTPRequestHandler):
    """Store with one object of three bytes."""

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "3")
        self.send_header("Last-Modified", "Wed, 21 Oct 2015 07:28:00 GMT")
        self.send_header("ETag", "1")
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Self-signed certificate of the store at AWS_ENDPOINT_URL."""
    pem = tmp_path / "store.pem"
    key = tmp_path / "store.key"
    names = ["subjectAltName=IP:127.0.0.1", "basicConstraints=critical,CA:FALSE"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=store"]
    command += [word for name in names for word in ("-addext", name)]
    subprocess.run([*command, "-out", pem, "-keyout", key], check=True, capture_output=True)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _OneObject)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    for name, value in (
        ("AWS_ENDPOINT_URL", f"https://127.0.0.1:{server.server_port}"),
        ("AWS_ACCESS_KEY_ID", "tester"),
        ("AWS_SECRET_ACCESS_KEY", "secret-word"),
    ):
        monkeypatch.setenv(name, value)
    yield pem
    server.shutdown()
    server.server_close()
    thread.join()


def test_certificate_in_ca_bundle_is_trusted(
    certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rejects(r"^s3://b: .* not trusted \(.+\); .* AWS_CA_BUNDLE", storage.size_of, "s3://b/a")
    monkeypatch.setenv("AWS_CA_BUNDLE", str(certificate))
    assert storage.size_of("s3://b/a") == 3


def test_ca_bundle_without_certificates_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").touch()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "tester")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    for name in ("none", "empty"):
        monkeypatch.setenv("AWS_CA_BUNDLE", f"{tmp_path}/{name}")
        rejects(r"^AWS_CA_BUNDLE: must be a file .* got .*", storage.exists, "s3://b/a")


@pytest.mark.parametrize("key", ["a//b", "a/../b", "./a"])
def test_keys_unusable_by_obstore_are_rejected(folder: str, key: str) -> None:
    rejects(r"://logs/.*: must be a key of plain names", storage.exists, f"{folder}/b/{key}")
