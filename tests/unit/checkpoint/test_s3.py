"""Checkpoints in an S3 store: written as streams, found, read in part, pruned; late while the store is unavailable."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from rayrec import checkpoint, storage
from rayrec.checkpoint import Checkpoint, DamagedError, Retention, Saver, acquire_lease, folder_of, newest_good
from rayrec.config import InputError

if TYPE_CHECKING:
    from hosts.cloud_stores import S3Store

pytestmark = [pytest.mark.extended, pytest.mark.slow]


def values(factor: float) -> dict[str, torch.Tensor]:
    return {"model.large": torch.arange(6_000_000.0).reshape(-1, 16) * factor, "model.small": torch.ones(3) * factor}


def make_saver(run: str, events: list[tuple[str, dict[str, Any]]], **arguments: Any) -> Saver:
    return Saver(
        run,
        lease=acquire_lease(run),
        retention=Retention(num_to_keep=1),
        extra_files={"more/words.txt": b"abc"},
        log=lambda kind, fields: events.append((kind, fields)),
        **arguments,
    )


def test_saves_restores_and_removes(bucket: str) -> None:
    run, events = f"{bucket}/one", list[tuple[str, dict[str, Any]]]()
    assert newest_good(run, log=lambda *_: None) is None
    saver = make_saver(run, events, max_outage_s=60)
    for step, score in ((1, 0.9), (2, 0.1), (3, 0.2)):
        assert saver.begin(step, values(step), state={"step": step}, score=score)
        saver.wait()
    saver.close()
    assert [found.step for found in checkpoint.committed(run)] == [1, 3]
    assert not storage.exists(folder_of(run, 2))
    found = newest_good(run, log=lambda *_: None)
    assert found == Checkpoint(folder_of(run, 3))
    target = values(0)
    checkpoint.restore(found, target)
    assert all(torch.equal(target[name], tensor) for name, tensor in values(3).items())
    checkpoint.verify(found)
    assert checkpoint.open_checkpoint(run).step == 3
    name = next(name for name in found.manifest()["files"] if name.endswith(".safetensors"))
    data = storage.read_bytes(storage.join(found.path, name))
    storage.write_bytes(storage.join(found.path, name), data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(DamagedError, match=name):
        checkpoint.restore(found, target)
    assert newest_good(run, log=lambda *_: None, exclude=[found.path]) == Checkpoint(folder_of(run, 1))
    storage.remove_file(storage.join(found.path, name))
    with pytest.raises(DamagedError, match=rf"{name}: missing"):
        checkpoint.restore(found, target)
    assert newest_good(run, log=lambda *_: None) == Checkpoint(folder_of(run, 1))
    successor = make_saver(run, events, max_outage_s=60)
    assert not saver._lease.valid()  # type: ignore[union-attr]
    successor.close()


def test_an_outage(s3_server: S3Store, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rayrec.checkpoint import save_retry

    monkeypatch.setattr(save_retry, "PATIENCE_S", 0.5)
    monkeypatch.setattr(save_retry, "LONGEST_DELAY_S", 0.5)
    run, events = f"{bucket}/two", list[tuple[str, dict[str, Any]]]()
    saver = make_saver(run, events, max_outage_s=60)
    assert saver.begin(1, values(1), state={}, score=None)
    saver.wait()
    s3_server.kill()
    assert saver.begin(2, values(2), state={}, score=None)
    deadline_s = time.monotonic() + 50
    while events[-1][0] != "checkpoint_late":
        assert time.monotonic() < deadline_s
        assert not saver.begin(3, values(3), state={}, score=None)
        time.sleep(0.2)
    s3_server.start()
    saver.wait()
    saver.close()
    assert [kind for kind, _ in events] == ["checkpoint", "checkpoint_late", "checkpoint"]
    found = newest_good(run, log=lambda *_: None)
    assert found is not None
    assert found.step == 2
    checkpoint.verify(found)

    saver = make_saver(run, events, max_outage_s=10)
    assert saver.begin(3, values(3), state={}, score=None)
    saver.wait()
    s3_server.kill()
    try:
        assert saver.begin(4, values(4), state={}, score=None)
        with pytest.raises(InputError, match=r"step_00000004: cannot be written for 10 s"):
            saver.wait()
    finally:
        s3_server.start()
    saver.close()
    assert newest_good(run, log=lambda *_: None) == Checkpoint(folder_of(run, 3))
