"""Parallel range reads: object stores answer slowly, but many requests at once."""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from contextvars import copy_context
from itertools import islice, repeat, takewhile
from typing import Final, TypeVar

import pyarrow as pa
from pyarrow import fs as arrow_fs

from rayrec.storage.filesystems import with_retries
from rayrec.storage.urls import is_url

_Result = TypeVar("_Result")
_Item = TypeVar("_Item")

NUM_REQUESTS: Final = 32
"""Number of requests to a store that one call has in flight."""


def in_parallel(
    function: Callable[[_Item], _Result], items: Sequence[_Item], *, path: str
) -> Iterator[_Result]:
    """Map `function` over the items, in order: with up to NUM_REQUESTS parallel calls if `path` is
    a URL, else sequentially. Calls run in copies of the caller's context (see `retry_timeout`), and
    are cancelled if the caller stops or one raises.
    """
    if not is_url(path) or len(items) < 2:
        yield from map(function, items)
    else:
        yield from in_order(
            function, items, name="store", num_threads=min(NUM_REQUESTS, len(items)), prefetch=0
        )


def in_order(
    function: Callable[[_Item], _Result],
    items: Iterable[_Item],
    *,
    name: str,
    num_threads: int,
    prefetch: int,
) -> Generator[_Result, None, None]:
    """Yield the function's values for the items in order, computed by threads in copies of the
    context. Raises in order. At most `num_threads` + `prefetch` values exist or are in progress, in
    addition to the reader's current one.
    """
    context = copy_context()

    def results() -> Generator[_Result, None, None]:
        futures: deque[Future[_Result]] = deque()
        with ThreadPoolExecutor(num_threads, thread_name_prefix=name) as pool:
            try:
                for item in items:
                    futures.append(pool.submit(context.copy().run, function, item))
                    if len(futures) >= num_threads + prefetch:
                        yield futures.popleft().result()
                while futures:
                    yield futures.popleft().result()
            finally:
                pool.shutdown(wait=True, cancel_futures=True)

    return results()


# The pool's only thread asks for one item at a time, so the iterator needs no lock:
#
#   reader    uses item n                asks for one more when it takes the next
#   thread    makes items after n        waits if `ahead` and one more are not taken yet
#
# An empty list marks the end. An error of the iterator is raised in its place.
def read_ahead(items: Iterator[_Item], *, name: str, ahead: int) -> Iterator[_Item]:
    """Yield the items in order. A thread makes the next ones, up to `ahead` and one in progress,
    while the reader uses one.
    """
    results = in_order(
        lambda _: list(islice(items, 1)), repeat(None), name=name, num_threads=1, prefetch=ahead
    )
    with closing(results):
        for item in takewhile(bool, results):
            yield from item


def read_url(path: str, start: int, size: int) -> pa.Buffer:
    """Read up to `size` bytes from `start` with one request. Thread-safe. Raises FileNotFoundError
    without the file.
    """

    def read(filesystem: arrow_fs.FileSystem, inner: str) -> pa.Buffer:
        with filesystem.open_input_file(inner) as file:
            file.seek(start)
            return file.read_buffer(size)

    return with_retries(path, read)
