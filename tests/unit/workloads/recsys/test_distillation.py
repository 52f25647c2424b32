"""Tests of distillation targets, also after resuming."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders.click_models import Saved, hashed_preprocessor, save_clicks, save_two
from builders.faults import rejects
from builders.runs import LEAN, QUIET

import rayrec
from rayrec import recipes
from rayrec.config import InputError
from rayrec.data.encoded_rows import EncodedRows
from rayrec.datasets.criteo import SCHEMA
from rayrec.ingest.batches import BatchSlicer
from rayrec.training.trainer import Result, train
from rayrec.workloads.recsys.distillation import RECORD, Teacher, TeacherConfig, load_targets, open_teacher


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Saved, Saved]:
    return save_two(tmp_path_factory.mktemp("teacher"))


def _slice(rows: EncodedRows, start: int, stop: int) -> EncodedRows:
    return EncodedRows(rows.dense[start:stop], [ids[start:stop] for ids in rows.ids], {"label": rows.label[start:stop]})  # type: ignore[index]


def test_targets_mix_labels_and_probabilities_also_after_resume(both: tuple[Saved, Saved]) -> None:
    rows = both[1].rows(300, labelled=True)
    probabilities = 1 / (1 + np.exp(-both[1].logits(rows)))
    for weight in (0.25, 1.0):
        targets = load_targets(Teacher((str(both[1].checkpoint),), weight), both[1].preprocessor)(rows)
        assert targets.dtype == np.float32
        np.testing.assert_allclose(targets, (1 - weight) * rows.label + weight * probabilities, atol=1e-6)
    # Bit-identical because each batch is scored as a whole, not in the pieces it consists of.
    targets = load_targets(Teacher((str(both[0].checkpoint),), 0.5), both[0].preprocessor)
    rows = both[0].rows(500, labelled=True)

    def labels(start: int, piece: int) -> list[np.ndarray]:
        pieces = (_slice(rows, begin, min(begin + piece, 500)) for begin in range(start, 500, piece))
        slicer = BatchSlicer(pieces, SCHEMA, targets=targets)
        return [slicer.take(100, loss_weight=0.01).labels["label"].numpy() for _ in range(start, 500, 100)]

    whole = labels(0, 500)
    assert not np.isin(whole[0], [0, 1]).any()
    for start, piece in ((0, 70), (200, 300), (300, 33)):
        for expected, got in zip(whole[start // 100 :], labels(start, piece), strict=True):
            np.testing.assert_array_equal(got, expected)
    assert len(BatchSlicer(iter(()), SCHEMA, targets=targets).take(0, loss_weight=1)) == 0


def test_resumed_run_keeps_teacher_with_weight_and_checkpoint(both: tuple[Saved, Saved], tmp_path: Path) -> None:
    teachers = Path(shutil.copytree(both[0].run, tmp_path / "teacher"))
    student = tmp_path / "student"
    config = TeacherConfig(checkpoint=str(teachers), weight=0.5)
    teacher = open_teacher(config, run=str(student))
    assert teacher == Teacher((str(teachers / "checkpoints" / "step_00000002"),), 0.5)
    shutil.copytree(teachers / "checkpoints" / "step_00000001", teachers / "checkpoints" / "step_00000003")
    assert open_teacher(config, run=str(student)) == teacher  # though there is a newer one
    (record,) = json.loads((student / RECORD).read_text())
    (student / RECORD).write_text(json.dumps(record))  # as an earlier version wrote it
    assert open_teacher(config, run=str(student)) == teacher
    (student / RECORD).write_text(json.dumps([{**record, "weights": "0" * 16}]))
    rejects("the teacher's weights changed since", open_teacher, config, run=str(student))
    assert open_teacher(TeacherConfig(), run=str(student)) is None
    with pytest.raises(InputError, match="contains no complete checkpoint"):
        open_teacher(TeacherConfig(checkpoint=str(tmp_path / "none"), weight=0.5), run=str(tmp_path / "other"))
    distilled = recipes.criteo_kaggle_distilled("log.txt")
    rejects(r"Pass --workload.teacher.checkpoint RUN", distilled.workload.check, distilled)
    given = distilled.replace(workload={"teacher": {"checkpoint": "runs/teacher"}})
    given.workload.check(given)
    none = given.replace(workload={"teacher": {"weight": 0.0}})
    rejects(r"teacher.weight: must be above 0", none.workload.check, none)
    rejects(r"weight: must be at least 0 and at most 1, got 1\.5", TeacherConfig, checkpoint="runs/teacher", weight=1.5)
    for nothing in ("", (), ("runs/teacher", "")):
        rejects(r"teacher.checkpoint: must be one or more", TeacherConfig, checkpoint=nothing, weight=0.5)


def test_several_teachers_match_ensemble(click_log: Path, tmp_path: Path) -> None:
    small = {"embedding_dim": 4, "bottom_mlp": (8, 4), "top_mlp": (8, 1)}
    short = {"steps": 4, "batch_size": 256, "scaling": {"num_workers": 1}, "workload": {"model": small}, **LEAN}
    recipe = recipes.criteo_demo(str(click_log / "train.txt")).replace(storage_path=str(tmp_path), **short)

    def trained(name: str, **changes: Any) -> Result:
        return train(recipe.replace(name=name, **changes), console=QUIET)

    def student(name: str, *teachers: str) -> Result:
        given = teachers if len(teachers) > 1 else teachers[0]
        return trained(name, workload={"model": small, "teacher": {"checkpoint": given, "weight": 0.5}})

    first = trained("first").folder
    second = trained("second", seed=1, workload={"model": {**small, "embedding_dim": 8, "bottom_mlp": (8,)}}).folder
    rayrec.ensemble([first, second], out=str(tmp_path / "both"))
    several, one = student("several", first, second), student("one", str(tmp_path / "both"))
    assert several.summary["weights_sha256"] == one.summary["weights_sha256"]
    assert several.summary["weights_sha256"] != student("alone", first).summary["weights_sha256"]
    record = json.loads(Path(several.folder, RECORD).read_text())
    assert [Path(each["checkpoint"]).parents[1].name for each in record] == ["first", "second"]
    stored = recipes.load_config(Path(several.folder, "config.yaml").read_text())
    assert stored.workload.teacher.checkpoint == (first, second)  # type: ignore[attr-defined]

    elsewhere = save_clicks(tmp_path / "elsewhere", preprocessor=hashed_preprocessor([5] * 26))
    other = r"teacher.checkpoint: .*elsewhere.*: Preprocessor does not match .*first"
    rejects(other, student, "refused", first, str(elsewhere.run))
    rounded = trained("rounded", precision="bf16").folder
    rejects(r"rounded.*: precision bf16 does not match fp32 of .*first.*. Use models with one", student, "mixed", first, rounded)
