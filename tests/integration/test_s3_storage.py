"""Paths in an S3-compatible store behave as local ones do, through its outages, and say in a line what is wrong."""

import os
import re
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
import pytest
from builders import run_events
from builders.faults import at_first, fails_with, watched
from hosts.cloud_stores import outage
from hosts.processes import run_command

from rayrec import recipes, storage
from rayrec.config import InputError
from rayrec.observe.events import EventWriter, follow, merge_events, metrics_dataframe, read_events
from rayrec.observe.report import run as report
from rayrec.observe.tracking.tensorboard import TensorBoardTracker
from rayrec.storage import folders
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


# Streams and folders; files as locally are in test_cloud_stores.py --------------------------------------------------
@pytest.mark.exhaustive
def test_large_streams_survive_reuse_of_memory(folder: str) -> None:
    buffer = np.zeros(3 * MIB + 7, np.uint8)

    def pieces() -> Iterator[memoryview]:
        for number in range(40):
            buffer[:] = number
            yield memoryview(buffer)

    assert storage.write_stream(f"{folder}/large", pieces()) == 40 * buffer.nbytes
    assert storage.size_of(f"{folder}/large") == 40 * buffer.nbytes
    read = np.frombuffer(b"".join(storage.read_stream(f"{folder}/large")), np.uint8).reshape(40, -1)
    assert (read == np.arange(40, dtype=np.uint8)[:, None]).all()
    storage.copy_files(folder, f"{folder}2")
    assert storage.size_of(f"{folder}2/large") == read.nbytes


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

    monkeypatch.setattr(folders, "copy_file", at_first([OSError("out")], folders.copy_file, end="manifest.json"))
    copied = watched(monkeypatch, folders, "copy_file")
    with pytest.raises(OSError, match="out"), storage.writing_folder(f"{folder}2") as local:  # noqa: PT012
        Path(local, "manifest.json").write_bytes(b"{}")
        Path(local, "part").write_bytes(b"1")
    assert [target for _, target, _ in copied] == [f"{folder}2/part"]
    assert not storage.exists(f"{folder}2")


@pytest.mark.exhaustive
def test_forked_process_reaches_store(folder: str) -> None:
    storage.write_bytes(f"{folder}/a", b"1")
    child = os.fork()
    if not child:
        try:
            os._exit(storage.read_bytes(f"{folder}/a") != b"1")
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0


# Outages -------------------------------------------------------------------------------------------------------------
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
        (lambda: storage.write_stream(f"{folder}/large", (bytes(MIB) for _ in range(20))), 20 * MIB),
    ]


def test_operations_survive_outage(folder: str, s3_server: Any) -> None:
    storage.write_bytes(f"{folder}/a", b"abc")
    calls, expected = zip(*_operations(folder), (lambda: storage.remove_folder(f"{folder}/none"), None), strict=True)
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
            match = r"here: the store was unavailable for \d+ s \(timeout was reached\)"
            took = _took(lambda: storage.read_bytes(f"{folder}/here"), OSError, match)
    finally:
        s3_server.send_signal(signal.SIGCONT)
    assert took < 40
    assert storage.read_bytes(f"{folder}/here") == b"abc"


# What is wrong -------------------------------------------------------------------------------------------------------
def test_wrong_secret_is_reported_at_once(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-word")
    for operation, _ in _operations(folder):
        match = r"^s3://logs: access denied .*set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        assert _took(operation, InputError, match) < 30


@pytest.mark.exhaustive
def test_profile_provides_endpoint_region_and_credentials(folder: str, s3_server: Any, monkeypatch: Any, tmp_path: Path) -> None:
    storage.write_bytes(f"{folder}/a", b"1")
    for name in s3_server.environment:
        monkeypatch.delenv(name)
    url = s3_server.environment["AWS_ENDPOINT_URL"]
    (tmp_path / "config").write_text(f"[profile mine]\nregion = us-east-1\nendpoint_url = {url}\n")
    (tmp_path / "credentials").write_text("[mine]\naws_access_key_id = tester\naws_secret_access_key = secret-word\n")
    files = {"AWS_CONFIG_FILE": f"{tmp_path}/config", "AWS_SHARED_CREDENTIALS_FILE": f"{tmp_path}/credentials"}
    for name, value in {**files, "AWS_PROFILE": "mine"}.items():
        monkeypatch.setenv(name, value)
    assert storage.read_bytes(f"{folder}/a") == b"1"


# Events --------------------------------------------------------------------------------------------------------------
def test_events_survive_outage_and_are_followed(folder: str, s3_server: Any) -> None:
    url, stop, seen = f"{folder}/events.jsonl", threading.Event(), []
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
            writer.write(event["kind"], **{name: value for name, value in event.items() if name not in ("time", "kind")})
        assert writer.flush()
        assert report.write(folder) == f"{folder}/report.html"
    assert b"not finished at step 150 of 200" in storage.read_bytes(f"{folder}/report.html")
    here = tmp_path / "report.html"
    assert report.write(folder, out=str(here)) == str(here)
    assert here.read_bytes() == storage.read_bytes(f"{folder}/report.html")
    assert metrics_dataframe(f"{folder}/events.jsonl")["step"].tolist() == list(range(10, 151, 10))


# Trackers and profiles -----------------------------------------------------------------------------------------------
@pytest.mark.exhaustive
def test_curves_survive_store_outage(folder: str, s3_server: Any) -> None:
    events = [event for event in run_events.run() if event["kind"] != "finish"]
    run_events.feed(TensorBoardTracker(folder, config="seed: 0\n"), events[:20], flush=False, close=True)
    (before,) = storage.files_in(f"{folder}/tensorboard")
    second = TensorBoardTracker(folder, config="seed: 0\n")
    s3_server.kill()
    try:
        run_events.feed(second, events, flush=False)
        with pytest.raises(OSError):  # noqa: PT011
            second.flush()
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
        run_events.feed(WandbTracker(folder, project="rayrec", offline=True, config=config), events, close=True)
    (run,) = storage.list_folder(f"{folder}/wandb")
    assert run.startswith("offline-run-")
    assert any(name.endswith(".wandb") for name in storage.list_folder(f"{folder}/wandb/{run}"))


@pytest.mark.exhaustive
def test_profile_request_is_served(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "_URL_POLL_S", 0.2)
    monkeypatch.setattr(profiling, "_POLL_S", 0.2)
    now = time.time()
    events: list[dict[str, Any]] = [{"kind": "start", "time": now - 10, "step": 0, "steps": 100, "world_size": 1}]
    events += [{"kind": "step", "time": now, "step": 40, "steps": 100}]

    def send(wish: dict[str, Any]) -> None:
        storage.write_bytes(f"{folder}/profile/{wish['name']}/rank_0/trace.json.gz", b"[]")

    with watched_requests(folder, SimpleNamespace(send_profile_request=send)):
        told = request_profile(folder, events, steps=2, note=lambda text: None, timeout_s=60.0)
    assert told["profile"].startswith(f"{folder}/profile/step_")
    assert not storage.exists(f"{folder}/profile/request.json")
