"""One run under many plans and numbers of workers: every weight and optimizer state comes over to
the last bit.
"""

import functools
from pathlib import Path

import pytest
import torch
from ranks.checkpoint import run_ranks
from ranks.resharding import Stage, run_stages

from rayrec.checkpoint import Checkpoint, full_tensors

pytestmark = [pytest.mark.slow, pytest.mark.extended]

Saved = dict[str, dict[str, torch.Tensor]]
"""Checkpoints, whole, by name."""
WORLD = 3
"""Processes; a stage with fewer ranks leaves the last ones idle."""


def run_all(folder: Path, stages: list[Stage]) -> Saved:
    """Every stage's checkpoint, whole. A stage begins again or from a checkpoint, may train, and
    saves.
    """
    outputs = run_ranks(functools.partial(run_stages, stages), WORLD, str(folder), grouped=False)
    for stage in stages:
        # the planner did as it was told
        assert f"{stage['save']} {set(stage['plan'])}" in outputs[0]
    return {
        stage["save"]: dict(full_tensors(Checkpoint(f"{folder}/{stage['save']}")))
        for stage in stages
    }


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> set[str]:
    names = {name for name in one.keys() & other.keys() if not torch.equal(one[name], other[name])}
    return names | (one.keys() ^ other.keys())


def joined(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same with the column parts of a state as one, which they must be equal for."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        assert torch.equal(found.setdefault(name.partition(".columns_")[0], tensor), tensor), name
    return found


def state_of(
    tensors: dict[str, torch.Tensor], table: int, columns: str = "", *, state: str = "momentum1"
) -> torch.Tensor:
    return tensors[f"optimizer.embeddings.embedding_bags.cat_{table}.weight.{state}{columns}"]


ROUND_TRIPS = [
    ("rowwise_adagrad", "adam", "table_wise"),
    ("rowwise_adagrad", "adamw", "data_parallel"),
    ("sgd", "sgd", "data_parallel"),
    ("adagrad", "adagrad", "column_wise"),
    ("adam", "adam", "column_wise"),
]
RULES = [
    ("rowwise_adagrad", 1e-8),
    ("rowwise_adagrad", 0.0),
    ("adagrad", 1e-8),
    ("sgd", 1e-8),
    ("adam", 1e-2),
    ("sparse_adam", 1e-2),
]


def round_trip(sparse: str, dense: str, home: str) -> list[Stage]:
    """2 -> 1 -> 3 -> 2 ranks under all plans, then on; and a run that never leaves."""
    kinds = {"sparse": sparse, "dense": dense}
    at_home = {"ranks": 2, "plan": [home], **kinds}
    away = [plan for plan in ("data_parallel", "column_wise", "table_wise") if plan != home]
    name = f"{sparse}_{home}"
    return [
        {**at_home, "steps": (0, 4), "save": f"{name}_start"},
        {
            "ranks": 1,
            "plan": [away[0]],
            **kinds,
            "restore": f"{name}_start",
            "save": f"{name}_one",
        },
        {
            "ranks": 3,
            "plan": [away[1]],
            **kinds,
            "restore": f"{name}_one",
            "save": f"{name}_three",
        },
        {**at_home, "restore": f"{name}_three", "save": f"{name}_back"},
        {
            **at_home,
            "restore": f"{name}_back",
            "steps": (4, 7),
            "save": f"{name}_went",
        },
        {**at_home, "steps": (0, 7), "save": f"{name}_stayed"},
    ]


def column_parts() -> list[Stage]:
    kinds = {"sparse": "rowwise_adagrad", "dense": "adam"}
    halves = {"plan": ["column_wise"], "width": 8, **kinds}
    return [
        {
            **halves,
            "ranks": 2,
            "steps": (0, 4),
            "save": "halves_start",
        },
        {
            **halves,
            "ranks": 1,
            "restore": "halves_start",
            "save": "halves_one",
        },
        {
            **halves,
            "ranks": 3,
            "restore": "halves_one",
            "save": "halves_three",
        },
        {
            **halves,
            "ranks": 2,
            "restore": "halves_three",
            "steps": (4, 7),
            "save": "halves_went",
        },
        {
            **halves,
            "ranks": 2,
            "steps": (0, 7),
            "save": "halves_stayed",
        },
        {
            "ranks": 2,
            "plan": ["table_wise"],
            **kinds,
            "restore": "halves_start",
            "save": "halves_whole",
        },
        {
            "ranks": 1,
            "plan": ["data_parallel"],
            **kinds,
            "restore": "halves_start",
            "save": "halves_replicated",
        },
        {
            **halves,
            "ranks": 3,
            "width": 4,
            "restore": "halves_start",
            "save": "halves_narrow",
        },
        {
            "ranks": 3,
            "plan": ["row_wise"],
            **kinds,
            "restore": "halves_narrow",
            "save": "halves_rows",
        },
        {
            **halves,
            "ranks": 2,
            "restore": "halves_rows",
            "save": "halves_again",
        },
    ]


def same_rule(sparse: str, eps: float) -> list[Stage]:
    kinds = {
        "sparse": sparse,
        "dense": "adam",
        "eps": eps,
        "steps": (0, 8),
    }
    name = f"rule_{sparse}_{eps}"
    return [
        {
            "ranks": 2,
            "plan": ["table_wise"],
            **kinds,
            "save": f"{name}_fused",
        },
        {
            "ranks": 2,
            "plan": ["data_parallel"],
            **kinds,
            "save": f"{name}_replicated",
        },
        {
            "ranks": 1,
            "plan": ["data_parallel"],
            **kinds,
            "save": f"{name}_alone",
        },
    ]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """All at once, since a process takes longer to start than its stages do."""
    # The first has all processes: TorchRec makes a collective check of its own once in the life of
    # each.
    stages = [
        {
            "ranks": WORLD,
            "plan": ["table_wise"],
            "sparse": "sgd",
            "dense": "sgd",
            "save": "first",
        }
    ]
    stages += [stage for case in ROUND_TRIPS for stage in round_trip(*case)]
    stages += column_parts() + [stage for case in RULES for stage in same_rule(*case)]
    return run_all(tmp_path_factory.mktemp("stages"), stages)


@pytest.mark.parametrize(("sparse", "dense", "home"), ROUND_TRIPS)
def test_round_trip_over_all_plans_is_bitwise_equal(
    saved: Saved, sparse: str, dense: str, home: str
) -> None:
    start, one, three, back, went, stayed = (
        saved[stage["save"]] for stage in round_trip(sparse, dense, home)
    )
    assert not differing(joined(one), joined(start)) | differing(joined(three), joined(start))
    assert not differing(back, start) | differing(went, stayed)
    assert differing(went, start) >= {name for name in start if "cat_3.weight" in name}
    if sparse != "sgd":
        state = state_of(start, 3, state="exp_avg_sq" if sparse == "adam" else "momentum1")
        assert state.shape == ((90,) if sparse == "rowwise_adagrad" else (90, 16))
        assert state.count_nonzero() > 30
    if dense == "adam":
        assert {name.rpartition(".")[2] for name in start} >= {"exp_avg", "exp_avg_sq", "step"}


def test_column_part_states_join_as_mean(saved: Saved) -> None:
    start, one, three, went, stayed, whole, replicated, narrow, rows, again = (
        saved[stage["save"]] for stage in column_parts()
    )
    assert not differing(one, start) | differing(three, start) | differing(went, stayed)
    first, second = (state_of(start, 3, part) for part in (".columns_0_8", ".columns_8_16"))
    assert not torch.equal(first, second)
    mean = ((first.double() + second.double()) / 2).float()
    for tensors in (whole, replicated, rows):
        assert torch.equal(state_of(tensors, 3), mean)
        assert not {name for name in tensors if ".columns_" in name}
    for part in range(0, 16, 4):
        assert torch.equal(
            state_of(narrow, 3, f".columns_{part}_{part + 4}"), first if part < 8 else second
        )
    assert not differing(joined(again), whole)


@pytest.mark.parametrize(("sparse", "eps"), RULES)
def test_data_parallel_tables_match_fused_updates(saved: Saved, sparse: str, eps: float) -> None:
    fused, replicated, alone = (saved[stage["save"]] for stage in same_rule(sparse, eps))
    for tensors in (replicated, alone):
        assert tensors.keys() == fused.keys()
        for name in fused:
            torch.testing.assert_close(
                tensors[name],
                fused[name],
                rtol=1e-5,
                atol=1e-5,
                msg=name,
            )
