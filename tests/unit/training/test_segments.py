"""Order of segments, saves and evaluations, and early stopping. Without torch, Ray or a loop."""

import subprocess
import sys
from typing import Any

import pytest

from rayrec.optim.config import PlateauConfig
from rayrec.training.progress import Counters, EarlyStopping, Plateau, Progress, Target
from rayrec.training.segments import (
    End,
    Evaluate,
    Outcome,
    Save,
    Schedule,
    SegmentEnd,
    SegmentPlanner,
    Train,
    last_step,
    next_segment_end,
)


def test_decisions_import_neither_torch_nor_ray() -> None:
    modules = "rayrec.training.progress, rayrec.training.segments"
    check = f"import sys, {modules}; sys.exit(len({{'torch', 'ray'}} & sys.modules.keys()))"
    subprocess.run([sys.executable, "-c", check], check=True)


@pytest.mark.parametrize(
    ("step", "evaluate_every", "save_every", "expected"),
    [
        pytest.param(0, 8, None, SegmentEnd(8, True, True), id="0"),
        pytest.param(8, 8, None, SegmentEnd(16, True, True), id="8"),
        pytest.param(16, 8, None, SegmentEnd(20, True, True), id="16"),
        pytest.param(5, 8, None, SegmentEnd(8, True, True), id="5"),
        pytest.param(0, 8, 3, SegmentEnd(3, False, True), id="0-8"),
        pytest.param(6, 8, 3, SegmentEnd(8, True, False), id="6"),
        pytest.param(8, 8, 3, SegmentEnd(9, False, True), id="8-8"),
        pytest.param(18, 100, 100, SegmentEnd(20, True, True), id="18"),
    ],
)
def test_next_segment_end(
    step: int, evaluate_every: int, save_every: int | None, expected: Any
) -> None:
    assert (
        next_segment_end(step, 20, evaluate_every=evaluate_every, save_every=save_every) == expected
    )


@pytest.mark.parametrize(
    ("fraction", "step"),
    [
        pytest.param(None, 54, id="None"),
        pytest.param(1.0, 54, id="1.0"),
        pytest.param(1 / 27, 2, id="1-27"),
        pytest.param((1 / 3) ** 3, 2, id="1-3-3"),
        pytest.param(1 / 9, 6, id="1-9"),
        pytest.param(0.1, 6, id="0.1"),
        pytest.param(1e-9, 1, id="1e-09"),
    ],
)
def test_last_step_of_fraction(fraction: Any, step: int) -> None:
    assert last_step(54, fraction) == step


def test_patience_counts_from_last_sufficient_improvement() -> None:
    for scores, since_best, best in (
        ([0.50, 0.60, 0.65, 0.69], 2, 0.69),  # the two last are the best so far, but not by enough
        ([0.50, 0.60, 0.65, 0.71], 0, 0.71),  # small steps add up
        ([0.50, 0.55, 0.58, 0.59], 3, 0.59),
        ([0.50, 0.70, 0.60, 0.75], 2, 0.75),
    ):
        part = EarlyStopping()
        for step, score in enumerate(scores):
            part.update(score, step=step, metrics={}, min_improvement=0.0999)
        assert (part.since_best, part.best, part.best_step) == (since_best, best, 3)


@pytest.mark.parametrize(
    ("value", "sign", "step"), [(0.7, 1, 8), (0.6, 1, None), (0.6, -1, 8), (float("nan"), 1, None)]
)
def test_target_records_first_evaluation(value: float, sign: int, step: int | None) -> None:
    target = Target(0.65)
    target.update(value, sign=sign, counters=Counters(8, 80, train_s=3.0, evaluation_s=1.0))
    target.update(0.65, sign=1, counters=Counters(16, 160, train_s=6.0, evaluation_s=2.0))
    expected = Target(0.65, 16, 160, 8.0) if step is None else Target(0.65, 8, 80, 4.0)
    assert target == expected


def test_new_target_forgets_step_of_earlier() -> None:
    target = Target(0.65, 8, 80, 4.0)
    target.set(0.65)
    assert target.target_step == 8
    target.set(0.7)
    assert target == Target(0.7)


def test_plateau_without_patience_keeps_rates() -> None:
    plateau = Plateau(plateau_reference=1.0)
    assert not plateau.update(0.0, PlateauConfig())
    assert plateau == Plateau(plateau_reference=1.0)


# -- Plans: actions of a fake loop that trains and evaluates at once
SAVE = Save(needed=False, complete=False)
URGENT = Save(needed=True, complete=True)
EARLY = Save(needed=True, complete=False)
REGULAR = Evaluate(is_regular=True, early_save=EARLY)


def planned(
    *outcomes: Outcome, progress: Progress | None = None, scores: Any = (), **schedule: Any
) -> list[Any]:
    """Return all actions of a plan of 20 steps with evaluations every 8. Segments that `outcomes`,
    by number, cut end a step early.
    """
    plain = {"total": 20, "end": 20, "evaluate_every": 8, "save_every": None, "patience": 0}
    progress = progress or Progress()
    planner = SegmentPlanner(Schedule(**{**plain, **schedule}), progress)
    actions = [planner.first]
    pending = iter(outcomes)
    remaining = iter(scores)
    while not isinstance(actions[-1], End):
        outcome = Outcome()
        match actions[-1]:
            case Train(stop):
                outcome = next(pending, outcome)
                progress.counters.step = stop - (outcome.cut != "none")
            case Evaluate():
                outcome = next(pending, outcome)
                score = next(remaining, 0.5)
                if not outcome.interrupted:
                    progress.early_stopping.update(
                        score, step=progress.step, metrics={}, min_improvement=0.0
                    )
        actions.append(planner.next(outcome))
    return actions


def test_plan_evaluates_and_saves_each_segment() -> None:
    assert planned() == [
        *(Train(8), REGULAR, SAVE),
        *(Train(16), REGULAR, SAVE),
        *(Train(20), REGULAR, URGENT),
        End(finished=True),
    ]


def test_plan_separates_saves_from_evaluations() -> None:
    assert planned(evaluate_every=10, save_every=8) == [
        *(Train(8), SAVE),
        *(Train(10), REGULAR),
        *(Train(16), SAVE),
        *(Train(20), REGULAR, URGENT),
        End(finished=True),
    ]


@pytest.mark.parametrize(
    ("cut", "rest"),
    [
        ("save", [Train(8), REGULAR, SAVE, Train(16)]),
        ("stop", [End(finished=False)]),
    ],
)
def test_plan_saves_after_cut(cut: Any, rest: list[Any]) -> None:
    actions = planned(Outcome(cut=cut))
    assert actions[: 2 + len(rest)] == [Train(8), URGENT, *rest]


def test_plan_starts_with_evaluation_left_by_stop() -> None:
    saved = Evaluate(is_regular=True, early_save=None)
    progress = Progress(Counters(8), evaluation_due=True)
    assert planned(progress=progress)[:3] == [saved, SAVE, Train(16)]


@pytest.mark.parametrize("saved", [False, True])
def test_interrupted_evaluation_is_saved_once_and_stays_due(saved: bool) -> None:
    progress = Progress()
    actions = planned(Outcome(), Outcome(interrupted=True, saved=saved), progress=progress)
    assert actions[2:] == [*([] if saved else [URGENT]), End(finished=False)]
    assert progress.evaluation_due


def test_early_save_requires_save_with_score() -> None:
    actions = planned(Outcome(), Outcome(score=0.5, saved=True))
    assert actions[2] == Save(score=0.5, needed=True, complete=False)


def test_pause_between_evaluations_is_not_regular() -> None:
    irregular = Evaluate(is_regular=False, early_save=EARLY)
    assert planned(end=5) == [Train(5), irregular, URGENT, End(finished=False)]
    assert planned(end=8) == [Train(8), REGULAR, URGENT, End(finished=False)]
    assert planned(end=5, progress=Progress(Counters(5))) == [End(finished=False)]


def test_patience_ends_plan_after_saving() -> None:
    actions = planned(patience=1, scores=(0.6, 0.5))
    assert actions == [
        *(Train(8), REGULAR, Save(needed=True, complete=False)),
        *(Train(16), REGULAR, URGENT),
        End(finished=True, stopped_early=True),
    ]


@pytest.mark.parametrize(
    "progress",
    [
        Progress(Counters(8), EarlyStopping(since_best=1)),
        Progress(Counters(8), target=Target(0.5, target_step=8)),
    ],
)
def test_early_stop_of_earlier_attempt_ends_plan(progress: Progress) -> None:
    assert planned(progress=progress, patience=1) == [End(finished=True)]
