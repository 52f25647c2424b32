"""CPUs and memory that this process may use: what the machine has, within the limits of its container and of Ray.

psutil reads the machine's memory; limits of control groups, which it does not know, are read here."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/")


@dataclass(frozen=True)
class Memory:
    """Bytes of host memory."""

    total: int
    """Of the machine, or of the container if that has less."""
    available: int
    """What processes can still take: page cache that the kernel can drop counts as available."""


def usable_cpus(*, granted: float | None = None, root: Path = _ROOT) -> int:
    """CPUs that this process may keep busy, at least 1: its affinity, within its container's CPU quota and `granted`, for
    example the CPUs of the Ray node it runs on. `root` is where /proc and /sys are, for tests."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min([cpus, *_cpu_quotas(root), *([granted] if granted else [])])))


def memory(root: Path = _ROOT) -> Memory:
    """Host memory within the limits of the control groups (version 1 and 2) of this process. `root` is the folder of /proc and
    /sys, for tests."""
    import psutil

    machine = psutil.virtual_memory()
    total, available = machine.total, machine.available
    for limit, used in _memory_limits(root):
        total, available = min(total, limit), min(available, max(0, limit - used))
    return Memory(total, available)


def resident_bytes() -> int:
    """Resident memory of this process."""
    import psutil

    return psutil.Process().memory_info().rss


def _cpu_quotas(root: Path) -> Iterator[float]:
    for folder in _groups(root, "cpu", "cpu.max", "cpu.cfs_quota_us"):
        quota = _numbers(folder / "cpu.max") or (_numbers(folder / "cpu.cfs_quota_us") + _numbers(folder / "cpu.cfs_period_us"))
        if len(quota) == 2 and min(quota) > 0:
            yield quota[0] / quota[1]


def _memory_limits(root: Path) -> Iterator[tuple[int, int]]:
    """(limit, used without page cache) of every control group that has a limit."""
    for folder in _groups(root, "memory", "memory.max", "memory.limit_in_bytes"):
        limit = _numbers(folder / "memory.max") or _numbers(folder / "memory.limit_in_bytes")
        used = _numbers(folder / "memory.current") or _numbers(folder / "memory.usage_in_bytes")
        if limit and used:
            yield int(limit[0]), max(0, int(used[0]) - _droppable_bytes(folder / "memory.stat"))


def _droppable_bytes(stat: Path) -> int:
    """Page cache of files. `file` counts memory of tmpfs too (Ray's object store), which stays."""
    try:
        fields = dict(line.split() for line in stat.read_text().splitlines())
    except (OSError, ValueError):
        return 0
    total = "total_" if "total_inactive_file" in fields else ""  # version 1 counts groups below in fields of their own
    return sum(int(fields.get(f"{total}{kind}_file", 0)) for kind in ("inactive", "active"))


def _groups(root: Path, controller: str, *files: str) -> Iterator[Path]:
    """Folders of the control groups, from this process's own up to the root, that have one of the files."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    places = {Path(): root / "sys/fs/cgroup", Path(controller): root / "sys/fs/cgroup" / controller}
    seen: set[Path] = set()
    for base in places.values():
        for line in lines or ["0::/"]:
            _, names, path = line.split(":", 2)
            if names and controller not in names.split(","):
                continue
            folder = base / path.lstrip("/")
            for group in [folder, *folder.parents]:
                if group in seen or not group.is_relative_to(base):
                    continue
                seen.add(group)
                if any((group / file).exists() for file in files):
                    yield group


def _numbers(file: Path) -> tuple[float, ...]:
    """The numbers of a control group's file; none if there is no such file or no limit ("max", -1)."""
    try:
        words = file.read_text().split()
        numbers = tuple(float(word) for word in words)
    except (OSError, ValueError):
        return ()
    return () if numbers and numbers[0] < 0 else numbers
