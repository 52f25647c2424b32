"""Collectives over the processes that save and restore together."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self, TypeVar, cast

import torch
from torch import distributed

from rayrec.checkpoint.format import DamagedError, UnreadableError
from rayrec.config import InputError

T = TypeVar("T")


@dataclass(frozen=True)
class Communicator:
    """All processes of the default process group, or this process alone if it is not initialized.
    Methods are collective. Objects are pickled only between the live processes of one run, never
    read from a file.
    """

    rank: int
    size: int
    group: Any = None
    """None means the default group."""

    @classmethod
    def all(cls) -> Self:
        if not distributed.is_initialized():
            return cls(0, 1)
        return cls(distributed.get_rank(), distributed.get_world_size())

    @classmethod
    def with_new_group(cls, *, timeout_s: float) -> Self:
        """Create a gloo group for one thread: collectives of two threads must not share a group."""
        default = cls.all()
        if not distributed.is_initialized():
            return default
        group = distributed.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        return cls(default.rank, default.size, group)

    @property
    def first(self) -> bool:
        return self.rank == 0

    def any(self, *flags: bool) -> list[bool]:
        """Return for each flag whether any rank set it."""
        if self.size == 1:
            return list(flags)
        tensor = torch.tensor(flags, dtype=torch.uint8)
        # Flags are one byte each and travel together, so that a decision costs one round trip.
        distributed.all_reduce(tensor, distributed.ReduceOp.MAX, group=self.group)
        return [bool(flag) for flag in tensor.tolist()]

    def barrier(self) -> None:
        self.any(False)

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks on rank 0, an empty list on the others."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size if self.first else []
        distributed.gather_object(value, values if self.first else None, dst=0, group=self.group)
        return values

    def all_gather(self, value: T) -> list[T]:
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        distributed.all_gather_object(values, value, group=self.group)
        return values

    def broadcast(self, value: T) -> T:
        """Return the value of rank 0."""
        if self.size == 1:
            return value
        shared = [value]
        distributed.broadcast_object_list(shared, src=0, group=self.group)
        return shared[0]

    def run_on_rank0(self, function: Callable[[], T]) -> T:
        """Run the function on rank 0 only and broadcast its result or exception."""
        # The outcome and the failure travel in one broadcast, so that ranks that wait learn of a
        # failure at once instead of at the timeout.
        outcome, failure = attempt(function) if self.first else (None, None)
        outcome, failure = self.broadcast((outcome, failure))
        if failure is not None:
            raise failure
        return cast("T", outcome)

    def each(self, function: Callable[[], T]) -> list[T]:
        """Run the function on all ranks and return all results. If it raises on any rank, raise on
        every rank.
        """
        # No rank may raise before the collective: the others would wait in it.
        results = self.all_gather(attempt(function))
        raise_most_severe([failure for _, failure in results])
        return [cast("T", outcome) for outcome, _ in results]

    def run_on_all_ranks(self, function: Callable[[], T]) -> T:
        """Run the function on all ranks and return this rank's result. If it raises on any rank,
        raise on every rank.
        """
        outcome, failure = attempt(function)
        raise_most_severe(self.all_gather(failure))
        return cast("T", outcome)


def attempt(function: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return function(), None
    except Exception as error:
        return None, make_picklable(error)


def make_picklable(error: Exception) -> Exception:
    """Return the error, or an equivalent one that other ranks can unpickle: not all library
    exceptions can be.
    """
    if type(error) in {
        InputError,
        DamagedError,
        UnreadableError,
        OSError,
        TypeError,
        ValueError,
        MemoryError,
    }:
        return error
    if isinstance(error, InputError):
        return InputError(str(error))
    if isinstance(error, OSError):
        return (
            OSError(error.errno, error.strerror or str(error))
            if error.errno
            else OSError(str(error))
        )
    substitute = RuntimeError(f"{type(error).__name__}: {error}")
    substitute.__cause__ = error  # shown on the failing rank only
    return substitute


def raise_most_severe(failures: list[Exception | None]) -> None:
    """Raise the same failure on every rank, if there is one. DamagedError comes first, because
    callers can recover from it.
    """
    for kind in (DamagedError, InputError, Exception):
        for failure in failures:
            if isinstance(failure, kind):
                raise failure
