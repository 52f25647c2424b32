"""Report of one run: its events on a self-contained HTML page without scripts."""

import errno
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from markupsafe import Markup

from rayrec import storage
from rayrec.config import InputError
from rayrec.humanize import date_text, duration_text, number_text
from rayrec.observe.bottleneck import diagnose
from rayrec.observe.console import console_line, early_stop_text
from rayrec.observe.events import read_events
from rayrec.observe.report import model, training
from rayrec.observe.report.page import Section, document, draw, facts, folded, join_parts, tiles
from rayrec.observe.run_summary import Event, Price, RunSummary, target_text

_NOT_WRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM)
"""Errors of files and folders that this user cannot write, in contrast to a full disk or an
outage.
"""


@dataclass(frozen=True)
class Run:
    """Content of a run folder."""

    config: str
    """Content of config.yaml."""
    events: Sequence[Event]
    """Events sorted by time."""
    summary: Mapping[str, Any] | None
    """Content of summary.json. None if the run is not finished."""

    @property
    def run_event(self) -> Event:
        """Last run event, or empty."""
        return self.sums.latest.get("run", {})

    @cached_property
    def sums(self) -> RunSummary:
        """Summary of the events."""
        return RunSummary(self.events)


def read(folder: str) -> Run:
    """Read the run in `folder`, a path or URL. Raises InputError if it contains no run."""
    config = storage.join(folder, "config.yaml")
    summary = storage.join(folder, "summary.json")
    if not storage.exists(config):
        raise InputError(
            f"{folder}: not a run folder (config.yaml not found). Set storage_path/name of a run."
        )
    return Run(
        storage.read_text(config),
        read_events(storage.join(folder, "events.jsonl")),
        storage.read_json(summary) if storage.exists(summary) else None,
    )


def write(folder: str, *, out: str | None = None, price: Price | None = None) -> str:
    """Write the report of the run in `folder`, a path or URL, to `out` (None: report.html in
    `folder`) and return its path. Includes the cost if `price` is set. Raises InputError if
    `folder` contains no run.
    """
    return save(render(read(folder), price=price), out or folder)


def output_path(out: str) -> str:
    """Return the path of a page in file `out`, or report.html in folder `out` (no extension, made
    if missing). Raises InputError if it is not writable.
    """
    is_file = storage.name_of(out).endswith((".html", ".htm")) or storage.size_of(out) is not None
    path = storage.absolute(out if is_file else storage.join(out, "report.html"))
    if storage.is_url(path):
        return path
    existing = path
    while not os.path.exists(existing):
        existing = os.path.dirname(existing)
    if existing != path and not os.path.isdir(existing):
        raise _not_writable(path, errno.ENOTDIR)
    if not os.access(existing, os.W_OK):
        raise _not_writable(path, errno.EACCES)
    return path


def _not_writable(path: str, number: int) -> InputError:
    return InputError(
        f"{path}: cannot write the report there ({os.strerror(number)}). Choose a writable file "
        "(.html) or folder"
    )


def save(page: str, out: str) -> str:
    """Write the page to `output_path(out)`, and return that. Raises InputError if it is not
    writable.
    """
    path = output_path(out)
    try:
        storage.write_bytes(path, page.encode())
    except OSError as error:
        if error.errno not in _NOT_WRITABLE:
            raise
        raise _not_writable(path, error.errno) from None
    return path


def try_write_report(folder: str, *, note: Callable[[str], None]) -> None:
    """Write the report at the end of a run. Errors are reported in one line instead of raised."""
    try:
        write(folder)
    except Exception as error:
        note(
            f"Cannot write the report of {folder}: {' '.join(str(error).split())}. Retry with "
            "`rayrec report`."
        )


def render(run: Run, *, price: Price | None = None) -> str:
    """Render the page. Pure."""
    events = run.events
    summary = run.summary
    sums = run.sums
    diagnosis = diagnose(sums)
    verdict = (summary or {}).get("verdict") or (diagnosis and diagnosis.text)
    return document(
        f"{run.run_event.get('recipe', 'run')}: {run.run_event.get('name', '')}",
        (
            training.costs(sums.cost(price) if price is not None else None),
            model.metrics(sums.latest.get("evaluate"), summary),
            training.curves(sums, events, summary),
            training.time_split(events),
            training.stages(sums.data.side()),
            training.nodes(sums.nodes()),
            model.calibration(events),
            model.categories(events),
            model.numbers(events),
            model.sharding(events),
            model.samples(events),
            training.start_up(sums.starts),
            training.course(events, sums.attempts),
            training.checkpoints(events),
            training.profiles(events),
            Section(
                "Configuration",
                folded("config.yaml", draw("parts.html", "preformatted", text=run.config)),
            ),
        ),
        intro=join_parts(
            (
                _facts(run),
                figures(run),
                draw("parts.html", "verdict", text=verdict) if verdict else Markup(),
            )
        ),
    )


def _facts(run: Run) -> Markup:
    events = run.events
    run_event = run.run_event
    named = [("status", run.sums.standing())]
    warm = next((event for event in events if event["kind"] == "warm_start"), None)
    if warm is not None:
        named.append(("started with", console_line(warm) or ""))
    early = run.sums.latest.get("early_stop")
    last = run.sums.latest.get("step")
    if early is not None:
        planned = f" of {last['steps']:,}" if last and last["steps"] else ""
        named.append(
            ("early stop", f"at step {early['step']:,}{planned}: {early_stop_text(early)}")
        )
    if run.summary is not None:
        if (target := target_text(run.summary)) is not None:
            named.append(("target", target))
        named.append(("weights to use", f"step {run.summary['chosen_step']:,}"))
        if "sampled_out" in run.summary:
            named.append(("rows sampled out", f"{run.summary['sampled_out']:,}"))
        if "share_of_best_auroc" in run.summary:
            fraction = run.summary["share_of_best_auroc"]
            best = run.summary["best_auroc"]
            named.append(
                (
                    "AUROC reached",
                    f"{fraction:.1%} of the way from 0.5 to the best possible {best:.4f}",
                )
            )
    if events:
        began_s = events[0]["time"]
        ended_s = events[-1]["time"]
        later = f"{date_text(ended_s)}, {duration_text(ended_s - began_s)} later"
        named += [("began", date_text(began_s)), ("last event", later)]
    if run_event:
        versions = ", ".join(f"{name} {version}" for name, version in run_event["versions"].items())
        named += [("config hash", run_event["config_hash"]), ("versions", versions)]
        named += [
            (name, str(run_event[name]))
            for name in ("commit", "machine", "command")
            if run_event.get(name)
        ]
    return facts(named)


def figures(run: Run) -> Markup:
    """Render the key figures."""
    summary = run.summary
    last = run.sums.latest.get("step")
    named: list[tuple[str, str]] = []
    if source := summary or last:
        named = [
            (
                "steps",
                f"{source['steps']:,}" if summary else f"{source['step']:,} of {source['steps']:,}",
            ),
            ("rows trained", number_text(source["rows"])),
            ("rows/s", number_text(round(source["rows_per_s"]))),
            ("blocked on data", f"{source['blocked_fraction']:.1%}"),
        ]
    if summary is not None:
        stall = f"{summary['checkpoint_stall_fraction']:.1%}"
        named += [("training", duration_text(summary["train_s"])), ("blocked on saves", stall)]
    spent = run.sums.restarts
    if run.sums.curve():
        named.append(("restarts", str(len(spent))))
    if spent:
        named += [
            ("lost to restarts", duration_text(sum(restart.lost_s for restart in spent))),
            ("repeated steps", f"{sum(restart.steps_redone for restart in spent):,}"),
        ]
    return tiles(named)
