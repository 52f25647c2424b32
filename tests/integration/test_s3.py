"""Paths in an S3-compatible store behave as local ones do, through its outages, and say in a line
what is wrong.
"""

import os
import re
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from builders import run_events
from builders.click_models import save_clicks
from builders.faults import at_first, fails_with, rejects, until, watched
from builders.runs import QUIET, check_same_run, export, short_run, train
from builders.savers import Run, save
from hosts.cloud_stores import S3Store, outage
from hosts.processes import FREQUENT_CHECKS, Session, environment_for, run_command
from pyarrow import fs

import rayrec
from rayrec import checkpoint, cli, recipes, storage
from rayrec.checkpoint import DamagedError, Retention, latest_valid_checkpoint, save_retry
from rayrec.config import InputError
from rayrec.data.job import COMPLETE
from rayrec.data.logs.text_parser import parse
from rayrec.data.text.mds import load_streaming
from rayrec.data.text.tokenizer import bytes_bpe, write_tokenizer
from rayrec.inference.model import open_served
from rayrec.metrics.binary import auroc
from rayrec.observe.events import EventWriter, follow, merge_events, metrics_dataframe, read_events
from rayrec.observe.report import run as report
from rayrec.observe.tracking.tensorboard import TensorBoardTracker
from rayrec.storage import folders
from rayrec.storage.retry import Backoff
from rayrec.training import profiling
from rayrec.training.profiling import request_profile, watched_requests

pytestmark = pytest.mark.extended

MIB = 1 << 20


@pytest.fixture
def folder(bucket: str, request: pytest.FixtureRequest) -> str:
    return f"{bucket}/{request.node.name}"


def _took(call: Callable[[], object], error: type[Exception], match: str) -> float:
    start = time.monotonic()
    assert not re.search("\n|secret-word|wrong-word", fails_with(error, match, call))
    return time.monotonic() - start


# -- Streams and folders; files as locally are in test_cloud_stores.py
FAILS = """
import sys
from rayrec import storage

def pieces():
    for _ in range(int(sys.argv[2])):
        yield bytes(1 << 20)
    raise RuntimeError("the producer's own")

storage.write_stream(sys.argv[1], pieces())
"""


@pytest.mark.parametrize("size_mib", [1, 50])
def test_failed_stream_keeps_existing_file(folder: str, size_mib: int) -> None:
    path = f"{folder}/file"
    storage.write_bytes(path, b"old")
    run = run_command(sys.executable, "-c", FAILS, path, size_mib, status=1)
    assert run.stderr.endswith("RuntimeError: the producer's own\n")  # and nothing of pyarrow's
    assert (storage.read_bytes(path), storage.list_folder(folder)) == (b"old", ["file"])


@pytest.mark.exhaustive
def test_failed_folder_is_removed(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with storage.writing_folder(folder) as local:
        Path(local, "part").write_bytes(b"1")
        Path(local, "manifest.json").write_bytes(b"{}")
    assert storage.list_folder(folder) == ["manifest.json", "part"]
    with pytest.raises(InputError, match="exists already"), storage.writing_folder(folder):
        pass

    monkeypatch.setattr(
        folders, "copy_file", at_first([OSError("out")], folders.copy_file, end="manifest.json")
    )
    copied = watched(monkeypatch, folders, "copy_file")
    other = f"{folder}2"
    with pytest.raises(OSError, match="out"), storage.writing_folder(other) as local:  # noqa: PT012
        Path(local, "manifest.json").write_bytes(b"{}")
        Path(local, "part").write_bytes(b"1")
    assert [target for _, target, _ in copied] == [f"{other}/part"]
    assert not storage.exists(other)


@pytest.mark.exhaustive
def test_forked_process_reports_used_store(folder: str) -> None:
    storage.write_bytes(f"{folder}/a", b"1")
    child = os.fork()
    if not child:
        try:
            rejects("forked from one that has used a store", storage.read_bytes, f"{folder}/a")
            os._exit(0)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0


# -- Outages
def _operations(folder: str) -> list[tuple[Callable[[], Any], Any]]:
    """Calls and what each returns if the file a is there."""
    return [
        (lambda: storage.read_bytes(f"{folder}/a"), b"abc"),
        (lambda: storage.read_into(f"{folder}/a", 1, np.zeros(2, np.uint8)), 2),
        (lambda: b"".join(storage.read_stream(f"{folder}/a")), b"abc"),
        (lambda: storage.exists(f"{folder}/a"), True),
        (lambda: storage.list_folder(folder)[:1], ["a"]),
        (lambda: storage.list_files(folder)[0].size_bytes, 3),
        (lambda: storage.write_bytes(f"{folder}/new", b"xyz"), None),
        (
            lambda: storage.write_stream(f"{folder}/large", (bytes(MIB) for _ in range(20))),
            20 * MIB,
        ),
    ]


def test_operations_survive_outage(folder: str, s3_server: Any) -> None:
    storage.write_bytes(f"{folder}/a", b"abc")
    calls, expected = zip(
        *_operations(folder), (lambda: storage.remove_folder(f"{folder}/none"), None), strict=True
    )
    with outage(s3_server, 3.0), ThreadPoolExecutor(len(calls)) as pool:
        assert list(pool.map(lambda call: call(), calls)) == list(expected)
    assert storage.read_bytes(f"{folder}/new") == b"xyz"
    assert storage.size_of(f"{folder}/large") == 20 * MIB


@pytest.mark.exhaustive
def test_stream_survives_outage(folder: str, s3_server: Any) -> None:
    def pieces(outages: ExitStack) -> Iterator[bytes]:
        for number in range(60):
            if number == 30:
                outages.enter_context(outage(s3_server, 3.0))
            yield bytes([number]) * MIB

    with ExitStack() as outages:
        assert storage.write_stream(f"{folder}/large", pieces(outages)) == 60 * MIB
    seen = np.zeros(0, np.uint8)
    with ExitStack() as outages:
        for number, piece in enumerate(storage.read_stream(f"{folder}/large")):
            if number == 2:
                outages.enter_context(outage(s3_server, 2.0))
            seen = np.concatenate([seen, np.frombuffer(piece, np.uint8)[::MIB]])
    assert seen.tolist() == list(range(60))


@pytest.mark.exhaustive
def test_hanging_server_is_detected(folder: str, s3_server: Any) -> None:
    storage.write_bytes(f"{folder}/here", b"abc")
    s3_server.send_signal(signal.SIGSTOP)
    try:
        with storage.retry_timeout(0):
            match = r"the store was unavailable for \d+ s \(timeout was reached\)"
            took = _took(lambda: storage.read_bytes(f"{folder}/here"), OSError, match)
    finally:
        s3_server.send_signal(signal.SIGCONT)
    assert took < 40
    assert storage.read_bytes(f"{folder}/here") == b"abc"


# -- What is wrong
def test_wrong_secret_is_reported_at_once(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-word")
    for operation, _ in _operations(folder):
        assert (
            _took(
                operation,
                InputError,
                r"^s3://logs: access denied .*set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
            )
            < 30
        )


@pytest.mark.exhaustive
def test_profile_provides_endpoint_region_and_credentials(
    folder: str, s3_server: Any, monkeypatch: Any, tmp_path: Path
) -> None:
    storage.write_bytes(f"{folder}/a", b"1")
    for name in s3_server.environment:
        monkeypatch.delenv(name)
    url = s3_server.environment["AWS_ENDPOINT_URL"]
    (tmp_path / "config").write_text(f"[profile mine]\nregion = us-east-1\nendpoint_url = {url}\n")
    (tmp_path / "credentials").write_text(
        "[mine]\naws_access_key_id = tester\naws_secret_access_key = secret-word\n"
    )
    files = {
        "AWS_CONFIG_FILE": f"{tmp_path}/config",
        "AWS_SHARED_CREDENTIALS_FILE": f"{tmp_path}/credentials",
    }
    for name, value in {**files, "AWS_PROFILE": "mine"}.items():
        monkeypatch.setenv(name, value)
    assert storage.read_bytes(f"{folder}/a") == b"1"


# -- Events
def test_events_survive_outage_and_are_followed(folder: str, s3_server: Any) -> None:
    url = f"{folder}/events.jsonl"
    stop = threading.Event()
    seen = []
    thread = threading.Thread(target=lambda: seen.extend(follow(url, stop=stop, poll_s=0.2)))
    thread.start()
    with EventWriter(url) as writer:
        writer.write("start", step=0)
        assert writer.flush()
        with outage(s3_server, 3.0):
            start = time.monotonic()
            for step in range(1, 20):
                writer.write("step" if step % 2 else "evaluate", step=step)
            assert time.monotonic() - start < 2.5
        assert writer.flush()
    assert (writer.num_lost, [event["step"] for event in read_events(url)]) == (0, list(range(20)))
    merge_events(url)
    assert storage.list_folder(folder) == ["events.jsonl"]
    with EventWriter(url) as writer:
        writer.write("step", step=20)
    assert [event["step"] for event in read_events(url)] == list(range(21))
    stop.set()
    thread.join(timeout=60)
    assert [event["step"] for event in seen] == list(range(21))


@pytest.mark.exhaustive
def test_running_run_is_reported_locally_and_remotely(folder: str, tmp_path: Path) -> None:
    storage.write_bytes(f"{folder}/config.yaml", run_events.CONFIG.encode())
    with EventWriter(f"{folder}/events.jsonl") as writer:
        for event in run_events.run(finished=False):
            writer.write(
                event["kind"],
                **{name: value for name, value in event.items() if name not in ("time", "kind")},
            )
        assert writer.flush()
        assert report.write(folder) == f"{folder}/report.html"
    assert b"not finished at step 150 of 200" in storage.read_bytes(f"{folder}/report.html")
    here = tmp_path / "report.html"
    assert report.write(folder, out=str(here)) == str(here)
    assert here.read_bytes() == storage.read_bytes(f"{folder}/report.html")
    assert metrics_dataframe(f"{folder}/events.jsonl")["step"].tolist() == list(range(10, 151, 10))


# -- Trackers and profiles
@pytest.mark.exhaustive
def test_curves_survive_store_outage(folder: str, s3_server: Any) -> None:
    events = [event for event in run_events.run() if event["kind"] != "finish"]
    run_events.feed(
        TensorBoardTracker(folder, config="seed: 0\n"), events[:20], flush=False, close=True
    )
    (before,) = storage.files_in(f"{folder}/tensorboard")
    second = TensorBoardTracker(folder, config="seed: 0\n")
    s3_server.kill()
    try:
        run_events.feed(second, events, flush=False)
        fails_with(OSError, "", second.flush)
    finally:
        s3_server.start()
    assert storage.files_in(f"{folder}/tensorboard") == [before]
    second.close()
    (after,) = storage.files_in(f"{folder}/tensorboard")
    assert after.path != before.path
    assert after.size_bytes > before.size_bytes


@pytest.mark.exhaustive
def test_offline_run_is_in_store(folder: str) -> None:
    pytest.importorskip("wandb")
    from rayrec.observe.tracking.wandb import WandbTracker

    config = recipes.gpt2_tiny().replace(name="run").to_dict()
    for events in (run_events.run()[:20], run_events.run(finished=False)):
        run_events.feed(
            WandbTracker(folder, project="rayrec", offline=True, config=config), events, close=True
        )
    (run,) = storage.list_folder(f"{folder}/wandb")
    assert run.startswith("offline-run-")
    assert any(name.endswith(".wandb") for name in storage.list_folder(f"{folder}/wandb/{run}"))


@pytest.mark.exhaustive
def test_profile_request_is_served(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "_URL_POLL_S", 0.2)
    monkeypatch.setattr(profiling, "_POLL_S", 0.2)
    now = time.time()
    events: list[dict[str, Any]] = [
        {"kind": "start", "time": now - 10, "step": 0, "steps": 100, "world_size": 1}
    ]
    events += [{"kind": "step", "time": now, "step": 40, "steps": 100}]

    def send(wish: dict[str, Any]) -> None:
        storage.write_bytes(f"{folder}/profile/{wish['name']}/rank_0/trace.json.gz", b"[]")

    with watched_requests(folder, SimpleNamespace(send_profile_request=send)):
        reported = request_profile(folder, events, steps=2, note=lambda text: None, timeout_s=60.0)
    assert reported["profile"].startswith(f"{folder}/profile/step_")
    assert not storage.exists(f"{folder}/profile/request.json")


# -- Logs, prepared data, checkpoints and what is made of them
@pytest.mark.usefixtures("own_cache")
def test_s3_log_matches_local_log(bucket: str, click_log: Path, tmp_path: Path) -> None:
    fs.copy_files(str(click_log / "train.txt"), f"{bucket}/kaggle/train.txt")
    here = rayrec.vocabulary(
        str(click_log / "train.txt"), out=str(tmp_path / "here"), split="sevenths", console=QUIET
    )
    for number, path in enumerate(("kaggle/train.txt", "kaggle", "kag*/train*")):
        there = rayrec.vocabulary(
            f"{bucket}/{path}", out=str(tmp_path / str(number)), split="sevenths", console=QUIET
        )
        assert there["hash"] == here["hash"]
    options: dict[str, Any] = {
        "format": "parquet",
        "preprocessor": str(tmp_path / "here"),
        "split": "sevenths",
    }
    assert (
        rayrec.preprocess(
            f"{bucket}/kaggle/train.txt", out=f"{bucket}/ready", **options, console=QUIET
        )["rows"]
        == 20_000
    )
    config = short_run(
        rayrec.recipes.criteo_demo(f"{bucket}/ready"), tmp_path / "runs", 4, batch_size=256
    )
    local = train(config, name="local", train_data={"path": str(click_log / "train.txt")})
    check_same_run(train(config, name="s3").summary, local.summary)


@pytest.mark.usefixtures("own_cache")
def test_s3_checkpoint_is_usable(bucket: str, click_log: Path, tmp_path: Path) -> None:
    """Evaluated, predicted with and exported, all that is written in the bucket too; and each gives
    the same scores.
    """
    log = f"{bucket}/used/train.txt"
    run = f"{bucket}/used/run"
    exported = f"{bucket}/used/exported"
    storage.copy_file(str(click_log / "train.txt"), log)
    storage.copy_files(
        str(save_clicks(tmp_path / "run", scale=3.0, train_data={"path": log}).run), run
    )

    assert export(run, exported, parity_rows=500)["parity"]["origin"] == f"test rows of {log}"
    checkpoint = open_served(run)
    served = open_served(exported)
    assert (checkpoint.kind, served.kind) == ("checkpoint", "export")
    lines = (click_log / "train.txt").read_bytes().splitlines(keepends=True)[:100]
    rows = checkpoint.preprocessor.encode(parse(checkpoint.preprocessor.schema, b"".join(lines))[0])
    logits = checkpoint.score(rows)
    np.testing.assert_allclose(served.score(rows), logits, atol=1e-5)

    out = f"{bucket}/used/predicted"
    assert rayrec.predict(run, log, out=out, console=QUIET)["rows"] == 20_000
    assert (storage.list_folder(out), storage.list_folder(f"{out}.partial")) == (
        [COMPLETE, "part-00000.parquet"],
        [],
    )
    filesystem, inner = storage.resolve(f"{out}/part-00000.parquet")
    predicted = pq.read_table(inner, filesystem=filesystem)
    assert predicted.column("row").to_pylist() == list(range(20_000))
    np.testing.assert_allclose(predicted.column("logit").to_numpy()[:100], logits, atol=1e-5)

    evaluated = rayrec.evaluate(run, log, console=QUIET)
    assert evaluated["rows"] == 20_000
    expected = auroc(predicted.column("logit").to_numpy(), predicted.column("label").to_numpy())
    # a batch of another size rounds otherwise
    assert evaluated["auroc"] == pytest.approx(expected, abs=1e-4)


@pytest.mark.usefixtures("own_cache")
def test_s3_shards_train_after_command_in_error(bucket: str, tmp_path: Path) -> None:
    """Shards of MosaicML's writer: the command that `train` prints, as it is printed, then training
    there and by --out.
    """
    tokenizer = tmp_path / "tokenizer"
    url = f"{bucket}/indexed"
    write_tokenizer(bytes_bpe(["the cat and the hat"] * 4, 260), str(tokenizer))
    with load_streaming().MDSWriter(
        out=str(tmp_path / "set"), columns={"tokens": "ndarray:uint16"}, size_limit=1000
    ) as writer:
        for row in np.random.default_rng(0).integers(0, 260, (96, 16)).astype(np.uint16):
            writer.write({"tokens": row})
    storage.copy_files(str(tmp_path / "set"), f"{url}/train")
    storage.copy_files(str(tmp_path / "set"), f"{url}/val")
    config = short_run(rayrec.recipes.gpt2_tiny(url), tmp_path / "runs", 4, batch_size=8)
    config = config.replace(
        workload={"model": {"n_layer": 1, "n_positions": 16}, "max_new_tokens": 2}
    )
    line = rejects(r"`rayrec adopt [^`]*`", train, config, name="hinted")
    command = shlex.split(line.split("`")[1].replace("DIR", str(tokenizer)))[1:]
    assert cli.run([*command, "--out", f"{bucket}/adopted", "-q"]) == 0
    before = storage.list_folder(url)
    assert cli.run([*command, "-q"]) == 0
    assert (before, storage.list_folder(url)) == (
        ["train", "val"],
        ["manifest.json", "tokenizer", "train", "val"],
    )
    paths = {"in-place": url, "by-url": f"{bucket}/adopted"}
    summaries = [
        train(config, name=name, train_data={"path": path}).summary for name, path in paths.items()
    ]
    check_same_run(*summaries, "metrics")


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.usefixtures("own_cache")
def test_trainer_script_survives_kills_on_s3(bucket: str, tmp_path: Path) -> None:
    """The script of from-huggingface.md with two workers: one is killed, then the driver, whose
    script starts again at once.
    """
    page = (Path(__file__).parents[2] / "docs" / "from-huggingface.md").read_text()
    block = re.search(r"```diff\n(.*?)```", page, re.DOTALL)
    assert block is not None
    script = [line[1:] for line in block[1].splitlines() if not line.startswith("-")]
    assert len(script) <= 30
    environment = environment_for(
        tmp_path, **FREQUENT_CHECKS, RAY_ADDRESS="local", HOME=str(tmp_path), OMP_NUM_THREADS="1"
    )

    def start(url: str, name: str) -> Session:
        (tmp_path / name).mkdir()
        (tmp_path / name / "script.py").write_text(
            "\n".join(script).replace("s3://bucket/runs/gpt2", url)
        )
        command = ["env", "-C", str(tmp_path / name), sys.executable, "script.py"]
        return Session(command, environment=environment, output=tmp_path / name / "output")

    def complete(url: str) -> list[int]:
        steps = [
            int(name.split("-")[1])
            for name in storage.list_folder(url)
            if name.startswith("checkpoint-")
        ]
        return sorted(
            step for step in steps if storage.exists(f"{url}/checkpoint-{step}/manifest.json")
        )

    def files(url: str) -> dict[str, Any]:
        assert complete(url) == [240, 256]
        return storage.read_json(f"{url}/checkpoint-256/manifest.json")["files"]

    undisturbed = f"{bucket}/trainer/undisturbed"
    killed = f"{bucket}/trainer/killed"
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


@pytest.mark.usefixtures("own_cache")
def test_s3_faults_are_one_line(bucket: str, click_log: Path, tmp_path: Path) -> None:
    for path in (f"{bucket}/nothing/here", "s3://no-such-bucket/train.txt"):
        rejects(r"^s3://[^\n]*$", rayrec.vocabulary, path, out=str(tmp_path / "out"), console=QUIET)
    fs.copy_files(str(click_log / "train.txt"), f"{bucket}/some.txt")
    rejects(
        r"^[^\n]*parquet[^\n]*$",
        rayrec.preprocess,
        f"{bucket}/some.txt",
        out=f"{bucket}/npy",
        format="npy",
        console=QUIET,
    )


# -- Checkpoints: streamed writes, partial reads, retention, and late saves during an outage
def values(factor: float) -> dict[str, torch.Tensor]:
    return {
        "model.large": torch.arange(6_000_000.0).reshape(-1, 16) * factor,
        "model.small": torch.ones(3) * factor,
    }


SETTINGS: dict[str, Any] = {
    "retention": Retention(num_to_keep=1),
    "extra_files": {"more/words.txt": b"abc"},
}


def test_s3_saver_saves_restores_and_removes(bucket: str) -> None:
    run = Run(f"{bucket}/one")
    assert run.newest() is None
    saver = run.saver(**SETTINGS)
    for step, score in ((1, 0.9), (2, 0.1), (3, 0.2)):
        save(saver, step, values(step), score=score)
    saver.close()
    assert run.steps() == [1, 3]
    assert not storage.exists(run.at(2).path)
    found = run.at(3)
    assert run.newest() == found
    target = values(0)
    checkpoint.restore(found, target)
    assert all(torch.equal(target[name], tensor) for name, tensor in values(3).items())
    checkpoint.verify(found)
    assert checkpoint.open_checkpoint(run.folder).step == 3
    name = next(name for name in found.manifest()["files"] if name.endswith(".safetensors"))
    data = storage.read_bytes(storage.join(found.path, name))
    storage.write_bytes(storage.join(found.path, name), data[:-1] + bytes([data[-1] ^ 1]))
    fails_with(DamagedError, name, checkpoint.restore, found, target)
    assert latest_valid_checkpoint(run.folder, log=lambda *_: None, exclude=[found.path]) == run.at(
        1
    )
    storage.remove_file(storage.join(found.path, name))
    fails_with(DamagedError, rf"{name}: missing", checkpoint.restore, found, target)
    assert run.newest() == run.at(1)
    run.saver().close()
    assert not saver._lease.valid()  # type: ignore[union-attr]


def test_s3_saver_waits_out_outage(
    s3_server: S3Store, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save_retry, "PATIENCE_S", 0.5)
    monkeypatch.setattr(save_retry, "BACKOFF", Backoff(first_s=0.5, longest_s=0.5))
    run = Run(f"{bucket}/two")
    saver = run.saver(**SETTINGS, max_outage_s=60)
    save(saver, 1, values(1))
    s3_server.kill()
    assert saver.begin(2, values(2), state={}, score=None)
    until(lambda: run.kinds()[-1] == "checkpoint_late")
    assert not saver.begin(3, values(3), state={}, score=None)
    s3_server.start()
    saver.wait()
    saver.close()
    assert (run.kinds(), run.newest()) == (
        ["checkpoint", "checkpoint_late", "checkpoint"],
        run.at(2),
    )
    checkpoint.verify(run.at(2))
    saver = run.saver(**SETTINGS, max_outage_s=10)
    save(saver, 3, values(3))
    s3_server.kill()
    try:
        assert saver.begin(4, values(4), state={}, score=None)
        rejects(r"step_00000004: cannot be written for 10 s", saver.wait)
    finally:
        s3_server.start()
    saver.close()
    assert run.newest() == run.at(3)
