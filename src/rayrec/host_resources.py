"""CPUs and memory available to this process, within the limits of its container and of Ray. psutil
reads the machine's memory. Limits of control groups, unknown to psutil, are read here.
"""

import contextlib
import os
import platform
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

_ROOT = Path("/")
_ID_DIGITS: Final = 8


@dataclass(frozen=True)
class Memory:
    """Host memory in bytes."""

    total: int
    """Memory of the machine, or of the container if smaller."""
    available: int
    """Memory that processes can still allocate, including page cache that the kernel can drop."""


def usable_cpus(*, granted: float | None = None, root: Path = _ROOT) -> int:
    """Return the CPUs that this process may keep busy, at least 1: its affinity, limited by the
    container's CPU quota and by `granted` (e.g. the CPUs of its Ray node). `root` is the folder of
    /proc and /sys, for tests.
    """
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min([cpus, *_cpu_quotas(root), *([granted] if granted else [])])))


def memory(root: Path = _ROOT) -> Memory:
    """Return the host memory within this process's control group limits (versions 1 and 2). `root`
    is as for `usable_cpus`.
    """
    import psutil

    machine = psutil.virtual_memory()
    total = machine.total
    available = machine.available
    # Every group up to the root limits this process, so that the smallest limit counts.
    for folder in _groups(root, "memory", "memory.max", "memory.limit_in_bytes"):
        limit = _numbers(folder / "memory.max") or _numbers(folder / "memory.limit_in_bytes")
        used = _numbers(folder / "memory.current") or _numbers(folder / "memory.usage_in_bytes")
        if limit and used:
            used_bytes = max(0, int(used[0]) - _droppable_bytes(folder / "memory.stat"))
            total, available = (
                min(total, int(limit[0])),
                min(available, max(0, int(limit[0]) - used_bytes)),
            )
    return Memory(total, available)


def cpu_maker(root: Path = _ROOT) -> str:
    """Return the maker of this machine's CPU by its name in /proc/cpuinfo, such as GenuineIntel, ""
    if it has none. `root` is the folder of /proc, for tests.
    """
    try:
        lines = (root / "proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    fields = (line.partition(":") for line in lines)
    return next((value.strip() for name, _, value in fields if name.strip() == "vendor_id"), "")


@contextlib.contextmanager
def bound_to_cores(index: int, count: int, *, root: Path = _ROOT) -> Iterator[None]:
    """Bind all threads of this process to cores `index` of `count` equal parts (`worker_cores`),
    until the context ends.
    """
    before = os.sched_getaffinity(0)
    _bind(worker_cores(before, index, count, root=root))
    try:
        yield
    finally:
        _bind(before)


# Ordered by NUMA node, then core: a worker's threads share memory and caches, and two workers never
# share a core's hardware threads.
def worker_cores(cores: Iterable[int], index: int, count: int, *, root: Path = _ROOT) -> list[int]:
    """Return part `index` of `count`, at least one core: neighbours in a NUMA node, with a core's
    threads together.
    """
    folder = root / "sys/devices/system"
    node_of = {
        core: int(node.name.removeprefix("node"))
        for node in folder.glob("node/node[0-9]*")
        for core in _listed_cores(node / "cpulist")
    }
    first_of = {
        core: min(
            _listed_cores(folder / f"cpu/cpu{core}/topology/thread_siblings_list"), default=core
        )
        for core in cores
    }
    ordered = sorted(first_of, key=lambda core: (node_of.get(core, 0), first_of[core], core))
    return ordered[index * len(ordered) // count : (index + 1) * len(ordered) // count] or [
        ordered[index % len(ordered)]
    ]


def _bind(cores: Iterable[int]) -> None:
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # The thread ended.
            os.sched_setaffinity(int(thread), cores)


def _listed_cores(file: Path) -> list[int]:
    """Return the cores of a list such as 0-3,8, or [] if the file is missing."""
    try:
        ranges = [part.split("-") for part in file.read_text().strip().split(",") if part]
    except OSError:
        return []
    return [
        core
        for first, *last in ranges
        for core in range(int(first), int(last[0] if last else first) + 1)
    ]


def this_node() -> tuple[str, str]:
    """Return the host name, and the first digits of the id of this process's Ray node, which tell
    nodes on one host apart. The id is empty without Ray.
    """
    ray: Any = sys.modules.get("ray")
    is_connected = ray is not None and hasattr(ray, "is_initialized") and ray.is_initialized()
    return platform.node(), ray.get_runtime_context().get_node_id()[
        :_ID_DIGITS
    ] if is_connected else ""


def node_fields(nodes: Sequence[tuple[str, str]]) -> dict[str, list[str]]:
    """Return the event fields of nodes, each a result of `this_node`: "nodes" and, with Ray,
    "node_ids".
    """
    ids = [node_id for _, node_id in nodes]
    return {"nodes": [name for name, _ in nodes], **({"node_ids": ids} if any(ids) else {})}


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    import psutil

    return psutil.Process().memory_info().rss


def _cpu_quotas(root: Path) -> Iterator[float]:
    for folder in _groups(root, "cpu", "cpu.max", "cpu.cfs_quota_us"):
        quota = _numbers(folder / "cpu.max") or (
            _numbers(folder / "cpu.cfs_quota_us") + _numbers(folder / "cpu.cfs_period_us")
        )
        if len(quota) == 2:
            yield quota[0] / quota[1]


def _droppable_bytes(stat: Path) -> int:
    """Return the page cache of files. `file` is not used: it includes tmpfs (Ray's object store),
    which cannot be dropped.
    """
    try:
        fields = dict(line.split() for line in stat.read_text().splitlines())
    except (OSError, ValueError):
        return 0
    # version 1 has separate fields that include child groups
    total = "total_" if "total_inactive_file" in fields else ""
    return sum(int(fields.get(f"{total}{kind}_file", 0)) for kind in ("inactive", "active"))


def _groups(root: Path, controller: str, *files: str) -> Iterator[Path]:
    """Yield the folders of control groups, from this process's group up to the root, that contain
    one of the files.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    seen: set[Path] = set()
    for base in (root / "sys/fs/cgroup", root / "sys/fs/cgroup" / controller):
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
    """Return the numbers in a control group's file, or () if the file is missing or sets no limit
    ("max", -1).
    """
    try:
        numbers = tuple(float(word) for word in file.read_text().split())
    except (OSError, ValueError):
        return ()
    return () if numbers and numbers[0] < 0 else numbers
