"""Console output errors never end a run."""

import errno
import io
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from builders import run_events
from rich.console import Console as RichConsole

from rayrec.config import InputError
from rayrec.observe.console import Console


class Stream(io.StringIO):
    """Standard error, as a terminal or not, optionally on a full disk."""

    def __init__(self, *, terminal: bool) -> None:
        super().__init__()
        self.terminal, self.full, self.num_errors = terminal, False, 0

    def isatty(self) -> bool:
        return self.terminal

    def write(self, text: str) -> int:
        if self.full:
            self.num_errors += 1
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(text)


@pytest.fixture(params=[True, False])
def stream(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Stream:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    return Stream(terminal=request.param)


def use(console: Console) -> list[str]:
    """Use the console like a run and return the completed parts."""
    done = []
    console.note("a note")
    with console.preparing():
        for number in range(3):
            console.progress("count", number + 1, 3)
        done.append("prepared")
    events = [{**event, "time": time.time()} for event in run_events.run()]
    with console.training(lambda stop: iter(events)):
        time.sleep(0.4)  # a few refreshes
        done.append("trained")
    console.table("result", [("auroc", "0.8")])
    return done


def test_console_survives_full_disk_and_closed_stream(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    stream.full, console = True, Console()
    assert use(console) == ["prepared", "trained"]
    assert stream.num_errors >= 3
    assert sys.stderr is stream
    stream.full = False
    console.note("there is room again")
    assert stream.getvalue().strip().endswith("there is room again")
    assert "a note" not in stream.getvalue()  # Lost output stays lost.
    console = Console()
    stream.close()
    assert use(console) == ["prepared", "trained"]


def test_console_survives_missing_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    assert use(Console()) == ["prepared", "trained"]


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_console_survives_broken_pipe(unbuffered: str) -> None:
    """Standard output and the exit status do not change."""
    code = "from rayrec.observe.console import Console; console = Console()\n"
    code += "[console.note(f'note {number}') for number in range(3)]; print('the result')\n"
    read, write = os.pipe()
    os.close(read)
    command, environment = [sys.executable, "-c", code], {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=write, text=True, check=False)
    os.close(write)
    assert (done.returncode, done.stdout) == (0, "the result\n")


@pytest.mark.parametrize("stream", [True], indirect=True)
def test_console_keeps_colors_and_live_lines(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    ours, plain = Console()._out, RichConsole(stderr=True)
    assert (ours.is_terminal, ours.color_system, ours.encoding) == (True, plain.color_system, plain.encoding)
    use(Console())
    assert "step 200 of 200" in stream.getvalue()
    assert "\x1b[" in stream.getvalue()


def test_unreadable_events_end_only_the_display(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    failures: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", failures.append)

    def follow(stop: threading.Event) -> Iterator[dict[str, Any]]:
        yield {"time": time.time() + 1, "kind": "failure", "cause": "worker 1 died"}
        raise InputError("events.jsonl, line 2: not an event")

    with Console().training(follow):
        time.sleep(0.2)
    printed = capsys.readouterr().err
    assert "worker 1 died: restarting" in printed
    assert "Stopping the display of this run: events.jsonl, line 2: not an event" in printed
    assert not failures


def test_console_prints_names_without_markup(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    console = Console()
    for name in ("[red]", "[/x]", ":smile:", "{task}", "a[0]"):
        console.note(f"note {name}")
        with console.preparing():
            console.progress(f"index {name}", 1, 1, note=f"of {name}")
        console.table(f"title {name}", [(f"key {name}", f"value {name}")])
        for text in (f"note {name}", f"index {name}", f"of {name}", f"title {name}", f"key {name}", f"value {name}"):
            assert text in stream.getvalue(), text
