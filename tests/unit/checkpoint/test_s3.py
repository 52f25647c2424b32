"""Checkpoints in an S3 store: streamed writes, partial reads, retention, and late saves during an outage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from builders.faults import fails_with, rejects, until
from builders.savers import Run, save

from rayrec import checkpoint, storage
from rayrec.checkpoint import DamagedError, Retention, latest_valid_checkpoint, save_retry

if TYPE_CHECKING:
    from hosts.cloud_stores import S3Store

pytestmark = [pytest.mark.extended, pytest.mark.slow]


def values(factor: float) -> dict[str, torch.Tensor]:
    return {"model.large": torch.arange(6_000_000.0).reshape(-1, 16) * factor, "model.small": torch.ones(3) * factor}


SETTINGS: dict[str, Any] = {"retention": Retention(num_to_keep=1), "extra_files": {"more/words.txt": b"abc"}}


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
    assert latest_valid_checkpoint(run.folder, log=lambda *_: None, exclude=[found.path]) == run.at(1)
    storage.remove_file(storage.join(found.path, name))
    fails_with(DamagedError, rf"{name}: missing", checkpoint.restore, found, target)
    assert run.newest() == run.at(1)
    run.saver().close()
    assert not saver._lease.valid()  # type: ignore[union-attr]


def test_s3_saver_waits_out_outage(s3_server: S3Store, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_retry, "PATIENCE_S", 0.5)
    monkeypatch.setattr(save_retry, "LONGEST_DELAY_S", 0.5)
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
    assert (run.kinds(), run.newest()) == (["checkpoint", "checkpoint_late", "checkpoint"], run.at(2))
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
