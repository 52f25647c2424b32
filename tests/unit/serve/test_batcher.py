"""Request batching: order, batch sizes and full queues."""

import asyncio
import itertools
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest
from builders.click_models import make_app, make_model, row_text
from builders.requests import post_async

from rayrec.serve.batcher import INLINE_BYTES, INLINE_ROWS, Batcher
from rayrec.serve.config import ServeConfig
from rayrec.serve.requests import RequestBody, RequestError


class Model:
    """Model that answers each body with its rows, when allowed."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.may = threading.Semaphore(0)

    def __call__(self, bodies: Sequence[RequestBody]) -> list[Any]:
        self.batches.append([body.num_rows for body in bodies])
        assert self.may.acquire(timeout=60)
        return [
            RequestError(400, "bad") if body.num_rows == 13 else body.num_rows for body in bodies
        ]


@pytest.fixture(autouse=True)
def _in_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Score in the thread, which a test can block."""
    monkeypatch.setattr("rayrec.serve.batcher.INLINE_ROWS", 0)


LIMITS = {
    "max_batch_rows": 100,
    "max_batch_bytes": 1000,
    "max_waiting_rows": 1000,
    "max_waiting_requests": 100,
}


def _batcher(score: Callable[[Sequence[RequestBody]], list[Any]], **limits: int) -> Batcher:
    return Batcher(score, ServeConfig(**{**LIMITS, **limits}))


def _in_loop(test: Callable[[Model], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Run an async test with a new model."""

    def run() -> None:
        asyncio.run(asyncio.wait_for(test(Model()), 120))

    return run


async def _submit(batcher: Batcher, *rows: int) -> list[asyncio.Task[Any]]:
    tasks = [
        asyncio.ensure_future(batcher.submit(RequestBody("tsv", count, count))) for count in rows
    ]
    await asyncio.sleep(0.02)
    return tasks


@_in_loop
async def test_waiting_requests_form_batches_of_limited_size(model: Model) -> None:
    for limits, batches in (
        ({}, [[1], [2, 30, 60], [20], [300], [5]]),
        ({"max_batch_bytes": 50}, [[1], [20, 30], [1], [51], [2, 3]]),
    ):
        batcher = _batcher(model, **limits)
        model.batches = []
        first, *waiting = itertools.chain(*batches)
        tasks = [*await _submit(batcher, first), *await _submit(batcher, *waiting)]
        assert (batcher.waiting_requests, batcher.waiting_rows) == (6, sum(waiting))
        model.may.release(len(batches))
        assert await asyncio.gather(*tasks) == [first, *waiting]
        assert (batcher.waiting_rows, model.batches) == (0, batches)


@_in_loop
async def test_small_batches_run_in_event_loop(model: Model) -> None:
    """Requests that are ready at once form a batch, in order, before and after batches of the
    thread.
    """
    threads: list[str] = []

    def score(bodies: Sequence[RequestBody]) -> list[Any]:
        threads.append(threading.current_thread().name.partition("_")[0])
        return model(bodies)

    batcher = _batcher(score, max_batch_bytes=1 << 20)
    model.may.release(9)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rayrec.serve.batcher.INLINE_ROWS", INLINE_ROWS)
        result = await asyncio.gather(
            *await _submit(batcher, 1, 13, 2, 3, 99, 4), return_exceptions=True
        )
        assert [result[0], *result[2:]] == [1, 2, 3, 99, 4]
        assert isinstance(result[1], RequestError)
        assert await batcher.submit(RequestBody("json", 5, INLINE_BYTES + 1)) == 5
        assert await batcher.submit(RequestBody("json", 6, INLINE_BYTES)) == 6
    assert model.batches == [[1, 13, 2, 3], [99], [4], [5], [6]]
    assert threads == [
        "MainThread",
        "score",
        "MainThread",
        "score",
        "MainThread",
    ]


@_in_loop
async def test_rejected_and_cancelled_bodies(model: Model) -> None:
    batcher = _batcher(model)
    tasks = [*await _submit(batcher, 1), *await _submit(batcher, 13, 7, 8)]
    assert batcher.waiting_rows == 13 + 7 + 8
    tasks[2].cancel()
    await asyncio.sleep(0.02)
    assert batcher.waiting_rows == 13 + 8
    model.may.release(9)
    with pytest.raises(RequestError, match="bad"):
        await tasks[1]
    assert (await tasks[3], model.batches) == (8, [[1], [13, 8]])


@_in_loop
async def test_full_queue_rejects_requests(model: Model) -> None:
    batcher = _batcher(model, max_waiting_rows=50, max_waiting_requests=3)
    tasks = [*await _submit(batcher, 1), *await _submit(batcher, 40)]
    with pytest.raises(RequestError) as error:
        await batcher.submit(RequestBody("tsv", 11, 11))
    assert (error.value.status, error.value.headers) == (503, {"retry-after": "1"})
    tasks += await _submit(batcher, 5, 5)
    with pytest.raises(RequestError):
        await batcher.submit(RequestBody("tsv", 0, 0))
    model.may.release(9)
    await asyncio.gather(*tasks)
    (alone,) = await _submit(batcher, 51)  # more than may wait, but nothing does
    assert await alone == 51


@_in_loop
async def test_failure_affects_one_batch(model: Model) -> None:
    def fail(bodies: Sequence[RequestBody]) -> list[Any]:
        if bodies[0].num_rows == 2:
            raise ZeroDivisionError
        return model(bodies)

    model.may.release(9)
    result = await asyncio.gather(
        *await _submit(_batcher(fail, max_batch_rows=2), 1, 2, 1), return_exceptions=True
    )
    assert [result[0], result[2]] == [1, 1]
    assert isinstance(result[1], ZeroDivisionError)


def test_limits_over_http(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    app = make_app(make_model(), time_limit_s=1.0, max_waiting_requests=2)
    answer = app._batcher._score
    monkeypatch.setattr(app._batcher, "_score", lambda bodies: go_on.wait(60) and answer(bodies))

    async def scenario() -> list[int]:
        replies = await asyncio.gather(*(post_async(app, row_text(1)) for _ in range(5)))
        assert next(reply for reply in replies if reply.status == 503).headers["retry-after"] == "1"
        app._config = app._config.replace(time_limit_s=60.0)
        go_on.set()
        replies.sort(key=lambda reply: reply.status)
        return [reply.status for reply in (*replies, await post_async(app, row_text(1)))]

    assert asyncio.run(scenario()) == [503, 503, 503, 504, 504, 200]
