"""Logs and prepared data in an S3-compatible store, served on loopback."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pyarrow import fs

import rayrec
from rayrec.config import InputError
from rayrec.observe.console import Console

pytestmark = [pytest.mark.ray, pytest.mark.extended]

SWIFT = "swift==2.38.3"
QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def swift_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter that has Swift; RAYREC_TEST_CACHE keeps its environment for the next run too."""
    folder = Path(os.environ.get("RAYREC_TEST_CACHE") or tmp_path_factory.mktemp("cache")) / "swift"
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", SWIFT], check=True, stdin=subprocess.DEVNULL)
        (folder / "complete").touch()
    return str(python)


def free_port() -> int:
    """The first of four free ports in a row."""
    for port in range(21_000, 30_000, 7):
        sockets = [socket.socket() for _ in range(4)]
        try:
            for offset, one in enumerate(sockets):
                one.bind(("127.0.0.1", port + offset))
            return port
        except OSError:
            continue
        finally:
            for one in sockets:
                one.close()
    raise AssertionError("no free ports")


@pytest.fixture(scope="module")
def bucket(swift_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of an empty bucket, reachable by the standard environment variables alone."""
    port = free_port()
    script = Path(__file__).parents[1] / "s3_server.py"
    folder = tmp_path_factory.mktemp("s3")
    server = subprocess.Popen(
        [swift_python, str(script), str(folder), str(port), "tester", "secret-word"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("AWS_ACCESS_KEY_ID", "acct:tester")
            patch.setenv("AWS_SECRET_ACCESS_KEY", "secret-word")
            patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
            patch.setenv("AWS_REGION", "us-east-1")
            patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
            filesystem, _ = fs.FileSystem.from_uri("s3://logs?allow_bucket_creation=true")
            filesystem.create_dir("logs")
            yield "s3://logs"
    finally:
        server.kill()
        server.wait()


@pytest.fixture(scope="module")
def ray_here(bucket: str, start_ray: Callable[[], None]) -> Iterator[None]:
    """A Ray of its own, since workers must be started with the store's variables; the shared one, if any, comes back."""
    import ray

    shared = ray.is_initialized()
    ray.shutdown()
    start_ray()
    yield
    ray.shutdown()
    if shared:
        start_ray()


@pytest.mark.usefixtures("ray_here")
def test_a_log_in_s3_gives_what_it_gives_here(
    bucket: str, click_log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYREC_CACHE", str(tmp_path / "cache"))
    fs.copy_files(str(click_log / "train.txt"), f"{bucket}/kaggle/train.txt")
    here = rayrec.vocabulary(str(click_log / "train.txt"), out=str(tmp_path / "here"), split="sevenths", console=QUIET)
    for number, path in enumerate(("kaggle/train.txt", "kaggle", "kag*/train*")):
        there = rayrec.vocabulary(f"{bucket}/{path}", out=str(tmp_path / str(number)), split="sevenths", console=QUIET)
        assert there["hash"] == here["hash"]
    made = rayrec.preprocess(
        f"{bucket}/kaggle/train.txt",
        out=f"{bucket}/ready",
        format="parquet",
        preprocessor=str(tmp_path / "here"),
        split="sevenths",
        console=QUIET,
    )
    assert made["rows"] == 20_000
    config = rayrec.recipes.criteo_demo(f"{bucket}/ready").replace(
        steps=4, evaluate_every=4, batch_size=256, storage_path=str(tmp_path / "runs"), scaling={"num_workers": 1}
    )
    from_s3 = rayrec.train(config.replace(name="s3"), console=QUIET).summary
    local = config.replace(name="local", train_data={"path": str(click_log / "train.txt")})
    assert from_s3["weights_sha256"] == rayrec.train(local, console=QUIET).summary["weights_sha256"]


@pytest.mark.usefixtures("ray_here")
def test_what_is_wrong_in_s3_is_one_line(
    bucket: str, click_log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYREC_CACHE", str(tmp_path / "cache"))
    for path in (f"{bucket}/nothing/here", "s3://no-such-bucket/train.txt"):
        with pytest.raises(InputError, match=r"^s3://[^\n]*$"):
            rayrec.vocabulary(path, out=str(tmp_path / "out"), console=QUIET)
    fs.copy_files(str(click_log / "train.txt"), f"{bucket}/some.txt")
    with pytest.raises(InputError, match=r"^[^\n]*parquet[^\n]*$"):
        rayrec.preprocess(f"{bucket}/some.txt", out=f"{bucket}/npy", format="npy", console=QUIET)
