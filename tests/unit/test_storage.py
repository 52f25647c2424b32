"""Files: natural order, ranges, atomic writes and temporary folders."""

import json
import math
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from builders.faults import at_first, fails_with, raising, rejects
from pyarrow import fs

import rayrec
from rayrec import recipes, storage
from rayrec.config import InputError
from rayrec.storage import cache, files, object_store, retry
from rayrec.storage.files import Scratch
from rayrec.storage.retry import UnavailableError
from rayrec.storage.stores import AzureLocation, GcsLocation, S3Location
from rayrec.training.launchers.process_launcher import ProcessLauncher
from rayrec.training.trainer import choose_launcher


def found_in(*place: Any, **options: Any) -> list[str]:
    return [file.path for file in storage.list_files("/".join(map(str, place)), **options)]


def test_list_files_sorts_numbers_naturally(tmp_path: Path) -> None:
    for name in (
        "day_10",
        "day_2",
        "day_1",
        "truth.json",
        ".hidden",
        "_SUCCESS",
        "day_3.0a.partial",
    ):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "day_0").write_bytes(b"x")
    expected = [str(tmp_path / name) for name in ("day_1", "day_2", "day_10")]
    assert found_in(tmp_path) == found_in(tmp_path, "day_*") == expected
    assert found_in(tmp_path, "day_?") == expected[:2]
    assert found_in(tmp_path, "truth.json") == [f"{tmp_path}/truth.json"]
    for name in ("a1²3", "a²", "a2"):
        (tmp_path / name).write_bytes(b"x")
    assert len(found_in(tmp_path)) == 6


def test_listing_missing_path_raises(tmp_path: Path) -> None:
    for call, why in (
        (lambda folder: storage.list_files(f"{folder}/*.gz"), "contains no data files"),
        (lambda folder: storage.read_bytes(f"{folder}/absent"), "no such file"),
        (
            lambda folder: storage.read_into(f"{folder}/absent", 0, np.zeros(1, np.uint8)),
            "no such file",
        ),
    ):
        (tmp_path / "only.json").write_bytes(b"{}")
        rejects(why, call, str(tmp_path))
    rejects(
        r"x: scheme is not supported .*s3://, gs://, gcs://, az://, abfs://, abfss://",
        storage.resolve,
        "nosuch://x/y",
    )


def write_and_fail(path: Path) -> None:
    path.write_bytes(b"half")
    raise RuntimeError


def test_failed_write_keeps_previous_file(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file"
    storage.write_bytes(str(path), b"old")
    with pytest.raises(RuntimeError), storage.writing(str(path)) as local:
        write_and_fail(Path(local))
    assert path.read_bytes() == b"old"
    assert os.listdir(path.parent) == ["file"]
    storage.write_bytes(str(path), b"new")
    assert path.read_bytes() == b"new"


@pytest.mark.parametrize("prefix", ["", "file://"])
def test_writing_folder_is_atomic_and_never_overwrites(tmp_path: Path, prefix: str) -> None:
    target = f"{prefix}{tmp_path}/folder"
    with pytest.raises(RuntimeError), storage.writing_folder(target) as folder:
        write_and_fail(Path(folder, "a"))
    assert os.listdir(tmp_path) == []
    with storage.writing_folder(target) as folder:
        Path(folder, "a").write_bytes(b"1")
        assert not (tmp_path / "folder").exists()
    assert (tmp_path / "folder" / "a").read_bytes() == b"1"
    rejects("exists already", storage.writing_folder(target).__enter__)


def test_json_round_trips_with_nan_as_null(tmp_path: Path) -> None:
    path = tmp_path / "value.json"
    value = {"ä": math.nan, "rows": 3, "nested": [1.5, (math.inf, -math.inf), {"text": "NaN"}]}
    storage.write_json(str(path), value)
    assert path.read_text() == storage.json_text(value) + "\n"
    strict = json.loads(
        path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON")
    )
    assert (
        storage.read_json(str(path))
        == strict
        == {"ä": None, "rows": 3, "nested": [1.5, [None, None], {"text": "NaN"}]}
    )
    for damaged in (b'{"a": ', b"\xff\xfe\x00"):
        path.write_bytes(damaged)
        rejects(r"value\.json: damaged", storage.read_json, str(path))


# -- Streams
def test_write_stream_is_atomic(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file"

    def pieces(*, fails: bool) -> Iterator[bytes | memoryview]:
        yield b"abc"
        yield memoryview(np.zeros((0, 3), np.float32))
        yield memoryview(np.arange(3, dtype=np.int32))
        assert os.listdir(path.parent) != ["file"] or path.read_bytes() != b"abc"
        if fails:
            raise RuntimeError

    for url in (str(path), f"file://{path}"):
        path.unlink(missing_ok=True)
        assert storage.write_stream(url, pieces(fails=False)) == 15
        assert path.read_bytes() == b"abc" + np.arange(3, dtype=np.int32).tobytes()
        path.write_bytes(b"old")
        fails_with(RuntimeError, "", storage.write_stream, url, pieces(fails=True))
        assert path.read_bytes() == b"old"
        assert os.listdir(path.parent) == ["file"]
    assert b"".join(storage.read_stream(str(path))) == b"old"
    assert (storage.write_stream(str(path), []), list(storage.read_stream(str(path)))) == (0, [])


def test_stream_reads_one_version_of_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_BUFFER_BYTES", 4)
    path = tmp_path / "a.txt"
    path.write_bytes(b"old content")
    stream = storage.read_stream(str(path))
    read = next(stream)
    storage.write_bytes(str(path), b"NEW CONTENT")
    assert read + b"".join(stream) == b"old content"


def test_full_disk_error_keeps_errno(tmp_path: Path) -> None:
    code = (
        "import errno, resource, sys; from rayrec import storage\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "for write in (lambda: storage.write_bytes(sys.argv[1], bytes(5000)),\n"
        "              lambda: storage.write_stream(sys.argv[1], [bytes(600)] * 3),\n"
        "              lambda: storage.write_bytes('file://' + sys.argv[1], bytes(5000))):\n"
        "    try: write()\n"
        "    except OSError as error: assert error.errno == errno.EFBIG, error\n"
        "    else: raise AssertionError\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "file")], check=False, stderr=subprocess.PIPE
    )
    assert run.returncode == 0, run.stderr
    assert os.listdir(tmp_path) == []


def test_folders_are_listed_copied_and_removed(tmp_path: Path) -> None:
    folder = str(tmp_path / "a.partial")
    for prefix in ("", "file://"):
        storage.make_folder(f"{prefix}{folder}/deep/empty")
        storage.write_bytes(f"{prefix}{folder}/.hidden.json", b"12")
        storage.write_bytes(f"{prefix}{folder}/deep/file", b"123")
        assert storage.list_folder(prefix + folder) == [".hidden.json", "deep"]
        assert storage.list_folder(prefix + folder + "/none") == []
        (file,) = storage.files_in(prefix + folder)
        assert (file.path, file.size_bytes) == (f"{prefix}{folder}/.hidden.json", 2)
        assert storage.files_in(prefix + folder + "/none") == []
        names = ("deep/file", "deep", "none")
        assert [storage.size_of(f"{prefix}{folder}/{name}") for name in names] == [3, None, None]
        storage.copy_files(prefix + folder, f"{prefix}{tmp_path}/b.partial")
        found = sorted(
            str(path.relative_to(tmp_path / "b.partial"))
            for path in (tmp_path / "b.partial").rglob("*")
        )
        assert found == [".hidden.json", "deep", "deep/empty", "deep/file"]
        storage.remove_file(f"{prefix}{folder}/.hidden.json")
        storage.remove_file(f"{prefix}{folder}/.hidden.json")
        storage.remove_folder(prefix + folder)
        storage.remove_folder(prefix + folder)
        assert os.listdir(tmp_path) == ["b.partial"]
        storage.remove_folder(f"{prefix}{tmp_path}/b.partial")
    rejects("no such folder", storage.copy_files, folder, f"{folder}2")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("prefix", ["", "file://"])
@pytest.mark.parametrize("replaced", [0, 1])
def test_write_replaces_only_one_linked_file(tmp_path: Path, prefix: str, replaced: int) -> None:
    (tmp_path / "other").write_bytes(b"other")
    urls = [f"{prefix}{tmp_path}/a", f"{prefix}{tmp_path}/new/b"]
    target = urls[replaced]
    kept = tmp_path / ("new/b", "a")[replaced]

    def write_locally() -> None:
        with storage.writing(target) as local:
            Path(local).write_bytes(b"other")

    for write in (
        lambda: storage.write_bytes(target, b"other"),
        lambda: storage.write_stream(target, [b"other"]),
        lambda: storage.copy_file(f"{prefix}{tmp_path}/other", target),
        lambda: storage.clone_file(f"{prefix}{tmp_path}/other", target),
        write_locally,
    ):
        storage.write_bytes(urls[0], b"12345")
        assert storage.clone_file(*urls)
        assert (tmp_path / "a").samefile(tmp_path / "new" / "b")
        assert storage.clone_file(*urls)  # and again
        write()
        assert [storage.read_bytes(target), kept.read_bytes()] == [b"other", b"12345"]
        storage.remove_file(target)
        assert kept.read_bytes() == b"12345"
    assert not storage.clone_file(f"{prefix}{tmp_path}/none", target)
    assert not storage.clone_file(urls[0], "s3://bucket/b")
    assert sorted(file.name for file in tmp_path.rglob("*") if file.is_file()) == [
        kept.name,
        "other",
    ]


# Errors of obstore, of a real store.
_STATUS = (
    "Generic S3 error: Error performing HEAD http://127.0.0.1:9/logs/a?sig=hush in 2.3ms - Server "
    "returned non-2xx status code: {}: {}\n\nDebug source:\nGeneric {{\n"
)
_BODY = '<?xml version="1.0"?>\n<Error><Code>{}</Code><Message>{}\nRequestId:7</Message></Error>'
_NO_ANSWER = (
    "Generic S3 error: Error performing HEAD http://127.0.0.1:9/logs/a?sig=hush in 2.3ms - HTTP "
    "error: error sending request\n\nDebug source:\nGeneric {{\n  HttpError {{\n {}"
)
_REFUSED = """ConnectError(
    "tcp connect error",
    127.0.0.1:9,
    Os {
        code: 111,
        kind: ConnectionRefused,
        message: "Connection refused",
    },
),"""
_CERTIFICATE = "InvalidCertificate(\n  Other(\n    OtherError(\n      CaUsedAsEndEntity,\n"
_LOOKUP = """ConnectError("dns error", Custom { kind: Uncategorized, error: "failed to lookup" })"""
_TOKEN = (
    "Generic GCS error: Error performing token request: Error performing GET http://{}/token in 1ms"
    " - {}"
)


def _answer(status: str, code: str = "", message: str = "") -> str:
    return _STATUS.format(status, _BODY.format(code, message) if code else "")


@pytest.mark.parametrize(
    ("text", "expected", "says"),
    [
        (_NO_ANSWER.format(_REFUSED), UnavailableError, "cannot connect to 127.0.0.1:9: Conn"),
        (_NO_ANSWER.format(_LOOKUP), UnavailableError, "failed to lookup"),
        (_NO_ANSWER.format("kind: TimedOut"), UnavailableError, "timeout was reached"),
        (_answer("503 Service Unavailable"), UnavailableError, "HTTP status 503"),
        (_answer("429 Too Many"), UnavailableError, "HTTP status 429"),
        (_answer("500 Internal", "InternalError", "again"), UnavailableError, "again"),
        (_NO_ANSWER.format(_CERTIFICATE), InputError, "not trusted .CaUsed.*AWS_CA_BUNDLE"),
        (_answer("403 Forbidden", "AccessDenied", "no"), InputError, "denied .*AccessDenied: no"),
        (_answer("401 Unauthorized"), InputError, "denied .*HTTP status 401.*; set "),
        (_answer("400 Bad Request"), InputError, "denied"),
        (_answer("400 Bad Request", "ExpiredToken", "expired"), InputError, "denied"),
        (_answer("400 Bad Request", "EntityTooLarge", "5 GB"), OSError, "rejected .*EntityTooLa"),
        (_answer("404 Not Found", "NoSuchBucket", "no"), InputError, "bucket not found; create"),
        (_answer("404 Not Found", "ContainerNotFound", "no"), InputError, "bucket not found"),
        (_answer("404 Not Found", "NoSuchKey", "no"), FileNotFoundError, "no such file"),
        (_answer("301 Moved Permanently"), InputError, "another region; set AWS_REGION"),
        (_answer("409 Conflict", "InvalidBlobType", "no"), OSError, "the store rejected"),
        (_TOKEN.format("169.254.169.254", "HTTP error: dns"), InputError, "denied"),
        (_TOKEN.format("google.com", "HTTP error: dns"), UnavailableError, "performing token"),
        ("Generic MicrosoftAzure error: Error reading federated token file ", InputError, "denied"),
    ],
)
def test_obstore_errors_are_one_line_with_fix(
    text: str, expected: type[Exception], says: str
) -> None:
    raised = object_store._explain(S3Location("logs", None, None), "logs/a", OSError(text))
    assert type(raised) is expected
    assert re.search(says, str(raised))
    assert "\n" not in str(raised)
    assert "hush" not in str(raised)


def test_retries_end_at_limit_set_by_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = UnavailableError("could not connect", "at AWS")
    with storage.retry_timeout(5):
        assert retry.retry("s3://logs/a", at_first([refused] * 2, lambda: 7)) == 7
    once = at_first([refused], lambda: 7)
    message = (
        r"^s3://logs: the store was unavailable for 0 s \(could not .*\); at AWS\. Correct the "
        r"endpoint, or try again"
    )
    with storage.retry_timeout(0), pytest.raises(OSError, match=message):
        retry.retry("s3://logs/a", once)
    assert once() == 7  # it was called once
    assert retry.outage_s() == storage.OUTAGE_S
    monkeypatch.setenv("RAYREC_STORAGE_OUTAGE_S", "2.5")
    assert retry.outage_s() == 2.5
    for limit_s in (1, 0):
        with storage.retry_timeout(limit_s):
            assert retry.outage_s() == limit_s
    monkeypatch.setenv("RAYREC_STORAGE_OUTAGE_S", "long")
    rejects("RAYREC_STORAGE_OUTAGE_S", retry.outage_s)


def test_secrets_in_urls_are_rejected_and_not_printed() -> None:
    for url, why in (
        ("s3://user:hush@bucket/key", r"s3://\.\.\.@bucket: must not contain credentials"),
        ("gs://hush@bucket/key", "credentials"),
        ("az://:hush@account.blob.core.windows.net/c/key", "credentials"),
        ("abfs://user:hush@a/key", "credentials"),
    ):
        assert "hush" not in rejects(why, storage.resolve, url)


def test_google_and_azure_locations_match_their_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "AZURE_STORAGE_ACCOUNT",
        "AZURE_STORAGE_KEY",
        "AZURE_STORAGE_CONNECTION_STRING",
        "STORAGE_EMULATOR_HOST",
    ):
        monkeypatch.delenv(name, raising=False)
    assert GcsLocation.parse("gs://bucket/a%20b/") == GcsLocation(
        "bucket/a%20b", None, anonymous=False
    )
    assert GcsLocation.parse("gs://anonymous@bucket/a") == GcsLocation(
        "bucket/a", None, anonymous=True
    )
    assert GcsLocation.parse("gcs://b/a?endpoint_override=x.com") == GcsLocation(
        "b/a", "https://x.com", anonymous=False
    )
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "127.0.0.1:9")
    assert GcsLocation.parse("gs://bucket/a") == GcsLocation(
        "bucket/a", "http://127.0.0.1:9", anonymous=True
    )
    rejects(
        r"storage account not found\. Set AZURE_STORAGE_ACCOUNT", AzureLocation.parse, "az://logs/a"
    )
    url = "abfss://logs@acct.dfs.core.windows.net/a/b"
    assert AzureLocation.parse(url) == AzureLocation(
        "logs/a/b", "https://acct.blob.core.windows.net", "acct"
    )
    assert storage.parent_folder(url) == "abfss://logs@acct.dfs.core.windows.net/a"
    assert files.same_store(url, "az://logs@acct/c")
    assert not files.same_store(url, "az://logs@other/c")
    monkeypatch.setenv(
        "AZURE_STORAGE_CONNECTION_STRING",
        "AccountName=tester;AccountKey=aA==;BlobEndpoint=http://h:1/tester",
    )
    assert AzureLocation.parse("az://logs/a") == AzureLocation(
        "logs/a", "http://h:1/tester", "tester"
    )
    assert AzureLocation.parse("az://logs@acct/a").endpoint == "https://acct.blob.core.windows.net"
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", "hush")
    assert "hush" not in rejects(
        r"^AZURE_STORAGE_CONNECTION_STRING: must be a list", AzureLocation.parse, "az://logs/a"
    )


def test_s3_location_matches_aws_tools_and_keeps_url_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = "s3://bucket/runs?region=x&scheme=http"
    assert (
        storage.join(url, "demo", "events.jsonl")
        == "s3://bucket/runs/demo/events.jsonl?region=x&scheme=http"
    )
    assert storage.join("s3://bucket?region=x", "a") == "s3://bucket/a?region=x"
    assert storage.join("s3://bucket/day_?", "a") == "s3://bucket/day_?/a"  # a glob's
    assert storage.join("/runs?region=x", "a") == "/runs?region=x/a"  # a local folder's name
    inside = storage.join(url, "day_1.parquet")
    assert (storage.parent_folder(inside), storage.name_of(inside)) == (url, "day_1.parquet")
    assert S3Location.parse(inside).inner == "bucket/runs/day_1.parquet"
    assert (storage.parent_folder("/a/b"), storage.name_of("/a/b?c=d")) == ("/a", "b?c=d")
    for name in (
        "AWS_ENDPOINT_URL",
        "AWS_ENDPOINT_URL_S3",
        "AWS_REGION",
        "AWS_DEFAULT_REGION",
        "AWS_PROFILE",
    ):
        monkeypatch.delenv(name, raising=False)
    config = tmp_path / "config"
    config.write_text("[default]\nregion = a\n[profile b]\nregion = b\nendpoint_url = http://b:1\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    for variables, url, expected in (
        ({}, "s3://bucket/key x/day_?", ("bucket/key x/day_?", None, "a")),
        ({"AWS_PROFILE": "b"}, "s3://bucket", ("bucket", "http://b:1", "b")),
        (
            {"AWS_DEFAULT_REGION": "c", "AWS_ENDPOINT_URL": "http://c:1"},
            "s3://bucket",
            ("bucket", "http://c:1", "c"),
        ),
        (
            {"AWS_REGION": "d", "AWS_ENDPOINT_URL_S3": "http://d:1"},
            "s3://bucket",
            ("bucket", "http://d:1", "d"),
        ),
        (
            {},
            "s3://bucket/key?region=e&endpoint_override=e:1&scheme=http",
            ("bucket/key", "http://e:1", "e"),
        ),
    ):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        place = S3Location.parse(url)
        assert (place.inner, place.endpoint, place.region) == expected
    config.write_text("rubbish")
    rejects("must be an AWS config file", S3Location.parse, "s3://bucket")


def test_listed_files_keep_url_options(monkeypatch: pytest.MonkeyPatch) -> None:
    infos = [
        fs.FileInfo(f"bucket/log/day_{number}", type=fs.FileType.File, size=1) for number in (10, 9)
    ]

    class Store:
        def get_file_info(self, asked: str | fs.FileSelector) -> fs.FileInfo | list[fs.FileInfo]:
            return (
                fs.FileInfo(asked, type=fs.FileType.Directory) if isinstance(asked, str) else infos
            )

    def with_retries(path: str, call: Any) -> Any:
        assert path.endswith("?region=x")
        return call(Store(), S3Location.parse(path).inner)

    monkeypatch.setattr("rayrec.storage.folders.with_retries", with_retries)
    monkeypatch.setattr("rayrec.storage.files.with_retries", with_retries)
    expected = ["s3://bucket/log/day_9?region=x", "s3://bucket/log/day_10?region=x"]
    assert found_in("s3://bucket/log?region=x") == expected
    assert found_in("s3://bucket/log?region=x", names=["day_9"]) == expected[:1]
    assert sorted(file.path for file in storage.files_in("s3://bucket/log?region=x")) == sorted(
        expected
    )


def test_same_store_requires_same_bucket_and_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://a:1")
    other = "?endpoint_override=b:1&scheme=http"
    assert files.same_store("s3://one/x", "s3://one/y")
    assert not files.same_store("s3://one/x", "s3://two/y")
    assert files.same_store("s3://one/x", "s3://one/y?endpoint_override=a:1&scheme=http")
    assert not files.same_store("s3://one/x", f"s3://one/y{other}")
    assert not files.same_store(f"s3://one/x{other}", "s3://one/y")
    assert not files.same_store("/one/x", "s3://one/x")


def test_glob_matches_same_files_locally_and_at_url(tmp_path: Path) -> None:
    for glob, expected in (
        ("day_old", ["day_old/day_9"]),
        ("day_*", ["day_1", "day_2"]),
        ("day_*/day_*", ["day_old/day_9"]),
        ("**/day_?", ["day_1", "day_2", "day_old/day_9", "deep/er/day_3"]),
        ("deep/**", ["deep/a.txt", "deep/er/day_3"]),
        ("*/*.t?t", ["deep/a.txt"]),
        ("day_[!2]", ["day_1"]),
        ("[dx]*/er/day_[0-9]", ["deep/er/day_3"]),
    ):
        for name in (
            "day_1",
            "day_2",
            "day_old/day_9",
            "deep/er/day_3",
            "deep/a.txt",
            ".hidden/day_4",
        ):
            (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
            (tmp_path / name).write_bytes(b"x")
        for prefix in ("", "file://"):
            assert found_in(f"{prefix}{tmp_path}", glob) == [
                f"{prefix}{tmp_path}/{name}" for name in expected
            ]


# -- Temporary folders of killed processes
OWNER = """
import sys
from rayrec.storage.files import Scratch
print(Scratch("attempt", parent=sys.argv[1]).path, flush=True)
sys.stdin.read()
"""


def sweep(folder: Path) -> list[str]:
    """Clean up like a new process, and return the remaining folders."""
    files._remove_abandoned.cache_clear()
    with Scratch("later", parent=str(folder)) as own:
        return [str(path) for path in folder.iterdir() if str(path) != own]


def test_folders_of_killed_process_are_removed(tmp_path: Path) -> None:
    others = [
        tmp_path / name
        for name in ("rayrec-attempt-1fwd5mbt", "rayrec-00000000-attempt-of_another_machine")
    ]
    for other in others:
        other.mkdir()
    kept = sorted(map(str, others))
    command = [sys.executable, "-c", OWNER, str(tmp_path)]
    owner = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    folder = owner.stdout.readline().strip()
    (Path(folder) / "file").touch()
    assert sorted(sweep(tmp_path)) == sorted([*kept, folder]), "a live process's stays"
    owner.kill()
    owner.communicate()
    assert sorted(sweep(tmp_path)) == kept


def test_abandoned_folder_is_replaced_and_all_use_scratch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = tempfile.mkdtemp
    made = []

    def mkdtemp(prefix: str, dir: str) -> str:
        made.append(make(prefix=prefix, dir=dir))
        if len(made) == 1:
            Path(made[0]).rmdir()
        return made[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", mkdtemp)
    with Scratch("attempt", parent=str(tmp_path)) as folder:
        assert [str(path) for path in tmp_path.iterdir()] == [folder] == made[1:]
    assert not list(tmp_path.iterdir())
    source = Path(rayrec.__file__).parent
    own = [
        path
        for path in source.rglob("*.py")
        if re.search(r"TemporaryDirectory|mkdtemp", path.read_text())
    ]
    assert own == [source / "storage" / "files.py"]


@pytest.fixture
def homeless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set up a user without a home directory, in an empty working directory, which is returned."""
    for name in ("HOME", "RAYREC_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", raising(KeyError("uid not found")))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("path", ["~", "~/log.csv", ".cache"])
def test_missing_home_directory_is_rejected(homeless: Path, path: str) -> None:
    call = cache.folder if path == ".cache" else partial(storage.absolute, path)
    rejects(
        r"^HOME: not set, and the system has no home directory for user \d+\. Set HOME to a folder",
        call,
    )
    storage.write_bytes("here/~", b"x")
    rejects("HOME: not set", storage.write_bytes, "~/here", b"x")
    assert storage.absolute("~unknown/x") == f"{homeless}/~unknown/x"
    assert [file.name for file in homeless.iterdir()] == ["here"]


def test_home_directory_matches_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", f"{tmp_path}/")
    monkeypatch.delenv("RAYREC_CACHE", raising=False)
    assert (storage.absolute("~"), storage.absolute("~/a/../b")) == (str(tmp_path), f"{tmp_path}/b")
    assert cache.folder() == f"{tmp_path}/.cache/rayrec"
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", lambda user: SimpleNamespace(pw_dir="/home/ada"))
    assert storage.absolute("~/a") == "/home/ada/a"


def test_cache_folder_is_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("RAYREC_CACHE", raising=False)
    run = str(tmp_path / "run")
    home = f"{tmp_path}/.cache/rayrec"
    assert cache.folder(run) == home
    (tmp_path / "run").mkdir()
    assert (cache.folder(run), cache.folder(f"file://{run}")) == (run, f"file://{run}")
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
    assert cache.folder(run) == home
    monkeypatch.setenv("RAYREC_CACHE", "/other")
    assert cache.folder(run) == "/other"


@pytest.mark.usefixtures("homeless")
def test_ray_without_home_directory_is_rejected() -> None:
    config = recipes.clicks()
    assert isinstance(choose_launcher(config), ProcessLauncher)
    two = config.replace(scaling={"num_workers": 2})
    rejects("HOME: not set, and the system has no home directory", choose_launcher, two)


@pytest.mark.parametrize("name", ["home", "home/work", "", "link"])
@pytest.mark.parametrize("prefix", ["", "file://"])
def test_remove_folder_rejects_home_and_parents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefix: str, name: str
) -> None:
    (tmp_path / "home" / "work").mkdir(parents=True)
    (tmp_path / "home" / "work" / "thesis.txt").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "home")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "home" / "work")
    rejects("not removed, because", storage.remove_folder, f"{prefix}{tmp_path}/{name}")
    assert (tmp_path / "home" / "work" / "thesis.txt").exists()


def test_remove_folder_rejects_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The working directory stays even under a name of rayrec."""
    (tmp_path / "step_1").mkdir()
    monkeypatch.chdir(tmp_path / "step_1")
    rejects(
        "not removed, because it is or contains", storage.remove_folder, str(tmp_path / "step_1")
    )


@pytest.mark.parametrize("prefix", ["", "file://"])
@pytest.mark.parametrize("name", ["step", "step_1a", "data/train", "0123456789abcdefg", "models"])
def test_remove_folder_rejects_foreign_folders(tmp_path: Path, prefix: str, name: str) -> None:
    (tmp_path / name).mkdir(parents=True)
    (tmp_path / name / "thesis.txt").write_text("x")
    pattern = (
        rf"{name}: not removed, because rayrec did not write it: it contains thesis\.txt\. Remove "
        r"it yourself"
    )
    rejects(pattern, storage.remove_folder, f"{prefix}{tmp_path}/{name}")
    assert (tmp_path / name / "thesis.txt").exists()


@pytest.mark.parametrize("prefix", ["", "file://"])
@pytest.mark.parametrize(
    ("name", "file"),
    [
        pytest.param("out.partial", "a", id="unfinished"),
        pytest.param("step_00000010", "a", id="checkpoint"),
        pytest.param("checkpoint-10", "a", id="huggingface"),
        pytest.param("0123456789abcdef", "a", id="cache"),
        pytest.param("0123456789abcdef-rows", "a", id="cache-part"),
        pytest.param("offline-run-1", "a", id="wandb"),
        pytest.param("out", "_job/lock", id="job"),
        pytest.param("out/_job/done", "a", id="in-job"),
        pytest.param("beside", "../_job/lock", id="beside-job"),
        pytest.param("preprocessor", "preprocessor.json", id="preprocessor"),
        pytest.param("preprocessor", f"tokens.npy.{'0' * 32}.partial", id="half-preprocessor"),
        pytest.param("weights", "data_00000-1a.safetensors", id="half-checkpoint"),
        pytest.param("weights", "manifest.json", id="weights"),
        pytest.param("data/train", "written.json", id="data"),
        pytest.param("data/train", "part-000000.parquet", id="half-data"),
        pytest.param("data/train", "unfinished.json", id="half-dataset"),
        pytest.param("events", "1f-000001.jsonl", id="events"),
        pytest.param("night-2026-05-01", "events.jsonl", id="run"),
        pytest.param("export", "encode.py", id="half-export"),
        pytest.param("empty", "", id="empty"),
    ],
)
def test_remove_folder_accepts_rayrec_folders(
    tmp_path: Path, prefix: str, name: str, file: str
) -> None:
    folder = tmp_path / name
    folder.mkdir(parents=True)
    if file:
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_text("x")
        (folder / "other").write_text("x")
    storage.remove_folder(f"{prefix}{folder}")
    assert not folder.exists()
    assert folder.parent.exists()


@pytest.mark.parametrize(
    "warnings", [pytest.param(True, id="long"), pytest.param(False, id="short")]
)
def test_outage_warns_once_and_reports_recovery(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, warnings: bool
) -> None:
    clock = [0.0]
    wait_s = 3.0 if warnings else 0.5
    times = SimpleNamespace(
        monotonic=lambda: clock[0], sleep=lambda _: clock.append(clock.pop() + wait_s)
    )
    monkeypatch.setattr(retry, "time", times)
    failures = [UnavailableError("could not connect", "at AWS")] * 3

    def call() -> str:
        if failures:
            raise failures.pop()
        return "read"

    assert retry.retry("s3://bucket/key", call) == "read"
    lines = [record.getMessage() for record in caplog.records]
    if not warnings:
        assert lines == []
        return
    assert [line.partition(" for up to ")[0] for line in lines[:1]] == ["Retrying s3://bucket"]
    assert lines[1:] == ["Reached the store of s3://bucket again after 9 s"]


def test_text_of_pipe_is_read(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=("label: click\n",), daemon=True)
    writer.start()
    try:
        assert storage.read_text(str(pipe)) == "label: click\n"
    finally:
        writer.join(timeout=10)


def test_read_ahead_makes_next_item_while_one_is_used() -> None:
    made = threading.Semaphore(0)

    def items() -> Iterator[int]:
        for number in range(3):
            made.release()
            yield number

    ahead = storage.read_ahead(items(), name="test", ahead=1)
    assert next(ahead) == 0
    for _ in range(2):
        assert made.acquire(timeout=10)
    assert list(ahead) == [1, 2]


def test_read_ahead_raises_error_after_earlier_items() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise InputError("broken")

    ahead = storage.read_ahead(items(), name="test", ahead=1)
    assert next(ahead) == 1
    rejects("broken", next, ahead)
