"""Messages of the nightly job, which name fields in its settings rather than command flags."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from builders.faults import rejects
from builders.scripts import ROOT, script

DAY = "2026-05-01"


@pytest.fixture
def job(tmp_path: Path) -> dict[str, Any]:
    folder = tmp_path / "clicks" / f"dt={DAY}"
    folder.mkdir(parents=True)
    frame = pd.DataFrame(
        {
            "age": range(20),
            "user": range(20),
            "item": range(20),
            "click": [0, 1] * 10,
        }
    )
    for part in range(2):
        frame.to_parquet(folder / f"part-{part}.parquet", index=False)
    settings: dict[str, Any] = yaml.safe_load(
        (ROOT / "deploy" / "nightly" / "nightly.yaml").read_text()
    )
    return {**settings, "log": str(tmp_path / "clicks"), "place": str(tmp_path / "nightly")}


def test_failed_gates_name_fields(job: dict[str, Any]) -> None:
    job["gates"] |= {"min_rows": 1000, "max_label_rate": 0.4}
    message = rejects(
        "below min_rows 1,000", script("deploy/nightly", "nightly").run_night, job, DAY
    )
    assert "or lower gates.min_rows; " in message
    assert message.endswith("or raise gates.max_label_rate")
    assert "--" not in message


def test_failed_comparison_names_field() -> None:
    line = "gates.min_auroc_gain: new gains -0.01 AUROC over old, less than 0.0"
    require = script("deploy/nightly", "nightly").require
    rejects(r"^comparison\.min_auroc_gain: new gains", require, [line], section="comparison")
    require([], section="comparison")


def test_unknown_gate_names_field(job: dict[str, Any]) -> None:
    job["gates"]["min_row"] = 3
    rejects(
        r"^gates\.min_row: Gates has no such field.*min_rows",
        script("deploy/nightly", "nightly").run_night,
        job,
        DAY,
    )
