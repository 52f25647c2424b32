"""Default engine: Ray Data read tasks that apply one function to many items, with placement and
concurrency limits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import json
import logging
import math
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, islice, repeat, takewhile
from typing import Any, Final, Generic, TypeVar, final

import pyarrow as pa
import ray
import ray.data
from ray.data import Datasource, ExecutionOptions, ExecutionResources, ReadTask
from ray.data.block import BlockMetadata

from rayrec import storage
from rayrec.compat.ray_compat import (
    ENABLED_BACKPRESSURE_POLICIES_CONFIG_KEY,
    BackpressurePolicy,
)
from rayrec.config import InputError
from rayrec.data.engine import Shared, StopToken, Tables, Task, TaskPlacement
from rayrec.process_state import temporary_environment

_ITEMS_A_DATASET: Final = (64, 256, 1024)
"""Number of items in the first Datasets of a stream. The last value, about 32 GB of text with
default blocks, applies to all later ones. A Dataset stores all its read tasks, in about 1 ms each,
before its first row.
"""
ITEMS_A_TASK: Final = 2
"""Items per task of a stream, after its first tasks. With one, Ray's overhead is a fifth of the
time; more gain nothing.
"""
DELIVERY_S: Final = (0.005, 0.4e-9)
"""CPU seconds that Ray 2.60 takes in a data task's process: for the task, and for each byte of its
table, which it copies to the object store. Measured with tasks that computed nothing, on cores of
2.6 GHz.
"""
_ITEMS: Final = b"rayrec.items"
"""Table metadata key for the row counts and metadata of a task's items."""
_EARLY_START_ITEMS: Final = 16
"""Number of remaining items at which the next Dataset starts. Its first rows take about 1 s."""
_CLOSE_S: Final = 5.0
_READER_BLOCKS: Final = 3
"""Number of blocks inside Ray Data's iterator and the threads between it and the reader."""
_Value = TypeVar("_Value")


class _Items(Datasource):
    def __init__(self, name: str, function: Task, items: Sequence[Any], block_bytes: int) -> None:
        super().__init__()
        self._name = name
        self._function = function
        self._items = items
        self._block_bytes = block_bytes

    def get_name(self) -> str:
        return self._name

    def estimate_inmemory_data_size(self) -> int:
        return self._block_bytes * len(self._items)

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: Any = None
    ) -> list[ReadTask]:
        metadata = BlockMetadata(
            num_rows=None, size_bytes=self._block_bytes, exec_stats=None, input_files=None
        )
        return [
            ReadTask(functools.partial(_run, self._function, item), metadata)
            for item in self._items
        ]


def _run(function: Task, item: Any) -> list[pa.Table]:
    return [function(item)]


def _run_with_retry(max_outage_s: float, function: Task, item: Any) -> pa.Table:
    with storage.retry_timeout(max_outage_s):
        return function(item)


@dataclass(frozen=True)
class ConcurrencyLimits:
    """Concurrency limits of one Dataset."""

    tasks: int
    """Maximum number of tasks that run or wait for a CPU."""
    blocks: int
    """Maximum number of blocks in progress or waiting for the reader."""

    @classmethod
    def compute(
        cls, placement: TaskPlacement, *, block_bytes: int, prefetch_blocks: int
    ) -> ConcurrencyLimits:
        """Compute limits for a placement. Allows twice as many tasks as run at once, because the
        scheduling loop of Ray Data 2.60 takes up to 0.2 s to detect the end of a task. Allows
        `prefetch_blocks` more blocks than tasks, if they and the reader's blocks fit into the
        object-store memory of the placement.
        """
        cpus = (
            ray.cluster_resources().get("CPU", 1.0)
            if placement.max_cpus is None
            else placement.max_cpus
        )
        tasks = 2 * max(1, math.floor(cpus / placement.num_cpus))
        blocks = tasks + prefetch_blocks
        if placement.max_object_store_bytes is not None:
            blocks = max(
                1,
                min(
                    blocks, placement.max_object_store_bytes // max(1, block_bytes) - _READER_BLOCKS
                ),
            )
        return cls(min(tasks, blocks), blocks)


@final
class _LimitPolicy(BackpressurePolicy):
    """Backpressure policy that limits an operator's tasks and blocks by number. The default policy
    limits them by a resource budget, which is zero in a Dataset's first second, because Ray 2.60
    polls it once per second. Until then one task runs.
    """

    def __init__(
        self, data_context: Any, topology: Any, resource_manager: Any, *, limits: ConcurrencyLimits
    ) -> None:
        super().__init__(data_context, topology, resource_manager)
        self._limits = limits
        self._operators = topology

    def can_add_input(self, op: Any) -> bool:
        active = op.num_active_tasks()
        return (
            active < self._limits.tasks
            and active + self._operators[op].total_enqueued_output_blocks() < self._limits.blocks
        )


def tasks_dataset(
    name: str,
    function: Task,
    items: Sequence[Any],
    *,
    placement: TaskPlacement,
    block_bytes: int = 16 << 20,
    limits: ConcurrencyLimits | None = None,
    environment: Mapping[str, str] | None = None,
    dataset_name: str | None = None,
) -> ray.data.Dataset:
    """Create a Dataset with one block per item, in order. `function` is picklable and called in
    data tasks. `block_bytes` is the expected block size. `limits` keep tasks from filling the
    object store ahead of a slow reader; None submits all tasks at once. `environment` has variables
    of the tasks. `dataset_name` begins the Dataset's id in Ray's metrics and dashboard.
    """
    if placement.max_outage_s is not None:
        function = functools.partial(_run_with_retry, placement.max_outage_s, function)
    context = ray.data.DataContext.get_current().copy()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    # With reservation, Ray Data 2.60 keeps a pipeline's CPUs idle for up to a third of the time.
    # Without, none are in reserve.
    context.op_resource_reservation_enabled = False
    policies = [] if limits is None else [functools.partial(_LimitPolicy, limits=limits)]
    context.set_config(ENABLED_BACKPRESSURE_POLICIES_CONFIG_KEY, policies)
    context.execution_options = ExecutionOptions(
        preserve_order=True,
        resource_limits=ExecutionResources.for_limits(
            cpu=placement.max_cpus, object_store_memory=placement.max_object_store_bytes
        ),
    )
    with ray.data.DataContext.current(context):
        dataset = ray.data.read_datasource(
            _Items(name, function, items, block_bytes),
            override_num_blocks=len(items),
            num_cpus=placement.num_cpus,
            memory=placement.memory_bytes,
            label_selector=placement.label_selector,
            runtime_env={"env_vars": dict(environment)} if environment else None,
        )
    if dataset_name is not None:
        dataset.set_name(dataset_name)
    return dataset


@dataclass(frozen=True)
class RayShared(Generic[_Value]):
    """Value in Ray's object store. Processes of a node read its arrays without copying."""

    reference: ray.ObjectRef

    def get(self) -> _Value:
        return _read(self.reference)


_read: Callable[[ray.ObjectRef], Any] = lru_cache(maxsize=2)(ray.get)


@dataclass(frozen=True)
class RayEngine:
    """Engine that runs data tasks on the connected Ray cluster. Implements `Engine` and
    `StreamEngine`.
    """

    placement: TaskPlacement
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Environment variables of the task processes."""
    owner: str = "rayrec"
    """Beginning of the Datasets' names: the run, and the worker."""
    stop: StopToken = dataclasses.field(default_factory=StopToken, compare=False)

    @property
    def cpus(self) -> float:
        return self.placement.max_cpus or self.placement.num_cpus

    def run(
        self, name: str, function: Task, items: Sequence[Any], *, block_bytes: int = 16 << 20
    ) -> Iterator[pa.Table]:
        if items:
            # No limits: results are small compared with the tasks' inputs, and merged on arrival.
            yield from self._tables(name, function, items, block_bytes=block_bytes)

    def stream(
        self,
        name: str,
        function: Task,
        items: Iterable[Any],
        *,
        block_bytes: int,
        prefetch_blocks: int,
    ) -> Tables:
        started = False

        def tables_of(some: Sequence[Any]) -> Tables:
            nonlocal started
            limits = {
                size: ConcurrencyLimits.compute(
                    self.placement,
                    block_bytes=block_bytes * size,
                    prefetch_blocks=-(-prefetch_blocks // size),
                )
                for size in (1, ITEMS_A_TASK)
            }
            # The object store may be too small.
            size = ITEMS_A_TASK if limits[ITEMS_A_TASK].tasks == limits[1].tasks else 1
            groups = group_items(some, first=0 if started else limits[1].tasks, size=size)
            started = True
            merged = functools.partial(merge_tables, function)
            for table in self._tables(
                name, merged, groups, block_bytes=block_bytes * size, limits=limits[size]
            ):
                yield from split_table(table)

        return _chain_groups(_groups(items), tables_of, self.stop)

    def _tables(
        self,
        name: str,
        function: Task,
        items: Sequence[Any],
        *,
        block_bytes: int,
        limits: ConcurrencyLimits | None = None,
    ) -> Tables:
        dataset = tasks_dataset(
            name,
            function,
            items,
            placement=self.placement,
            block_bytes=block_bytes,
            limits=limits,
            environment=self.environment,
            dataset_name=f"{self.owner}_{name}",
        )
        yield from tables(dataset)

    def share(self, value: _Value) -> Shared[_Value]:
        return RayShared(ray.put(value))


def group_items(items: Sequence[Any], *, first: int, size: int) -> list[Sequence[Any]]:
    """Group items into tasks: one item in each of the `first` tasks, for low latency, and `size`
    items in the others.
    """
    singles = items[:first]
    rest = items[first:]
    return [
        *([item] for item in singles),
        *(rest[start : start + size] for start in range(0, len(rest), size)),
    ]


def merge_tables(function: Task, items: Sequence[Any]) -> pa.Table:
    """Concatenate the tables of several items for `split_table`."""
    results = [function(item) for item in items]
    if len(results) == 1:
        return results[0]
    metadata = (
        {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
        for table in results
    )
    entries = json.dumps(
        [(table.num_rows, values) for table, values in zip(results, metadata, strict=True)]
    )
    return pa.concat_tables(
        [table.replace_schema_metadata(None) for table in results]
    ).replace_schema_metadata({_ITEMS: entries})


def split_table(table: pa.Table) -> Iterator[pa.Table]:
    """Split a task's table into the tables of its items, in order and without copying."""
    entries = (table.schema.metadata or {}).get(_ITEMS)
    if entries is None:
        yield table
        return
    start = 0
    for rows, metadata in json.loads(entries):
        yield table.slice(start, rows).replace_schema_metadata(metadata or None)
        start += rows


def _groups(items: Iterable[Any]) -> Iterator[Sequence[Any]]:
    source = iter(items)
    sizes = chain(_ITEMS_A_DATASET, repeat(_ITEMS_A_DATASET[-1]))
    return takewhile(bool, (list(islice(source, size)) for size in sizes))


def _chain_groups(
    groups: Iterable[Sequence[Any]], tables_of: Callable[[Sequence[Any]], Tables], stop: StopToken
) -> Tables:
    """Yield the tables of each group, one per item. When `_EARLY_START_ITEMS` items of a group
    remain, a thread starts the tasks of the next group by requesting its first table.
    """
    with contextlib.ExitStack() as opened:
        source = iter(groups)
        group = next(source, ())
        following = None
        while group:
            present = following or opened.enter_context(contextlib.closing(tables_of(group)))
            next_group = next(source, ())
            following = None
            for index, table in enumerate(present):
                if following is None and next_group and index + _EARLY_START_ITEMS >= len(group):
                    following = opened.enter_context(
                        contextlib.closing(_EagerIterator(tables_of(next_group), stop))
                    )
                yield table
            present.close()
            group = next_group


class _EagerIterator:
    """Iterator whose first value is computed in a daemon thread."""

    # The first value of a Dataset's tables starts its tasks and takes a second, in which the reader
    # still has tables of the previous Dataset. The thread is a daemon because Ray Data cannot be
    # interrupted: it may wait for lost nodes when the process ends. It has the caller's context
    # variables, such as the storage timeout.

    def __init__(self, values: Tables, stop: StopToken) -> None:
        self._values = values
        self._stop = stop
        # None if there is no table. A Future also hands an error of the thread to the reader.
        self._first: Future[pa.Table | None] = Future()
        threading.Thread(
            target=copy_context().run, args=(self._make,), name="next-dataset", daemon=True
        ).start()

    def __iter__(self) -> Iterator[pa.Table]:
        first = self._first.result()
        if first is not None:
            yield first
            yield from self._values

    def close(self) -> None:
        wait([self._first], timeout=0 if self._stop.is_set() else _CLOSE_S)
        if self._first.done():  # A running generator cannot be closed.
            self._values.close()

    def _make(self) -> None:
        try:
            self._first.set_result(next(self._values, None))
        except BaseException as error:  # Raised to the reader.
            self._first.set_exception(error)


def tables(dataset: ray.data.Dataset) -> Tables:
    """Yield the blocks of a Dataset in order. Raises the InputError of a task unchanged."""
    try:
        # With `ray start`, usage statistics of Ray Data 2.60 are an actor, and in each process a
        # thread that logs failed connections to Prometheus every 10 s. Python before 3.11.8 parses
        # code to print a stack, which lets concurrent parsing (such as torch imports) fail with
        # "AST constructor recursion depth mismatch".
        with temporary_environment({"RAY_DATA_USAGE_DISABLED": "1"}, override=False):
            # With prefetch_batches=n, Ray Data returns the first block only after n more. It
            # prefetches anyway.
            yield from dataset.iter_batches(
                batch_size=None, batch_format="pyarrow", prefetch_batches=0
            )
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, InputError):
            # Ray Data appends advice.
            raise InputError(str(error.cause).partition("\n")[0]) from None
        raise


@contextmanager
def input_errors() -> Iterator[None]:
    """Convert Ray's error for an InputError in a Ray Data actor back to that InputError. Ray Data
    2.60 keeps only the text of the traceback (UserCodeException drops its cause).
    """
    logger = logging.getLogger("ray.data")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # Ray Data logs errors before raising them.
    message = ""
    try:
        yield
    except ray.exceptions.RayError as error:
        messages = re.findall(r"^rayrec\.config\.InputError: (.+)$", str(error), re.MULTILINE)
        if not messages:
            raise
        message = messages[-1]
    finally:
        logger.setLevel(level)
    if message:
        # Raised outside the handler: with the failure as its context, this exception would keep the
        # failed pipeline, its actors and their CPUs alive.
        gc.collect()
        raise InputError(message)
