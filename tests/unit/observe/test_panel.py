"""Display of a run: figures, panel, `rayrec top`, and plain lines without a terminal."""

import errno
import io
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from builders import run_events
from builders.faults import rejects, until
from rich.console import Console as RichConsole

from rayrec.config import InputError
from rayrec.observe import console as console_module
from rayrec.observe.console import Console, console_line, figures, line, panel, top
from rayrec.observe.run_summary import RunSummary
from rayrec.observe.timing import PHASES

REACHED = {
    "target": 0.8025,
    "target_metric": "auroc",
    "target_step": 1600,
    "target_rows": 204_800,
    "target_s": 119.6,
}
SAVED = {
    "kind": "checkpoint",
    "step": 8,
    "path": "p",
    "bytes": 1e6,
}


def screen(out: io.StringIO, **options: Any) -> RichConsole:
    return RichConsole(
        file=out,
        width=100,
        color_system=None,
        **options,
    )


def shown(run: RunSummary, **options: Any) -> str:
    out = io.StringIO()
    screen(out).print(panel(run, **options))
    return out.getvalue()


def measured() -> list[dict[str, Any]]:
    """Return the events of a running job, with times and stages."""
    events = run_events.run(finished=False)
    for event in events:
        if event["kind"] == "step":
            event |= {
                "times_s": {**dict.fromkeys(PHASES, 0.0), "data": 2.0, "forward": 8.0},
                "peak_fraction": 0.25,
            }
            event["learning_rate"] = 0.00125
    data = {
        "seconds": 5.0,
        "rows": 640,
        "cpus": 1.0,
        "backlog_rows": 12.0,
        "stages": [
            {
                "stage": "parse",
                "rows_per_s": 20_000.0,
                "busy": 0.8,
                "cpu_share": 0.9,
                "queue_share": 0.0,
            }
        ],
    }
    return [
        *events,
        {
            "time": events[-1]["time"],
            "kind": "data",
            "step": 150,
            **data,
            "object_store_bytes": 3e6,
            "object_store_limit_bytes": 3e8,
            "spilled_bytes": 0,
        },
    ]


def test_figures_match_running_and_finished_jobs() -> None:
    run = RunSummary(measured())
    assert (run.step, run.steps, run.status) == (150, 200, "training")
    # After its first logged step, the attempt took 6 s for 40 steps.
    assert run.left_s() == pytest.approx(50 * 6 / 40)
    expected = (
        "loss 0.2231  perplexity 2.0000  rows/s 1150  blocked 1.0%  of peak 25%  learning rate "
        "0.00125  left 8 s"
    )
    assert line(run) == f"{expected}  saved step 150 (44 MB)  restarts 1"
    run.update(
        {
            "time": 1e9,
            "kind": "step",
            **run.latest["step"],
            "peak_fraction": 1.15,
        }
    )
    assert dict(figures(run))["of peak"] == "above measurement"
    run.update({"time": 1e9, "kind": "finish", "step": 200})
    assert run.status == "finishing"  # It evaluates its test rows.
    events = measured()
    early = {
        "time": 2e9,
        "kind": "early_stop",
        "step": 150,
        "best_step": 100,
        "best_score": 0.8,
    }
    finish = {
        "time": 2e9,
        "kind": "finish",
        "step": 150,
        "chosen_step": 100,
        "metrics": {"perplexity": 1.5, "rows": 9},
    }
    events += [early, finish, {"time": 2e9, "kind": "summary", "steps": 150}]
    run = RunSummary(events)
    known = dict(figures(run))
    assert (run.step, run.steps, run.status.startswith("finished"), run.ended) == (
        150,
        150,
        True,
        True,
    )
    # Not 2, the last evaluation's.
    assert (known["perplexity"], known["weights of"]) == ("1.5000", "step 100")
    text = shown(run)
    assert "step 150 of 150" in text
    assert "finished, stopped early at step 150 of 200" in text
    # Another driver extends it.
    run.update(
        {
            "time": 3e9,
            "kind": "start",
            "step": 150,
            "steps": 400,
            "world_size": 2,
        }
    )
    assert (run.status.startswith("finished"), run.steps, dict(figures(run))["perplexity"]) == (
        False,
        400,
        "2.0000",
    )


def test_figures_grow_with_events_and_panel_shows_phases() -> None:
    run = RunSummary()
    assert figures(run) == []
    assert "preparing" in shown(run)
    run.update(
        {
            "time": 0.5,
            "kind": "run",
            "recipe": "r",
            "name": "[red]no markup[/]",
        }
    )
    assert "r [red]no markup[/]" in shown(run)
    run.update(
        {
            "time": 1.0,
            "kind": "start",
            "step": 0,
            "steps": 10,
            "world_size": 2,
        }
    )
    run.update(
        {
            "time": 2.0,
            "kind": "step",
            "step": 1,
            "steps": 10,
            "loss": None,
            "rows": 5,
            "rows_per_s": 5.0,
        }
    )
    assert run.left_s() is None
    assert ("restarts", "0") not in figures(run)
    assert "step 1 of 10" in shown(run)
    run = RunSummary(measured())
    assert run.last_time_s is not None
    text = shown(run, full=True, now_s=run.last_time_s + 1)
    desired = [
        "step 150 of 200",
        "waiting for data 20%",
        "parse",
        "20k",
        "object store 3 MB of 300 MB",
    ]
    assert [word for word in (*desired, "Blocked on data") if word not in text] == []
    assert "no events" not in text
    assert "no events for 5 min" in shown(run, full=True, now_s=run.last_time_s + 300)
    assert "Blocked on data" not in shown(run, now_s=run.last_time_s)
    run.update(
        {
            "time": run.last_time_s,
            "kind": "data_nodes",
            "step": 150,
            "nodes": ["node-1", "node-2"],
        }
    )
    assert "node-1: data tasks   node-2: data tasks" in shown(run, full=True)
    assert "finished" in shown(RunSummary(run_events.run()))


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        pytest.param(
            {"kind": "start", "step": 8, "world_size": 2},
            "resuming from step 8 with 2 workers",
            id="kind-start-step-8-world_size-2",
        ),
        pytest.param(
            {
                "kind": "checkpoint_slow",
                "step": 8,
                "write_s": 95.4,
                "grace_s": 60.0,
            },
            "step 8  saving took 95 s, longer than failure.grace_s (60 s). Raise "
            "--failure.grace-s and the termination notice "
            "of the machines.",
            id="kind-checkpoint_slow-step-8",
        ),
        pytest.param(
            {
                "kind": "start",
                "step": 0,
                "world_size": 2,
                "damaged": [4, 8],
            },
            "no undamaged checkpoint found (damaged: 2): restarting from step 0",
            id="kind-start-step-0-world_size-2",
        ),
        pytest.param(
            {
                "kind": "cpu_contention",
                "rank": 1,
                "node": "n2",
                "waiting_share": 0.93,
            },
            "rank 1 on n2: other processes use its CPUs and slow down training (a thread waited "
            "93% of the time). Stop them, or lower --scaling.threads-per-worker.",
            id="kind-cpu_contention-rank-1-node",
        ),
        pytest.param(
            {"kind": "start", "step": 0, "world_size": 2},
            None,
            id="kind-start-step-0-world_size-2-None",
        ),
        pytest.param(
            {"kind": "failure", "cause": "worker 1 died"},
            "worker 1 died: restarting",
            id="kind-failure-cause-worker-1-died",
        ),
        pytest.param(
            {"kind": "failure", "cause": "the loss is nan", "last": True},
            "the loss is nan",
            id="kind-failure-cause-the-loss-is",
        ),
        pytest.param(
            {"kind": "plateau", "step": 1500, "learning_rate_scale": 0.1**2},
            "step 1,500  no improvement: learning rates lowered to 0.01 of the schedule",
            id="kind-plateau-step-1500",
        ),
        pytest.param(
            {
                "kind": "early_stop",
                "step": 150,
                "best_step": 100,
                "best_score": 0.8,
            },
            "step 150  no improvement since step 100: stopping early",
            id="kind-early_stop-step-150",
        ),
        pytest.param(
            {"kind": "early_stop", "step": 1600, **REACHED},
            "step 1,600  auroc 0.8025 reached at step 1,600 (204,800 rows, 2 min of training and "
            "evaluations): stopping early",
            id="kind-early_stop-step-1600",
        ),
        pytest.param(
            {
                "kind": "evaluate",
                "step": 1600,
                "set": "validation",
                "auroc": 0.79,
                "best": {"step": 800, "auroc": 0.8},
            },
            "step 1,600  validation  auroc 0.7900  best auroc 0.8000 (step 800)",
            id="kind-evaluate-step-1600-set",
        ),
        pytest.param(SAVED, None, id="SAVED"),
        pytest.param({"kind": "step", "step": 8}, None, id="kind-step-step-8"),
    ],
)
def test_console_line_matches_event(event: Any, expected: str | None) -> None:
    assert (console_line(event), console_line(SAVED, verbose=True)) == (
        expected,
        "step 8  saved p (1 MB)",
    )


def console_lines(
    events: list[dict[str, Any]], capsys: pytest.CaptureFixture[str], **options: Any
) -> str:
    with Console(**options).training(lambda stop: iter(events)):
        time.sleep(0.2)
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def now(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    later_s = time.time() + 1000 - events[0]["time"]
    return [{**event, "time": event["time"] + later_s} for event in events]


def test_console_prints_plain_lines_unless_quiet(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = console_lines(now(measured()), capsys)
    assert text.count("train: step") == 1  # The next is due in ten seconds.
    assert "worker 1 died" in text
    assert "resuming from step 100 with 1 workers" in text
    assert "\x1b" not in text
    monkeypatch.setattr(console_module, "PLAIN_INTERVAL_S", 0.0)
    text = console_lines(now(measured()), capsys)
    assert "train: step 150 of 200  loss 0.2231  perplexity 2.0000" in text
    assert "saved runs/run" not in text
    assert "saved runs/run" in console_lines(now(measured()), capsys, verbose=True)
    assert console_lines(now(measured()), capsys, quiet=True) == ""
    assert console_lines([{**event, "time": 1.0} for event in measured()], capsys) == ""
    run_events.write_run(tmp_path, measured())
    out = io.StringIO()
    assert top(str(tmp_path), console=screen(out)).step == 150
    assert "step 150 of 200" in out.getvalue()
    rejects(r"not a run folder", top, str(tmp_path / "nowhere"))
    run_events.write_run(tmp_path, [{}, {}], mode="a")
    rejects("not an event", top, str(tmp_path), console=screen(out))


def test_top_follows_until_run_finishes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")  # A dumb terminal shows nothing until the end.
    events = run_events.run()
    out = io.StringIO()
    cut = run_events.cut(events)
    run_events.write_run(tmp_path, events[:cut])

    def train() -> None:
        until(lambda: "step 120 of 200" in out.getvalue())
        run_events.write_run(tmp_path, events[cut:], mode="a")

    thread = threading.Thread(target=train)
    thread.start()
    assert top(str(tmp_path), console=screen(out, force_terminal=True)).status == "finished"
    thread.join()
    text = out.getvalue()
    assert [text.count(": restarting"), "step 120 of 200" in text, "step 200 of 200" in text] == [
        1,
        True,
        True,
    ]


@pytest.mark.parametrize(
    ("last", "status"),
    [
        ({"kind": "failure", "cause": "no"}, "failed: no"),
        ({"kind": "stop", "cause": "SIGTERM", "step": 120}, "stopped: SIGTERM"),
    ],
)
def test_top_returns_when_run_fails_or_stops(
    tmp_path: Path, last: dict[str, Any], status: str
) -> None:
    reported = measured()
    last |= {"time": reported[-1]["time"] + 1}
    assert not RunSummary([*reported, {**last, "last": False}]).ended  # Another attempt follows.
    run_events.write_run(tmp_path, [*reported, {**last, "last": True}])
    run = top(str(tmp_path), console=screen(io.StringIO(), force_terminal=True))
    assert (run.ended, run.status) == (True, status)
    assert "no events" not in shown(run, full=True)
    assert "left" not in dict(figures(run))
    run.update({"kind": "run", "time": run.last_time_s})
    assert (run.ended, run.status) == (False, "preparing")


# -- Console output errors never end a run
class Stream(io.StringIO):
    def __init__(self, *, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal
        self.full = False
        self.num_errors = 0

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


def test_console_survives_full_disk_closed_and_missing_stream(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    monkeypatch.setattr(sys, "stderr", None)
    assert use(Console()) == ["prepared", "trained"]


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_console_survives_broken_pipe(unbuffered: str) -> None:
    code = "from rayrec.observe.console import Console; console = Console()\n"
    code += "[console.note(f'note {number}') for number in range(3)]; print('the result')\n"
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        stdout=subprocess.PIPE,
        stderr=write,
        text=True,
        check=False,
    )
    os.close(write)
    assert (done.returncode, done.stdout) == (0, "the result\n")


@pytest.mark.parametrize("stream", [True], indirect=True)
def test_console_keeps_colors_and_live_lines(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    ours = Console()._out
    plain = RichConsole(stderr=True)
    assert (ours.is_terminal, ours.color_system, ours.encoding) == (
        True,
        plain.color_system,
        plain.encoding,
    )
    use(Console())
    assert "step 200 of 200" in stream.getvalue()
    assert "\x1b[" in stream.getvalue()


def test_unreadable_events_end_only_the_display(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_console_prints_names_without_markup(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    console = Console()
    for name in (
        "[red]",
        "[/x]",
        ":smile:",
        "{task}",
        "a[0]",
    ):
        console.note(f"note {name}")
        with console.preparing():
            console.progress(f"index {name}", 1, 1, note=f"of {name}")
        console.table(f"title {name}", [(f"key {name}", f"value {name}")])
        for text in (
            f"note {name}",
            f"index {name}",
            f"of {name}",
            f"title {name}",
            f"key {name}",
            f"value {name}",
        ):
            assert text in stream.getvalue(), text
