"""Logs and prepared data in an S3-compatible store, served on loopback."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pyarrow import fs

import rayrec
from rayrec.config import InputError
from rayrec.observe.console import Console

pytestmark = [pytest.mark.ray, pytest.mark.extended]

QUIET = Console(quiet=True)


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
