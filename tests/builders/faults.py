"""Functions that fail, bytes that change, and waiting for what comes of it."""

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from rayrec import storage
from rayrec.config import InputError


def raising(error: BaseException) -> Callable[..., Any]:
    """Return a function that raises an error at every call."""

    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


class Trap:
    """Object that fails the test if it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return pytest.fail, ("executed",)


def at_first(
    errors: Iterable[BaseException],
    function: Callable[..., Any] = lambda *_, **__: None,
    *,
    end: str = "",
) -> Callable[..., Any]:
    """Return a function that raises the errors, one at each call, and then does what another one
    does.

    `end`: only calls whose first argument, a path, ends so raise.
    """
    left = list(errors)

    def call(*arguments: Any, **named: Any) -> Any:
        if left and (not end or arguments[0].endswith(end)):
            raise left.pop(0)
        return function(*arguments, **named)

    return call


def unreadable(patch: pytest.MonkeyPatch, end: str, error: Exception) -> None:
    """Make every read of a file whose path ends so raise an error."""

    def opened(path: str, mode: str) -> Any:
        if path.endswith(end):
            raise error
        return open(path, mode)

    patch.setattr(storage.files, "open", opened, raising=False)


def watched(patch: pytest.MonkeyPatch, owner: Any, name: str) -> list[tuple[Any, ...]]:
    """Record each call of a function: its arguments, then its result."""
    function = getattr(owner, name)
    calls = list[tuple[Any, ...]]()

    def call(*arguments: Any, **named: Any) -> Any:
        calls.append((*arguments, result := function(*arguments, **named)))
        return result

    patch.setattr(owner, name, call)
    return calls


def fails_with(
    error: type[BaseException],
    message: str,
    call: Callable[..., Any],
    /,
    *arguments: Any,
    **named: Any,
) -> str:
    """Check that a call raises an error that matches a pattern. Returns its text."""
    with pytest.raises(error, match=message) as raised:
        call(*arguments, **named)
    return str(raised.value)


def rejects(message: str, call: Callable[..., Any], /, *arguments: Any, **named: Any) -> str:
    """Check that a call raises an InputError of one line, which matches a pattern. Returns the
    line.
    """
    line = fails_with(InputError, message, call, *arguments, **named)
    assert "\n" not in line
    return line


def flip(path: str | Path, place: int | None = None, *, bit: int = 1) -> None:
    """Change a bit of a file, of the byte in the middle if no place is given."""
    data = bytearray(Path(path).read_bytes())
    data[len(data) // 2 if place is None else place] ^= bit
    Path(path).write_bytes(data)


def until(
    condition: Callable[[], Any],
    *,
    timeout_s: float = 60,
    pause_s: float = 0.01,
    reported: Callable[[], object] = str,
) -> Any:
    """Wait for a condition, and return its value. `reported`: more text of the error if it does
    not come.
    """
    deadline_s = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline_s, f"not within {timeout_s:g} s: {reported()}"
        time.sleep(pause_s)
    return found
