"""Checks of additions to a copy of rayrec. Prints a JSON object with the result of each check."""

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

from builders.click_models import make_app, make_model
from builders.requests import ask
from builders.runs import QUIET, short_run

import rayrec
from rayrec import cli, models, recipes, storage
from rayrec.cluster.layout import Layout
from rayrec.data.engine import TaskPlacement
from rayrec.optim.config import LearningRateSchedule
from rayrec.prepare.schema_draft import draft
from rayrec.schema import load_schema
from rayrec.storage.filesystems import parse_location
from rayrec.training.launchers.ray_launcher import worker_group
from rayrec.workloads.recsys.workload import ClickWorkload
from rayrec.workloads.run_config import ScalingConfig

ROWS = 6_000


def command(*words: str) -> Any:
    """Run a command line and return its JSON."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert cli.run([*words, "--json"]) == 0
    return json.loads(out.getvalue())


def drafted_columns(folder: Path) -> list[str]:
    """Return the label and the features of a schema drafted from a file of the added format."""
    path = folder / "pairs.data"
    path.write_text("".join(f"{row % 2}u{row % 7}\n" for row in range(200)))
    schema = load_schema(draft(str(path)), "draft")
    return [str(schema.label), *schema.dense, *schema.sparse]


def train(folder: Path) -> dict[str, Any]:
    """Train the added model with the added schedule on the added format, and score the added
    metric.
    """
    log = folder / "log"
    rayrec.generate(str(log), rows=ROWS, console=QUIET)
    ready = folder / "ready"
    made = rayrec.preprocess(
        str(log), out=str(ready), console=QUIET, recipe="criteo_demo", format="raw"
    )
    config = short_run(
        recipes.criteo_demo(str(ready)),
        folder,
        4,
        batch_size=128,
        workload={
            "model": {"class": "sum_of_numbers"},
            "schedule": LearningRateSchedule(decay_fraction=0.5, decay="halved"),
        },
    )
    assert isinstance(config.workload, ClickWorkload)
    run = rayrec.train(config)
    scored = rayrec.evaluate(run.folder, str(log), confidence=0.9, console=QUIET)
    compared = rayrec.compare([run.folder, run.folder], str(log), console=QUIET)
    report = Path(rayrec.report(run.folder, out=str(folder / "report.html"))).read_text()
    pair = rayrec.report(run.folder, run.folder, out=str(folder / "pair.html"))
    return {
        "click model": {
            "listed": "sum_of_numbers" in models.names("ranking"),
            "stored": "sum_of_numbers" in Path(run.folder, "config.yaml").read_text(),
        },
        "schedule": config.workload.schedule.for_steps(4).factor(3),
        "format of files": drafted_columns(folder),
        "format of preprocessed data": [made["format"], any(ready.rglob("*.raw"))],
        "metric": {
            "run": "brier" in run.summary["metrics"],
            "evaluation": "brier" in scored,
            "interval": "brier" in scored["intervals"],
            "significance": sorted(compared["differences"][0]["brier"]),
            "report": "brier" in report,
            "comparison": "brier" in Path(pair).read_text(),
        },
    }


def main(folder: Path) -> dict[str, Any]:
    app = make_app(make_model())
    described = ask(app, "GET", "/openapi.json").json()["paths"]
    options = worker_group(
        ScalingConfig(label_selector={"zone": "a"}),
        Layout(1, 1.0, {"CPU": 1.0}, TaskPlacement(), TaskPlacement()),
    )
    location = parse_location("r2://bucket/folder/file")
    return {
        **train(folder),
        "store": [
            type(location).__name__,
            location.inner,
            storage.join("r2://bucket", "file"),
        ],
        "endpoint": [ask(app, "GET", "/v1/limits").json(), "/v1/limits" in described],
        "Ray option": options.label_selector,
        "command": [command("greet", "Ada"), rayrec.greet("Ada")],  # type: ignore[attr-defined]
    }


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
