"""HTML reports: valid, self-contained, complete, and without code from events."""

import base64
import errno
import io
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from builders import run_events
from builders.faults import fails_with, raising, rejects
from PIL import Image

import rayrec
from rayrec import storage
from rayrec.observe.bottleneck import diagnose
from rayrec.observe.report import comparison, training
from rayrec.observe.report import run as report
from rayrec.observe.report.charts import (
    NUM_SERIES,
    Line,
    Mark,
    Span,
    data_url,
    line_chart,
    tick_step,
    timeline,
)
from rayrec.observe.report.page import table
from rayrec.observe.report.training import STEP_CHARTS
from rayrec.observe.run_summary import Price, RunSummary

FINISHED = report.Run(run_events.CONFIG, run_events.run(), run_events.SUMMARY)


class _Page(HTMLParser):
    """Parser that checks nesting and collects elements and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in {"meta", "img"}:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def _charts(page: str) -> list[ElementTree.Element]:
    return [
        ElementTree.fromstring(found) for found in re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    ]


def _chart(page: str, begin: str) -> ElementTree.Element:
    return next(chart for chart in _charts(page) if chart.get("aria-label", "").startswith(begin))


def _tips(chart: ElementTree.Element) -> list[str]:
    return [rectangle.findtext("title") or "" for rectangle in chart.iter("rect")]


def _text(run: report.Run | list[dict[str, Any]], **options: Any) -> str:
    return _Page(
        report.render(report.Run("", run, None) if isinstance(run, list) else run, **options)
    ).text


def _lacking(text: str, *words: str) -> list[str]:
    return [word for word in words if word not in text]


@pytest.fixture(scope="module")
def finished() -> str:
    return report.render(FINISHED)


def test_page_is_valid_self_contained_and_deterministic(finished: str) -> None:
    page = _Page(finished)
    assert not {tag for tag, _ in page.elements} & {"script", "link", "iframe", "object"}
    for _, attributes in page.elements:
        assert not [name for name in attributes if name.startswith("on")]
        for name in ("src", "href"):
            assert (attributes.get(name) or "#").startswith(("data:image/png;base64,", "#"))
    assert "http" not in finished.replace("http-equiv", "")
    assert "prefers-color-scheme: dark" in finished
    assert "url(" not in finished
    assert report.render(FINISHED) == finished


def test_page_shows_key_figures_and_charts_of_step_events(finished: str) -> None:
    assert (
        _lacking(
            _Page(finished).text,
            "<script>alert(1)</script>",
            "<b>bold</b> & more",
            "worker 1 died of SIGKILL & <more>",
            "What <light> through\nyonder",
        )
        == []
    )
    desired = [
        "finished",
        "0123456789abcdef",
        "torch 2.13.0",
        "1.6487",
        "0.25",
        "75 s",
        "0.4%",
        "44 MB",
        "cut short",
        # The first attempt began at 0:00:02.
        "2026-09-21 14:13:21 UTC",
        "0:00:02",
        "20repeated steps",
    ]
    assert _lacking(_Page(finished).text, *desired) == []
    log = (Path(rayrec.__file__).parent / "training" / "step_log.py").read_text()
    for title, name in STEP_CHARTS.items():
        assert f'"{name}"' in log, title


def test_page_shows_curves_and_marks(finished: str) -> None:
    said = [chart.get("aria-label", "") for chart in _charts(finished)]
    assert [text.split(":")[0] for text in said] == [
        "Loss",
        "Validation perplexity",
        "Rows per second",
        "Share of time blocked on data",
        "Full run",
        "Over the run",
        "Timeline",
    ]
    assert said[0].startswith(
        "Loss: training from 9 to 0.135335, lowest 0.135335, highest 9; validation from "
    )
    loss, _, speed, *_ = _charts(finished)
    assert len(loss.findall("polyline")) == 2  # training, validation
    assert len(speed.findall("polyline")) == 2  # The line breaks at the restart.
    marks = [group.findtext("title") for group in loss.iter("g")]
    assert marks == [
        "restart 1 from step 100: worker 1 died of SIGKILL & <more>",
        "the weights to use: step 150",
    ]
    assert "training 9 (step 100)" in [circle.findtext("title") for circle in loss.iter("circle")]


def test_samples_mark_wrong_predictions_and_page_shows_progress(finished: str) -> None:
    page = _Page(finished)
    images = page.all("img")
    assert len(images) == 9
    assert [image["alt"] for image in images][7] == "label 7, prediction 1"
    kinds = [
        kind
        for attributes in page.all("figure")
        if (kind := attributes.get("class")) in ("right", "wrong")
    ]
    assert kinds == ["right"] * 7 + ["wrong", "right"]
    assert _lacking(page.text, "✗ 1 (88%), is 7", "✓ 8 (88%)") == []
    text = _text(run_events.run(finished=False))
    assert (
        _lacking(text, "not finished at step 150 of 200", "validation at step 150", "150 of 200")
        == []
    )
    ended = ("finish", "summary", "samples")
    unfinished = report.Run(
        "", [event for event in run_events.click_run() if event["kind"] not in ended], None
    )
    found: Any = diagnose(unfinished.sums)
    assert found.text in _text(unfinished)
    events = run_events.Events()
    run_events.begin(events)
    for count in range(len(events.all) + 1):
        text = _text(events.all[:count])
        assert "not finished before its first step" in text
        assert "Curves" not in text


def test_report_accepts_file_or_folder(tmp_path: Path) -> None:
    run = run_events.write_run(tmp_path / "run")
    out = tmp_path / "out"
    plain = tmp_path / "plain"
    assert report.write(run) == f"{run}/report.html"
    plain.write_text("")  # An existing file.
    for place, path in (
        (out, out / "report.html"),
        (out / "one.html", out / "one.html"),
        (plain, plain),
    ):
        assert rayrec.report(run, out=str(place)) == str(path)
        assert path.read_bytes() == Path(run, "report.html").read_bytes()
    assert rayrec.report(run, run, out=str(out / "both")) == str(out / "both" / "report.html")
    rejects("not a run folder", report.write, str(tmp_path))


def test_try_write_report_logs_errors(tmp_path: Path) -> None:
    notes: list[str] = []
    image = {
        "kind": "image",
        "pixels": [[300]],
        "label": "1",
        "prediction": "1",
    }
    events = [*run_events.run(finished=False), {"time": 1e9, "kind": "samples", "samples": [image]}]
    for run in (str(tmp_path), run_events.write_run(tmp_path / "run", events)):
        report.try_write_report(run, note=notes.append)
    assert [note.startswith("Cannot write the report") for note in notes] == [True, True]
    assert not (tmp_path / "run" / "report.html").exists()


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.EPERM])
def test_unwritable_report_folder_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(storage, "write_bytes", raising(OSError(code, "no", "report.html.partial")))
    line = rejects(
        re.escape(f"{tmp_path}/report.html: cannot write the report there ("),
        report.save,
        "page",
        str(tmp_path),
    )
    assert line.endswith(f"({os.strerror(code)}). Choose a writable file (.html) or folder")


def test_report_raises_errors_of_full_disks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "write_bytes", raising(OSError(errno.ENOSPC, "full")))
    fails_with(OSError, "full", report.save, "page", str(tmp_path))


def _click(
    name: str = "clicks", *, auroc: float = 0.78, seconds: float = 1.0, config: str = "seed: 0\n"
) -> report.Run:
    return report.Run(
        config,
        run_events.click_run(name=name, auroc=auroc, seconds=seconds),
        run_events.click_summary(auroc),
    )


def test_time_section_sums_phases_and_fifths() -> None:
    page = report.render(_click())
    whole = _chart(page, "Full run")
    course = _chart(page, "Over the run")
    assert "; ".join(tip.removeprefix("total, ") for tip in _tips(whole)) == (
        "waiting for data: 2 s (18.0%); forward pass: 2.5 s (22.5%); backward pass: 3.5 s (31.5%); "
        "optimizer: 0.5 s (4.5%); waiting for other workers: 1 s (9.0%); everything else: 0.5 s "
        "(4.5%); held up by checkpoints: 0.1 s (0.9%); evaluation: 1 s (9.0%)"
    )
    # Saves and evaluations at steps 50 and 100 belong to the third and the last fifth.
    evaluations = [
        share
        for name, share in (tip.split(": ") for tip in _tips(course))
        if name.endswith("evaluation")
    ]
    assert [share.split(" ")[0] for share in evaluations] == [
        "0.0%",
        "0.0%",
        "19.6%",
        "0.0%",
        "19.6%",
    ]
    assert (
        _lacking(
            _Page(page).text,
            "blocked on data 20.0 % of the time: <read> tasks are CPU-bound",
            "Share of the device's measured peak",
            "read142290.0%80.0%10.0%",
            "object store5.0% in use",
            "20profile/steps_20_30",
        )
        == []
    )


def test_time_section_has_all_phases_and_data_section_full_run() -> None:
    events = run_events.click_run()
    for event in events:
        event.pop("times_s", None)
    whole = _chart(report.render(report.Run("", events, None)), "Full run")
    assert _tips(whole)[:2] == [
        "total, waiting for data: 2 s (18.0%)",
        "total, everything else: 8 s (72.1%)",
    ]
    for event in run_events.click_run():
        if event["kind"] == "step":
            event["times_s"]["host_to_device"] = 0.1
        events.append(event)
    page = report.render(report.Run("", events, None))
    assert '<rect class="dot series-9"' in page
    assert ".dot.series-9 { fill: var(--series-9); }" in page
    assert page.count("--series-9: #") == 2  # by day and by night
    events = run_events.click_run()
    data = next(event for event in events if event["kind"] == "data")
    stage = {**data["stages"][0], "cpu_share": 0.5}
    # A block made in half a minute is consumed in the last second.
    late = [
        {
            **data,
            "seconds": seconds,
            "rows": rows,
            "stages": stages,
        }
        for seconds, rows, stages in (
            (1.0, 1000, [stage]),
            (29.0, 0, []),
            (1.0, 3000, [{**stage, "busy": 15.0}]),
        )
    ]
    events[events.index(data) :] = late
    assert (
        _lacking(_text(events), "read20050.0%50.0%10.0%", "data CPUs2, busy 50.0% of the time")
        == []
    )
    assert "Nodes of" not in _text(events)
    node = {
        "time": events[-1]["time"],
        "kind": "data_nodes",
        "step": 150,
        "nodes": ["node-1"],
    }
    assert _lacking(_text([*events, node]), "Nodes of the last attempt", "node-1data tasks") == []
    events[-2:] = [{**late[-1], "seconds": 1.0}]
    assert "read200100.0%50.0%10.0%" in _text(events)


def test_page_shows_calibration_tables_cost_and_run_columns() -> None:
    page = report.render(_click())
    calibration = _chart(page, "Share of clicks in the test rows")
    assert "observed 0.81 (predicted probability 0.8)" in [
        circle.findtext("title") for circle in calibration.iter("circle")
    ]
    assert _lacking(_Page(page).text, "cat_09981,0001.23%50.00%", "<i>hashed3,000-0.00%") == []
    first = ["worker 0, table_wise: 68 kB (51.5%)", "worker 0, row_wise: 64 kB (48.5%)"]
    second = ["worker 1, table_wise: 136 kB (68.0%)", "worker 1, row_wise: 64 kB (32.0%)"]
    assert _tips(_chart(page, "Weights and optimizer state")) == first + second
    run = _click(seconds=360.0)
    assert f"cost{run.sums.cost(Price(2.5, nodes=4)).total:.4g}" in _text(
        run, price=Price(2.5, nodes=4)
    )
    assert "Cost" not in _text(run)
    runs = [
        _click("first"),
        _click(
            "second",
            auroc=0.8,
            seconds=2.0,
            config="seed: 1\nmodel:\n  dim: 8\n",
        ),
        FINISHED,
    ]
    page = comparison.render(runs, price=Price(1.0))
    assert len(_chart(page, "Validation auroc").findall("polyline")) == 2
    lines = _chart(page, "Training loss").findall("polyline")
    assert [line.get("class") for line in lines] == [
        f"line series-{number}" for number in (1, 2, 3)
    ]
    assert (
        _lacking(
            _Page(page).text,
            "test auroc0.780.8 ★-",
            "seed01-",
            "model.dim-8-",
            "cost per epoch (USD)",
        )
        == []
    )
    assert "<p>★ is the best value" in page
    assert '<main class="all">' in page
    same = _Page(comparison.render([_click(), _click()])).text
    assert _lacking(same, "All configurations are equal.", "clicks (1)clicks (2)") == []


def test_page_shows_clipped_numbers() -> None:
    run = _click()
    numbers = {
        "kind": "numbers",
        "set": "test",
        "columns": [
            {"column": "<age>", "values": 640, "clipped": 16},
            {"column": "price", "values": 640, "clipped": 0},
        ],
    }
    events = [
        {**event, "samples": [*event["samples"], numbers]} if event["kind"] == "samples" else event
        for event in run.events
    ]
    text = _text(events)
    assert "<age>test162.50%" in text
    assert "pricetest" not in text
    assert "Clipped numbers" not in _text(run)


def test_comparison_averages_over_seeds_and_shows_provenance(tmp_path: Path) -> None:
    runs = [
        _click(f"seed-{seed}", auroc=auroc, config=f"name: seed-{seed}\nseed: {seed}\nsteps: 9\n")
        for seed, auroc in enumerate((0.78, 0.80, 0.79))
    ]
    text = _Page(comparison.render([*runs, _click("other", config="seed: 0\nsteps: 10\n")])).text
    assert "criteo_demo (seed-0, ...)30.79000 ± 0.01000" in text
    assert "Mean over seeds" not in _Page(comparison.render(runs[:1])).text
    events = run_events.click_run()
    events[0] |= {
        "commit": "0123abcd+",
        "machine": "host, 8 CPUs",
        "command": "rayrec train criteo_demo",
    }
    early = {
        "time": events[-1]["time"],
        "kind": "early_stop",
        "step": 100,
        "best_step": 50,
        "best_score": 0.8,
    }
    best = {"share_of_best_auroc": 0.953, "best_auroc": 0.8123, "chosen_step": 50}
    text = _text(report.Run("", [*events, early], run_events.click_summary() | best))
    desired = [
        "commit0123abcd+",
        "machinehost, 8 CPUs",
        "commandrayrec train criteo_demo",
        "weights to usestep 50",
        "early stopat step 100 of 100: no improvement since step 50",
    ]
    missed = {"target": 0.9, "target_metric": "auroc", "target_step": None}
    assert "targetauroc 0.9 not reached" in _text(
        report.Run("", events, run_events.click_summary() | missed)
    )
    assert _lacking(text, *desired, "95.3% of the way from 0.5 to the best possible 0.8123") == []
    (one, two), out = (
        (run_events.write_run(tmp_path / name) for name in ("one", "two")),
        str(tmp_path / "both.html"),
    )
    assert rayrec.report(one, two, out=out) == out
    assert "2 runs" in _Page(Path(out).read_text()).text
    for message, runs, place in (
        ("--out", [one, two], None),
        ("at most 8", [one] * 9, out),
        ("missing run folder", [], out),
    ):
        rejects(message, rayrec.report, *runs, out=place)


@pytest.fixture(scope="module")
def click_page() -> _Page:
    return _Page(report.render(_click()))


def test_links_of_page_match_headings(click_page: _Page) -> None:
    page = click_page
    places = {attributes["id"] for _, attributes in page.elements if attributes.get("id")}
    links = {str(attributes["href"]).removeprefix("#") for attributes in page.all("a")}
    assert (
        links
        == places
        >= {
            "curves",
            "where-the-time-went",
            "calibration",
            "categories",
            "embedding-tables",
            "configuration",
        }
    )


def test_page_is_accessible(click_page: _Page) -> None:
    page = click_page
    assert all(
        attributes.get("aria-label") and attributes.get("role") == "img"
        for attributes in page.all("svg")
    )
    assert all(attributes.get("scope") in ("col", "row") for attributes in page.all("th"))
    for tag, attributes in page.elements:
        if attributes.get("class") == "wide" and attributes.get("role"):
            assert (tag, attributes["tabindex"]) == ("div", "0")
            assert attributes["aria-label"]


def test_each_chart_has_name_and_table_of_values(click_page: _Page) -> None:
    page = click_page
    named = [str(attributes["aria-label"]).split(": ")[0] for attributes in page.all("svg")]
    assert len(set(named)) == len(named)
    for name in named:
        assert f"Numbers: {name}" in page.text
    assert "checkpoints0:00:" in page.text  # Values of the timeline's ticks.


def test_series_have_distinct_dashes() -> None:
    style = report.render(FINISHED)
    dashes = re.findall(r"\.line\.series-\d {[^}]*stroke-dasharray: ([^;]*);", style)
    assert len(dashes) == len(set(dashes)) == NUM_SERIES
    backgrounds = re.findall(r"\.swatch\.dashed\.series-(\d) {([^}]*)}", style)
    assert len(backgrounds) == NUM_SERIES
    assert all(
        "repeating-linear-gradient" in background
        for number, background in backgrounds
        if number != "1"
    )
    assert 'class="swatch dashed series-2"' in style


def test_startup_section_shows_first_and_last_starts() -> None:
    assert (
        _lacking(
            _starts(run_events.run()),
            "start 2",
            "interpreter and imports",
            "restoring the checkpoint",
            "later_stage",
            "total",
            "16 s",
            "10 s",
        )
        == []
    )
    assert training.start_up([]) is None
    many: list[dict[str, Any]] = [{"time": 0.0, "kind": "run"}]
    for number in range(1, 10):
        many.append(
            {
                "time": 0.0,
                "kind": "attempt",
                "number": number,
                "num_workers": 1,
            }
        )
        many.append(
            {
                "time": 0.0,
                "kind": "start_up",
                "process": "worker",
                "stages": {"set_up": float(number)},
            }
        )
    shown = _starts(many)
    assert [f"start {number}" in shown for number in range(1, 10)] == [
        True,
        *[False] * 4,
        *[True] * 4,
    ]


def _starts(events: list[dict[str, Any]]) -> str:
    section: Any = training.start_up(RunSummary(events).starts)
    return section.body


# -- Charts, tables and images of a report
@pytest.mark.parametrize(
    ("low", "high", "max_ticks", "expected"),
    [
        pytest.param(0, 1, 5, 0.2, id="0"),
        pytest.param(0, 1000, 7, 200, id="0-1000"),
        pytest.param(0.82, 1, 5, 0.05, id="0.82"),
        pytest.param(0, 7e-5, 5, 2e-5, id="0-7e-05"),
    ],
)
def test_tick_step_returns_round_numbers(
    low: float, high: float, max_ticks: int, expected: float
) -> None:
    assert tick_step(low, high, max_ticks=max_ticks) == pytest.approx(expected)


@pytest.mark.parametrize(
    "points",
    [
        [(1.0, 0.5)],
        [(1.0, 0.0), (2.0, 0.0)],
        [(0.0, 3.0)],
        [(1.0, None), (2.0, 1e30)],
    ],
)
@pytest.mark.parametrize(
    "from_zero",
    [
        False,
        True,
    ],
)
def test_line_chart_plots_flat_lines(
    from_zero: bool, points: list[tuple[float, float | None]]
) -> None:
    figure = line_chart("flat", [Line("flat", points)], x_label="step", from_zero=from_zero)
    assert "nan" not in figure
    assert "<circle" in figure


def test_line_chart_is_empty_without_points_and_thins_long_lines() -> None:
    points: Any = [
        (1.0, None),
        (2.0, float("nan")),
        (3.0, float("inf")),
    ]
    for lines in ([Line("none", points)], []):
        assert line_chart("none", lines, x_label="step") == ""
    points: list[tuple[float, float | None]] = [
        (float(x), 1.0 if x == 77_777 else 0.0) for x in range(100_000)
    ]
    figure = line_chart(
        "long", [Line("long", points)], x_label="step", marks=[Mark(2e5, "1", "beyond")]
    )
    assert len(figure) < 30_000
    assert "beyond" not in figure
    assert len({pair.split(",")[1] for pair in re.findall(r"[\d.]+,[\d.]+", figure)}) == 2


@pytest.mark.parametrize(
    ("pixels", "mode"), [([[0, 7, 255], [1, 2, 3]], "L"), ([[(1, 2, 3), (4, 5, 6)]], "RGB")]
)
def test_data_url_encodes_png(pixels: Any, mode: str) -> None:
    image = Image.open(
        io.BytesIO(base64.b64decode(data_url(pixels).removeprefix("data:image/png;base64,")))
    )
    assert (image.format, image.mode) == ("PNG", mode)
    np.testing.assert_array_equal(image, pixels)


def test_empty_columns_and_lanes_are_omitted() -> None:
    shown = table(["a", "b", "c"], [["x", "", "-"], ["y", "", "1"]], name="t")
    assert ('<th scope="col">b' in shown, '<th scope="col">c' in shown) == (False, True)
    drawn = timeline(
        "t", [("training", [Span(0, 1, "x")]), ("restarts", [])], [("evaluations", [])]
    )
    assert ("training" in drawn, "restarts" in drawn, "evaluations" in drawn) == (
        True,
        False,
        False,
    )
