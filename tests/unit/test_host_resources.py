"""Tests of host resources and number formatting."""

import os
import platform
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from rayrec.host_resources import (
    Memory,
    bound_to_cores,
    cpu_maker,
    memory,
    node_fields,
    this_node,
    usable_cpus,
    worker_cores,
)
from rayrec.humanize import (
    clock_text,
    duration_text,
    durations_text,
    number_text,
    size_text,
    value_text,
)

MIB = 1 << 20


@pytest.fixture(autouse=True)
def physical_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        psutil, "virtual_memory", lambda: SimpleNamespace(total=8 * MIB, available=6 * MIB)
    )


def kernel(root: Path, groups: str = "") -> None:
    """Create the files of a process that is in these control groups."""
    (root / "proc/self").mkdir(parents=True)
    if groups:
        (root / "proc/self/cgroup").write_text(groups + "\n")


def group(root: Path, path: str, **files: str) -> None:
    folder = root / "sys/fs/cgroup" / path
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")


@pytest.mark.parametrize(
    ("limit", "used", "expected"),
    [
        ("max", 1, Memory(8 * MIB, 6 * MIB)),
        (4 * MIB, MIB, Memory(4 * MIB, 3 * MIB)),
        (MIB, 2 * MIB, Memory(MIB, 0)),
    ],
)
def test_memory_respects_container_limit(
    tmp_path: Path, limit: int | str, used: int, expected: Memory
) -> None:
    kernel(tmp_path)
    group(tmp_path, "", memory__max=str(limit), memory__current=str(used))
    assert memory(tmp_path) == expected


def test_page_cache_is_available_and_parent_group_limits(tmp_path: Path) -> None:
    flat = tmp_path / "flat"
    nested = tmp_path / "nested"
    kernel(flat)
    stat = f"anon 1\ninactive_file {MIB}\nactive_file {MIB}\nfile {3 * MIB}\nshmem {MIB}"
    group(
        flat,
        "",
        memory__max=str(5 * MIB),
        memory__current=str(4 * MIB),
        memory__stat=stat,
    )
    assert memory(flat) == Memory(5 * MIB, 3 * MIB)
    kernel(nested, "0::/pod/container")
    group(
        nested, "pod", memory__max=str(2 * MIB), memory__current=str(MIB), cpu__max="150000 100000"
    )
    group(
        nested, "pod/container", memory__max="max", memory__current=str(MIB), cpu__max="max 100000"
    )
    assert memory(nested) == Memory(2 * MIB, MIB)
    assert usable_cpus(root=nested) == 1


def test_version_1_groups_limit_memory_and_cpus(tmp_path: Path) -> None:
    kernel(tmp_path, "4:memory:/box\n1:cpu,cpuacct:/box")
    stat = f"inactive_file 1\ntotal_inactive_file {MIB}\ntotal_active_file 0"
    group(
        tmp_path,
        "memory/box",
        memory__limit_in_bytes=f"{3 * MIB}",
        memory__usage_in_bytes=f"{2 * MIB}",
        memory__stat=stat,
    )
    group(tmp_path, "cpu/box", cpu__cfs_quota_us="100000", cpu__cfs_period_us="100000")
    group(tmp_path, "cpu", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    assert memory(tmp_path) == Memory(3 * MIB, 2 * MIB)
    assert usable_cpus(root=tmp_path) == 1


def test_usable_cpus_respect_affinity_and_granted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel(tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(6)))
    assert (usable_cpus(root=tmp_path), usable_cpus(granted=4.0, root=tmp_path)) == (6, 4)
    assert usable_cpus(granted=0.5, root=tmp_path) == 1
    assert usable_cpus(granted=0.0, root=tmp_path) == 6  # a node that lends no CPUs says nothing
    group(tmp_path, "", cpu__max="250000 100000")
    assert usable_cpus(granted=4.0, root=tmp_path) == 2


# -- Numbers are shown as people read them
def test_quantities_are_readable_and_durations_have_one_unit() -> None:
    numbers = {
        0: "0",
        1e-17: "0",
        0.0125: "0.0125",
        9500: "9500",
        20000: "20k",
        1.5e6: "1.5M",
        -3e9: "-3G",
    }
    assert {number: number_text(number) for number in numbers} == numbers
    assert [duration_text(seconds) for seconds in (0.0312, 75, 130, 7300)] == [
        "0.0312 s",
        "75 s",
        "2 min",
        "2 h 2 min",
    ]
    assert [clock_text(seconds) for seconds in (0.9, 61, 7325)] == ["0:00:00", "0:01:01", "2:02:05"]
    sizes = {
        12: "12 B",
        3400: "3.4 kB",
        999_499: "999 kB",
        999_500: "1 MB",
        44_000_000: "44 MB",
        5e10: "50 GB",
        2e15: "2000 TB",
    }
    assert {size: size_text(size) for size in sizes} == sizes
    assert [value_text(value) for value in (None, 0.123456789, 12345, "x")] == [
        "-",
        "0.123457",
        "12,345",
        "x",
    ]
    assert durations_text([86.4, 120.0]) == ["86.4 s", "120.0 s"]
    assert (durations_text([86.4, 600.0]), durations_text([])) == (["1.44 min", "10.00 min"], [])


def test_worker_cores_follow_numa_nodes_and_siblings(tmp_path: Path) -> None:
    """Nodes with CPUs 0, 1, 4, 5 and 2, 3, 6, 7, in which N and N + 4 are threads of one core."""
    devices = tmp_path / "sys/devices/system"
    for node, cores in enumerate(("0-1,4-5", "2-3,6-7")):
        (devices / f"node/node{node}").mkdir(parents=True)
        (devices / f"node/node{node}/cpulist").write_text(cores + "\n")
    for core in range(8):
        (devices / f"cpu/cpu{core}/topology").mkdir(parents=True)
        (devices / f"cpu/cpu{core}/topology/thread_siblings_list").write_text(
            f"{core % 4},{core % 4 + 4}\n"
        )
    assert [worker_cores(range(8), index, 4, root=tmp_path) for index in range(4)] == [
        [0, 4],
        [1, 5],
        [2, 6],
        [3, 7],
    ]
    assert [worker_cores(range(8), index, 3, root=tmp_path) for index in range(3)] == [
        [0, 4],
        [1, 5, 2],
        [6, 3, 7],
    ]
    # more workers than cores
    assert [worker_cores([3, 1], index, 3) for index in range(3)] == [[1], [1], [3]]


def test_binding_reaches_all_threads_and_ends() -> None:
    before = os.sched_getaffinity(0)
    release = threading.Event()
    seen = list[set[int]]()

    def look() -> None:
        release.wait(60)
        seen.append(os.sched_getaffinity(0))

    older = threading.Thread(target=look)
    older.start()
    last = worker_cores(before, len(before) - 1, len(before))
    with bound_to_cores(len(before) - 1, len(before)):
        release.set()
        older.join()
        newer = threading.Thread(target=look)
        newer.start()
        newer.join()
    assert seen == [set(last), set(last)]
    assert os.sched_getaffinity(0) == before


def test_node_has_no_id_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False))
    assert this_node() == (platform.node(), "")
    assert node_fields([this_node()]) == {"nodes": [platform.node()]}


def test_node_id_is_of_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    context = SimpleNamespace(get_node_id=lambda: "0123456789abcdef")
    monkeypatch.setitem(
        sys.modules,
        "ray",
        SimpleNamespace(is_initialized=lambda: True, get_runtime_context=lambda: context),
    )
    assert this_node() == (platform.node(), "01234567")
    assert node_fields([this_node(), ("other", "")]) == {
        "nodes": [platform.node(), "other"],
        "node_ids": ["01234567", ""],
    }


def test_cpu_maker_is_read_from_first_processor(tmp_path: Path) -> None:
    assert cpu_maker(tmp_path) == ""
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text("processor\t: 0\nvendor_id\t: GenuineIntel\n\n")
    assert cpu_maker(tmp_path) == "GenuineIntel"
