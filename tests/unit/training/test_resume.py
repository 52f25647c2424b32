"""Resume from the latest readable checkpoint, regardless of when damage is found."""

import errno
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from builders.faults import flip, rejects, unreadable

from rayrec import checkpoint
from rayrec.checkpoint import Checkpoint, DamagedError, folder_of, latest_valid_checkpoint
from rayrec.checkpoint.writer import ExtraFiles
from rayrec.observe.timing import Stopwatch
from rayrec.training import worker
from rayrec.training.progress import Progress


class Resumed:
    """Start in a folder of checkpoints whose only weight is their step."""

    def __init__(self, folder: Path, *steps: int, files: dict[str, bytes | str] | None = None) -> None:
        self.folder, self.events, self.damaged = str(folder), list[tuple[str, int]](), set[int]()
        self.files = files or {}
        self.loaders: list[Mock] = []
        self.models: list[weakref.ref[torch.nn.Module]] = []
        self.models_before: list[int] = []
        """Number of existing models when each model was built."""
        extra = ExtraFiles({"config.yaml": b"a: 1", **self.files})
        for step in steps:
            state = {"progress": Progress(step=step).state(), "loader": {"at": step}}
            weights = {"model.weight": torch.full((1, 1), float(step))}
            checkpoint.save(folder_of(self.folder, step), weights, state=state, extra_files=extra.write)

    def checkpoint_files(self, prepared: Any) -> dict[str, bytes | str]:
        return self.files

    def make_loader(self, context: Any, prepared: Any, *, state: dict[str, Any] | None, step: int) -> Mock:
        self.loaders.append(Mock(state=state))
        return self.loaders[-1]

    def set_up(self, context: Any, prepared: Any) -> Any:
        self.models_before.append(sum(made() is not None for made in self.models))
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        self.models.append(weakref.ref(model))
        return SimpleNamespace(model=model, optimizer=torch.optim.SGD(model.parameters()))

    def start(self) -> tuple[Checkpoint | None, Any, Any, Progress]:
        config = SimpleNamespace(workload=self, to_yaml=lambda: "a: 1", init_from=None)
        context: Any = SimpleNamespace(config=config, rank=0)
        assignment: Any = SimpleNamespace(folder=self.folder, prepared=None, config=config)

        def log(kind: str, fields: dict[str, Any]) -> None:
            self.events.append((kind, checkpoint.step_of(fields["path"])))

        return worker._resume(context, assignment, log, self.damaged, Stopwatch())


def tear(folder: str, step: int, name: str) -> None:
    flip(f"{folder_of(folder, step)}/{name}", -2, bit=4)  # before it, a file so small is mostly header


def test_manifest_damaged_after_check_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resumed = Resumed(tmp_path, 1, 2)

    def look_and_tear(folder: str, **arguments: Any) -> Checkpoint | None:
        found = latest_valid_checkpoint(folder, **arguments)
        if found is not None and found.step == 2:
            tear(folder, 2, "manifest.json")
        return found

    monkeypatch.setattr(worker, "latest_valid_checkpoint", look_and_tear)
    found, setup, loader, progress = resumed.start()
    assert (found.step, progress.step, loader.state) == (1, 1, {"at": 1})
    assert float(setup.model.weight) == 1
    assert (resumed.events, resumed.damaged) == ([("checkpoint_damaged", 2)], {2})
    assert len(resumed.loaders) == 1  # none was started for what could not be read


def test_damage_found_by_reading_is_skipped(tmp_path: Path) -> None:
    resumed = Resumed(tmp_path, 1, 2, 3)
    tear(resumed.folder, 3, "manifest.json")
    tear(resumed.folder, 2, "data_00000.safetensors")
    found, setup, *_ = resumed.start()
    assert (found.step, float(setup.model.weight)) == (1, 1)
    assert resumed.models_before == [0]  # one model for both
    assert resumed.damaged == {2, 3}
    assert resumed.events == [("checkpoint_damaged", 3), ("checkpoint_damaged", 2)]
    assert [loader.close.called for loader in resumed.loaders] == [True, False]


@pytest.mark.parametrize("steps", [(), (1, 2)])
def test_restart_without_checkpoint_builds_no_second_model(tmp_path: Path, steps: tuple[int, ...]) -> None:
    resumed = Resumed(tmp_path, *steps)
    for step in steps:
        tear(resumed.folder, step, "data_00000.safetensors")
    found, setup, loader, progress = resumed.start()
    assert (found, loader.state, progress) == (None, None, Progress())
    assert float(setup.model.weight) == 0
    assert resumed.models_before == ([0, 0] if steps else [0])
    assert resumed.damaged == set(steps)


def test_shared_checkpoint_file_is_repaired_from_run(tmp_path: Path) -> None:
    source = tmp_path / "tokens.npy"
    source.write_bytes(b"abcdef")
    resumed = Resumed(tmp_path, 1, 2, 3, files={"more/tokens.npy": str(source)})
    tear(resumed.folder, 2, "more/tokens.npy")  # in place, so of all three
    for step in (1, 2, 3):
        with pytest.raises(DamagedError, match=r"tokens\.npy: damaged, its checksum does not match"):
            checkpoint.verify(Checkpoint(folder_of(resumed.folder, step)))
    found, setup, loader, _ = resumed.start()
    assert (found.step, loader.state, float(setup.model.weight)) == (3, {"at": 3}, 3)
    assert (resumed.events, resumed.damaged) == ([("checkpoint_repaired", 3)], set())
    checkpoint.verify(found)
    with pytest.raises(DamagedError, match="damaged"):  # the link to the others is broken
        checkpoint.verify(Checkpoint(folder_of(resumed.folder, 2)))

    tear(resumed.folder, 3, "data_00000.safetensors")  # so that the one before is needed
    Path(folder_of(resumed.folder, 1), "more/tokens.npy").write_bytes(b"abc")  # shorter: seen without reading
    found, setup, *_ = resumed.start()
    assert (found.step, float(setup.model.weight)) == (2, 2)
    assert resumed.events[1:] == [("checkpoint_damaged", 3), ("checkpoint_repaired", 2)]


def test_shared_file_is_not_repaired_from_different_source(tmp_path: Path) -> None:
    source = tmp_path / "tokens.npy"
    source.write_bytes(b"abcdef")
    resumed = Resumed(tmp_path, 1, 2, files={"tokens.npy": str(source)})
    tear(resumed.folder, 2, "tokens.npy")
    source.write_bytes(b"abcdeg")
    found, *_ = resumed.start()
    assert (found, resumed.damaged) == (None, {1, 2})
    assert resumed.events == [("checkpoint_damaged", 2), ("checkpoint_damaged", 1)]
    source.unlink()
    found, *_ = resumed.start()
    assert found is None


@pytest.mark.parametrize("name", ["manifest.json", "data_00000.safetensors"])
def test_unreadable_disk_does_not_restart_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    resumed = Resumed(tmp_path, 1)
    unreadable(monkeypatch, name, OSError(errno.EIO, "Input/output error"))
    rejects(rf"{name}: cannot be read .*, and there is no other checkpoint to resume from", resumed.start)
