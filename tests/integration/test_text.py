"""Text prepared through Ray: the bytes of one process alone, on any worker and after any kill."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import ray
from builders.engines import LoopEngine
from builders.faults import rejects
from builders.runs import QUIET, files_in
from hosts.cloud_stores import S3Store, outage
from hosts.processes import RAYREC, Session, environment_for

import rayrec
from rayrec import storage
from rayrec.data.text.mds import TokenRows
from rayrec.data.text.text_blocks import open_tokens
from rayrec.data.text.tokenizer import bytes_bpe, load_tokenizer, write_tokenizer
from rayrec.prepare import text as preparing

pytestmark = [pytest.mark.ray, pytest.mark.slow]

OPTIONS = {
    "vocabulary_size": 400,
    "block_size": 32,
    "part_bytes": 4096,
    "shard_bytes": 2000,
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(0)
    words = [
        "".join(chr(97 + letter) for letter in rng.integers(0, 26, rng.integers(2, 9)))
        for _ in range(300)
    ]
    chosen = rng.zipf(1.3, 50_000) % len(words)
    file = tmp_path_factory.mktemp("text") / "words.txt"
    file.write_text(
        "\n".join(" ".join(words[word] for word in line) for line in np.array_split(chosen, 5_000))
        + "\n"
    )
    return file


def here() -> Any:
    return mock.patch.object(preparing, "engine", return_value=nullcontext(LoopEngine()))


def prepared(text: str | Path, out: str | Path, **options: Any) -> dict[str, Any]:
    return rayrec.preprocess(
        str(text), out=str(out), format="mds", console=QUIET, **(options or OPTIONS)
    )


@pytest.fixture(scope="module")
def alone(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("alone") / "out"
    with here():
        prepared(text, out)
    return out


@pytest.mark.usefixtures("local_ray")
def test_task_error_is_one_line(text: Path, tmp_path: Path) -> None:
    content = text.read_bytes()
    (tmp_path / "bad.txt").write_bytes(content[:100_000] + b"\xfe" + content[100_000:])
    write_tokenizer(bytes_bpe([text.read_text()], 300), str(tmp_path / "tokenizer"))
    bad = tmp_path / "bad.txt"
    out = tmp_path / "out"
    rejects(
        r"bad\.txt: byte 100,000 is not UTF-8",
        prepared,
        bad,
        out,
        tokenizer=str(tmp_path / "tokenizer"),
    )
    assert not out.exists()


@pytest.mark.exhaustive
@pytest.mark.usefixtures("local_ray")
def test_killed_job_resumes_to_same_bytes(text: Path, alone: Path, tmp_path: Path) -> None:
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]
    command = [
        *RAYREC,
        "preprocess",
        str(text),
        "--out",
        str(tmp_path / "out"),
        "--format",
        "mds",
        "--address",
        ray.get_runtime_context().gcs_address,
        *flags,
    ]
    partial = tmp_path / "out.partial"
    # killed while tokenising, then while writing shards
    for number, name in enumerate(("tokenize-*", "write-*")):
        with Session(
            command, environment=environment_for(tmp_path / "cache"), output=tmp_path / str(number)
        ) as run:
            run.until(
                lambda name=name: len(list(partial.glob(f"_job/done/{name}.json"))) >= 2,
                timeout_s=300,
            )
        assert run.process.returncode == -9
        assert not (tmp_path / "out").exists()
    with Session(
        command, environment=environment_for(tmp_path / "cache"), output=tmp_path / "last"
    ) as run:
        assert run.wait(timeout_s=300).status == 0, run.err
        assert (
            json.loads(run.out)["hash"] == json.loads((alone / "manifest.json").read_text())["hash"]
        )
        assert "Resuming" in run.err
    assert files_in(tmp_path / "out") == files_in(alone)


@pytest.mark.exhaustive
def test_text_in_s3_is_prepared_and_read(
    bucket: str, s3_server: S3Store, text: Path, alone: Path, tmp_path: Path
) -> None:
    storage.copy_file(str(text), f"{bucket}/text/words.txt")
    with here():
        made = prepared(f"{bucket}/text", f"{bucket}/tokens")
        rejects("^s3://.*exists already", prepared, f"{bucket}/text", f"{bucket}/tokens")
    folder = open_tokens(f"{bucket}/tokens")
    assert folder.hash == made["hash"] == open_tokens(str(alone)).hash
    assert set(storage.list_folder(folder.set_path("train"))) == {
        file.name for file in (alone / "train").iterdir()
    }
    assert load_tokenizer(folder.tokenizer).hash == folder.tokenizer_hash
    rows = TokenRows(folder.set_path("train"), cache_folder=str(tmp_path))
    local = TokenRows(str(alone / "train"))
    order = np.random.default_rng(0).permutation(len(rows))
    with outage(s3_server, 3):
        np.testing.assert_array_equal(rows.read(order)["tokens"], local.read(order)["tokens"])
    rows.close()
