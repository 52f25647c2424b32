"""The processes that save and restore together, and how they agree on what to do and on what failed."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self, TypeVar

import torch
from torch import distributed

from rayrec.checkpoint.format import DamagedError, UnreadableError
from rayrec.config import InputError

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """All processes of the process group, or this one alone where none is up. Methods are collective.

    Objects travel as pickles between these live processes of one run and their group only, never by way of a file.
    """

    rank: int
    size: int
    group: Any = None
    """None: the default group."""

    @classmethod
    def all(cls) -> Self:
        if not distributed.is_initialized():
            return cls(0, 1)
        return cls(distributed.get_rank(), distributed.get_world_size())

    @classmethod
    def in_group_of_their_own(cls, *, timeout_s: float) -> Self:
        """With a gloo group for one thread's use: collectives of two threads must not meet in one group."""
        everyone = cls.all()
        if not distributed.is_initialized():
            return everyone
        group = distributed.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        return cls(everyone.rank, everyone.size, group)

    @property
    def first(self) -> bool:
        return self.rank == 0

    def any(self, *flags: bool) -> list[bool]:
        """For each flag whether it is set on any rank."""
        if self.size == 1:
            return list(flags)
        tensor = torch.tensor(flags, dtype=torch.uint8)
        distributed.all_reduce(tensor, distributed.ReduceOp.MAX, group=self.group)
        return [bool(flag) for flag in tensor.tolist()]

    def barrier(self) -> None:
        self.any(False)

    def gather(self, value: T) -> list[T]:
        """The values of all ranks on rank 0, nothing on the others."""
        if self.size == 1:
            return [value]
        everyone: list[Any] = [None] * self.size if self.first else []
        distributed.gather_object(value, everyone if self.first else None, dst=0, group=self.group)
        return everyone

    def gather_all(self, value: T) -> list[T]:
        if self.size == 1:
            return [value]
        everyone: list[Any] = [None] * self.size
        distributed.all_gather_object(everyone, value, group=self.group)
        return everyone

    def share(self, value: T) -> T:
        """The value of rank 0."""
        if self.size == 1:
            return value
        shared = [value if self.first else None]
        distributed.broadcast_object_list(shared, src=0, group=self.group)
        return shared[0]  # type: ignore[return-value]

    def from_first(self, function: Callable[[], T]) -> T:
        """What the function returns, or raises, on rank 0, where alone it is called."""
        outcome, failure = attempt(function) if self.first else (None, None)
        outcome, failure = self.share((outcome, failure))
        if failure is not None:
            raise failure
        return outcome  # type: ignore[return-value]

    def each(self, function: Callable[[], T]) -> list[T]:
        """What the function returns on each rank. Raises, on every rank, what it raised on one of them."""
        results = self.gather_all(attempt(function))
        raise_worst([failure for _, failure in results])
        return [outcome for outcome, _ in results]  # type: ignore[misc]

    def together(self, function: Callable[[], T]) -> T:
        """What the function returns on this rank. Raises, on every rank, what it raised on one of them."""
        outcome, failure = attempt(function)
        raise_worst(self.gather_all(failure))
        return outcome  # type: ignore[return-value]


def attempt(function: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return function(), None
    except Exception as error:
        return None, portable(error)


def portable(error: Exception) -> Exception:
    """The error, or one that says the same, as other ranks can unpickle it: not every exception of a library can be."""
    if type(error) in {InputError, DamagedError, UnreadableError, OSError, TypeError, ValueError, MemoryError}:
        return error
    if isinstance(error, InputError):
        return InputError(str(error))
    if isinstance(error, OSError):
        return OSError(error.errno, error.strerror or str(error)) if error.errno else OSError(str(error))
    told = RuntimeError(f"{type(error).__name__}: {error}")
    told.__cause__ = error  # seen on the rank where it happened
    return told


def raise_worst(failures: list[Exception | None]) -> None:
    """Raises one of the failures, the same for the same list: damage first, since the caller can help it."""
    for kind in (DamagedError, InputError, Exception):
        for failure in failures:
            if isinstance(failure, kind):
                raise failure
