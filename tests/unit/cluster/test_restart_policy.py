"""Restart policy for each result of an attempt."""

import itertools

import pytest
from builders.faults import rejects

from rayrec.cluster.restart_policy import AttemptHistory, AttemptResult, Policy, Quit, describe, judge, pause_s, shell_status

POLICY = Policy(max_failures=2, healthy_after_s=100.0)


def ended(status: int | None, *, duration_s: float = 1.0) -> AttemptResult:
    return AttemptResult("failed", status=status, duration_s=duration_s, ran=status is not None)


@pytest.mark.parametrize(
    ("ending", "status"),
    [
        (AttemptResult("succeeded", status=0, duration_s=1.0, ran=True), 0),
        (AttemptResult("stopped", duration_s=1000.0, ran=True), 130),
        (ended(130, duration_s=1000.0), 130),
        (ended(2), 2),
        (ended(127), 2),
        (ended(126), 2),
    ],
)
def test_judge_quits_after_final_results(ending: AttemptResult, status: int) -> None:
    tally, decision = judge(POLICY, AttemptHistory(attempts=1), ending, jitter=0.5)
    assert (decision.status, tally) == (status, AttemptHistory(attempts=1))


@pytest.mark.parametrize("status", [1, 137, 139, 143, 255, None])
@pytest.mark.parametrize(("duration_s", "wait_s", "short_lived"), [(1.0, 5.0, 1), (99.9, 5.0, 1), (100.0, 0.0, 0)])
def test_judge_retries_other_results(status: int | None, duration_s: float, wait_s: float, short_lived: int) -> None:
    tally, decision = judge(POLICY, AttemptHistory(attempts=3), ended(status, duration_s=duration_s), jitter=0.5)
    assert decision == wait_s
    assert tally == AttemptHistory(attempts=3, short_lived=short_lived, accepted=status is not None or not short_lived)


def test_judge_retries_lost_head_and_stop_of_earlier_supervisor() -> None:
    lost = AttemptResult("lost", duration_s=5000.0, ran=True)
    assert judge(POLICY, AttemptHistory(1, short_lived=2), lost, jitter=0.0) == (AttemptHistory(1, 0, True), 0.0)
    short = AttemptResult("lost", duration_s=5.0, ran=True)
    assert judge(POLICY, AttemptHistory(1, short_lived=1), short, jitter=0.5) == (AttemptHistory(1, 2, True), 10.0)
    assert judge(POLICY, AttemptHistory(1), AttemptResult("lost"), jitter=0.5)[0] == AttemptHistory(1, 1, accepted=False)
    stopped = AttemptResult("stopped", duration_s=5.0, ran=True, stop_requested=True)
    assert judge(POLICY, AttemptHistory(3, short_lived=2), stopped, jitter=0.5) == (AttemptHistory(3), 0.0)
    failed = AttemptResult("failed", status=1, duration_s=5.0, ran=True, stop_requested=True)
    assert judge(POLICY, AttemptHistory(3), failed, jitter=0.5)[0].short_lived == 1


def run_through(policy: Policy, endings: list[AttemptResult]) -> tuple[int, Quit | None]:
    tally = AttemptHistory()
    for number, ending in enumerate(endings, start=1):
        tally, decision = judge(policy, tally, ending, jitter=0.5)
        if isinstance(decision, Quit):
            return number, decision
    return len(endings), None


def test_judge_quits_after_max_short_attempts_in_a_row() -> None:
    attempts, decision = run_through(POLICY, [ended(1)] * 10)
    assert attempts == 3
    failed = "ran for less than 100 s or ended with an error of yours"
    assert decision == Quit(1, f"3 attempts in a row {failed}; the last ended with exit status 1")
    assert run_through(Policy(max_failures=0), [ended(137)] * 10)[0] == 1
    assert run_through(Policy(max_failures=-1), [ended(1)] * 1000) == (1000, None)
    healthy, short = ended(1, duration_s=200.0), ended(1)
    assert run_through(POLICY, [short, short, healthy] * 50) == (150, None)


def test_accepted_flags_are_retried() -> None:
    """A recovering cluster may lack nodes or file systems, which fails an attempt like an invalid flag."""
    attempts, decision = run_through(POLICY, [ended(143, duration_s=500.0), *[ended(2)] * 10])
    assert (attempts, decision.status) == (4, 2)
    assert run_through(POLICY, [ended(None), ended(2)])[0] == 2  # Ray ended the first before the command ran


def test_judge_quits_if_finished_run_has_other_data() -> None:
    changed = AttemptResult("failed", status=2, duration_s=500.0, ran=True, run_finished=True)
    assert judge(POLICY, AttemptHistory(attempts=2, accepted=True), changed, jitter=0.5)[1] == Quit(2, describe(changed))


def test_long_attempt_accepts_flags_up_to_max_failures() -> None:
    """A remaining problem, such as a full disk, either disappears or ends every attempt after hours of training."""
    late = ended(2, duration_s=500.0)
    tally, decision = judge(POLICY, AttemptHistory(attempts=1), late, jitter=0.5)
    assert (tally, decision) == (AttemptHistory(1, short_lived=1, accepted=True), 5.0)
    attempts, quit_ = run_through(POLICY, [late] * 10)
    assert (attempts, quit_ and quit_.status) == (3, 2)
    assert run_through(POLICY, [late, late, ended(1, duration_s=500.0)] * 5) == (15, None)


def test_pauses_double_to_limit_with_jitter() -> None:
    def pauses(jitter: float) -> list[float]:
        return [pause_s(times, first_s=1.0, longest_s=30.0, jitter=jitter) for times in range(9)]

    assert pauses(0.5) == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    assert (pauses(0.0)[1:3], pauses(1.0)[1:3]) == ([0.75, 1.5], [1.25, 2.5])
    assert all(before <= after for before, after in itertools.pairwise(pauses(0.3)))
    assert pause_s(100_000, first_s=1.0, longest_s=30.0, jitter=0.5) == 30.0


def test_exit_statuses_are_described() -> None:
    assert [shell_status(status) for status in (None, 0, 2, -9, -15, 143)] == [None, 0, 2, 137, 143, 143]
    assert describe(ended(137)) == "was killed by SIGKILL"
    assert describe(ended(143)) == "was preempted (exit status 143)"
    assert describe(ended(255)) == "ended with exit status 255"
    assert "--python" in describe(ended(127))
    assert describe(AttemptResult("lost")) == "was lost with the head"


def test_policy_rejects_invalid_limits() -> None:
    for wrong in ({"max_failures": -2}, {"healthy_after_s": -1.0}, {"max_wait_s": -1.0}):
        rejects("", Policy, **wrong)
