"""Benchmark of checkpoints: training cost of saves, and save and restore speed for a large state,
relative to a plain copy.
"""

import os
import shutil
import tempfile
from itertools import count
from pathlib import Path
from typing import Any

import ray
import torch
from logs import synthetic_log
from rows import emit, interleaved, note, part, timed

from rayrec.checkpoint import Checkpoint, Retention, Saver, acquire_lease, restore
from rayrec.observe.console import Console
from rayrec.observe.events import read_events

DIMENSION = 64


def tables(total_bytes: int, number: int = 8) -> dict[str, torch.Tensor]:
    rows = total_bytes // (number * DIMENSION * 4)
    return {f"model.table_{index}": torch.rand(rows, DIMENSION) for index in range(number)}


def drop_from_page_cache(path: str) -> None:
    """Drop the pages of a synced file from the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


class LargeState:
    """Saves and restores `total_bytes` in one process, and copies the same file plainly; all in
    bytes/s.
    """

    def __init__(self, folder: str, total_bytes: int) -> None:
        self._folder = folder
        self._bytes = total_bytes
        self._tensors = tables(total_bytes)
        self._steps = count(1)
        self._buffer = bytearray(total_bytes + (1 << 20))
        self._saver = Saver(
            os.path.join(folder, "run"),
            lease=acquire_lease(os.path.join(folder, "run")),
            retention=Retention(num_to_keep=1, keep_best=0),
            extra_files={},
            max_outage_s=600,
            log=lambda kind, fields: None,
        )
        self.save()  # makes the copy in host memory, which later saves use again

    def close(self) -> None:
        self._saver.close()

    def _newest(self) -> Checkpoint:
        assert self._saver.last is not None
        return self._saver.last

    def _file(self) -> str:
        (name,) = self._newest().manifest()["files"]
        return os.path.join(self._newest().path, name)

    def save(self) -> float:
        """Save the state -> bytes/s, from the call to the synced manifest."""
        # A virtual machine gives dropped pages back to its host, and first uses of pages take
        # longer than all else. So both the save and the copy use pages of a copy before.
        if self._saver.last is not None:
            self.plain_copy()

        def begin() -> int:
            assert self._saver.begin(next(self._steps), self._tensors, state={}, score=None)
            return self._bytes

        def save_and_wait() -> int:
            _, self.stall_s = timed(begin)
            self._saver.wait()
            return self._bytes

        size, seconds = timed(save_and_wait)
        return size / seconds

    def plain_copy(self) -> float:
        """Copy the data file from the page cache to the same disk, synced -> bytes/s."""
        source = self._file()
        target = os.path.join(self._folder, "copy")

        def copy() -> int:
            shutil.copyfile(source, target)
            descriptor = os.open(target, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
            return os.path.getsize(target)

        size, seconds = timed(copy)
        os.remove(target)
        return size / seconds

    def restore(self, *, cached: bool) -> float:
        self._touch(cached=cached)

        def read() -> int:
            restore(self._newest(), self._tensors)
            return self._bytes

        size, seconds = timed(read)
        return size / seconds

    def plain_read(self, *, cached: bool) -> float:
        """Read the data file into allocated memory -> bytes/s."""
        self._touch(cached=cached)

        def read() -> int:
            with open(self._file(), "rb", buffering=0) as file:
                view = memoryview(self._buffer)
                done = 0
                while size := file.readinto(view[done:]):
                    done += size
            return done

        size, seconds = timed(read)
        return size / seconds

    def _touch(self, *, cached: bool) -> None:
        if not cached:
            drop_from_page_cache(self._file())
            return
        with open(self._file(), "rb", buffering=0) as file:
            while file.readinto(self._buffer):
                pass


def large_state(total_bytes: int, repeats: int) -> None:
    size = f"{total_bytes / 1e9:.1f} GB of tables, one process"
    with tempfile.TemporaryDirectory() as folder:
        state = LargeState(folder, total_bytes)
        rates = interleaved(
            repeats,
            save=state.save,
            copy=state.plain_copy,
            restore_cached=lambda: state.restore(cached=True),
            read_cached=lambda: state.plain_read(cached=True),
            restore=lambda: state.restore(cached=False),
            read=lambda: state.plain_read(cached=False),
        )
        stall_s = state.stall_s
        state.close()
    for workload, ours, peer, peer_text in (
        (
            "save to the disk, synced",
            "save",
            "copy",
            "cp of the data file from the page cache, synced",
        ),
        (
            "restore, file in the page cache",
            "restore_cached",
            "read_cached",
            "read() of the file into memory, cached",
        ),
        (
            "restore, file not in the page cache",
            "restore",
            "read",
            "read() of the file into memory, not cached",
        ),
    ):
        emit(
            "checkpoint",
            peer=peer_text,
            workload=f"{size}: {workload}",
            unit="mb_per_s",
            value=rates[ours] / 1e6,
            ratio=rates[ours] / rates[peer],
            repeats=repeats,
            peer_mb_per_s=round(rates[peer] / 1e6),
            **({"stall_s": round(stall_s, 3)} if ours == "save" else {}),
        )


def trained(path: str, *, every: int | None) -> dict[str, Any]:
    """Train criteo_kaggle's network -> its summary, with the estimated cost of waiting for each
    save.
    """
    from rayrec.recipes import criteo_kaggle
    from rayrec.training.trainer import train

    with tempfile.TemporaryDirectory() as storage:
        cache = Path(path).parent / ".cache"
        cache.mkdir(exist_ok=True)
        os.symlink(cache, os.path.join(storage, ".cache"))
        config = criteo_kaggle(path).replace(
            storage_path=storage,
            name="run",
            checkpoint={"every": every},
            early_stopping={"patience": 0},
            scaling={"num_workers": 1},
            cluster={"num_cpus": 2},
        )
        summary = train(config, console=Console(quiet=True)).summary
        saves = read_events(os.path.join(storage, "run", "events.jsonl"), kinds={"checkpoint"})
    write_s = sum(event["write_s"] for event in saves)
    note(
        f"  {len(saves)} saves of {saves[-1]['bytes'] / 1e6:.0f} MB, stall "
        f"{summary['checkpoint_stall_s']:.2f} s"
    )
    return {
        **summary,
        "saves": len(saves),
        "bytes": saves[-1]["bytes"],
        "waiting_fraction": write_s / (summary["train_s"] + write_s),
    }


def in_training(rows: int, repeats: int) -> None:
    path = synthetic_log(rows)
    summaries: dict[int | None, list[dict[str, Any]]] = {None: [], 10**9: []}

    def rate(every: int | None) -> float:
        summaries[every].append(trained(path, every=every))
        return summaries[every][-1]["rows_per_s"]

    rates = interleaved(repeats, default=lambda: rate(None), at_the_end=lambda: rate(10**9))
    last = summaries[None][-1]
    workload = (
        f"criteo_kaggle network, {rows:,} rows, 1 worker, 2 CPUs, saves with every evaluation: "
        f"{last['saves']} of {last['bytes'] / 1e6:.0f} MB in {last['train_s']:.0f} s"
    )
    stalls = sorted(summary["checkpoint_stall_fraction"] for summary in summaries[None])
    stall = stalls[len(stalls) // 2]
    emit(
        "checkpoint",
        peer="waiting for each save until it is on the disk",
        workload=workload,
        unit="stall_fraction",
        value=stall,
        ratio=stall / last["waiting_fraction"],
        repeats=repeats,
        config_hash=last["config_hash"],
        peer_stall_fraction=round(last["waiting_fraction"], 4),
    )
    emit(
        "checkpoint",
        peer="the same run, saved at its end only",
        workload=f"{workload}; rows per second of training, stalls apart",
        value=rates["default"],
        ratio=rates["default"] / rates["at_the_end"],
        repeats=repeats,
        config_hash=last["config_hash"],
        peer_rows_per_s=round(rates["at_the_end"]),
    )
    ray.shutdown()


def main(*, quick: bool) -> None:
    with part("checkpoint", "tables, one process"):
        large_state(
            int(float(os.environ.get("RAYREC_BENCHMARK_STATE_GB", "0.25" if quick else "2")) * 1e9),
            2 if quick else 5,
        )
    with part("checkpoint", "saves of a training run"):
        in_training(500_000 if quick else 3_000_000, 1 if quick else 3)
