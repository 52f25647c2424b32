"""Host memory of a checkpoint's copy next to a GPU: pinned, or not if the system refuses."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rayrec.checkpoint.plan import HostCopy, Part, Plan

PART: Any = Part(None, "model.weight", torch.float32, (4,), (0,), (4,), 0, 16)  # type: ignore[arg-type]


class Source:
    def data(self, part: Part) -> Any:
        return SimpleNamespace(device=torch.device("cuda", 3))


@pytest.mark.parametrize(("code", "unpinned"), [(0, 1), (2, 0)])
def test_memory_that_cannot_be_pinned_is_reported_and_used(
    code: int, unpinned: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[tuple[str, int]] = []

    class Runtime:
        def cudaHostRegister(self, place: int, size: int, flags: int) -> int:
            calls.append(("register", size))
            return code

        def cudaHostUnregister(self, place: int) -> int:
            calls.append(("unregister", place))
            return 700  # as after an error of the device, which is reported elsewhere

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: f"stream of {device}")
    with caplog.at_level(logging.WARNING):
        copy = HostCopy(Plan((PART,), {"model.weight": (4,)}), Source())
    assert calls == [("register", 16)]
    assert ("cannot be pinned (CUDA error 2): saves stall training for longer" in caplog.text) == bool(code)
    assert len(copy.body()) == 16
    copy.free()
    copy.free()
    assert [name for name, _ in calls].count("unregister") == unpinned
