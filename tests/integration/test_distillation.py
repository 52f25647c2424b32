"""A student's run: it learns from its teacher, takes over its Preprocessor, and is the same after a crash, bit for bit."""

from pathlib import Path
from typing import Any

import pytest
from hosts.processes import Run, small_run

from rayrec.storage import read_json
from rayrec.workloads.base import TrainConfig
from rayrec.workloads.recsys.distillation import RECORD

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.extended, pytest.mark.exhaustive]

STEPS = 160


def _student(log: Path, storage: Path, teacher: str, *, weight: float = 0.5) -> TrainConfig:
    model = {"embedding_dim": 4, "bottom_mlp": (8, 4), "top_mlp": (16, 1)}
    learning = {"checkpoint": teacher if weight else None, "weight": weight}
    return small_run(log, str(storage), steps=STEPS, workload={"model": model, "teacher": learning})


def test_a_student(click_log: Path, tmp_path: Path) -> None:
    def finished(config: TrainConfig, name: str, *, killed: bool = False) -> dict[str, Any]:
        with Run(config, tmp_path / f"{name}_commands", cache=tmp_path / "cache") as run:
            run.start()
            if killed:
                run.wait_for_step(60)
                run.kill_driver()
                assert not run.events("finish")
                run.start()
            summary = run.summary()
            assert len(run.events("start")) == 1 + killed
            return summary

    # As wide as the student: what is looked at here is whom it learns from, not how much.
    teacher = finished(_student(click_log, tmp_path / "teacher", "", weight=0.0), "teacher")
    checkpoint = teacher["checkpoint"]
    whole = finished(_student(click_log, tmp_path / "whole", checkpoint), "whole")
    again = finished(_student(click_log, tmp_path / "again", checkpoint), "again", killed=True)
    assert again["weights_sha256"] == whole["weights_sha256"] != teacher["weights_sha256"]
    assert whole["preprocessor"] == teacher["preprocessor"]
    assert whole["metrics"]["auroc"] > 0.5
    assert whole["metrics"]["label_rate"] == teacher["metrics"]["label_rate"]  # labels are evaluated, not targets
    (record,) = (tmp_path / "whole").glob(f"*/{RECORD}")
    assert [each["checkpoint"] for each in read_json(str(record))] == [checkpoint]
