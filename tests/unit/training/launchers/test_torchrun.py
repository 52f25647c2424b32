"""Processes started by torchrun: their ranks, their messages, and a run with one process."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from builders.faults import fails_with, raising, rejects, until
from builders.runs import train
from hosts.ports import free_ports
from torch.distributed import DistStoreError, HashStore

from rayrec import recipes
from rayrec.cluster.layout import TorchrunEnv
from rayrec.training.launchers import process_worker
from rayrec.training.launchers.process_launcher import fitted
from rayrec.training.launchers.process_worker import StoreControlChannel, StoreRendezvous, end, train_other

FOUND = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "node", "MASTER_PORT": "1"}


def test_torchrun_env_is_read_and_config_fits_processes() -> None:
    assert TorchrunEnv.from_environment({}) is None
    assert TorchrunEnv.from_environment({"RANK": "0", "WORLD_SIZE": "1"}) is None  # nobody to meet
    of_torchrun = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RESTART_COUNT": "5"}
    assert TorchrunEnv.from_environment(FOUND | of_torchrun) == TorchrunEnv(3, 4, 1, 2, 5)
    assert TorchrunEnv.from_environment(FOUND) == TorchrunEnv(3, 4, 0, 1, 0)
    for wrong, message in (
        ({"RANK": "4"}, "RANK=4 of WORLD_SIZE=4, .*: a rank must be below the number of processes. With srun"),
        ({"LOCAL_RANK": "1"}, "LOCAL_RANK=1 of LOCAL_WORLD_SIZE=1"),
        ({"LOCAL_WORLD_SIZE": "8(x2)"}, r"RANK=3, WORLD_SIZE=4, LOCAL_WORLD_SIZE=8\(x2\): .* must be integers"),
    ):
        rejects(message, TorchrunEnv.from_environment, FOUND | wrong)
    launched, config = TorchrunEnv(0, 4, 0, 2, 0), recipes.criteo_demo()
    assert fitted(config, launched).scaling.num_workers == 4
    assert launched.cpus >= 1
    for changes, message in (
        ({"cluster": {"address": "auto"}}, "cluster.address auto: needs Ray"),
        ({"scaling": {"resources_per_worker": {"x": 1.0}}}, "scaling.resources_per_worker: needs Ray"),
        ({"cluster": {"object_store_bytes": 1 << 30}}, "cluster.object_store_bytes: needs Ray"),
    ):
        rejects(message, fitted, config.replace(**changes), launched)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> TorchrunEnv:
    found = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1))}
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    return TorchrunEnv.from_environment()


def meetings(*ranks: int) -> list[StoreRendezvous]:
    """Return the rendezvous of two ranks in one store of this process."""
    store = HashStore()
    return [StoreRendezvous(TorchrunEnv(rank, 2, 0, 1, 0), store) for rank in ranks]


def test_store_channel_delivers_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_worker, "_REQUESTS_S", 0.01)
    meeting, of_other = meetings(0, 1)
    channel, other = StoreControlChannel(meeting), StoreControlChannel(of_other)
    assert (channel.stop_reason(), channel.saved_bytes()) == (None, 0)
    other.request_stop("SIGTERM")
    channel.request_stop("SIGINT")
    assert (channel.stop_reason(), other.stop_reason()) == ("SIGTERM", "SIGTERM")
    other.report_saved_bytes(1, 7)
    channel.report_saved_bytes(0, 3)
    other.report_saved_bytes(1, 9)
    assert channel.saved_bytes() == 12
    requests: list[Any] = []
    channel.send_profile_request({"steps": 1})
    other.subscribe(requests.append)
    channel.send_profile_request({"steps": 2})
    until(lambda: len(requests) > 1)
    assert requests == [{"steps": 1}, {"steps": 2}]
    monkeypatch.setattr(meeting, "get", raising(DistStoreError("Connection reset")))
    fails_with(OSError, "the store of the run's processes is gone", channel.stop_reason)


def test_store_publishes_large_values(alone: TorchrunEnv) -> None:
    meeting = StoreRendezvous.join(alone)
    assert meeting.get("large") is None
    for value in (b"", b"small", bytes(range(256)) * (80 << 10)):  # the last one is 20 MiB; a message to the store is 8 at most
        meeting.publish("large", value)
        assert meeting.get("large") == value
    meeting.remove("large")
    assert meeting.get("large") is None
    assert meeting._store.num_keys() == 1  # no piece is left; one key is the store's own


def test_other_processes_receive_run_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_worker, "_LEAVE_S", 0.2)
    meeting, other = meetings(0, 1)
    end(meeting, {"status": 143})  # one that is waited for in vain
    assert train_other(recipes.criteo_demo(), other) == {"status": 143}
    monkeypatch.setattr(process_worker, "_LEAVE_S", 60.0)
    end(meeting, {"status": 143})  # which comes back: it has left


def test_torchrun_with_one_process_matches_plain_run(click_log: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    config = recipes.criteo_demo(str(click_log / "train.txt")).replace(steps=4, evaluate_every=4, batch_size=64)
    config = config.replace(storage_path=str(tmp_path), scaling={"num_workers": 1})
    plain = train(config, name="plain", cluster={"address": "none"})
    request.getfixturevalue("alone")
    launched = train(config, name="launched", scaling={"num_workers": 2})
    assert launched.summary["weights_sha256"] == plain.summary["weights_sha256"]
    rejects(r"train_data\.path: must be a training log", train, config, name="other", train_data={"path": None})
    assert json.loads((tmp_path / "launched" / "summary.json").read_text()) == launched.summary


def test_closed_rendezvous_raises_in_threads(alone: TorchrunEnv, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_worker, "_REQUESTS_S", 0.0)
    meeting = StoreRendezvous.join(alone)
    before = set(threading.enumerate())
    StoreControlChannel(meeting).subscribe(lambda request: None)
    (watching,) = set(threading.enumerate()) - before
    meeting.close()
    watching.join(10)
    assert not watching.is_alive()
    fails_with(OSError, "has ended", meeting.get, "anything")
