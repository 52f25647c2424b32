"""The default engine: one function over many items as Ray Data read tasks, one block an item, placed and limited as told."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import json
import logging
import math
import os
import re
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, islice, repeat
from typing import Any, Final, Generic, TypeVar, final

import pyarrow as pa
import ray
import ray.data
from ray.data import Datasource, ExecutionOptions, ExecutionResources, ReadTask
from ray.data.block import BlockMetadata

from rayrec import storage
from rayrec.compat.ray_compat import ENABLED_BACKPRESSURE_POLICIES_CONFIG_KEY, BackpressurePolicy, PhysicalOperator
from rayrec.config import InputError
from rayrec.data.engine import STOP_ASKED, Shared, TaskPlacement

_ITEMS_A_DATASET: Final = (64, 256, 1024)
"""Of the first Datasets of a stream, the last number also of all that follow: some 32 GB of text, at the usual size of a block. A
Dataset stores all its read tasks, each in a millisecond or so, before it makes the first row."""
ITEMS_A_TASK: Final = 2
"""Of a stream, behind its first tasks. Of the time of a task that makes a block of the usual size Ray takes a fifth, whatever the
task makes. With four items it gains no more."""
_ITEMS: Final = b"rayrec.items"
"""The key of a table's metadata under which a task of several items stores their rows and metadata."""
_STARTED_AHEAD: Final = 16
"""Items left of a Dataset when the next one starts: it takes a second or so to make its first rows."""
_CLOSE_S: Final = 5.0
_READERS_BLOCKS: Final = 3
"""Blocks that Ray Data's iterator and the threads between it and the reader hold."""
_Value = TypeVar("_Value")


class _Items(Datasource):
    def __init__(self, name: str, function: Callable[[Any], pa.Table], items: Sequence[Any], block_bytes: int) -> None:
        super().__init__()
        self._name, self._function, self._items, self._block_bytes = name, function, items, block_bytes

    def get_name(self) -> str:
        return self._name

    def estimate_inmemory_data_size(self) -> int:
        return self._block_bytes * len(self._items)

    def get_read_tasks(self, parallelism: int, per_task_row_limit: int | None = None, data_context: Any = None) -> list[ReadTask]:
        metadata = BlockMetadata(num_rows=None, size_bytes=self._block_bytes, exec_stats=None, input_files=None)
        return [ReadTask(functools.partial(_run, self._function, item), metadata) for item in self._items]


def _run(function: Callable[[Any], pa.Table], item: Any) -> list[pa.Table]:
    return [function(item)]


def _patient(max_outage_s: float, function: Callable[[Any], pa.Table], item: Any) -> pa.Table:
    with storage.patience(max_outage_s):
        return function(item)


def _without_usage_statistics() -> None:
    """On a cluster of `ray start` Ray Data 2.60 has an actor for them, and in every process a thread that logs every ten seconds
    how it did not reach a Prometheus. Python before 3.11.8 parses code to print a stack, and what else is parsed at that moment
    fails with "AST constructor recursion depth mismatch": torch's imports, for one."""
    os.environ.setdefault("RAY_DATA_USAGE_DISABLED", "1")


@dataclass(frozen=True)
class Bounds:
    """Limits of the tasks and blocks of one Dataset."""

    tasks: int
    """Tasks that run or wait for a CPU."""
    blocks: int
    """Blocks that are being made or wait for the reader."""

    @classmethod
    def of(cls, placement: TaskPlacement, *, block_bytes: int, prefetch_blocks: int) -> Bounds:
        """Twice as many tasks as run at once: Ray Data's scheduling loop (2.60) needs up to 0.2 s to see that a task is done, and
        no CPU is to wait for it. `prefetch_blocks` blocks more than that, as far as the placement's object-store memory has room
        for them and for those that the reader has taken."""
        cpus = ray.cluster_resources().get("CPU", 1.0) if placement.max_cpus is None else placement.max_cpus
        tasks = 2 * max(1, math.floor(cpus / placement.num_cpus))
        blocks = tasks + prefetch_blocks
        if placement.max_object_store_bytes is not None:
            blocks = min(blocks, placement.max_object_store_bytes // max(1, block_bytes) - _READERS_BLOCKS)
        blocks = max(1, blocks)
        return cls(min(tasks, blocks), blocks)


@final
class _Bounded(BackpressurePolicy):
    """Limits an operator's tasks and blocks by number.

    Ray Data's own policy limits them by a budget of resources, which is zero in a Dataset's first second: Ray 2.60 reads it once
    a second, and the first answer comes later. Only one task runs at a time until then.
    """

    def __init__(self, data_context: Any, topology: Any, resource_manager: Any, *, bounds: Bounds) -> None:
        super().__init__(data_context, topology, resource_manager)
        self._bounds = bounds
        self._operators = topology

    def can_add_input(self, op: PhysicalOperator) -> bool:
        active = op.num_active_tasks()
        return active < self._bounds.tasks and active + self._operators[op].total_enqueued_output_blocks() < self._bounds.blocks


def tasks_dataset(
    name: str,
    function: Callable[[Any], pa.Table],
    items: Sequence[Any],
    *,
    placement: TaskPlacement,
    block_bytes: int = 16 << 20,
    bounds: Bounds | None = None,
    environment: Mapping[str, str] | None = None,
) -> ray.data.Dataset:
    """A Dataset with one block an item, in the items' order. `function` runs in data tasks and must be picklable;
    `block_bytes` is the expected size of a block.

    `bounds` keep a reader that is slower than the tasks from filling the object store; without them all tasks are submitted at
    once. `environment`: variables of the tasks' processes.
    """
    if placement.max_outage_s is not None:
        function = functools.partial(_patient, placement.max_outage_s, function)
    _without_usage_statistics()
    context = ray.data.DataContext.get_current().copy()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.op_resource_reservation_enabled = False
    policies = [] if bounds is None else [functools.partial(_Bounded, bounds=bounds)]
    context.set_config(ENABLED_BACKPRESSURE_POLICIES_CONFIG_KEY, policies)
    context.execution_options = ExecutionOptions(
        preserve_order=True,
        resource_limits=ExecutionResources.for_limits(
            cpu=placement.max_cpus, object_store_memory=placement.max_object_store_bytes
        ),
    )
    with ray.data.DataContext.current(context):
        return ray.data.read_datasource(
            _Items(name, function, items, block_bytes),
            override_num_blocks=len(items),
            num_cpus=placement.num_cpus,
            label_selector=placement.label_selector,
            runtime_env={"env_vars": dict(environment)} if environment else None,
        )


@dataclass(frozen=True)
class RayShared(Generic[_Value]):
    """A value in Ray's object store; its arrays are read there by all processes of a node, uncopied."""

    reference: ray.ObjectRef

    def get(self) -> _Value:
        return _read(self.reference)


@lru_cache(maxsize=2)
def _read(reference: ray.ObjectRef) -> Any:
    return ray.get(reference)


@dataclass(frozen=True)
class RayEngine:
    """Runs data tasks on the connected Ray cluster; see `Engine` and `StreamEngine`."""

    placement: TaskPlacement
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Variables of the tasks' processes."""

    @property
    def cpus(self) -> float:
        return self.placement.max_cpus or self.placement.num_cpus

    def run(
        self, name: str, function: Callable[[Any], pa.Table], items: Sequence[Any], *, block_bytes: int = 16 << 20
    ) -> Iterator[pa.Table]:
        if items:
            # Results are small compared with what the tasks read, and merged as they come.
            yield from tables(
                tasks_dataset(
                    name, function, items, placement=self.placement, block_bytes=block_bytes, environment=self.environment
                )
            )

    def stream(
        self, name: str, function: Callable[[Any], pa.Table], items: Iterable[Any], *, block_bytes: int, prefetch_blocks: int
    ) -> Generator[pa.Table, None, None]:
        begun = False

        def tables_of(some: Sequence[Any]) -> Generator[pa.Table, None, None]:
            nonlocal begun
            one, several = (
                Bounds.of(self.placement, block_bytes=block_bytes * size, prefetch_blocks=-(-prefetch_blocks // size))
                for size in (1, ITEMS_A_TASK)
            )
            size = ITEMS_A_TASK if several.tasks == one.tasks else 1  # the object store may be too small
            first, begun = 0 if begun else one.tasks, True
            dataset = tasks_dataset(
                name,
                functools.partial(joined_tables, function),
                items_of_tasks(some, first=first, size=size),
                placement=self.placement,
                block_bytes=block_bytes * size,
                bounds=several if size > 1 else one,
                environment=self.environment,
            )
            for table in tables(dataset):
                yield from tables_apart(table)

        return _one_after_another(_groups(items), tables_of)

    def share(self, value: _Value) -> Shared[_Value]:
        return RayShared(ray.put(value))


def items_of_tasks(items: Sequence[Any], *, first: int, size: int) -> list[Sequence[Any]]:
    """The items of each task: one of the `first` tasks, whose rows are waited for, `size` of the others."""
    singles, others = items[:first], items[first:]
    return [*([item] for item in singles), *(others[start : start + size] for start in range(0, len(others), size))]


def joined_tables(function: Callable[[Any], pa.Table], items: Sequence[Any]) -> pa.Table:
    """The function's tables, as one that `tables_apart` divides."""
    made = [function(item) for item in items]
    if len(made) == 1:
        return made[0]
    kept = [
        (table.num_rows, {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}) for table in made
    ]
    table = pa.concat_tables([table.replace_schema_metadata(None) for table in made])
    return table.replace_schema_metadata({_ITEMS: json.dumps(kept)})


def tables_apart(table: pa.Table) -> Iterator[pa.Table]:
    """The tables of a task's items, in order; uncopied."""
    kept = (table.schema.metadata or {}).get(_ITEMS)
    if kept is None:
        yield table
        return
    start = 0
    for rows, metadata in json.loads(kept):
        yield table.slice(start, rows).replace_schema_metadata(metadata or None)
        start += rows


def _groups(items: Iterable[Any]) -> Iterator[Sequence[Any]]:
    """The items of one Dataset each."""
    source = iter(items)
    for size in chain(_ITEMS_A_DATASET, repeat(_ITEMS_A_DATASET[-1])):
        group = list(islice(source, size))
        if not group:
            return
        yield group


def _one_after_another(
    groups: Iterable[Sequence[Any]], tables_of: Callable[[Sequence[Any]], Generator[pa.Table, None, None]]
) -> Generator[pa.Table, None, None]:
    """The tables of each group, one for each of its items. A thread makes the first table of the next group, and so starts its
    tasks, when `_STARTED_AHEAD` of the present group are left."""
    with contextlib.ExitStack() as opened:
        source = iter(groups)
        group, following = next(source, ()), None
        while group:
            present = following or opened.enter_context(contextlib.closing(tables_of(group)))
            next_group, following = next(source, ()), None
            for place, table in enumerate(present):
                if following is None and next_group and place + _STARTED_AHEAD >= len(group):
                    following = opened.enter_context(contextlib.closing(_Started(tables_of(next_group))))
                yield table
            present.close()
            group = next_group


class _Started:
    """An iterator whose first value is made in a thread, which does not keep the process alive."""

    def __init__(self, values: Generator[pa.Table, None, None]) -> None:
        self._values = values
        self._first: Future[pa.Table | None] = Future()
        threading.Thread(target=copy_context().run, args=(self._make,), name="next-dataset", daemon=True).start()

    def __iter__(self) -> Iterator[pa.Table]:
        first = self._first.result()
        if first is not None:
            yield first
            yield from self._values

    def close(self) -> None:
        wait([self._first], timeout=0 if STOP_ASKED.is_set() else _CLOSE_S)
        if self._first.done():  # a generator that runs cannot be closed
            self._values.close()

    def _make(self) -> None:
        try:
            self._first.set_result(next(self._values, None))
        except BaseException as error:  # raised where the table is asked for
            self._first.set_exception(error)


def tables(dataset: ray.data.Dataset) -> Generator[pa.Table, None, None]:
    """The blocks of a Dataset, in order. An InputError of a task is raised unchanged, in one line."""
    try:
        # With prefetch_batches=n, Ray Data would return the first block only when n more are made. It reads ahead without.
        yield from dataset.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0)
    except ray.exceptions.RayTaskError as error:
        raise_input_error(error)
        raise


def raise_input_error(error: ray.exceptions.RayTaskError) -> None:
    """Raises the InputError behind a failed task, if that is what it was, without Ray's traceback."""
    if isinstance(error.cause, InputError):
        raise InputError(str(error.cause).partition("\n")[0]) from None  # Ray Data adds lines of its own advice


@contextmanager
def input_errors() -> Iterator[None]:
    """Turns what Ray made of an InputError on its way from an actor of Ray Data into that InputError again.

    Ray Data keeps only the traceback's text of what a function raised (2.60: UserCodeException drops its cause).
    """
    logger = logging.getLogger("ray.data")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # it logs what it then raises
    message = ""
    try:
        yield
    except ray.exceptions.RayError as error:
        found = re.findall(r"^rayrec\.config\.InputError: (.+)$", str(error), re.MULTILINE)
        if not found:
            raise
        message = found[-1]
    finally:
        logger.setLevel(level)
    if message:
        # Raised here, without the failure as its context: that would keep the failed pipeline, its actors and their
        # CPUs alive as long as anybody holds this exception.
        gc.collect()
        raise InputError(message)
