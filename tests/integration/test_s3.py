"""Logs, prepared data, checkpoints and what is made of them in an S3-compatible store, served on loopback."""

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from builders.click_models import save_clicks
from builders.faults import rejects
from builders.runs import QUIET, check_same_run, export, short_run, train
from hosts.processes import FREQUENT_CHECKS, Session, environment_for
from pyarrow import fs

import rayrec
from rayrec import cli, storage
from rayrec.data.job import COMPLETE
from rayrec.data.logs.text_parser import parse
from rayrec.data.text.mds import load_streaming
from rayrec.data.text.tokenizer import bytes_bpe, write_tokenizer
from rayrec.inference.model import open_served
from rayrec.metrics.binary import auroc

pytestmark = [pytest.mark.extended, pytest.mark.usefixtures("own_cache")]


def test_s3_log_matches_local_log(bucket: str, click_log: Path, tmp_path: Path) -> None:
    fs.copy_files(str(click_log / "train.txt"), f"{bucket}/kaggle/train.txt")
    here = rayrec.vocabulary(str(click_log / "train.txt"), out=str(tmp_path / "here"), split="sevenths", console=QUIET)
    for number, path in enumerate(("kaggle/train.txt", "kaggle", "kag*/train*")):
        there = rayrec.vocabulary(f"{bucket}/{path}", out=str(tmp_path / str(number)), split="sevenths", console=QUIET)
        assert there["hash"] == here["hash"]
    options: dict[str, Any] = {"format": "parquet", "preprocessor": str(tmp_path / "here"), "split": "sevenths"}
    made = rayrec.preprocess(f"{bucket}/kaggle/train.txt", out=f"{bucket}/ready", **options, console=QUIET)
    assert made["rows"] == 20_000
    config = short_run(rayrec.recipes.criteo_demo(f"{bucket}/ready"), tmp_path / "runs", 4, batch_size=256)
    local = train(config, name="local", train_data={"path": str(click_log / "train.txt")})
    check_same_run(train(config, name="s3").summary, local.summary)


def test_s3_checkpoint_is_usable(bucket: str, click_log: Path, tmp_path: Path) -> None:
    """Evaluated, predicted with and exported, all that is written in the bucket too; and each gives the same scores."""
    log, run, exported = f"{bucket}/used/train.txt", f"{bucket}/used/run", f"{bucket}/used/exported"
    storage.copy_file(str(click_log / "train.txt"), log)
    storage.copy_files(str(save_clicks(tmp_path / "run", scale=3.0, train_data={"path": log}).run), run)

    assert export(run, exported, parity_rows=500)["parity"]["origin"] == f"test rows of {log}"
    checkpoint, served = open_served(run), open_served(exported)
    assert (checkpoint.kind, served.kind) == ("checkpoint", "export")
    lines = (click_log / "train.txt").read_bytes().splitlines(keepends=True)[:100]
    rows = checkpoint.preprocessor.encode(parse(checkpoint.preprocessor.schema, b"".join(lines))[0])
    logits = checkpoint.score(rows)
    np.testing.assert_allclose(served.score(rows), logits, atol=1e-5)

    out = f"{bucket}/used/predicted"
    assert rayrec.predict(run, log, out=out, console=QUIET)["rows"] == 20_000
    assert (storage.list_folder(out), storage.list_folder(f"{out}.partial")) == ([COMPLETE, "part-00000.parquet"], [])
    filesystem, inner = storage.resolve(f"{out}/part-00000.parquet")
    predicted = pq.read_table(inner, filesystem=filesystem)
    assert predicted.column("row").to_pylist() == list(range(20_000))
    np.testing.assert_allclose(predicted.column("logit").to_numpy()[:100], logits, atol=1e-5)

    evaluated = rayrec.evaluate(run, log, console=QUIET)
    assert evaluated["rows"] == 20_000
    expected = auroc(predicted.column("logit").to_numpy(), predicted.column("label").to_numpy())
    assert evaluated["auroc"] == pytest.approx(expected, abs=1e-4)  # a batch of another size rounds otherwise


def test_s3_shards_train_after_command_in_error(bucket: str, tmp_path: Path) -> None:
    """Shards of MosaicML's writer: the command that `train` prints, as it is printed, then training there and by --out."""
    tokenizer, url = tmp_path / "tokenizer", f"{bucket}/indexed"
    write_tokenizer(bytes_bpe(["the cat and the hat"] * 4, 260), str(tokenizer))
    with load_streaming().MDSWriter(out=str(tmp_path / "set"), columns={"tokens": "ndarray:uint16"}, size_limit=1000) as writer:
        for row in np.random.default_rng(0).integers(0, 260, (96, 16)).astype(np.uint16):
            writer.write({"tokens": row})
    storage.copy_files(str(tmp_path / "set"), f"{url}/train")
    storage.copy_files(str(tmp_path / "set"), f"{url}/val")
    config = short_run(rayrec.recipes.gpt2_tiny(url), tmp_path / "runs", 4, batch_size=8)
    config = config.replace(workload={"model": {"n_layer": 1, "n_positions": 16}, "max_new_tokens": 2})
    line = rejects(r"`rayrec adopt [^`]*`", train, config, name="hinted")
    command = shlex.split(line.split("`")[1].replace("DIR", str(tokenizer)))[1:]
    assert cli.run([*command, "--out", f"{bucket}/adopted", "-q"]) == 0
    before = storage.list_folder(url)
    assert cli.run([*command, "-q"]) == 0
    assert (before, storage.list_folder(url)) == (["train", "val"], ["manifest.json", "tokenizer", "train", "val"])
    paths = {"in-place": url, "by-url": f"{bucket}/adopted"}
    summaries = [train(config, name=name, train_data={"path": path}).summary for name, path in paths.items()]
    check_same_run(*summaries, "metrics")


@pytest.mark.ray
@pytest.mark.slow
def test_trainer_script_survives_kills_on_s3(bucket: str, tmp_path: Path) -> None:
    """The script of from-huggingface.md with two workers: one is killed, then the driver, whose script starts again at once."""
    page = (Path(__file__).parents[2] / "docs" / "from-huggingface.md").read_text()
    block = re.search(r"```diff\n(.*?)```", page, re.DOTALL)
    assert block is not None
    script = [line[1:] for line in block[1].splitlines() if not line.startswith("-")]
    assert len(script) <= 30
    environment = environment_for(tmp_path, **FREQUENT_CHECKS, RAY_ADDRESS="local", HOME=str(tmp_path), OMP_NUM_THREADS="1")

    def start(url: str, name: str) -> Session:
        (tmp_path / name).mkdir()
        (tmp_path / name / "script.py").write_text("\n".join(script).replace("s3://bucket/runs/gpt2", url))
        command = ["env", "-C", str(tmp_path / name), sys.executable, "script.py"]
        return Session(command, environment=environment, output=tmp_path / name / "output")

    def complete(url: str) -> list[int]:
        steps = [int(name.split("-")[1]) for name in storage.list_folder(url) if name.startswith("checkpoint-")]
        return sorted(step for step in steps if storage.exists(f"{url}/checkpoint-{step}/manifest.json"))

    def files(url: str) -> dict[str, Any]:
        assert complete(url) == [240, 256]
        return storage.read_json(f"{url}/checkpoint-256/manifest.json")["files"]

    undisturbed, killed = f"{bucket}/trainer/undisturbed", f"{bucket}/trainer/killed"
    with start(undisturbed, "undisturbed") as session:
        assert session.wait().status == 0, session.err
    with start(killed, "killed") as session:
        session.until(lambda: complete(killed)[-1:] >= [48], pause_s=0.1)
        session.kill("train worker")
        session.until(lambda: complete(killed)[-1:] >= [128], pause_s=0.1)
        session.process.kill()
        assert complete(killed)[-1] < 256
        with start(killed, "again") as again:
            assert again.wait().status == 0, again.err
    assert len(storage.list_folder(f"{killed}/claims")) >= 3  # attempts
    assert {"rng_state_0.pth", "rng_state_1.pth", "optimizer.pt"} <= files(killed).keys()
    assert files(killed)["model.safetensors"] == files(undisturbed)["model.safetensors"]


def test_s3_faults_are_one_line(bucket: str, click_log: Path, tmp_path: Path) -> None:
    for path in (f"{bucket}/nothing/here", "s3://no-such-bucket/train.txt"):
        rejects(r"^s3://[^\n]*$", rayrec.vocabulary, path, out=str(tmp_path / "out"), console=QUIET)
    fs.copy_files(str(click_log / "train.txt"), f"{bucket}/some.txt")
    rejects(r"^[^\n]*parquet[^\n]*$", rayrec.preprocess, f"{bucket}/some.txt", out=f"{bucket}/npy", format="npy", console=QUIET)
