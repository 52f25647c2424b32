"""Memory of processes while a candidate runs, shared pages counted once."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def _descendants(root: int) -> list[int]:
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):
                parents[int(entry.name)] = int(
                    (entry / "stat").read_text().rpartition(")")[2].split()[1]
                )
    processes = [root]
    for process in processes:
        processes += [child for child, parent in parents.items() if parent == process]
    return processes


def memory_bytes(root: int) -> int:
    """Return the proportional set size of a process and its descendants. Skips processes that end
    meanwhile.
    """
    total = 0
    for process in _descendants(root):
        with suppress(OSError):
            for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) << 10
    return total


class Peak:
    """Maximum of all samples."""

    size_bytes = 0


@contextmanager
def watched(*, every_s: float = 0.5) -> Iterator[Peak]:
    """Sample the memory of this process and its descendants every `every_s` seconds. Each sample
    takes some milliseconds.
    """
    peak = Peak()
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(every_s):
            peak.size_bytes = max(peak.size_bytes, memory_bytes(os.getpid()))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        stop.set()
        thread.join()
