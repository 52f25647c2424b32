"""A student's run: it learns from its teacher, takes over its Preprocessor, and is the same after a crash, bit for bit."""

from pathlib import Path

import pytest
from builders.runs import small_run
from hosts.processes import Run, finished

from rayrec.storage import read_json
from rayrec.workloads.base import TrainConfig
from rayrec.workloads.recsys.distillation import RECORD

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.exhaustive]


def test_killed_student_resumes_with_equal_weights(click_log: Path, tmp_path: Path) -> None:
    def of(name: str, teacher: str | None, weight: float = 0.5) -> tuple[TrainConfig, Path]:
        model = {"embedding_dim": 4, "bottom_mlp": (8, 4), "top_mlp": (16, 1)}
        workload = {"model": model, "teacher": {"checkpoint": teacher, "weight": weight}}
        return small_run(click_log, tmp_path / name, steps=160, workload=workload), tmp_path / f"{name}_commands"

    # As wide as the student: what is looked at here is whom it learns from, not how much.
    cache = tmp_path / "cache"
    teacher = finished(*of("teacher", None, weight=0.0), cache=cache)
    checkpoint = teacher["checkpoint"]
    whole = finished(*of("whole", checkpoint), cache=cache)
    with Run(*of("again", checkpoint), cache=cache).start() as run:
        run.wait_for_step(60)
        run.kill_driver()
        assert not run.events("finish")
        again = run.start().summary()
        assert len(run.events("start")) == 2
    assert again["weights_sha256"] == whole["weights_sha256"] != teacher["weights_sha256"]
    assert whole["preprocessor"] == teacher["preprocessor"]
    assert whole["metrics"]["auroc"] > 0.5
    assert whole["metrics"]["label_rate"] == teacher["metrics"]["label_rate"]  # labels are evaluated, not targets
    (record,) = (tmp_path / "whole").glob(f"*/{RECORD}")
    assert [each["checkpoint"] for each in read_json(str(record))] == [checkpoint]
