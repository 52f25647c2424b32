"""`rayrec top`: a run in progress, in the terminal, from its events alone."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, Final

from rich.console import Console
from rich.live import Live

from rayrec import storage
from rayrec.config import InputError
from rayrec.observe.events import follow, read_events
from rayrec.observe.run_view import RunView, note_of, panel

_REFRESH_S: Final = 0.5


def top(run: str, *, once: bool = False, console: Console | None = None) -> RunView:
    """Shows a run's folder, local or a URL, until the run has ended or Ctrl-C; on no terminal, or with `once`, as it is now.

    Returns what it showed last. Raises InputError where there is no run.
    """
    folder = storage.absolute(run).rstrip("/")
    if not storage.exists(storage.join(folder, "config.yaml")):
        raise InputError(f"{run}: not the folder of a run, which holds a config.yaml; give storage_path/name of one")
    console = console or Console(highlight=False, markup=False, emoji=False)
    place, view = storage.join(folder, "events.jsonl"), RunView(keep=True)
    if once or not console.is_terminal:
        for event in read_events(place):
            view.update(event)
        console.print(panel(view, full=True))
        return view
    _watch(place, view, console)
    return view


def _watch(place: str, view: RunView, console: Console) -> None:
    stop, arrived = threading.Event(), queue.SimpleQueue[Any]()
    thread = threading.Thread(target=_read, args=(place, stop, arrived.put), name="top", daemon=True)
    thread.start()
    caught_up = False  # what lies behind is not told line by line
    try:
        with Live(get_renderable=lambda: panel(view, full=True), console=console, auto_refresh=False) as live:
            waiting: list[Any] = [None]
            while waiting or not view.ended:  # behind an end of long ago there may be another driver
                waiting, caught_up_now = _take(arrived, view), caught_up
                for event in waiting:
                    note = note_of(event) if caught_up_now else None
                    if note is not None:
                        console.print(note, markup=False)
                caught_up = caught_up or bool(waiting)
                live.refresh()
            live.refresh()
    except KeyboardInterrupt:
        pass
    finally:
        stop.set()


def _read(place: str, stop: threading.Event, put: Callable[[Any], None]) -> None:
    try:
        for event in follow(place, stop=stop):
            put(event)
    except BaseException as error:  # raised where events are taken
        put(error)


def _take(arrived: queue.SimpleQueue[Any], view: RunView) -> list[Any]:
    """The events that came, after waiting for one a little while."""
    taken: list[Any] = []
    timeout_s: float | None = _REFRESH_S
    while True:
        try:
            item = arrived.get(timeout=timeout_s) if timeout_s else arrived.get_nowait()
        except queue.Empty:
            return taken
        if isinstance(item, BaseException):
            raise item
        view.update(item)
        taken.append(item)
        timeout_s = None
