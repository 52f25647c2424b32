"""What is said if Spark does not start, without Spark."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from rayrec.compat import ray_compat
from rayrec.config import InputError
from rayrec.ingest import spark_engine
from rayrec.ingest.spark_engine import SparkConfig


@pytest.fixture
def child() -> Iterator[subprocess.Popen[str]]:
    """Stands for a driver that waits for an executor."""
    process = subprocess.Popen(["sleep", "600"], text=True)
    yield process
    process.kill()
    process.wait()


@pytest.mark.parametrize(
    ("log", "said"),
    [
        ("raylet.err", r"FileNotFoundError: '-Dray\.address=1'"),
        ("raydp-java-worker-01000000-7.log", r"FileNotFoundError: '-Dray\.address=1'"),
        ("raylet.out", "are there CPUs and memory for its executors"),
    ],
)
def test_spark_that_does_not_start_names_rays_error(
    child: subprocess.Popen[str], log: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_compat, "local_node", lambda: SimpleNamespace(get_logs_dir_path=lambda: str(tmp_path)))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # where its log is kept
    (tmp_path / "raylet.err").write_text("OldError: of another job\n")
    engine = spark_engine.SparkEngine(child, str(tmp_path), 0.01, spark_engine._ray_logs())
    with open(tmp_path / log, "a") as file:
        file.write("Traceback\nFileNotFoundError: '-Dray.address=1'\n")
    with pytest.raises(InputError, match=f"^Spark did not start in 0.01 s [^\n]*{said}[^\n]*its log is ") as found:
        engine._await_start()
    assert "OldError" not in str(found.value)


def test_spark_on_ray_needs_java_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray starts `java` by its name, so JAVA_HOME does not do."""
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setenv("JAVA_HOME", "/usr/lib/jvm/java-17")
    with (
        pytest.raises(InputError, match=r"^engine spark-on-ray: needs Java 17, got no java on PATH"),
        spark_engine.SparkEngine.started(SparkConfig(), ray_address="127.0.0.1:6379", cache_folder="", note=print),
    ):
        pass
