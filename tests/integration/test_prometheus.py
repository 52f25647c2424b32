"""Metrics of a run at Ray's own endpoint, and a dashboard that asks for nothing that is not
there.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from builders import run_events
from hosts.processes import environment_for, run_command
from prometheus_client.parser import text_string_to_metric_families

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.extended]

DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana" / "rayrec.json"
NAME = re.compile(r"\bray_rayrec_\w+")
SELECTOR = re.compile(r"(\bray_rayrec_\w+)\{([^}]*)\}")
MATCHER = re.compile(r'(\w+)\s*(=~|!=|=)\s*"([^"]*)"')

Samples = dict[str, list[tuple[dict[str, str], float]]]
"""By name, their labels and values."""

# In a process of its own: how often Ray passes on metrics is decided when it starts.
EXPORTER = """
import json, sys, time, urllib.request
from builders import run_events
import ray
from rayrec.training.launchers.ray_metrics import PrometheusTracker

ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False,
         configure_logging=False, object_store_memory=100_000_000)
events = json.loads(sys.stdin.read())
PrometheusTracker("older", since_s=events[-1]["time"] + 1)  # a run before, in the same process
tracker = PrometheusTracker("run-1", since_s=0.0)
run_events.feed(tracker, events)
tracker.close()
url = f"http://127.0.0.1:{ray.nodes()[0]['MetricsExportPort']}/metrics"
before = []
for _ in range(120):  # until the last event is there, and nothing more comes
    time.sleep(1.0)
    try:
        text = urllib.request.urlopen(url, timeout=30).read().decode()
    except OSError:
        continue
    lines = sorted(line for line in text.splitlines() if line.startswith("ray_rayrec_"))
    if lines == before and any(line.startswith("ray_rayrec_data{") for line in lines):
        break
    before = lines
print(text)
ray.shutdown()
"""


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Samples:
    """What an exporter says after a made-up run."""
    more: dict[str, Any] = {
        "evaluate": {"auroc": 0.75},
        "finish": {"metrics": {"auroc": 0.75}},
        "step": {
            "times_s": {"data": 0.5, "forward": 1.5, "other": 0.0},
            "multiply_adds_per_s": 1e9,
            "peak_fraction": 0.25,
        },
    }
    events = [{**event, **more.get(event["kind"], {})} for event in run_events.run()]
    events = [
        {**event, "rows": event["step"] * 64} if event["kind"] == "start" else event
        for event in events
    ]
    stages = [
        {
            "stage": "parse",
            "rows_per_s": 10.0,
            "busy": 0.5,
            "cpu_share": 1.0,
        }
    ]
    store = {"object_store_bytes": 5, "object_store_limit_bytes": 50, "spilled_bytes": 0}
    speed = {
        "seconds": 10.0,
        "rows": 100,
        "cpus": 1.0,
        "rows_per_s": 10.0,
        "busy": 0.5,
        "backlog_rows": 3.0,
    }
    events.append(
        {
            "kind": "data",
            "time": events[-1]["time"],
            "step": 200,
            "stages": stages,
            **speed,
            **store,
        }
    )
    environment = environment_for(
        tmp_path_factory.mktemp("cache"),
        RAY_metrics_report_interval_ms="500",
        PYTHONPATH=str(Path(__file__).parents[1]),
    )
    done = run_command(sys.executable, "-c", EXPORTER, input=json.dumps(events), env=environment)
    found: Samples = {}
    lines = [line for line in done.stdout.splitlines() if line.startswith(("#", "ray_rayrec_"))]
    for family in text_string_to_metric_families("\n".join(lines) + "\n"):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def test_metrics_match_run(scraped: Samples) -> None:
    # 20 steps again
    run_values = {
        "step": 200,
        "goal_steps": 200,
        "steps_total": 120 + 100,
        "rows_total": 220 * 64,
        "steps_redone_total": 20,
        "failures_total": 1,
        "checkpoints_total": 4,
        "checkpoint_stall_s_total": 1.0,
    }
    for name, labels, expected in (
        *((name, {"run": "run-1"}, value) for name, value in run_values.items()),
        ("workers", {"run": "run-1"}, 1),
        ("metric", {"set": "validation", "metric": "auroc"}, 0.75),
        ("time_s_total", {"phase": "forward"}, 22 * 1.5),
        ("data", {"stage": "parse", "measure": "busy"}, 0.5),
    ):
        found = [
            value for has, value in scraped[f"ray_rayrec_{name}"] if labels.items() <= has.items()
        ]
        assert found == [expected], name
    assert not [
        labels for samples in scraped.values() for labels, _ in samples if labels["run"] == "older"
    ]


def _queries() -> list[str]:
    dashboard = json.loads(DASHBOARD.read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    variables = dashboard["templating"]["list"]
    return queries + [entry["definition"] for entry in variables if entry["type"] == "query"]


def _selected(samples: list[dict[str, str]], matchers: str) -> list[dict[str, str]]:
    """Return the labels of the samples that a selector matches."""
    for label, operator, desired in MATCHER.findall(matchers):
        assert all(label in labels for labels in samples), label
        if operator == "=":
            samples = [labels for labels in samples if labels[label] == desired]
    return samples


def test_dashboard_queries_match_exported_metrics(scraped: Samples) -> None:
    queries = _queries()
    assert len(queries) > 20
    asked = set()
    for query in queries:
        names = NAME.findall(query)
        assert names, query
        asked |= set(names)
        for name, matchers in SELECTOR.findall(query):
            assert _selected([labels for labels, _ in scraped[name]], matchers), query
        for grouping in re.findall(r"by \(([^)]*)\)", query):
            assert set(re.findall(r"\w+", grouping)) <= scraped[names[0]][0][0].keys(), query
    assert asked <= scraped.keys()


def _panels() -> list[dict[str, Any]]:
    return json.loads(DASHBOARD.read_text())["panels"]


def test_dashboard_panels_have_separate_cells() -> None:
    panels = _panels()
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        taken = {
            (place["x"] + right, place["y"] + down)
            for right in range(place["w"])
            for down in range(place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not taken & cells, panel["title"]
        cells |= taken


def test_dashboard_panels_use_run_and_scrape_interval() -> None:
    for panel in _panels():
        assert panel["datasource"]["uid"] == "${datasource}"
        for target in panel["targets"]:
            assert '"$run"' in target["expr"]
            # Two samples of a scrape a minute, whatever the panel's width and the data source's own
            # interval.
            if "rate(" in target["expr"]:
                assert "[$__rate_interval]" in target["expr"]
                assert panel["interval"] == "2m"


def test_dashboard_fractions_have_percent_unit() -> None:
    for panel in _panels():
        units = {
            override["matcher"]["options"]: value["value"]
            for override in panel["fieldConfig"].get("overrides", ())
            for value in override["properties"]
            if value["id"] == "unit"
        }
        # What counters add up and what they add up a second have no axis in common.
        shares = {target["refId"] for target in panel["targets"] if "_s_total" in target["expr"]}
        if shares and len(shares) < len(panel["targets"]):
            assert all(units[name] == "percentunit" for name in shares)
