"""Checkpoints of a Trainer script in a store: the newest intact one is fetched, old ones are
pruned, one training can upload.
"""

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from builders.faults import flip, rejects
from ranks.checkpoint import run_ranks
from transformers import TrainerControl, TrainerState

from rayrec.checkpoint import SyncCheckpoints


def arguments(folder: Path) -> Any:
    return SimpleNamespace(output_dir=str(folder), world_size=1)


def save(
    sync: SyncCheckpoints, folder: Path, step: int, *, rank: int = 0, best: int | None = None
) -> None:
    """Write files like Trainer's, then upload them."""
    checkpoint = folder / f"checkpoint-{step}"
    checkpoint.mkdir(parents=True, exist_ok=True)
    (checkpoint / f"rng_state_{rank}.pth").write_bytes(bytes([rank]))
    if not rank:
        (checkpoint / "model.safetensors").write_bytes(step.to_bytes(2, "big") * 50)
        (checkpoint / "shards").mkdir(exist_ok=True)
        (checkpoint / "shards" / "0.distcp").write_bytes(b"shard")
    chosen = None if best is None else str(folder / f"checkpoint-{best}")
    sync.on_save(
        arguments(folder),
        TrainerState(global_step=step, best_model_checkpoint=chosen),
        TrainerControl(),
    )


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Return a store with checkpoints of steps 10 and 20."""
    sync = SyncCheckpoints(str(tmp_path / "store"))
    for step in (10, 20):
        save(sync, tmp_path / "first", step)
    return tmp_path / "store"


@pytest.mark.parametrize(
    ("damage", "step"),
    [
        (lambda folder: None, 20),
        (lambda folder: (folder / "manifest.json").unlink(), 10),
        (lambda folder: flip(folder / "manifest.json"), 10),
        (lambda folder: flip(folder / "model.safetensors"), 10),
        (lambda folder: os.truncate(folder / "model.safetensors", 7), 10),
        (lambda folder: (folder / "shards" / "0.distcp").unlink(), 10),
    ],
    ids=["intact", "half-written", "manifest", "flipped", "truncated", "missing"],
)
def test_fetch_returns_newest_intact_checkpoint(
    saved: Path, tmp_path: Path, damage: Callable[[Path], None], step: int
) -> None:
    damage(saved / "checkpoint-20")
    url = f"file://{saved}"
    fresh = tmp_path / "fresh"
    assert SyncCheckpoints(url).fetch(arguments(fresh)) == str(fresh / f"checkpoint-{step}")
    fetched = fresh / f"checkpoint-{step}"
    names = sorted(str(path.relative_to(fetched)) for path in fetched.rglob("*") if path.is_file())
    assert names == ["model.safetensors", "rng_state_0.pth", "shards/0.distcp"]
    before = (fetched / "model.safetensors").stat()
    SyncCheckpoints(url).fetch(arguments(fresh))
    assert (fetched / "model.safetensors").stat().st_ino == before.st_ino  # not copied again
    flip(fetched / "model.safetensors")
    SyncCheckpoints(url).fetch(arguments(fresh))
    assert (fetched / "model.safetensors").read_bytes() == step.to_bytes(2, "big") * 50


def test_fetch_rejects_store_with_damaged_checkpoints_only(saved: Path, tmp_path: Path) -> None:
    assert SyncCheckpoints(str(tmp_path / "empty")).fetch(arguments(tmp_path)) is None
    for step in (10, 20):
        flip(saved / f"checkpoint-{step}" / "rng_state_0.pth", 0)
    rejects(
        "all checkpoints are damaged",
        SyncCheckpoints(str(saved)).fetch,
        arguments(tmp_path / "fresh"),
    )


def test_prune_keeps_newest_and_best(tmp_path: Path) -> None:
    store = tmp_path / "store"
    sync = SyncCheckpoints(str(store), num_to_keep=2)
    (store / "checkpoint-5").mkdir(parents=True)  # half-written
    for step, best in ((10, 10), (20, 10), (30, 10), (40, 30), (50, 30)):
        save(sync, tmp_path / "out", step, best=best)
        if step == 30:
            assert sorted(path.name for path in store.glob("checkpoint*")) == [
                f"checkpoint-{number}" for number in (10, 20, 30)
            ]
    assert sorted(path.name for path in store.glob("checkpoint*")) == [
        f"checkpoint-{number}" for number in (30, 40, 50)
    ]
    SyncCheckpoints(str(store)).fetch(arguments(tmp_path / "fresh"))
    assert sorted(path.name for path in (tmp_path / "fresh").glob("checkpoint*")) == [
        "checkpoint-30",
        "checkpoint-50",
    ]


def test_only_newest_training_uploads(saved: Path, tmp_path: Path) -> None:
    older = SyncCheckpoints(str(saved))
    newer = SyncCheckpoints(str(saved))
    for sync in (older, newer):
        sync.fetch(arguments(tmp_path / "out"))
    save(newer, tmp_path / "out", 30)
    rejects("another process acquired the lease", save, older, tmp_path / "old", 30)
    assert SyncCheckpoints(str(saved)).fetch(arguments(tmp_path / "fresh")) == str(
        tmp_path / "fresh" / "checkpoint-30"
    )
    unfetched = SyncCheckpoints(str(saved)).on_train_begin
    rejects(
        r"has checkpoints\. Resume with train",
        unfetched,
        arguments(tmp_path),
        TrainerState(),
        TrainerControl(),
    )
    args = SimpleNamespace(output_dir=str(tmp_path), world_size=2)
    rejects(
        "Trainer sees 2 of 1 workers. On CPU, set use_cpu=True",
        newer.on_train_begin,
        args,
        TrainerState(),
        TrainerControl(),
    )


def on_separate_nodes(folder: str, rank: int) -> None:
    save(SyncCheckpoints(f"{folder}/store"), Path(folder) / f"node-{rank}", 10, rank=rank)
    assert SyncCheckpoints(f"{folder}/store").fetch(arguments(Path(folder) / f"new-{rank}"))
    assert len(list((Path(folder) / f"new-{rank}").rglob("*.pth"))) == 3


def test_files_of_all_ranks_are_uploaded(tmp_path: Path) -> None:
    run_ranks(on_separate_nodes, 3, str(tmp_path))
